"""Intervals, p-values and effect sizes against hand-made numbers and slow oracles."""

import json
import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from splitveil.errors import AuditError
from splitveil.record.statistics import Sample, difference, holm, interval


def table(seed: int, seeds: int = 3, images: int = 7) -> np.ndarray:
    rng = np.random.default_rng(seed)
    parts = [(seeds, 1), (1, images), (seeds, images)]
    return np.asarray(sum(rng.exponential(size=size) for size in parts))


def test_one_seed_gives_students_interval_over_images() -> None:
    made = interval(Sample.of([[1.0, 2.0, 3.0, 4.0, 5.0]]))
    assert (made.seeds, made.images, made.scope, made.mean) == (1, 5, "images", 3.0)
    assert made.high == pytest.approx(3 + 2.7764451 * math.sqrt(2.5 / 5))  # t, 4 degrees of freedom
    assert made.low == pytest.approx(6 - made.high)


def test_the_standard_error_of_a_small_table_by_hand() -> None:
    made = interval(Sample.of([[1.0, 4.0, 7.0], [3.0, 6.0, 9.0]]))
    # seeds' means 4 and 6: 2/2; images' means 2, 5, 8: 9/3; no interaction
    assert made.standard_error == pytest.approx(math.sqrt(1 + 3))
    assert (made.seeds, made.scope) == (2, "seeds and images")


def test_without_image_effects_it_is_the_t_test_of_seeds() -> None:
    rng = np.random.default_rng(5)
    a, b = (np.repeat(rng.standard_normal((s, 1)), 4, axis=1) for s in (3, 5))
    paired = difference(Sample.of(a), Sample.of(b[:3]), paired=True)
    assert paired.p_value == pytest.approx(scipy_stats.ttest_rel(a[:, 0], b[:3, 0]).pvalue)
    unpaired = difference(Sample.of(a), Sample.of(b), paired=False)
    welch = scipy_stats.ttest_ind(a[:, 0], b[:, 0], equal_var=False)
    assert unpaired.p_value == pytest.approx(welch.pvalue)
    low, high = welch.confidence_interval()
    assert (unpaired.interval.low, unpaired.interval.high) == pytest.approx((low, high))


def test_pairing_removes_what_the_seeds_share() -> None:
    shared = np.array([[0.0], [4.0], [8.0]])
    a, b = Sample.of(shared + table(6)), Sample.of(shared + table(7))
    paired, unpaired = (difference(a, b, paired=way) for way in (True, False))
    assert paired.interval.standard_error < 1
    assert unpaired.interval.standard_error > 3  # √(2·16/3) and a little
    assert paired.interval == interval(Sample.of(a.values - b.values))


@pytest.mark.parametrize(("seeds", "others"), [(1, 3), (3, 1), (1, 1)])
def test_one_seed_on_either_side_covers_images_only(seeds: int, others: int) -> None:
    a, b = table(8, seeds), table(9, others)
    made = difference(Sample.of(a), Sample.of(b), paired=False)
    assert (made.interval.seeds, made.interval.scope) == (1, "images")
    assert made.interval == interval(Sample.of([a.mean(0) - b.mean(0)]))


def test_the_interval_is_longer_towards_the_tail() -> None:
    made = interval(Sample.of([[0.0, 0.1, 0.2, 0.3, 5.0]]))
    assert made.high - made.mean > 1.2 * (made.mean - made.low)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**31), seeds=st.integers(1, 4), paired=st.booleans())
def test_verdict_p_value_and_interval_agree(seed: int, seeds: int, paired: bool) -> None:
    made = difference(
        Sample.of(1 + table(seed, seeds)),
        Sample.of(table(seed + 1, seeds)),
        paired=paired,
        level=0.9,
    )
    assert made.interval.low < made.interval.mean < made.interval.high
    assert made.excludes_zero == (made.p_value < 0.1)
    assert made.excludes_zero == (made.interval.low > 0 or made.interval.high < 0)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**31), seeds=st.integers(1, 4), scale=st.floats(0.01, 100))
def test_order_unit_and_side_do_not_matter(seed: int, seeds: int, scale: float) -> None:
    a, b = table(seed, seeds), table(seed + 1, seeds)
    here = difference(Sample.of(a), Sample.of(b), paired=True)
    rng = np.random.default_rng(seed)
    rows, columns = rng.permutation(a.shape[0]), rng.permutation(a.shape[1])
    a, b = (1 + scale * t[rows][:, columns] for t in (a, b))
    there = difference(Sample.of(b), Sample.of(a), paired=True)
    assert there.p_value == pytest.approx(here.p_value, rel=1e-6)
    assert there.interval.low == pytest.approx(-scale * here.interval.high, rel=1e-6, abs=1e-6)
    assert there.interval.high == pytest.approx(-scale * here.interval.low, rel=1e-6, abs=1e-6)
    assert there.d_z == pytest.approx(-(here.d_z or math.nan), rel=1e-6)
    assert there.rank_biserial == pytest.approx(-here.rank_biserial)


def test_effect_sizes_by_hand() -> None:
    a = Sample.of([[0.0, 2.0, 2.0, -1.0, 5.0], [0.0, 2.0, 2.0, -3.0, 5.0]])
    b = Sample.of(np.zeros((2, 5)))
    made = difference(a, b, paired=True)  # images: 0, 2, 2, -2, 5; ranks of the last four: 2 2 2 4
    assert made.rank_biserial == pytest.approx((2 + 2 - 2 + 4) / 10)
    assert made.d_z == pytest.approx(1.4 / math.sqrt((37 - 5 * 1.4**2) / 4))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(-3, 3), min_size=2, max_size=12).filter(any))
def test_rank_biserial_equals_wilcoxons_rank_sums(values: list[int]) -> None:
    made = difference(Sample.of([values]), Sample.of([[0] * len(values)]), paired=True)
    there = np.array([v for v in values if v])
    ranks = scipy_stats.rankdata(np.abs(there))
    balance = ranks[there > 0].sum() - ranks[there < 0].sum()
    assert made.rank_biserial == pytest.approx(balance / ranks.sum())


def test_a_difference_without_spread_is_certain() -> None:
    a = Sample.of(np.full((3, 4), 0.3))
    same = difference(a, a, paired=True)
    assert (same.p_value, same.excludes_zero, same.d_z, same.rank_biserial) == (1.0, False, None, 0)
    a, b = Sample.of(np.full((5, 3), 0.1)), Sample.of(np.zeros((5, 3)))  # .1 + .1 + .1 > .3
    apart = difference(a, b, paired=True)
    assert apart.excludes_zero
    assert apart.p_value < 1e-12
    assert (apart.d_z, apart.rank_biserial) == (None, 1.0)


def test_holm_by_hand() -> None:
    # sorted .005 .01 .03 .04 by 4 3 2 1: .02 .03 .06 .04, and .04 may not fall under .06
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx((0.03, 0.06, 0.06, 0.02))
    assert holm([0.6, 0.9]) == (1.0, 1.0)
    assert holm([]) == ()


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_raises_p_values_and_keeps_their_order(raw: list[float]) -> None:
    adjusted = holm(raw)
    assert all(p <= q <= 1 for p, q in zip(raw, adjusted, strict=True))
    assert all(q <= min(1.0, len(raw) * p) for p, q in zip(raw, adjusted, strict=True))
    pairs = sorted(zip(raw, adjusted, strict=True))
    assert [q for _, q in pairs] == sorted(adjusted)
    for i, (_, q) in enumerate(pairs):  # the definition, one claim at a time
        steps = [(len(raw) - j) * pairs[j][0] for j in range(i + 1)]
        assert q == pytest.approx(min(1.0, max(steps)))


def test_attack_seeds_are_averaged_before_anything_else() -> None:
    y = np.stack([table(10), table(11)], axis=1)  # (seeds, attacks, images)
    sample = Sample.of(y)
    assert interval(sample) == interval(Sample.of(y.mean(1)))


def test_a_sample_is_a_read_only_copy() -> None:
    y = table(12)
    sample = Sample.of(y)
    y[:] = 0
    assert sample.values.min() > 0
    with pytest.raises(ValueError, match="read-only"):
        sample.values[0, 0] = 0


def test_results_are_plain_json() -> None:
    made = difference(Sample.of(table(13)), Sample.of(table(14)), paired=True)
    data = json.loads(json.dumps(asdict(made), allow_nan=False))
    assert data == asdict(made)
    assert data["interval"]["scope"] == "seeds and images"


BAD: dict[str, tuple[Any, str]] = {
    "one axis": ([1.0, 2.0], r"got shape \(2,\); pass \(seeds, images\) or"),
    "no seed": (np.zeros((0, 5)), "at least 1 seed and 2 images"),
    "no attack": (np.zeros((3, 0, 5)), "at least 1 seed and 2 images"),
    "one image": ([[1.0], [2.0]], r"2 images, got shape \(2, 1\)"),
    "ragged": ([[1.0, 2.0], [1.0]], "give every seed the same images"),
    "words": ([["a", "b"]], "full table of numbers"),
    "nan": ([[1.0, 2.0], [1.0, math.nan]], r"got nan for seed 1, image 1 \(1 such values\)"),
    "infinite": ([[math.inf, 2.0]], "got inf for seed 0, image 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_table_is_refused_with_the_reason(name: str) -> None:
    values, message = BAD[name]
    with pytest.raises(AuditError, match=message):
        Sample.of(values)


def test_a_sample_from_its_constructor_is_checked_too() -> None:
    with pytest.raises(AuditError, match="at least 1 seed and 2 images"):
        Sample(values=np.zeros((3, 1)))
    with pytest.raises(AuditError, match="must be finite"):
        Sample(values=np.full((3, 2), math.nan))


def test_samples_that_do_not_match_are_refused() -> None:
    a = Sample.of(table(0))
    with pytest.raises(AuditError, match="same images, got 7 and 6 images; score both"):
        difference(a, Sample.of(table(0, images=6)), paired=False)
    with pytest.raises(AuditError, match=r"same number of seeds, got 3 and 2; .* paired=False"):
        difference(a, Sample.of(table(0, seeds=2)), paired=True)


@pytest.mark.parametrize("level", [0.05, 1.0, 95.0, math.nan])
def test_a_level_outside_half_to_one_is_refused(level: float) -> None:
    with pytest.raises(AuditError, match=r"level must lie in \[0.5, 1\), got"):
        interval(Sample.of(table(0)), level)


@pytest.mark.parametrize("bad", [-0.1, 1.1, math.nan])
def test_holm_refuses_numbers_that_are_no_probability(bad: float) -> None:
    with pytest.raises(AuditError, match=r"p-values must lie in \[0, 1\]"):
        holm([0.5, bad])
