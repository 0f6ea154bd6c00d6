"""What every picture uses: one style and palette, PNG and SVG, sheets of tiles, labels."""

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from splitveil.record.files import RunFiles
from splitveil.record.schema import number
from splitveil.report.words import Lang
from splitveil.table import format_mse

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MARKER_PX = 16.0
RADII = (13, 17, 22, 34, 50, 70, 95, 125, 160, 200)  # px from marker edge to text
NOTHING_PX2 = 1e-9  # rounding, not an overlap
ANGLES = (0, 180, 90, 270, 45, 135, 315, 225, 22, 158, 338, 202)  # degrees, best first
Floats = NDArray[np.float64]
Pixels = NDArray[np.uint8]


def place_labels(anchors: Floats, sizes: Floats, frame: Floats, bars: Floats) -> Floats:
    """Place each text near its anchor, inside the frame, off markers, bars and other texts.

    Greedy: the nearest free place is taken, or the least covered one where none is free.

    Args:
        anchors: Centres of the markers (n, 2), px.
        sizes: Widths and heights of the texts (n, 2), px.
        frame: Centre and size of the field (4,), px.
        bars: Centres and sizes of what else must not be covered (m, 4), px.

    Returns:
        Centres and sizes of the texts (n, 4), px.
    """
    markers = np.hstack([anchors, np.full_like(anchors, MARKER_PX)])
    taken = np.vstack([markers, bars])
    turns = np.radians(np.tile(ANGLES, len(RADII)))
    ways = np.stack([np.cos(turns), np.sin(turns)], axis=1)  # (candidates, 2)
    radii = np.repeat(RADII, len(ANGLES))[:, None]
    for anchor, size in zip(anchors, sizes, strict=True):
        centres = anchor + ways * (size / 2 + radii)
        boxes = np.hstack([centres, np.broadcast_to(size, centres.shape)])
        outside = size.prod() - shared_areas(boxes, frame[None])[:, 0]
        covered = outside + shared_areas(boxes, taken).sum(1)
        free = covered <= NOTHING_PX2
        best = free.argmax() if free.any() else covered.round(6).argmin()
        taken = np.vstack([taken, boxes[best]])
    return taken[len(markers) + len(bars) :]


def shared_areas(some: Floats, others: Floats) -> Floats:
    """Area (n, m) that each box of one list (n, 4) shares with each of another (m, 4), px².

    >>> shared_areas(np.array([[0.0, 0, 4, 2]]), np.array([[3.0, 0, 4, 2]])).tolist()
    [[2.0]]
    """
    a, b = some[:, None], others[None]
    reach = (a[..., 2:] + b[..., 2:]) / 2 - np.abs(a[..., :2] - b[..., :2])  # (n, m, 2)
    inner = np.minimum(np.minimum(reach, a[..., 2:]), b[..., 2:]).clip(min=0)
    shared: Floats = inner.prod(-1).astype(float)
    return shared


def push_apart(heights: Sequence[float], gap: float) -> list[float]:
    """Move sorted heights up until each stands at least `gap` above the one before.

    >>> push_apart([10.0, 12.0, 50.0], gap=6.0)
    [10.0, 16.0, 50.0]
    """
    return list(accumulate(heights, lambda below, height: max(height, below + gap)))


DPI = 150
INK, GREY, RULE = "#1f2933", "#5b6773", "#c9d1d9"
CEILING, FLOOR, WRONG = "#7a3e00", "#5b6773", "#b3261e"
CEILING_TEXT = "label-only error"
TEXT_SHARE = 0.11  # of the axes' height that two lines of text take
# Okabe and Ito's colours, told apart with any colour vision; the yellow is too pale for lines.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")  # not as many as colours: pairs repeat late

FONT = "DejaVu Sans"  # ships with matplotlib: the same pixels on every machine
CHINESE_FONTS = (
    "Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "Source Han Sans CN",
    "Microsoft YaHei", "PingFang SC", "Hiragino Sans GB", "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei", "SimHei", "Noto Sans CJK JP", "Droid Sans Fallback", "Noto Serif CJK SC",
    "Noto Serif CJK JP",
)  # fmt: skip
STYLE: dict[str, object] = {
    "font.size": 9,
    "text.color": INK,
    "text.parse_math": False,  # a run may be called a$b$c
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6eaee",
    "grid.linewidth": 0.8,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "legend.frameon": False,
    "image.composite_image": False,  # an SVG keeps each image's own pixels
    "svg.fonttype": "path",  # a reader's machine may lack the font
    "svg.hashsalt": "splitveil",  # else names inside an SVG are drawn by chance
}


class Drawing:
    """A finished figure as PNG and SVG; each is made when it is asked for.

    Neither holds a date or the drawing library's version: the same runs give the same bytes.

    Args:
        figure: The figure.
        stem: Name of its files, without the ending.
        runs: Names of the runs it is about, where it is not about all.
    """

    def __init__(self, figure: "Figure", stem: str = "", runs: Sequence[str] = ()) -> None:
        self._figure, self.stem, self.runs = figure, stem, tuple(runs)

    @cached_property
    def png(self) -> bytes:
        """The figure as PNG."""
        return self._saved("png", {"Software": None})

    @cached_property
    def svg(self) -> bytes:
        """The figure as SVG."""
        return self._saved("svg", {"Date": None, "Creator": None})

    @property
    def uri(self) -> str:
        """The PNG as a data: address."""
        return png_uri(self.png)

    def files(self) -> dict[str, bytes]:
        """Names and contents of its files."""
        return {f"{self.stem}.png": self.png, f"{self.stem}.svg": self.svg}

    def _saved(self, kind: str, unsaid: Mapping[str, None]) -> bytes:
        buffer = io.BytesIO()
        with style():
            self._figure.savefig(buffer, format=kind, dpi=DPI, metadata=unsaid)
        return buffer.getvalue()


def png_uri(png: bytes) -> str:
    """A PNG as a data: address, so that a page needs no other file."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def few_colours(png: bytes) -> bytes:
    """The same picture in 256 colours, so that a page with a sheet of photographs stays small."""
    from PIL import Image

    buffer = io.BytesIO()
    with Image.open(io.BytesIO(png)) as image:
        few = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    few.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


@cache
def chinese_font() -> str | None:
    """The name of an installed font with simplified Chinese characters; None without one."""
    from matplotlib import font_manager

    known = font_manager.fontManager
    listed = {entry.fname for entry in known.ttflist}
    if not any(entry.name in CHINESE_FONTS for entry in known.ttflist):
        # matplotlib keeps its list of fonts, and a font may have been installed since.
        for path in set(font_manager.findSystemFonts()) - listed:
            try:
                known.addfont(path)
            except (OSError, RuntimeError):  # a file that is no font
                continue
    names = {entry.name for entry in known.ttflist}
    return next((name for name in CHINESE_FONTS if name in names), None)


NO_FONT = (
    "no font with Chinese characters is installed, so the pictures are in English; install one, "
    "for example Noto Sans CJK (on Debian and Ubuntu `apt install fonts-noto-cjk`), and run the "
    "command again"
)


def drawable(lang: Lang) -> tuple[Lang, str]:
    """The language that pictures can have here, and what to say if it is another one."""
    return ("en", NO_FONT) if lang == "zh" and chinese_font() is None else (lang, "")


def families() -> list[str]:
    """The fonts of our pictures: the first that has a sign draws it."""
    return [name for name in (FONT, chinese_font()) if name is not None]


@contextmanager
def style() -> Iterator[None]:
    """Draw or save in our style, whatever the user's own matplotlibrc says."""
    from matplotlib.style import context

    with context(STYLE | {"font.family": families()}, after_reset=True):
        yield


@contextmanager
def board(width: float, height: float, *, laid_out: bool = False) -> Iterator["Figure"]:
    """An empty white figure of the given size in inches, drawn in our style.

    With `laid_out`, matplotlib finds the room for titles, labels and legends.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with style():
        layout = ConstrainedLayoutEngine() if laid_out else None
        figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white", layout=layout)
        FigureCanvasAgg(figure)
        yield figure
        if laid_out:  # once: saving would look for room again each time
            figure.draw_without_rendering()
            figure.set_layout_engine("none")


@contextmanager
def sheet(width: float, height: float) -> Iterator[tuple["Figure", "Axes"]]:
    """A figure and a field over all of it, without axes; a unit is an inch, y grows upwards."""
    with board(width, height) as figure:
        field = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(0, height), autoscale_on=False)
        field.set_axis_off()
        yield figure, field


def colour(place: int) -> str:
    """Colour of the run at this place in the list."""
    return PALETTE[place % len(PALETTE)]


def marker(place: int) -> str:
    """Marker of the run at this place in the list."""
    return MARKERS[place % len(MARKERS)]


def shown(name: str, limit: int = 26) -> str:
    """A name as it can be drawn: one line, at most `limit` signs, no glyph that no font has.

    >>> shown("a very long name of a run, too long", limit=12)
    'a very long…'
    """
    clean = "".join(sign if _drawable(sign) else "?" for sign in " ".join(name.split()))
    return clean if len(clean) <= limit else clean[: limit - 1].rstrip() + "…"


def _drawable(sign: str) -> bool:
    return any(_has(family, sign) for family in families())


@cache
def _has(family: str, sign: str) -> bool:
    from matplotlib.font_manager import FontProperties, findfont, get_font

    return bool(get_font(findfont(FontProperties(family=family))).get_char_index(ord(sign)))


def references(runs: Sequence[RunFiles], what: str) -> list[float]:
    """The distinct `ceiling` or `floor` MSEs of the runs, rising; equal in print is equal."""
    values = [number(run.record, f"{what}.mse") for run in runs]
    return sorted({format_mse(value): value for value in values if value is not None}.values())


def draw_references(axes: "Axes", lines: Sequence[tuple[float, str, str, str]]) -> None:
    """Horizontal lines (value, text, colour, dash) with their texts outside, on the right.

    Texts of near lines are pushed apart; the limits of the axes must stand already.
    """
    ordered = sorted(lines)
    low, high = axes.get_ylim()
    heights = push_apart([value for value, *_ in ordered], gap=TEXT_SHARE * (high - low))
    for (value, words, ink, dash), height in zip(ordered, heights, strict=True):
        axes.axhline(value, color=ink, linestyle=dash, linewidth=1.2, zorder=1.5)
        place = axes.get_yaxis_transform()
        said = f"{words}\n{format_mse(value)}"
        axes.text(1.012, height, said, transform=place, color=ink, fontsize=8, va="center")


GAP, LINE, BETWEEN, MARGIN = 0.07, 0.2, 0.3, 0.12  # inches: tiles, text, groups, around all


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A picture (c, h, w) and the words above it; words alone without a picture."""

    image: Pixels | None = None
    words: str = ""
    ink: str = GREY
    frame: str = RULE


@dataclass(frozen=True, kw_only=True)
class TileRow:
    """A label with a note under it, and tiles beside them; None leaves a place empty."""

    label: str
    tiles: Sequence[Tile | None]
    note: str = ""
    ink: str = INK
    bold: bool = False
    ruled: bool = False  # a line above it

    def height(self, size: float) -> float:
        """Inches it needs with pictures of this size."""
        tiles = [(t.image is not None, bool(t.words)) for t in self.tiles if t is not None]
        return GAP + max([2 * LINE, *(size * image + LINE * words for image, words in tiles)])


def tile_sheet(
    rows: Sequence[TileRow], *, size: float, labels: float, per_group: int = 100, stem: str = ""
) -> Drawing:
    """Rows of labelled tiles.

    Args:
        rows: The rows, from the top.
        size: Side of a picture, inches.
        labels: Width of the names beside the tiles, inches.
        per_group: How many tiles stand close together before a gap.
        stem: Name of the drawing's files.
    """
    columns = max(len(row.tiles) for row in rows)
    places = [labels + at * (size + GAP) + at // per_group * BETWEEN for at in range(columns)]
    width = places[-1] + size + MARGIN
    height = 2 * MARGIN + sum(row.height(size) for row in rows)
    # One field for all tiles: axes of their own for a hundred of them would take seconds.
    with sheet(width, height) as (figure, field):
        field.invert_yaxis()
        top = MARGIN
        for row in rows:
            bottom = top + row.height(size)
            if row.ruled:
                field.plot([MARGIN, width - MARGIN], [top, top], color=RULE, linewidth=0.8)
            _draw_label(field, row, (top + bottom) / 2)
            for x, tile in zip(places, row.tiles, strict=False):
                if tile is not None:
                    _draw_tile(field, tile, x, bottom - GAP, size)
            top = bottom
        return Drawing(figure, stem)


def _draw_label(field: "Axes", row: TileRow, level: float) -> None:
    weight = "bold" if row.bold else "normal"
    shift = LINE / 2 if row.note else 0.0
    field.text(MARGIN, level - shift, row.label, color=row.ink, weight=weight, va="center")
    ink = GREY if row.ink == INK else row.ink
    field.text(MARGIN, level + shift, row.note, color=ink, fontsize=7.5, va="center")


def _draw_tile(field: "Axes", tile: Tile, x: float, bottom: float, size: float) -> None:
    from matplotlib.patches import Rectangle

    top = bottom if tile.image is None else bottom - size  # y grows downwards
    field.text(x + size / 2, top - 0.03, tile.words, ha="center", fontsize=7, color=tile.ink)
    if tile.image is None:
        return
    picture = np.moveaxis(np.broadcast_to(tile.image, (3, *tile.image.shape[1:])), 0, -1)
    extent = (x, x + size, bottom, top)
    field.imshow(picture, extent=extent, interpolation="none", aspect="auto")
    width = 0.6 if tile.frame == RULE else 1.4
    edge = Rectangle((x, top), size, size, fill=False, edgecolor=tile.frame, linewidth=width)
    field.add_patch(edge)
