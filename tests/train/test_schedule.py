"""Schedules are pure functions of the step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitveil.defences.base import PenaltyPlan
from splitveil.train.loop import Schedule, warn_first

R3 = PenaltyPlan(lambd=16.0, scale=0.1, warmup_epochs=5, w_lr="cem", skip_first_epoch=True)


def schedule(plan: PenaltyPlan, kind: str = "cem", epochs: int = 240) -> Schedule:
    return Schedule(kind=kind, peak_lr=0.05, epochs=epochs, steps_per_epoch=2, penalty=plan)  # type: ignore[arg-type]


def test_published_learning_rates_of_cem() -> None:
    """Epochs 60, 120, 180, 210 of 240 begin with 0.01, 0.002, 4e-4, 8e-5."""
    s = schedule(PenaltyPlan())
    rates = [s.lr_at(2 * (epoch - 1)) for epoch in (1, 59, 60, 120, 180, 210, 240)]
    assert rates == pytest.approx([0.05, 0.05, 0.01, 0.002, 4e-4, 8e-5, 8e-5])


def test_published_effective_weights_of_cem() -> None:
    """λ·w_lr for λ = 16: 0.32, 1.6, 8, 16, 16; times the reference documents' scale 0.1."""
    s = schedule(R3)
    weights = [s.weights_at(2 * e) for e in (10, 60, 120, 180, 210)]
    assert [w.encoder for w in weights if w] == pytest.approx([0.32, 1.6, 8, 16, 16])
    assert [w.effective for w in weights if w] == pytest.approx([0.032, 0.16, 0.8, 1.6, 1.6])


def test_the_penalty_waits_for_warm_up_and_first_epoch() -> None:
    s = schedule(R3)
    active = [e for e in range(1, 11) if s.weights_at(2 * (e - 1)) is not None]
    assert active == [6, 7, 8, 9, 10]
    first = PenaltyPlan(lambd=1.0, skip_first_epoch=True)
    assert schedule(first).weights_at(1) is None
    assert schedule(first).weights_at(2) is not None
    assert schedule(PenaltyPlan(lambd=1.0)).weights_at(0) is not None


@given(step=st.integers(0, 479))
def test_lambda_zero_is_never_active(step: int) -> None:
    assert schedule(PenaltyPlan(lambd=0.0, scale=1.0)).weights_at(step) is None


def test_attention_that_gets_lambda_sees_it_in_the_scale() -> None:
    weights = schedule(PenaltyPlan(lambd=3.0, scale=0.5, attention_gets_lambda=True)).weights_at(0)
    assert weights is not None
    assert (weights.encoder, weights.scale, weights.effective) == (1.0, 1.5, 1.5)


def test_a_ramp_grows_linearly_and_spares_the_attention() -> None:
    """Half-way up the ramp the encoder gets half of λ; the attention's own scale is untouched."""
    s = schedule(PenaltyPlan(lambd=4.0, scale=0.5, ramp=0.5), epochs=100)
    weights = [s.weights_at(step) for step in (0, 50, 100, 199)]
    assert [w.encoder for w in weights if w] == pytest.approx([0.0, 2.0, 4.0, 4.0])
    assert [w.scale for w in weights if w] == [0.5] * 4


@given(step=st.integers(0, 199))
def test_one_cycle_stays_between_zero_and_the_peak(step: int) -> None:
    s = schedule(PenaltyPlan(), "one-cycle", epochs=100)
    assert 0 < s.lr_at(step) <= 0.05


@pytest.mark.parametrize(
    ("epochs", "batch", "said"),
    [(6, 100, []), (5, 100, ["the penalty never acts: it waits for 5 epochs of warm-up"]),
     (6, 101, ["batch_size 101 is more than the 100 training images"])],
)  # fmt: skip
def test_settings_without_effect_are_warned_of_before_the_first_step(
    epochs: int, batch: int, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    warn_first(schedule(R3, epochs=epochs), batch, 100)
    assert len(caplog.messages) == len(said)
    assert all(words in told for words, told in zip(said, caplog.messages, strict=True))
