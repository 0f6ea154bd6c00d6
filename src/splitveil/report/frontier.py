"""The frontier of accuracy against exposure: clients alone, rows that send, and the chord.

The chord joins the best client alone, at exposure 0, with the best row that sends everything: a
device that tosses a coin for every image lies on it. An exit rule must lie above it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from splitveil.record.groups import Group
from splitveil.record.schema import answers_well
from splitveil.record.statistics import Sample, difference
from splitveil.report.gains import (
    Gain,
    Kind,
    answers_alone,
    best_alone,
    exposure_over,
    gains,
    images_of,
    kind_of,
    right_table,
)


@dataclass(frozen=True, kw_only=True)
class FrontierPoint:
    """A row of the frontier.

    Args:
        group: The row.
        kind: Whether it answers alone, sends some images, or all of them.
        accuracy: Its mean accuracy, in [0, 1].
        exposure: Its mean exposure, at least 0.
        limits: 95 % limits of the exposure, if they are known.
        gain: Over the best client alone of its track; None where none is at hand.
        over_chord: Over the chord at the same exposure, for a row that sends a part.
        curve: Exposure and accuracy at other shares of the same client, least sent first.
    """

    group: Group
    kind: Kind
    accuracy: float
    exposure: float
    limits: tuple[float, float] | None = None
    gain: Gain | None = None
    over_chord: Gain | None = None
    curve: tuple[tuple[float, float], ...] = ()

    @property
    def sure(self) -> bool:
        """Whether it stands for a gain: its lower limits lie above 0. A client alone needs none."""
        if self.kind == "alone":
            return True
        gained = self.gain is not None and self.gain.sure
        above = self.over_chord is not None and self.over_chord.sure
        return gained and (above or self.kind == "split")


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """Points on one set of images, and the ends (exposure, accuracy) of the chord, if it has any.

    `left_out` names rows whose accuracy is at chance or far below the undefended model.
    """

    points: tuple[FrontierPoint, ...]
    chord: tuple[tuple[float, float], tuple[float, float]] | None = None
    left_out: tuple[str, ...] = ()


def frontier(groups: Sequence[Group]) -> Frontier | None:
    """The frontier of some rows; None where no row answers alone or sends only a part.

    Of rows on several sets of images, those on the images of the first such row are taken.
    """
    telling = [g for g in groups if kind_of(g) != "split"]
    if not telling:
        return None
    here = [g for g in groups if images_of(g) == images_of(telling[0])]
    good = [g for g in here if all(map(answers_well, g.records))]
    points = [point for g in good if (point := _point(g, good)) is not None]
    alone = best_alone([g for g in good if answers_alone(g)])
    ends = None if alone is None else _chord(alone, good)
    return Frontier(
        points=tuple(points),
        chord=ends,
        left_out=tuple(g.name for g in here if g not in good),
    )


def _point(group: Group, rows: Sequence[Group]) -> FrontierPoint | None:
    accuracy, exposed = group.mean("accuracy"), exposure_over(group)
    if accuracy is None or exposed is None:
        return None
    kind, found = kind_of(group), gains(group, rows)
    above = None
    if kind == "exit" and found.best is not None:
        above = over_chord(group, found.best, rows)
    return FrontierPoint(
        group=group,
        kind=kind,
        accuracy=accuracy,
        exposure=max(0.0, exposed[0]),
        limits=exposed[1],
        gain=found.over_best,
        over_chord=above,
        curve=_curve(group) if kind == "exit" else (),
    )


def _curve(group: Group) -> tuple[tuple[float, float], ...]:
    """Exposure and accuracy at other shares, of the first record that measured them."""
    for record in group.records:
        pairs = [(share.exposure, share.accuracy) for share in record.shares]
        known = [(max(0.0, e), a) for e, a in pairs if e is not None and a is not None]
        if known:
            return tuple(sorted(known))
    return ()


def senders(rows: Sequence[Group], like: Group) -> list[Group]:
    """The rows that send every image, on the images of another row."""
    return [
        row
        for row in rows
        if kind_of(row) == "split" and images_of(row) == images_of(like)
        and row.mean("accuracy") is not None and exposure_over(row) is not None
    ]  # fmt: skip


def _leaks(row: Group) -> float:
    exposed = exposure_over(row)
    return 0.0 if exposed is None else max(0.0, exposed[0])


def _share(row: Group, exposure: float) -> float:
    """The share of images that a device may send at random as this row does, at an exposure."""
    leaks = _leaks(row)
    return 1.0 if leaks <= exposure else exposure / leaks


def _height(row: Group, alone: Group, exposure: float) -> float:
    """Accuracy of a device that sends that share at random, and answers alone otherwise."""
    low, high, share = alone.mean("accuracy"), row.mean("accuracy"), _share(row, exposure)
    return (1 - share) * (low or 0.0) + share * (high or 0.0)


def over_chord(ours: Group, alone: Group, rows: Sequence[Group]) -> Gain | None:
    """What a row that sends a part gains over sending at random, at the same exposure.

    Args:
        ours: The row.
        alone: The client alone that the random device has.
        rows: All rows at hand; of those that send everything, the best at this exposure counts.

    Returns:
        The gain in points, images paired where all three hold their answers; None without a row
        that sends everything.
    """
    exposed, accuracy = exposure_over(ours), ours.mean("accuracy")
    rivals = senders(rows, ours)
    if exposed is None or accuracy is None or not rivals:
        return None
    at = max(0.0, exposed[0])
    rival = max(rivals, key=lambda row: _height(row, alone, at))
    share, limits, over = _share(rival, at), None, ""
    mine, low, high = (right_table(group) for group in (ours, alone, rival))
    if mine is None or low is None or high is None:
        pass
    elif mine.shape[1] == low.shape[1] == high.shape[1]:
        seeds = min(len(low), len(high))  # both arms are independent, so any pairing will do
        mixed = (1 - share) * low[:seeds] + share * high[:seeds]
        made = difference(Sample.of(mine), Sample.of(mixed), paired=False).interval
        limits, over = (100 * made.low, 100 * made.high), made.scope
    points = 100 * (accuracy - _height(rival, alone, at))
    return Gain(against=rival.name, points=points, limits=limits, over=over)


def _chord(
    alone: Group, rows: Sequence[Group]
) -> tuple[tuple[float, float], tuple[float, float]] | None:
    """The ends of the steepest chord from a client alone to a row that sends everything."""
    low = alone.mean("accuracy") or 0.0
    rivals = [row for row in senders(rows, alone) if _leaks(row) > 0]
    if not rivals:
        return None
    best = max(rivals, key=lambda row: ((row.mean("accuracy") or 0.0) - low) / _leaks(row))
    return (0.0, low), (_leaks(best), best.mean("accuracy") or 0.0)
