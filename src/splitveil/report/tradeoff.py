"""The trade-off of a dataset as a picture: accuracy against the strongest attack's error."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from splitveil.errors import RunError
from splitveil.report.canvas import CEILING, GREY, INK, PALETTE, board, png, shown
from splitveil.report.columns import Published
from splitveil.report.labels import MARKER_PX, Box, place
from splitveil.report.rows import Group, aux_of, dataset_of, defences_of
from splitveil.table import format_mse

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Kind = Literal["ours", "measured", "published"]
FILL: Mapping[str, str] = {"ours": PALETTE[0], "measured": PALETTE[1], "published": "white"}
EDGE: Mapping[str, str] = {"ours": PALETTE[0], "measured": PALETTE[1], "published": INK}
NEAR_PX = 26  # a label further than this from its mark gets a line to it
CROWD_PX = (150, 40)  # marks nearer than this compete for places
MANY_MARKS = 12


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A point: accuracy in per cent, MSE, and their sd over training seeds where there are several.

    `square` marks a client other than VGG11's, `origin` says who published.
    """

    name: str
    kind: Kind
    accuracy: float
    mse: float
    accuracy_sd: float | None = None
    mse_sd: float | None = None
    square: bool = False
    origin: str = ""


def marks(groups: Sequence[Group], published: Mapping[str, Published]) -> list[Mark]:
    """What the attacker with the training set gets from each row, then what is published of it.

    Published rows of another dataset than the rows' are left out.
    """
    made = []
    for group in groups:
        accuracies = [100 * v for v in group.values("accuracy") if v is not None]
        errors = [v for v in group.values("strongest", "mse") if v is not None]
        if aux_of(group) != "train" or not accuracies or not errors:
            continue
        made.append(
            Mark(
                name=group.name,
                kind="ours" if "veil" in defences_of(group) else "measured",
                accuracy=statistics.fmean(accuracies),
                mse=statistics.fmean(errors),
                accuracy_sd=statistics.stdev(accuracies) if len(accuracies) > 1 else None,
                mse_sd=statistics.stdev(errors) if len(errors) > 1 else None,
                square=group.distinct("config", "net") != ["vgg11"],
            )
        )
    datasets = {dataset_of(group) for group in groups}
    for said in published.values():
        origin, _, name = said.source.rpartition(", ")
        if said.aux == "train" and said.is_of(datasets):
            made.append(
                Mark(
                    name=name,
                    kind="published",
                    accuracy=100 * said.accuracy,
                    mse=said.mse,
                    origin=origin,
                )
            )
    return made


def tradeoff(points: Sequence[Mark], ceiling: float) -> bytes:
    """PNG: accuracy (x, %) against the strongest attack's MSE (y), with the label-only ceiling."""
    if not points:
        raise RunError("no row has both an accuracy and a strongest attack; audit a run first")
    with board(7.6, 5.2 + 0.1 * max(0, len(points) - MANY_MARKS)) as figure:
        axes = figure.add_axes((0.1, 0.105, 0.88, 0.82))
        low, high = min(p.accuracy for p in points), max(p.accuracy for p in points)
        pad = max(0.12 * (high - low), 0.3)
        axes.set_xlim(low - pad, high + pad)
        top = 1.1 * max(ceiling, *(p.mse for p in points))
        axes.set_ylim(-0.03 * top, top)
        axes.set_yticks([t for t in axes.get_yticks() if 0 <= t <= top])
        axes.set_xlabel("accuracy through the channel (%)   better →")
        axes.set_ylabel("strongest attack's MSE   more private →")
        axes.axhline(ceiling, color=CEILING, linestyle="--", linewidth=1.2, zorder=1.5)
        axes.annotate(
            f"ceiling: all that the label alone gives, {format_mse(ceiling)}",
            (0.008, ceiling),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            color=CEILING,
            fontsize=8.5,
        )
        for point in points:
            _draw(axes, point)
        _name(axes, points, ceiling)
        _legend(axes, points)
        return png(figure)


def _draw(axes: "Axes", point: Mark) -> None:
    axes.errorbar(
        point.accuracy,
        point.mse,
        xerr=point.accuracy_sd,
        yerr=point.mse_sd,
        fmt="s" if point.square else "o",
        markersize=8,
        markerfacecolor=FILL[point.kind],
        markeredgecolor=EDGE[point.kind],
        markeredgewidth=1.4,
        ecolor=EDGE[point.kind],
        elinewidth=1.2,
        capsize=2.5,
        zorder=3,
    )


def _legend(axes: "Axes", points: Sequence[Mark]) -> None:
    """Kinds by colour and clients by shape, above the axes."""
    from matplotlib.lines import Line2D

    def sign(kind: str, shape: str) -> Line2D:
        return Line2D(
            [], [], marker=shape, linestyle="", markersize=7, markeredgewidth=1.4,
            markerfacecolor=FILL[kind], markeredgecolor=EDGE[kind],
        )  # fmt: skip

    origins = ", ".join(sorted({point.origin for point in points} - {""}))
    words: dict[Kind, str] = {
        "ours": "veil, measured",
        "measured": "other, measured",
        "published": f"published by the {origins}" if origins else "published",
    }
    kinds = {point.kind for point in points}
    entries = [(sign(kind, "o"), said) for kind, said in words.items() if kind in kinds]
    if any(point.square for point in points):
        square = sign("published", "s")
        square.set_markeredgecolor(GREY)
        entries.append((square, "square: thin client"))
    axes.legend(
        [line for line, _ in entries],
        [said for _, said in entries],
        loc="lower left",
        bbox_to_anchor=(-0.03, 1.005),
        ncols=len(entries),
        fontsize=8.5,
        handletextpad=0.2,
        columnspacing=1.0,
        borderaxespad=0.2,
    )


def _name(axes: "Axes", points: Sequence[Mark], ceiling: float) -> None:
    """Write each name beside its mark without covering a mark, a bar, a name or the ceiling."""
    points = _crowded_first(axes, points)
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.3, "alpha": 0.8}
    texts = [
        axes.text(
            0, 0, shown(p.name, 30), ha="center", va="center", fontsize=8.5, zorder=2.5,
            color=GREY if p.kind == "published" else EDGE[p.kind], bbox=paper,
        )
        for p in points
    ]  # fmt: skip
    sizes = [(box.width + 4, box.height + 2) for box in (t.get_window_extent() for t in texts)]
    pairs = [_pixels(axes, p.accuracy, p.mse) for p in points]
    bars = [tile for p in points for tile in _bar_tiles(axes, p)]
    area = axes.get_window_extent()
    roof = min(float(area.y1), _pixels(axes, points[0].accuracy, ceiling)[1])
    frame = Box(
        x=float(area.x0 + area.x1) / 2,
        y=(float(area.y0) + roof) / 2,
        width=float(area.width),
        height=roof - float(area.y0),
    )
    # A text of no size at a place keeps the others off it.
    boxes = place([*pairs, *bars], [*sizes, *[(0.0, 0.0)] * len(bars)], frame)
    inverse = axes.transData.inverted()
    for text, (x, y), box in zip(texts, pairs, boxes, strict=False):
        text.set_position(tuple(inverse.transform((box.x, box.y))))
        edge_x = min(max(x, box.x - box.width / 2), box.x + box.width / 2)
        edge_y = min(max(y, box.y - box.height / 2), box.y + box.height / 2)
        if (edge_x - x) ** 2 + (edge_y - y) ** 2 > NEAR_PX**2:
            ends = inverse.transform([(x, y), (edge_x, edge_y)])
            axes.plot(ends[:, 0], ends[:, 1], color=GREY, linewidth=0.7, zorder=2)


def _crowded_first(axes: "Axes", points: Sequence[Mark]) -> list[Mark]:
    """Marks with many neighbours first: they have the fewest places for a name."""
    pairs = [_pixels(axes, p.accuracy, p.mse) for p in points]

    def neighbours(at: int) -> int:
        x, y = pairs[at]
        return sum(abs(x - a) < CROWD_PX[0] and abs(y - b) < CROWD_PX[1] for a, b in pairs)

    order = sorted(range(len(points)), key=lambda at: (-neighbours(at), pairs[at]))
    return [points[at] for at in order]


def _bar_tiles(axes: "Axes", point: Mark) -> list[tuple[float, float]]:
    """Places along the bars of a mark, px, a marker apart."""
    x, y = _pixels(axes, point.accuracy, point.mse)
    right = _pixels(axes, point.accuracy + (point.accuracy_sd or 0.0), point.mse)[0] - x
    up = _pixels(axes, point.accuracy, point.mse + (point.mse_sd or 0.0))[1] - y
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
