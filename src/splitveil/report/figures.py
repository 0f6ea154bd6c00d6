"""Trade-off, attack bars, training curves, and all pictures of a report."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

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
    Drawing,
    board,
    colour,
    draw_references,
    marker,
    place_labels,
    png_uri,
    references,
    shown,
)
from splitveil.report.columns import Published
from splitveil.table import NOTHING, format_mse

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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
    for at, kind in enumerate(kinds(runs)):
        look: dict[str, Any] = {"ink": colour(at), "shape": marker(at)}
        for run in kind.runs:
            accuracy, mse = run.record.accuracy, run.record.strongest.mse
            if accuracy is not None and mse is not None:
                name = shown(run.name, 30)
                marks.append(Mark(name=name, accuracy=100 * accuracy, mse=mse, **look))
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
    from matplotlib.lines import Line2D

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
            axes.errorbar(mark.accuracy, mark.mse, xerr=mark.accuracy_sd, yerr=mark.mse_sd,
                          elinewidth=1.2, capsize=2.5, zorder=3, **_look(mark))  # fmt: skip
        draw_references(axes, lines)
        _name_marks(axes, marks)
        if legend:  # what colours and shapes mean, above the axes
            signs = [Line2D([], [], **_look(mark)) for mark, _ in legend]
            axes.legend(signs, [words for _, words in legend], loc="lower left", ncols=len(legend),
                        bbox_to_anchor=(-0.03, 1.0), fontsize=8.5, handletextpad=0.2,
                        columnspacing=1.0, borderaxespad=0.2)  # fmt: skip
        return Drawing(figure)


def _look(mark: Mark) -> dict[str, Any]:
    return {"marker": mark.shape, "linestyle": "", "color": mark.ink, "markersize": 8,
            "markerfacecolor": mark.fill, "markeredgewidth": 1.4}  # fmt: skip


def _name_marks(axes: "Axes", marks: Sequence[Mark]) -> None:
    """Write each name beside its mark without covering a mark, a bar or another name."""
    to_px = axes.transData.transform
    anchors = to_px([(mark.accuracy, mark.mse) for mark in marks])
    reach = to_px([(m.accuracy + (m.accuracy_sd or 0), m.mse + (m.mse_sd or 0)) for m in marks])
    half = np.maximum(reach - anchors, MARKER_PX / 2)  # (n, 2): of the bars, and of the mark alone
    thin = np.full(len(marks), MARKER_PX)
    bars = [np.column_stack([anchors, 2 * half[:, 0], thin]),
            np.column_stack([anchors, thin, 2 * half[:, 1]])]  # fmt: skip
    # Marks with many neighbours first: they have the fewest places for a name.
    near = (np.abs(anchors[:, None] - anchors) < CROWD_PX).all(-1).sum(1)
    order = sorted(range(len(marks)), key=lambda at: (-near[at], *anchors[at]))
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.3, "alpha": 0.8}
    texts = [
        axes.text(0, 0, marks[at].name, ha="center", va="center", fontsize=8.5, zorder=2.5,
                  bbox=paper)
        for at in order
    ]  # fmt: skip
    sizes = np.array(
        [(box.width + 4, box.height + 2) for box in (t.get_window_extent() for t in texts)]
    )
    area = axes.get_window_extent()
    frame = np.array([(area.x0 + area.x1) / 2, (area.y0 + area.y1) / 2, area.width, area.height])
    boxes = place_labels(anchors[order], sizes, frame, np.vstack(bars))
    to_data = axes.transData.inverted().transform
    for name, anchor, box in zip(texts, anchors[order], boxes, strict=True):
        name.set_position(tuple(to_data(box[:2])))
        edge = np.clip(anchor, box[:2] - box[2:] / 2, box[:2] + box[2:] / 2)
        if ((edge - anchor) ** 2).sum() > NEAR_PX**2:
            ends = to_data([anchor, edge])
            axes.plot(ends[:, 0], ends[:, 1], color=GREY, linewidth=0.7, zorder=2)


BarPanel = list[tuple[int, Group, RunFiles]]  # the place of a run's kind, which gives its colour
PER_PANEL = len(PALETTE)  # more runs than colours go into another panel
MANY_BARS = 18  # from here the numbers stand upright
MANY_RUNS = 2 * PER_PANEL  # beyond, the numbers stand in the table alone
MARGINS, TALL, NAME = 2.45, 3.9, 0.9  # inches: both sides, a panel, an attack's name


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
            _draw_bars(axes, panel, attacks, upright=upright, numbers=len(runs) <= MANY_RUNS)
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
    axes: "Axes", panel: BarPanel, attacks: Sequence[str], *, upright: bool, numbers: bool
) -> None:
    """The bars of up to `PER_PANEL` runs, the ceiling, and the names over them."""
    runs = [run for _, _, run in panel]
    rows = [[number(run.record, f"attacks.{a}.mse") for a in attacks] for run in runs]
    ceilings = references(runs, "ceiling")
    top = max([0.0, *ceilings, *(v for row in rows for v in row if v is not None)]) or 1.0
    axes.set_ylim(0, (1.2 if upright else 1.1) * top)
    share, signs = 0.8 / len(runs), {}
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.3, "alpha": 0.85}
    for at, ((place, _, _), row) in enumerate(zip(panel, rows, strict=True)):
        shift = (at - (len(runs) - 1) / 2) * share
        known = [(i + shift, value) for i, value in enumerate(row) if value is not None]
        bars = axes.bar([x for x, _ in known], [v for _, v in known], 0.92 * share,
                        color=colour(place))  # fmt: skip
        signs[place] = bars
        if numbers:
            axes.bar_label(bars, [format_mse(v) for _, v in known], padding=2, fontsize=7,
                           rotation=90 if upright else 0, bbox=paper)  # fmt: skip
    axes.set_xlim(-0.5, len(attacks) - 0.5)
    words = [fill(shown(name, 24), 11, break_long_words=False) for name in attacks]
    axes.set_xticks(range(len(attacks)), words)
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("MSE   more private →")
    draw_references(axes, [(value, CEILING_TEXT, CEILING, "--") for value in ceilings])
    names = _bar_names(panel)
    axes.legend([signs[place] for place in names], list(names.values()), loc="lower left",
                bbox_to_anchor=(0, 1.0), ncols=4, handlelength=1, borderaxespad=0.1)  # fmt: skip


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
    weights = [number(entry, "weight") for entry in run.metrics]
    still = len(list(takewhile(lambda weight: weight == 0, weights)))
    if still and ((number(run.record, "config.lambd") or 0.0) > 0 or any(weights)):
        yield Phase(kind="warm-up", first=_epoch(run, 0), last=_epoch(run, still - 1))


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
    shares = [(_epoch(run, at), number(e, "shut") or 0.0) for at, e in enumerate(run.metrics)]
    for held, stretch in groupby(shares, lambda pair: pair[1] >= SHUT):
        if held:
            epochs = [epoch for epoch, _ in stretch]
            yield Phase(kind="shut off", first=epochs[0], last=epochs[-1])


def _epoch(run: RunFiles, at: int) -> float:
    epoch = number(run.metrics[at], "epoch")
    return float(at) if epoch is None else epoch


def _values(run: RunFiles, key: str) -> tuple[list[float], list[float]]:
    """Epochs at which a key was logged, and its values there."""
    logged = [(_epoch(run, at), number(entry, key)) for at, entry in enumerate(run.metrics)]
    pairs = [(epoch, value) for epoch, value in logged if value is not None]
    return [epoch for epoch, _ in pairs], [value for _, value in pairs]


UNUSED = "not used by this defence"
RUNS_PER_LINE = 5
CURVES_WIDE, CURVES_TALL, LEGEND_LINE = 2.75, 2.6, 0.22  # inches: a panel, and a line of the legend
FEW_EPOCHS = 40  # up to here every epoch gets its dot

PENALTY = "Penalty (rob_loss)"
Dash = Literal["-", "--"]
Series = tuple[str, str, Dash]  # a key of the log, its name and its dash
PANELS: Sequence[tuple[str, float, Sequence[Series]]] = (  # titles and factors of the values
    (
        "Accuracy (%)",
        100.0,
        (("val_accuracy", "validation", "-"), ("train_accuracy", "train", "--")),
    ),
    (PENALTY, 1.0, (("rob_loss", "", "-"),)),
    ("Intra-class MSE", 1.0, (("intra_mse", "", "-"),)),
    ("Effective sample size", 1.0, (("effective_sample_size", "", "-"),)),
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
            draw_curves(axes, *panel, listed, named=panel[0] == PENALTY)
        if lines:
            signs = [_line(colour(at), "-") for at in range(len(listed))]
            names = [shown(run.name) for run in listed]
            figure.legend(signs, names, loc="outside lower center", ncols=RUNS_PER_LINE)
        return Drawing(figure)


def draw_curves(
    axes: "Axes",
    title: str,
    scale: float,
    series: Sequence[Series],
    runs: Sequence[RunFiles],
    *,
    named: bool,
) -> None:
    """All runs' series of one panel, or a sentence that there are none.

    Behind them lie the phases of the penalty, with their names where `named`.
    """
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title)
    drawn: dict[str, Dash] = {}
    for at, run in enumerate(runs):
        for key, words, dash in series:
            x, y = _values(run, key)
            if x:
                mark = "o" if len(x) <= FEW_EPOCHS else ""
                values = [scale * value for value in y]
                axes.plot(x, values, dash, color=colour(at), marker=mark, markersize=2.5)
                drawn[words] = dash
    if not drawn:
        axes.set_axis_off()
        axes.text(0.5, 0.5, UNUSED, transform=axes.transAxes, ha="center", color=GREY)
        return
    limits = axes.get_xlim()
    found = [phases(run) for run in runs]
    shared = [phase for phase in found[0] if all(phase in others for others in found)]
    _mark_phases(axes, shared, GREY, named=named)
    for at, own in enumerate(found):
        _mark_phases(axes, [phase for phase in own if phase not in shared], colour(at), named=False)
    axes.set_xlim(limits)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    if "" not in drawn:
        ink = GREY if len(runs) > 1 else colour(0)
        signs = [_line(ink, dash) for dash in drawn.values()]
        axes.legend(signs, list(drawn), loc="lower right", fontsize=8)


def _line(ink: str, dash: Dash) -> "Line2D":
    from matplotlib.lines import Line2D

    return Line2D([], [], color=ink, linestyle=dash)


def _mark_phases(axes: "Axes", found: Sequence[Phase], ink: str, *, named: bool) -> None:
    """Behind the curves: when the penalty did not act, and when its weight was full."""
    from matplotlib.colors import to_rgba

    for phase in found:
        if phase.kind == "full weight":
            axes.axvline(phase.first, color=ink, linestyle=":", linewidth=1.0, zorder=1)
        else:
            axes.axvspan(phase.first - 0.5, phase.last + 0.5, linewidth=0, zorder=0.5,
                         hatch="///" if phase.kind == "shut off" else None,
                         facecolor=to_rgba(ink, 0.16),
                         edgecolor=to_rgba(ink, 0.45))  # fmt: skip
        if named:
            place = (phase.first - 0.4, 0.98)
            word = axes.annotate(phase.kind, place, xycoords=("data", "axes fraction"),
                                 fontsize=7, color=GREY, rotation=90, va="top")  # fmt: skip
            word.set_in_layout(False)  # it may lie outside the epochs shown


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
        return png_uri(self.drawing.png)

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
    grid = gallery.draw_grid(runs) if any(run.gallery for run in runs) else None
    return Pictures(
        grid=Picture(stem="reconstructions", drawing=grid) if grid else None,
        tradeoff=Picture(stem="tradeoff", drawing=scatter(runs, published)) if placed else None,
        attacks=Picture(stem="attacks", drawing=attack_bars(runs)) if attacked else None,
        curves=tuple(
            Picture(stem=f"curves-{slug}", drawing=training_curves(group),
                    runs=tuple(run.name for run in group))
            for slug, group in _groups([run for run in runs if run.metrics])
        ),
    )  # fmt: skip


def _groups(runs: Sequence[RunFiles]) -> list[tuple[str, list[RunFiles]]]:
    """Runs that share a picture of their curves, each group with a part of a file name."""
    parts = [(run.name, [run]) for run in runs]
    if len(runs) > ALONE:
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
