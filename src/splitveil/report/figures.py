"""Records and logs as pictures.

The trade-off plot is drawn here, the others in `grid`, `bars` and `curves`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from splitveil.errors import RunError
from splitveil.record.schema import number, text
from splitveil.report.canvas import (
    CEILING,
    CEILING_TEXT,
    FLOOR,
    GREY,
    INK,
    Drawing,
    board,
    colour,
    draw_references,
    marker,
    references,
    shown,
)
from splitveil.report.columns import Published
from splitveil.report.files import RunFiles
from splitveil.report.kinds import kinds
from splitveil.report.labels import MARKER_PX, Box, place

if TYPE_CHECKING:
    from matplotlib.axes import Axes


__all__ = [
    "Mark",
    "attack_bars",
    "draw_grid",
    "draw_tradeoff",
    "reconstruction_grid",
    "scatter",
    "training_curves",
]


FLOOR_TEXT = "attack floor: mean image"


NEAR_PX = 26  # a name further than this from its mark gets a line to it


CROWD_PX = (150, 40)  # marks nearer than this compete for places


MANY_MARKS = 12


FOOT, HEAD = 0.576, 0.32  # inches under and over the plot


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A point of the trade-off: accuracy in per cent, MSE, their sd over training seeds, its look.

    Published rows are `hollow`.
    """

    name: str
    accuracy: float
    mse: float
    accuracy_sd: float | None = None
    mse_sd: float | None = None
    ink: str = INK
    shape: str = "o"
    hollow: bool = False

    @property
    def fill(self) -> str:
        """Colour inside the mark."""
        return "white" if self.hollow else self.ink


def comparable(
    runs: Sequence[RunFiles], published: Mapping[str, Published]
) -> dict[str, Published]:
    """Published rows of some run's dataset whose attacker knew what that run's knew."""
    known: dict[str, set[str | None]] = {}
    for run in runs:
        aux = text(run.record, "audit", "aux") or "train"
        known.setdefault(aux, set()).add(text(run.record, "config", "dataset"))
    return {
        n: row for n, row in published.items() if row.aux in known and row.is_of(known[row.aux])
    }


def scatter(runs: Sequence[RunFiles], published: Mapping[str, Published] | None = None) -> Drawing:
    """Accuracy (x, %) against the strongest attack's MSE (y), one named point per run.

    Runs that differ in their seeds alone share colour and mark. Published rows are hollow and dark.
    """
    marks = []
    places = {run.path: at for at, kind in enumerate(kinds(runs)) for run in kind.runs}
    for run in runs:
        accuracy = number(run.record, "accuracy")
        mse = number(run.record, "strongest", "mse")
        if accuracy is not None and mse is not None:
            at = places[run.path]
            marks.append(
                Mark(
                    name=shown(run.name, 30),
                    accuracy=100 * accuracy,
                    mse=mse,
                    ink=colour(at),
                    shape=marker(at),
                )
            )
    if not marks:
        raise RunError("no run has both an accuracy and a strongest attack; audit a run first")
    for name, row in comparable(runs, published or {}).items():
        said = shown(f"{name} (published)", 36)
        marks.append(Mark(name=said, accuracy=100 * row.accuracy, mse=row.mse, hollow=True))
    lines = [(v, CEILING_TEXT, CEILING, "--") for v in references(runs, "ceiling")]
    lines += [(v, FLOOR_TEXT, FLOOR, ":") for v in references(runs, "floor")]
    return draw_tradeoff(marks, lines)


def draw_tradeoff(
    marks: Sequence[Mark],
    lines: Sequence[tuple[float, str, str, str]],
    legend: Sequence[tuple[Mark, str]] = (),
) -> Drawing:
    """Named marks with error bars, and horizontal reference lines (value, text, colour, dash).

    Args:
        marks: at least one point.
        lines: references; their texts stand on the right.
        legend: what a look means, drawn above the plot.
    """
    height = 4.8 + 0.12 * max(0, len(marks) - MANY_MARKS)
    with board(8.4, height) as figure:
        axes = figure.add_axes((0.09, FOOT / height, 0.7, 1 - (FOOT + HEAD) / height))
        low, high = min(m.accuracy for m in marks), max(m.accuracy for m in marks)
        pad = max(0.2 * (high - low), 0.3)
        axes.set_xlim(low - pad, high + pad)
        axes.set_xticks([t for t in axes.get_xticks() if low - pad <= t <= min(high + pad, 100)])
        top = 1.12 * max([m.mse for m in marks] + [line[0] for line in lines]) or 1.0
        axes.set_ylim(-0.04 * top, top)
        axes.set_yticks([t for t in axes.get_yticks() if 0 <= t <= top])
        axes.set_xlabel("accuracy through the channel (%)   better →")
        axes.set_ylabel("strongest attack's MSE   more private →")
        for mark in marks:
            axes.errorbar(
                mark.accuracy,
                mark.mse,
                xerr=mark.accuracy_sd,
                yerr=mark.mse_sd,
                fmt=mark.shape,
                color=mark.ink,
                markerfacecolor=mark.fill,
                markersize=8,
                markeredgewidth=1.4,
                elinewidth=1.2,
                capsize=2.5,
                zorder=3,
            )
        draw_references(axes, lines)
        _name_marks(axes, marks)
        if legend:
            _explain_looks(axes, legend)
        return Drawing(figure)


def _explain_looks(axes: "Axes", legend: Sequence[tuple[Mark, str]]) -> None:
    """What colours and shapes mean, above the axes."""
    from matplotlib.lines import Line2D

    signs = [
        Line2D([], [], marker=mark.shape, linestyle="", markersize=7, markeredgewidth=1.4,
               color=mark.ink, markerfacecolor=mark.fill)
        for mark, _ in legend
    ]  # fmt: skip
    axes.legend(signs, [words for _, words in legend], loc="lower left", ncols=len(legend),
                bbox_to_anchor=(-0.03, 1.0), fontsize=8.5, handletextpad=0.2, columnspacing=1.0,
                borderaxespad=0.2)  # fmt: skip


def _name_marks(axes: "Axes", marks: Sequence[Mark]) -> None:
    """Write each name beside its mark without covering a mark, a bar or another name."""
    marks = _crowded_first(axes, marks)
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.3, "alpha": 0.8}
    texts = [
        axes.text(0, 0, mark.name, ha="center", va="center", fontsize=8.5, zorder=2.5, bbox=paper)
        for mark in marks
    ]
    sizes = [(box.width + 4, box.height + 2) for box in (t.get_window_extent() for t in texts)]
    anchors = [_pixels(axes, mark.accuracy, mark.mse) for mark in marks]
    bars = [tile for mark in marks for tile in _bar_tiles(axes, mark)]
    area = axes.get_window_extent()
    frame = Box(
        x=float(area.x0 + area.x1) / 2,
        y=float(area.y0 + area.y1) / 2,
        width=float(area.width),
        height=float(area.height),
    )
    # A text of no size at a place keeps the others off it.
    boxes = place([*anchors, *bars], [*sizes, *[(0.0, 0.0)] * len(bars)], frame)
    inverse = axes.transData.inverted()
    for text_, (x, y), box in zip(texts, anchors, boxes, strict=False):
        text_.set_position(tuple(inverse.transform((box.x, box.y))))
        edge_x = min(max(x, box.x - box.width / 2), box.x + box.width / 2)
        edge_y = min(max(y, box.y - box.height / 2), box.y + box.height / 2)
        if (edge_x - x) ** 2 + (edge_y - y) ** 2 > NEAR_PX**2:
            ends = inverse.transform([(x, y), (edge_x, edge_y)])
            axes.plot(ends[:, 0], ends[:, 1], color=GREY, linewidth=0.7, zorder=2)


def _crowded_first(axes: "Axes", marks: Sequence[Mark]) -> list[Mark]:
    """Marks with many neighbours first: they have the fewest places for a name."""
    pairs = [_pixels(axes, mark.accuracy, mark.mse) for mark in marks]

    def neighbours(at: int) -> int:
        x, y = pairs[at]
        return sum(abs(x - a) < CROWD_PX[0] and abs(y - b) < CROWD_PX[1] for a, b in pairs)

    order = sorted(range(len(marks)), key=lambda at: (-neighbours(at), pairs[at]))
    return [marks[at] for at in order]


def _bar_tiles(axes: "Axes", mark: Mark) -> list[tuple[float, float]]:
    """Places along the error bars of a mark, px, a marker apart."""
    x, y = _pixels(axes, mark.accuracy, mark.mse)
    right = _pixels(axes, mark.accuracy + (mark.accuracy_sd or 0.0), mark.mse)[0] - x
    up = _pixels(axes, mark.accuracy, mark.mse + (mark.mse_sd or 0.0))[1] - y
    wide, high = (
        [MARKER_PX * i for i in range(1, 1 + math.ceil(reach / MARKER_PX - 0.5))]
        for reach in (right, up)  # the mark itself hides half a marker of them
    )
    return [(x + s * d, y) for d in wide for s in (-1, 1)] + [
        (x, y + s * d) for d in high for s in (-1, 1)
    ]


def _pixels(axes: "Axes", x: float, y: float) -> tuple[float, float]:
    point = axes.transData.transform((x, y))
    return float(point[0]), float(point[1])
