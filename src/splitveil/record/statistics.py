"""How sure a mean over training seeds and images is, and whether two conditions differ.

The bootstrap over seeds and images has a closed form, so nothing is drawn: its variance is taken
without its bias for few seeds, its quantiles from Student's t rather than from the resamples (three
seeds have ten), and Hall's transformation allows for skewed images. In simulation a 95 % interval
covers in 93-97 % of cases with 3 to 10 seeds and 256 images or more, whether seeds, images or their
interaction dominate, with normal and log-normal images; two seeds go down to 92.6 %. Resampling
images alone covers 22 % where seeds dominate. Seeds are taken as normal, which no test on three
of them can check.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike
from torch import Tensor

from splitveil.audit.pivot import Pivot, limits, p_value, pivot
from splitveil.errors import AuditError

Table = Float[np.ndarray, "seeds images"]


_TABLE, _WITH_ATTACKS = 2, 3  # axes


_LEAST_LEVEL = 0.5  # below it the limits of a skewed mean may both lie on one side of it


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """Per-image values of one metric under one condition: a finite table (seeds, images).

    Row s is training seed s, column i the same image in all rows and in every sample that this
    one is compared with. `attacks` is how many attack seeds each row is the mean of.
    """

    values: Table
    attacks: int = 1

    def __post_init__(self) -> None:
        _check_shape(self.values.shape)
        bad = np.argwhere(~np.isfinite(self.values))
        if len(bad):
            seed, image = (int(i) for i in bad[0])
            raise AuditError(
                f"a sample must be finite, got {self.values[seed, image]} for seed {seed}, image "
                f"{image} ({len(bad)} such values); leave out what was not measured"
            )

    @staticmethod
    def of(values: ArrayLike | Tensor) -> "Sample":
        """A sample from (seeds, images), or from (seeds, attacks, images).

        Attack seeds of one training seed share its encoder, so they are averaged, not counted.

        >>> Sample.of([[[0.1, 0.3], [0.3, 0.5]]]).values.round(6).tolist()
        [[0.2, 0.4]]
        """
        plain = values.detach().cpu().numpy() if isinstance(values, Tensor) else values
        try:
            table = np.array(plain, dtype=np.float64)
        except (TypeError, ValueError) as err:
            raise AuditError(
                f"a sample must be a full table of numbers: {err}; "
                "give every seed the same images and the same number of attack seeds"
            ) from err
        attacks = 1
        if table.ndim == _WITH_ATTACKS and table.shape[1]:
            attacks, table = table.shape[1], table.mean(1)
        _check_shape(table.shape)
        table.setflags(write=False)
        return Sample(values=table, attacks=attacks)


def _check_shape(shape: tuple[int, ...]) -> None:
    if len(shape) != _TABLE or shape[0] < 1 or shape[1] <= 1:
        raise AuditError(
            f"a sample needs at least 1 seed and 2 images, got shape {shape}; "
            "pass (seeds, images) or (seeds, attacks, images)"
        )


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Mean, and standard deviation of the seeds' means (None with one seed)."""

    mean: float
    sd: float | None
    seeds: int
    images: int
    attacks: int


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean and its confidence limits.

    `scope` is "images" where there is one seed: another training may then give a mean far outside.
    `seeds` is the smaller number where two unpaired samples differ.
    """

    mean: float
    low: float
    high: float
    level: float
    standard_error: float
    seeds: int
    images: int
    scope: Literal["seeds and images", "images"]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Mean of a - b with its interval, two-sided p-value and effect sizes.

    `excludes_zero` is the interval's verdict, the same as `p_value` < 1 - level. The effect sizes
    are over the images' differences, averaged over seeds: `d_z` is Cohen's, mean over standard
    deviation (None if all are equal); `rank_biserial` in [-1, 1] is the share of their signed ranks
    above zero less the share below.
    """

    interval: Interval
    p_value: float
    excludes_zero: bool
    d_z: float | None
    rank_biserial: float
    paired: bool


def summary(sample: Sample) -> Summary:
    """Mean and spread over seeds, as published rows state them.

    >>> summary(Sample.of([[1.0, 3.0], [2.0, 6.0]]))
    Summary(mean=3.0, sd=1.4142135623730951, seeds=2, images=2, attacks=1)
    """
    seeds, images = sample.values.shape
    sd = float(sample.values.mean(1).std(ddof=1)) if seeds > 1 else None
    mean = float(sample.values.mean())
    return Summary(mean=mean, sd=sd, seeds=seeds, images=images, attacks=sample.attacks)


def interval(sample: Sample, level: float = 0.95) -> Interval:
    """Confidence interval of the mean over the populations of seeds and of images.

    With one seed it covers the images only, and `scope` says so.

    >>> made = interval(Sample.of([[1.0, 1.0], [3.0, 3.0], [5.0, 5.0]]))  # 3 ± 4.3027·2/√3
    >>> round(made.low, 3), round(made.high, 3)
    (-1.968, 7.968)
    """
    return _interval(pivot(sample.values[None]), level)


def difference(a: Sample, b: Sample, *, paired: bool, level: float = 0.95) -> Difference:
    """Mean of a - b over seeds and images; a and b must be scored on the same images.

    `paired`: row s of both is the same training seed. If not, the seeds' variances are added, as
    Welch does. If either has one seed, the interval covers the images only.

    >>> a, b = Sample.of([[3.0, 5.0], [4.0, 6.0]]), Sample.of([[1.0, 2.0], [2.0, 3.0]])
    >>> made = difference(a, b, paired=True)
    >>> made.interval.mean, round(made.d_z, 4), made.rank_biserial
    (2.5, 3.5355, 1.0)
    """
    if a.values.shape[1] != b.values.shape[1]:
        raise AuditError(
            f"samples must be of the same images, got {a.values.shape[1]} and "
            f"{b.values.shape[1]}; score both conditions on one set"
        )
    if paired and len(a.values) != len(b.values):
        raise AuditError(
            f"paired seeds must be equally many, got {len(a.values)} and {len(b.values)}; "
            "leave out the seeds that only one side has, or pass paired=False"
        )
    left, right = a.values[None], b.values[None]
    given = pivot(left - right) if paired else pivot(left, right)
    made = _interval(given, level)
    images = a.values.mean(0) - b.values.mean(0)
    sd = float(images.std(ddof=1)) if np.ptp(images) else 0.0  # a rounded 0 is not a spread
    return Difference(
        interval=made,
        p_value=p_value(given).item(),
        excludes_zero=not made.low <= 0.0 <= made.high,
        d_z=made.mean / sd if sd else None,
        rank_biserial=_rank_biserial(images),
        paired=paired,
    )


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Holm's adjusted p-values of claims made together, in the order given.

    Believing those below α keeps the chance of any false claim under α.

    >>> [round(p, 4) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    if not all(0.0 <= p <= 1.0 for p in p_values):
        raise AuditError(
            f"p-values must lie in [0, 1], got {list(p_values)}; leave missing ones out"
        )
    raw = np.array(p_values, dtype=np.float64)
    order = np.argsort(raw)
    adjusted = np.empty_like(raw)
    adjusted[order] = np.maximum.accumulate(raw[order] * np.arange(len(raw), 0, -1)).clip(max=1.0)
    return tuple(adjusted.tolist())


def _interval(given: Pivot, level: float) -> Interval:
    if not _LEAST_LEVEL <= level < 1.0:
        raise AuditError(f"level must lie in [{_LEAST_LEVEL}, 1), got {level}; 0.95 is usual")
    low, high = limits(given, level)
    return Interval(
        mean=given.mean.item(),
        low=low.item(),
        high=high.item(),
        level=level,
        standard_error=given.se.item(),
        seeds=given.seeds,
        images=int(given.images_df) + 1,
        scope="seeds and images" if given.seeds > 1 else "images",
    )


def _rank_biserial(images: Float[np.ndarray, " images"]) -> float:
    """Matched-pairs rank-biserial correlation; ties share their mean rank, zeros say nothing."""
    there = images[images != 0.0]
    _, place, count = np.unique(np.abs(there), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[place]
    return float((ranks * np.sign(there)).sum() / ranks.sum()) if len(there) else 0.0
