"""The deck: one slide a section, the same numbers, few enough rows to read."""

from dataclasses import replace
from pathlib import Path

import pytest

from splitveil.report import RunFiles, write_report
from splitveil.report.pictures import Pictures
from splitveil.report.slides import PER_SLIDE, ROWS, render_slides
from splitveil.report.subject import Subject, along, front
from splitveil.report.tables import Row, summary_rows

from .conftest import MakeRun
from .markup import Page

EMPTY = Pictures(grid=None, tradeoff=None, attacks=None, curves=())


def slides_of(html: str) -> int:
    return sum(tag == "section" for tag, _ in Page(html).tags)


def test_the_deck_opens_with_the_verdict_and_ends_with_the_origin(rich: list[RunFiles]) -> None:
    page = Page(render_slides(Subject(runs=rich, title="Mine"), EMPTY))
    assert page.flat.index("Mine") < page.flat.index("From “none” to “veil”")
    assert page.headings == [
        "Summary", "What an attacker sees", "Flags and certificates", "Before you believe them",
        "Where the numbers come from",
    ]  # fmt: skip
    assert ["veil", "veil", "97.78", "0.0462", "decoder", "0.0493", "6.3"] in page.rows
    assert slides_of(render_slides(Subject(runs=rich), EMPTY)) == 1 + len(page.headings)


def test_pictures_of_many_runs_take_several_slides(three: list[RunFiles]) -> None:
    many = [replace(run, name=f"{run.name}{i}") for i in range(3) for run in three]
    html = render_slides(Subject(runs=many), EMPTY)
    shown = html.count("What an attacker sees</h2>")
    assert shown == -(-len(many) // PER_SLIDE)


def test_a_long_table_is_cut_to_the_front_and_says_so(make_run: MakeRun) -> None:
    run = make_run("x", gallery=None, metrics=None)
    runs = [replace(run, name=f"r{i}") for i in range(ROWS)]
    assert "more runs" not in render_slides(Subject(runs=runs), EMPTY)
    worse = {**(run.record or {}), "accuracy": 0.5}
    many = [*runs[:2], *(replace(r, record=worse) for r in runs)]
    assert f"{ROWS} more runs stand in the report." in render_slides(Subject(runs=many), EMPTY)


def test_the_front_is_what_no_other_row_beats(three: list[RunFiles]) -> None:
    (row, *_) = summary_rows(three)

    def at(name: str, accuracy: float | None, mse: float) -> Row:
        return replace(row, name=name, accuracy=accuracy, strongest_mse=mse)

    rows = [at("a", 0.9, 0.1), at("b", 0.8, 0.2), at("c", 0.8, 0.1), at("d", None, 1.0)]
    rows.append(at("a2", 0.9, 0.1))
    assert [found.name for found in front(rows)] == ["a", "b", "a2"]


def test_rows_along_the_front_keep_both_ends(three: list[RunFiles]) -> None:
    (row, *_) = summary_rows(three)
    rows = [replace(row, name=str(mse), strongest_mse=float(mse)) for mse in range(10)]
    assert [found.name for found in along(rows, 4)] == ["9", "6", "3", "0"]
    assert [found.name for found in along(rows[:2], 4)] == ["1", "0"]


@pytest.mark.parametrize("asked", [True, False])
def test_slides_are_written_when_asked(make_run: MakeRun, tmp_path: Path, asked: bool) -> None:
    run = make_run("x", gallery=None, metrics=None)
    paths = write_report([run], tmp_path / "out", slides=asked)
    assert (paths[1].name == "slides.html") == asked
    assert (tmp_path / "out" / "slides.html").exists() == asked


def test_a_hostile_name_stays_text(three: list[RunFiles]) -> None:
    evil = '<img src=x onerror="alert(1)">'
    html = render_slides(Subject(runs=[replace(three[0], name=evil)], title=evil), EMPTY)
    assert "<img src=x" not in html
    assert evil in Page(html).text
