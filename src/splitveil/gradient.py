"""`scale_gradient`: the one-line tool behind the one-backward composition of losses."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor


def all_finite(x: Tensor) -> Tensor:
    """Whether every entry is finite, as a 0-d tensor on x's device; one pass over x.

    NaN and infinity survive a sum, and finite float32 numbers cannot overflow one in float64.

    >>> all_finite(torch.tensor([3e38, 3e38])), all_finite(torch.tensor([torch.inf, -torch.inf]))
    (tensor(True), tensor(False))
    """
    return torch.isfinite(x.sum(dtype=torch.float64))


class _ScaleGradient(torch.autograd.Function):
    """Identity forward; backward multiplies by `factor`, or gives 0 where it is not finite."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's context object has no public type
        x: Tensor,
        factor: float | Tensor,
        skips: Tensor | None,
    ) -> Tensor:
        ctx.factor, ctx.skips = factor, skips
        return x.view_as(x)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 - autograd's context object has no public type
        grad: Tensor,
    ) -> tuple[Tensor, None, None]:
        scaled = grad * ctx.factor
        finite = all_finite(scaled)
        if ctx.skips is not None:
            ctx.skips.add_(~finite)  # stays on the device; read at the logging cadence
        return torch.where(finite, scaled, 0.0), None, None


def scale_gradient(x: Tensor, factor: float | Tensor, skips: Tensor | None = None) -> Tensor:
    r"""Identity in the forward pass; the gradient is multiplied by `factor` on its way back.

    .. math:: y = x, \qquad \partial L/\partial x = k\, \partial L/\partial y

    With k = λ·w_lr in front of a surrogate, one backward pass of ``L_CE + scale·rob`` gives the
    encoder ``∇L_CE + k·scale·∇rob``; with k = −1 in front of a weight, that weight ascends.
    A gradient that is not finite everywhere becomes exactly 0, and `skips` (a 0-d integer tensor)
    counts one: a broken penalty never harms the task's own gradient.

    >>> x = torch.tensor(2.0, requires_grad=True)
    >>> (scale_gradient(x, 0.5) ** 2).backward()
    >>> x.grad
    tensor(2.)
    """
    return cast(Tensor, _ScaleGradient.apply(x, factor, skips))  # type: ignore[no-untyped-call]


class _GuardTogether(torch.autograd.Function):
    """Identity of many tensors; backward looks at all their gradients in one go."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's context object has no public type
        factor: float,
        skips: Tensor | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.factor, ctx.skips = factor, skips
        ctx.set_materialize_grads(False)
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 - autograd's context object has no public type
        *grads: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        known = [g for g in grads if g is not None]
        if not known:
            return None, None, *grads
        flat = torch.cat([g.flatten() for g in known]) * ctx.factor
        finite = all_finite(flat)
        if ctx.skips is not None:
            ctx.skips.add_(~finite)
        kept = torch.where(finite, flat, 0.0)
        parts = iter(torch.split(kept, [g.numel() for g in known]))
        return None, None, *[None if g is None else next(parts).view_as(g) for g in grads]


def guard_together(
    tensors: Sequence[Tensor], factor: float, skips: Tensor | None = None
) -> tuple[Tensor, ...]:
    """`scale_gradient` of many tensors with one guard: if one gradient is not finite, all are 0.

    `skips` then counts one. On a GPU this takes a few kernels in all instead of a few for each.

    >>> a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    >>> x, y = guard_together([a, b], -1.0)
    >>> (x.sum() + 2 * y.sum()).backward()
    >>> a.grad.tolist(), b.grad.tolist()
    ([-1.0, -1.0], [-2.0, -2.0])
    """
    guarded = _GuardTogether.apply(factor, skips, *tensors)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, ...], guarded)
