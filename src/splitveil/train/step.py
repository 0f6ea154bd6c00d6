r"""One training step.

    images ─augment─▶ x ─client─▶ z ─channel─▶ z̃ ─server─▶ answers ─▶ task loss ─────────────┐
                                  ├─scale_gradient─▶ surrogate ─▶ penalty ───────────────────┤
                                  └─▶ companions ─▶ what they learn, what the encoder pays ──┤
                                                       one backward pass, one step ◀─────────┘

.. math:: L = L_{task} + s \cdot \mathrm{rob}(\mathrm{scale\_gradient}(z, k)), \quad
    \nabla_{enc} = \nabla L_{task} + k s \nabla \mathrm{rob}, \quad
    \nabla_{att} = s \nabla \mathrm{rob}, \quad \nabla_{head} = \nabla L_{task}
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from jaxtyping import Float, Int64
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from splitveil.config.resolve import TrainParts
from splitveil.config.run_config import RunConfig
from splitveil.cuda import SideStream, captured, set_rate, to_device
from splitveil.defences.base import Companion
from splitveil.errors import ConfigError
from splitveil.functional import scale_gradient
from splitveil.nets.split import SplitModel
from splitveil.rng import stream
from splitveil.surrogates.base import HasBank, Surrogate, SurrogateOutput

if TYPE_CHECKING:
    from lightning_fabric import Fabric  # which takes seconds, and only a training needs it

Logits = Float[Tensor, "n k"]
Values = dict[str, Tensor]

STREAMS = ("augment", "channel", "surrogate")
LOW_RATIO = 0.5


@dataclass(frozen=True)
class Weights:
    """How one step composes its losses: the gradient of z is scaled by `encoder`, rob by `scale`.

    Effective weight on the encoder: encoder · scale. Numbers, or tensors for a step that is
    replayed.
    """

    encoder: float | Tensor
    scale: float | Tensor

    @property
    def effective(self) -> float:
        """λ·w_lr·attention_loss_scale: what multiplies ∇rob in the encoder."""
        return float(self.encoder * self.scale)


@dataclass(frozen=True)
class NonFiniteCounter:
    """Counters on the device, read at the logging cadence: a broken penalty is never silent.

    `loss` counts steps whose rob was not finite, `gradient` those whose gradient at z was not,
    `low` the steps in a row in which the surrogate reported less than half of the true rate.
    """

    loss: Tensor
    gradient: Tensor
    low: Tensor

    @classmethod
    def on(cls, device: torch.device | str) -> "NonFiniteCounter":
        """All at zero."""
        zero = torch.zeros((), dtype=torch.long, device=device)
        return cls(zero, zero.clone(), zero.clone())

    def watch(self, ratio: Tensor) -> None:
        """Count another step with a low surrogate-to-true ratio, or start anew."""
        self.low.copy_(torch.where(ratio < LOW_RATIO, self.low + 1, 0))


class Meters:
    """Running sums on the device; reading one costs a sync, so it is done at the log cadence."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add one observation of each value to its sum, on the device."""
        for name, value in values.items():
            if name not in self.sums:
                self.sums[name] = torch.zeros((), dtype=torch.float64, device=self._device)
            self.sums[name].add_(value.detach())

    def tick(self, names: Iterable[str]) -> None:
        """Count the observation of these values: apart from `add`, which a graph may replay."""
        for name in names:
            self.counts[name] = self.counts.get(name, 0) + 1

    def means(self) -> dict[str, float | None]:
        """Mean of each value since the last reset; null where it is not finite."""
        read = {name: float(self.sums[name]) / count for name, count in self.counts.items()}
        return {k: v if abs(v) < float("inf") else None for k, v in read.items()}

    def reset(self) -> None:
        """Start anew; the sums stay where they are."""
        for total in self.sums.values():
            total.zero_()
        self.counts.clear()


@dataclass
class TrainState:
    """The moving parts of a run."""

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
        """Model, surrogate and companion, those that there are."""
        every = {"model": self.model, "surrogate": self.surrogate, "companion": self.companion}
        return {name: part for name, part in every.items() if part is not None}

    def skipped(self) -> int:
        """How often a penalty's loss or gradient was not finite and was left out (syncs)."""
        own = getattr(self.surrogate, "skips", None)
        return int(self.guard.loss) + int(self.guard.gradient) + int(0 if own is None else own)


def new_state(parts: TrainParts, config: RunConfig, device: torch.device) -> TrainState:
    """A run before its first step, its parts moved to the device.

    SGD for the model; the surrogate's own parameters join it as a second group with the same
    settings (the reference documents), or get Adam at the penalty's `attention_lr`. A companion's
    optimiser is the last one.
    """
    model, surrogate, companion = parts.model, parts.surrogate, parts.companion
    on_gpu = device.type == "cuda"
    for part in (model, surrogate, companion):
        if part is not None and on_gpu:
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
    """One for all parts; each has a rate of its own, and a part may have no parameters."""
    on_gpu = device.type == "cuda"
    groups = [
        {"params": own, "lr": torch.full((), lr, device=device) if on_gpu else lr} for own in parts
    ]
    return torch.optim.Adam(groups, capturable=on_gpu, fused=on_gpu or None)


def companions(companion: nn.Module | None) -> list[nn.Module]:
    """Those that stand in one: its `parts`, itself if it has none, nothing of None."""
    if companion is None:
        return []
    parts = getattr(companion, "parts", None)
    return list(parts) if isinstance(parts, nn.ModuleList) else [companion]


def forget_peak(device: torch.device) -> None:
    """Let the peak of a GPU's memory start from what is held now: what ran before is no part."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def divergence(own: Logits, taught: Logits, temperature: float) -> Float[Tensor, ""]:
    r"""How far answers are from a teacher's, both softened (Hinton, Vinyals and Dean, 2015).

    .. math:: T^2\,\mathrm{KL}(\mathrm{softmax}(t/T)\,\|\,\mathrm{softmax}(s/T))

    Logits s of its own and t taught, both (n, k); the mean over n. T² keeps gradients as large.

    >>> even, sure = torch.zeros(1, 2), torch.tensor([[3.0, 1.0]]).log()
    >>> round(float(divergence(even, sure, 1.0)), 6)
    0.130812
    """
    # In float32 at least: differences of logarithms are small.
    own, taught = (v.to(torch.promote_types(v.dtype, torch.float32)) for v in (own, taught))
    softened, answers = (F.log_softmax(v / temperature, 1) for v in (taught, own))
    return temperature**2 * F.kl_div(answers, softened, reduction="batchmean", log_target=True)


@dataclass(frozen=True, kw_only=True)
class TaskLoss:
    r"""The loss of the answers to a batch.

    .. math:: L = (1 - w)\,\mathrm{CE}_\varepsilon(s, y)
        + w\,T^2\,\mathrm{KL}(\mathrm{softmax}(t/T)\,\|\,\mathrm{softmax}(s/T))

    CE_ε is the cross entropy against labels of which the share ε = `smoothing` is spread over all
    classes; t are the answers of the `teacher`, w is its `share` and T its `temperature`. Without
    a teacher w is 0.

    >>> TaskLoss().loss(torch.zeros(1, 2), torch.tensor([0]), None).item()  # log 2
    0.6931471824645996
    """

    smoothing: float = 0.0
    teacher: Callable[[Tensor], Tensor] | None = None
    share: float = 0.5
    temperature: float = 1.0

    @torch.no_grad()
    def taught(self, x: Tensor) -> Tensor | None:
        """The teacher's answers to images x; None without one."""
        return None if self.teacher is None else self.teacher(x)

    def loss(self, own: Logits, y: Int64[Tensor, " n"], taught: Logits | None) -> Float[Tensor, ""]:
        """Of the logits `own` for images with labels y."""
        labels = F.cross_entropy(own, y, label_smoothing=self.smoothing)
        if taught is None:
            return labels
        return (1 - self.share) * labels + self.share * divergence(own, taught, self.temperature)


LABELS = TaskLoss()  # the labels as they are, and nobody's answers


@dataclass(frozen=True, kw_only=True)
class TrainSet:
    """uint8 images (n, c, h, w) and labels (n,) on the device, and how a batch is augmented."""

    images: Tensor
    labels: Tensor
    augment: Callable[[Tensor, Generator], Tensor]


class StepLoss(nn.Module):
    """The loss of one batch: a module, so that Fabric can wrap it for several processes.

    Args:
        model: The split model, or its compiled twin.
        state: What the step moves; its surrogate and its companion look at z.
        fabric: The device and its precision.
        task: What the answers are held against.
        remembers: Whether a surrogate with a memory keeps batches until the penalty starts.
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
        self.model, self._state, self._fabric = model, state, fabric
        self._task, self._remembers = task, remembers

    def forward(self, x: Tensor, y: Tensor, weights: Weights | None) -> tuple[Tensor, Values]:
        """The loss of one batch, and what to log of it.

        With several processes the task's loss is that of this rank's images; penalty and
        companions see the whole batch.

        Args:
            x: Images (n, c, h, w) as floats in [0, 1], augmented.
            y: Their labels (n,).
            weights: The penalty's weights; None while it is not active.
        """
        with self._fabric.autocast():
            z = self.model.encoder(x)
            terms, values = self._beside(z, x, y, weights)
            sent = self.model.channel(z, self._state.streams["channel"])
            answers = self.model.head(sent).float()
            taught = self._task.taught(x)
        loss = self._task.loss(answers, y, taught)
        if self._state.aside is not None and "rob_loss" in values:
            self._state.aside.join()
        right = (answers.detach().argmax(1) == y).float().mean()
        return sum(terms, loss), {"task_loss": loss, "train_accuracy": right} | values

    def _beside(
        self, z: Tensor, x: Tensor, y: Tensor, weights: Weights | None
    ) -> tuple[list[Tensor], Values]:
        """Losses on z beside the server's answer: the penalty and the companions'."""
        state, fabric = self._state, self._fabric
        terms: list[Tensor] = []
        values: Values = {}
        labels = gathered(y, fabric)
        if state.surrogate is not None and weights is not None:
            whole = gathered(z, fabric, sync_grads=True)
            aside = state.aside  # on a GPU: while the head works
            with aside.beside(whole) if aside else nullcontext(whole) as seen:
                rob, out = penalty(
                    seen, labels, state.surrogate, weights=weights, guard=state.guard
                )
            terms.append(rob)
            values |= {"rob_loss": out.loss, "intra_mse": out.intra_mse}
            values |= {k: v for k, v in out.diagnostics.items() if v.ndim == 0}
        elif self._remembers and isinstance(state.surrogate, HasBank):
            state.surrogate.remember(gathered(z.detach(), fabric), labels)
        if state.companion is not None:
            whole, images = gathered(z, fabric, sync_grads=True), gathered(x, fabric)
            own, said = companion_losses(state.companion, whole, images, labels, state.guard)
            terms, values = terms + own, values | said
        return terms, values


class Stepper:
    """Batch, loss, one backward pass and the update, for given rows, learning rate and weights.

    On one GPU the step is captured, once with the penalty and once without, and replayed: what
    changes between steps (rows, learning rate, weights) lies in tensors. Elsewhere it runs as
    written.

    Args:
        loss: Of one batch.
        data: The training images, on the device.
        state: What the step moves.
        fabric: The device and its precision.
        capture: False runs the step as written anywhere.
    """

    def __init__(
        self,
        loss: StepLoss,
        data: TrainSet,
        state: TrainState,
        fabric: "Fabric",
        *,
        capture: bool = True,
    ) -> None:
        alone = fabric.world_size == 1
        self._loss = loss if alone else fabric.setup_module(loss)
        self._data, self._state, self._fabric = data, state, fabric
        self._optimisers = [
            cast(torch.optim.Optimizer, fabric.setup_optimizers(o)) for o in state.optimisers
        ]
        self._on_gpu = fabric.device.type == "cuda"
        self._capture = capture and self._on_gpu and alone
        self._rows: Tensor | None = None
        self._weights = Weights(*torch.zeros(2, device=fabric.device))
        self._replays: dict[bool, Callable[[], None]] = {}
        self._logged: dict[bool, tuple[str, ...]] = {}

    def __call__(self, rows: Tensor, lr: float, weights: Weights | None) -> None:
        """Train on the images of `rows`; every call has equally many."""
        self._rows = rows.clone() if self._rows is None else self._rows.copy_(rows)
        main = self._state.optimisers[0]
        if self._capture:
            set_rate(main, lr)
            self._replay(weights)
        else:
            for group in main.param_groups:
                group["lr"] = lr
            self._step(weights)
        self._state.meters.tick(self._logged[weights is not None])

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
        x = data.augment(data.images[self._rows].float().div_(255), state.streams["augment"])
        if self._on_gpu:
            x = x.contiguous(memory_format=torch.channels_last)
        loss, values = self._loss(x, data.labels[self._rows], weights)
        self._fabric.backward(loss)
        for optimiser in self._optimisers:
            optimiser.step()
        state.meters.add(values)
        self._logged[weights is not None] = tuple(values)


def penalty(
    z: Tensor, y: Tensor, surrogate: Surrogate, *, weights: Weights, guard: NonFiniteCounter
) -> tuple[Tensor, SurrogateOutput]:
    """scale·rob of smashed data z, whose gradient reaches z `weights.encoder` times as large.

    A rob that is not finite counts as 0, and so does its gradient: the task's survives exactly.
    """
    out = _check_output(surrogate(scale_gradient(z, weights.encoder, guard.gradient), y))
    if z.requires_grad and not out.loss.requires_grad and _says_something(out.loss):
        raise ConfigError(
            "a surrogate's loss must have a gradient, got one that the encoder cannot follow; "
            "compute it from z without detach, no_grad or numpy"
        )
    finite = torch.isfinite(out.loss.detach())
    guard.loss.add_(~finite)
    if "surrogate_to_true" in out.diagnostics:
        guard.watch(out.diagnostics["surrogate_to_true"])
    rob = torch.where(finite, out.loss, torch.zeros_like(out.loss))
    return weights.scale * rob, out


def companion_losses(
    companion: nn.Module, z: Tensor, x: Tensor, y: Tensor, guard: NonFiniteCounter
) -> tuple[list[Tensor], Values]:
    """What a companion learns by, and what the encoder pays to each one that stands in it."""
    own = cast(Companion, companion).own_loss(z.detach(), x, y)
    paid = []
    for part in companions(companion):  # each on its own: one that breaks harms no other
        guarded = scale_gradient(z, 1.0, guard.gradient)
        paid.append(cast(Companion, part).penalty(guarded, x, y))
    sound = [torch.where(torch.isfinite(p), p, torch.zeros_like(p)) for p in paid]
    return [own, *sound], {"companion_loss": own, "companion_penalty": torch.stack(paid).sum()}


def _check_output(out: object) -> SurrogateOutput:
    """What a surrogate gave, where it is what one must give."""
    if not isinstance(out, SurrogateOutput):
        raise ConfigError(
            f"a surrogate must give a SurrogateOutput, got {type(out).__name__}; "
            "return SurrogateOutput(loss=…, intra_mse=…, diagnostics={})"
        )
    for name, value in {"loss": out.loss, "intra_mse": out.intra_mse, **out.diagnostics}.items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"a surrogate's {name} must be a tensor, got {type(value).__name__}; "
                "it stays on the device, so call neither float nor item"
            )
    if out.loss.ndim:
        raise ConfigError(
            f"a surrogate's loss must be one number, got shape {tuple(out.loss.shape)}; "
            "take its mean or its sum"
        )
    return out


def _says_something(loss: Tensor) -> bool:
    """Whether a loss without a gradient is more than the 0 of a surrogate that has nothing to say.

    What is not finite is counted as such. A step under capture was asked before, while it was warm.
    """
    if loss.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return bool(torch.isfinite(loss) & (loss != 0))


def own_rows(rows: Tensor, fabric: "Fabric") -> Tensor:
    """This rank's share of a batch's rows: every world_size-th one; all ranks get equally many."""
    world = fabric.world_size
    return rows[: len(rows) // world * world][fabric.global_rank :: world]


def gathered(data: Tensor, fabric: "Fabric", *, sync_grads: bool = False) -> Tensor:
    """Rows of all ranks, with `sync_grads` their gradients flow back to their owners.

    Class statistics then are those of the whole batch on every rank. The gather's backward sums
    over ranks and DDP's averaging divides by their number, so nothing needs rescaling.
    """
    if fabric.world_size == 1:
        return data
    return cast(Tensor, fabric.all_gather(data, sync_grads=sync_grads)).flatten(0, 1)
