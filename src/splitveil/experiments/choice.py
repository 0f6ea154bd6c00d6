"""Which of some rows to ship: `advice`, with its table and its picture.

A row is a client alone, a split, or an early exit, measured on the same validation images as the
others. Nothing here trains.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from splitveil.errors import Range, RunError
from splitveil.io import Json
from splitveil.report.canvas import GREY, INK, PALETTE, RULE, Drawing, board
from splitveil.report.gains import Kind
from splitveil.table import DIGITS, Table, fixed, plain_column

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Z95 = 1.959963984540054


@dataclass(frozen=True, kw_only=True)
class DeviceLimits:
    """What a device has, and what may leak.

    Args:
        macs: Multiply-adds for one image, > 0.
        wire_floats: Numbers sent for one image, ≥ 1.
        exposure: Largest exposure, in [0, 1]; a row's upper limit counts.
        stored: Numbers stored: parameters after folding, tables, noise scales; None: any number.
    """

    macs: float | int
    wire_floats: int
    exposure: float | int
    stored: int | None = None

    def __post_init__(self) -> None:
        Range(0, 1).check("exposure", self.exposure)
        Range(0, math.inf, above=True).check("macs", self.macs)
        Range(1).check("wire", self.wire_floats)
        if self.stored is not None:
            Range(1).check("params", self.stored)

    def hold(self, macs: float | int, stored: int, wire_floats: int = 0) -> bool:
        """Whether a client with these costs fits the device."""
        room = math.inf if self.stored is None else self.stored
        return macs <= self.macs and stored <= room and wire_floats <= self.wire_floats


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A row: what was trained and what was found on the validation images.

    Args:
        kind: Who answers; "exit" is an early exit.
        name: What it is called, unique among the rows.
        accuracy: Of what the device reports, in [0, 1].
        exposure: Its exposure; 0 alone.
        exposure_high: Upper limit of it.
        sent: Share of the images that leave the device.
        identified: Share that can be told among 1,000; None if it was not measured.
        macs: Multiply-adds of the client for one image.
        stored: Numbers that it stores.
        wire_floats: Numbers of one sending; 0 alone.
        wire_bits: Bits per image, on average.
        right: Which validation images are answered right (n,), in the same order in every row.
        config: Settings to train it again.
        run: Its folder.
        checked: Whether the attack was also fitted on the images that would be sent.
    """

    kind: Kind
    name: str
    accuracy: float
    exposure: float
    exposure_high: float
    sent: float
    identified: float | None
    macs: int
    stored: int
    wire_floats: int
    wire_bits: float
    right: NDArray[np.bool_]
    config: Mapping[str, Any]
    run: str = ""
    checked: bool = True


@dataclass(frozen=True, kw_only=True)
class PairedGain:
    """Accuracy of a row minus that of another on the same images, with its 95 % limits."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to ship, and why.

    Args:
        case: Who answers, or why nobody should: "exposed" if everything that fits leaks too much,
            "too large" if nothing fits.
        chosen: The row to ship; None for the last two cases.
        alone: The best row alone that fits; None if none does.
        sentence: All of it in one sentence.
        gains: Of each row over `alone`, by name; empty without one.
    """

    case: Literal[Kind, "exposed", "too large"]
    chosen: Tried | None
    alone: Tried | None
    sentence: str
    gains: Mapping[str, PairedGain]


def gain_over(row: Tried, alone: Tried) -> PairedGain:
    """The gain in accuracy with 95 % limits: images paired, normal approximation.

    >>> import numpy as np
    >>> a, b = np.array([1, 1, 1, 0], bool), np.array([1, 0, 0, 0], bool)
    >>> facts = dict(kind="split", name="", accuracy=0.0, exposure=0.0, exposure_high=0.0, sent=1.0,
    ...     identified=None, macs=1, stored=1, wire_floats=1, wire_bits=1.0, config={})
    >>> gain_over(Tried(right=a, **facts), Tried(right=b, **facts)).mean
    0.5
    """
    difference = row.right.astype(float) - alone.right.astype(float)
    mean = float(difference.mean())
    half = Z95 * float(difference.std(ddof=1)) / math.sqrt(len(difference))
    return PairedGain(mean=mean, low=mean - half, high=mean + half)


def advice(rows: Sequence[Tried], limits: DeviceLimits) -> Advice:
    """Choose a row for a device.

    The most accurate row that fits the device and whose exposure surely is within the limit; but
    the client alone, unless the server's gain over it is surely above 0.

    Args:
        rows: What was tried.
        limits: The device, and what may leak.
    """
    fitting = [r for r in rows if limits.hold(r.macs, r.stored, r.wire_floats)]
    alone = _best([r for r in fitting if r.kind == "alone"])
    served = [r for r in fitting if r.kind != "alone"]
    allowed = [r for r in served if _is_allowed(r, limits)]
    gains = {r.name: gain_over(r, alone) for r in rows} if alone is not None else {}
    most = _points(limits.exposure)
    if not fitting:
        least = min((r.macs for r in rows), default=0)
        sentence = (
            f"Nothing that was tried fits the device: the cheapest client takes {least:,} "
            "multiply-adds; give it more, or send smaller images."
        )
        return Advice(case="too large", chosen=None, alone=None, sentence=sentence, gains=gains)
    if alone is None and not allowed:
        near = min(served, key=lambda r: r.exposure_high)
        sentence = (
            f"Ship nothing yet: no client alone fits the device, and no row keeps its exposure "
            f"within {most}; the nearest, {near.name}, has {_exposed(near)}; allow more "
            "multiply-adds, or more exposure."
        )
        return Advice(case="exposed", chosen=None, alone=None, sentence=sentence, gains=gains)
    surely = [r for r in allowed if alone is None or gains[r.name].low > 0]
    chosen = _best(surely)
    if chosen is None and alone is not None:
        sentence = f"Ship the client alone{_beside_a_server(alone)}: {_answers(alone)}, "
        sentence += "and nothing leaves the device; "
        best = _best(allowed)
        if best is not None:
            sentence += (
                f"the best row with a server within {most} of exposure, {best.name}, does not "
                f"surely answer better ({_gained(gains[best.name])})."
            )
        else:
            sentence += f"no row with a server keeps its exposure within {most}{_beyond(served)}."
        return Advice(case="alone", chosen=alone, alone=alone, sentence=sentence, gains=gains)
    if chosen is None:
        raise RunError("a row was allowed and none was chosen")  # cannot be
    sentence = f"Ship {chosen.name}: {_answers(chosen)} at {_exposed(chosen)}"
    if chosen.kind == "exit":
        sentence += f", and {_points(chosen.sent)} of the images leave the device"
    if alone is None:
        sentence += "; no client alone fits the device."
    else:
        sentence += f"; the best client alone answers {_points(alone.accuracy)} "
        sentence += f"({_gained(gains[chosen.name])})."
    assert chosen.kind != "alone"  # noqa: S101 - `allowed` has none
    return Advice(case=chosen.kind, chosen=chosen, alone=alone, sentence=sentence, gains=gains)


def _best(rows: Sequence[Tried]) -> Tried | None:
    """The most accurate row; among equals the least exposed, then the cheapest."""
    return min(rows, key=lambda r: (-r.accuracy, r.exposure, r.macs, r.name), default=None)


def _beyond(served: Sequence[Tried]) -> str:
    best = _best(served)
    return "" if best is None else f" (the most accurate, {best.name}, has {_exposed(best)})"


def _points(value: float) -> str:
    """A share as the table shows it, in per cent."""
    return f"{100 * value:.1f} %"


def _beside_a_server(alone: Tried) -> str:
    """How to get a client alone that was trained as an early exit."""
    asks = "early-exit" in str(alone.config.get("defence", "")).split("+")
    return " (the own head of an early exit, run with --never-ask)" * asks


def _answers(row: Tried) -> str:
    return f"it answers {_points(row.accuracy)} of the validation images"


def _exposed(row: Tried) -> str:
    return f"an exposure of {_points(row.exposure)} (at most {_points(row.exposure_high)})"


def _gained(gain: PairedGain) -> str:
    return f"{100 * gain.mean:+.1f} points, {100 * gain.low:+.1f} to {100 * gain.high:+.1f}"


ADVICE = Table(
    plain_column("mark", "→"), plain_column("name", "what"),
    plain_column("accuracy", "acc %", fixed(1, 100.0)),
    plain_column("gain", "gain", fixed(1, 100.0)),
    plain_column("gain_low", "from", fixed(1, 100.0)),
    plain_column("gain_high", "to", fixed(1, 100.0)),
    plain_column("sent", "sent %", fixed(1, 100.0)),
    plain_column("exposure", "exposure %", fixed(1, 100.0)),
    plain_column("exposure_high", "at most", fixed(1, 100.0)),
    plain_column("identified", "found %", fixed(1, 100.0)),
    plain_column("macs", "MMAC", fixed(2, 1e-6)), plain_column("stored", "stored", DIGITS),
    plain_column("wire_bits", "bits/image", fixed(0)), plain_column("allowed", "allowed"),
)  # fmt: skip


def advice_rows(rows: Sequence[Tried], limits: DeviceLimits, made: Advice) -> list[Json]:
    """The rows as JSON, the most accurate first, with what the advice says of them."""
    found = []
    for row in sorted(rows, key=lambda r: (-r.accuracy, r.exposure, r.name)):
        fits = limits.hold(row.macs, row.stored, row.wire_floats)
        good, gain = _is_allowed(row, limits), made.gains.get(row.name)
        said = {k: v for k, v in vars(row).items() if k not in ("right", "config")}
        found.append(
            said
            | {
                "images": len(row.right),
                "gain": gain and gain.mean, "gain_low": gain and gain.low,
                "gain_high": gain and gain.high, "fits": fits,
                "allowed": "yes" if good else "too exposed" if fits else "too large",
                "chosen": row is made.chosen, "mark": "→" if row is made.chosen else " ",
                "config": dict(row.config),
            }
        )  # fmt: skip
    return found


def draw_advice(rows: Sequence[Tried], limits: DeviceLimits, made: Advice) -> Drawing:
    """Accuracy (y, %) against exposure (x, %), with the limit; grey where a row is not allowed.

    The shares of one early-exit training are joined by a line; the best of each has its name, and
    so have the best client alone and the chosen row, a star. Exposures under 0 are drawn at 0.
    """
    with board(8.0, 4.6, laid_out=True) as figure:
        axes = figure.add_subplot()
        trained: dict[str, list[Tried]] = {}
        for row in rows:
            trained.setdefault(row.run or row.name, []).append(row)
        named = [_best(group) for group in trained.values() if group[0].kind != "alone"]
        named += [made.alone, made.chosen]
        for group in trained.values():
            line = sorted((_drawn(row) for row in group), key=lambda point: point[0])
            axes.plot(*zip(*line, strict=True), color=RULE, linewidth=1.2, zorder=1)
            for row in group:
                _draw_row(axes, row, limits, star=row is made.chosen)
        for at, row in enumerate({r.name: r for r in named if r is not None}.values()):
            axes.annotate(
                row.name, _drawn(row), xytext=(8, 7 if at % 2 else -12), fontsize=8, color=INK,
                textcoords="offset points",
            )  # fmt: skip
        limit = 100 * limits.exposure
        axes.axvline(limit, color=INK, linestyle="--", linewidth=1)
        across = axes.get_xaxis_transform()
        axes.text(limit, 0.02, f" limit {_points(limits.exposure)}", fontsize=8, transform=across)
        axes.set_xlabel("exposure (%)")
        axes.set_ylabel("accuracy on validation images (%)")
        axes.set_xlim(-2.0, 1.3 * axes.get_xlim()[1])
        return Drawing(figure, "frontier")


def _drawn(row: Tried) -> tuple[float, float]:
    return 100 * max(row.exposure, 0.0), 100 * row.accuracy


def _draw_row(axes: "Axes", row: Tried, limits: DeviceLimits, *, star: bool) -> None:
    """A point with the upper limit of its exposure."""
    inks = {"alone": PALETTE[2], "split": PALETTE[0], "exit": PALETTE[1]}
    x, y = _drawn(row)
    high = max(0.0, 100 * row.exposure_high - x)
    good = _is_allowed(row, limits)
    axes.errorbar(
        x, y, xerr=np.array([[0.0], [high]]), marker="*" if star else "o", elinewidth=1, capsize=2,
        color=inks[row.kind] if good else GREY, markersize=15 if star else 6,
        alpha=1.0 if good else 0.55, zorder=4 if star else 3,
    )  # fmt: skip


def _is_allowed(row: Tried, limits: DeviceLimits) -> bool:
    """Whether a row fits the device and surely keeps its exposure within the limit."""
    fits = limits.hold(row.macs, row.stored, row.wire_floats)
    return fits and (row.kind == "alone" or row.exposure_high <= limits.exposure)
