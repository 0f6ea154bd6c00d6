"""Rows of records against each other: differences with their intervals, for the tables of `report`.

Accuracies are compared over training seeds alone, by Welch's t: records hold no answer per image.
MSEs are compared over seeds and images where both rows hold the strongest attack's MSE per image.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from splitveil.audit.statistics import Difference, Sample, difference, holm
from splitveil.errors import RunError
from splitveil.report.compare import Sheet, track_sheet
from splitveil.report.fields import number, text
from splitveil.report.rows import Found, Group, Json, Published
from splitveil.report.tables import NOTHING, Column
from splitveil.report.tracks import Track, defences_of, tracks

OURS = "veil"
ROUNDING = 0.01  # half-precision errors per image average to far less than this share of the mean
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
    of MSEs also without values per image. `over` says what the interval of the MSE covers.
    `p_accuracy` and `p_mse` are for another training, so one seed has none; `corrected` adjusts
    them for all claims of a table.
    """

    ours: str
    other: str
    accuracy_gap: float | None
    mse_gap: float | None
    accuracy: Difference | None
    mse: Difference | None
    over: str
    p_accuracy: float | None = None
    p_mse: float | None = None

    @property
    def verdict(self) -> str:
        """What the intervals allow to say; "dominates" needs both to exclude 0 in our favour.

        A verdict that Holm's correction does not bear out says so.
        """
        signs = _sign(self.accuracy), _sign(self.mse)
        if None in signs and not any(signs):
            return "one seed: no verdict"
        said = VERDICTS[signs[0] or 0, signs[1] or 0]
        ps = [p for sign, p in zip(signs, (self.p_accuracy, self.p_mse), strict=True) if sign]
        borne_out = all(p is not None and p < ALPHA for p in ps)
        return said if borne_out else f"{said}, before correction"


def _sign(made: Difference | None) -> int | None:
    """Sign of a difference; 0 where its interval holds 0, None where it has none over seeds."""
    if made is None or made.interval.scope == "images":
        return None
    return (1 if made.interval.mean > 0 else -1) if made.excludes_zero else 0


def per_image_mse(record: Json) -> NDArray[np.float64] | None:
    """The strongest attack's MSE of every scored image (n,), or None where none is kept."""
    packed = text(record, "per_image", "mse")
    if not packed:
        return None
    try:
        values = np.frombuffer(base64.b64decode(packed, validate=True), dtype="<f2")
    except (binascii.Error, ValueError) as err:
        raise RunError(
            f"per_image.mse is not base64 of float16: {err}; audit the run again"
        ) from err
    made = values.astype(np.float64)
    mean, stated = float(made.mean()) if len(made) else 0.0, number(record, "strongest", "mse")
    if stated is None or not abs(mean - stated) <= ROUNDING * stated:
        raise RunError(
            f"per_image.mse has mean {mean:.6g}, but strongest.mse is {stated}; audit the run again"
        )
    return made


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


def over_seeds(a: Sequence[float | None], b: Sequence[float | None]) -> Difference | None:
    """Mean of a less mean of b by Welch's t; None with fewer than two values on either side.

    >>> made = over_seeds([1.0, 2.0, 3.0], [0.0, 0.0])
    >>> round(made.interval.low, 4), round(made.interval.high, 4)  # 2 ± 4.3027/√3
    (-0.4841, 4.4841)
    """
    left, right = ([v for v in values if v is not None] for values in (a, b))
    if min(len(left), len(right)) < LEAST_SEEDS:
        return None
    samples = [Sample.of([[v, v] for v in values]) for values in (left, right)]
    return difference(*samples, paired=False)  # equal columns: the images add no variance


def contrast(ours: Group, other: Group) -> Contrast:
    """Two rows against each other, p-values not yet corrected."""
    accuracies, errors = [
        (ours.values(*keys), other.values(*keys)) for keys in (("accuracy",), ("strongest", "mse"))
    ]
    a, b = image_table(ours), image_table(other)
    mse, over = over_seeds(*errors), "seeds"
    same = ours.distinct("splits", "scored") == other.distinct("splits", "scored")
    if a is not None and b is not None and same and a.shape[1] == b.shape[1]:
        mse = difference(Sample.of(a), Sample.of(b), paired=False)
        over = mse.interval.scope
    accuracy = over_seeds(*accuracies)
    return Contrast(
        ours=ours.name,
        other=other.name,
        accuracy_gap=_gap(ours, other, "accuracy"),
        mse_gap=_gap(ours, other, "strongest", "mse"),
        accuracy=accuracy,
        mse=mse,
        over=NOTHING if mse is None else over,
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


def contrasts(track: Track, done: Sequence[str] = ()) -> list[Contrast]:
    """Every row of a track with our defence, but those `done`, against every row without."""
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
            _interval(c.accuracy_gap, c.accuracy, 100.0, 2),
            _p(c.p_accuracy),
            _interval(c.mse_gap, c.mse, 1.0, 4),
            _p(c.p_mse),
            c.over,
            c.verdict,
        )
        for c in made
    )
    return Sheet(
        title=f"Differences – {track.title}",
        caption="First row less second, with its 95 % interval; p-values are corrected after Holm "
        "over this table. “Dominates”: both intervals exclude 0 in favour of the first row; "
        "“before correction”: a corrected p is 0.05 or more.",
        columns=columns,
        rows=rows,
    )


def _interval(gap: float | None, made: Difference | None, scale: float, digits: int) -> str:
    if gap is None:
        return NOTHING
    said = f"{scale * gap:+.{digits}f}"
    if made is None:
        return said
    low, high = scale * made.interval.low, scale * made.interval.high
    return f"{said} [{low:+.{digits}f}, {high:+.{digits}f}]"


def _p(value: float | None) -> str:
    """A p-value.

    >>> _p(0.0312), _p(0.00002), _p(None)
    ('0.031', '<0.001', '–')
    """
    if value is None:
        return NOTHING
    return f"{value:.3f}" if value >= 0.0005 else "<0.001"  # noqa: PLR2004 - what prints as 0.000


def sheets(found: Found, published: Mapping[str, Published]) -> list[Sheet]:
    """A table per track, each followed by its differences."""
    made, done = [], set[str]()
    for track in tracks(found.groups):
        made.append(track_sheet(track, published))
        pairs = [] if track.aux == "test90" else contrasts(track, sorted(done))
        done |= {pair.ours for pair in pairs}
        if pairs:
            made.append(contrast_sheet(track, pairs))
    return made
