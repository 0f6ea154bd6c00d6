"""Fitting a network under a fixed budget; on a GPU every step is replayed from a graph."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor, nn

from splitveil.graphs import captured, set_rate
from splitveil.types import Progress, silent

Schedule = Literal["one-cycle", "cosine"]
SAY_EVERY = 50  # steps between two words to the progress display


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
    optimiser = _optimiser(net, budget, device)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        value = loss(*inputs)
        value.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        running.add_(value.detach())

    # Noise from a generator on the host reaches the device by a copy, which stops a capture.
    same = generator.device.type == device.type
    run = captured(step, device, [generator]) if same else step
    order = torch.empty(0)
    net.train()
    with warnings.catch_warnings():
        # Said of the eager steps that come before the capture.
        warnings.filterwarnings("ignore", "This instance was constructed with capturable=True")
        for index in range(steps):
            place = index % per_epoch
            if place == 0:
                order = torch.randperm(n, generator=generator, device=generator.device)
                order = order.to(data[0].device)
            chosen = order[place * batch : (place + 1) * batch]
            for static, whole in zip(inputs, data, strict=True):
                static.copy_(whole[chosen])
            set_rate(optimiser, budget.rate_at(index / steps))
            run()
            last = index == steps - 1
            if last or place == per_epoch - 1:
                means[index // per_epoch].copy_(running / (place + 1))
                running.zero_()
            if last or (index + 1) % SAY_EVERY == 0:
                progress(index + 1, steps)
    optimiser.zero_grad(set_to_none=True)  # the last gradients live in the graph's memory
    return _whole_epochs(means.tolist(), steps % per_epoch, per_epoch)


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


def _optimiser(net: nn.Module, budget: Budget, device: torch.device) -> torch.optim.Optimizer:
    """AdamW for "one-cycle", Adam with L2 decay for "cosine"; on a GPU fit to be captured."""
    kind = torch.optim.AdamW if budget.schedule == "one-cycle" else torch.optim.Adam
    if device.type != "cuda":
        return kind(net.parameters(), budget.lr, weight_decay=budget.weight_decay)
    rate = torch.full((), budget.lr, device=device)
    return kind(
        net.parameters(), rate, weight_decay=budget.weight_decay, fused=True, capturable=True
    )
