"""Rows of records against each other: differences with their intervals, for the tables of `report`.

Accuracies are compared over training seeds alone, by Welch's t: records hold no answer per image.
MSEs are compared over seeds and images where both rows hold the strongest attack's MSE per image.
Against a row of one's choice, rows with the same training seeds are compared seed by seed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from splitveil.audit.statistics import Difference, Sample, difference, holm
from splitveil.report.choosing import View, chosen, ordered
from splitveil.report.compare import Sheet, gap_text, p_text, track_sheet
from splitveil.report.fields import text
from splitveil.report.published import Published
from splitveil.report.rows import Found, Group, per_image_mse
from splitveil.report.tables import NOTHING, Column
from splitveil.report.tracks import Track, defences_of, tracks

OURS = "veil"
ALPHA = 0.05
LEAST_SEEDS = 2  # a single training has no spread
VERDICTS = {  # sign of the difference in accuracy, in MSE; 0: not told apart, or not known
    (1, 1): "dominates",
    (0, 1): "more private",
    (-1, 1): "more private, less accurate",
    (1, 0): "more accurate",
    (0, 0): "not told apart",
    (-1, 0): "less accurate",
    (1, -1): "more accurate, less private",
    (0, -1): "less private",
    (-1, -1): "is dominated",
}


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """Row `ours` less row `other`, accuracies as shares.

    A difference without an interval is None: of accuracies with one training seed on either side,
    or where none of the seeds differ; of MSEs the same without values per image. `over` says what
    the interval of the MSE covers. `p_accuracy` and `p_mse` are for another training, so one seed
    has none; `corrected` adjusts them for all claims of a table. `several`: both rows have more
    than one seed.
    """

    ours: str
    other: str
    accuracy_gap: float | None
    mse_gap: float | None
    accuracy: Difference | None
    mse: Difference | None
    over: str
    several: bool
    p_accuracy: float | None = None
    p_mse: float | None = None

    @property
    def verdict(self) -> str:
        """What the intervals allow to say; what Holm's correction does not bear out apart."""
        signs = _sign(self.accuracy), _sign(self.mse)
        if signs[1] is None and not signs[0]:
            return "no spread over seeds: no verdict" if self.several else "one seed: no verdict"
        told, doubtful = [0, 0], [0, 0]
        for at, p in enumerate((self.p_accuracy, self.p_mse)):
            (told if p is not None and p < ALPHA else doubtful)[at] = signs[at] or 0
        said, unsure = VERDICTS[told[0], told[1]], VERDICTS[doubtful[0], doubtful[1]]
        if any(told) and any(doubtful):
            return f"{said} and, before correction, {unsure}"
        return f"{unsure}, before correction" if any(doubtful) else said


def _sign(made: Difference | None) -> int | None:
    """Sign of a difference; 0 where its interval holds 0, None where it has none over seeds."""
    if made is None or made.interval.scope == "images":
        return None
    return (1 if made.interval.mean > 0 else -1) if made.excludes_zero else 0


def image_table(group: Group) -> NDArray[np.float64] | None:
    """MSE per training seed and image (seeds, images), attack seeds averaged; None if not kept."""
    rows = []
    for seed in group.seeds:
        kept = [per_image_mse(record) for record in seed]
        known = [values for values in kept if values is not None]
        if len(known) < len(kept):
            return None
        rows.append(known)
    if len({len(values) for known in rows for values in known}) != 1:
        return None
    return np.stack([np.mean(known, axis=0) for known in rows])


def over_seeds(
    a: Sequence[float | None], b: Sequence[float | None], *, paired: bool = False
) -> Difference | None:
    """Mean of a less mean of b by Welch's t, or `paired` by Student's t of the differences.

    None with fewer than two values on either side, and where these have no spread: seeds that agree
    to the last image do so by chance, and would make any difference certain.

    >>> made = over_seeds([1.0, 2.0, 3.0], [0.0, 0.0])
    >>> round(made.interval.low, 4), round(made.interval.high, 4)  # 2 ± 4.3027/√3
    (-0.4841, 4.4841)
    """
    if paired:
        pairs = [(v, w) for v, w in zip(a, b, strict=True) if v is not None and w is not None]
        left, right = [v for v, _ in pairs], [w for _, w in pairs]
    else:
        left, right = ([v for v in values if v is not None] for values in (a, b))
    if min(len(left), len(right)) < LEAST_SEEDS:
        return None
    samples = [Sample.of([[v, v] for v in values]) for values in (left, right)]
    made = difference(*samples, paired=paired)  # equal columns: the images add no variance
    low, high = made.interval.low, made.interval.high
    return None if math.isclose(low, high, rel_tol=1e-9, abs_tol=1e-12) else made


def matched(ours: Group, other: Group) -> tuple[Group, Group] | None:
    """Both rows with their training seeds in one order; None if these are not the same ones."""
    sides = [{text(seed[0], "seeds", "train"): seed for seed in g.seeds} for g in (ours, other)]
    names = sorted(name for name in sides[0] if name is not None)
    complete = all(len(side) == len(g.seeds) for side, g in zip(sides, (ours, other), strict=True))
    if not complete or sides[0].keys() != sides[1].keys() or len(names) != len(sides[0]):
        return None
    left, right = (tuple(side[name] for name in names) for side in sides)
    return Group(ours.name, left), Group(other.name, right)


def contrast(ours: Group, other: Group, *, paired: bool = False) -> Contrast:
    """Two rows against each other, p-values not yet corrected; `paired` where seeds allow it."""
    pair = matched(ours, other) if paired else None
    ours, other = pair or (ours, other)
    together = pair is not None and len(ours.seeds) >= LEAST_SEEDS
    accuracies, errors = [
        (ours.values(*keys), other.values(*keys)) for keys in (("accuracy",), ("strongest", "mse"))
    ]
    a, b = image_table(ours), image_table(other)
    mse, over = over_seeds(*errors, paired=together), "seeds"
    same = ours.distinct("splits", "scored") == other.distinct("splits", "scored")
    if a is not None and b is not None and same and a.shape[1] == b.shape[1]:
        mse = difference(Sample.of(a), Sample.of(b), paired=together)
        over = mse.interval.scope
    accuracy = over_seeds(*accuracies, paired=together)
    return Contrast(
        ours=ours.name,
        other=other.name,
        accuracy_gap=_gap(ours, other, "accuracy"),
        mse_gap=_gap(ours, other, "strongest", "mse"),
        accuracy=accuracy,
        mse=mse,
        over=NOTHING if mse is None else f"paired {over}" if together else over,
        several=min(len(ours.seeds), len(other.seeds)) >= LEAST_SEEDS,
        p_accuracy=None if accuracy is None else accuracy.p_value,
        p_mse=None if mse is None or over == "images" else mse.p_value,
    )


def _gap(ours: Group, other: Group, *keys: str) -> float | None:
    a, b = ours.mean(*keys), other.mean(*keys)
    return None if a is None or b is None else a - b


def corrected(made: Sequence[Contrast]) -> list[Contrast]:
    """The contrasts with Holm's correction over all their p-values together."""
    known = [
        (i, k)
        for i, c in enumerate(made)
        for k in ("p_accuracy", "p_mse")
        if getattr(c, k) is not None
    ]
    adjusted = holm([float(getattr(made[i], k)) for i, k in known])
    values: dict[int, dict[str, float]] = {}
    for (i, k), p in zip(known, adjusted, strict=True):
        values.setdefault(i, {})[k] = p
    return [
        replace(
            c, p_accuracy=values.get(i, {}).get("p_accuracy"), p_mse=values.get(i, {}).get("p_mse")
        )
        for i, c in enumerate(made)
    ]


def contrasts(track: Track, done: Sequence[str] = (), against: str | None = None) -> list[Contrast]:
    """Every row of a track with our defence, but those `done`, against every row without.

    With `against`, every other row against the one of this name, in pairs of seeds where both have
    the same; none if the track does not hold it.
    """
    if against is not None:
        base = [g for g in track.groups if g.name == against]
        rest = [g for g in track.groups if g.name != against]
        return corrected([contrast(a, b, paired=True) for b in base for a in rest])
    ours = [g for g in track.groups if OURS in defences_of(g)]
    others = [g for g in track.groups if g not in ours]
    return corrected([contrast(a, b) for a in ours if a.name not in done for b in others])


def contrast_sheet(track: Track, made: Sequence[Contrast]) -> Sheet:
    """The differences of one track as a table."""
    columns = (
        Column(heading="row", numeric=False, brief="row"),
        Column(heading="against", numeric=False, brief="against"),
        Column(heading="accuracy gained", unit="points", arrow="↑", brief="Δacc ↑"),
        Column(heading="p of accuracy"),
        Column(heading="MSE gained", arrow="↑", brief="ΔMSE ↑"),
        Column(heading="p of MSE"),
        Column(heading="interval over", numeric=False),
        Column(heading="verdict", numeric=False, brief="verdict"),
    )
    rows = tuple(
        (
            f"`{c.ours}`",
            f"`{c.other}`",
            gap_text(c.accuracy_gap, limits(c.accuracy), 100.0, 2),
            p_text(c.p_accuracy),
            gap_text(c.mse_gap, limits(c.mse), 1.0, 4),
            p_text(c.p_mse),
            c.over,
            c.verdict,
        )
        for c in made
    )
    return Sheet(
        title=f"Differences – {track.title}",
        caption="First row less second, with its 95 % interval; p-values are corrected after Holm "
        "over this table. “Dominates”: both intervals exclude 0 in favour of the first row; "
        "“before correction”: a corrected p is 0.05 or more." + _pairs(made),
        columns=columns,
        rows=rows,
    )


def _pairs(made: Sequence[Contrast]) -> str:
    paired = any(c.over.startswith("paired") for c in made)
    return " “Paired”: seed by seed, where both rows have the same training seeds." * paired


def limits(made: Difference | None) -> tuple[float, float] | None:
    """The ends of a difference's interval, where it has one."""
    return None if made is None else (made.interval.low, made.interval.high)


def views(
    found: Found, published: Mapping[str, Published], view: View
) -> list[tuple[Track, list[Contrast]]]:
    """The tracks of the rows that a view shows, sorted, each with its differences."""
    made, done = [], set[str]()
    for each in tracks(chosen(found, view, published).groups):
        groups = ordered(each.groups, view.sort, published) if view.sort else each.groups
        track = replace(each, groups=groups)
        without = track.aux == "test90" and view.against is None
        pairs = [] if without else contrasts(track, sorted(done), view.against)
        done |= {pair.ours for pair in pairs}
        made.append((track, pairs))
    return made


def sheets(
    found: Found, published: Mapping[str, Published], view: View | None = None
) -> list[Sheet]:
    """A table per track, each followed by its differences."""
    asked = View() if view is None else view
    made = []
    for track, pairs in views(found, published, asked):
        made.append(track_sheet(track, published, asked.columns))
        if pairs:
            made.append(contrast_sheet(track, pairs))
    return made
