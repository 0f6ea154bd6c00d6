"""Segment operations against boolean masks."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from splitveil.surrogates.base import class_moments, segment_softmax, segment_sum


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 15), c=st.integers(1, 6), seed=st.integers(0, 999))
def test_sum_and_softmax_equal_masks(n: int, c: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=g, dtype=torch.float64)
    a = 50 * torch.randn(n, generator=g, dtype=torch.float64)
    y = torch.randint(c, (n,), generator=g)
    total, soft = segment_sum(x, y, c), segment_softmax(a, y, c)
    for k in range(c):
        assert_close(total[k], x[y == k].sum(0))
        assert_close(soft[y == k], torch.softmax(a[y == k], 0))


def test_double_backward_of_the_softmax_and_the_moments() -> None:
    y = torch.tensor([0, 1, 1, 0, 1])
    g = torch.Generator().manual_seed(0)
    a = torch.randn(5, generator=g, dtype=torch.float64, requires_grad=True)
    x = torch.randn(5, 2, generator=g, dtype=torch.float64, requires_grad=True)

    def spread(logits: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return class_moments(features, segment_softmax(logits, y, 3), y, 3).var

    assert torch.autograd.gradcheck(spread, (a, x))
    assert torch.autograd.gradgradcheck(spread, (a, x))


def test_huge_logits_do_not_overflow() -> None:
    soft = segment_softmax(torch.tensor([1e30, -1e30, 3.0]), torch.tensor([0, 0, 1]), 2)
    assert soft.tolist() == [1.0, 0.0, 1.0]
