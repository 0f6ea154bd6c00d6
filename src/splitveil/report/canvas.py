"""Style, palette, PNG and SVG, labels that do not overlap."""

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from splitveil.record.files import RunFiles
from splitveil.record.schema import number
from splitveil.table import format_mse

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MARKER_PX = 16.0
RADII = (13, 17, 22, 34, 50, 70, 95, 125, 160, 200)  # px from marker edge to text
NOTHING_PX2 = 1e-9  # rounding, not an overlap
ANGLES = (0, 180, 90, 270, 45, 135, 315, 225, 22, 158, 338, 202)  # degrees, best first


@dataclass(frozen=True, kw_only=True)
class Box:
    """An upright rectangle given by its centre and size, px."""

    x: float
    y: float
    width: float
    height: float

    def overlap(self, other: "Box") -> float:
        """Area shared with another box, px².

        >>> box = Box(x=0.0, y=0.0, width=4.0, height=2.0)
        >>> box.overlap(Box(x=3.0, y=0.0, width=4.0, height=2.0))
        2.0
        """
        wide = (self.width + other.width) / 2 - abs(self.x - other.x)
        high = (self.height + other.height) / 2 - abs(self.y - other.y)
        inner_wide = min(wide, self.width, other.width)
        inner_high = min(high, self.height, other.height)
        return float(max(inner_wide, 0) * max(inner_high, 0))

    def outside(self, frame: "Box") -> float:
        """Area of this box that lies beyond a frame, px²."""
        return self.width * self.height - self.overlap(frame)


def place_labels(
    anchors: Sequence[tuple[float, float]], sizes: Sequence[tuple[float, float]], frame: Box
) -> list[Box]:
    """A box for each text near its anchor, inside the frame, off all markers and other texts.

    Greedy: nearest free place first. Where nothing is free the least covered place is taken.
    """
    taken = [Box(x=x, y=y, width=MARKER_PX, height=MARKER_PX) for x, y in anchors]
    boxes: list[Box] = []
    for anchor, size in zip(anchors, sizes, strict=True):
        best = _best(_candidates(anchor, size), taken, frame)
        boxes.append(best)
        taken.append(best)
    return boxes


def _best(candidates: Sequence[Box], taken: Sequence[Box], frame: Box) -> Box:
    """The first candidate that covers nothing, else the one that covers least."""
    boxes = _sides(candidates)
    inside = _shared(boxes, _sides([frame]))[:, 0]
    covered = boxes[:, 2] * boxes[:, 3] - inside + _shared(boxes, _sides(taken)).sum(1)
    free = covered <= NOTHING_PX2
    return candidates[int(free.argmax() if free.any() else covered.round(6).argmin())]


def _sides(boxes: Sequence[Box]) -> NDArray[np.float64]:
    """Centres and sizes as one array (n, 4)."""
    return np.array([(box.x, box.y, box.width, box.height) for box in boxes])


def _shared(some: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.float64]:
    """Areas shared by every pair of boxes (n, m), px²; `Box.overlap` for many."""
    a, b = some[:, None], others[None]
    reach = (a[..., 2:] + b[..., 2:]) / 2 - np.abs(a[..., :2] - b[..., :2])  # (n, m, 2)
    inner = np.minimum(np.minimum(reach, a[..., 2:]), b[..., 2:]).clip(min=0)
    shared: NDArray[np.float64] = inner[..., 0] * inner[..., 1]
    return shared


def _candidates(anchor: tuple[float, float], size: tuple[float, float]) -> list[Box]:
    """Boxes around an anchor, near ones first."""
    return [
        Box(
            x=anchor[0] + math.cos(turn) * (size[0] / 2 + radius),
            y=anchor[1] + math.sin(turn) * (size[1] / 2 + radius),
            width=size[0],
            height=size[1],
        )
        for radius in RADII
        for turn in (math.radians(angle) for angle in ANGLES)
    ]


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Rising heights moved as little as needed to stand at least `gap` apart.

    >>> spread([10.0, 12.0, 50.0], gap=6.0)
    [8.0, 14.0, 50.0]
    """
    groups: list[list[float]] = []  # each: the heights of texts that touch
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and _bottom(groups[-1], gap) - _top(groups[-2], gap) < gap:
            last = groups.pop()
            groups[-1] += last
    return [_bottom(group, gap) + gap * i for group in groups for i in range(len(group))]


def _bottom(group: Sequence[float], gap: float) -> float:
    """Height of the lowest of touching texts, centred on what they belong to."""
    return sum(group) / len(group) - gap * (len(group) - 1) / 2


def _top(group: Sequence[float], gap: float) -> float:
    """Height of the highest of touching texts."""
    return _bottom(group, gap) + gap * (len(group) - 1)


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
    values = [number(run.record, f"{what}.mse") for run in runs]
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
