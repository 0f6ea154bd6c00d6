"""How many images a search takes on: about as long for large images as for small ones."""

from collections.abc import Mapping
from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from splitveil.attacks.catalogue import ATTACKS
from splitveil.attacks.prior import Prior
from splitveil.attacks.profiles import PROFILES
from splitveil.attacks.rmle import LEAST, REFERENCE, Rmle, count_for
from splitveil.audits.suite import scaled_searches
from splitveil.errors import ConfigError
from splitveil.threat import Attack, Labelled

SEARCHES = ("rmle", "prior")


def sizes(attack: Attack) -> tuple[int, int]:
    assert isinstance(attack, Rmle | Prior)
    return attack.limit, attack.chunk


def scaled(attacks: Mapping[str, Attack], values: int, scored: int) -> dict[str, Attack]:
    images = torch.zeros(()).expand(scored, 1, 1, values)
    return scaled_searches(attacks, Labelled(images, torch.zeros(scored, dtype=torch.long)))


@given(count=st.integers(1, 500), values=st.integers(1, 10**6))
def test_a_budget_is_neither_exceeded_nor_zero(count: int, values: int) -> None:
    found = count_for(count, values)
    assert found >= min(count, LEAST) >= 1
    assert found * values <= max(count * REFERENCE, LEAST * values)
    assert count_for(count, REFERENCE) == count


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_images_of_cifars_size_change_nothing(profile: str) -> None:
    attacks = PROFILES[profile]
    assert scaled(attacks, REFERENCE, 10_000) == attacks


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
    made = scaled(PROFILES[profile], values, scored)
    assert [sizes(made[name]) for name in SEARCHES] == [wanted, wanted]
    others = set(made) - set(SEARCHES)
    assert all(made[name] is PROFILES[profile][name] for name in others)


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_on_no_images_is_refused(name: str) -> None:
    kind = ATTACKS[name]
    assert "most" in {f.name for f in fields(kind)}  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="most must be at least 1, got 0"):
        kind(most=0)  # type: ignore[call-arg]
