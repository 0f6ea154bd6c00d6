"""Training curves from the log of a run, with the phases in which the penalty did not act."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from splitveil.record.schema import number
from splitveil.report.canvas import GREY, Drawing, board, colour, shown
from splitveil.report.files import RunFiles
from splitveil.report.phases import Phase, phases

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D


Dash = Literal["-", "--"]


UNUSED = "not used by this defence"


PER_LEGEND_LINE = 5


WIDE, TALL, LEGEND_LINE = 2.75, 2.6, 0.22  # inches: a panel, and a line of the legend


FEW_EPOCHS = 40  # up to here every epoch gets its dot


@dataclass(frozen=True, kw_only=True)
class Series:
    """A key of the log, how it is called and how it is dashed."""

    key: str
    words: str = ""
    dash: Dash = "-"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One small plot; values of its series are multiplied by `scale`."""

    title: str
    series: tuple[Series, ...]
    scale: float = 1.0


PENALTY = Panel(title="Penalty (rob_loss)", series=(Series(key="rob_loss"),))


PANELS = (
    Panel(
        title="Accuracy (%)",
        series=(
            Series(key="val_accuracy", words="validation"),
            Series(key="train_accuracy", words="train", dash="--"),
        ),
        scale=100.0,
    ),
    PENALTY,
    Panel(title="Intra-class MSE", series=(Series(key="intra_mse"),)),
    Panel(title="Effective sample size", series=(Series(key="effective_sample_size"),)),
)


def training_curves(runs: RunFiles | Sequence[RunFiles]) -> Drawing:
    """Accuracy, penalty, intra-class MSE and effective sample size over the epochs.

    Warm-up is grey and shut-off hatched; what several runs do not share has the colour of its run.
    """
    listed = [runs] if isinstance(runs, RunFiles) else list(runs)
    lines = math.ceil(len(listed) / PER_LEGEND_LINE) if len(listed) > 1 else 0
    height = TALL + LEGEND_LINE * lines
    with board(WIDE * len(PANELS), height, laid_out=True) as figure:
        for axes, panel in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
            _draw_panel(axes, panel, listed)
        if lines:
            _name_runs(figure, listed)
        return Drawing(figure)


def _draw_panel(axes: "Axes", panel: Panel, runs: Sequence[RunFiles]) -> None:
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
        ncols=PER_LEGEND_LINE,
    )


def _line(ink: str, dash: Dash) -> "Line2D":
    from matplotlib.lines import Line2D

    return Line2D([], [], color=ink, linestyle=dash)
