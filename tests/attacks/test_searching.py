"""How many images a search takes on: about as long for large images as for small ones."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitveil.attacks.base import LEAST, REFERENCE, count_for
from splitveil.attacks.catalogue import ATTACKS
from splitveil.attacks.prior import Prior
from splitveil.attacks.profiles import PROFILES, scale_search_budgets
from splitveil.attacks.rmle import Rmle
from splitveil.errors import ConfigError
from splitveil.threat import Attack

SEARCHES = ("rmle", "prior")


def sizes(attack: Attack) -> tuple[int, int]:
    assert isinstance(attack, Rmle | Prior)
    return attack.limit, attack.chunk


@given(count=st.integers(1, 500), values=st.integers(1, 10**6))
def test_a_budget_is_neither_exceeded_nor_zero(count: int, values: int) -> None:
    found = count_for(count, values)
    assert found >= min(count, LEAST) >= 1
    assert found * values <= max(count * REFERENCE, LEAST * values)
    assert count_for(count, REFERENCE) == count


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_images_of_cifars_size_change_nothing(profile: str) -> None:
    attacks = PROFILES[profile]
    assert scale_search_budgets(attacks, REFERENCE, 10_000) == attacks


@pytest.mark.parametrize(
    ("profile", "values", "scored", "wanted"),
    [
        ("quick", 64, 359, (359, 359)),  # all digits, at once
        ("smoke", 64, 359, (32, 32)),
        ("quick", 784, 10_000, (250, 250)),
        ("standard", 784, 10_000, (1003, 501)),
        ("standard", 3 * 96 * 96, 8000, (28, 14)),
        ("smoke", 3 * 96 * 96, 8000, (8, 8)),
        ("standard", REFERENCE, 100, (100, 100)),
    ],
)
def test_small_images_are_more_and_large_ones_fewer(
    profile: str, values: int, scored: int, wanted: tuple[int, int]
) -> None:
    made = scale_search_budgets(PROFILES[profile], values, scored)
    assert [sizes(made[name]) for name in SEARCHES] == [wanted, wanted]
    others = set(made) - set(SEARCHES)
    assert all(made[name] is PROFILES[profile][name] for name in others)


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_on_no_images_is_refused(name: str) -> None:
    kind = ATTACKS[name]
    assert "most" in {f.name for f in fields(kind)}  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="most must be at least 1, got 0"):
        kind(most=0)  # type: ignore[call-arg]
