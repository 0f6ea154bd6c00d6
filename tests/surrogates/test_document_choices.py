"""Where the reference documents disagree, both readings exist and equal the printed formulas."""

import itertools

import pytest
from oracles import slots as oracle
from oracles.batches import draw
from oracles.slot_cases import build, gradients
from torch.testing import assert_close

from splitveil.config.resolve import resolve
from splitveil.config.run_config import RunConfig
from splitveil.data import load
from splitveil.errors import ConfigError
from splitveil.surrogates.slot_cross import SlotCrossAttentionCEM

READINGS = list(itertools.product(("sum", "mean"), ("layernorm", "enhanced")))


@pytest.mark.parametrize(("aggregate", "assign_from"), READINGS)
@pytest.mark.parametrize("slot_dim", [None, 4])
def test_each_reading_equals_the_printed_formulas(
    aggregate: str, assign_from: str, slot_dim: int | None
) -> None:
    cem = build(6, 3, aggregate=aggregate, assign_from=assign_from, slot_dim=slot_dim)
    z, y = draw(14, 6, 3, seed=5)
    fast, slow = cem(z, y).loss, oracle.cem(cem, z, y)[0]
    assert_close(fast, slow, rtol=1e-12, atol=1e-13)
    assert_close(gradients(fast, cem, z), gradients(slow, cem, z), rtol=1e-12, atol=1e-12)


def test_the_readings_differ() -> None:
    z, y = draw(14, 6, 3, seed=5)
    losses = {
        float(build(6, 3, aggregate=a, assign_from=f)(z, y).loss.detach()) for a, f in READINGS
    }
    assert len(losses) == len(READINGS)


def test_a_run_reaches_them_by_their_names() -> None:
    chosen = {"aggregate": "sum", "assign_from": "layernorm"}
    config = RunConfig(dataset="digits", defence="slot-cross", settings=chosen)
    surrogate = resolve(config, load("digits")).build().surrogate
    assert isinstance(surrogate, SlotCrossAttentionCEM)
    assert (surrogate.slots.aggregate, surrogate.assign_from) == ("sum", "layernorm")


@pytest.mark.usefixtures("as_users_run")
@pytest.mark.parametrize(("name", "allowed"), [("aggregate", "sum"), ("assign_from", "layernorm")])
def test_another_word_is_refused_with_the_allowed_ones(name: str, allowed: str) -> None:
    with pytest.raises(ConfigError, match=allowed):
        SlotCrossAttentionCEM(4, 2, **{name: "median"})  # type: ignore[arg-type]
