"""Records and logs as pictures.

The trade-off plot is drawn here, the others in `grid`, `bars` and `curves`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from splitveil.errors import RunError
from splitveil.report.bars import attack_bars
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
from splitveil.report.curves import training_curves
from splitveil.report.fields import number, text
from splitveil.report.files import RunFiles
from splitveil.report.grid import draw_grid, reconstruction_grid
from splitveil.report.kinds import kinds
from splitveil.report.labels import Box, place

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["attack_bars", "draw_grid", "reconstruction_grid", "scatter", "training_curves"]

FLOOR_TEXT = "attack floor: mean image"
NEAR_PX = 40  # a label further than this from its point gets a line to it
MANY_POINTS = 12
FOOT, HEAD = 0.576, 0.144  # inches under and over the plot


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

    Runs that differ in their seeds alone share colour and mark. Published rows are hollow and grey.
    """
    points = []
    places = {run.path: at for at, kind in enumerate(kinds(runs)) for run in kind.runs}
    for run in runs:
        accuracy = number(run.record, "accuracy")
        mse = number(run.record, "strongest", "mse")
        if accuracy is not None and mse is not None:
            points.append((places[run.path], run.name, 100 * accuracy, mse))
    if not points:
        raise RunError("no run has both an accuracy and a strongest attack; audit a run first")
    said = [(n, 100 * p.accuracy, p.mse) for n, p in comparable(runs, published or {}).items()]
    lines = [(v, CEILING_TEXT, CEILING, "--") for v in references(runs, "ceiling")]
    lines += [(v, FLOOR_TEXT, FLOOR, ":") for v in references(runs, "floor")]
    named = [(shown(name, 30), x, y) for _, name, x, y in points]
    named += [(shown(f"{name} (published)", 36), x, y) for name, x, y in said]
    height = 4.8 + 0.12 * max(0, len(named) - MANY_POINTS)
    with board(8.4, height) as figure:
        axes = figure.add_axes((0.09, FOOT / height, 0.7, 1 - (FOOT + HEAD) / height))
        low, high = min(x for _, x, _ in named), max(x for _, x, _ in named)
        pad = max(0.2 * (high - low), 0.3)
        axes.set_xlim(low - pad, high + pad)
        axes.set_xticks([t for t in axes.get_xticks() if low - pad <= t <= min(high + pad, 100)])
        top = 1.12 * max([y for _, _, y in named] + [line[0] for line in lines]) or 1.0
        axes.set_ylim(-0.04 * top, top)
        axes.set_yticks([t for t in axes.get_yticks() if 0 <= t <= top])
        axes.set_xlabel("accuracy through the channel (%)   better →")
        axes.set_ylabel("strongest attack's MSE   more private →")
        for at, _, x, y in points:
            axes.plot(x, y, marker(at), color=colour(at), markersize=8, zorder=3)
        for _, x, y in said:
            axes.plot(x, y, "o", markersize=7, mfc="white", mec=INK, mew=1.3, zorder=2.5)
        draw_references(axes, lines)
        _name_points(axes, named)
        return Drawing(figure)


def _name_points(axes: "Axes", points: Sequence[tuple[str, float, float]]) -> None:
    """Write each name beside its point (data coordinates) without covering anything."""
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8}
    texts = [axes.text(0, 0, name, ha="center", va="center", bbox=paper) for name, *_ in points]
    sizes = [(box.width + 6, box.height + 4) for box in (t.get_window_extent() for t in texts)]
    anchors = [tuple(map(float, axes.transData.transform((x, y)))) for _, x, y in points]
    area = axes.get_window_extent()
    frame = Box(
        x=float(area.x0 + area.x1) / 2,
        y=float(area.y0 + area.y1) / 2,
        width=float(area.width),
        height=float(area.height),
    )
    pairs = [(float(x), float(y)) for x, y in anchors]
    inverse = axes.transData.inverted()
    for label, (x, y), box in zip(texts, pairs, place(pairs, sizes, frame), strict=True):
        label.set_position(tuple(inverse.transform((box.x, box.y))))
        edge_x = min(max(x, box.x - box.width / 2), box.x + box.width / 2)
        edge_y = min(max(y, box.y - box.height / 2), box.y + box.height / 2)
        if (edge_x - x) ** 2 + (edge_y - y) ** 2 > NEAR_PX**2:
            ends = inverse.transform([(x, y), (edge_x, edge_y)])
            axes.plot(ends[:, 0], ends[:, 1], color=GREY, linewidth=0.7, zorder=2)
