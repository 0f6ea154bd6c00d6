"""The rate: closed forms, the loop, bounds."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import surrogates as oracle
from oracles.batches import draw
from torch.testing import assert_close

from splitveil.errors import ConfigError
from splitveil.surrogates.gated_attention import GatedAttentionCEM
from splitveil.surrogates.rate import Rate
from splitveil.surrogates.slot_cross import SlotCrossAttentionCEM


def test_two_points_one_sigma_away_give_half_log_two() -> None:
    z = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    out = Rate(1, 1, noise_std=1.0)(z, torch.tensor([0, 0]))
    assert out.loss.item() == pytest.approx(0.5 * math.log(2))
    assert out.intra_mse.item() == 1.0


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 12),
    c=st.sampled_from([1, 3, 6, 30]),
    d=st.integers(1, 5),
    seed=st.integers(0, 999),
)
def test_equals_the_loop_and_the_surrogate_with_uniform_weights(
    n: int, c: int, d: int, seed: int
) -> None:
    z, y = draw(n, d, c, seed)
    out = Rate(d, c, noise_std=0.3)(z, y)
    slow = oracle.rate(z, y, c, 0.3)
    assert_close(out.loss, slow, rtol=1e-10, atol=1e-13)
    fast_grad, slow_grad = (torch.autograd.grad(v, z)[0] for v in (out.loss, slow))
    assert_close(fast_grad, slow_grad, rtol=1e-9, atol=1e-12)
    assert_close(out.diagnostics["true_rate"], out.loss.detach())
    cem = GatedAttentionCEM(d, c, penalty="rate", attention="uniform", noise_std=0.3).double()
    assert_close(cem(z, y).loss, out.loss)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(2, 12), c=st.integers(1, 4), d=st.integers(1, 5), seed=st.integers(0, 999))
def test_full_rate_is_the_logdet_and_at_most_the_diagonal(
    n: int, c: int, d: int, seed: int
) -> None:
    z, y = draw(n, d, c, seed)
    full = Rate(d, c, noise_std=0.3, covariance="full")(z, y).loss
    assert_close(full, oracle.full_rate(z, y, c, 0.3), rtol=1e-8, atol=1e-11)
    assert full.item() <= Rate(d, c, noise_std=0.3)(z, y).loss.item() + 1e-9


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_gradcheck(covariance: str) -> None:
    z, y = draw(7, 3, 2, seed=1)
    rate = Rate(3, 2, noise_std=0.5, covariance=covariance)  # type: ignore[arg-type]
    assert torch.autograd.gradcheck(lambda t: rate(t, y).loss, (z,))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 999), shift=st.floats(-5, 5), grow=st.floats(1.01, 10))
def test_the_loss_ignores_shifts_and_grows_with_scale(seed: int, shift: float, grow: float) -> None:
    z, y = draw(10, 3, 2, seed)
    rate = Rate(3, 2, noise_std=0.3)
    moved = z + shift * (y == 1)[:, None]
    assert_close(rate(moved, y).loss, rate(z, y).loss, rtol=1e-9, atol=1e-9)
    assert rate(z * grow, y).loss >= rate(z, y).loss


@pytest.mark.parametrize("power", range(-12, 13, 3))
def test_stress_ladder(power: int) -> None:
    z, y = draw(12, 4, 3, seed=2)
    scaled = (z.detach().float() * 10.0**power).requires_grad_()
    loss = Rate(4, 3, noise_std=0.025)(scaled, y).loss
    loss.backward()
    assert math.isfinite(loss.item())
    assert scaled.grad is not None
    assert bool(torch.isfinite(scaled.grad).all())


def test_nothing_to_see_is_nothing_hidden() -> None:
    alone, alike = (torch.rand(3, 2), torch.arange(3)), (torch.ones(4, 2), torch.arange(4) % 2)
    for surrogate in (
        Rate(2, 3, noise_std=0.3),
        GatedAttentionCEM(2, 3),
        SlotCrossAttentionCEM(2, 3, num_heads=1, penalty="rate"),
    ):
        for z, y in (alone, alike):
            said = surrogate(z, y).diagnostics
            assert said["true_rate"] == 0
            assert said["surrogate_to_true"] == 1


def test_noise_must_be_positive() -> None:
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="noise"):
            Rate(4, 3, noise_std=bad)
