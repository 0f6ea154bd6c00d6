"""Class-wise sums, softmaxes and moments of a batch, as segment operations.

One set of kernels whatever the number of classes: no Python loop over classes, no host sync.
Symbols: n samples, d features, c classes; `y` holds the class of each sample; M_c = `count`.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor


def class_count(y: Int[Tensor, " n"], num_classes: int, like: Tensor) -> Float[Tensor, " c"]:
    """Samples per class, M_c, in the float type of `like`.

    >>> class_count(torch.tensor([0, 2, 2]), 3, torch.empty(0))
    tensor([1., 0., 2.])
    """
    zeros = torch.zeros(num_classes, dtype=like.dtype, device=y.device)
    return zeros.scatter_add_(0, y, torch.ones_like(y, dtype=like.dtype))


def segment_sum(
    x: Float[Tensor, "n d"], y: Int[Tensor, " n"], num_classes: int
) -> Float[Tensor, "c d"]:
    """Sum of the rows of each class; an absent class gets 0."""
    return x.new_zeros(num_classes, x.shape[1]).index_add(0, y, x)


def segment_softmax(
    logits: Float[Tensor, " n"], y: Int[Tensor, " n"], num_classes: int
) -> Float[Tensor, " n"]:
    r"""Softmax over the samples of the same class.

    .. math:: \alpha_i = e^{a_i} / \sum_{j : y_j = y_i} e^{a_j}

    The class maximum is detached: it cancels in value, and in the gradient.

    >>> segment_softmax(torch.zeros(3), torch.tensor([0, 1, 1]), 2)
    tensor([1.0000, 0.5000, 0.5000])
    """
    floor = logits.new_full((num_classes,), -torch.inf)
    top = floor.scatter_reduce(0, y, logits.detach(), "amax")
    e = torch.exp(logits - top[y])
    total = torch.zeros_like(top).index_add(0, y, e)
    return e / total.index_select(0, y)  # whose gradient needs no sort, unlike that of total[y]


@dataclass(frozen=True)
class ClassMoments:
    """Weighted mean and variance per class and dimension, both (c, d)."""

    mean: Float[Tensor, "c d"]
    var: Float[Tensor, "c d"]


class _ClassMoments(torch.autograd.Function):
    """Moments with the gradient written out: nothing is scattered on the way back.

    Because the weights of a class sum to 1, Σ_i α_i (x_i − μ_c) = 0 and the variance has no
    gradient through the mean.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's context object has no public type
        x: Tensor,
        weight: Tensor,
        y: Tensor,
        num_classes: int,
    ) -> tuple[Tensor, Tensor]:
        mean = segment_sum(weight[:, None] * x, y, num_classes)  # (c, d)
        spread = (x - mean[y]).square_().mul_(weight[:, None])
        ctx.save_for_backward(x, weight, y, mean)
        ctx.set_materialize_grads(False)
        return mean, segment_sum(spread, y, num_classes)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 - autograd's context object has no public type
        grad_mean: Tensor | None,
        grad_var: Tensor | None,
    ) -> tuple[Tensor, Tensor, None, None]:
        x, weight, y, mean = ctx.saved_tensors
        pull, push = torch.zeros_like(mean[:1]), torch.zeros_like(weight)
        if grad_mean is not None:
            pull = grad_mean[y]
            push = (pull * x).sum(1) if ctx.needs_input_grad[1] else push
        if grad_var is not None:
            off = x - mean[y]
            drawn = grad_var[y] * off
            pull = pull + 2.0 * drawn
            push = push + (drawn * off).sum(1) if ctx.needs_input_grad[1] else push
        return weight[:, None] * pull, push, None, None


def class_moments(
    x: Float[Tensor, "n d"], weight: Float[Tensor, " n"], y: Int[Tensor, " n"], num_classes: int
) -> ClassMoments:
    r"""Moments of each class under weights that sum to 1 within it; two passes.

    .. math:: \mu_c = \sum_i \alpha_i x_i, \qquad \sigma_c^2 = \sum_i \alpha_i (x_i - \mu_c)^2

    Backward keeps x, α and the means: n·d numbers that exist anyway and c·d new ones.

    >>> x = torch.tensor([[-1.0], [1.0]])
    >>> class_moments(x, torch.tensor([0.5, 0.5]), torch.tensor([0, 0]), 1).var
    tensor([[1.]])
    """
    moments = _ClassMoments.apply(x, weight, y, num_classes)  # type: ignore[no-untyped-call]
    return ClassMoments(*cast(tuple[Tensor, Tensor], moments))


def uniform_weights(y: Int[Tensor, " n"], count: Float[Tensor, " c"]) -> Float[Tensor, " n"]:
    """1/M_c for every sample of class c."""
    return 1.0 / count[y]


def effective_sample_size(
    weight: Float[Tensor, " n"],
    y: Int[Tensor, " n"],
    count: Float[Tensor, " c"],
    counted: Float[Tensor, " c"],
) -> Float[Tensor, ""]:
    r"""Share of a class's samples that the weights really use, mean over the `counted` classes.

    .. math:: \mathrm{ESS}_c = 1 / (M_c \sum_i \alpha_i^2) \in [1/M_c, 1]

    1 for uniform weights; near 1/M_c when attention has collapsed onto one sample.
    """
    squares = torch.zeros_like(count).index_add(0, y, weight.square())
    share = counted / (count * squares).clamp_min(1e-30)
    return share.sum() / counted.sum().clamp_min(1)
