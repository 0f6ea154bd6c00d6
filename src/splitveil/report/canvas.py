"""The drawing board: one style, one palette, PNG and SVG bytes that depend on the data alone."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from typing import TYPE_CHECKING

from splitveil.record.schema import number
from splitveil.report.files import RunFiles
from splitveil.report.labels import spread
from splitveil.table import format_mse

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


DPI = 150


INK, GREY, RULE = "#1f2933", "#5b6773", "#c9d1d9"


CEILING, FLOOR, WRONG = "#7a3e00", "#5b6773", "#b3261e"


CEILING_TEXT = "ceiling: label only"


TEXT_SHARE = 0.11  # of the axes' height that two lines of text take


# Okabe and Ito's colours, told apart with any colour vision; the yellow is too pale for lines.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")  # not as many as colours: pairs repeat late


STYLE: dict[str, object] = {
    "font.family": "DejaVu Sans",  # ships with matplotlib: the same pixels on every machine
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
    "axes.unicode_minus": True,
    "grid.color": "#e6eaee",
    "grid.linewidth": 0.8,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "legend.frameon": False,
    "figure.autolayout": False,
    "figure.constrained_layout.use": False,
    "savefig.bbox": "standard",
    "image.composite_image": False,  # an SVG keeps each image's own pixels
    "svg.fonttype": "path",  # a reader's machine may lack the font
    "svg.hashsalt": "splitveil",  # else names inside an SVG are drawn by chance
}


class Drawing:
    """A finished figure, as pixels and as lines; each is made when it is asked for."""

    def __init__(self, figure: "Figure") -> None:
        self._figure = figure

    @cached_property
    def png(self) -> bytes:
        """The figure as PNG."""
        with style():
            return png(self._figure)

    @cached_property
    def svg(self) -> bytes:
        """The figure as SVG."""
        buffer = io.BytesIO()
        with style():
            self._figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        return buffer.getvalue()


@contextmanager
def style() -> Iterator[None]:
    """Our style while drawing or saving."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE):  # type: ignore[arg-type]  # keys are not literals to mypy
        yield


@contextmanager
def board(width: float, height: float, *, laid_out: bool = False) -> Iterator["Figure"]:
    """An empty white figure of the given size in inches, drawn in our style.

    With `laid_out`, matplotlib finds room for titles, labels and legends by itself.
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


def png(figure: "Figure") -> bytes:
    """The figure as PNG, without the drawing library's version or any date."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def colour(place: int) -> str:
    """Colour of the run at this place in the list."""
    return PALETTE[place % len(PALETTE)]


def marker(place: int) -> str:
    """Marker of the run at this place in the list."""
    return MARKERS[place % len(MARKERS)]


def shown(name: str, limit: int = 26) -> str:
    """A name as it can be drawn: one line, at most `limit` signs, no glyph the font lacks.

    >>> shown("a very long name of a run, too long", limit=12)
    'a very long…'
    """
    clean = "".join(sign if _drawable(sign) else "?" for sign in " ".join(name.split()))
    return clean if len(clean) <= limit else clean[: limit - 1].rstrip() + "…"


@cache
def _drawable(sign: str) -> bool:
    from matplotlib.font_manager import FontProperties, findfont, get_font

    return bool(get_font(findfont(FontProperties(family="DejaVu Sans"))).get_char_index(ord(sign)))


def references(runs: Sequence[RunFiles], what: str) -> list[float]:
    """The distinct `ceiling` or `floor` MSEs of the runs, rising; equal in print is equal."""
    values = [number(run.record, what, "mse") for run in runs]
    return sorted({format_mse(value): value for value in values if value is not None}.values())


def draw_references(axes: "Axes", lines: Sequence[tuple[float, str, str, str]]) -> None:
    """Horizontal lines (value, text, colour, dash) with their texts outside, on the right.

    Texts of near lines are pushed apart; the limits of the axes must stand already.
    """
    ordered = sorted(lines)
    low, high = axes.get_ylim()
    heights = spread([value for value, *_ in ordered], gap=TEXT_SHARE * (high - low))
    for (value, words, ink, dash), height in zip(ordered, heights, strict=True):
        axes.axhline(value, color=ink, linestyle=dash, linewidth=1.2, zorder=1.5)
        said = f"{words}\n{format_mse(value)}"
        axes.text(
            1.012,
            height,
            said,
            transform=axes.get_yaxis_transform(),
            color=ink,
            fontsize=8,
            va="center",
        )
