"""The deck: one slide a section, the same numbers, few enough rows to read."""

from dataclasses import replace
from pathlib import Path

from made_runs import MakeRun

from splitveil.record.files import RunFiles
from splitveil.record.schema import Record
from splitveil.report.deck import PER_SLIDE, ROWS, render_slides, write_deck
from splitveil.report.figures import Pictures
from splitveil.report.page import MANY_CARDS, ReportContent, best_runs, write_report

from .markup import Page

EMPTY = Pictures(grid=None, tradeoff=None, attacks=None, curves=())


def slides_of(html: str) -> int:
    return sum(tag == "section" for tag, _ in Page(html).tags)


def test_the_deck_starts_with_the_verdict_and_ends_with_origins(rich: list[RunFiles]) -> None:
    page = Page(render_slides(ReportContent(runs=rich, title="Mine"), EMPTY))
    assert page.flat.index("Mine") < page.flat.index("From “none” to “veil”")
    assert page.headings == [
        "Summary", "What an attacker sees", "Flags and certificates", "Before you believe them",
        "Where the numbers come from",
    ]  # fmt: skip
    assert ["veil", "veil", "97.78", "0.0462", "decoder", "0.0493", "6.3"] in page.rows
    assert slides_of(render_slides(ReportContent(runs=rich), EMPTY)) == 1 + len(page.headings)


def test_pictures_of_many_runs_take_several_slides(three: list[RunFiles]) -> None:
    many = [replace(run, name=f"{run.name}{i}") for i in range(3) for run in three]
    html = render_slides(ReportContent(runs=many), EMPTY)
    shown = html.count("What an attacker sees</h2>")
    assert shown == -(-len(many) // PER_SLIDE)


def test_a_long_table_is_cut_to_the_front_and_says_so(make_run: MakeRun) -> None:
    run = make_run("x", gallery=None, metrics=None)
    runs = [replace(run, name=f"r{i}") for i in range(ROWS)]
    assert "more runs" not in render_slides(ReportContent(runs=runs), EMPTY)
    worse = Record.from_dict(run.record.to_dict() | {"accuracy": 0.5})
    many = [*runs[:2], *(replace(r, record=worse) for r in runs)]
    assert f"The report lists {ROWS} more runs." in render_slides(ReportContent(runs=many), EMPTY)


def at(name: str, accuracy: float | None, mse: float) -> RunFiles:
    record = Record.from_dict({"accuracy": accuracy, "strongest": {"mse": mse}})
    return RunFiles(name=name, path=Path(name), record=record)


def test_the_front_is_what_no_other_run_beats() -> None:
    runs = [at("a", 0.9, 0.1), at("b", 0.8, 0.2), at("c", 0.8, 0.1), at("d", None, 1.0)]
    runs.append(at("a2", 0.9, 0.1))
    assert [found.name for found in best_runs(runs)] == ["a", "b", "a2"]


def test_cards_are_spread_along_the_front_and_keep_its_ends() -> None:
    runs = [at(str(i), 0.9 - i / 100, i / 100) for i in range(2 * MANY_CARDS)]
    names = [int(run.name) for run in ReportContent(runs=runs).key_runs]
    assert names == [15, 13, 11, 9, 6, 4, 2, 0]
    worse = [at(f"w{i}", 0.1, 0.0) for i in range(MANY_CARDS)]
    few = ReportContent(runs=[*runs[:2], *worse]).key_runs
    assert [run.name for run in few] == ["1", "0"]
    assert ReportContent(runs=runs[:3]).key_runs == runs[:3]


def test_the_deck_is_a_call_of_its_own(make_run: MakeRun, tmp_path: Path) -> None:
    content = ReportContent(runs=[make_run("x", record={}, gallery=None, metrics=None)])
    write_report(content, tmp_path / "page")
    assert not (tmp_path / "page" / "slides.html").exists()
    assert write_deck(content, tmp_path / "deck") == tmp_path / "deck" / "slides.html"
    assert [path.name for path in (tmp_path / "deck").iterdir()] == ["slides.html"]


def test_a_hostile_name_stays_text(three: list[RunFiles]) -> None:
    evil = '<img src=x onerror="alert(1)">'
    html = render_slides(ReportContent(runs=[replace(three[0], name=evil)], title=evil), EMPTY)
    assert "<img src=x" not in html
    assert evil in Page(html).text
