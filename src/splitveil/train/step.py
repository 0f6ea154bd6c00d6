r"""One training step.

    images ─augment─▶ x ─client─▶ z ─channel─▶ z̃ ─server─▶ answers ─▶ task loss ─────────────┐
                                  ├─scale_gradient─▶ surrogate ─▶ penalty ───────────────────┤
                                  └─▶ companions ─▶ own losses, penalties ───────────────────┤
                                                       one backward pass, one step ◀─────────┘

.. math:: L = L_{task} + s \cdot \mathrm{rob}(\mathrm{scale\_gradient}(z, k)), \quad
    \nabla_{enc} = \nabla L_{task} + k s \nabla \mathrm{rob}, \quad
    \nabla_{att} = s \nabla \mathrm{rob}, \quad \nabla_{head} = \nabla L_{task}
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from jaxtyping import Bool, Float, Int64
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from splitveil.config.resolve import TrainParts
from splitveil.config.run_config import RunConfig
from splitveil.cuda import SideStream, captured, channels_last, set_rate, to_device
from splitveil.defences.base import Companion
from splitveil.errors import ConfigError
from splitveil.functional import scale_gradient
from splitveil.nets.exit import TappedClient
from splitveil.nets.split import SplitModel
from splitveil.rng import stream
from splitveil.surrogates.base import HasBank, Surrogate, SurrogateOutput

if TYPE_CHECKING:
    from lightning_fabric import Fabric  # its import takes seconds; only a training needs it

Logits = Float[Tensor, "n k"]
Values = dict[str, Tensor]

STREAMS = ("augment", "channel", "surrogate")
LOW_RATIO = 0.5  # surrogate-to-true rate below which a surrogate may have collapsed


@dataclass(frozen=True)
class Weights:
    """How strongly the penalty acts in one step.

    Args:
        encoder: Factor k on the penalty's gradient at z; the surrogate's parameters are not
            affected.
        scale: Factor s on the penalty itself. The encoder is trained with encoder · scale.

    Both are numbers, or 0-dimensional tensors for a step that is replayed from a graph.
    """

    encoder: float | Tensor
    scale: float | Tensor

    @property
    def effective(self) -> float:
        """λ·w_lr·attention_loss_scale: what multiplies ∇rob in the encoder."""
        return float(self.encoder * self.scale)


@dataclass(frozen=True)
class NonFiniteCounter:
    """Counters on the device of what went wrong with the penalty, read when a line is logged.

    Args:
        loss: Steps whose penalty was not finite.
        gradient: Steps whose gradient of the penalty at z was not finite.
        low: Steps in a row in which the surrogate reported under half of the true rate.
    """

    loss: Tensor
    gradient: Tensor
    low: Tensor

    @classmethod
    def on(cls, device: torch.device | str) -> "NonFiniteCounter":
        """All at zero."""
        zero = torch.zeros((), dtype=torch.long, device=device)
        return cls(zero, zero.clone(), zero.clone())


class Meters:
    """Means of logged values since the last reset.

    The sums stay on the device, because reading one makes the host wait. `counts` is kept by the
    host apart from `add`, which a captured graph replays without Python. `missed` counts the
    values that were not finite: one bad step must not hide a whole epoch of the penalty. Only the
    task loss is never left out, because a run must stop when it is not finite.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self.sums: dict[str, Tensor] = {}
        self.missed: dict[str, Tensor] = {}
        self.counts: Counter[str] = Counter()

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add each finite value to its sum, on the device; count the others."""
        for name, value in values.items():
            if name not in self.sums:
                self.sums[name] = torch.zeros((), dtype=torch.float64, device=self._device)
            if name not in self.missed:
                self.missed[name] = torch.zeros((), dtype=torch.long, device=self._device)
            left_out = ~torch.isfinite(value.detach()) & (name != "task_loss")
            self.sums[name].add_(torch.where(left_out, 0.0, value.detach()))
            self.missed[name].add_(left_out)

    def means(self) -> dict[str, float | None]:
        """Mean of the finite values since the last reset; None where there was none."""
        means: dict[str, float | None] = {}
        for name, count in self.counts.items():
            finite = count - int(self.missed[name])
            mean = float(self.sums[name]) / finite if finite else math.nan
            means[name] = mean if math.isfinite(mean) else None
        return means

    def reset(self) -> None:
        """Start anew. The sums keep their place in memory: a captured graph writes into it."""
        for total in [*self.sums.values(), *self.missed.values()]:
            total.zero_()
        self.counts.clear()


@dataclass
class TrainState:
    """Everything that changes while a run trains; a checkpoint stores all of it.

    Args:
        model: The split model.
        surrogate: Computes the penalty; None without one.
        companion: Trains beside the model; None without one.
        optimisers: The model's first, a companion's last.
        streams: Random generators by name, see `STREAMS`.
        guard: Counters of broken penalties.
        meters: Means for the log.
        aside: On a GPU, where the penalty is computed while the head works.
        step: Steps done.
        seconds: Seconds of training, over all sittings.
        warned: Skipped penalties at the last warning.
        collapsed: Whether the user was warned that the surrogate has collapsed.
        log_offset: Bytes of `metrics.jsonl` at the last checkpoint.
        peak_bytes: Most GPU memory of earlier sittings; None on a CPU.
    """

    model: nn.Module
    surrogate: nn.Module | None
    companion: nn.Module | None
    optimisers: list[torch.optim.Optimizer]
    streams: dict[str, Generator]
    guard: NonFiniteCounter
    meters: Meters
    aside: SideStream | None
    step: int = 0
    seconds: float = 0.0
    warned: int = 0
    collapsed: bool = False
    log_offset: int = 0
    peak_bytes: int | None = None

    def parts(self) -> dict[str, nn.Module]:
        """Model, surrogate and companion by name, without those that are None."""
        every = {"model": self.model, "surrogate": self.surrogate, "companion": self.companion}
        return {name: part for name, part in every.items() if part is not None}

    def skipped(self) -> int:
        """Penalties or gradients that were not finite and were left out; the host waits for it."""
        own = getattr(self.surrogate, "skips", None)
        return int(self.guard.loss) + int(self.guard.gradient) + int(0 if own is None else own)


def new_state(parts: TrainParts, config: RunConfig, device: torch.device) -> TrainState:
    """The state of a run before its first step, on the device.

    The model is trained by SGD. The surrogate's own parameters join it as a second group, as in the
    reference documents, or get Adam at the penalty's `attention_lr`. A companion gets Adam.

    Args:
        parts: Freshly built model, surrogate and companion; they are moved in place.
        config: The resolved settings: seed, momentum, Nesterov and weight decay.
        device: Where to train.
    """
    model, surrogate, companion = parts.model, parts.surrogate, parts.companion
    on_gpu = device.type == "cuda"
    for part in (model, surrogate, companion):
        if part is not None:
            to_device(part, device)
    forget_peak(device)
    attention_lr = parts.penalty.attention_lr
    groups = [{"params": list(model.parameters())}]
    own = [] if surrogate is None else list(surrogate.parameters())
    if own and attention_lr is None:
        groups.append({"params": own})
    optimisers: list[torch.optim.Optimizer] = [
        torch.optim.SGD(
            groups,
            lr=torch.zeros((), device=device) if on_gpu else 0.0,  # a replayed step reads a tensor
            momentum=config.momentum,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
            fused=on_gpu or None,
        )
    ]
    if own and attention_lr is not None:
        optimisers.append(_adam([own], attention_lr, device))
    if companion is not None:
        learning = [list(part.parameters()) for part in companions(companion)]
        optimisers.append(_adam(learning, 0.0, device))
    return TrainState(
        model,
        surrogate,
        companion,
        optimisers,
        streams={name: stream(config.seed, name, device) for name in STREAMS},
        guard=NonFiniteCounter.on(device),
        meters=Meters(device),
        aside=SideStream(device) if on_gpu else None,
    )


def _adam(parts: Sequence[list[nn.Parameter]], lr: float, device: torch.device) -> torch.optim.Adam:
    """One Adam with a group, and so a learning rate, for each part; a part may be empty."""
    on_gpu = device.type == "cuda"
    groups = [
        {"params": own, "lr": torch.full((), lr, device=device) if on_gpu else lr} for own in parts
    ]
    return torch.optim.Adam(groups, capturable=on_gpu, fused=on_gpu or None)


def companions(companion: nn.Module | None) -> list[nn.Module]:
    """The companions in a stack of them: its `parts`, or itself; none for None."""
    if companion is None:
        return []
    parts = getattr(companion, "parts", None)
    return list(parts) if isinstance(parts, nn.ModuleList) else [companion]


def forget_peak(device: torch.device) -> None:
    """Measure a GPU's peak memory from now on: work before this run is not part of its peak."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def divergence(own: Logits, taught: Logits, temperature: float) -> Float[Tensor, ""]:
    r"""Distance of answers to a teacher's, both softened (Hinton, Vinyals and Dean, 2015).

    .. math:: T^2\,\mathrm{KL}(\mathrm{softmax}(t/T)\,\|\,\mathrm{softmax}(s/T))

    T² keeps the size of the gradients independent of T.

    Args:
        own: Logits s of the model, (n, k).
        taught: Logits t of the teacher, (n, k).
        temperature: T > 0.

    Returns:
        The mean over the n images, in nats, 0 or more.

    >>> even, sure = torch.zeros(1, 2), torch.tensor([[3.0, 1.0]]).log()
    >>> round(float(divergence(even, sure, 1.0)), 6)
    0.130812
    """
    # At least float32: the divergence is a small difference of logarithms.
    own, taught = (v.to(torch.promote_types(v.dtype, torch.float32)) for v in (own, taught))
    softened, answers = (F.log_softmax(v / temperature, 1) for v in (taught, own))
    return temperature**2 * F.kl_div(answers, softened, reduction="batchmean", log_target=True)


@dataclass(frozen=True, kw_only=True)
class TaskLoss:
    r"""The loss of the server's answers.

    .. math:: L = (1 - w)\,\mathrm{CE}_\varepsilon(s, y)
        + w\,T^2\,\mathrm{KL}(\mathrm{softmax}(t/T)\,\|\,\mathrm{softmax}(s/T))

    Without a teacher w is 0.

    Args:
        smoothing: Share ε of each label that is spread over all classes, in [0, 1).
        teacher: Gives logits t (n, k) for images (n, c, h, w).
        share: Weight w of the teacher's answers, in (0, 1].
        temperature: T > 0.

    >>> TaskLoss().loss(torch.zeros(1, 2), torch.tensor([0]), None).item()  # log 2
    0.6931471824645996
    """

    smoothing: float = 0.0
    teacher: Callable[[Tensor], Tensor] | None = None
    share: float = 0.5
    temperature: float = 1.0

    @torch.no_grad()
    def taught(self, x: Tensor) -> Tensor | None:
        """The teacher's logits for images x; None without a teacher."""
        return None if self.teacher is None else self.teacher(x)

    def loss(self, own: Logits, y: Int64[Tensor, " n"], taught: Logits | None) -> Float[Tensor, ""]:
        """The loss of logits `own` (n, k) for labels y (n,) and the teacher's logits."""
        labels = F.cross_entropy(own, y, label_smoothing=self.smoothing)
        if taught is None:
            return labels
        return (1 - self.share) * labels + self.share * divergence(own, taught, self.temperature)


LABELS = TaskLoss()  # plain cross-entropy


@dataclass(frozen=True, kw_only=True)
class TrainSet:
    """The training data on the device.

    Args:
        images: uint8 images (n, c, h, w).
        labels: Labels (n,).
        crop_pad: Pixels of padding for random crops.
        flip: Whether half of the images are mirrored.
        mirrored: Which images the present epoch mirrors (n,); None draws them anew in every step.
    """

    images: Tensor
    labels: Tensor
    crop_pad: int
    flip: bool
    mirrored: Tensor | None = None


def mirrored_in(first: Bool[Tensor, " n"], epoch: int) -> Bool[Tensor, " n"]:
    """Which images an epoch mirrors if each is mirrored in every other epoch.

    After Jordan (2024): two epochs in a row then show every image both ways, which random flips do
    for half of the images only.

    >>> first = torch.tensor([True, False])
    >>> mirrored_in(first, 1).tolist(), mirrored_in(first, 2).tolist()
    ([True, False], [False, True])
    """
    return first ^ (epoch % 2 == 0)


def crop_and_flip(
    x: Float[Tensor, "n c h w"],
    *,
    crop_pad: int,
    flip: bool,
    generator: Generator,
    mirrored: Bool[Tensor, " n"] | None = None,
) -> Float[Tensor, "n c h w"]:
    """Pad each image with zeros and cut out a random window of its size; mirror half of the images.

    Args:
        x: Images (n, c, h, w).
        crop_pad: Pixels of padding on each side; 0 switches the crop off.
        flip: Whether to mirror.
        generator: Draws the windows (rows, then columns), then the mirrored images. A CPU generator
            gives the same result on any device.
        mirrored: Which images to mirror, where `flip` says so; None draws them.

    Returns:
        Images of the same shape; x itself, without a draw, if both are switched off.

    >>> x = torch.arange(4.0).reshape(1, 1, 2, 2)
    >>> crop_and_flip(x, crop_pad=0, flip=False, generator=torch.Generator()) is x
    True
    """
    n, c, h, w = x.shape
    if crop_pad:
        size = 2 * crop_pad + 1
        top, left = _draw(size, (2, n), generator, x.device)
        rows = torch.arange(h, device=x.device) + top[:, None]  # (n, h)
        columns = torch.arange(w, device=x.device) + left[:, None]  # (n, w)
        x = F.pad(x, (crop_pad,) * 4)
        x = x.gather(2, rows[:, None, :, None].expand(n, c, h, x.shape[3]))
        x = x.gather(3, columns[:, None, None, :].expand(n, c, h, w))
    if flip:
        if mirrored is None:
            mirrored = _draw(2, (n,), generator, x.device).bool()
        x = torch.where(mirrored[:, None, None, None], x.flip(3), x)
    return x


def _draw(high: int, shape: tuple[int, ...], generator: Generator, device: torch.device) -> Tensor:
    """Integers in [0, high), drawn on the device of the generator, then moved to `device`."""
    drawn = torch.randint(high, shape, generator=generator, device=generator.device)
    # Without non_blocking the host would wait for all work that is queued on the device.
    return drawn.to(device, non_blocking=True)


class StepLoss(nn.Module):
    """The loss of one batch: a module, so that Fabric can wrap it for several processes.

    Args:
        model: The split model, or its compiled twin.
        state: Its surrogate and companion look at z.
        fabric: The device and its precision.
        task: The loss of the server's answers.
        remembers: Whether a surrogate with a bank stores batches until the penalty starts.
    """

    def __init__(
        self,
        model: SplitModel,
        state: TrainState,
        fabric: "Fabric",
        *,
        task: TaskLoss = LABELS,
        remembers: bool = False,
    ) -> None:
        super().__init__()
        self.model, self.state, self.fabric = model, state, fabric
        self._task, self._remembers = task, remembers

    def forward(self, x: Tensor, y: Tensor, weights: Weights | None) -> tuple[Tensor, Values]:
        """The loss of one batch, and the values to log.

        With several processes the task loss is that of this rank's images; penalty and companions
        see the whole batch, because class statistics of half a batch are other numbers.

        Args:
            x: Augmented images (n, c, h, w) in [0, 1].
            y: Their labels (n,).
            weights: The penalty's weights; None while it is not active.
        """
        state, fabric = self.state, self.fabric
        with fabric.autocast():
            z, own = self._encoded(x)
            whole, labels = gathered(z, fabric, sync_grads=True), gathered(y, fabric)
            rob, log = self._penalty(self._focused(whole, own), labels, weights)
            extra, more = companion_losses(state, whole, gathered(x, fabric), labels)
            sent = self.model.channel(z, state.streams["channel"])
            answers = self.model.head(sent).float()
            taught = self._task.taught(x)
        task = self._task.loss(answers, y, taught)
        if state.aside is not None and rob:
            state.aside.join()
        right = (answers.detach().argmax(1) == y).float().mean()
        seen = {"task_loss": task, "train_accuracy": right} | log | more
        if own is not None and self.model.exit is not None:
            here = self._task.loss(own.float(), y, taught)
            seen["own_loss"] = here
            extra = [*extra, self.model.exit.weight * here]
        return sum(rob + extra, task), seen

    def _encoded(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Clean z, and the logits of the client's own head if it has one."""
        client = self.model.encoder
        if self.model.exit is None or not isinstance(client, TappedClient):
            return client(x), None
        z, features = client.both(x)
        return z, self.model.exit.head(features)

    def _focused(self, z: Tensor, own: Tensor | None) -> Tensor:
        """Z of all ranks as the penalty sees it: its gradient leans on images that are unsure."""
        exit = self.model.exit
        if exit is None or own is None or exit.focus == 0:
            return z
        rows = exit.row_weights(gathered(own, self.fabric)).to(z.dtype)
        return scale_gradient(z, rows.view(-1, *[1] * (z.ndim - 1)))

    def _penalty(
        self, z: Tensor, y: Tensor, weights: Weights | None
    ) -> tuple[list[Tensor], Values]:
        """The weighted penalty on z, if it is active, and the values to log."""
        state = self.state
        if state.surrogate is None or weights is None:
            if self._remembers and isinstance(state.surrogate, HasBank):
                state.surrogate.remember(z.detach(), y)
            return [], {}
        # On a GPU its many small kernels run beside the head's large ones.
        with state.aside.beside(z) if state.aside else nullcontext(z) as seen:
            rob, out = penalty(seen, y, state.surrogate, weights=weights, guard=state.guard)
        scalars = {k: v for k, v in out.diagnostics.items() if v.ndim == 0}
        return [rob], {"rob_loss": out.loss, "intra_mse": out.intra_mse} | scalars


class Stepper:
    """One training step: batch, loss, one backward pass, and the update.

    On one GPU the step is captured in a graph, once with the penalty and once without, and
    replayed: what changes between steps (rows, learning rate, weights) lies in tensors. Elsewhere
    it runs as written.

    Args:
        loss: The loss of one batch; the step changes its state.
        data: The training images, on the device.
        capture: False runs the step as written everywhere.
    """

    def __init__(self, loss: StepLoss, data: TrainSet, *, capture: bool = True) -> None:
        state, fabric = loss.state, loss.fabric
        alone = fabric.world_size == 1
        self._loss = loss if alone else fabric.setup_module(loss)
        self._data, self._state, self._fabric = data, state, fabric
        self._optimisers = [
            cast(torch.optim.Optimizer, fabric.setup_optimizers(o)) for o in state.optimisers
        ]
        on_gpu = fabric.device.type == "cuda"
        self._capture = capture and on_gpu and alone
        self._rows: Tensor | None = None
        self._weights = Weights(*torch.zeros(2, device=fabric.device))
        self._replays: dict[bool, Callable[[], None]] = {}
        self._logged: dict[bool, tuple[str, ...]] = {}

    def __call__(self, rows: Tensor, lr: float, weights: Weights | None) -> None:
        """Train on one batch.

        Args:
            rows: Row numbers of its images (n,); n is the same in every call.
            lr: Learning rate of the model.
            weights: The penalty's weights; None while it is not active.
        """
        self._rows = rows.clone() if self._rows is None else self._rows.copy_(rows)
        model_optimiser = self._state.optimisers[0]
        if self._capture:
            set_rate(model_optimiser, lr)
            self._replay(weights)
        else:
            for group in model_optimiser.param_groups:
                group["lr"] = lr
            self._step(weights)
        self._state.meters.counts.update(self._logged[weights is not None])

    def _replay(self, weights: Weights | None) -> None:
        penalised = weights is not None
        if weights is not None:
            cast(Tensor, self._weights.encoder).fill_(weights.encoder)
            cast(Tensor, self._weights.scale).fill_(weights.scale)
        if penalised not in self._replays:
            step = partial(self._step, self._weights if penalised else None)
            streams = list(self._state.streams.values())
            self._replays[penalised] = captured(step, self._fabric.device, streams)
        self._replays[penalised]()

    def _step(self, weights: Weights | None) -> None:
        for optimiser in self._optimisers:
            optimiser.zero_grad()
        data, state = self._data, self._state
        images = data.images[self._rows].float().div_(255)
        draws = state.streams["augment"]
        x = crop_and_flip(
            images, crop_pad=data.crop_pad, flip=data.flip, generator=draws,
            mirrored=None if data.mirrored is None else data.mirrored[self._rows],
        )  # fmt: skip
        loss, values = self._loss(channels_last(x), data.labels[self._rows], weights)
        self._fabric.backward(loss)
        for optimiser in self._optimisers:
            optimiser.step()
        state.meters.add(values)
        self._logged[weights is not None] = tuple(values)


def penalty(
    z: Tensor, y: Tensor, surrogate: Surrogate, *, weights: Weights, guard: NonFiniteCounter
) -> tuple[Tensor, SurrogateOutput]:
    """The weighted penalty on z; a value or gradient that is not finite becomes 0.

    The task's gradient is then exactly what it is without a penalty.

    Args:
        z: Smashed data (n, …) before the channel.
        y: Labels (n,).
        surrogate: Estimates how much z tells about the image.
        weights: See `Weights`.
        guard: Counts what was not finite.

    Returns:
        scale · rob, whose gradient reaches z `weights.encoder` times as large; and all that the
        surrogate reported.
    """
    out = _check_output(surrogate(scale_gradient(z, weights.encoder, guard.gradient), y))
    if z.requires_grad and not out.loss.requires_grad and _says_something(out.loss):
        raise ConfigError(
            "a surrogate's loss must have a gradient, got one without, so the encoder cannot learn "
            "from it; compute it from z without detach, no_grad or numpy"
        )
    finite = torch.isfinite(out.loss.detach())
    guard.loss.add_(~finite)
    if "surrogate_to_true" in out.diagnostics:
        low = out.diagnostics["surrogate_to_true"] < LOW_RATIO
        guard.low.copy_(torch.where(low, guard.low + 1, 0))
    rob = torch.where(finite, out.loss, torch.zeros_like(out.loss))
    return weights.scale * rob, out


def companion_losses(
    state: TrainState, z: Tensor, x: Tensor, y: Tensor
) -> tuple[list[Tensor], Values]:
    """A companion's own loss, then the penalty of each companion in it; and the values to log."""
    if state.companion is None:
        return [], {}
    own = cast(Companion, state.companion).own_loss(z.detach(), x, y)
    paid = []
    for part in companions(state.companion):  # guarded one by one: a broken one harms no other
        guarded = scale_gradient(z, 1.0, state.guard.gradient)
        paid.append(cast(Companion, part).penalty(guarded, x, y))
    finite = [torch.where(torch.isfinite(p), p, torch.zeros_like(p)) for p in paid]
    return [own, *finite], {"companion_loss": own, "companion_penalty": torch.stack(paid).sum()}


def _check_output(out: object) -> SurrogateOutput:
    """The output of a surrogate; anything else raises a ConfigError."""
    if not isinstance(out, SurrogateOutput):
        raise ConfigError(
            f"a surrogate must return a SurrogateOutput, got {type(out).__name__}; "
            "write return SurrogateOutput(loss=…, intra_mse=…, diagnostics={})"
        )
    for name, value in {"loss": out.loss, "intra_mse": out.intra_mse, **out.diagnostics}.items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"a surrogate's {name} must be a tensor, got {type(value).__name__}; "
                "leave it on the device: drop float() or .item()"
            )
    if out.loss.ndim:
        raise ConfigError(
            f"a surrogate's loss must be one number, got shape {tuple(out.loss.shape)}; "
            "take its mean or its sum"
        )
    return out


def _says_something(loss: Tensor) -> bool:
    """Whether a loss without a gradient is finite and not 0.

    A batch without two images of one class may well give the constant 0, which is no mistake.
    """
    # A capture must not read values; the eager steps before it have checked.
    if loss.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return bool(torch.isfinite(loss) & (loss != 0))


def own_rows(rows: Tensor, fabric: "Fabric") -> Tensor:
    """This rank's rows of a batch: every world_size-th one, so that all ranks get equally many."""
    world = fabric.world_size
    return rows[: len(rows) // world * world][fabric.global_rank :: world]


def gathered(data: Tensor, fabric: "Fabric", *, sync_grads: bool = False) -> Tensor:
    """The rows of all ranks; with `sync_grads` gradients flow back to the rank of each row."""
    # The gather's backward sums over ranks and DDP's averaging divides by their number, so nothing
    # needs rescaling.
    if fabric.world_size == 1:
        return data
    return cast(Tensor, fabric.all_gather(data, sync_grads=sync_grads)).flatten(0, 1)
