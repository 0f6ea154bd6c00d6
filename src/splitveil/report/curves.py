"""Training curves over the epochs, with the phases in which the penalty did not act."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from operator import itemgetter
from typing import TYPE_CHECKING, Literal

from splitveil.record.files import RunFiles
from splitveil.record.schema import number, text
from splitveil.report.canvas import GREY, PALETTE, Drawing, board, colour, shown
from splitveil.report.words import Lang, sentence, word

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D


PhaseKind = Literal["warm-up", "shut off", "full weight"]
SHUT = 0.5  # share of an epoch's steps from which it counts as shut off


@dataclass(frozen=True)
class Phase:
    """Epochs `first` to `last`, both included; `full weight` is a single epoch."""

    kind: PhaseKind
    first: float
    last: float


def phases(run: RunFiles) -> list[Phase]:
    """When the penalty of a run did not act, and when its weight was full.

    Args:
        run: A run with the epoch lines of its log; an audit is not needed.

    Returns:
        The warm-up (leading epochs with weight 0), the epoch in which a weight that grows over the
        share `ramp` of the run is full, and every stretch of epochs in which the penalty's own
        rules held it at 0.
    """
    config, found = run.settings, list[Phase]()
    epochs = _epochs(run)
    weights = [number(entry, "weight") for entry in run.metrics]
    still = len(list(takewhile(lambda weight: weight == 0, weights)))
    # A run without a penalty also logs weight 0.
    if still and ((number(config, "lambd") or 0.0) > 0 or any(weights)):
        found.append(Phase("warm-up", epochs[0], epochs[still - 1]))
    ramp, planned = number(config, "ramp"), number(config, "epochs")
    if ramp and planned and epochs and text(config, "lambd") not in (None, "0", "0.0"):
        when = ramp * planned
        if when < epochs[-1]:  # else the run ended before
            found.append(Phase("full weight", when, when))
    shut = [(number(entry, "shut") or 0.0) >= SHUT for entry in run.metrics]
    for held, stretch in groupby(zip(shut, epochs, strict=True), itemgetter(0)):
        own = [epoch for _, epoch in stretch]
        if held:
            found.append(Phase("shut off", own[0], own[-1]))
    return found


def _epochs(run: RunFiles) -> list[float]:
    """The number of each logged epoch; its place where the log does not number it."""
    named = [number(entry, "epoch") for entry in run.metrics]
    return [float(at) if epoch is None else epoch for at, epoch in enumerate(named)]


def logged(run: RunFiles, key: str) -> tuple[list[float], list[float]]:
    """Epochs at which a key was logged, and its values there."""
    each = zip(_epochs(run), (number(entry, key) for entry in run.metrics), strict=True)
    pairs = [(epoch, value) for epoch, value in each if value is not None]
    return [epoch for epoch, _ in pairs], [value for _, value in pairs]


RUNS_PER_LINE = 5
CURVES_WIDE, CURVES_TALL, LEGEND_LINE = 2.75, 2.6, 0.22  # inches: a panel, and a line of the legend
FEW_EPOCHS = 40  # up to here every epoch gets its dot

PENALTY = "plot.penalty"
# The eight scalars that the slots learn, and the gates of their cross-attention.
LEARNED = (
    "assign_temp", "slot_power", "snr_thresh", "snr_sharp", "softplus_beta", "margin_m",
    "class_gate_a", "class_gate_b", "attention_gate", "ffn_gate",
)  # fmt: skip
Dash = Literal["-", "--"]
Series = tuple[str, str, Dash]  # a key of the log, its name and its dash
ACCURACY: Sequence[Series] = (
    ("val_accuracy", "plot.validation", "-"),
    ("train_accuracy", "plot.train", "--"),
)
PANELS: Sequence[tuple[str, float, Sequence[Series]]] = (  # titles and factors of the values
    ("plot.accuracy", 100.0, ACCURACY),
    (PENALTY, 1.0, (("rob_loss", "", "-"),)),
    ("plot.intra-mse", 1.0, (("intra_mse", "", "-"),)),
    ("plot.sample-size", 1.0, (("effective_sample_size", "", "-"),)),
)
GATES: Sequence[Series] = (
    ("soft_gate", "plot.soft-gate", "-"),
    ("hard_gate", "plot.hard-gate", "--"),
)


def training_curves(runs: Sequence[RunFiles], stem: str = "curves", lang: Lang = "en") -> Drawing:
    """Accuracy, penalty, intra-class MSE and effective sample size over the epochs.

    A second row has the means of the gates, and what slots have learned, where runs logged them.
    Warm-up is grey and shut-off hatched. Phases that several runs do not share have the colour of
    their run.

    Args:
        runs: At least one run; each has its colour, named in a legend below where there are more.
        stem: Name of the drawing's files.
        lang: Language of its texts.
    """
    gated = any(logged(run, key)[0] for run in runs for key, _, _ in GATES)
    learned = [run for run in runs if learned_scalars(run)]
    rows = 1 + (gated or bool(learned))
    lines = math.ceil(len(runs) / RUNS_PER_LINE) if len(runs) > 1 else 0
    height = CURVES_TALL * rows + LEGEND_LINE * lines
    with board(CURVES_WIDE * len(PANELS), height, laid_out=True) as figure:
        grid = figure.add_gridspec(rows, len(PANELS))
        for at, panel in enumerate(PANELS):
            field = figure.add_subplot(grid[0, at])
            draw_curves(field, *panel, runs, named=panel[0] == PENALTY, lang=lang)
        if gated:
            field = figure.add_subplot(grid[1, :2])
            draw_curves(field, "plot.gates", 1.0, GATES, runs, named=False, lang=lang)
        if learned:
            draw_learned(figure.add_subplot(grid[1, 2:]), learned[0], lang)
        if lines:
            signs = [_line(colour(at), "-") for at in range(len(runs))]
            names = [shown(run.name) for run in runs]
            figure.legend(signs, names, loc="outside lower center", ncols=RUNS_PER_LINE)
        return Drawing(figure, stem, [run.name for run in runs])


def learned_scalars(run: RunFiles) -> dict[str, float]:
    """What the slots of a run have learned, at its last logged epoch; empty without slots."""
    last = run.metrics[-1] if run.metrics else {}
    found = {key: number(last, key) for key in LEARNED}
    return {key: value for key, value in found.items() if value is not None}


def gate_values(run: RunFiles) -> dict[str, float]:
    """The means of the gates, the share of steps that were shut off, and the learned scalars.

    All are of the last logged epoch.
    """
    last = run.metrics[-1] if run.metrics else {}
    found = {key: number(last, key) for key in ("soft_gate", "hard_gate", "shut")}
    return {k: v for k, v in found.items() if v is not None} | learned_scalars(run)


def draw_learned(axes: "Axes", run: RunFiles, lang: Lang = "en") -> None:
    """How far each scalar that the slots learn has moved from its first logged value."""
    from matplotlib.ticker import MaxNLocator

    for at, key in enumerate(learned_scalars(run)):
        x, y = logged(run, key)
        moved = [value - y[0] for value in y]
        axes.plot(x, moved, "--" if at >= len(PALETTE) else "-", color=colour(at), linewidth=1.3,
                  label=f"{key} {y[-1]:.3g}")  # fmt: skip
    limits = axes.get_xlim()
    _mark_phases(axes, phases(run), GREY, named=False, lang=lang)
    axes.set_xlim(limits)
    axes.set_title(sentence("plot.learned", name=shown(run.name)).plain(lang))
    axes.set_xlabel(word("plot.epoch", lang))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


def draw_curves(
    axes: "Axes",
    title: str,
    scale: float,
    series: Sequence[Series],
    runs: Sequence[RunFiles],
    *,
    named: bool,
    lang: Lang = "en",
) -> None:
    """All runs' series of one panel, or a sentence that there are none.

    Behind them lie the phases of the penalty, with their names where `named`.
    """
    from matplotlib.ticker import MaxNLocator

    axes.set_title(word(title, lang) if title else "")
    drawn: dict[str, Dash] = {}
    for at, run in enumerate(runs):
        for key, words, dash in series:
            x, y = logged(run, key)
            if x:
                mark = "o" if len(x) <= FEW_EPOCHS else ""
                values = [scale * value for value in y]
                axes.plot(x, values, dash, color=colour(at), marker=mark, markersize=2.5)
                drawn[word(words, lang) if words else ""] = dash
    if not drawn:
        axes.set_axis_off()
        axes.text(
            0.5, 0.5, word("plot.unused", lang), transform=axes.transAxes, ha="center", color=GREY
        )
        return
    limits = axes.get_xlim()
    found = [phases(run) for run in runs]
    shared = [phase for phase in found[0] if all(phase in others for others in found)]
    _mark_phases(axes, shared, GREY, named=named, lang=lang)
    for at, own in enumerate(found):
        apart = [phase for phase in own if phase not in shared]
        _mark_phases(axes, apart, colour(at), named=False, lang=lang)
    axes.set_xlim(limits)
    axes.set_xlabel(word("plot.epoch", lang))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    if "" not in drawn:
        ink = GREY if len(runs) > 1 else colour(0)
        signs = [_line(ink, dash) for dash in drawn.values()]
        axes.legend(signs, list(drawn), loc="lower right" if scale > 1 else "best", fontsize=8)


def _line(ink: str, dash: Dash) -> "Line2D":
    from matplotlib.lines import Line2D

    return Line2D([], [], color=ink, linestyle=dash)


def _mark_phases(
    axes: "Axes", found: Sequence[Phase], ink: str, *, named: bool, lang: Lang = "en"
) -> None:
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
            name = axes.annotate(
                word(f"band.{phase.kind}", lang), place, xycoords=("data", "axes fraction"),
                fontsize=7, color=GREY, rotation=90, va="top", annotation_clip=True,
            )  # fmt: skip
            name.set_in_layout(False)  # it may lie outside the epochs shown
