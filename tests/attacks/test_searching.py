"""How many images a search takes on: about as long for large images as for small ones."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace

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
from splitveil.io import silent
from splitveil.threat import (
    Access,
    Attack,
    BlackBox,
    Labelled,
    Reconstructor,
    SharedFits,
    Victim,
)

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


@dataclass(frozen=True)
class MeanOf:
    """A start that notes on how many images it is fitted, and whether it could share."""

    noted: list[tuple[int, bool]] = field(default_factory=list, repr=False)
    access: Access = Access.BLACK_BOX

    def fit(self, victim: BlackBox, aux: Labelled, *_: object) -> Reconstructor:
        self.noted.append((len(aux), victim.fits is not None))
        mean = aux.images.mean(0)
        return lambda seen: mean.expand(len(seen.z), *mean.shape)


def test_searches_share_a_start_that_never_saw_their_held_out_images(
    make_aux: Callable[..., Labelled], linear_victim: Victim
) -> None:
    start, aux = MeanOf(), make_aux(40)
    box = replace(linear_victim.white_box(), fits=SharedFits(0, linear_victim.device))
    rmle = Rmle(start=start, steps=1, chunk=8)
    prior = Prior(start=start, steps=1, refine=0, factors=2, chunk=8)
    guides = [
        search.guided(box, aux, torch.Generator().manual_seed(seed), silent)
        for seed, search in enumerate((rmle, prior))
    ]
    assert start.noted == [(36, False)]
    (_, held, used, first), (_, again, _, second) = guides
    assert first is second
    assert torch.equal(held.images, again.images)
    assert len(torch.unique(torch.cat([held.images, used.images]), dim=0)) == 40
