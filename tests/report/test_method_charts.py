"""The flow charts of methods: one content, two renderers, two languages, no box without a word."""

import json
import re
import shutil
import unicodedata
from html import unescape
from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib.text import Text
from typer.testing import CliRunner, Result

from splitveil.cli.app import app
from splitveil.defences.catalogue import DEFENCES
from splitveil.errors import ConfigError
from splitveil.report import canvas
from splitveil.report.canvas import NO_FONT, drawable
from splitveil.report.method_charts import (
    Chart,
    arrange,
    chart_names,
    chart_of,
    draw_chart,
    graphviz_files,
    marks,
    matplotlib_files,
    plain,
    read_chart,
    route,
    write_charts,
)
from splitveil.report.words import Lang

IMAGES = Path(__file__).parents[2] / "docs" / "images"
CHARTS = [(name, lang) for name in chart_names() for lang in ("en", "zh")]
every_chart = pytest.mark.parametrize(("name", "lang"), CHARTS)
needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz is not installed")
ACCENTS = {"hat": "\u0302", "tilde": "\u0303", "bar": "\u0304"}


def squeezed(text: str) -> str:
    return re.sub(r"\s", "", text)


def words_of_svg(svg: bytes) -> str:
    """The texts of an SVG in their order; a formula is cut into several."""
    return squeezed(unescape("".join(re.findall(r"<text[^>]*>([^<]*)</text>", svg.decode()))))


def missing(chart: Chart, drawn: str) -> list[str]:
    return [label for label in chart.labels if squeezed(plain(label)) not in drawn]


@every_chart
def test_every_chart_is_whole(name: str, lang: Lang) -> None:
    chart, english = read_chart(name, lang), read_chart(name)
    keys = [box.key for box in chart.boxes]
    assert len(set(keys)) == len(keys)
    assert {key for pair in chart.arrows for key in pair} == set(keys)  # no box stands alone
    assert [box.formulas for box in chart.boxes] == [box.formulas for box in english.boxes]
    for box in chart.boxes:
        assert box.title
        assert box.formulas
        assert box.shape or box.key in {"gradient", "encoder", "attention"}
        for text in (box.title, box.note):
            assert plain(text) == text  # only formulas and shapes have marks
    if lang == "zh":
        others = {"LayerNorm", "rob_loss"}
        titles = {s.title for s in chart.stages} | {b.title for b in chart.boxes} - others
        assert not [title for title in titles if not re.search("[\u4e00-\u9fff]", title)]


@every_chart
def test_arrows_join_neighbours_and_never_share_a_line_by_chance(name: str, lang: Lang) -> None:
    chart = read_chart(name, lang)
    spots = arrange(chart).spots
    places = {b.key: (r, c) for r, s in enumerate(chart.stages) for c, b in enumerate(s.boxes)}
    across = []
    for start, end in chart.arrows:
        (row, column), (next_row, next_column) = places[start], places[end]
        if row == next_row:
            assert abs(column - next_column) == 1, (start, end)
        else:
            assert next_row == row + 1, (start, end)
            corners = route(spots[start], spots[end])
            xs = sorted(x for x, _ in corners)
            across.append((row, start, end, xs[0], xs[-1]))
    for row, start, end, left, right in across:
        for other_row, other_start, other_end, low, high in across:
            if row == other_row and start != other_start and end != other_end:
                assert right < low or high < left, (start, end, other_start, other_end)


@every_chart
def test_boxes_neither_overlap_nor_leave_their_stage(name: str, lang: Lang) -> None:
    chart = read_chart(name, lang)
    grid = arrange(chart)
    for stage, band in zip(chart.stages, grid.bands, strict=True):
        row = [grid.spots[box.key] for box in stage.boxes]
        assert row[0].left >= band.left + 1.5
        assert row[-1].left + row[-1].width <= band.left + band.width <= grid.width
        assert all(a.left + a.width < b.left for a, b in pairwise(row))
        assert all(band.top < s.top < s.top + s.height < band.top + band.height for s in row)


@needs_dot
@every_chart
def test_graphviz_writes_every_label(name: str, lang: Lang) -> None:
    chart = read_chart(name, lang)
    files = graphviz_files(chart, lang)
    assert files is not None
    assert missing(chart, words_of_svg(files["svg"])) == []
    assert files["pdf"].startswith(b"%PDF")


@every_chart
def test_matplotlib_draws_every_label_inside_its_box(name: str, lang: Lang) -> None:
    if drawable(lang)[0] != lang:
        pytest.skip("no Chinese font is installed")
    chart = read_chart(name, lang)
    figure = draw_chart(chart, lang)
    texts = [found for found in figure.findobj(Text) if found.get_text()]

    def read(text: str) -> str:
        text = re.sub(r"\\(hat|tilde|bar)\{(.)\}", lambda m: m[2] + ACCENTS[m[1]], text)
        return squeezed(re.sub(r"\\mathregular|[\\${}^]|(?<!\w)_|_(?=\{)", "", text))

    drawn = "".join(read(text.get_text()) for text in texts)
    wanted = [squeezed(unicodedata.normalize("NFD", plain(label))) for label in chart.labels]
    drawn = unicodedata.normalize("NFD", drawn).replace("_", "")
    assert [label for label in wanted if label.replace("_", "") not in drawn] == []
    grid = arrange(chart)
    for box in chart.boxes:
        spot = grid.spots[box.key]
        own = [t for t in texts if abs(t.get_position()[0] - spot.left - spot.width / 2) < 1e-9]
        own = [t for t in own if spot.top < t.get_position()[1] < spot.top + spot.height]
        assert len(own) == 1 + len(box.lines)
        for text in own:
            assert text.get_window_extent().width / figure.dpi < spot.width


def test_without_graphviz_matplotlib_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    paths, remark = write_charts("attention", tmp_path)
    assert [path.name for path in paths] == ["flow-attention.svg", "flow-attention.pdf"]
    assert remark == ""
    again = matplotlib_files(read_chart("attention"), "en")
    assert [path.read_bytes() for path in paths] == [again["svg"], again["pdf"]]  # no date


@needs_dot
def test_a_graphviz_that_fails_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    false = shutil.which("false")
    monkeypatch.setattr(shutil, "which", lambda _: false)
    assert graphviz_files(read_chart("attention"), "en") is None


def test_without_a_chinese_font_the_chart_is_english_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canvas, "chinese_font", lambda: None)
    result = call("--flow", "attention", "--lang", "zh", "--out", str(tmp_path))
    assert result.exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "flow-attention.pdf", "flow-attention.svg",
    ]  # fmt: skip
    assert NO_FONT in " ".join(result.stderr.split())
    assert "fonts-noto-cjk" in NO_FONT


@pytest.mark.parametrize("name", chart_names())
def test_a_preset_has_the_chart_of_its_name(name: str) -> None:
    if name in DEFENCES:
        assert chart_of(DEFENCES[name].settings()) == name
        assert chart_of(DEFENCES[name].settings() | {"lambd": 0.0}) == "split"


def test_settings_that_change_the_formulas_have_no_wrong_chart() -> None:
    gated, slots = DEFENCES["gated-att"].settings(), DEFENCES["slot-cross"].settings()
    for change in ({"statistic": "raw"}, {"attention": "uniform"}, {"penalty": "rate"}):
        assert chart_of(gated | change) == "split"
    for change in ({"aggregate": "sum"}, {"assign_from": "layernorm"}, {"penalty": "rate"}):
        assert chart_of(slots | change) == "split"
    assert chart_of(DEFENCES["cem"].settings() | {"form": "logdet"}) == "split"


@pytest.mark.parametrize("path", sorted(IMAGES.glob("flow-*.svg")), ids=lambda p: p.stem)
def test_the_pictures_of_the_pages_are_those_of_the_code(path: Path) -> None:
    stem = path.stem.removeprefix("flow-")
    chart = read_chart(stem.removesuffix("-zh"), "zh" if stem.endswith("-zh") else "en")
    assert missing(chart, words_of_svg(path.read_bytes())) == []
    assert path.stat().st_size < 80_000


def test_a_mark_inside_a_word_is_itself() -> None:
    assert list(marks("rob_loss")) == [("rob_loss", "")]
    assert plain("W_V x_{ij}^2") == "WV xij2"


def call(*words: str) -> Result:
    return CliRunner().invoke(app, ["explain", *words])


def told(result: Result) -> str:
    return " ".join(re.sub(r"\x1b\[[\d;]*m", "", result.output).split())


def test_explain_writes_a_chart_without_a_run(tmp_path: Path) -> None:
    result = call("--flow", "cem", "--out", str(tmp_path / "new"), "--json")
    assert result.exit_code == 0, told(result)
    written = json.loads(result.stdout)
    assert written["flow"] == "cem"
    assert all(Path(path).is_file() for path in written["files"])


def test_explain_says_what_it_needs(tmp_path: Path) -> None:
    unknown, nothing, both = (
        call("--flow", "gated"),
        call(),
        call(str(tmp_path / "x"), "--flow", "cem"),
    )
    assert [r.exit_code for r in (unknown, nothing, both)] == [2, 2, 2]
    assert "unknown flow chart 'gated'; did you mean 'gated-att'?" in told(unknown)
    assert "a run folder, or --flow NAME" in told(nothing)
    assert f"no run folder at {tmp_path / 'x'}" in told(both)
    with pytest.raises(ConfigError, match="choose from: attention, cem"):
        read_chart("slots")
