"""Learnable scalars that cannot run away: each lives between two stated bounds."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from splitveil.errors import ConfigError
from splitveil.gradient import scale_gradient
from splitveil.surrogates.batch import positive


@dataclass(frozen=True)
class Bounded:
    r"""A scalar's start and its bounds, symmetric about it.

    .. math:: v = v_0\, 2^{t} \in [v_0/2, 2v_0] \quad\text{or}\quad
        v = v_0 + \delta t \in [v_0 - \delta, v_0 + \delta], \qquad
        t = 2\,\mathrm{sigmoid}(\theta) - 1

    The first form (`reach=None`) is for scales, which must stay positive; the second, with
    δ = `reach`, for thresholds. θ = 0 gives the start exactly, in any float type, and weight
    decay pulls towards it.
    """

    start: float
    reach: float | None = None

    @property
    def lower(self) -> float:
        """Smallest value that can be reached."""
        return self.start / 2 if self.reach is None else self.start - self.reach

    @property
    def upper(self) -> float:
        """Largest value that can be reached."""
        return self.start * 2 if self.reach is None else self.start + self.reach


class BoundedScalars(nn.Module):
    """Named `Bounded` scalars over one vector of free parameters, `free`, in the given order.

    Their gradient is guarded as one: not finite in one of them means 0 in all. It never flips.
    """

    start: Tensor
    reach: Tensor
    scales: Tensor

    def __init__(self, **bounds: Bounded) -> None:
        super().__init__()
        for name, bound in bounds.items():
            if bound.reach is None:
                positive(name, bound.start)
            elif not abs(bound.start) < float("inf"):
                raise ConfigError(f"{name} must be a finite number, got {bound.start}")
        self.bounds = dict(bounds)
        every = bounds.values()
        facts = {
            "start": torch.tensor([b.start for b in every], dtype=torch.float64),
            "reach": torch.tensor([b.reach or 0.0 for b in every], dtype=torch.float64),
            "scales": torch.tensor([b.reach is None for b in every]),
        }
        for name, value in facts.items():
            self.register_buffer(name, value, persistent=False)
        self.free = nn.Parameter(torch.zeros(len(bounds)))

    def forward(self, skips: Tensor | None = None) -> dict[str, Float[Tensor, ""]]:
        """Present values by name.

        >>> {k: v.item() for k, v in BoundedScalars(gain=Bounded(3.0), edge=Bounded(0.0, 0.5))()
        ... .items()}
        {'gain': 3.0, 'edge': 0.0}
        """
        step = 2.0 * torch.sigmoid(scale_gradient(self.free, 1.0, skips)) - 1.0
        start, reach = self.start.to(step), self.reach.to(step)
        value = torch.where(self.scales, start * torch.exp2(step), start + reach * step)
        return dict(zip(self.bounds, value.unbind(), strict=True))
