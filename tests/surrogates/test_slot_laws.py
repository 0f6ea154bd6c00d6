"""Law 2: slots that pay for their assignment bound the information; without the entropy not."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import surrogates as plain
from oracles.batches import draw
from oracles.slot_cases import build
from torch.testing import assert_close

from splitveil.surrogates.rate import Rate
from splitveil.surrogates.slot_cross import slot_rate, slot_weights
from splitveil.surrogates.slots import slot_moments


@settings(max_examples=15, deadline=None)
@given(n=st.integers(1, 10), c=st.integers(1, 4), seed=st.integers(0, 999))
def test_law_2_one_slot_is_the_rate_and_uniform_slots_add_log_s(n: int, c: int, seed: int) -> None:
    z, y = draw(n, 4, c, seed)
    rate = Rate(4, c, noise_std=0.5)(z, y).loss
    one = build(4, c, seed, penalty="rate", num_slots=1)
    assert_close(one(z, y).loss, rate, rtol=1e-10, atol=1e-12)
    three = build(4, c, seed, penalty="rate", attention="uniform")
    kept = sum(m for m in torch.bincount(y).tolist() if m > 1) / n
    assert_close(three(z, y).loss, rate + kept * math.log(3) / 4, rtol=1e-10, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(n=st.integers(2, 12), s=st.integers(1, 5), seed=st.integers(0, 999), sharp=st.booleans())
def test_law_2_slot_rate_is_between_its_bounds(n: int, s: int, seed: int, sharp: bool) -> None:
    """n points far apart against σ carry log n nats; no assignment may report less.

    Jensen gives the other side: within the slots the rate is at most that of the class.
    """
    z = torch.arange(n, dtype=torch.float64)[:, None]
    y = torch.zeros(n, dtype=torch.long)
    logits = draw(n, s, 1, seed)[0].detach()
    resp = torch.softmax(1e6 * logits if sharp else logits, 1)
    share = resp.mean(0, keepdim=True)
    var = slot_moments(z, resp, y, 1).var
    got = slot_rate(share, var, 1e-4)
    weight = torch.full((n,), 1 / n, dtype=torch.float64)
    entropy = -torch.special.xlogy(share, share).sum()
    assert got.item() >= math.log(n) - 1e-9
    assert got.item() <= (plain.rate_of_class(z, weight, 1e-4) + entropy).item() + 1e-9


def test_law_2_dropping_the_entropy_would_break_the_bound() -> None:
    """As many slots as samples: the variances vanish and only H(π) = log M is left."""
    z = torch.arange(6, dtype=torch.float64)[:, None]
    var = slot_moments(z, torch.eye(6, dtype=torch.float64), torch.zeros(6).long(), 1).var
    share = torch.full((1, 6), 1 / 6, dtype=torch.float64)
    assert float(var.max()) == 0.0
    assert slot_rate(share, var, 1e-4).item() == pytest.approx(math.log(6))


def test_slot_weights_are_powers_of_the_share() -> None:
    share = torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.0, 0.0]], dtype=torch.float64)
    weights = slot_weights(share, torch.tensor(2.0, dtype=torch.float64))
    assert_close(weights[0], torch.tensor([4.0, 1.0, 1.0], dtype=torch.float64) / 6)
    assert bool(torch.isfinite(weights).all())
