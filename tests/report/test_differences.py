"""Rows against each other: intervals, corrections, and what may be said."""

import base64
from typing import Any

import numpy as np
import pytest
from made_records import grouped
from numpy.typing import NDArray
from scipy import stats

from splitveil.errors import ConfigError, RunError
from splitveil.record.groups import Group, Records
from splitveil.record.schema import Record, per_image_mse
from splitveil.record.statistics import Sample, difference, seed_test
from splitveil.report.comparison import (
    BUDGET,
    RowDifference,
    Track,
    compare_records,
    contrast,
    corrected,
    image_table,
    matched,
    row_differences,
)
from splitveil.table import Cell, Table

Images = NDArray[np.float64]


def packed(values: Images) -> str:
    return base64.b64encode(values.astype("<f2").tobytes()).decode()


def record(
    accuracy: float,
    mse: float | Images,
    *,
    defence: str = "cem",
    net: str = "vgg11",
    seed: int | None = None,
) -> dict[str, Any]:
    made: dict[str, Any] = {
        "accuracy": accuracy,
        "strongest": {"mse": float(np.mean(mse)), "mse_by": "decoder"},
        "config": {"defence": defence, "net": net, "dataset": "cifar10"},
        "client": {"macs": 20_000_000, "wire_floats": 512},
        "audit": {"aux": "train"},
        "splits": {"scored": "abc"},
        "seeds": {"train": seed},
    }
    if not isinstance(mse, float):
        made["per_image"] = {"attack": "decoder", "mse": packed(mse)}
    return made


def row(name: str, *seeds: dict[str, Any]) -> Group:
    return grouped(name, ([seed] for seed in seeds))


def images(mean: float, seed: int, n: int = 400) -> Images:
    return mean * (0.5 + np.random.default_rng(seed).random(n))


def good(name: str = "veil", net: str = "vgg11") -> Group:
    values = zip((0.900, 0.902, 0.901), (0.050, 0.051, 0.052), strict=True)
    return row(name, *(record(a, m, defence="veil", net=net) for a, m in values))


def poor(name: str = "cem") -> Group:
    values = zip((0.870, 0.872, 0.871), (0.010, 0.011, 0.012), strict=True)
    return row(name, *(record(a, m) for a, m in values))


def test_errors_per_image_come_back_to_half_precision() -> None:
    values = images(0.05, 0)
    kept = per_image_mse(Record.from_dict(record(0.9, values)))
    assert kept is not None
    np.testing.assert_allclose(kept, values, rtol=2**-11)
    perfect = per_image_mse(Record.from_dict(record(0.9, images(1e-9, 0))))
    assert perfect is not None
    assert float(perfect.max()) <= 2.0**-24
    unkept: tuple[object, ...] = (None, {})
    for per_image in unkept:
        assert per_image_mse(Record.from_dict(record(0.9, 0.05) | {"per_image": per_image})) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [("!", "must be base64"), ("AAA=", "strongest.mse"), ("AAAA", "must be base64 of float16")],
)
def test_spoilt_errors_per_image_are_refused(text: str, message: str) -> None:
    spoilt = record(0.9, 0.05) | {"per_image": {"attack": "decoder", "mse": text}}
    with pytest.raises(RunError, match=message):
        per_image_mse(Record.from_dict(spoilt))


def test_attack_seeds_are_averaged_image_by_image() -> None:
    first, second = images(0.05, 0), images(0.05, 1)
    table = image_table(grouped("a", [[record(0.9, first), record(0.9, second)]]))
    assert table is not None
    np.testing.assert_allclose(table, [(first + second) / 2], rtol=1e-3)
    assert image_table(row("a", record(0.9, first), record(0.9, 0.05))) is None
    assert image_table(row("a", record(0.9, first), record(0.9, first[:-1]))) is None


def test_seeds_alone_are_compared_by_welchs_t() -> None:
    a, b = [0.90, 0.91, 0.93], [0.88, 0.885, 0.87, 0.86]
    made = seed_test(a, b)
    oracle = stats.ttest_ind(a, b, equal_var=False)
    low, high = oracle.confidence_interval(0.95)
    assert made is not None
    assert (made.interval.low, made.interval.high) == pytest.approx((low, high))
    assert made.p_value == pytest.approx(oracle.pvalue)
    assert seed_test([0.9], b) is None
    assert seed_test([0.9, None], b) is None


def test_errors_are_compared_over_seeds_and_images_where_known() -> None:
    tables = [
        [images(m, s) for s, m in enumerate(means)] for means in ((0.05, 0.052), (0.04, 0.041))
    ]
    a, b = (row("x", *(record(0.9, t) for t in table)) for table in tables)
    made = contrast(a, b)
    left, right = image_table(a), image_table(b)
    assert left is not None
    assert right is not None
    expected = difference(Sample.of(left), Sample.of(right), paired=False)
    assert made.mse is not None
    assert made.mse.interval == expected.interval
    assert made.over == "seeds and images"
    assert contrast(a, poor()).over == "seeds"
    elsewhere = record(0.9, tables[1][0]) | {"splits": {"scored": "other"}}
    assert contrast(a, row("y", elsewhere, elsewhere)).over == "seeds"


def test_one_seed_is_no_verdict_even_with_ten_thousand_images() -> None:
    made = contrast(row("a", record(0.9, images(0.05, 0))), row("b", record(0.8, images(0.01, 1))))
    assert made.over == "images"
    assert made.mse is not None
    assert made.mse.excludes_zero
    assert made.p_mse is None
    assert made.verdict == "one seed: no verdict"
    assert contrast(row("a", record(0.9, 0.05)), poor()).verdict == "one seed: no verdict"


def test_dominates_needs_both_intervals_on_our_side() -> None:
    assert contrast(good(), poor()).verdict == "dominates"
    assert contrast(poor(), good()).verdict == "is dominated"
    equal = row("equal", *(record(a, m) for a, m in ((0.90, 0.01), (0.88, 0.011), (0.92, 0.012))))
    assert contrast(good(), equal).verdict == "more private"
    better = row("b", *(record(a, m) for a, m in ((0.95, 0.010), (0.951, 0.011), (0.949, 0.012))))
    assert contrast(good(), better).verdict == "more private, less accurate"
    assert contrast(good(), good("twin")).verdict == "not told apart"


def test_the_verdict_says_what_the_correction_takes_back() -> None:
    def claim(p: float) -> RowDifference:
        made = contrast(good(), poor())
        return RowDifference(**(vars(made) | {"p_accuracy": p, "p_mse": 0.001}))

    first, second = corrected([claim(0.03), claim(0.04)])
    assert (first.p_mse, second.p_mse) == pytest.approx((0.004, 0.004))
    assert (first.p_accuracy, second.p_accuracy) == pytest.approx((0.06, 0.06))
    assert first.verdict == "more private and, before correction, more accurate"
    both = RowDifference(**(vars(first) | {"p_mse": 0.06}))
    assert both.verdict == "dominates, before correction"


def test_our_rows_meet_every_other_row_once() -> None:
    groups = (good(), good("arl-veil"), poor(), poor("none"))
    made = row_differences(Track(title="t", groups=groups), done=["veil"])
    assert [(c.ours, c.other) for c in made] == [("arl-veil", "cem"), ("arl-veil", "none")]
    assert all(c.p_mse is not None and c.p_mse < 0.05 for c in made)


def tables(*groups: Group, against: str | None = None) -> list[tuple[Table, list[list[str]]]]:
    """Every table with its cells."""
    made = compare_records(Records(groups), {}, against)
    pairs = [pair for comparison in made for pair in comparison.tables()]
    return [(table, table.cells(rows)) for table, rows in pairs]


def exact(*groups: Group, against: str | None = None) -> list[dict[str, Cell]]:
    made = compare_records(Records(groups), {}, against)
    return [row for comparison in made for row in comparison.exact()]


def test_each_track_is_followed_by_its_differences() -> None:
    thin = good("veil", net="thin-resnet")
    made = tables(thin, good("veil-vgg11"), poor())
    titles = [table.title.partition(":")[0] for table, _ in made]
    assert titles == [
        "Same architecture",
        "Differences – Same architecture",
        "Same budget",
        "Differences – Same budget",
    ]
    first, second = made[1][1], made[3][1]
    assert [line[:2] for line in first] == [["`veil-vgg11`", "`cem`"]]
    assert [line[:2] for line in second] == [["`veil`", "`cem`"]]
    assert second[0][2] == "+3.00 [+2.77, +3.23]"  # t(4) .975 = 2.776, se .1·√(2/3)
    assert second[0][-1] == "dominates"
    assert tables(poor("a"), thin)[-1][0].title.endswith(BUDGET)


A, B = (0.90, 0.91, 0.93), (0.89, 0.905, 0.91)


def seeded(name: str, values: tuple[float, ...], seeds: tuple[int | None, ...]) -> Group:
    made = [record(v, v / 20, seed=s) for v, s in zip(values, seeds, strict=True)]
    return row(name, *made)


def test_rows_with_the_same_seeds_are_compared_seed_by_seed() -> None:
    a, b = seeded("a", A, (0, 1, 2)), seeded("b", (B[2], B[0], B[1]), (2, 0, 1))
    made = contrast(a, b, paired=True)
    oracle = stats.ttest_rel(A, B)
    low, high = oracle.confidence_interval(0.95)
    assert made.accuracy is not None
    assert (made.accuracy.interval.low, made.accuracy.interval.high) == pytest.approx((low, high))
    assert made.p_accuracy == made.p_mse == pytest.approx(oracle.pvalue)
    assert made.over == "paired seeds"
    unpaired = contrast(a, b)
    assert unpaired.p_accuracy == pytest.approx(stats.ttest_ind(A, B, equal_var=False).pvalue)
    assert unpaired.over == "seeds"
    assert made.accuracy_gap == unpaired.accuracy_gap == pytest.approx(np.mean(A) - np.mean(B))


def test_images_are_paired_with_their_seed_too() -> None:
    tables = [[images(m, s) for s, m in enumerate(ms)] for ms in ((0.05, 0.06), (0.04, 0.05))]
    a, b = (row("x", *(record(0.9, t, seed=s) for s, t in enumerate(ts))) for ts in tables)
    left, right = image_table(a), image_table(b)
    assert left is not None
    assert right is not None
    made = contrast(a, b, paired=True)
    assert made.mse is not None
    expected = difference(Sample.of(left), Sample.of(right), paired=True)
    assert made.mse.interval == expected.interval
    assert made.over == "paired seeds and images"


@pytest.mark.parametrize("seeds", [(0, 1, 3), (0, 1, 1), (0, 1, None)])
def test_rows_with_other_seeds_are_not_paired(seeds: tuple[int | None, ...]) -> None:
    a, b = seeded("a", A, (0, 1, 2)), seeded("b", B, seeds)
    assert matched(a, b) is None
    assert matched(b, b) is None or None not in seeds
    assert contrast(a, b, paired=True) == contrast(a, b)


def test_seeds_that_agree_to_the_last_digit_make_nothing_certain() -> None:
    assert seed_test([0.9, 0.9, 0.9], [0.8, 0.8]) is None
    assert seed_test([0.9, 0.8], [0.8, 0.7], paired=True) is None
    assert seed_test([0.9, 0.9, 0.9], [0.8, 0.81]) is not None  # one side has a spread
    same = row("a", record(0.9, 0.05), record(0.9, 0.05))
    made = contrast(same, row("b", record(0.8, 0.01), record(0.8, 0.01)))
    assert (made.accuracy, made.mse, made.p_accuracy, made.p_mse) == (None,) * 4
    assert made.verdict == "no spread over seeds: no verdict"
    (told,) = corrected([contrast(same, row("b", record(0.9, 0.01), record(0.9, 0.0101)))])
    assert told.accuracy is None
    assert told.verdict == "more private"


def test_a_pair_of_single_seeds_is_no_verdict() -> None:
    made = contrast(seeded("a", (0.9,), (0,)), seeded("b", (0.8,), (0,)), paired=True)
    assert (made.accuracy, made.p_mse, made.over) == (None, None, "–")
    assert made.verdict == "one seed: no verdict"


def test_pairs_leave_out_a_seed_that_one_side_did_not_measure() -> None:
    made = seed_test([0.9, 0.91, 0.95], [0.8, None, 0.86], paired=True)
    assert made is not None
    assert made.interval.mean == pytest.approx(0.095)
    assert seed_test([0.9, None], [0.8, 0.7], paired=True) is None


def test_every_row_meets_the_one_it_is_compared_against() -> None:
    table, gaps, *budget = tables(good(), poor(), poor("none"), against="cem")
    assert [cells for _, cells in budget] == [table[1], gaps[1]]  # each track is complete
    assert [line[0] for line in table[1]] == ["`cem`", "`none`", "`veil`"]
    assert [line[:2] for line in gaps[1]] == [["`none`", "`cem`"], ["`veil`", "`cem`"]]
    assert "Paired" not in gaps[0].caption
    paired = tables(seeded("a", A, (0, 1, 2)), seeded("b", B, (0, 1, 2)), against="b")
    assert "“Paired”: seed by seed" in paired[1][0].caption
    with pytest.raises(
        ConfigError, match="unknown row to compare against 'ce'; did you mean 'cem'"
    ):
        tables(good(), poor(), against="ce")


def test_exact_rows_hold_every_digit_of_rows_and_differences() -> None:
    base, ours = exact(good(), poor(), against="cem")[:2]
    made = contrast(good(), poor())
    assert made.mse is not None
    assert (base["row"], base["against"], base["mse_gap"], base["verdict"]) == ("cem", *[None] * 3)
    assert (ours["row"], ours["against"], ours["verdict"]) == ("veil", "cem", "dominates")
    assert (ours["mse"], ours["mse_gap"]) == (good().mean("strongest.mse"), made.mse_gap)
    assert ours["mse_gap_low"] == made.mse.interval.low
    assert ours["mse_gap_p"] == max(2 * min(made.p_mse or 1, made.p_accuracy or 1), made.p_mse or 1)
    without = exact(good(), poor(), poor("none"))
    assert [r["row"] for r in without] == ["cem", "none", "veil"] * 2  # both tracks
    assert "against" not in without[0]
    assert without[0]["defence"] == "cem"
