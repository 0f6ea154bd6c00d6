"""Attack by attack: grouped bars of mean squared error."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from splitveil.errors import RunError
from splitveil.record.schema import number, section
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
from splitveil.report.files import RunFiles
from splitveil.report.kinds import Kind, kinds
from splitveil.table import format_mse

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Panel = list[tuple[int, Kind, RunFiles]]  # the place of a run's kind, which gives its colour


PER_PANEL = len(PALETTE)  # more runs than colours go into another panel


PER_LEGEND_LINE = 4


MANY_BARS = 18  # from here the numbers stand upright


MANY_RUNS = 2 * PER_PANEL  # beyond, the numbers stand in the table alone


MARGINS, TALL, NAME = 2.45, 3.9, 0.9  # inches: both sides, a panel, an attack's name


LONG_NAME = 10


def attack_bars(runs: Sequence[RunFiles]) -> Drawing:
    """MSE of every attack, a group of bars per attack and a bar per run.

    Runs that differ in their seeds alone stand together and have one colour, in every panel.
    """
    attacks = list(dict.fromkeys(name for run in runs for name in section(run.record, "attacks")))
    if not attacks:
        raise RunError("no run has an attack in its record; audit a run first")
    panels = _panels(kinds(runs))
    bars = len(attacks) * max(len(panel) for panel in panels)
    upright = bars > MANY_BARS
    width = MARGINS + max(5.95, (0.17 if upright else 0.53) * bars, NAME * len(attacks))
    with board(width, TALL * len(panels), laid_out=True) as figure:
        fields = figure.subplots(len(panels), squeeze=False)[:, 0]
        for axes, panel in zip(fields, panels, strict=True):
            drawn = _draw_panel(axes, panel, attacks, upright=upright)
            for x, value in drawn if len(runs) <= MANY_RUNS else ():
                _write_value(axes, x, value, upright=upright)
        return Drawing(figure)


def _panels(found: Sequence[Kind]) -> list[Panel]:
    """At most `PER_PANEL` runs each, those of a kind together where they fit.

    A panel holds fewer kinds than there are colours, one after another: none of them share one.
    """
    panels: list[Panel] = []
    for place, kind in enumerate(found):
        for at in range(0, len(kind.runs), PER_PANEL):
            part = [(place, kind, run) for run in kind.runs[at : at + PER_PANEL]]
            if not panels or len(panels[-1]) + len(part) > PER_PANEL:
                panels.append([])
            panels[-1] += part
    return panels


def _names(panel: Panel) -> dict[int, str]:
    """What the legend says of each kind in a panel, by its place among all."""
    counts = Counter(place for place, _, _ in panel)
    return {
        place: shown(run.name)
        if counts[place] == 1
        else f"{shown(kind.name, 16)} ({counts[place]} runs)"
        for place, kind, run in panel
    }


def _draw_panel(
    axes: "Axes", panel: Panel, attacks: Sequence[str], *, upright: bool
) -> list[tuple[float, float]]:
    """The bars of up to `PER_PANEL` runs, the ceiling and the legend; returns their tops."""
    runs = [run for _, _, run in panel]
    rows = [[number(run.record, "attacks", a, "mse") for a in attacks] for run in runs]
    ceilings = references(runs, "ceiling")
    top = max([0.0, *ceilings, *(v for row in rows for v in row if v is not None)]) or 1.0
    axes.set_ylim(0, (1.2 if upright else 1.1) * top)
    share, tops = 0.8 / len(runs), []
    for at, ((place, _, _), row) in enumerate(zip(panel, rows, strict=True)):
        shift = (at - (len(runs) - 1) / 2) * share
        bars = [(i + shift, value) for i, value in enumerate(row) if value is not None]
        axes.bar([x for x, _ in bars], [v for _, v in bars], 0.92 * share, color=colour(place))
        tops += bars
    axes.set_xlim(-0.5, len(attacks) - 0.5)
    axes.set_xticks(range(len(attacks)), [_on_lines(name) for name in attacks])
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("MSE   more private →")
    draw_references(axes, [(value, CEILING_TEXT, CEILING, "--") for value in ceilings])
    _name_kinds(axes, _names(panel))
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


def _name_kinds(axes: "Axes", names: Mapping[int, str]) -> None:
    """Names over the bars, each with its colour."""
    from matplotlib.patches import Patch

    axes.legend(
        handles=[Patch(color=colour(place)) for place in names],
        labels=list(names.values()),
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=PER_LEGEND_LINE,
        handlelength=1,
        borderaxespad=0.1,
    )
