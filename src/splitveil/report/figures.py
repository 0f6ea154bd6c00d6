"""Trade-off, attack bars, training curves.

The trade-off plot is drawn here, the others in `grid`, `bars` and `curves`.
"""

import base64
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from splitveil.errors import RunError
from splitveil.record.files import RunFiles
from splitveil.record.groups import Group, kinds
from splitveil.record.schema import number, text
from splitveil.report import gallery
from splitveil.report.canvas import (
    CEILING,
    CEILING_TEXT,
    FLOOR,
    GREY,
    INK,
    MARKER_PX,
    PALETTE,
    Box,
    Drawing,
    board,
    colour,
    draw_references,
    marker,
    place_labels,
    references,
    shown,
)
from splitveil.report.columns import Published
from splitveil.table import NOTHING, format_mse

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D


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
        aux = run.record.audit.aux or "train"
        known.setdefault(aux, set()).add(text(run.record, "config.dataset"))
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
        accuracy, mse = run.record.accuracy, run.record.strongest.mse
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
    boxes = place_labels([*anchors, *bars], [*sizes, *[(0.0, 0.0)] * len(bars)], frame)
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


BarPanel = list[tuple[int, Group, RunFiles]]  # the place of a run's kind, which gives its colour
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
    attacks = list(dict.fromkeys(name for run in runs for name in run.record.attacks))
    if not attacks:
        raise RunError("no run has an attack in its record; audit a run first")
    panels = _bar_panels(kinds(runs))
    bars = len(attacks) * max(len(panel) for panel in panels)
    upright = bars > MANY_BARS
    width = MARGINS + max(5.95, (0.17 if upright else 0.53) * bars, NAME * len(attacks))
    with board(width, TALL * len(panels), laid_out=True) as figure:
        fields = figure.subplots(len(panels), squeeze=False)[:, 0]
        for axes, panel in zip(fields, panels, strict=True):
            drawn = _draw_bars(axes, panel, attacks, upright=upright)
            for x, value in drawn if len(runs) <= MANY_RUNS else ():
                _write_value(axes, x, value, upright=upright)
        return Drawing(figure)


def _bar_panels(found: Sequence[Group]) -> list[BarPanel]:
    """At most `PER_PANEL` runs each, those of a kind together where they fit.

    A panel holds fewer kinds than there are colours, one after another: none of them share one.
    """
    panels: list[BarPanel] = []
    for place, kind in enumerate(found):
        for at in range(0, len(kind.runs), PER_PANEL):
            part = [(place, kind, run) for run in kind.runs[at : at + PER_PANEL]]
            if not panels or len(panels[-1]) + len(part) > PER_PANEL:
                panels.append([])
            panels[-1] += part
    return panels


def _bar_names(panel: BarPanel) -> dict[int, str]:
    """What the legend says of each kind in a panel, by its place among all."""
    counts = Counter(place for place, _, _ in panel)
    return {
        place: shown(run.name)
        if counts[place] == 1
        else f"{shown(kind.name, 16)} ({counts[place]} runs)"
        for place, kind, run in panel
    }


def _draw_bars(
    axes: "Axes", panel: BarPanel, attacks: Sequence[str], *, upright: bool
) -> list[tuple[float, float]]:
    """The bars of up to `PER_PANEL` runs, the ceiling and the legend; returns their tops."""
    runs = [run for _, _, run in panel]
    rows = [[number(run.record, f"attacks.{a}.mse") for a in attacks] for run in runs]
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
    _name_kinds(axes, _bar_names(panel))
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


PhaseKind = Literal["warm-up", "shut off", "full weight"]
SHUT = 0.5  # share of an epoch's steps from which it counts as shut off


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Epochs `first` to `last`, both included; `full weight` is one epoch."""

    kind: PhaseKind
    first: float
    last: float


def phases(run: RunFiles) -> list[Phase]:
    """What the log and the settings of a run say about its penalty, in order of epochs."""
    return [*_warm_up(run), *_full_weight(run), *_shut_off(run)]


def _warm_up(run: RunFiles) -> Iterator[Phase]:
    """The first epochs with weight 0, if the run has a penalty at all."""
    weights = [(_epoch(run, at), number(e, "weight")) for at, e in enumerate(run.metrics)]
    penalised = (number(run.record, "config.lambd") or 0.0) > 0 or any(w for _, w in weights)
    still = 0
    while still < len(weights) and weights[still][1] == 0:
        still += 1
    if penalised and still:
        yield Phase(kind="warm-up", first=weights[0][0], last=weights[still - 1][0])


def _full_weight(run: RunFiles) -> Iterator[Phase]:
    """The epoch in which a weight that grows over the share `ramp` of the run is full."""
    ramp, epochs = (number(run.record.config, key) for key in ("ramp", "epochs"))
    grows = text(run.record, "config.lambd") not in (None, "0", "0.0")
    if ramp and epochs and grows and run.metrics:
        when = ramp * epochs
        if when < _epoch(run, len(run.metrics) - 1):
            yield Phase(kind="full weight", first=when, last=when)


def _shut_off(run: RunFiles) -> Iterator[Phase]:
    """Stretches of epochs in which the penalty's own rules held it at 0."""
    shares = [(_epoch(run, at), number(e, "shut")) for at, e in enumerate(run.metrics)]
    for held, stretch in groupby(shares, lambda pair: pair[1] is not None and pair[1] >= SHUT):
        if held:
            epochs = [epoch for epoch, _ in stretch]
            yield Phase(kind="shut off", first=epochs[0], last=epochs[-1])


def _epoch(run: RunFiles, at: int) -> float:
    epoch = number(run.metrics[at], "epoch")
    return float(at) if epoch is None else epoch


Dash = Literal["-", "--"]
UNUSED = "not used by this defence"
RUNS_PER_LINE = 5
CURVES_WIDE, CURVES_TALL, LEGEND_LINE = 2.75, 2.6, 0.22  # inches: a panel, and a line of the legend
FEW_EPOCHS = 40  # up to here every epoch gets its dot


@dataclass(frozen=True, kw_only=True)
class Series:
    """A key of the log, how it is called and how it is dashed."""

    key: str
    words: str = ""
    dash: Dash = "-"


@dataclass(frozen=True, kw_only=True)
class CurvePanel:
    """One small plot; values of its series are multiplied by `scale`."""

    title: str
    series: tuple[Series, ...]
    scale: float = 1.0


PENALTY = CurvePanel(title="Penalty (rob_loss)", series=(Series(key="rob_loss"),))

PANELS = (
    CurvePanel(
        title="Accuracy (%)",
        series=(
            Series(key="val_accuracy", words="validation"),
            Series(key="train_accuracy", words="train", dash="--"),
        ),
        scale=100.0,
    ),
    PENALTY,
    CurvePanel(title="Intra-class MSE", series=(Series(key="intra_mse"),)),
    CurvePanel(title="Effective sample size", series=(Series(key="effective_sample_size"),)),
)


def training_curves(runs: RunFiles | Sequence[RunFiles]) -> Drawing:
    """Accuracy, penalty, intra-class MSE and effective sample size over the epochs.

    Warm-up is grey and shut-off hatched; what several runs do not share has the colour of its run.
    """
    listed = [runs] if isinstance(runs, RunFiles) else list(runs)
    lines = math.ceil(len(listed) / RUNS_PER_LINE) if len(listed) > 1 else 0
    height = CURVES_TALL + LEGEND_LINE * lines
    with board(CURVES_WIDE * len(PANELS), height, laid_out=True) as figure:
        for axes, panel in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
            _draw_curves(axes, panel, listed)
        if lines:
            _name_runs(figure, listed)
        return Drawing(figure)


def _draw_curves(axes: "Axes", panel: CurvePanel, runs: Sequence[RunFiles]) -> None:
    """All runs' series of one panel, or a sentence that there are none."""
    from matplotlib.ticker import MaxNLocator

    axes.set_title(panel.title)
    drawn: dict[str, Series] = {}
    for at, run in enumerate(runs):
        for series in panel.series:
            x, y = _values(run, series.key)
            if x:
                mark = "o" if len(x) <= FEW_EPOCHS else ""
                values = [panel.scale * value for value in y]
                axes.plot(x, values, series.dash, color=colour(at), marker=mark, markersize=2.5)
                drawn[series.key] = series
    if not drawn:
        axes.set_axis_off()
        axes.text(0.5, 0.5, UNUSED, transform=axes.transAxes, ha="center", color=GREY)
        return
    limits = axes.get_xlim()
    found = [phases(run) for run in runs]
    shared = [phase for phase in found[0] if all(phase in others for others in found)]
    _mark_phases(axes, shared, GREY, named=panel is PENALTY)
    for at, own in enumerate(found):
        _mark_phases(axes, [phase for phase in own if phase not in shared], colour(at), named=False)
    axes.set_xlim(limits)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    named = [series for series in drawn.values() if series.words]
    if named:
        handles = [_line(GREY if len(runs) > 1 else colour(0), series.dash) for series in named]
        axes.legend(handles, [series.words for series in named], loc="lower right", fontsize=8)


def _mark_phases(axes: "Axes", found: Sequence[Phase], ink: str, *, named: bool) -> None:
    """Behind the curves: when the penalty did not act, and when its weight was full."""
    from matplotlib.colors import to_rgba

    for phase in found:
        if phase.kind == "full weight":
            axes.axvline(phase.first, color=ink, linestyle=":", linewidth=1.0, zorder=1)
        else:
            axes.axvspan(
                phase.first - 0.5,
                phase.last + 0.5,
                facecolor=to_rgba(ink, 0.16),
                edgecolor=to_rgba(ink, 0.45),  # of the hatch
                hatch="///" if phase.kind == "shut off" else None,
                linewidth=0,
                zorder=0.5,
            )
        if named:
            word = axes.annotate(
                phase.kind,
                (phase.first - 0.4, 0.98),
                xycoords=("data", "axes fraction"),
                fontsize=7,
                color=GREY,
                rotation=90,
                va="top",
            )
            word.set_in_layout(False)  # it may lie outside the epochs shown


def _values(run: RunFiles, key: str) -> tuple[list[float], list[float]]:
    """Epochs at which a key was logged, and its values there."""
    pairs = []
    for at, entry in enumerate(run.metrics):
        epoch, value = number(entry, "epoch"), number(entry, key)
        if value is not None:
            pairs.append((float(at) if epoch is None else epoch, value))
    return [epoch for epoch, _ in pairs], [value for _, value in pairs]


def _name_runs(figure: "Figure", runs: Sequence[RunFiles]) -> None:
    """Run names under the panels, each with its colour."""
    figure.legend(
        [_line(colour(at), "-") for at in range(len(runs))],
        [shown(run.name) for run in runs],
        loc="outside lower center",
        ncols=RUNS_PER_LINE,
    )


def _line(ink: str, dash: Dash) -> "Line2D":
    from matplotlib.lines import Line2D

    return Line2D([], [], color=ink, linestyle=dash)


ALONE = 12  # more runs than this share their curves by defence


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A drawing, the stem of its files, and the runs it is about where it is not about all."""

    stem: str
    drawing: Drawing
    runs: tuple[str, ...] = ()

    @property
    def uri(self) -> str:
        """The picture as a data: address, so that the page needs no other file."""
        return "data:image/png;base64," + base64.b64encode(self.drawing.png).decode("ascii")

    def files(self) -> dict[str, bytes]:
        """Names and contents of its files."""
        return {f"{self.stem}.png": self.drawing.png, f"{self.stem}.svg": self.drawing.svg}


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """All pictures of a report; None where the runs hold nothing to draw."""

    grid: Picture | None
    tradeoff: Picture | None
    attacks: Picture | None
    curves: tuple[Picture, ...]

    def listed(self) -> list[Picture]:
        """Those that exist."""
        found = (self.grid, self.tradeoff, self.attacks, *self.curves)
        return [picture for picture in found if picture is not None]


def draw(runs: Sequence[RunFiles], published: Mapping[str, Published]) -> Pictures:
    """Every picture for which the runs have data."""
    if not runs:
        raise RunError("no runs to report; name at least one run folder")
    attacked = any(run.record.attacks for run in runs)
    placed = any(
        run.record.accuracy is not None and run.record.strongest.mse is not None for run in runs
    )
    return Pictures(
        grid=Picture(stem="reconstructions", drawing=gallery.draw_grid(runs))
        if any(run.gallery for run in runs)
        else None,
        tradeoff=Picture(stem="tradeoff", drawing=scatter(runs, published)) if placed else None,
        attacks=Picture(stem="attacks", drawing=attack_bars(runs)) if attacked else None,
        curves=tuple(
            Picture(
                stem=f"curves-{slug}",
                drawing=training_curves(group),
                runs=tuple(run.name for run in group),
            )
            for slug, group in _groups([run for run in runs if run.metrics])
        ),
    )


def _groups(runs: Sequence[RunFiles]) -> list[tuple[str, list[RunFiles]]]:
    """Runs that share a picture of their curves, each group with a part of a file name."""
    if len(runs) <= ALONE:
        return list(zip(slugs([run.name for run in runs]), ([run] for run in runs), strict=True))
    alike: dict[str, list[RunFiles]] = {}
    for run in runs:
        alike.setdefault(text(run.record, "config.defence") or NOTHING, []).append(run)
    parts = [
        (defence, group[at : at + len(PALETTE)])
        for defence, group in alike.items()
        for at in range(0, len(group), len(PALETTE))
    ]
    return list(zip(slugs([name for name, _ in parts]), (part for _, part in parts), strict=True))


def slugs(names: Sequence[str]) -> list[str]:
    """A different, harmless part of a file name for each name.

    >>> slugs(["a/b", "a b", "veil"])
    ['a_b', 'a_b-again1', 'veil']
    """
    found: list[str] = []
    for name in names:
        slug = re.sub(r"[^\w.-]+", "_", name)[:80]
        again = sum(re.fullmatch(re.escape(slug) + r"(-again\d+)?", s) is not None for s in found)
        found.append(f"{slug}-again{again}" if again else slug)
    return found
