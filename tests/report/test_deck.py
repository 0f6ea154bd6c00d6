"""The deck as PowerPoint reads it: order, numbers, notes, letters, and that nothing sticks out."""

import builtins
import io
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from made_runs import MakeRun, make_gallery, make_metrics, make_record, rich_record, write_run

from splitveil.errors import RunError
from splitveil.record.files import RunFiles, read_run
from splitveil.record.schema import Record
from splitveil.report.columns import CERTIFICATES, SUMMARY
from splitveil.report.deck import ROWS, commands, next_steps, phases_told, render_deck, write_deck
from splitveil.report.figures import Pictures
from splitveil.report.method_charts import Spot
from splitveil.report.page import MANY_ROWS, ReportContent, best_runs, fill_page, write_report
from splitveil.report.slides import CHINESE, Paragraph, text_height, text_pages
from splitveil.report.words import Lang

from .markup import Page
from .test_frontier import sender, silent

if TYPE_CHECKING:
    from pptx.presentation import Presentation
    from pptx.shapes.base import BaseShape
    from pptx.slide import Slide
    from pptx.text.text import TextFrame, _Paragraph

pptx = pytest.importorskip("pptx")
EMPTY = Pictures(grid=None, tradeoff=None, attacks=None, curves=())
FRONTIER = "Accuracy against exposure"
ENGLISH = re.compile(r"[A-Za-z][a-z]{2,}(?: [a-z]{2,}){2,}")  # three words in a row
GATED = {"lambd": 16.0, "form": "gated", "attention": "minimise", "epochs": 6, "net": "small"}


def opened(content: ReportContent) -> "Presentation":
    return pptx.Presentation(io.BytesIO(render_deck(content)))


def titles(deck: "Presentation") -> list[str]:
    return [slide.shapes.title.text_frame.text for slide in deck.slides]


def slide_called(deck: "Presentation", title: str) -> "Slide":
    return next(s for s in deck.slides if s.shapes.title.text_frame.text == title)


def texts(shapes: "Iterable[BaseShape]") -> "Iterator[TextFrame]":
    """Every text frame of a slide, those of tables too."""
    for shape in shapes:
        if shape.has_text_frame:
            yield shape.text_frame
        if shape.has_table:
            yield from (cell.text_frame for row in shape.table.rows for cell in row.cells)


def words_of(deck: "Presentation") -> list[str]:
    found = [frame.text for slide in deck.slides for frame in texts(slide.shapes)]
    for slide in deck.slides:
        charts = [shape.chart for shape in slide.shapes if shape.has_chart]
        for chart in charts:
            found += [axis.axis_title.text_frame.text
                      for axis in (chart.category_axis, chart.value_axis)
                      if axis.has_title]  # fmt: skip
            found += [chart.chart_title.text_frame.text] if chart.has_title else []
        if slide.has_notes_slide:
            found.append(slide.notes_slide.notes_text_frame.text)
    return found


def table_of(slide: "Slide") -> list[list[str]]:
    table = next(shape.table for shape in slide.shapes if shape.has_table)
    return [[cell.text_frame.text for cell in row.cells] for row in table.rows]


def gated(folder: Path) -> RunFiles:
    """A run whose record tells the settings of gated attention, and how it was audited."""
    record = rich_record("veil")
    record["config"] = record["config"] | {"defence": "gated-att", "name": folder.name} | GATED
    record["audit"] = record["audit"] | {"command": "splitveil audit runs/first --profile quick"}
    record["versions"] = record["versions"] | {"commit": "0123abcd"}
    return read_run(write_run(folder, record, make_metrics("veil", 6), make_gallery("veil")))


@pytest.fixture(scope="module")
def content(rich: list[RunFiles], tmp_path_factory: pytest.TempPathFactory) -> ReportContent:
    """An undefended run, gated attention and veil."""
    return ReportContent(runs=[*rich, gated(tmp_path_factory.mktemp("deck") / "gated")])


@pytest.fixture(scope="module")
def deck(content: ReportContent) -> "Presentation":
    return opened(content)


@pytest.fixture(scope="module")
def chinese(content: ReportContent) -> "Presentation":
    return opened(replace(content, lang="zh"))


def test_the_deck_goes_from_the_problem_to_the_commands(deck: "Presentation") -> None:
    assert titles(deck) == [
        "SplitVeil report", "The problem", "Method: Gated attention (gated-att, R3)",
        "Formulas: Gated attention (gated-att, R3)", "Summary", "Accuracy against privacy",
        "Attack by attack", "Flags and certificates", "Training", "What an attacker sees",
        "Verdict", "Next steps", "Run it again", "Where the numbers come from",
    ]  # fmt: skip


def test_a_client_alone_beside_a_server_has_the_frontier_as_a_slide(tmp_path: Path) -> None:
    runs = []
    for name, data in (("alone", silent(0)), ("noise", sender(0))):
        runs.append(read_run(write_run(tmp_path / name, data, make_metrics(name, 3), None)))
    made = opened(ReportContent(runs=runs))
    slide = next(s for s in made.slides if s.shapes.title.text_frame.text == FRONTIER)
    [picture] = [shape for shape in slide.shapes if hasattr(shape, "image")]
    wide, high = picture.image.size
    assert picture.width / picture.height == pytest.approx(wide / high, rel=0.01)
    assert picture.left + picture.width <= made.slide_width
    assert picture.top + picture.height <= made.slide_height


def test_the_chinese_deck_has_the_same_slides(
    deck: "Presentation", chinese: "Presentation"
) -> None:
    assert [t for t in titles(chinese) if "/2 页）" not in t][:3] == [
        "SplitVeil 报告", "问题", "方法：门控注意力（gated-att，R3）",
    ]  # fmt: skip
    assert titles(chinese)[-4:] == ["结论", "下一步", "重新运行", "数字从何而来"]
    kinds = [[shape.shape_type for shape in s.shapes if shape.has_chart] for s in deck.slides]
    same = [[shape.shape_type for shape in s.shapes if shape.has_chart] for s in chinese.slides]
    assert [k for k in kinds if k] == [k for k in same if k]


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_tables_have_the_cells_of_the_page(content: ReportContent, lang: Lang) -> None:
    told = replace(content, lang=lang)
    page, made = Page(fill_page(told, EMPTY)), opened(told)
    tables = [table_of(s) for s in made.slides if any(x.has_table for x in s.shapes)]
    results = next(t for t in tables if t[0][0] == SUMMARY.columns[0].label(lang))
    keys = [column.label(lang) for column in SUMMARY.columns]
    places = [keys.index(heading) for heading in results[0]]
    assert len(results) == 1 + len(told.runs)
    for row in results[1:]:
        whole = next(r for r in page.rows if len(r) == len(keys) and r[0] == row[0])
        assert row == [whole[at] for at in places]
    flags = next(t for t in tables if t[0] == [c.label(lang) for c in CERTIFICATES.columns])
    for row in flags[1:]:
        assert row in page.rows


def test_charts_hold_the_numbers_and_can_be_edited(
    content: ReportContent, deck: "Presentation"
) -> None:
    chart = next(s.chart for s in slide_called(deck, "Attack by attack").shapes if s.has_chart)
    assert list(chart.plots[0].categories) == ["mean", "class-mean", "linear", "decoder"]
    values = {series.name: list(series.values) for series in chart.plots[0].series}
    assert values["none"] == pytest.approx([0.0712, 0.0497, 0.0123, 0.00052])
    panels = [s.chart for s in slide_called(deck, "Training").shapes if s.has_chart]
    names = [chart.chart_title.text_frame.text for chart in panels]
    assert names == ["Validation accuracy (%)", "Penalty (rob_loss)", "Intra-class MSE",
                     "Effective sample size"]  # fmt: skip
    drawn = {series.name: list(series.values) for series in panels[0].plots[0].series}
    assert drawn["veil"] == pytest.approx([98 - 50 / epoch for epoch in range(1, 7)])
    assert {series.name for series in panels[1].plots[0].series} == {"veil", "gated"}
    assert all(chart.part.chart_workbook.xlsx_part is not None for chart in panels)


def test_a_longer_series_never_follows_a_shorter_one(deck: "Presentation") -> None:
    charts = [s.chart for slide in deck.slides for s in slide.shapes if s.has_chart]
    lengths = [[len(list(series.values)) for series in chart.plots[0].series] for chart in charts]
    assert lengths
    assert all(own == sorted(own, reverse=True) for own in lengths)


def test_flow_charts_are_boxes_joined_by_arrows_that_follow_them(deck: "Presentation") -> None:
    slide = slide_called(deck, "Method: Gated attention (gated-att, R3)")
    boxes = {s.shape_id: s.text_frame.text for s in slide.shapes if s.has_text_frame}
    arrows = [s._element for s in slide.shapes if s._element.tag.endswith("cxnSp")]
    joined = set()
    for arrow in arrows:
        ends = [arrow.find(f".//{{*}}{end}").get("id") for end in ("stCxn", "endCxn")]
        joined.add(tuple(boxes[int(end)].split("\n")[0] for end in ends))
    assert len(arrows) == len(joined) == 16
    assert ("SNR gate (hard)", "Penalty of the class") in joined


def test_formulas_stand_low_and_high(deck: "Presentation") -> None:
    slide = slide_called(deck, "Formulas: Gated attention (gated-att, R3)")
    table = next(s.table for s in slide.shapes if s.has_table)
    row = next(r for r in table.rows if r.cells[0].text_frame.text == "Weighted mean and variance")
    lines = row.cells[1].text_frame.paragraphs
    assert [line.text for line in lines] == ["μcj = Σi αi xij", "σ2cj = Σi αi (xij − μcj)2"]
    levels = [run.font._element.get("baseline") for run in lines[1].runs]
    assert levels[:3] == [None, "30000", "-25000"]


def test_the_notes_are_the_passport_of_the_numbers(deck: "Presentation") -> None:
    for title in ("Summary", "Accuracy against privacy", "Verdict", "What an attacker sees"):
        notes = slide_called(deck, title).notes_slide.notes_text_frame.text
        assert (
            "gated: training seed 0, attack seed 0, profile quick, knowledge train, 360 images "
            "scored, commit 0123abcd, command: splitveil audit runs/first --profile quick"
        ) in notes
        assert notes.count("training seed") == 3


def test_pictures_say_what_they_show(deck: "Presentation") -> None:
    slide = slide_called(deck, "What an attacker sees")
    pictures = [s._element for s in slide.shapes if s._element.tag.endswith("}pic")]
    said = [picture.find(".//{*}cNvPr").get("descr") for picture in pictures]
    assert said[:2] == ["original", "none, decoder ★  MSE 0.00052"]
    assert len(said) == 4


def test_no_english_sentence_is_left_in_chinese(chinese: "Presentation") -> None:
    for text in words_of(chinese):
        bare = re.sub(r"splitveil .*|make venv.*|.* = .*", "", text)  # commands and formulas
        assert not ENGLISH.search(bare), text
    letters = "".join(words_of(chinese))
    assert len(re.findall(r"[\u4e00-\u9fff]", letters)) > 1000


def test_every_letter_has_a_latin_and_a_chinese_typeface(chinese: "Presentation") -> None:
    runs = [
        run
        for slide in chinese.slides
        for frame in texts(slide.shapes)
        for paragraph in frame.paragraphs
        for run in paragraph.runs
    ]
    assert len(runs) > 200
    for run in runs:
        about = run.font._element
        assert about.find("{*}ea").get("typeface") == CHINESE
        assert about.get("lang") == "zh-CN"
        tags = [child.tag.rpartition("}")[2] for child in about]
        assert tags == [tag for tag in ("solidFill", "latin", "ea", "cs") if tag in tags]
    charts = [s.chart for slide in chinese.slides for s in slide.shapes if s.has_chart]
    assert all(CHINESE.encode() in chart.part.blob for chart in charts)


def inside(deck: "Presentation") -> Iterator[tuple[str, float, float]]:
    """Every shape that leaves the slide, and every text that its letters make too tall."""
    wide, high = deck.slide_width, deck.slide_height
    for slide in deck.slides:
        title = slide.shapes.title.text_frame.text
        for shape in slide.shapes:
            if shape._element.tag.endswith("cxnSp"):
                continue  # a turned line: its frame is not where it is drawn
            right, low = shape.left + shape.width, shape.top + shape.height
            if min(shape.left, shape.top) < 0 or right > wide or low > high:
                yield title, right / 914400, low / 914400
            if shape.has_text_frame:
                tall = sum(
                    _lines(paragraph, shape.width / 914400) * paragraph.line_spacing.inches
                    for paragraph in shape.text_frame.paragraphs
                    if paragraph.runs
                )
                if tall > shape.height / 914400 + 0.05:
                    yield f"{title}: {shape.text_frame.text[:60]}", tall, shape.height / 914400


def _lines(paragraph: "_Paragraph", width: float) -> int:
    """How many lines letters of half an em need, Chinese ones of a whole em."""
    size = paragraph.runs[0].font.size.pt / 72
    wide = sum(size * (1.0 if ord(sign) > 0x2E80 else 0.5) for sign in paragraph.text)
    return max(1, -int(-wide // width))


def many(folder: Path, count: int) -> list[RunFiles]:
    """Runs with long names and every flag there is."""
    from splitveil.audits.flags import FLAGS

    runs = []
    for at in range(count):
        record = rich_record("none" if at == 0 else "veil", seed=at)
        record["flags"] = [{"name": n, "seen": "x", "advice": a} for n, a in FLAGS.items()]
        record["accuracy"] -= 0.01 * at
        record["config"]["lambd"] = float(at)
        name = f"a-rather-long-name-of-a-run-{at}"
        log = make_metrics("veil", 3)
        runs.append(read_run(write_run(folder / name, record, log, make_gallery("veil"))))
    return runs


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_every_text_is_inside_its_place(content: ReportContent, lang: Lang) -> None:
    assert list(inside(opened(replace(content, lang=lang)))) == []


@pytest.mark.slow
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_fourteen_runs_with_every_flag_stay_inside(lang: Lang, tmp_path: Path) -> None:
    made = opened(ReportContent(runs=many(tmp_path, 14), lang=lang))
    assert list(inside(made)) == []
    tables = [table_of(s) for s in made.slides if any(x.has_table for x in s.shapes)]
    results = [t for t in tables if SUMMARY.columns[3].label(lang) in t[0]]
    assert sum(len(table) - 1 for table in results) == 14


def test_one_run_alone_has_a_deck(make_run: MakeRun) -> None:
    made = opened(ReportContent(runs=[make_run("alone", gallery=None, metrics=None)]))
    assert "Training" not in titles(made)
    assert "What an attacker sees" not in titles(made)
    said = words_of(made)
    assert any("leakage of" in text for text in said)
    assert list(inside(made)) == []


def test_a_run_that_was_not_audited_is_told_to_be(make_run: MakeRun) -> None:
    run = replace(make_run("x"), record=Record.from_dict({}), gallery=None, metrics=())
    said = [step.plain() for step in next_steps([run])]
    assert "Audit what was not audited yet (x): splitveil audit RUN." in said
    assert "Nothing was audited yet" in " ".join(words_of(opened(ReportContent(runs=[run]))))


def test_more_rows_than_fit_are_cut_to_the_front_and_counted(make_run: MakeRun) -> None:
    run = make_run("x", gallery=None, metrics=None)
    runs = [replace(run, name=f"r{i}") for i in range(ROWS)]
    worse = Record.from_dict(run.record.to_dict() | {"accuracy": 0.5})
    more = [*runs[:2], *(replace(r, record=worse) for r in runs)]
    assert f"The report lists {ROWS} more runs." in " ".join(
        words_of(opened(ReportContent(runs=more)))
    )


def test_the_commands_are_those_of_the_runs(content: ReportContent) -> None:
    each, unknown = commands(content.runs)
    assert each["gated"] == [
        "splitveil train --dataset digits --defence gated-att --seed 0 --name gated "
        "--net small --epochs 6",
        "splitveil audit runs/gated --profile quick",
    ]
    assert unknown == []


def test_a_run_on_all_training_images_shows_their_accuracy(make_run: MakeRun) -> None:
    record = make_record("none")
    record["config"] |= {"final": True, "noise_std": 0.0}
    record["audit"]["only"] = ["decoder", "linear"]
    log = make_metrics("none", 3).replace("val_accuracy", "other")
    run = make_run("x", record=record, metrics=log, gallery=None)
    slide = slide_called(opened(ReportContent(runs=[run])), "Training")
    (chart,) = (shape.chart for shape in slide.shapes if shape.has_chart)
    assert chart.chart_title.text_frame.text == "Training accuracy (%)"
    assert "--final" not in " ".join(step.plain() for step in next_steps([run]))
    train, audit = commands([run])[0]["x"]
    assert train.endswith("--name x --final")
    assert audit == "splitveil audit runs/x --profile quick --attacks decoder,linear"


def test_a_defence_from_elsewhere_is_named_instead(make_run: MakeRun) -> None:
    record = make_record("veil")
    record["config"]["defence"] = "mine"
    run = make_run("x", record=record, gallery=None, metrics=None)
    assert commands([run]) == ({}, ["x"])
    said = " ".join(words_of(opened(ReportContent(runs=[run]))))
    assert "unknown to this version: x." in said


def test_phases_of_the_penalty_are_told(make_run: MakeRun) -> None:
    record = make_record("gated-att")
    record["config"]["lambd"] = 16.0
    log = "".join(
        f'{{"kind": "epoch", "epoch": {at}, "weight": {float(at > 2)}, "shut": {float(at > 4)}}}\n'
        for at in range(1, 7)
    )
    run = make_run("x", record=record, metrics=log, gallery=None)
    assert phases_told([run], "en") == "x: warm-up (epoch 1–2), shut off (epoch 5–6)."
    assert phases_told([run], "zh") == "运行 x：第 1–2 轮预热、第 5–6 轮关断。"


def test_published_rows_are_hollow(content: ReportContent) -> None:
    from splitveil.report.columns import Published

    row = Published(accuracy=0.9, mse=0.01, source="A paper, table 1", dataset="digits")
    made = opened(replace(content, published={"cem": row}))
    slide = slide_called(made, "Accuracy against privacy")
    chart = next(s.chart for s in slide.shapes if s.has_chart)
    assert "cem (published)" in [series.name for series in chart.plots[0].series]
    assert any("not measured here: A paper." in frame.text for frame in texts(slide.shapes))


def test_the_deck_is_a_call_of_its_own(make_run: MakeRun, tmp_path: Path) -> None:
    plain = ReportContent(runs=[make_run("x", record={}, gallery=None, metrics=None)])
    write_report(plain, tmp_path / "page")
    assert not (tmp_path / "page" / "deck.pptx").exists()
    assert write_deck(plain, tmp_path / "deck") == tmp_path / "deck" / "deck.pptx"
    assert [path.name for path in (tmp_path / "deck").iterdir()] == ["deck.pptx"]


def test_without_python_pptx_a_message_says_what_to_install(
    content: ReportContent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: object) -> object:
        if name.partition(".")[0] == "pptx":
            raise ImportError(name)
        return real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(RunError, match=r"python-pptx; install it: pip install 'splitveil\[report"):
        write_deck(content, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written_is_named(make_run: MakeRun, tmp_path: Path) -> None:
    plain = ReportContent(runs=[make_run("x", record={}, gallery=None, metrics=None)])
    (tmp_path / "file").write_text("here")
    with pytest.raises(RunError, match="cannot write"):
        write_deck(plain, tmp_path / "file")


def test_hostile_names_stay_text(make_run: MakeRun) -> None:
    evil = '<a:t> & "x" _{b} ^2 \x07'
    run = replace(make_run("x", gallery=None, metrics=None), name=evil)
    made = opened(ReportContent(runs=[run], title=evil))
    assert titles(made)[0] == '<a:t> & "x" _{b} ^2  '


def test_texts_break_into_as_few_slides_as_fit() -> None:
    words = [Paragraph(text="word " * 20, bullet=True) for _ in range(12)]
    place = Spot(0.0, 0.0, 6.0, 2.0)
    pages = text_pages(words, place, 14.0)
    assert [one for page in pages for one in page] == words
    assert all(text_height(page, 6.0, 14.0) <= 2.0 for page in pages)
    assert all(
        text_height([*page, following[0]], 6.0, 14.0) > 2.0 for page, following in pairwise(pages)
    )


def at(name: str, accuracy: float | None, mse: float) -> RunFiles:
    record = Record.from_dict({"accuracy": accuracy, "strongest": {"mse": mse}})
    return RunFiles(name=name, path=Path(name), record=record)


def test_the_front_is_what_no_other_run_beats() -> None:
    runs = [at("a", 0.9, 0.1), at("b", 0.8, 0.2), at("c", 0.8, 0.1), at("d", None, 1.0)]
    runs.append(at("a2", 0.9, 0.1))
    assert [found.name for found in best_runs(runs)] == ["a", "b", "a2"]


def test_cards_are_spread_along_the_front_and_keep_its_ends() -> None:
    runs = [at(str(i), 0.9 - i / 100, i / 100) for i in range(2 * MANY_ROWS)]
    names = [int(run.name) for run in ReportContent(runs=runs).key_runs]
    assert names == [15, 13, 11, 9, 6, 4, 2, 0]
    worse = [at(f"w{i}", 0.1, 0.0) for i in range(MANY_ROWS)]
    few = ReportContent(runs=[*runs[:2], *worse]).key_runs
    assert [run.name for run in few] == ["1", "0"]
    assert ReportContent(runs=runs[:3]).key_runs == runs[:3]


@pytest.mark.slow
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_libreoffice_shows_every_slide(content: ReportContent, lang: Lang, tmp_path: Path) -> None:
    office = shutil.which("soffice") or shutil.which("libreoffice")
    if office is None:
        pytest.skip("no LibreOffice here")
    path = write_deck(replace(content, lang=lang), tmp_path)
    profile = f"-env:UserInstallation=file://{tmp_path}/profile"
    subprocess.run(
        [office, profile, "--headless", "--convert-to", "pdf", "--outdir", tmp_path, path],
        check=True, capture_output=True, timeout=300,
    )  # fmt: skip
    pdf = (tmp_path / "deck.pdf").read_bytes()
    slides = len(pptx.Presentation(path).slides)
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) == slides
