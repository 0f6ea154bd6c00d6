"""What attacks share: fits under a budget, units of z̃, held-out aux images.

On a GPU every step of a fit is replayed from a captured graph.
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

from splitveil.cuda import Step, captured, channels_last, set_rate
from splitveil.errors import AuditError, Range
from splitveil.io import Progress, silent
from splitveil.rng import seeded_globals, stream
from splitveil.threat import BlackBox, Labelled

Count = Annotated[int, Range(1)]
NonNegative = Annotated[float, Range(0)]
RateSchedule = Literal["one-cycle", "cosine"]
SAY_EVERY = 50  # steps between two updates of the progress bar
QUERIES = 1000  # images per query
PROBED = 1000  # aux images that units and channel are measured on


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How long a fit may take: max(`epochs` · ⌊n/batch⌋, `min_steps`) steps for n samples.

    They are `max_steps` at most.

    Args:
        epochs: Passes over the samples.
        batch_size: Samples per step; fewer if there are fewer.
        min_steps: Steps to take even if `epochs` would need fewer.
        max_steps: Where to stop even if `epochs` would need more; None: nowhere.
        lr: Peak learning rate.
        weight_decay: Decoupled (AdamW) with "one-cycle", L2 (Adam) with "cosine".
        schedule: Course of the learning rate, see `rate_at`.

    >>> Budget(epochs=2, min_steps=5, batch_size=4).steps(10)
    5
    >>> Budget(epochs=2, max_steps=3, batch_size=4).steps(10)
    3
    """

    epochs: int
    batch_size: int
    min_steps: int = 0
    max_steps: int | None = None
    lr: float = 2e-3
    weight_decay: float = 1e-2
    schedule: RateSchedule = "one-cycle"

    @classmethod
    def of(cls, attack: object) -> "Budget":
        """The budget in an attack's fields of the same names; defaults for those it lacks."""
        names = (field.name for field in fields(cls))
        return cls(**{name: getattr(attack, name) for name in names if hasattr(attack, name)})

    def steps(self, n: int) -> int:
        """Steps for n samples."""
        steps = max(self.epochs * (n // min(self.batch_size, n)), self.min_steps)
        return steps if self.max_steps is None else min(steps, self.max_steps)

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
    """An empty batch like `whole`; images have their channels last, as networks do."""
    return channels_last(torch.empty(batch, *whole.shape[1:], dtype=whole.dtype, device=device))


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
    """A fused optimiser of a network's parameters; on a GPU one whose steps can be captured."""
    device = next(net.parameters()).device
    if device.type != "cuda":
        return make(net.parameters(), lr, fused=True)
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
