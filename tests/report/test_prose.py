"""The report as Markdown and its table as LaTeX: the record's numbers, and no way to break out."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from splitveil.report import RunFiles, write_report
from splitveil.report.pictures import Pictures
from splitveil.report.prose import latex, markdown, tex_text
from splitveil.report.subject import Subject
from splitveil.report.tables import format_row, summary_rows

from .conftest import MakeRun, make_record

EMPTY = Pictures(grid=None, tradeoff=None, attacks=None, curves=())


def table_after(text: str, heading: str) -> list[list[str]]:
    block = text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in block.split("\n") if line.startswith("|")]
    return [re.split(r" (?<!\\)\| ", line[2:-2]) for line in lines]


def test_markdown_holds_the_verdict_first_and_every_number(
    written: list[Path], three: list[RunFiles]
) -> None:
    text = written[1].read_text(encoding="utf-8")
    assert text.startswith("# SplitVeil report\n\n**From “none” to “veil” ")
    rows = table_after(text, "Summary")
    for row in summary_rows(three):
        assert format_row(row) in rows
    assert ["splits.test", "0718aa"] in table_after(text, "Passports")


def test_markdown_shows_the_pictures_beside_it(written: list[Path]) -> None:
    text = written[1].read_text(encoding="utf-8")
    names = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert sorted(names) == sorted(path.name for path in written if path.suffix == ".png")


def test_a_hostile_name_stays_in_its_cell(three: list[RunFiles]) -> None:
    evil = "a|b\n# <script>`*_x_*`"
    subject = Subject(runs=[replace(three[0], name=evil)], skipped=[(evil, evil)])
    text = markdown(subject, EMPTY)
    assert "<script" not in text
    assert "\n# <" not in text
    rows = table_after(text, "Summary")
    assert {len(row) for row in rows} == {14}
    assert rows[2][0] == r"a\|b \# &lt;script&gt;\`\*\_x\_\*\`"


def test_every_row_of_the_latex_table_has_its_columns(three: list[RunFiles]) -> None:
    text = latex(Subject(runs=three))
    begin = re.search(r"\\begin\{tabular\}\{([lr]+)\}", text)
    assert begin is not None
    body = [line for line in text.split("\n") if line.endswith(r"\\")]
    assert len(body) == 1 + len(three)
    assert {line.count("&") + 1 for line in body} == {len(begin[1])}
    assert body[1].startswith("none & none & 0 & 98.61 & 0.00052 & decoder & 32.84 & 0.995")
    assert r"Accuracy (\%) $\uparrow$" in body[0]
    assert text.count(r"\begin") == text.count(r"\end") == 2


@pytest.mark.parametrize(
    ("value", "set_as"),
    [
        ("a_b&c%", r"a\_b\&c\%"),
        (r"\input{x}", r"\textbackslash{}input\{x\}"),
        ("a\nb~^$#", r"a b\textasciitilde{}\textasciicircum{}\$\#"),
    ],
)
def test_latex_signs_are_text(value: str, set_as: str) -> None:
    assert tex_text(value) == set_as


def test_a_hostile_name_adds_no_column_to_the_latex_table(make_run: MakeRun) -> None:
    run = replace(make_run("x", gallery=None, metrics=None), name=r"a & b \\ c")
    body = [line for line in latex(Subject(runs=[run])).split("\n") if line.endswith(r"\\")]
    assert len(re.findall(r"(?<!\\)&", body[1])) == 11


def test_chinese_files_are_chinese(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("x", record=make_record("veil"), gallery=None, metrics=None)
    paths = write_report([run], tmp_path / "zh", lang="zh")
    text, table = (paths[at].read_text(encoding="utf-8") for at in (1, 2))
    assert text.startswith("# SplitVeil 报告\n\n**“x”的准确率为 97.8 %")
    assert "ctex" in table.split("\n")[0]
    assert "最强攻击 MSE" in table
