"""Slides that stay editable: texts, tables, charts and flow charts as PowerPoint's own objects.

Every size follows from the texts, so that all of them fit their places. Places are in inches, sizes
of letters in points.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Literal

from splitveil.errors import RunError
from splitveil.io import printable
from splitveil.report import canvas
from splitveil.report.canvas import GREY, INK, PALETTE, RULE
from splitveil.report.method_charts import (
    BAND,
    EDGES,
    PAPERS,
    POINT,
    Box,
    Chart,
    Spot,
    arrange,
    marks,
    text_width,
    wrapped,
)
from splitveil.report.words import LANGS, Lang

if TYPE_CHECKING:
    from pptx.chart.chart import Chart as NativeChart
    from pptx.dml.color import RGBColor
    from pptx.dml.line import LineFormat
    from pptx.presentation import Presentation
    from pptx.shapes.autoshape import Shape
    from pptx.shapes.connector import Connector
    from pptx.slide import Slide
    from pptx.text.text import Font, TextFrame, _Paragraph
    from pptx.util import Length

WIDE, HIGH = 40 / 3, 7.5  # a slide
EDGE = 0.6
BODY = Spot(EDGE, 1.2, WIDE - 2 * EDGE, 5.7)
SIZES = (20.0, 18.0, 16.0, 14.0, 12.0)  # of texts, the largest that fits
CELLS = (16.0, 14.0, 13.0, 12.0)  # of tables
SPACING = 1.2  # of a line, in sizes of its letters
LATIN, CODE, CHINESE = "Arial", "Courier New", "Microsoft YaHei"  # on the machines of most readers
SIDES, TOPS = 0.08, 0.04  # margins inside a cell
INDENT = 0.25  # of a bullet's text
BOLD = 1.15  # how much wider bold letters are


@dataclass(frozen=True, kw_only=True)
class Paragraph:
    """A paragraph; a `formula` marks what is low by _ and what is high by ^."""

    text: str
    bold: bool = False
    code: bool = False
    formula: bool = False
    bullet: bool = False
    ink: str = INK

    def lines(self, width: float, size: float) -> int:
        """How many lines it takes, at least."""
        room = (width - INDENT * self.bullet) / (BOLD if self.bold else 1.0)
        return sum(max(1, ceil(text_width(line, size) / room))
                   for line in wrapped(self.text, room, size))  # fmt: skip


def text_height(words: Sequence[Paragraph], width: float, size: float) -> float:
    """Height of paragraphs in a column, inches."""
    line = SPACING * size * POINT
    return line * sum((one.lines(width, size) + 0.3 * one.bullet for one in words), 0.0)


def fitting(words: Sequence[Paragraph], place: Spot, sizes: Sequence[float] = SIZES) -> float:
    """The largest of some sizes at which paragraphs fit a place; the smallest if none does."""
    fit = (size for size in sizes if text_height(words, place.width, size) <= place.height)
    return next(fit, sizes[-1])


def text_pages(
    words: Sequence[Paragraph], place: Spot, size: float = 16.0
) -> list[list[Paragraph]]:
    """Paragraphs in as few groups as fit the place at a size."""
    pages: list[list[Paragraph]] = [[]]
    for one in words:
        if pages[-1] and text_height([*pages[-1], one], place.width, size) > place.height:
            pages.append([])
        pages[-1].append(one)
    return pages


Cell = Sequence[Paragraph]


@dataclass(frozen=True, kw_only=True)
class TableLayout:
    """A table and its layout: widths of its columns and heights of its rows, heading first."""

    size: float
    rows: Sequence[Sequence[Cell]]
    right: Sequence[bool]  # columns of numbers
    widths: Sequence[float]
    heights: Sequence[float]

    def pages(self, height: float) -> list["TableLayout"]:
        """The rows in as few tables as fit a height, each under the heading."""
        most = len(self._groups(height))
        # As many as are needed, filled alike.
        even = (self._groups(share / 20 * height) for share in range(1, 21))
        groups = next(groups for groups in even if len(groups) == most)
        return [
            replace(
                self,
                rows=[self.rows[i] for i in (0, *group)],
                heights=[self.heights[i] for i in (0, *group)],
            )
            for group in groups
        ]

    def _groups(self, height: float) -> list[list[int]]:
        groups: list[list[int]] = [[]]
        for at in range(1, len(self.rows)):
            if groups[-1] and sum(self.heights[i] for i in (0, *groups[-1], at)) > height:
                groups.append([])
            groups[-1].append(at)
        return groups


def lay_out(rows: Sequence[Sequence[Cell]], width: float, right: Sequence[bool]) -> TableLayout:
    """A table as wide as given, heading first; only the smallest letters let cells break.

    Then the widest columns give way first.
    """
    columns = list(zip(*rows, strict=True))

    def needs(size: float) -> list[float]:
        return [max(_heading_width(head, size), *(_cell_width(cell, size) for cell in column))
                for head, *column in columns]  # fmt: skip

    size = next((size for size in CELLS if sum(needs(size)) <= width), CELLS[-1])
    widths = needs(size)
    spare = width - sum(widths)
    if spare >= 0:
        widths = [own + spare / len(widths) for own in widths]
    else:
        widths = _narrowed(widths, width)
    heights = [
        max(text_height(cell, own - 2 * SIDES, size) for cell, own in zip(row, widths, strict=True))
        + 2 * TOPS
        for row in rows
    ]
    return TableLayout(size=size, rows=rows, right=right, widths=widths, heights=heights)


def _heading_width(cell: Cell, size: float) -> float:
    """A heading may break into three lines, between its words."""
    words = [replace(one, text=part) for one in cell for part in one.text.split()]
    return max(_cell_width(words, size), 0.4 * _cell_width(cell, size))


def _cell_width(cell: Cell, size: float) -> float:
    lines = (text_width(words.text, size) * (BOLD if words.bold else 1.0) for words in cell)
    return max(lines, default=0.0) + 2 * SIDES + 0.02


def _narrowed(widths: Sequence[float], width: float) -> list[float]:
    """Widths with a sum as given, of which only the widest are cut, to one width.

    >>> _narrowed([1.0, 2.0, 9.0, 8.0], 13.0)
    [1.0, 2.0, 5.0, 5.0]
    """
    left, most = width, 0.0
    for at, own in enumerate(sorted(widths)):
        most = left / (len(widths) - at)
        if own > most:
            break
        left -= own
    return [min(own, most) for own in widths]


# What PowerPoint calls them; it has no triangle upside down.
SIGNS = ("CIRCLE", "SQUARE", "DIAMOND", "TRIANGLE", "DASH", "PLUS", "X", "STAR")
MARKERS = dict(zip(canvas.MARKERS, SIGNS, strict=True))
Dash = Literal["", "-", "--", ":"]


@dataclass(frozen=True, kw_only=True)
class ChartSeries:
    """A line or points of a chart: its name, its points and its look."""

    name: str
    points: Sequence[tuple[float, float]]
    ink: str
    dash: Dash = "-"  # "" for points alone
    marker: str = ""  # as matplotlib names it; "" for none
    hollow: bool = False


BOXES = (16.0, 14.0, 13.0, 12.0, 11.0, 10.0, 9.5, 9.0)  # sizes in a flow chart
STAGE, ARROW, WIDEST = 2.1, 0.36, 1.7  # inches of a stage's title and of an arrow, most stretch


def _box_words(box: Box) -> list[Paragraph]:
    shape = [Paragraph(text=box.shape, formula=True, ink=GREY)] if box.shape else []
    return [Paragraph(text=box.title, bold=True), *shape]


def _inside(place: Spot) -> Spot:
    return replace(place, width=place.width - 0.1)


def _row(needs: Sequence[Spot], left: float, width: float) -> list[Spot]:
    """Boxes in the middle of a row, with room for arrows between."""
    gaps = ARROW * (len(needs) - 1)
    stretch = min((width - gaps) / sum(need.width for need in needs), WIDEST)
    left += (width - gaps - stretch * sum(need.width for need in needs)) / 2
    spots = []
    for need in needs:
        spots.append(Spot(left, need.top, stretch * need.width, need.height))
        left += stretch * need.width + ARROW
    return spots


class Deck:
    """A presentation in the making.

    Args:
        lang: Language of its texts.
        footer: What stands at the foot of every slide beside its number.

    Raises:
        RunError: python-pptx is not installed.
    """

    def __init__(self, lang: Lang, footer: str) -> None:
        self.lang, self.footer = lang, footer
        self._file = _empty_file()

    def to_bytes(self) -> bytes:
        """The file."""
        buffer = io.BytesIO()
        self._file.save(buffer)
        return buffer.getvalue()

    def slide(self, title: str, notes: str = "") -> "Slide":
        """A new slide with its title in the outline, foot and speaker's notes."""
        slide = self._file.slides.add_slide(self._file.slide_layouts[5])
        if slide.shapes.title is not None:
            spot = Spot(EDGE, 0.35, BODY.width, 0.7)
            title_box = slide.shapes.title
            title_box.left, title_box.top, title_box.width, title_box.height = _emu(spot)
            words = Paragraph(text=title, bold=True)
            self._fill(slide.shapes.title.text_frame, [words],
                       fitting([words], spot, (28.0, 24.0, 20.0, 16.0)), middle=True)  # fmt: skip
        self._bar(slide, Spot(EDGE, 1.07, BODY.width, 0.03))
        foot = Paragraph(text=self.footer, ink=GREY)
        self.text(slide, [foot], Spot(EDGE, 7.05, BODY.width - 1.0, 0.25), (10.0,))
        self._number(slide)
        if notes and slide.notes_slide.notes_text_frame is not None:
            frame = slide.notes_slide.notes_text_frame
            self._fill(frame, [Paragraph(text=line) for line in notes.split("\n")], 12.0, bare=True)
        return slide

    def text(
        self,
        slide: "Slide",
        words: Sequence[Paragraph],
        place: Spot,
        sizes: Sequence[float] = SIZES,
        *,
        middle: bool = False,
    ) -> None:
        """A text box."""
        box = slide.shapes.add_textbox(*_emu(place))
        self._fill(box.text_frame, words, fitting(words, place, sizes), middle=middle)

    def table(self, slide: "Slide", grid: TableLayout, left: float, top: float) -> None:
        """A table with its heading."""
        from pptx.util import Inches

        spot = Spot(left, top, sum(grid.widths), sum(grid.heights))
        shape = slide.shapes.add_table(len(grid.rows), len(grid.widths), *_emu(spot))
        table = shape.table
        for at, width in enumerate(grid.widths):
            table.columns[at].width = Inches(width)
        for at, (row, height) in enumerate(zip(grid.rows, grid.heights, strict=True)):
            table.rows[at].height = Inches(height)
            for place, (cell, right) in enumerate(zip(row, grid.right, strict=True)):
                box = table.cell(at, place)
                box.margin_left = box.margin_right = Inches(SIDES)
                box.margin_top = box.margin_bottom = Inches(TOPS)
                box.fill.solid()
                paper = PALETTE[0] if at == 0 else BAND if at % 2 == 0 else "#ffffff"
                box.fill.fore_color.rgb = _rgb(paper)
                inked = [replace(one, ink="#ffffff") for one in cell] if at == 0 else cell
                self._fill(box.text_frame, inked, grid.size, right=right, bare=True)

    def picture(self, slide: "Slide", png: bytes, place: Spot, alt: str) -> None:
        """A picture with its description for those who cannot see it."""
        picture = slide.shapes.add_picture(io.BytesIO(png), *_emu(place))
        picture._element.nvPicPr.cNvPr.set("descr", printable(alt))

    def curves(
        self,
        slide: "Slide",
        series: Sequence[ChartSeries],
        place: Spot,
        axes: tuple[str, str],
        *,
        title: str = "",
        legend: bool = True,
        ends: tuple[float, float] | None = None,
        top: float | None = None,
    ) -> None:
        """A chart of points and lines over numbers.

        Args:
            slide: Where to.
            series: What is drawn.
            place: Its place.
            axes: Titles of the axes, x first.
            title: Title of the chart, where it needs one.
            legend: Whether the names are listed below.
            ends: Ends of the x axis; None lets PowerPoint choose.
            top: Upper end of the y axis; None lets PowerPoint choose.
        """
        from pptx.chart.data import XyChartData
        from pptx.enum.chart import XL_CHART_TYPE, XL_MARKER_STYLE

        # LibreOffice loses a series that is shorter than one after it.
        series = sorted(series, key=lambda one: -len(one.points))
        data = XyChartData()
        for one in series:
            own = data.add_series(printable(one.name))
            for x, y in one.points:
                own.add_data_point(x, y)
        shape = slide.shapes.add_chart(
            XL_CHART_TYPE.XY_SCATTER_LINES_NO_MARKERS, *_emu(place), data
        )
        chart = shape.chart
        self._dress(chart, axes, title, legend=legend)
        if ends is not None:
            chart.category_axis.minimum_scale, chart.category_axis.maximum_scale = ends
        if top is not None:
            chart.value_axis.maximum_scale = top
        styles = {**MARKERS, "": "NONE"}
        for drawn, one in zip(chart.plots[0].series, series, strict=True):
            drawn.smooth = False
            _stroke(drawn.format.line, one.ink, 2.0, one.dash)
            drawn.marker.style = XL_MARKER_STYLE[styles[one.marker]]
            if one.marker:
                drawn.marker.size = 9
                drawn.marker.format.fill.solid()
                drawn.marker.format.fill.fore_color.rgb = _rgb("#ffffff" if one.hollow else one.ink)
                _stroke(drawn.marker.format.line, one.ink, 1.5, "-")

    def legend(self, slide: "Slide", names: Sequence[tuple[str, str]], place: Spot) -> None:
        """Names in their colours, side by side, for several charts."""
        texts = [Paragraph(text=f"— {name}", bold=True, ink=ink) for name, ink in names]
        needs = [text_width(words.text, 12.0) * BOLD + 0.2 for words in texts]
        left, top = place.left, place.top
        for words, need in zip(texts, needs, strict=True):
            if left > place.left and left + need > place.left + place.width:
                left, top = place.left, top + 0.27
            wide = min(need, place.width)
            self.text(slide, [words], Spot(left, top, wide, 0.25), (12.0, 11.0, 10.0))
            left += wide

    def bars(
        self,
        slide: "Slide",
        groups: Sequence[str],
        series: Sequence[tuple[str, Sequence[float | None]]],
        place: Spot,
        axes: tuple[str, str],
    ) -> None:
        """A chart of bars, a group each with one bar per series."""
        from pptx.chart.data import CategoryChartData
        from pptx.enum.chart import XL_CHART_TYPE

        data = CategoryChartData(number_format="0.0000")
        data.categories = [printable(name) for name in groups]
        for name, values in series:
            data.add_series(printable(name), values)
        shape = slide.shapes.add_chart(XL_CHART_TYPE.COLUMN_CLUSTERED, *_emu(place), data)
        self._dress(shape.chart, axes, "", legend=True)
        plot = shape.chart.plots[0]
        plot.gap_width, plot.overlap = 60, -5
        for at, drawn in enumerate(plot.series):
            drawn.format.fill.solid()
            drawn.format.fill.fore_color.rgb = _rgb(PALETTE[at % len(PALETTE)])

    def flow(self, slide: "Slide", chart: Chart, place: Spot) -> None:
        """A flow chart: a band per stage, a box per step, arrows that follow moved boxes."""
        from pptx.enum.shapes import MSO_SHAPE

        bare = replace(chart, title="", stages=tuple(
            replace(stage, boxes=tuple(replace(box, formulas=(), note="") for box in stage.boxes))
            for stage in chart.stages))  # fmt: skip
        spots, pitch = arrange(bare).spots, min(place.height / len(chart.stages), 1.35)
        band, left = 0.8 * pitch, place.left + STAGE
        rows = [_row([spots[box.key] for box in stage.boxes], left, place.width - STAGE - 0.1)
                for stage in bare.stages]  # fmt: skip
        places = {
            box.key: replace(spot, top=place.top + at * pitch + 0.06 * band, height=0.88 * band)
            for at, (stage, row) in enumerate(zip(bare.stages, rows, strict=True))
            for box, spot in zip(stage.boxes, row, strict=True)
        }
        size = min(fitting(_box_words(box), _inside(places[box.key]), BOXES) for box in bare.boxes)
        made: dict[str, Shape] = {}
        for at, stage in enumerate(chart.stages):
            frame = replace(place, top=place.top + at * pitch, height=band)
            back = slide.shapes.add_shape(MSO_SHAPE.ROUNDED_RECTANGLE, *_emu(frame))
            self._paint(back, BAND, RULE, 0.75)
            side = replace(frame, left=place.left + 0.12, width=STAGE - 0.3)
            heading = Paragraph(text=stage.title, bold=True, ink=GREY)
            self.text(slide, [heading], side, [own for own in BOXES if own <= size], middle=True)
            for box in stage.boxes:
                made[box.key] = self._box(slide, box, places[box.key], size)
        for start, end in chart.arrows:
            self._arrow(slide, made[start], made[end])

    def _box(self, slide: "Slide", box: Box, place: Spot, size: float) -> "Shape":
        from pptx.enum.shapes import MSO_SHAPE

        shape = slide.shapes.add_shape(MSO_SHAPE.ROUNDED_RECTANGLE, *_emu(place))
        self._paint(shape, PAPERS[box.kind], EDGES[box.kind], 1.5)
        self._fill(shape.text_frame, _box_words(box), size, middle=True, centre=True)
        return shape

    def _arrow(self, slide: "Slide", start: "Shape", end: "Shape") -> None:
        """An arrow glued to two boxes: straight in a row, else down, across and down."""
        from pptx.enum.shapes import MSO_CONNECTOR

        level = start.top == end.top
        kind = MSO_CONNECTOR.STRAIGHT if level else MSO_CONNECTOR.ELBOW
        arrow = slide.shapes.add_connector(kind, *_emu(Spot(0.0, 0.0, 0.0, 0.0)))
        right = start.left < end.left
        arrow.begin_connect(start, (3 if right else 1) if level else 2)
        arrow.end_connect(end, (1 if right else 3) if level else 0)
        if not level:
            # A bent line runs across first; turned by a right angle it runs down first.
            wide, high = abs(arrow.end_x - arrow.begin_x), arrow.end_y - arrow.begin_y
            middle = ((arrow.begin_x + arrow.end_x) // 2, (arrow.begin_y + arrow.end_y) // 2)
            turned = {"rot": "5400000"} | ({"flipV": "1"} if arrow.begin_x < arrow.end_x else {})
            frame = arrow._element.spPr.get_or_add_xfrm()
            frame.attrib.clear()
            frame.attrib.update(turned)
            frame.off.x, frame.off.y = middle[0] - high // 2, middle[1] - wide // 2
            frame.ext.cx, frame.ext.cy = high, wide
        _plain(arrow)
        _stroke(arrow.line, GREY, 1.25, "-")
        line = arrow.line._get_or_add_ln()
        line.append(line.makeelement(_name("a:tailEnd"), {"type": "triangle"}))

    def _bar(self, slide: "Slide", place: Spot) -> None:
        from pptx.enum.shapes import MSO_SHAPE

        bar = slide.shapes.add_shape(MSO_SHAPE.RECTANGLE, *_emu(place))
        self._paint(bar, PALETTE[0], PALETTE[0], 0.0)

    def _paint(self, shape: "Shape", paper: str, edge: str, width: float) -> None:
        shape.fill.solid()
        shape.fill.fore_color.rgb = _rgb(paper)
        _plain(shape)
        if width:
            _stroke(shape.line, edge, width, "-")
        else:
            shape.line.fill.background()
        if len(shape.adjustments):
            shape.adjustments[0] = 0.12

    def _number(self, slide: "Slide") -> None:
        """The slide's number, which follows when slides change places."""
        box = slide.shapes.add_textbox(*_emu(Spot(WIDE - EDGE - 0.9, 7.05, 0.9, 0.25)))
        here = str(len(self._file.slides))
        self._fill(box.text_frame, [Paragraph(text=here, ink=GREY)], 10.0, right=True)
        run = box.text_frame.paragraphs[0]._p.find(_name("a:r"))
        run.tag = _name("a:fld")
        run.set("id", "{B6F15528-21DE-4FAA-801E-634DDDAF4B2B}")
        run.set("type", "slidenum")

    def _fill(
        self,
        frame: "TextFrame",
        words: Sequence[Paragraph],
        size: float,
        *,
        right: bool = False,
        centre: bool = False,
        middle: bool = False,
        bare: bool = False,
    ) -> None:
        """Paragraphs into a text frame; `bare` leaves its margins as they are."""
        from pptx.enum.text import MSO_ANCHOR, PP_ALIGN
        from pptx.util import Inches, Pt

        frame.word_wrap = True
        if not bare:
            margin = Inches(0.03) if centre else Inches(0)
            frame.margin_left = frame.margin_right = margin
            frame.margin_top = frame.margin_bottom = Inches(0)
            frame.vertical_anchor = MSO_ANCHOR.MIDDLE if middle else MSO_ANCHOR.TOP
        for at, one in enumerate(words):
            paragraph = frame.paragraphs[0] if at == 0 else frame.add_paragraph()
            paragraph.line_spacing = Pt(SPACING * size)
            paragraph.space_before = Pt(0.3 * SPACING * size if one.bullet else 0)
            paragraph.space_after = Pt(0)
            if right or centre:
                paragraph.alignment = PP_ALIGN.RIGHT if right else PP_ALIGN.CENTER
            else:
                paragraph.alignment = PP_ALIGN.LEFT
            if one.bullet:
                _bullet(paragraph)
            for text, level in marks(one.text) if one.formula else [(one.text, "")]:
                self._run(paragraph, text, level, one, size)

    def _run(
        self, paragraph: "_Paragraph", text: str, level: str, words: Paragraph, size: float
    ) -> None:
        run = paragraph.add_run()
        run.text = printable(text)
        self._letter(run.font, size, code=words.code)
        run.font.bold = words.bold
        run.font.color.rgb = _rgb(words.ink)
        if level:
            run.font._element.set("baseline", "-25000" if level == "sub" else "30000")

    def _letter(self, font: "Font", size: float, *, code: bool = False) -> None:
        """Size, and a typeface for Latin letters and one for Chinese characters."""
        from pptx.util import Pt

        font.size = Pt(size)
        font.name = CODE if code else LATIN
        latin = font._element.find(_name("a:latin"))
        for tag in ("a:cs", "a:ea"):  # in front, so that ea stands before cs
            wide = latin.makeelement(_name(tag), {"typeface": CHINESE})
            latin.addnext(wide)
        font._element.set("lang", LANGS[self.lang] if self.lang == "zh" else "en-US")
        if self.lang == "zh":
            font._element.set("altLang", "en-US")

    def _dress(
        self, chart: "NativeChart", axes: tuple[str, str], title: str, *, legend: bool
    ) -> None:
        """Letters, titles, grid and legend of a chart."""
        from pptx.enum.chart import XL_LEGEND_POSITION, XL_TICK_LABEL_POSITION

        self._letter(chart.font, 12.0)
        chart.font.color.rgb = _rgb(INK)
        chart.has_title = bool(title)
        if title:
            self._fill(chart.chart_title.text_frame, [Paragraph(text=title, bold=True)], 14.0,
                       centre=True, bare=True)  # fmt: skip
        for axis, words in zip((chart.category_axis, chart.value_axis), axes, strict=True):
            axis.has_title = bool(words)
            if words:
                self._fill(axis.axis_title.text_frame, [Paragraph(text=words)], 12.0,
                           centre=True, bare=True)  # fmt: skip
            axis.tick_label_position = XL_TICK_LABEL_POSITION.LOW
            axis.format.line.color.rgb = _rgb(RULE)
        chart.category_axis.has_major_gridlines = False
        chart.value_axis.has_major_gridlines = True
        chart.value_axis.major_gridlines.format.line.color.rgb = _rgb("#e6eaee")
        chart.has_legend = legend
        if legend and chart.legend is not None:
            chart.legend.position = XL_LEGEND_POSITION.BOTTOM
            chart.legend.include_in_layout = False


def _empty_file() -> "Presentation":
    """A wide presentation without slides; the layouts of the usual one stretched to its width."""
    try:
        from pptx import Presentation
        from pptx.util import Inches
    except ImportError as err:
        raise RunError(
            "a PowerPoint deck needs python-pptx; install it: pip install 'splitveil[report]'"
        ) from err
    file = Presentation()
    wider = Inches(WIDE) / (file.slide_width or Inches(WIDE))
    file.slide_width, file.slide_height = Inches(WIDE), Inches(HIGH)
    for page in (file.slide_master, *file.slide_layouts):
        for shape in page.placeholders:
            if shape._element.spPr.find(_name("a:xfrm")) is not None:
                shape.left, shape.width = round(shape.left * wider), round(shape.width * wider)
    return file


def _emu(place: Spot) -> "tuple[Length, Length, Length, Length]":
    from pptx.util import Inches

    return Inches(place.left), Inches(place.top), Inches(place.width), Inches(place.height)


def _rgb(colour: str) -> "RGBColor":
    from pptx.dml.color import RGBColor

    return RGBColor.from_string(colour.lstrip("#").upper())


def _name(tag: str) -> str:
    """A tag such as `a:ea` as XML knows it."""
    from pptx.oxml.ns import qn

    return str(qn(tag))


def _plain(shape: "Shape | Connector") -> None:
    """Without the theme's style, which has shadows."""
    style = shape._element.find(_name("p:style"))
    if style is not None:
        shape._element.remove(style)


def _stroke(line: "LineFormat", ink: str, width: float, dash: Dash) -> None:
    from pptx.enum.dml import MSO_LINE
    from pptx.util import Pt

    if not dash:
        line.fill.background()
        return
    line.color.rgb = _rgb(ink)
    line.width = Pt(width)
    styles = {"--": MSO_LINE.DASH, ":": MSO_LINE.ROUND_DOT}
    if dash in styles:
        line.dash_style = styles[dash]


def _bullet(paragraph: "_Paragraph") -> None:
    from pptx.util import Inches

    about = paragraph._p.get_or_add_pPr()
    about.set("marL", str(Inches(INDENT)))
    about.set("indent", str(-Inches(INDENT)))
    about.append(about.makeelement(_name("a:buChar"), {"char": "•"}))
