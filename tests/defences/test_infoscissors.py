"""InfoScissors: CLUB over all pairs, who learns from what, and a bound that never pays."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal

from splitveil.config.resolve import build_defence, make_config
from splitveil.defences.base import Companion
from splitveil.defences.catalogue import find_defence
from splitveil.defences.infoscissors import ScissorsBound, squared_error, squared_error_of_strangers
from splitveil.errors import ConfigError

WIRE, IMAGE = (4, 4, 4), (1, 8, 8)
Y = torch.zeros(8, dtype=torch.long)


def made(strength: float = 0.1) -> ScissorsBound:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return ScissorsBound(WIRE, IMAGE, strength=strength, lr=1e-3)


def batch(scale: float = 1.0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    z = scale * torch.rand(8, *WIRE, generator=g)
    return z.requires_grad_(), torch.rand(8, *IMAGE, generator=g)


def likelihood(guess: Tensor, log_std: float, x: Tensor) -> float:
    """Mean log density of the pixels, in nats."""
    q = Normal(guess, math.exp(log_std))
    return float(q.log_prob(x).mean())  # type: ignore[no-untyped-call]


class Told(nn.Module):
    """A decoder that knows the first images."""

    def __init__(self, x: Tensor, weight: float) -> None:
        super().__init__()
        self.x, self.weight = x, weight

    def forward(self, z: Tensor) -> Tensor:
        return self.weight * self.x + (1 - self.weight) * 0.5 + 0 * z.mean()


def test_strangers_by_hand_and_by_loop() -> None:
    x = torch.tensor([0.0, 1.0])
    assert squared_error_of_strangers(x, x).item() == 0.5  # pairs 0, 1, 1, 0
    g = torch.Generator().manual_seed(3)
    a, b = (torch.rand(5, 1, 2, 3, generator=g, dtype=torch.float64) for _ in range(2))
    slow = sum(float((p - q).square().mean()) for p in a for q in b) / 25
    assert squared_error_of_strangers(a, b).item() == pytest.approx(slow)


@pytest.mark.parametrize("weight", [1.0, 0.6])
def test_the_penalty_is_clubs_difference_of_likelihoods(weight: float) -> None:
    z, x = batch()
    found = made(strength=0.7)
    found.decoder = Told(x, weight)  # type: ignore[assignment]
    with torch.no_grad():
        found.log_variance.fill_(-2.0)
    guess = found.decoder(z).detach()
    matching = [likelihood(guess[i], -1.0, x[i]) for i in range(8)]
    strange = [likelihood(guess[i], -1.0, x[j]) for i in range(8) for j in range(8)]
    slow = sum(matching) / 8 - sum(strange) / 64
    assert found.penalty(z, x, Y).item() == pytest.approx(0.7 * slow, rel=1e-4)


def test_its_own_loss_is_the_negative_log_likelihood() -> None:
    z, x = batch()
    found = made()
    found.decoder = Told(x, 0.5)  # type: ignore[assignment]
    guess = found.decoder(z).detach()
    slow = -likelihood(guess, -1.5, x) - 0.5 * math.log(2 * math.pi)
    assert found.own_loss(z, x, Y).item() == pytest.approx(slow, rel=1e-5)


def test_worse_than_strangers_costs_nothing() -> None:
    z, x = batch()
    found = made()
    found.decoder = Told(x, -1.0)  # type: ignore[assignment]
    guess = found.decoder(z).detach()
    assert squared_error(guess, x) > squared_error_of_strangers(guess, x)
    assert found.penalty(z, x, Y).item() == 0


def test_its_own_loss_trains_its_net_alone() -> None:
    z, x = batch()
    found = made()
    assert isinstance(found, Companion)
    found.own_loss(z, x, Y).backward()  # type: ignore[no-untyped-call]
    assert z.grad is None
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in found.parameters())


def test_the_penalty_moves_the_encoder_and_leaves_the_net_alone() -> None:
    z, x = batch()
    found = made()
    optimiser = torch.optim.Adam(found.parameters(), lr=1e-2)
    for _ in range(40):
        optimiser.zero_grad()
        found.own_loss(z, x, Y).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    optimiser.zero_grad()
    before = {k: v.clone() for k, v in found.named_buffers()}
    paid = found.penalty(z, x, Y)
    paid.backward()  # type: ignore[no-untyped-call]
    assert paid.item() > 0
    assert z.grad is not None
    assert float(z.grad.abs().sum()) > 0
    assert all(p.grad is None for p in found.parameters())
    assert all(torch.equal(v, before[k]) for k, v in found.named_buffers())


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1.0, 1e3, 1e12])
def test_values_and_gradients_are_finite_at_every_scale(scale: float) -> None:
    z, x = batch(scale)
    found = made()
    total = found.own_loss(z, x, Y) + found.penalty(z, x, Y)
    total.backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    assert bool(total.isfinite() & z.grad.isfinite().all())
    assert all(bool(p.grad.isfinite().all()) for p in found.parameters() if p.grad is not None)


def test_the_variance_stays_within_its_bounds() -> None:
    z, x = batch()
    found = made()
    with torch.no_grad():
        found.log_variance.fill_(-1e9)
    assert bool(found.own_loss(z, x, Y).isfinite() & found.penalty(z, x, Y).isfinite())


@pytest.mark.parametrize(
    ("key", "value"),
    [("scissors_strength", -0.1), ("scissors_strength", float("nan")), ("scissors_lr", 0.0)],
)
def test_settings_out_of_range_are_refused(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{key} must be a finite number .*, got {value}"):
        build_defence(make_config({"defence": "infoscissors", key: value}))


def test_it_stacks_with_a_penalty() -> None:
    assert find_defence("infoscissors+veil").surrogate(64, 10, 0.05) is not None
