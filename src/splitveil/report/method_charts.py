"""The methods as flow charts, from `charts.toml`: as SVG and PDF by graphviz or by matplotlib.

One description of stages, boxes, arrows, formulas and shapes, and one arrangement of them, serve
both, and the deck as well.
"""

import io
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from unicodedata import combining, east_asian_width, normalize

from splitveil.errors import ConfigError, unknown
from splitveil.io import Json, put_all
from splitveil.report import canvas
from splitveil.report.canvas import FONT, GREY, INK, RULE, chinese_font, drawable, sheet
from splitveil.report.words import Lang

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Kind = Literal["input", "step", "gate", "loss"]
PAPERS: Mapping[Kind, str] = {
    "input": "#e8f1f8",
    "step": "#ffffff",
    "gate": "#fdeee4",
    "loss": "#e6f4ee",
}
EDGES: Mapping[Kind, str] = {"input": "#0072b2", "step": GREY, "gate": "#d55e00", "loss": "#009e73"}
BAND = "#f4f6f8"


@dataclass(frozen=True, kw_only=True)
class Box:
    """A step: its title, its formulas, and what goes in and comes out.

    `formulas` and `shape` mark what is low by _ and what is high by ^ (see `marks`).
    """

    key: str
    title: str
    kind: Kind = "step"
    formulas: tuple[str, ...] = ()
    shape: str = ""
    note: str = ""

    @property
    def lines(self) -> tuple[str, ...]:
        """Everything under the title."""
        return tuple(line for line in (*self.formulas, self.shape, self.note) if line)


@dataclass(frozen=True, kw_only=True)
class ChartRow:
    """A row of boxes."""

    title: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A method in one language; arrows join the keys of boxes in one stage or in neighbours."""

    name: str
    title: str
    stages: tuple[ChartRow, ...]
    arrows: tuple[tuple[str, str], ...]

    @property
    def boxes(self) -> tuple[Box, ...]:
        """All boxes, stage by stage."""
        return tuple(box for stage in self.stages for box in stage.boxes)

    @property
    def labels(self) -> list[str]:
        """Every text of the chart, marks included."""
        found = [self.title]
        for stage in self.stages:
            found.append(stage.title)
            for box in stage.boxes:
                found += [box.title, *box.lines]
        return found


@cache
def _table() -> Json:
    file = resources.files("splitveil.report") / "charts.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def chart_names() -> tuple[str, ...]:
    """The charts there are."""
    return tuple(_table())


def read_chart(name: str, lang: Lang = "en") -> Chart:
    """The chart of a method.

    Raises:
        ConfigError: There is no such chart; the message names those there are.

    >>> [stage.title for stage in read_chart("cem").stages]
    ['1 At the end of each epoch', '2 In each step', '3 Hinge, sum, gradient']
    """
    if name not in _table():
        raise ConfigError(unknown("flow chart", name, chart_names()))
    data = _table()[name]

    def box(entry: Json) -> Box:
        return Box(
            key=entry["key"],
            title=entry[lang],
            kind=entry.get("kind", "step"),
            formulas=tuple(entry.get("formula", ())),
            shape=entry.get("shape", ""),
            note=entry.get("note", {}).get(lang, ""),
        )

    return Chart(
        name=name,
        title=data[lang],
        stages=tuple(
            ChartRow(title=stage[lang], boxes=tuple(map(box, stage["box"])))
            for stage in data["stage"]
        ),
        arrows=tuple((start, end) for start, end in data["arrows"]),
    )


def chart_of(config: Mapping[str, Any]) -> str:
    """The chart that shows what a run with these settings does; `split` where no other does.

    A chart is chosen only if the settings that change its formulas are those it draws.

    >>> chart_of({"defence": "sparse+gated-att", "lambd": 16.0, "form": "gated",
    ...           "attention": "minimise"})
    'gated-att'
    >>> chart_of({"defence": "none"}), chart_of({"defence": "gated-att", "penalty": "rate"})
    ('split', 'split')
    """
    if not config.get("lambd"):
        return "split"
    if "clusters" in config:
        return "cem" if config.get("form", "hinge") == "hinge" else "split"
    told = (config.get("penalty"), config.get("statistic"), config.get("attention"))
    penalty, statistic, attention = told
    if penalty == "rate":
        rate = attention == "maximise" and "num_slots" not in config and statistic in (None, "raw")
        return "veil" if rate else "split"
    if attention != "minimise":
        return "split"
    if "num_slots" in config:
        as_drawn = statistic in (None, "layernorm") and config.get("assign_from") != "layernorm"
        return "slot-cross" if as_drawn and config.get("aggregate") != "sum" else "split"
    form = str(config.get("form"))
    usual = {"gated": "layernorm", "hinge": "layernorm", "trace": "raw"}.get(form)
    names = {"gated": "gated-att", "hinge": "gated-att-simple", "trace": "gated-att-trace"}
    return names[form] if usual is not None and statistic in (None, usual) else "split"


Level = Literal["", "sub", "sup"]
MARK = re.compile(r"([_^])(?:\{([^}]*)\}|(\w)(?![A-Za-z0-9]))")


def marks(text: str) -> Iterator[tuple[str, Level]]:
    """The parts of a formula and whether each stands low or high.

    >>> list(marks("σ^2_{cj} + 1"))
    [('σ', ''), ('2', 'sup'), ('cj', 'sub'), (' + 1', '')]
    >>> list(marks("calls ≤ early_shut_steps"))
    [('calls ≤ early_shut_steps', '')]
    """
    at = 0
    for found in MARK.finditer(text):
        if found.start() > at:
            yield text[at : found.start()], ""
        yield found[2] or found[3], "sub" if found[1] == "_" else "sup"
        at = found.end()
    if at < len(text):
        yield text[at:], ""


def plain(text: str) -> str:
    """A formula without its marks.

    >>> plain("∇_{enc} = 1")
    '∇enc = 1'
    """
    return "".join(part for part, _ in marks(text))


def write_charts(name: str, folder: Path, lang: Lang = "en") -> tuple[list[Path], str]:
    """Write a chart as SVG and PDF, by graphviz where `dot` is found, else by matplotlib.

    Args:
        name: One of `chart_names`.
        folder: Where to; made when absent.
        lang: Language of the texts.

    Returns:
        The paths, and a remark: which language was drawn where no font has the one asked for.
    """
    drawn, remark = drawable(lang)
    chart = read_chart(name, drawn)
    files = graphviz_files(chart, drawn) or matplotlib_files(chart, drawn)
    stem = f"flow-{name}" if drawn == "en" else f"flow-{name}-{drawn}"
    return put_all(
        folder, {folder / f"{stem}.{kind}": data for kind, data in files.items()}
    ), remark


FORMATS = ("svg", "pdf")


def graphviz_files(chart: Chart, lang: Lang) -> dict[str, bytes] | None:
    """The chart as SVG and PDF by graphviz; None where there is no `dot` that can write both."""
    dot = shutil.which("dot")
    if dot is None:
        return None
    source = dot_source(chart, lang).encode("utf-8")
    found: dict[str, bytes] = {}
    for kind in FORMATS:
        try:
            done = subprocess.run(  # noqa: S603 - fixed words, no shell
                [dot, "-Kneato", "-n2", f"-T{kind}"],
                input=source,
                capture_output=True,
                check=True,
                timeout=60,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        found[kind] = done.stdout
    found["svg"] = _for_readers(found["svg"])
    return found


POINT = 1 / 72  # inches
TITLE, TEXT, SMALL = 9.5, 9.0, 8.0  # points
LINE, PAD, GAP, RISE = 0.185, 0.12, 0.34, 0.36  # inches: text, in a box, between boxes, rows
STRAIGHT = 0.12  # inches: an arrow that shifts less goes straight
SIDE, HEAD = 1.85, 0.5  # inches: the stages' titles on the left, the chart's title on top


def text_width(text: str, size: float) -> float:
    """About how wide a text is, inches, at a size in points.

    >>> text_width("ab", 72.0) < text_width("槽槽", 72.0)
    True
    """
    wide = 0.0
    for part, level in marks(text):
        letters = sum(
            0.0 if combining(sign) else 1.0 if east_asian_width(sign) in "WF" else 0.61
            for sign in part
        )
        wide += letters * (0.72 if level else 1.0)
    return wide * size * POINT


@dataclass(frozen=True)
class Spot:
    """Left and top edge, width and height of a box, inches from the top left corner."""

    left: float
    top: float
    width: float
    height: float


@dataclass(frozen=True)
class Grid:
    """Where everything stands when a chart is drawn without graphviz.

    `bands` are the stages; the title of each stands at its left end, `side` inches wide.
    """

    width: float
    height: float
    bands: tuple[Spot, ...]
    spots: Mapping[str, Spot]


def arrange(chart: Chart) -> Grid:
    """Rows of boxes, centred, as wide and tall as their texts need."""
    widths = {box.key: _box_width(box) for box in chart.boxes}
    rows = [sum(widths[b.key] for b in s.boxes) + GAP * (len(s.boxes) - 1) for s in chart.stages]
    inner = max(*rows, text_width(chart.title, 14.0) - SIDE)
    width, top = SIDE + inner + 3 * PAD, HEAD
    bands, spots = [], {}
    for stage, row in zip(chart.stages, rows, strict=True):
        height = max(LINE * (1 + len(box.lines)) + 0.1 for box in stage.boxes)
        bands.append(Spot(PAD, top, width - 2 * PAD, height + 2 * PAD))
        left = SIDE + PAD + (inner - row) / 2
        for box in stage.boxes:
            spots[box.key] = Spot(left, top + PAD, widths[box.key], height)
            left += widths[box.key] + GAP
        top += height + 2 * PAD + RISE
    return Grid(width, top - RISE + PAD, tuple(bands), spots)


def _box_width(box: Box) -> float:
    own = [text_width(box.title, TITLE) * 1.08]  # bold
    own += [text_width(line, TEXT if line in box.formulas else SMALL) for line in box.lines]
    return max(own) + 2 * PAD


Point = tuple[float, float]


def route(start: Spot, end: Spot) -> list[Point]:
    """The corners of an arrow from a box to another, inches from the top left corner.

    Straight in a row; from row to row down, across in the middle of the gap, and down.
    """
    if start.top == end.top:
        level = start.top + start.height / 2
        if start.left < end.left:
            return [(start.left + start.width, level), (end.left, level)]
        return [(start.left, level), (end.left + end.width, level)]
    tail = (start.left + start.width / 2, start.top + start.height)
    head = (end.left + end.width / 2, end.top)
    if abs(tail[0] - head[0]) < STRAIGHT:
        return [(head[0], tail[1]), head]
    level = end.top - PAD - RISE / 2
    return [tail, (tail[0], level), (head[0], level), head]


def _for_readers(svg: bytes) -> bytes:
    """An SVG whose fonts have a substitute: Verdana is as wide, and some sans-serif is anywhere."""
    bold = re.sub(rb'font-family="([^"]+) Bold"', rb'font-family="\1" font-weight="bold"', svg)
    return re.sub(rb'font-family="([^"]+)"', rb'font-family="\1,Verdana,sans-serif"', bold)


def dot_source(chart: Chart, lang: Lang) -> str:
    """The chart in graphviz's language, for `dot -Kneato -n2`: every place is given."""
    grid = arrange(chart)
    font = (chinese_font() if lang == "zh" else None) or FONT
    lines = [
        f'digraph "{chart.name}" {{',
        "graph [bgcolor=white pad=0.05 splines=true]",
        f'node [shape=box fixedsize=true fontname="{font}" fontcolor="{INK}" margin=0]',
        f'edge [color="{GREY}" penwidth=1.2 arrowsize=0.7]',
    ]
    heading = Spot(0.0, 0.0, grid.width, HEAD)
    lines.append(f'node [fontname="{font} Bold" fontsize=13]')
    lines.append(_dot_text("title", [chart.title], "n", heading, grid))
    lines.append(f"node [fontsize={TITLE}]")
    for at, (stage, band) in enumerate(zip(chart.stages, grid.bands, strict=True)):
        look = f'style=filled fillcolor="{BAND}" color="{RULE}" penwidth=0.8'
        lines.append(_dot_node(f"band{at}", band, grid, f'label="" {look}'))
        words = wrapped(stage.title, SIDE - 0.2, TITLE * 1.08)
        side = Spot(band.left + 0.1, band.top, SIDE - 0.1, band.height)
        lines.append(_dot_text(f"stage{at}", words, "l", side, grid))
    lines.append(f'node [fontname="{font}" style="rounded,filled" penwidth=1.3]')
    for box in chart.boxes:
        look = f'fillcolor="{PAPERS[box.kind]}" color="{EDGES[box.kind]}"'
        label = f"label=<{_dot_label(box)}>"
        lines.append(_dot_node(box.key, grid.spots[box.key], grid, f"{label} {look}"))
    for start, end in chart.arrows:
        corners = route(grid.spots[start], grid.spots[end])
        lines.append(f'"{start}" -> "{end}" [pos="{_dot_path(corners, grid)}"]')
    return "\n".join([*lines, "}"]) + "\n"


def _dot_node(key: str, spot: Spot, grid: Grid, rest: str) -> str:
    x, y = spot.left + spot.width / 2, spot.top + spot.height / 2
    size = f"width={spot.width:.3f} height={spot.height:.3f}"
    return f'"{key}" [pos="{_dot_point((x, y), grid)}!" {size} {rest}]'


def _dot_point(point: Point, grid: Grid) -> str:
    return f"{point[0] / POINT:.1f},{(grid.height - point[1]) / POINT:.1f}"


def _dot_path(corners: Sequence[Point], grid: Grid) -> str:
    """Straight lines through the corners as graphviz's splines, with the arrow's head last."""
    (x, y), (last_x, last_y) = corners[-2:]
    length = max(abs(last_x - x) + abs(last_y - y), 1e-9)  # they run along an axis
    back = 0.097  # inches: the length of the head
    tip = (last_x - back * (last_x - x) / length, last_y - back * (last_y - y) / length)
    points = [corners[0]]
    for (ax, ay), (bx, by) in pairwise([*corners[:-1], tip]):
        points += [(ax + (bx - ax) * t / 3, ay + (by - ay) * t / 3) for t in (1, 2, 3)]
    return " ".join([f"e,{_dot_point(corners[-1], grid)}", *(_dot_point(p, grid) for p in points)])


def _dot_text(key: str, lines: Sequence[str], side: str, spot: Spot, grid: Grid) -> str:
    """Lines without a frame, on the left (`l`) or in the middle (`n`) of their place."""
    words = "".join(rf"{line}\{side}" for line in lines)
    return _dot_node(key, spot, grid, f'shape=plaintext label="{words}"')


DOT_BARE = 'BORDER="0" CELLBORDER="0" CELLSPACING="0" CELLPADDING="0"'


def _dot_label(box: Box) -> str:
    rows = [f'<FONT POINT-SIZE="{TITLE}"><B>{escape(box.title)}</B></FONT>']
    for line in box.lines:
        size, ink = (TEXT, INK) if line in box.formulas else (SMALL, GREY)
        face = "" if line == box.note else f' FACE="{FONT}"'
        words = _dot_marked(line, size)
        rows.append(f'<FONT POINT-SIZE="{size}" COLOR="{ink}"{face}>{words}</FONT>')
    cells = "".join(f'<TR><TD HEIGHT="{LINE / POINT:.0f}">{row}</TD></TR>' for row in rows)
    return f"<TABLE {DOT_BARE}>{cells}</TABLE>"


def _dot_marked(text: str, size: float) -> str:
    small = f'<FONT POINT-SIZE="{0.8 * size:.1f}">{{}}</FONT>'
    tags = {"": "{}", "sub": f"<SUB>{small}</SUB>", "sup": f"<SUP>{small}</SUP>"}
    # graphviz 2.43 reads a bracket after a tag as the end of a part.
    safe = ((escape(part).replace("]", "&#93;"), level) for part, level in marks(text))
    return "".join(tags[level].format(part) for part, level in safe)


def matplotlib_files(chart: Chart, lang: Lang) -> dict[str, bytes]:
    """The chart as SVG and PDF by matplotlib; neither holds a date."""
    unsaid: dict[str, dict[str, None]] = {
        "svg": {"Date": None, "Creator": None},
        "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    }
    found = {}
    for kind in FORMATS:
        buffer = io.BytesIO()
        with canvas.style():
            draw_chart(chart, lang).savefig(buffer, format=kind, metadata=unsaid[kind])
        found[kind] = buffer.getvalue()
    return found


def draw_chart(chart: Chart, lang: Lang) -> "Figure":
    """The chart as a figure: a band per stage, a box per step."""
    grid = arrange(chart)
    chinese = chinese_font() if lang == "zh" else None
    family = [name for name in (FONT, chinese) if name]  # the first that has a sign draws it
    with sheet(grid.width, grid.height) as (figure, axes):
        axes.invert_yaxis()
        style: dict[str, Any] = {"family": family, "va": "center"}
        axes.text(grid.width / 2, HEAD / 2, chart.title, size=13, weight="bold", ha="center",
                  **style)  # fmt: skip
        for stage, band in zip(chart.stages, grid.bands, strict=True):
            _rounded(axes, band, BAND, RULE, 0.8)
            words = "\n".join(wrapped(stage.title, SIDE - 0.2, TITLE * 1.08))
            axes.text(band.left + 0.1, band.top + band.height / 2, words, size=TITLE,
                      weight="bold", color=GREY, **style)  # fmt: skip
        for box in chart.boxes:
            _draw_box(axes, box, grid.spots[box.key], style)
        for start, end in chart.arrows:
            corners = route(grid.spots[start], grid.spots[end])
            xs, ys = zip(*corners[:-1], strict=True)
            axes.plot(xs, ys, color=GREY, linewidth=1.1, solid_joinstyle="miter")
            look = {"arrowstyle": "-|>", "color": GREY, "linewidth": 1.1, "mutation_scale": 10,
                    "shrinkA": 0, "shrinkB": 0}  # fmt: skip
            axes.annotate("", xy=corners[-1], xytext=corners[-2], arrowprops=look)
        return figure


def _rounded(axes: "Axes", spot: Spot, paper: str, edge: str, width: float) -> None:
    from matplotlib.patches import FancyBboxPatch

    axes.add_patch(
        FancyBboxPatch((spot.left, spot.top), spot.width, spot.height, facecolor=paper,
                       edgecolor=edge, boxstyle="round,pad=0,rounding_size=0.06", linewidth=width)
    )  # fmt: skip


def _draw_box(axes: "Axes", box: Box, spot: Spot, style: Mapping[str, Any]) -> None:
    _rounded(axes, spot, PAPERS[box.kind], EDGES[box.kind], 1.2)
    middle = spot.left + spot.width / 2
    level = spot.top + (spot.height - LINE * len(box.lines)) / 2
    axes.text(middle, level, box.title, size=TITLE, weight="bold", ha="center", **style)
    for at, line in enumerate(box.lines, start=1):
        main, marked = line in box.formulas, plain(line) != line
        axes.text(middle, level + at * LINE, mathtext(line) if marked else line, ha="center",
                  size=TEXT if main else SMALL, color=INK if main else GREY, parse_math=marked,
                  **style)  # fmt: skip


ACCENTS = {"\u0302": "hat", "\u0303": "tilde", "\u0304": "bar"}
TALL = re.compile("(.)([" + "".join(ACCENTS) + "])")


def mathtext(text: str) -> str:
    r"""A formula as matplotlib reads it, upright.

    >>> mathtext("x_{ij} − 1")
    '$\\mathregular{x_{ij}\\ −\\ 1}$'
    """
    parts = []
    for part, level in marks(normalize("NFD", text)):
        safe = re.sub(r"([#$%&{}_])", r"\\\1", part).replace(" ", r"\ ")
        safe = TALL.sub(lambda found: rf"\{ACCENTS[found[2]]}{{{found[1]}}}", safe)
        parts.append({"": "{}", "sub": "_{{{}}}", "sup": "^{{{}}}"}[level].format(safe))
    return rf"$\mathregular{{{''.join(parts)}}}$"


WORD = re.compile(r"[\u4e00-\u9fff][\u3000-\u303f\uff00-\uffef]*|[^\u4e00-\u9fff ]+ ?| ")


def wrapped(text: str, width: float, size: float) -> Sequence[str]:
    """A text in lines of at most this width in inches.

    Chinese breaks after a colon, else between any two signs.

    >>> wrapped("Gated attention: who counts", 1.0, 9.5)
    ['Gated', 'attention:', 'who counts']
    >>> wrapped("阶段 1：谁算数", 0.8, 9.5)
    ['阶段 1：', '谁算数']
    """
    head, colon, rest = text.partition("：")
    if rest and text_width(text, size) > width:
        return [*wrapped(head + colon, width, size), *wrapped(rest, width, size)]
    lines = [""]
    for word in WORD.findall(text):
        if lines[-1].strip() and text_width((lines[-1] + word).strip(), size) > width:
            lines.append("")
        lines[-1] += word
    return [line.strip() for line in lines]
