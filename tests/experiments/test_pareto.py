"""Front and hypervolume against hand-made numbers, brute force and darts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitveil.record.statistics import front, hypervolume, most_private

few = st.integers(0, 6).map(lambda i: i / 6)
points = st.lists(st.tuples(few, few), min_size=1, max_size=9)


def volume(pairs: list[tuple[float, float]], chance: float = 0.0) -> float:
    table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return hypervolume(table[:, 0], table[:, 1], chance)


@given(points)
def test_the_front_is_what_brute_force_finds(pairs: list[tuple[float, float]]) -> None:
    for (a, b), mark in zip(pairs, front(pairs), strict=True):
        beaten = any((c > a and d <= b) or (c >= a and d < b) for c, d in pairs)
        assert mark == (not beaten)


def test_leakage_below_zero_counts_as_zero() -> None:
    assert front([(0.9, -0.1), (0.8, -0.5)]) == [True, False]
    assert volume([(0.9, -0.5)]) == volume([(0.9, 0.0)]) == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("pairs", "chance", "expected"),
    [
        ([], 0.1, 0.0),
        ([(1.0, 0.0)], 0.1, 1.0),
        ([(0.1, 0.0)], 0.1, 0.0),
        ([(0.05, 0.0)], 0.1, 0.0),
        ([(1.0, 1.0)], 0.1, 0.0),
        ([(1.0, 1.7)], 0.1, 0.0),
        ([(0.55, 0.5)], 0.1, 0.25),
        ([(0.75, 0.5), (0.5, 0.25)], 0.0, 0.75 * 0.5 + 0.5 * 0.25),
        ([(0.75, 0.5), (0.5, 0.25), (0.5, 0.5), (0.75, 0.5)], 0.0, 0.5),
        ([(0.9, 0.8), (0.6, 0.4), (0.3, 0.1)], 0.0, 0.9 * 0.2 + 0.6 * 0.4 + 0.3 * 0.3),
    ],
)
def test_the_hypervolume_of_staircases_measured_by_hand(
    pairs: list[tuple[float, float]], chance: float, expected: float
) -> None:
    assert volume(pairs, chance) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_the_hypervolume_is_the_share_of_covered_darts(seed: int) -> None:
    random = np.random.default_rng(seed)
    accuracy, leakage = random.random(7), random.random(7) * 1.3 - 0.2
    darts = random.random((200_000, 2)) * [0.8, 1.0] + [0.2, 0.0]
    covered = (darts[:, :1] <= accuracy) & (darts[:, 1:] >= leakage)
    share = covered.any(1).mean()
    found = hypervolume(accuracy, leakage, 0.2)
    assert abs(found - share) < 5 * np.sqrt(0.25 / len(darts))
    assert 0 < found < 1


@given(points, st.tuples(few, few))
def test_another_point_never_shrinks_the_hypervolume(
    pairs: list[tuple[float, float]], other: tuple[float, float]
) -> None:
    more = [*pairs, other]
    assert volume(more) >= volume(pairs) - 1e-12
    if not front(more)[-1]:
        assert volume(more) == pytest.approx(volume(pairs), abs=1e-12)
    assert volume(more) == pytest.approx(volume(more[::-1]), abs=1e-12)


def test_the_most_private_of_those_accurate_enough_is_chosen() -> None:
    pairs = [(0.9, 0.5), (0.89, 0.3), (0.85, 0.1), (0.91, 0.3), (0.95, 0.9)]
    assert most_private(pairs, 0.88) == 3
    assert most_private(pairs, 0.8) == 2
    assert most_private(pairs, 0.96) is None
    assert most_private([(0.9, -0.4), (0.95, 0.0)], 0.5) == 1
