"""Intervals of shares, areas and rates against other libraries and by simulation."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import balanced_accuracy_score

from splitveil.audits.beyond_pixels import (
    auc_limits,
    balanced_limits,
    from_answer,
    matched_pairs,
    tpr_limits,
)
from splitveil.errors import AuditError
from splitveil.record.statistics import exact, wilson


def normal(n: int, seed: int, shift: float = 0.0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).double() + shift


@given(n=st.integers(1, 300), data=st.data())
def test_intervals_of_a_share_are_those_of_scipy(n: int, data: st.DataObject) -> None:
    hits = data.draw(st.integers(0, n))
    result = stats.binomtest(hits, n)
    for ours, method in ((wilson, "wilson"), (exact, "exact")):
        theirs = result.proportion_ci(method=method)
        assert ours(hits, n) == pytest.approx((theirs.low, theirs.high), abs=1e-9)


@pytest.mark.parametrize(("hits", "n"), [(1, 0), (-1, 5), (6, 5)])
def test_impossible_shares_are_refused(hits: int, n: int) -> None:
    for interval in (wilson, exact):
        with pytest.raises(AuditError, match=f"got {hits} of {n}"):
            interval(hits, n)


def test_the_interval_of_an_area_covers_as_often_as_it_says() -> None:
    for shift in (0.0, 1.0):
        truth = float(stats.norm.cdf(shift / math.sqrt(2)))
        covered = 0
        for seed in range(400):
            _, (low, high) = auc_limits(normal(60, 2 * seed, shift), normal(60, 2 * seed + 1))
            covered += low <= truth <= high
        assert 367 <= covered <= 393  # 380 ± 3 sd


def test_a_perfect_area_still_has_an_interval() -> None:
    low, high = torch.arange(20).double(), torch.arange(100, 130).double()
    least = 0.025 ** (1 / 20)
    for a, b, expected in ((high, low, (1.0, least, 1.0)), (low, high, (0.0, 0.0, 1 - least))):
        area, limits = auc_limits(a, b)
        assert (area, *limits) == pytest.approx(expected)


def test_equal_scores_say_nothing() -> None:
    area, (low, high) = auc_limits(torch.ones(10), torch.ones(10))
    assert area == 0.5
    assert low <= 0.5 <= high


def test_areas_of_nothing_or_of_nan_are_refused() -> None:
    with pytest.raises(AuditError, match="at least 2 scores on each side, got 1 and 5"):
        auc_limits(torch.ones(1), torch.ones(5))
    with pytest.raises(AuditError, match="finite scores"):
        auc_limits(torch.tensor([1.0, torch.nan]), torch.ones(5))


def test_the_hit_rate_by_hand() -> None:
    others = torch.arange(200).double()  # two may be exceeded: the bar is 197
    members = torch.tensor([197.0, 197.5, 198.0, 0.0])
    found = tpr_limits(members, others, 0.01, torch.Generator())
    assert found is not None
    assert found[0] == 0.5
    assert found[1][0] <= 0.5 <= found[1][1]
    assert tpr_limits(members, others[:99], 0.01, torch.Generator()) is None


def test_the_hit_rate_of_equal_sides_is_the_false_alarm_rate() -> None:
    found = tpr_limits(normal(4000, 0), normal(4000, 1), 0.01, torch.Generator().manual_seed(0))
    assert found is not None
    assert found[1][0] <= 0.01 <= found[1][1]
    assert found[1][1] - found[1][0] < 0.02
    ties = tpr_limits(torch.ones(200), torch.ones(200), 0.01, torch.Generator())
    assert ties is not None
    assert ties[0] == 0.0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30))
def test_balanced_accuracy_is_that_of_sklearn(pairs: list[tuple[int, int]]) -> None:
    truth, predicted = [a for a, _ in pairs], [b for _, b in pairs]
    kinds = sorted(set(truth))
    recalls = [sum(b == k for a, b in pairs if a == k) / truth.count(k) for k in kinds]
    found, (low, high) = balanced_limits(torch.tensor(predicted), torch.tensor(truth))
    assert 0 <= low <= found <= high <= 1
    assert found == pytest.approx(sum(recalls) / len(kinds))
    if set(predicted) <= set(kinds) and len(kinds) > 1:
        assert found == pytest.approx(balanced_accuracy_score(truth, predicted))


def test_the_usual_value_decides_between_equals() -> None:
    known, values = torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0])
    asked = torch.tensor([0, 1, 2])
    assert from_answer(known, values, asked, torch.tensor(1)).tolist() == [1, 0, 1]


@given(
    a=st.lists(st.integers(0, 4), max_size=20),
    b=st.lists(st.integers(0, 4), max_size=20),
    seed=st.integers(0, 1000),
)
def test_pairs_share_a_label_and_use_no_image_twice(a: list[int], b: list[int], seed: int) -> None:
    left, right = torch.tensor(a, dtype=torch.long), torch.tensor(b, dtype=torch.long)
    pairs = matched_pairs(left, right, torch.Generator().manual_seed(seed))
    assert torch.equal(left[pairs[:, 0]], right[pairs[:, 1]])
    assert len(set(pairs[:, 0].tolist())) == len(set(pairs[:, 1].tolist())) == len(pairs)
    assert len(pairs) == sum(min(a.count(k), b.count(k)) for k in range(5))


def test_random_guesses_have_the_balanced_accuracy_of_chance() -> None:
    covered = 0
    for seed in range(300):
        draws = torch.Generator().manual_seed(seed)
        truth = torch.multinomial(torch.tensor([0.6, 0.3, 0.1]), 200, True, generator=draws)
        blind = torch.multinomial(torch.tensor([0.2, 0.3, 0.5]), 200, True, generator=draws)
        _, (low, high) = balanced_limits(blind, truth)
        covered += low <= 1 / 3 <= high
    assert 273 <= covered <= 297  # 285 ± 3 sd
