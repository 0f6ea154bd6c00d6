"""What to ship: each case planted as rows, and a sentence that says what the table says."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitveil.errors import ConfigError
from splitveil.experiments.choice import (
    ADVICE,
    Advice,
    DeviceLimits,
    Tried,
    advice,
    advice_rows,
    draw_advice,
    gain_over,
)
from splitveil.report.gains import Kind

LIMITS = DeviceLimits(macs=5e6, wire_floats=512, exposure=0.25, stored=64_000)
IMAGES = 1000


def row(kind: Kind, name: str, accuracy: float, **more: Any) -> Tried:  # noqa: ANN401
    """A row that is right on the first images: rows differ on as few images as they can."""
    exposure = more.pop("exposure", 0.0)
    facts: dict[str, Any] = {
        "exposure": exposure, "exposure_high": exposure and exposure + 0.02, "identified": 0.0,
        "sent": {"alone": 0.0, "split": 1.0, "exit": 0.2}[kind], "macs": 4_000_000,
        "stored": 50_000, "wire_floats": 0 if kind == "alone" else 512, "wire_bits": 0.0,
        "right": np.arange(IMAGES) < round(accuracy * IMAGES), "config": {"defence": kind},
    }  # fmt: skip
    return Tried(kind=kind, name=name, accuracy=accuracy, **facts | more)


ALONE = row("alone", "alone, small", 0.85)
SPLIT = row("split", "split, noise", 0.9, exposure=0.8)
QUIET = row("split", "split, veil", 0.845, exposure=0.1)
EXIT = row("exit", "early exit, 20 % sent", 0.88, exposure=0.18)
MORE = row("exit", "early exit, 30 % sent", 0.89, exposure=0.27)


def agrees(rows: list[Tried], limits: DeviceLimits, made: Advice) -> None:
    """The sentence names the chosen row with the numbers that the table shows."""
    table = advice_rows(rows, limits, made)
    chosen = [r for r in table if r["chosen"]]
    text = ADVICE.render(table, "terminal")
    assert text.count("→") == bool(rows) + len(chosen)  # in the heading too
    if made.chosen is None:
        assert not chosen
        assert made.sentence.startswith(("Ship nothing yet", "Nothing that was tried fits"))
        assert made.case in ("exposed", "too large")
        return
    [line] = chosen
    assert line["name"] == made.chosen.name
    assert line["allowed"] == "yes"
    assert made.case == line["kind"]
    marked = next(t for t in text.splitlines() if t.startswith("→") and line["name"] in t)
    accuracy = f"{100 * line['accuracy']:.1f}"
    assert f"{accuracy} %" in made.sentence
    assert accuracy in marked
    for other in table:  # every figure of exposure that the sentence gives stands in the table
        if f"{other['name']}, has an exposure" in made.sentence:
            assert f"{100 * other['exposure']:.1f} %" in made.sentence
    if line["kind"] == "alone":
        assert made.sentence.startswith("Ship the client alone")
        assert "nothing leaves the device" in made.sentence
        assert not [
            r for r in table if r["allowed"] == "yes" and r["gain_low"] and r["gain_low"] > 0
        ]
    else:
        assert made.sentence.startswith(f"Ship {line['name']}: ")
        assert f"{100 * line['exposure']:.1f} %" in made.sentence
        assert line["exposure_high"] <= limits.exposure
        if made.alone is not None:
            assert line["gain_low"] > 0
            assert f"{100 * line['gain']:+.1f} points" in made.sentence


@pytest.mark.parametrize(
    ("rows", "limits", "case", "chosen", "said"),
    [
        ([ALONE], LIMITS, "alone", ALONE, "no row with a server keeps its exposure within 25.0 %."),
        (
            [ALONE, SPLIT],
            LIMITS,
            "alone",
            ALONE,
            "the most accurate, split, noise, has an exposure",
        ),
        (
            [ALONE, SPLIT, QUIET],
            LIMITS,
            "alone",
            ALONE,
            "does not surely answer better (-0.5 points",
        ),
        ([ALONE, SPLIT, QUIET, EXIT], LIMITS, "exit", EXIT, "20.0 % of the images leave"),
        ([ALONE, EXIT, MORE], LIMITS, "exit", EXIT, "(+3.0 points"),
        (
            [ALONE, SPLIT, EXIT],
            DeviceLimits(macs=5e6, wire_floats=512, exposure=1.0),
            "split",
            SPLIT,
            "(+5.0 points",
        ),
        ([SPLIT, EXIT], LIMITS, "exit", EXIT, "no client alone fits the device."),
        (
            [row("alone", "alone, large", 0.95, macs=6_000_000), EXIT],
            LIMITS,
            "exit",
            EXIT,
            "no client alone fits the device.",
        ),
        ([SPLIT, MORE], LIMITS, "exposed", None, "the nearest, early exit, 30 % sent, has an"),
        (
            [row("alone", "alone, large", 0.95, stored=70_000)],
            LIMITS,
            "too large",
            None,
            "the cheapest client takes 4,000,000 multiply-adds",
        ),
        ([], LIMITS, "too large", None, "Nothing that was tried fits"),
        (
            [ALONE, row("split", "split, wide", 0.99, exposure=0.1, wire_floats=513)],
            LIMITS,
            "alone",
            ALONE,
            "no row with a server",
        ),
    ],
)
def test_each_case_is_answered_as_its_table_says(
    rows: list[Tried], limits: DeviceLimits, case: str, chosen: Tried | None, said: str
) -> None:
    made = advice(rows, limits)
    assert made.case == case
    assert made.chosen is chosen
    assert said in made.sentence
    agrees(rows, limits, made)


def test_an_own_head_that_is_the_best_client_alone_says_how_to_run_it() -> None:
    """An early exit must beat its own head, too."""
    own = replace(
        row("alone", "early exit, noise, 0 % sent", EXIT.accuracy, right=EXIT.right),
        config={"defence": "early-exit", "client": "tiny@2"},
    )
    made = advice([ALONE, own, EXIT], LIMITS)
    assert made.chosen is own
    assert "the own head of an early exit, run with --never-ask" in made.sentence
    assert "+0.0 points, +0.0 to +0.0" in made.sentence
    agrees([ALONE, own, EXIT], LIMITS, made)
    assert "--never-ask" not in advice([ALONE], LIMITS).sentence


def test_a_gain_that_may_be_luck_does_not_buy_a_server() -> None:
    rng = np.random.default_rng(0)
    mixed = ALONE.right ^ (rng.random(IMAGES) < 0.1)  # many differences, little gain
    mixed[ALONE.right.argmin() : ALONE.right.argmin() + 80] = True
    lucky = row("exit", "lucky", float(mixed.mean()), exposure=0.1, right=mixed)
    gain = gain_over(lucky, ALONE)
    assert gain.low <= 0 < gain.high
    assert advice([ALONE, lucky], LIMITS).case == "alone"


def test_the_limit_of_the_exposure_counts_not_its_middle() -> None:
    near = row("exit", "near", 0.95, exposure=0.24)  # at most .26
    assert advice([ALONE, near], LIMITS).case == "alone"
    sure = row("exit", "sure", 0.95, exposure=0.24, exposure_high=0.25)
    assert advice([ALONE, sure], LIMITS).chosen is sure


def test_the_gain_is_paired_and_its_interval_is_that_of_the_mean_difference() -> None:
    gain = gain_over(EXIT, ALONE)
    difference = EXIT.right.astype(float) - ALONE.right
    assert gain.mean == pytest.approx(0.03)
    assert gain.high - gain.low == pytest.approx(
        2 * 1.959964 * difference.std(ddof=1) / IMAGES**0.5, rel=1e-6
    )


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["alone", "split", "exit"]),
            st.floats(0.5, 0.99),
            st.floats(0, 1),
            st.floats(0, 0.2),
            st.integers(10**6, 10**7),
        ),
        max_size=7,
    ),
    st.floats(0, 1),
)
def test_any_rows_get_an_advice_that_agrees_with_them(
    some: list[tuple[Kind, float, float, float, int]], exposure: float
) -> None:
    rows = [
        row(
            kind, f"row {at}", accuracy, macs=macs,
            **({} if kind == "alone" else {"exposure": e, "exposure_high": min(1.0, e + wide)}),
        )
        for at, (kind, accuracy, e, wide, macs) in enumerate(some)
    ]  # fmt: skip
    limits = DeviceLimits(macs=5e6, wire_floats=512, exposure=exposure)
    agrees(rows, limits, advice(rows, limits))


def test_the_picture_is_the_same_for_the_same_rows() -> None:
    rows = [ALONE, SPLIT, QUIET, EXIT, MORE]
    made = advice(rows, LIMITS)
    one, other = (draw_advice(rows, LIMITS, made).png for _ in range(2))
    assert one == other
    assert one.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"exposure": 1.5}, "exposure must be in [0, 1], got 1.5"),
        ({"exposure": -0.1}, "exposure must be in [0, 1], got -0.1"),
        ({"macs": 0.0}, "macs must be a finite number > 0, got 0.0"),
        ({"wire_floats": 0}, "wire must be at least 1, got 0"),
        ({"stored": 0}, "params must be at least 1, got 0"),
    ],
)
def test_limits_that_nothing_could_keep_are_refused(bad: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"macs": 5e6, "wire_floats": 512, "exposure": 0.25}
    with pytest.raises(ConfigError, match=re.escape(said)):
        DeviceLimits(**given | bad)
