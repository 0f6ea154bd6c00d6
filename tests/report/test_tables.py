"""Rows of text: golden lines, dashes for what was not measured, loud errors for wrong types."""

import pytest
from made_runs import MakeRun, make_record

from splitveil.errors import RunError
from splitveil.record.files import RunFiles
from splitveil.report.columns import ATTACKS, SUMMARY, attack_rows
from splitveil.table import Form

FORMS: tuple[Form, ...] = ("html", "markdown", "latex")


def test_golden_summary_rows(three: list[RunFiles]) -> None:
    none, _, veil = SUMMARY.cells(three)
    # fmt: off
    assert none == [
        "none", "none", "0", "98.61", "0.00052", "decoder", "32.84", "0.995", "0.00047", "0.0493",
        "98.9", "–", "1,234,567", "128",
    ]
    assert veil == [
        "veil", "veil", "0", "97.78", "0.0462", "decoder", "13.35", "0.584", "0.0416", "0.0493",
        "6.3", "12.35", "1,234,567", "128",
    ]
    # fmt: on


def test_headings_carry_unit_and_direction(three: list[RunFiles]) -> None:
    labels = [column.label() for column in SUMMARY.columns]
    assert labels[3:5] == ["Accuracy (%) ↑", "Strongest MSE ↑"]
    assert labels[6:8] == ["PSNR (dB) ↓", "SSIM ↓"]
    assert labels[10:12] == ["Leakage (%) ↓", "Rate (nats) ↓"]
    assert len(labels) == len(SUMMARY.cells(three)[0])


def test_golden_attack_rows_mark_each_metric(make_run: MakeRun) -> None:
    record = make_record("gated-att")
    record["strongest"]["ssim_by"] = "linear"
    rows = ATTACKS.cells(attack_rows([make_run("x", record=record)]))
    assert [row[1] for row in rows] == ["mean", "class-mean", "linear", "decoder"]
    assert rows[0] == ["x", "mean", "none", "0.0712", "11.48", "0.359", "1.2 s", ""]
    assert rows[2] == ["x", "linear", "black-box", "0.0312", "15.06", "0.719", "1.2 s", "★ SSIM"]
    assert rows[3][-1] == "★ MSE"
    assert len(ATTACKS.columns) == len(rows[0])


def test_an_empty_record_is_a_row_of_dashes(make_run: MakeRun) -> None:
    assert SUMMARY.cells([make_run("x", record={})]) == [["x"] + ["–"] * 13]
    assert attack_rows([make_run("y", record={})]) == []


def test_a_run_without_a_record_is_a_row_of_dashes(make_run: MakeRun) -> None:
    assert SUMMARY.cells([make_run("x", record=None)]) == [["x"] + ["–"] * 13]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_what_is_not_a_finite_number_is_a_dash(make_run: MakeRun, value: float | None) -> None:
    (row,) = SUMMARY.exact([make_run("x", record=make_record("veil") | {"leakage": value})])
    assert row["leakage"] is None


@pytest.mark.parametrize("value", ["0.98", True, [0.98]])
def test_a_number_of_the_wrong_type_is_refused(make_run: MakeRun, value: object) -> None:
    with pytest.raises(RunError, match="`accuracy` must be a number, got"):
        make_run("x", record=make_record("veil") | {"accuracy": value})


def test_a_section_of_the_wrong_type_is_refused(make_run: MakeRun) -> None:
    with pytest.raises(RunError, match="`strongest` must be an object, got float"):
        make_run("x", record=make_record("veil") | {"strongest": 0.3})


def test_negative_leakage_is_not_clipped(make_run: MakeRun) -> None:
    (row,) = SUMMARY.cells([make_run("x", record=make_record("veil") | {"leakage": -0.012})])
    assert row[10] == "-1.2"


def test_every_form_speaks_the_language_that_is_asked_for(three: list[RunFiles]) -> None:
    for form in FORMS:
        assert "最强攻击 MSE" in SUMMARY.render(three, form, "zh")
        assert "Strongest MSE" in SUMMARY.render(three, form)
