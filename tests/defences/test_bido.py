"""BiDO: a price on HSIC(x, z), a reward on HSIC(z, y), each against a slow version."""

import pytest
import torch
from torch import Tensor

from splitveil.config.resolve import build_defence, make_config
from splitveil.defences.base import Companion
from splitveil.defences.bido import BilateralDependency
from splitveil.defences.catalogue import find_defence
from splitveil.errors import ConfigError

Y = torch.arange(12) % 3


def batch(scale: float = 1.0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    z = scale * torch.rand(12, 4, 2, 2, generator=g, dtype=torch.float64)
    return z.requires_grad_(), torch.rand(12, 1, 4, 4, generator=g, dtype=torch.float64)


def made(label_share: float, strength: float = 1.0) -> BilateralDependency:
    return BilateralDependency(strength=strength, label_share=label_share, bandwidth=5.0)


def slow_kernel(v: Tensor) -> Tensor:
    rows = v.detach().flatten(1)
    near = [[torch.exp(-(a - b).square().sum() / (2 * 25 * len(a))) for b in rows] for a in rows]
    return torch.tensor(near, dtype=torch.float64)


def slow_hsic(k: Tensor, m: Tensor) -> float:
    n = len(k)
    eye = torch.eye(n, dtype=torch.float64)
    h = eye - 1 / n
    white = [h @ v @ h @ torch.linalg.inv(h @ v @ h + 1e-5 * n * eye) for v in (k, m)]
    return float(torch.trace(white[0] @ white[1]))


def test_both_terms_are_those_of_the_loops() -> None:
    z, x = batch()
    one_hot = torch.nn.functional.one_hot(Y).double()
    leak = slow_hsic(slow_kernel(x), slow_kernel(z))
    use = slow_hsic(slow_kernel(z), one_hot @ one_hot.T)
    assert made(0.0).penalty(z, x, Y).item() == pytest.approx(leak, rel=1e-6)
    paid = made(10.0, strength=0.05).penalty(z, x, Y)
    assert paid.item() == pytest.approx(0.05 * (leak - 10 * use), rel=1e-6)


def test_it_is_a_companion_that_learns_nothing() -> None:
    z, x = batch()
    found = made(1.0)
    assert isinstance(found, Companion)
    assert list(found.parameters()) == []
    assert found.own_loss(z, x, Y).item() == 0


def test_z_that_is_the_label_costs_less_than_z_that_is_the_image() -> None:
    _, x = batch()
    label = torch.nn.functional.one_hot(Y).double()
    price = made(1.0)
    assert price.penalty(label, x, Y).item() < price.penalty(x.flatten(1), x, Y).item()


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1.0, 1e3, 1e12])
def test_values_and_gradients_are_finite_at_every_scale(scale: float) -> None:
    z, x = batch(scale)
    small = z.detach().float().requires_grad_()
    paid = made(10.0).penalty(small, x.float(), Y)
    paid.backward()  # type: ignore[no-untyped-call]
    assert small.grad is not None
    assert bool(paid.isfinite() & small.grad.isfinite().all())
    assert (float(small.grad.abs().sum()) > 0) is (scale < 1e3)  # far apart, kernels are flat


def test_gradients_are_those_of_finite_differences() -> None:
    z, x = batch()
    price = BilateralDependency(strength=1.0, label_share=2.0, bandwidth=0.2)
    torch.autograd.gradcheck(lambda v: price.penalty(v, x, Y), z)


@pytest.mark.parametrize(
    ("key", "value"),
    [("bido_strength", -0.1), ("bido_label_share", float("inf")), ("bido_bandwidth", 0.0)],
)
def test_settings_out_of_range_are_refused(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{key} must be a finite number .*, got {value}"):
        build_defence(make_config({"defence": "bido", key: value}))


def test_it_stacks_with_a_penalty() -> None:
    assert find_defence("bido+cem").surrogate(64, 10, 0.05) is not None
