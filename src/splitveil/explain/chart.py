"""The flow chart: boxes in two rows, joined by arrows."""

import textwrap
from typing import TYPE_CHECKING

from splitveil.report.canvas import GREY, INK, PALETTE, board, png, shown
from splitveil.report.flow_chart import Box, Flow

if TYPE_CHECKING:
    from matplotlib.axes import Axes


WIDE, TALL, GAP = 1.42, 1.12, 0.3  # inches


SIGNS = 22  # per line of a box


TOP, LOW = "#e8f1f8", "#fdeee4"


def flow_chart(flow: Flow) -> bytes:
    """PNG: image → client → channel → wire → server above, the penalty's path below."""
    columns = max(len(flow.wire), flow.client + len(flow.penalty))
    width = columns * WIDE + (columns + 1) * GAP
    height = TALL + 2 * GAP + (TALL + 2.2 * GAP if flow.penalty else 0)
    with board(width, height) as figure:
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_xlim(0, width)
        axes.set_ylim(0, height)
        axes.set_axis_off()
        level = height - GAP - TALL
        for at, box in enumerate(flow.wire):
            _draw_box(axes, box, (_left(at), level), TOP, PALETTE[0])
            if at:
                _arrow(axes, [(_left(at) - GAP, level + TALL / 2), (_left(at), level + TALL / 2)])
        if flow.penalty:
            _draw_penalty(axes, flow, level)
        return png(figure)


def _left(column: int) -> float:
    """Left edge of a column of boxes."""
    return GAP + column * (WIDE + GAP)


def _draw_penalty(axes: "Axes", flow: Flow, level: float) -> None:
    """The lower row starts under the client's output, and its gradient returns to the client."""
    low = level - TALL - 1.4 * GAP
    first = flow.client + 1 if len(flow.penalty) < len(flow.wire) - 1 else flow.client
    middle = low + TALL / 2
    for at, box in enumerate(flow.penalty):
        _draw_box(axes, box, (_left(first + at), low), LOW, PALETTE[1])
        if at:
            _arrow(axes, [(_left(first + at) - GAP, middle), (_left(first + at), middle)])
    tap = _left(flow.client) + WIDE + GAP / 2
    enter = _left(first) + (WIDE / 2 if first == flow.client else 0)
    corner = [(tap, level + TALL / 2), (tap, middle), (enter, middle)]
    if first == flow.client:
        above = low + TALL + 0.5 * GAP
        corner = [(tap, level + TALL / 2), (tap, above), (enter, above), (enter, low + TALL)]
    _arrow(axes, corner, ink=PALETTE[1])
    axes.text(tap + 0.05, level - 0.55 * GAP, "z", color=PALETTE[1], weight="bold", fontsize=9)
    end = _left(first + len(flow.penalty) - 1) + WIDE / 2
    home = _left(flow.client) + (WIDE / 3 if first != flow.client else -GAP / 2)
    floor = low - 0.6 * GAP
    up = (
        [(home, level)]
        if first != flow.client
        else [(home, level + 0.3), (home + GAP / 2, level + 0.3)]
    )
    _arrow(axes, [(end, low), (end, floor), (home, floor), *up], ink=PALETTE[1], dash="--")
    axes.text((home + end) / 2, floor - 0.06, flow.back, color=PALETTE[1], ha="center", va="top",
              fontsize=8)  # fmt: skip


def _draw_box(axes: "Axes", box: Box, corner: tuple[float, float], paper: str, edge: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    x, y = corner
    patch = FancyBboxPatch(corner, WIDE, TALL, boxstyle="round,pad=0,rounding_size=0.08",
                           facecolor=paper, edgecolor=edge, linewidth=1.2)  # fmt: skip
    axes.add_patch(patch)
    lines = [part for line in box.lines for part in textwrap.wrap(shown(line, 60), SIGNS)]
    middle, top = x + WIDE / 2, y + TALL / 2 + 0.075 * (len(lines) + 0.3)
    axes.text(middle, top, shown(box.title, 24), ha="center", va="center", weight="bold",
              fontsize=8.5, color=INK)  # fmt: skip
    for at, line in enumerate(lines, start=1):
        axes.text(middle, top - 0.02 - 0.15 * at, line, ha="center", va="center", fontsize=7.2,
                  color=INK)  # fmt: skip


def _arrow(
    axes: "Axes", points: list[tuple[float, float]], ink: str = GREY, dash: str = "-"
) -> None:
    """A line through the points with its head at the last one."""
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    axes.plot(xs, ys, dash, color=ink, linewidth=1.3, solid_joinstyle="miter")
    style = {"arrowstyle": "-|>", "color": ink, "linewidth": 0, "mutation_scale": 11,
             "shrinkA": 0, "shrinkB": 0}  # fmt: skip
    axes.annotate("", xy=points[-1], xytext=points[-2], arrowprops=style)
