"""NoPeek: what the encoder pays is the distance correlation, and nothing else changes."""

import pytest
import torch
from torch import Tensor

from splitveil.config.resolve import build_defence, make_config
from splitveil.defences.base import Companion
from splitveil.defences.catalogue import find_defence
from splitveil.defences.nopeek import DistanceCorrelation
from splitveil.errors import ConfigError

Y = torch.zeros(12, dtype=torch.long)


def batch(scale: float = 1.0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    z = scale * torch.rand(12, 4, 2, 2, generator=g)
    return z.requires_grad_(), torch.rand(12, 1, 8, 8, generator=g)


def test_three_images_by_hand() -> None:
    x = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64).reshape(3, 1, 1, 1)
    z = x.square().flatten(1)
    paid = DistanceCorrelation(0.5).penalty(z, x, Y[:3])
    by_hand = 0.5 * (720 / (360 * 1656) ** 0.5) ** 0.5  # dCov and the dVars, over 81
    assert paid.item() == pytest.approx(by_hand, rel=1e-12)


def test_it_is_a_companion_that_learns_nothing() -> None:
    z, x = batch()
    found = DistanceCorrelation(0.3)
    assert isinstance(found, Companion)
    assert list(found.parameters()) == []
    own = found.own_loss(z, x, Y)
    assert (own.item(), own.requires_grad) == (0.0, False)


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1.0, 1e3, 1e12])
def test_the_encoder_has_a_finite_gradient_at_every_scale(scale: float) -> None:
    z, x = batch(scale)
    paid = DistanceCorrelation(0.3).penalty(z, x, Y)
    paid.backward()  # type: ignore[no-untyped-call]
    assert 0 < paid.item() <= 0.3
    assert z.grad is not None
    assert bool(z.grad.isfinite().all())
    assert float(z.grad.abs().sum()) > 0


def test_descent_on_it_makes_z_forget_the_image() -> None:
    _, x = batch()
    z = x.flatten(1)[:, :6].clone().requires_grad_()
    price = DistanceCorrelation(1.0)
    start = price.penalty(z, x, Y).item()
    optimiser = torch.optim.SGD([z], lr=1.0)
    for _ in range(60):
        optimiser.zero_grad()
        price.penalty(z, x, Y).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    assert price.penalty(z, x, Y).item() < 0.8 * start


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_a_price_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=f"nopeek_strength must be a finite .* got {value}"):
        build_defence(make_config({"defence": "nopeek", "nopeek_strength": value}))


def test_it_stacks_with_a_penalty_and_with_an_adversary() -> None:
    assert find_defence("nopeek+veil").surrogate(64, 10, 0.05) is not None
    assert {"nopeek_strength", "arl_strength"} <= find_defence("nopeek+arl").settings().keys()
