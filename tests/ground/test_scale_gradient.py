"""`scale_gradient`: identity forward, scaled and guarded backward."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from splitveil.functional import scale_gradient


@settings(deadline=None)
@given(k=st.floats(-100, 100), value=st.floats(-100, 100))
def test_identity_forward_and_factor_backward(k: float, value: float) -> None:
    x = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    y = scale_gradient(x, k)
    assert y.item() == value
    (3 * y).backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert x.grad.item() == pytest.approx(3 * k)


def test_a_tensor_factor_works_and_second_derivatives_exist() -> None:
    x = torch.tensor([0.3, -0.7], dtype=torch.float64, requires_grad=True)
    k = torch.tensor(1.0, dtype=torch.float64)

    def cube(t: Tensor) -> Tensor:
        return scale_gradient(t, k) ** 3

    assert torch.autograd.gradcheck(cube, (x,))
    assert torch.autograd.gradgradcheck(cube, (x,))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_gradient_becomes_zero_and_counts(bad: float) -> None:
    x = torch.ones(3, requires_grad=True)
    skips = torch.zeros((), dtype=torch.long)
    scale_gradient(x, 2.0, skips).backward(torch.tensor([1.0, bad, 1.0]))  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 0.0, 0.0]
    assert skips.item() == 1


def test_a_finite_gradient_does_not_count() -> None:
    x = torch.ones(3, requires_grad=True)
    skips = torch.zeros((), dtype=torch.long)
    scale_gradient(x, 2.0, skips).sum().backward()  # type: ignore[no-untyped-call]
    assert skips.item() == 0


def test_an_overflowing_product_becomes_zero() -> None:
    x = torch.ones(1, requires_grad=True)
    scale_gradient(x, 1e30).backward(torch.tensor([1e30]))  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert x.grad.item() == 0.0
