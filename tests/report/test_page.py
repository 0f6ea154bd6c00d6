"""The page: its numbers are the record's, it is safe, it needs nobody, it is always the same."""

import base64
import io
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from made_runs import MakeRun, make_record
from PIL import Image

from splitveil.errors import RunError
from splitveil.record.files import RunFiles
from splitveil.report.columns import ATTACKS, SUMMARY, attack_rows
from splitveil.report.figures import Pictures
from splitveil.report.page import ReportContent, fill_page, render, write_report

from .markup import Page

EMPTY = Pictures(grid=None, tradeoff=None, attacks=None, curves=())


def undrawn(*runs: RunFiles, **content: str) -> str:
    """The page without its pictures, which take most of the time."""
    return fill_page(ReportContent(runs=runs, **content), EMPTY)  # type: ignore[arg-type]


HEADINGS = [
    "Accuracy against privacy",
    "What an attacker sees",
    "Summary",
    "Attack by attack",
    "Training",
    "How to read these numbers",
    "Passports",
]


def test_sections_stand_in_order(html: str) -> None:
    assert Page(html).headings == HEADINGS


def test_every_number_of_the_tables_is_the_records(three: list[RunFiles], html: str) -> None:
    page = Page(html)
    for cells in (*SUMMARY.cells(three), *ATTACKS.cells(attack_rows(three))):
        assert cells in page.rows
    assert ["splits.test", "0718aa"] in page.rows
    assert ["versions.torch", "2.13.0"] in page.rows
    assert ["seconds.audit", "31.25"] in page.rows
    assert ["device", "cpu"] in page.rows
    assert "a stranger rebuilds 99 % of what the label does not tell" in page.text
    assert "“veil” lowers that to 6 % and costs 0.8 points of accuracy" in page.text


def test_sentences_follow_each_other_as_their_language_wants(three: list[RunFiles]) -> None:
    for lang, end in (("en", ". “veil” "), ("zh", "。“veil”")):
        said = undrawn(*three, lang=lang).partition('class="verdict">')[2].partition("</p>")[0]
        assert end in said
        assert " %" not in said  # a number and its % are never on two lines
        assert "\N{NO-BREAK SPACE}%" in said


def test_the_first_table_holds_the_key_numbers(html: str) -> None:
    rows = [row for row in Page(html).rows if len(row) == 11]
    facts = [[re.sub(r"\A\D*?(?=[\d–])", "", cell.strip()) for cell in row[7:]] for row in rows[1:]]
    assert [[" ".join(cell.split()) for cell in row] for row in facts] == [
        ["1.2", "98.6 %", "–", "99 %"],
        ["1.2", "98.1 %", "–", "45 %"],
        ["1.2", "97.8 %", "–", "6 %"],
    ]
    assert re.findall(r'style="width: ([\d.]+)%"', html) == ["98.9", "45.0", "6.3"]


def test_definitions_and_caveats_are_stated(html: str) -> None:
    words = " ".join(Page(html).text.split())
    assert "1 − MSE / label-only error" in words
    assert "Lower SSIM is more private" in words
    assert "One training seed only (none, gated-att, veil): there is no confidence" in words
    assert "Attacks that were run: mean, class-mean, linear, decoder." in words
    assert "Audit profile (budget of the attacks): quick." in words
    assert "the attacker knows the whole training set" in words
    assert "do not compare" not in words


def test_runs_that_were_not_measured_alike_are_called_out(make_run: MakeRun) -> None:
    other = make_record("veil", seed=1)
    other["audit"] = {"profile": "standard", "aux": "held-out", "scored": 100}
    other["splits"]["test"] = "ffff"
    bare = {"gallery": None, "metrics": None}
    runs = [make_run("none", "none", **bare), make_run("a", **bare)]
    runs.append(make_run("b", record=other, **bare))
    words = Page(undrawn(*runs)).flat
    assert "differ in audit profile (quick, standard): do not compare" in words
    assert "differ in attacker's knowledge (train, held-out)" in words
    assert "differ in number of scored images (360, 100)" in words
    assert "scored on different images" in words
    assert "Several training seeds (veil)" in words
    assert "The 3 audited runs were not measured on the same images" in words


def test_a_hostile_name_stays_text(make_run: MakeRun) -> None:
    evil = '<script>alert("x")</script>'
    record = make_record("veil")
    record["config"] |= {"defence": evil, "note": evil}
    record["attacks"][evil] = {"mse": 0.01}
    record["strongest"]["mse_by"] = evil
    run = replace(make_run("x", record=record), name=evil)
    html = undrawn(run, replace(run, gallery=None, metrics=()), title=evil)
    page = Page(html)
    assert html.count("<script") == 1
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert evil in page.text
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)


def test_the_page_reaches_for_nothing_outside(html: str) -> None:
    visible = re.sub(r"data:image/png;base64,[A-Za-z0-9+/=]+", "", html)
    assert not re.search(r"https?://|//[a-z]+\.|@import|url\(", visible)
    page = Page(html)
    assert {tag for tag, _ in page.tags}.isdisjoint({"link", "iframe", "object", "form"})
    sources = [a["src"] for _, a in page.tags if "src" in a]
    assert all(str(source).startswith("data:image/png;base64,") for source in sources)


def test_every_picture_decodes_and_has_words(html: str) -> None:
    images = [attributes for tag, attributes in Page(html).tags if tag == "img"]
    tiles = [attributes for attributes in images if attributes.get("class")]
    front = [a for a in images if not a.get("class") and a.get("role") is None][: 6 + 3 * 6]
    images = [a for a in images if a not in front and a.get("role") is None]
    assert len(images) - len(tiles) == 6
    assert len(tiles) == 3 * 2 * 3 * 2  # runs, attacks, ranks, original and reconstruction
    for attributes in [*tiles, *front]:
        data = base64.b64decode((attributes["src"] or "").split(",")[1])
        with Image.open(io.BytesIO(data)) as picture:
            assert picture.size == (8, 8)
    for attributes in [one for one in images if one not in tiles]:
        assert len(attributes["alt"] or "") > 20
        data = base64.b64decode((attributes["src"] or "").split(",")[1])
        with Image.open(io.BytesIO(data)) as picture:
            picture.load()
            assert min(picture.size) > 300
            assert max(picture.size) < 4000


def test_the_page_is_html5_in_english_with_distinct_ids(html: str) -> None:
    assert html.startswith('<!DOCTYPE html>\n<html lang="en">')
    assert "<title>SplitVeil report</title>" in html
    ids = [attributes["id"] for _, attributes in Page(html).tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert "prefers-color-scheme: dark" in html


def test_what_is_missing_is_said(make_run: MakeRun) -> None:
    full = make_run("full")
    poor = make_run("poor", gallery=None, metrics=None)
    words = Page(undrawn(full, poor)).flat
    assert "No reconstructions were saved (no gallery.json) for: poor." in words
    assert "No training log (no metrics.jsonl with finished epochs) for: poor." in words


def test_an_unaudited_run_still_makes_a_page(make_run: MakeRun) -> None:
    raw = make_run("raw", record=None, gallery=None, metrics=None)
    page = Page(render(ReportContent(runs=[raw])))
    words = page.flat
    assert page.headings == HEADINGS
    assert ["raw"] + ["–"] * 13 in page.rows
    assert "Not audited yet, so without numbers: raw." in words
    assert "No record holds an attack." in words
    assert "Nothing was audited yet, so there is no verdict." in words


def test_the_same_runs_give_the_same_bytes(three: list[RunFiles]) -> None:
    assert undrawn(*three) == undrawn(*three)  # of the pictures: test_figures.py


def test_report_and_pictures_are_written_together(written: list[Path]) -> None:
    paths, out = written, written[0].parent
    assert [path.name for path in paths] == [
        "report.html",
        *(
            f"{stem}.{kind}"
            for stem in (
                "reconstructions", "tradeoff", "attacks",
                "curves-none", "curves-gated-att", "curves-veil",
            )
            for kind in ("png", "svg")
        ),
    ]  # fmt: skip
    assert sorted(out.iterdir()) == sorted(paths)  # no half-written file stays behind
    inside = re.findall(r"base64,([A-Za-z0-9+/=]+)", paths[0].read_text(encoding="utf-8"))
    blobs = {base64.b64decode(blob) for blob in inside}
    assert {path.read_bytes() for path in paths if path.suffix == ".png"} <= blobs
    with Image.open(out / "tradeoff.png") as picture:
        assert picture.size == (1260, 720)


def test_the_page_may_be_named_and_replaced(make_run: MakeRun, tmp_path: Path) -> None:
    run = replace(make_run("x", record={}, gallery=None), name="../<b>")
    target = tmp_path / "mine.html"
    target.write_text("old")
    paths = write_report(ReportContent(runs=[run], title="Mine"), target)
    assert paths[0] == target
    assert "<h1>Mine</h1>" in target.read_text(encoding="utf-8")
    assert {path.parent for path in paths} == {tmp_path}
    assert [path.name for path in paths[1:]] == ["curves-.._b_.png", "curves-.._b_.svg"]


def test_a_place_that_cannot_be_written_is_named(make_run: MakeRun, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunError, match=r"cannot write .*file.*Choose another folder"):
        write_report(
            ReportContent(runs=[make_run("x", record={}, gallery=None, metrics=None)]),
            tmp_path / "file" / "out",
        )


def test_no_runs_is_an_error() -> None:
    with pytest.raises(RunError, match="name at least one run folder"):
        render(ReportContent(runs=[]))


def test_reading_runs_does_not_wait_for_torch_or_matplotlib() -> None:
    code = "import sys, splitveil.report as r; print({'torch', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
