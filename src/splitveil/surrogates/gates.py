"""Gates of the gated surrogates, and learnable scalars that stay within fixed bounds."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitveil.errors import ConfigError
from splitveil.functional import scale_gradient
from splitveil.surrogates.base import (
    ByClass,
    GuardedParameters,
    Number,
    PerClass,
    plain_layernorm,
    positive,
)

Scalar = float | Tensor


def snr_gate(mean: ByClass, var: ByClass, thresh: Scalar, sharp: Scalar, eps: float) -> ByClass:
    r"""The "hard" gate of the reference documents: near 1 where the spread dominates the mean.

    .. math:: \mathrm{sigmoid}(k_{snr}(\sigma^2/(\mu^2+\varepsilon) - t_{snr}))

    The documents call σ²/μ² a signal-to-noise ratio (SNR); it is the inverse of one.

    Args:
        mean: μ, one row per class or slot (c, d).
        var: σ², in the same shape.
        thresh: t_snr, where the gate is 1/2.
        sharp: k_snr, its steepness there.
        eps: ε, keeps the ratio finite at μ = 0.
    """
    return torch.sigmoid(sharp * (var / (mean.square() + eps) - thresh))


def class_gate(share: PerClass, a: Scalar, b: Scalar) -> PerClass:
    r"""Weight of a class by its share p_c, sigmoid(a(p_c − b)): damps rare classes.

    >>> class_gate(torch.tensor([0.05]), 10.0, 0.05)
    tensor([0.5000])
    """
    return torch.sigmoid(a * (share - b))


def soft_threshold(excess: ByClass, beta: Scalar, margin: Scalar) -> ByClass:
    r"""Smooth hinge of the log-variance excess e: softplus(β(e − m))/β, with margin m."""
    return F.softplus(beta * (excess - margin)) / beta


class DimensionGate(nn.Module):
    r"""The learned "soft" gate of each dimension, sigmoid(MLP(LN(log σ²))).

    The MLP is Linear, ReLU, Linear with max(32, d/8) hidden units.
    """

    def __init__(self, feature_dim: int) -> None:
        super().__init__()
        hidden = max(32, feature_dim // 8)
        self.enter = nn.Linear(feature_dim, hidden)
        self.leave = nn.Linear(hidden, feature_dim)

    def forward(self, log_var: ByClass, skips: Tensor | None) -> ByClass:
        """Gate in (0, 1) of each class and dimension, (c, d)."""
        held = GuardedParameters(self, 1.0, skips)  # gates lower the loss, whatever attention does
        hidden = F.relu(held.linear("enter", plain_layernorm(log_var)))
        return torch.sigmoid(held.linear("leave", hidden))


@dataclass(frozen=True)
class Bounded:
    r"""A learnable scalar's start and bounds, symmetric about the start.

    .. math:: v = v_0\, 2^{t} \in [v_0/2, 2v_0] \quad\text{or}\quad
        v = v_0 + \delta t \in [v_0 - \delta, v_0 + \delta], \qquad
        t = 2\,\mathrm{sigmoid}(\theta) - 1

    The first form (`reach=None`) is for scales, which must stay positive; the second, with
    δ = `reach`, for thresholds. θ = 0 gives the start exactly, in any float type, so weight decay
    pulls towards the start. Unbounded, a margin or a gate threshold would grow forever: that
    lowers the loss without lowering any variance.
    """

    start: float
    reach: float | None = None


class BoundedScalars(nn.Module):
    """Named `Bounded` scalars, stored as one parameter vector `free` in the given order.

    Their gradient is guarded together: if one entry is not finite, all become 0. They always
    lower the loss, also where `attention="maximise"` makes other parameters raise it.
    """

    start: Tensor
    reach: Tensor
    scales: Tensor

    def __init__(self, **bounds: Bounded) -> None:
        super().__init__()
        for name, bound in bounds.items():
            if bound.reach is None:
                positive(zero=False, **{name: bound.start})
            elif not abs(bound.start) < float("inf"):
                raise ConfigError(f"{name} must be a finite number, got {bound.start}")
        self.bounds = dict(bounds)
        every = bounds.values()
        # float64, so that a start keeps all its digits until it is cast to the loss's type.
        facts = {
            "start": torch.tensor([b.start for b in every], dtype=torch.float64),
            "reach": torch.tensor([b.reach or 0.0 for b in every], dtype=torch.float64),
            "scales": torch.tensor([b.reach is None for b in every]),
        }
        for name, value in facts.items():
            self.register_buffer(name, value, persistent=False)
        self.free = nn.Parameter(torch.zeros(len(bounds)))

    def forward(self, skips: Tensor | None = None) -> dict[str, Number]:
        """Current values by name.

        >>> {k: v.item() for k, v in BoundedScalars(gain=Bounded(3.0), edge=Bounded(0.0, 0.5))()
        ... .items()}
        {'gain': 3.0, 'edge': 0.0}
        """
        step = 2.0 * torch.sigmoid(scale_gradient(self.free, 1.0, skips)) - 1.0
        start, reach = self.start.to(step), self.reach.to(step)
        value = torch.where(self.scales, start * torch.exp2(step), start + reach * step)
        return dict(zip(self.bounds, value.unbind(), strict=True))
