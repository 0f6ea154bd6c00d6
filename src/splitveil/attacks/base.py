"""What attacks share: fits under a budget, units of z̃, held-out aux images, searches by descent.

On a GPU every step of a fit or a descent is replayed from a captured graph.
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
SAY_EVERY = 50  # steps between two updates of the progress bar
QUERIES = 1000  # images per query
PROBED = 1000  # aux images that units and channel are measured on
REFERENCE = 3 * 32 * 32  # values of an image for which `limit` and `chunk` are given
LEAST = 8
PSEUDO_IMAGES = 10  # weight of a prior guess against held-out images, in images


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How long a fit may take: max(`epochs` · ⌊n/batch⌋, `min_steps`) steps for n samples.

    Args:
        epochs: Passes over the samples.
        batch_size: Samples per step; fewer if there are fewer.
        min_steps: Steps to take even if `epochs` would need fewer.
        lr: Peak learning rate.
        weight_decay: Decoupled (AdamW) with "one-cycle", L2 (Adam) with "cosine".
        schedule: Course of the learning rate, see `rate_at`.

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
        """The budget in an attack's fields of the same names; defaults for those it lacks."""
        names = (field.name for field in fields(cls))
        return cls(**{name: getattr(attack, name) for name in names if hasattr(attack, name)})

    def steps(self, n: int) -> int:
        """Steps for n samples."""
        return max(self.epochs * (n // min(self.batch_size, n)), self.min_steps)

    def rate_at(self, done: float) -> float:
        """Learning rate after a share `done` of the steps.

        "one-cycle" rises linearly from 4 % of the peak over the first 30 % of the steps, then falls
        by a cosine to 1 %; "cosine" only falls.

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
    """Train a network in place.

    Args:
        loss: Takes a batch of every tensor of `data` and gives a scalar. On a GPU it is captured:
            it must not read values from the device, and may draw random numbers only from
            `generator` and torch's own stream.
        net: What to train.
        data: Tensors (n, …), one row for each sample.
        budget: Number of steps and learning rate.
        generator: Draws the order of every epoch.
        progress: Called every few steps.

    Returns:
        The mean loss of each epoch. What does not fill a batch is left out of an epoch; a last,
        incomplete epoch is counted with the one before.
    """
    n, device = len(data[0]), next(net.parameters()).device
    batch, steps = min(budget.batch_size, n), budget.steps(n)
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
    """Yield the number of each step after the next batch was copied into `inputs`.

    Args:
        steps: How many.
        inputs: Tensors (batch, …) that keep their place, for a captured graph.
        data: Tensors (n, …) to take rows from, in a new order every epoch.
        generator: Draws the orders.
        progress: Called every few steps.
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
    """The step, replayed from a graph on a GPU if the generator is there too."""
    # Noise from a generator on the host reaches the device by a copy, which a capture forbids.
    same = generator.device.type == device.type
    return captured(step, device, [generator]) if same else step


def _static(whole: Tensor, batch: int, device: torch.device) -> Tensor:
    """An empty batch like `whole`; on a GPU images have their channels last, as networks do."""
    last = device.type == "cuda" and whole.ndim == 4  # noqa: PLR2004 - images
    layout = torch.channels_last if last else torch.contiguous_format
    shape = (batch, *whole.shape[1:])
    return torch.empty(shape, dtype=whole.dtype, device=device, memory_format=layout)


def _whole_epochs(means: list[float], rest: int, per_epoch: int) -> tuple[float, ...]:
    """The curve with an incomplete last epoch, of `rest` batches, averaged into the one before.

    A few batches alone would be a noisy last point, and flags read the fall of the last epochs.

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
    """An optimiser of a network's parameters; on a GPU one whose steps can be captured."""
    device = next(net.parameters()).device
    if device.type != "cuda":
        return make(net.parameters(), lr)
    rate = torch.full((), lr, device=device)
    return make(net.parameters(), rate, fused=True, capturable=True)


def fresh_weights(generator: Generator, device: torch.device | str) -> AbstractContextManager[None]:
    """Inside, torch's global stream, which initialises networks, is seeded by the generator."""
    return seeded_globals(draw_seed(generator), device)


def draw_seed(generator: Generator) -> int:
    """A seed for another generator."""
    return int(torch.randint(2**62, (), generator=generator, device=generator.device))


@contextmanager
def no_capture_warning() -> Iterator[None]:
    """Silences Adam's warning about the eager steps before a capture."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This instance was constructed with capturable=True")
        yield


def progress_part(progress: Progress, before: int, of: int, name: str) -> Progress:
    """The progress of one part of longer work, which follows `before` units of other parts."""

    def told(done: int, total: int, note: str = "") -> None:
        del total, note
        progress(before + done, of, name)

    return told


def need_aux(name: str, aux: Labelled, least: int) -> None:
    """Validate that there are enough aux images to fit an attack on."""
    if len(aux) < least:
        images = "image" if least == 1 else "images"
        raise AuditError(
            f"the {name} attack needs at least {least} aux {images}, got {len(aux)}; give it more, "
            "or leave this attack out"
        )


class Units(nn.Module):
    r"""z̃ less its mean, over its deviation: one mean and one deviation for all its numbers.

    .. math:: u = (\tilde z - m) / s

    Networks, distances and BatchNorm's ε then meet the same numbers whatever scale and offset the
    client has, so that neither is a defence.

    Args:
        mean: m, over all numbers of z̃ of aux images; float64.
        std: s, float64.

    >>> Units(torch.tensor(3.0), torch.tensor(0.5))(torch.tensor([4.0, 1.0])).tolist()
    [2.0, -4.0]
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, z: Tensor) -> Tensor:
        """Units of z̃ (n, …), computed in float64 and given in float32."""
        return ((z.double() - self.mean) / self.std).float()


@torch.no_grad()
def units_of(z: Tensor) -> Units:
    """The units of some z̃; numbers that are not finite are left out.

    >>> units_of(torch.tensor([1.0, 3.0, torch.inf]))(torch.tensor([3.0])).tolist()
    [1.0]
    """
    z = z.double()
    known = z.isfinite()
    count = known.sum().clamp_min(1)
    mean = torch.where(known, z, 0.0).sum() / count
    std = (torch.where(known, z - mean, 0.0).square().sum() / count).sqrt()
    return Units(mean, torch.where(std > 0, std, torch.ones_like(std)))


def fit_units(victim: BlackBox, images: Tensor, generator: Generator) -> Units:
    """The units of what a victim sends for some images; `generator` keeps its state."""
    apart = stream(generator.initial_seed(), "units", generator.device)
    return units_of(victim.send(images[:PROBED], apart))


def count_for(count: int, values: int) -> int:
    """How many images of `values` numbers cost about as much as `count` of 3×32×32.

    At least 8, unless `count` is less.

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
    """Row numbers of a random tenth of n images to measure on, and of the rest to fit on."""
    order = torch.randperm(n, generator=generator, device=generator.device).to(device)
    return order[: n // 10], order[n // 10 :]


class Descent:
    """Adam on guesses, from several starts for each of n images at once.

    Args:
        objective: Value (m,) of m guesses, to minimise. It is called with the guesses (m, …), the
            tensors (m, …) that are given for them, and a generator.
        seed: Seed of the objective's draws.
        lr: Peak learning rate; it falls by a cosine to 0.
        bounded: Whether guesses are clamped to [0, 1] after every step, as images are. A sigmoid
            instead could never reach the ends.
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
        """The best guess for each image (n, …), among the starts and where the steps lead.

        Args:
            starts: k starts for each image, (k, n, …).
            given: Tensors (n, …) for the objective.
            steps: Steps of Adam.
            judge: Picks the best, on the same draws for all guesses; default the objective. It
                never sees the true image.
        """
        candidates = torch.cat([starts, self._run(starts, given, steps)]) if steps else starts
        judge = judge or self._objective
        with torch.no_grad():
            values = [judge(guess, *given, self._draws(starts)) for guess in candidates]
        return least(torch.stack(values), candidates)

    @torch.enable_grad()
    def _run(self, starts: Tensor, given: Sequence[Tensor], steps: int) -> Tensor:
        # The tensors keep their place, so that on a GPU one captured step serves every chunk.
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
        """Allocate the guesses and the tensors given for them, at the first run."""
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
    """Of k candidates (k, n, …), the one with the least value (k, n) for each of n images.

    NaN loses against every number.

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
    """Prior means and guesses (n, …) of a search for all n images, `chunk` at a time."""
    n, found = len(seen.z), []
    for first in range(0, n, chunk):
        progress(n + first, 2 * n, "descending")
        # Always `chunk` rows, the last one repeated: one captured step serves all chunks, and the
        # rounding for an image does not depend on how many others there are.
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
    """A reconstructor that goes a share of the way from the prior mean to what a search finds.

    Args:
        make_search: Makes a search; all of them draw the same random numbers.
        chunk: Images to search for at a time.
        held: Held-out images (n, c, h, w) and what was observed of them, to pick the best share;
            None goes all the way.
        progress: Called after every chunk.
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
    r"""Share of the way from x₀ to x̂ that ends nearest to x; nearer to 1 if images are few.

    .. math:: \alpha = \frac{n a + k}{n + k}, \quad k = 10, \quad
              a = \langle x - x_0, \hat x - x_0 \rangle / \lVert \hat x - x_0 \rVert^2 \in [0, 1.5]

    >>> best_share(torch.full((30, 1), 0.5), torch.zeros(30, 1), torch.ones(30, 1))
    tensor(0.6250)
    """
    way = found - x0
    share = (((x - x0) * way).sum() / way.square().sum().clamp_min(1e-12)).clamp(0, 1.5)
    return (len(x) * share + PSEUDO_IMAGES) / (len(x) + PSEUDO_IMAGES)
