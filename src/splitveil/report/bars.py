"""Attack by attack: grouped bars of mean squared error."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from splitveil.errors import RunError
from splitveil.report.canvas import (
    CEILING,
    CEILING_TEXT,
    PALETTE,
    Drawing,
    board,
    colour,
    draw_references,
    references,
    shown,
)
from splitveil.report.fields import number, section
from splitveil.report.files import RunFiles
from splitveil.report.tables import format_mse

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PER_PANEL = len(PALETTE)  # more runs than colours go into another panel
PER_LEGEND_LINE = 4
MANY_BARS = 18  # from here the numbers stand upright
MANY_RUNS = 2 * PER_PANEL  # beyond, the numbers stand in the table alone
LEFT, RIGHT, BOTTOM, PLOT, LEGEND_LINE = 0.8, 1.65, 0.45, 3.2, 0.24  # inches
LETTER = 0.082  # inches, the mean width of a letter in an attack's name
LONG_NAME = 10


def attack_bars(runs: Sequence[RunFiles]) -> Drawing:
    """MSE of every attack, a group of bars per attack and a bar per run."""
    attacks = list(dict.fromkeys(name for run in runs for name in section(run.record, "attacks")))
    if not attacks:
        raise RunError("no run has an attack in its record; audit a run first")
    panels = [runs[at : at + PER_PANEL] for at in range(0, len(runs), PER_PANEL)]
    bars = len(attacks) * min(len(runs), PER_PANEL)
    longest = max(len(line) for name in attacks for line in _on_lines(name).split("\n"))
    width = (
        LEFT
        + RIGHT
        + max(
            5.95,
            (0.17 if bars > MANY_BARS else 0.53) * bars,
            (LETTER * longest + 0.1) * len(attacks),
        )
    )
    heads = [0.1 + LEGEND_LINE * math.ceil(len(panel) / PER_LEGEND_LINE) for panel in panels]
    height = sum(heads) + (BOTTOM + PLOT) * len(panels)
    with board(width, height) as figure:
        top = height
        for panel, head in zip(panels, heads, strict=True):
            top -= head + PLOT + BOTTOM
            axes = figure.add_axes(
                (
                    LEFT / width,
                    (top + BOTTOM) / height,
                    1 - (LEFT + RIGHT) / width,
                    PLOT / height,
                )
            )
            drawn = _draw_panel(axes, panel, attacks, upright=bars > MANY_BARS)
            for x, value in drawn if len(runs) <= MANY_RUNS else ():
                _write_value(axes, x, value, upright=bars > MANY_BARS)
        return Drawing(figure)


def _draw_panel(
    axes: "Axes", runs: Sequence[RunFiles], attacks: Sequence[str], *, upright: bool
) -> list[tuple[float, float]]:
    """The bars of up to `PER_PANEL` runs, the ceiling and the legend; returns their tops."""
    rows = [[number(run.record, "attacks", a, "mse") for a in attacks] for run in runs]
    ceilings = references(runs, "ceiling")
    top = max([0.0, *ceilings, *(v for row in rows for v in row if v is not None)]) or 1.0
    axes.set_ylim(0, (1.2 if upright else 1.1) * top)
    share, tops = 0.8 / len(runs), []
    for at, row in enumerate(rows):
        shift = (at - (len(runs) - 1) / 2) * share
        bars = [(i + shift, value) for i, value in enumerate(row) if value is not None]
        axes.bar([x for x, _ in bars], [v for _, v in bars], 0.92 * share, color=colour(at))
        tops += bars
    axes.set_xlim(-0.5, len(attacks) - 0.5)
    axes.set_xticks(range(len(attacks)), [_on_lines(name) for name in attacks])
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("MSE   more private →")
    draw_references(axes, [(value, CEILING_TEXT, CEILING, "--") for value in ceilings])
    _name_runs(axes, runs)
    return tops


def _on_lines(attack: str) -> str:
    r"""Name of an attack, a long one broken after its first hyphen.

    >>> _on_lines("decoder-perceptual")
    'decoder-\nperceptual'
    """
    name = shown(attack, 24)
    return name.replace("-", "-\n", 1) if len(name) > LONG_NAME else name


def _write_value(axes: "Axes", x: float, value: float, *, upright: bool) -> None:
    """The number over a bar; upright where bars are narrow."""
    axes.annotate(
        format_mse(value),
        (x, value),
        xytext=(0, 2),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=7,
        rotation=90 if upright else 0,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.3, "alpha": 0.85},
    )


def _name_runs(axes: "Axes", runs: Sequence[RunFiles]) -> None:
    """Run names over the bars, each with its colour."""
    from matplotlib.patches import Patch

    axes.legend(
        handles=[Patch(color=colour(at)) for at in range(len(runs))],
        labels=[shown(run.name) for run in runs],
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=PER_LEGEND_LINE,
        handlelength=1,
        borderaxespad=0.1,
    )
