"""What attacks share: fits under a budget, units of z, held-out aux, and descents image by image.

On a GPU every step of a fit or a descent is replayed from a graph.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Generator, Tensor, nn

from splitveil.cuda import Step, captured, set_rate
from splitveil.errors import AuditError, Range
from splitveil.io import Progress, silent
from splitveil.rng import seeded_globals, stream
from splitveil.threat import BlackBox, Labelled, Observation, Reconstructor

Count = Annotated[int, Range(1)]
NonNegative = Annotated[float, Range(0)]
Schedule = Literal["one-cycle", "cosine"]
Search = Callable[[Observation], tuple[Tensor, Tensor]]  # prior means and guesses (n, …)
SAY_EVERY = 50  # steps between two words to the progress display
QUERIES = 1000  # images per query
PROBED = 1000  # aux images whose sendings are measured
REFERENCE = 3 * 32 * 32  # values of the images for which `limit` and `chunk` are told
LEAST = 8
PSEUDO_IMAGES = 10  # held-out images that a guess made without them counts for


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How long a fit may take: max(`epochs` · ⌊n/batch⌋, `min_steps`) steps for n samples.

    >>> Budget(epochs=2, min_steps=5, batch_size=4).steps(10)
    5
    """

    epochs: int
    batch_size: int
    min_steps: int = 0
    lr: float = 2e-3
    weight_decay: float = 1e-2
    schedule: Schedule = "one-cycle"

    @classmethod
    def of(cls, attack: object) -> "Budget":
        """The budget that an attack has under the same names; the defaults for what it lacks."""
        names = (field.name for field in fields(cls))
        return cls(**{name: getattr(attack, name) for name in names if hasattr(attack, name)})

    def batch(self, n: int) -> int:
        """Samples per step: never more than there are."""
        return min(self.batch_size, n)

    def steps(self, n: int) -> int:
        """Steps for n samples."""
        return max(self.epochs * (n // self.batch(n)), self.min_steps)

    def rate_at(self, done: float) -> float:
        """Learning rate after a share `done` of the steps.

        "one-cycle" rises linearly from 4 % over the first 30 %, then falls by a cosine to 1 %;
        "cosine" falls from the start.

        >>> Budget(epochs=1, batch_size=1, lr=2.0).rate_at(0.65)
        1.01
        """
        rise = 0.3 if self.schedule == "one-cycle" else 0.0
        if done < rise:
            return self.lr * (0.04 + 0.96 * done / rise)
        fall = 0.5 * (1 + math.cos(math.pi * (done - rise) / (1 - rise)))
        return self.lr * (0.01 + 0.99 * fall)


def minimise(
    loss: Callable[..., Tensor],
    net: nn.Module,
    data: Sequence[Tensor],
    budget: Budget,
    generator: Generator,
    *,
    progress: Progress = silent,
) -> tuple[float, ...]:
    """Train `net` in place and return the mean loss of each epoch, the rest with the last one.

    `loss` takes a batch of every tensor of `data` (n, …) and gives a scalar. Each epoch has a new
    order, and drops what does not fill a batch. On a GPU the loss is captured: it must never ask
    the device for a value, and may draw from `generator` and torch's own stream alone.
    """
    n, device = len(data[0]), next(net.parameters()).device
    batch, steps = budget.batch(n), budget.steps(n)
    per_epoch = n // batch
    inputs = [_static(t, batch, device) for t in data]
    running = torch.zeros((), dtype=torch.float64, device=device)
    means = torch.zeros(-(-steps // per_epoch), dtype=torch.float64, device=device)
    kind = torch.optim.AdamW if budget.schedule == "one-cycle" else torch.optim.Adam
    optimiser = capturable(partial(kind, weight_decay=budget.weight_decay), net, budget.lr)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        value = loss(*inputs)
        value.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        running.add_(value.detach())

    run = captured_for(step, device, generator)
    net.train()
    for index in fed_steps(steps, inputs, data, generator, progress):
        set_rate(optimiser, budget.rate_at(index / steps))
        run()
        place = index % per_epoch
        if index == steps - 1 or place == per_epoch - 1:
            means[index // per_epoch].copy_(running / (place + 1))
            running.zero_()
    optimiser.zero_grad(set_to_none=True)  # the last gradients live in the graph's memory
    return _whole_epochs(means.tolist(), steps % per_epoch, per_epoch)


def fed_steps(
    steps: int,
    inputs: Sequence[Tensor],
    data: Sequence[Tensor],
    generator: Generator,
    progress: Progress,
) -> Iterator[int]:
    """Number of each step, before which `inputs` (batch, …) hold the next rows of `data` (n, …).

    Every epoch has a new order and drops what fills no batch.
    """
    n, batch, device = len(data[0]), len(inputs[0]), data[0].device
    order = torch.empty(0)
    with no_capture_warning():
        for index in range(steps):
            place = index % (n // batch)
            if place == 0:
                order = torch.randperm(n, generator=generator, device=generator.device).to(device)
            for static, whole in zip(inputs, data, strict=True):
                static.copy_(whole[order[place * batch : (place + 1) * batch]])
            yield index
            if index == steps - 1 or (index + 1) % SAY_EVERY == 0:
                progress(index + 1, steps)


def captured_for(step: Step, device: torch.device, generator: Generator) -> Step:
    """The step, replayed from a graph on a GPU if the generator is there too.

    Noise from a generator on the host reaches the device by a copy, which stops a capture.
    """
    same = generator.device.type == device.type
    return captured(step, device, [generator]) if same else step


def _static(whole: Tensor, batch: int, device: torch.device) -> Tensor:
    """Room for a batch of `whole`; on a GPU images have their channels last, as networks do."""
    last = device.type == "cuda" and whole.ndim == 4  # noqa: PLR2004 - images
    layout = torch.channels_last if last else torch.contiguous_format
    shape = (batch, *whole.shape[1:])
    return torch.empty(shape, dtype=whole.dtype, device=device, memory_format=layout)


def _whole_epochs(means: list[float], rest: int, per_epoch: int) -> tuple[float, ...]:
    """The curve with an incomplete last epoch, of `rest` batches, folded into the one before.

    A few batches alone would be a noisy last point.

    >>> _whole_epochs([3.0, 1.0, 4.0], rest=1, per_epoch=2)
    (3.0, 2.0)
    """
    if rest and len(means) > 1:
        folded = (means[-2] * per_epoch + means[-1] * rest) / (per_epoch + rest)
        return (*means[:-2], folded)
    return tuple(means)


def capturable(
    make: Callable[..., torch.optim.Optimizer], net: nn.Module, lr: float
) -> torch.optim.Optimizer:
    """An optimiser of a network's parameters; on a GPU fit to be captured."""
    device = next(net.parameters()).device
    if device.type != "cuda":
        return make(net.parameters(), lr)
    rate = torch.full((), lr, device=device)
    return make(net.parameters(), rate, fused=True, capturable=True)


def fresh_weights(generator: Generator, device: torch.device | str) -> AbstractContextManager[None]:
    """Torch's own stream, which new networks draw from, begun by one draw of the attack's."""
    return seeded_globals(draw_seed(generator), device)


def draw_seed(generator: Generator) -> int:
    """A seed for a stream of its own."""
    return int(torch.randint(2**62, (), generator=generator, device=generator.device))


@contextmanager
def no_capture_warning() -> Iterator[None]:
    """Silences what Adam says of the eager steps that come before a capture."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This instance was constructed with capturable=True")
        yield


def progress_part(progress: Progress, before: int, of: int, name: str) -> Progress:
    """The display of one part of a longer work, which follows `before` units of others."""

    def told(done: int, total: int, note: str = "") -> None:
        del total, note
        progress(before + done, of, name)

    return told


def need_aux(name: str, aux: Labelled, least: int) -> None:
    """Refuse fewer aux images than an attack can be fitted on."""
    if len(aux) < least:
        images = "image" if least == 1 else "images"
        raise AuditError(f"the {name} attack needs at least {least} aux {images}, got {len(aux)}")


def in_units(z: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(z − mean) / std in float64, given in float32.

    >>> in_units(torch.tensor([4.0, 1.0]), torch.tensor(3.0), torch.tensor(0.5)).tolist()
    [2.0, -4.0]
    """
    return ((z.double() - mean) / std).float()


@dataclass(frozen=True)
class Standardiser:
    r"""Mean and deviation of all numbers of z̃ over aux, and z̃ in terms of them.

    .. math:: u = (\tilde z - m) / s

    Computed in float64, given in float32: networks, distances and BatchNorm's ε then meet the same
    numbers whatever the client's scale and offset are.

    >>> Standardiser(torch.tensor(3.0), torch.tensor(0.5))(torch.tensor([4.0, 1.0])).tolist()
    [2.0, -4.0]
    """

    mean: Tensor
    std: Tensor

    def __call__(self, z: Tensor) -> Tensor:
        """U of the shape of z, float32."""
        return in_units(z, self.mean, self.std)


class StandardisedNet(nn.Module):
    """A network behind its units: takes z̃ as it was sent."""

    mean: Tensor
    std: Tensor

    def __init__(self, net: nn.Module, units: Standardiser) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("mean", units.mean)
        self.register_buffer("std", units.std)

    def forward(self, z: Tensor) -> Tensor:
        """What the network makes of z̃ (n, …)."""
        # Not through Units: the compilers of torch 2.11 and before cannot make a frozen dataclass.
        out: Tensor = self.net(in_units(z, self.mean, self.std))
        return out


@torch.no_grad()
def units_of(z: Tensor) -> Standardiser:
    """The units of some z̃; what is not finite does not count.

    >>> units_of(torch.tensor([1.0, 3.0, torch.inf]))(torch.tensor([3.0])).tolist()
    [1.0]
    """
    z = z.double()
    known = z.isfinite()
    count = known.sum().clamp_min(1)
    mean = torch.where(known, z, 0.0).sum() / count
    std = (torch.where(known, z - mean, 0.0).square().sum() / count).sqrt()
    return Standardiser(mean, torch.where(std > 0, std, torch.ones_like(std)))


def fit_standardiser(victim: BlackBox, images: Tensor, generator: Generator) -> Standardiser:
    """The units of a victim's z̃, by draws of their own: those of the attack are not moved."""
    apart = stream(generator.initial_seed(), "units", generator.device)
    return units_of(victim.send(images[:PROBED], apart))


def count_for(count: int, values: int) -> int:
    """How many images of `values` numbers cost about as much as `count` of 3×32×32; at least 8.

    >>> count_for(64, 64), count_for(64, 3072), count_for(64, 3 * 96 * 96), count_for(4, 9999)
    (3072, 64, 8, 4)
    """
    return max(min(count, LEAST), count * REFERENCE // values)


def sent_aux(victim: BlackBox, aux: Labelled, generator: Generator, progress: Progress) -> Tensor:
    """z̃ (n, d) of every aux image, sent once."""
    send, rows = victim.sender(aux.images), torch.arange(len(aux), device=aux.images.device)
    parts = []
    for some in torch.split(rows, QUERIES):
        parts.append(send(some, generator).flatten(1))
        progress(sum(map(len, parts)), len(aux), "queries")
    return torch.cat(parts)


def tenth(n: int, generator: Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of a random tenth of n images to measure on, and of the rest to fit on."""
    order = torch.randperm(n, generator=generator, device=generator.device).to(device)
    return order[: n // 10], order[n // 10 :]


class Descent:
    """Adam on guesses (k, n, …), from k starts for each of n images at once.

    The tensors stay where they are, so that on a GPU one captured step serves every chunk.

    Args:
        objective: Value (m,) of m guesses (minimise), called with the guesses, what is given of
            each of them, and a generator.
        seed: Of the objective's draws.
        lr: Peak rate; it falls by a cosine to nothing.
        bounded: Whether guesses are clamped to [0, 1] after every step, as images are: a sigmoid
            could never reach the ends.
    """

    def __init__(
        self, objective: Callable[..., Tensor], seed: int, lr: float, *, bounded: bool = False
    ) -> None:
        self._objective, self._seed, self._peak, self._bounded = objective, seed, lr, bounded
        self._guess: Tensor | None = None

    def best(
        self,
        starts: Tensor,
        given: Sequence[Tensor],
        steps: int,
        judge: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        """Of the starts (k, n, …) and where `steps` lead from them, the best for each image (n, …).

        By the least value of `judge`, by default the objective, on the same draws for all of them;
        `given` are tensors (n, …).
        """
        candidates = torch.cat([starts, self._run(starts, given, steps)]) if steps else starts
        judge = judge or self._objective
        with torch.no_grad():
            values = [judge(guess, *given, self._draws(starts)) for guess in candidates]
        return least(torch.stack(values), candidates)

    @torch.enable_grad()
    def _run(self, starts: Tensor, given: Sequence[Tensor], steps: int) -> Tensor:
        guess = self._prepare(starts, given) if self._guess is None else self._guess
        guess.detach().copy_(starts.flatten(0, 1))
        for static, value in zip(self._given, given, strict=True):
            static.copy_(value.expand_as(static))
        for value in (v for moments in self._adam.state.values() for v in moments.values()):
            value.zero_()
        with no_capture_warning():
            for step in range(steps):
                fall = 0.5 * (1 + math.cos(math.pi * step / steps))
                set_rate(self._adam, self._peak * fall)
                self._step()
        return guess.detach().view_as(starts).clone()

    def _prepare(self, starts: Tensor, given: Sequence[Tensor]) -> Tensor:
        """Room for the guesses and what is given of them, at the first run."""
        device, on_gpu = starts.device, starts.device.type == "cuda"
        self._guess = guess = torch.empty_like(starts.flatten(0, 1)).requires_grad_()
        self._given = [t.new_empty(len(starts), *t.shape) for t in given]
        rate = torch.full((), self._peak, device=device)
        self._adam = torch.optim.Adam([guess], rate, (0.9, 0.99), fused=on_gpu, capturable=on_gpu)
        draws = self._draws(starts)

        def move() -> None:
            guess.grad = None
            flat = (t.flatten(0, 1) for t in self._given)
            self._objective(guess, *flat, draws).sum().backward()  # type: ignore[no-untyped-call]
            self._adam.step()
            if self._bounded:
                guess.detach().clamp_(0, 1)

        self._step = captured(move, device, [draws])
        return guess

    def _draws(self, like: Tensor) -> Generator:
        return Generator(device=like.device).manual_seed(self._seed)


def least(values: Tensor, of: Tensor) -> Tensor:
    """Of k candidates (k, n, …) the one with the least value (k, n) for each of n images.

    A value that is not a number never wins over one that is.

    >>> least(torch.tensor([[2.0, math.nan], [1.0, 3.0]]), torch.tensor([[5, 6], [7, 8]])).tolist()
    [7, 8]
    """
    best = values.nan_to_num(torch.inf, torch.inf).argmin(0)
    return of[best, torch.arange(of.shape[1], device=of.device)]


def has_gradient(encoder: nn.Module, x: Tensor) -> bool:
    """Whether a gradient reaches images (n, c, h, w) through the encoder."""
    with torch.enable_grad():
        z: Tensor = encoder(x.clone().requires_grad_())
    return z.requires_grad


def in_chunks(
    search: Search, chunk: int, seen: Observation, progress: Progress
) -> tuple[Tensor, Tensor]:
    """What `search` finds for all n images, `chunk` at a time."""
    n, found = len(seen.z), []
    for first in range(0, n, chunk):
        progress(n + first, 2 * n, "descending")
        # Always `chunk` rows: one captured step serves all of them, and the arithmetic of an
        # image does not depend on how many others are asked for.
        rows = torch.arange(first, first + chunk, device=seen.z.device).clamp_max(n - 1)
        found.append(search(Observation(seen.z[rows], seen.answer[rows])))
    means, guesses = (torch.cat(parts)[:n] for parts in zip(*found, strict=True))
    return means, guesses


def calibrated(
    make_search: Callable[[], Search],
    chunk: int,
    held: tuple[Tensor, Observation] | None,
    progress: Progress,
) -> Reconstructor:
    """Answers on the way from the prior mean to what a search finds, `chunk` images at a time.

    At the share that is best for held-out images (n, c, h, w), observed as said; without them at
    the end. What is random in a search is the same in each.
    """
    share: Tensor | float = 1.0
    if held is not None:
        x, seen = held
        share = best_share(x, *in_chunks(make_search(), chunk, seen, silent))

    def reconstruct(seen: Observation) -> Tensor:
        x0, found = in_chunks(make_search(), chunk, seen, progress)
        return torch.lerp(x0, found, share).clamp(0, 1)

    return reconstruct


def best_share(x: Tensor, x0: Tensor, found: Tensor) -> Tensor:
    r"""Share of the way from x₀ to x̂ that ends nearest to x, drawn to 1 where images are few.

    .. math:: \alpha = \frac{n a + k}{n + k}, \quad k = 10, \quad
              a = \langle x - x_0, \hat x - x_0 \rangle / \lVert \hat x - x_0 \rVert^2 \in [0, 1.5]

    >>> best_share(torch.full((30, 1), 0.5), torch.zeros(30, 1), torch.ones(30, 1))
    tensor(0.6250)
    """
    way = found - x0
    share = (((x - x0) * way).sum() / way.square().sum().clamp_min(1e-12)).clamp(0, 1.5)
    return (len(x) * share + PSEUDO_IMAGES) / (len(x) + PSEUDO_IMAGES)
