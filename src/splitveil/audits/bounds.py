r"""Upper bounds, in nats, on what smashed data z̃ = z + n, n ~ N(0, D), says about the image.

.. math::
    I(x; \tilde z \mid y) \le E\, KL(N(z, D) \,\|\, q_y) \quad\text{for every fixed } q_y

A gallery is a finite list of images, so its best Gaussian q is known exactly. A population is only
sampled: q is fitted on one part of the data, and the mean over another part gets a confidence
limit. From a rate follow errors of identification that no attacker can go below.

.. math:: KL(N(z, D) \,\|\, N(m, D + A)) = \tfrac12 [\log\det(I + D^{-1}A)
    - \mathrm{tr}((D + A)^{-1}A) + (z - m)^\top (D + A)^{-1} (z - m)]
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import torch
from jaxtyping import Float, Int64
from scipy.special import bdtr
from torch import Generator, Tensor

from splitveil.errors import AuditError
from splitveil.rng import normal_like

Rows = Float[Tensor, "n d"]
Labels = Int64[Tensor, " n"]
Covariance = Literal["diagonal", "full"]
NoiseVar = float | Float[Tensor, " d"]

LEVEL = 0.95  # at which a contradiction counts
PAIRED = 2000  # images, which make two million pairs
CHUNK = 1000
_ROUNDING = 1e-12  # relative, so that a rate of exactly twice another counts as twice

GUARD = 1e-3  # costs 0.001 nats at most, and makes the range hundreds of times smaller
# Shares of a class's own covariance and of the mean covariance of the classes; the rest is the
# diagonal of that mean. One of these mixes is chosen on the fit split.
MIXES = (
    (1.0, 0.0), (0.9, 0.1), (0.7, 0.3), (0.3, 0.7), (0.0, 1.0),
    (0.6, 0.3), (0.3, 0.4), (0.0, 0.9), (0.0, 0.6), (0.0, 0.3), (0.0, 0.0),
)  # fmt: skip


def noise_variance(
    noise_var: NoiseVar | None, dims: int, device: torch.device | str = "cpu"
) -> Float[Tensor, " d"]:
    """The diagonal of D in float64; an error for a channel without noise, or of unknown noise."""
    if noise_var is None:
        raise AuditError(
            "no certificate: noise of unknown scale; use Gaussian noise of a stated standard "
            "deviation that does not depend on the image"
        )
    spread = torch.as_tensor(noise_var, dtype=torch.float64, device=device).expand(dims)
    if bool((spread == 0).any()):
        raise AuditError(
            "no certificate: the channel is deterministic (noise variance 0); add Gaussian noise"
        )
    if not bool((torch.isfinite(spread) & (spread > 0)).all()):
        raise AuditError(
            f"no certificate: noise variances must be finite and > 0, got {noise_var}; state those "
            "of the deployed channel"
        )
    return spread


def whiten(z: Float[Tensor, "n d"], noise_var: NoiseVar | None) -> Float[Tensor, "n d"]:
    """Z in units of the noise's standard deviations, float64."""
    if len(z) == 0 or not bool(torch.isfinite(z).all()):
        raise AuditError(
            f"no certificate: z must be finite and of at least one image, got {len(z)} rows with "
            f"{int((~torch.isfinite(z)).sum())} values that are not finite"
        )
    return z.double() / noise_variance(noise_var, z.shape[1], z.device).sqrt()


def by_class(rows: Rows, labels: Labels | None) -> dict[int, Float[Tensor, "_ d"]]:
    """The rows of each label, in ascending order; without labels all rows under 0."""
    if labels is None:
        return {0: rows}
    kinds, count = torch.unique(labels, return_counts=True)
    parts = torch.split(rows[labels.argsort(stable=True)], count.tolist())
    return dict(zip(kinds.tolist(), parts, strict=True))


@dataclass(frozen=True, kw_only=True, eq=False)
class Spectrum:
    """Signal-to-noise ratios of a gallery: eigenvalues (c, m) of D^-½ Cov_c D^-½, padded with 0.

    `count` (c,) is the number of images of each class. Without labels there is one class.
    """

    snr: Float[Tensor, "c m"]
    count: Int64[Tensor, " c"]

    def rates(self, repeats: int = 1) -> Float[Tensor, " c"]:
        """Bound on I(x; z̃ | y = c) for each class, for `repeats` independent draws: D → D/k."""
        if repeats < 1:
            raise AuditError(f"repeats must be at least 1, got {repeats}")
        return 0.5 * torch.log1p(repeats * self.snr).sum(1)

    def rate(self, repeats: int = 1) -> float:
        """Bound on I(x; z̃ | y): the classes' mean, each by its share of the images."""
        return float(self.share @ self.rates(repeats))

    @property
    def share(self) -> Float[Tensor, " c"]:
        """Each class's share of the images."""
        return self.count.double() / self.count.sum()

    @property
    def label_entropy(self) -> float:
        """H(y) in nats: I(x; z̃) ≤ I(x; z̃ | y) + H(y)."""
        return float(-(self.share * self.share.log()).sum())


def gallery_spectrum(
    z: Float[Tensor, "n d"],
    noise_var: NoiseVar | None,
    labels: Int64[Tensor, " n"] | None = None,
    covariance: Covariance = "diagonal",
) -> Spectrum:
    r"""Signal-to-noise ratios of the listed images, by the plug-in (1/N) covariance.

    Its `rate(k)` bounds I(x; z̃), given the class where labels are, for x uniform over N listed
    images and k sendings:

    .. math:: I \le \sum_c \frac{N_c}{N} \tfrac12 \log\det(I + k D^{-1} \mathrm{Cov}_c)

    It holds exactly, without an interval: the covariance is that of the list itself.

    >>> gallery_spectrum(torch.tensor([[-1.0], [1.0]]), 1.0).rate() == 0.5 * math.log(2)
    True
    """
    found, sizes = [], []
    for rows in by_class(whiten(z, noise_var), labels).values():
        sizes.append(len(rows))
        centred = rows - rows.mean(0)
        if covariance == "diagonal":
            found.append(centred.square().mean(0))
            continue
        wide = centred.shape[1] > len(centred)  # the smaller of two matrices of equal spectrum
        square = centred @ centred.T if wide else centred.T @ centred
        found.append(torch.linalg.eigvalsh(square / len(centred)).clamp_min(0))
    snr = torch.nn.utils.rnn.pad_sequence(found, batch_first=True)
    return Spectrum(snr=snr, count=torch.tensor(sizes, device=z.device))


def capacity(noise_var: NoiseVar | None, low: float, high: float, dims: int) -> float:
    r"""Bound on I(x; z̃) whatever the images are, for z in [low, high]^d.

    .. math:: I \le \tfrac12 \sum_j \log(1 + h^2 / D_j), \qquad h = (high - low)/2

    No variable in the interval has a variance above h².

    >>> round(capacity(1.0, -1.0, 1.0, 2), 6)  # log 2
    0.693147
    """
    check_box(low, high)
    spread = noise_variance(noise_var, dims)
    return float(0.5 * torch.log1p(((high - low) / 2) ** 2 / spread).sum())


def check_box(low: float, high: float) -> None:
    """Refuse bounds that are infinite or in the wrong order."""
    if not -math.inf < low < high < math.inf:
        raise AuditError(
            f"no certificate: z is not bounded, got [{low}, {high}]; add a clip stage before the "
            "noise"
        )


def empirical_bernstein(
    values: Float[Tensor, "*batch n"], span: float, delta: float
) -> Float[Tensor, "*batch"]:
    r"""Upper 1 − δ confidence limit of a mean, from n independent values in an interval of `span`.

    .. math:: \bar v + \sqrt{2 s^2 \log(2/\delta) / n} + 7\, span \log(2/\delta) / (3(n - 1))

    Maurer and Pontil (2009), theorem 4; s² is the unbiased variance. It holds for every n.

    >>> values = torch.tensor([0.0, 1.0], dtype=torch.float64).repeat(50)
    >>> round(float(empirical_bernstein(values, 1.0, 0.05)), 6)  # 0.5 + 0.136494 + 0.086943
    0.723438
    """
    n = _enough(values, delta)
    log = math.log(2 / delta)
    spread = (2 * log / n * values.var(-1)).sqrt()
    return values.mean(-1) + spread + 7 * span * log / (3 * (n - 1))


def central_limit(values: Float[Tensor, "*batch n"], delta: float) -> Float[Tensor, "*batch"]:
    r"""What the upper 1 − δ limit of a mean tends to as n grows: no certificate at any n.

    .. math:: \bar v + \Phi^{-1}(1 - \delta)\, s / \sqrt n
    """
    n = _enough(values, delta)
    return values.mean(-1) + NormalDist().inv_cdf(1 - delta) * values.std(-1) / math.sqrt(n)


def _enough(values: Tensor, delta: float) -> int:
    """How many values there are; refuses fewer than two, and a δ outside (0, 1)."""
    if not 0 < delta < 1:
        raise AuditError(f"delta must lie in (0, 1), got {delta}; 0.05 is usual")
    n = values.shape[-1]
    if n <= 1:
        raise AuditError(f"a confidence limit needs at least 2 fresh images, got {n}")
    return n


@dataclass(frozen=True, kw_only=True)
class PopulationRate:
    """Bound on the mean information about an image of the population, nats.

    With probability 1 − δ over the `n` fresh images the true rate is at most `value`. `mean` is
    their mean divergence and `range` the largest possible difference of two of them. `asymptotic`
    is the central-limit bound, which is no certificate.
    """

    value: float
    mean: float
    range: float
    n: int
    asymptotic: float
    kind: Literal["empirical Bernstein", "capacity"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Gaussian:
    """N(mean, I + S) in units of the noise, as a reference for N(z, I).

    `precision` is (I + S)^-1, or its diagonal (d,); `constant` the divergence at z = mean.
    """

    mean: Float[Tensor, " d"]
    precision: Float[Tensor, " d"] | Float[Tensor, "d d"]
    constant: float

    def divergence(self, rows: Rows) -> Float[Tensor, " n"]:
        """KL(N(z, I) ‖ N(mean, I + S)) of each row, nats."""
        centred = rows - self.mean
        turned = centred @ self.precision if self.precision.ndim > 1 else centred * self.precision
        return self.constant + 0.5 * (centred * turned).sum(1)

    def worst(self, low: Float[Tensor, " d"], high: Float[Tensor, " d"]) -> float:
        """No z in the box diverges more.

        Exact for a diagonal. A full quadratic form is bounded by its absolute values, and by
        the distance to the farthest corner, as no eigenvalue of the precision exceeds 1.
        """
        far = torch.maximum((low - self.mean).abs(), (high - self.mean).abs())
        if self.precision.ndim == 1:
            return self.constant + 0.5 * float(self.precision @ far.square())
        return self.constant + 0.5 * float(min(far @ self.precision.abs() @ far, far @ far))


@dataclass(frozen=True, kw_only=True, eq=False)
class Reference:
    r"""What z̃ is expected to look like, fixed before the fresh images are looked at.

    .. math:: q_y = (1 - \epsilon) N(m_y, D + A_y) + \epsilon N(\bar z, D + h^2 I)

    The wide second part, of half-width h around the middle z̄ of the box, makes an outlier cost at
    most the capacity: KL to a mixture is at most KL to one part, less the log of its weight.
    `absent` is for labels that the fit split does not have.
    """

    classes: Mapping[int, Gaussian]
    absent: Gaussian
    wide: Gaussian
    guard: float
    low: Float[Tensor, " d"]
    high: Float[Tensor, " d"]

    def divergence(self, rows: Rows, labels: Labels | None) -> Float[Tensor, " n"]:
        """Bound on KL(N(z, I) ‖ q_y) of each row; the rows come out ordered by label."""
        parts = by_class(rows, labels)
        narrow = torch.cat(
            [self.classes.get(c, self.absent).divergence(part) for c, part in parts.items()]
        )
        if not self.guard:
            return narrow
        wide = self.wide.divergence(torch.cat(list(parts.values())))
        return torch.minimum(narrow - math.log1p(-self.guard), wide - math.log(self.guard))

    @property
    def range(self) -> float:
        """Largest possible difference of two values of `divergence`, for any labels and z."""
        every = [*self.classes.values(), self.absent]
        most = max(g.worst(self.low, self.high) for g in every)
        least = min(g.constant for g in every)
        if self.guard:
            less, more = -math.log1p(-self.guard), -math.log(self.guard)
            most = min(most + less, self.wide.worst(self.low, self.high) + more)
            least = min(least + less, self.wide.constant + more)
        return most - least


def gaussian_reference(mean: Float[Tensor, " d"], cov: Tensor) -> Gaussian:
    """The reference N(mean, I + cov), cov (d,) or (d, d) in units of the noise."""
    if cov.ndim == 1:
        precision = 1 / (1 + cov)
        logdet, trace = torch.log1p(cov).sum(), precision.sum()
    else:
        eye = torch.eye(len(mean), dtype=cov.dtype, device=cov.device)
        factor = torch.linalg.cholesky(eye + cov)
        precision = torch.cholesky_inverse(factor)
        logdet, trace = 2 * factor.diagonal().log().sum(), precision.trace()
    constant = 0.5 * float(logdet - len(mean) + trace)
    return Gaussian(mean=mean, precision=precision, constant=constant)


def _covariance(rows: Rows, kind: Covariance) -> Tensor:
    centred = rows - rows.mean(0)
    return centred.square().mean(0) if kind == "diagonal" else centred.T @ centred / len(rows)


def _only_diagonal(cov: Tensor) -> Tensor:
    return cov if cov.ndim == 1 else cov.diagonal().diag()


def _references(
    rows: Rows, labels: Labels | None, box: tuple[Tensor, Tensor], kind: Covariance, guard: float
) -> list[Reference]:
    """One reference per mix, from the moments of the rows."""
    low, high = box
    parts = by_class(rows, labels)
    own = {c: _covariance(part, kind) for c, part in parts.items()}
    pooled = torch.stack([own[c] * (len(part) / len(rows)) for c, part in parts.items()]).sum(0)
    total = _covariance(rows, kind)
    wide = gaussian_reference((low + high) / 2, ((high - low) / 2).square())
    made = []
    for self_share, pool_share in MIXES:
        rest = 1 - self_share - pool_share
        shared = pool_share * pooled + rest * _only_diagonal(pooled)
        stray = (1 - rest) * total + rest * _only_diagonal(total)
        classes = {
            c: gaussian_reference(part.mean(0), self_share * own[c] + shared)
            for c, part in parts.items()
        }
        absent = gaussian_reference(rows.mean(0), stray)
        made.append(
            Reference(classes=classes, absent=absent, wide=wide, guard=guard, low=low, high=high)
        )
    return made


def fit_reference(
    z: Rows,
    labels: Labels | None,
    *,
    noise_var: NoiseVar | None,
    low: float,
    high: float,
    covariance: Covariance = "diagonal",
    guard: float = GUARD,
) -> Reference:
    """A reference from the moments of the fit split, in units of the noise.

    Each mix of covariances is fitted on every second image and tried on the others; the best one
    is then fitted on all. `guard` is the weight of the wide part; 0 leaves it out.
    """
    if not 0 <= guard < 1:
        raise AuditError(f"guard must lie in [0, 1), got {guard}; {GUARD} is usual")
    if len(z) <= 1:
        raise AuditError(f"the fit split needs at least 2 images, got {len(z)}")
    low, high = inside_box(z, low, high)
    rows = whiten(z, noise_var)
    root = noise_variance(noise_var, z.shape[1], z.device).sqrt()
    box = (low / root, high / root)
    half = None if labels is None else labels[::2]
    other = None if labels is None else labels[1::2]
    tried = [
        r.divergence(rows[1::2], other).mean()
        for r in _references(rows[::2], half, box, covariance, guard)
    ]
    best = int(torch.stack(tried).argmin())
    return _references(rows, labels, box, covariance, guard)[best]


def inside_box(z: Rows, low: float, high: float) -> tuple[float, float]:
    """The box in the precision of z; refuses z outside it."""
    check_box(low, high)
    edges = torch.tensor([low, high], dtype=z.dtype).double().tolist()
    low, high = min(low, edges[0]), max(high, edges[1])  # 0.1 clips float32 to 0.100000001
    least, most = (float(v) for v in torch.aminmax(z)) if z.numel() else (low, high)
    if not low <= least <= most <= high:
        raise AuditError(
            f"no certificate: z is not bounded by [{low:g}, {high:g}], got values from {least:g} "
            f"to {most:g}; add a clip stage before the noise"
        )
    return low, high


def population_rate(
    fit_z: Float[Tensor, "m d"],
    fit_y: Int64[Tensor, " m"] | None,
    fresh_z: Float[Tensor, "n d"],
    fresh_y: Int64[Tensor, " n"] | None,
    *,
    noise_var: NoiseVar | None,
    low: float,
    high: float,
    delta: float = 0.05,
    covariance: Covariance = "diagonal",
    guard: float = GUARD,
) -> PopulationRate:
    """Upper bound on I(x; z̃), or on I(x; z̃ | y) with labels, at confidence 1 − δ.

    The fresh images must be independent draws from the population that were not used in training,
    in selection or in the fit split; `certify` refuses those that overlap.

    Args:
        fit_z: Clean z of the fit split.
        fit_y: Its labels, or None.
        fresh_z: Clean z of the fresh images.
        fresh_y: Their labels, or None.
        noise_var: Variance of the noise, for all of z or one per number, > 0.
        low: Least possible value of z.
        high: Largest possible value of z.
        delta: Chance that the bound does not hold, in (0, 1).
        covariance: Of the reference: "diagonal" or "full".
        guard: Weight of the reference's wide part, in [0, 1).
    """
    if (fit_y is None) != (fresh_y is None):
        raise AuditError("labels must be given for both splits, or for neither")
    low, high = inside_box(fresh_z, low, high)
    reference = fit_reference(
        fit_z, fit_y, noise_var=noise_var, low=low, high=high, covariance=covariance, guard=guard
    )
    values = reference.divergence(whiten(fresh_z, noise_var), fresh_y)
    span = reference.range
    limit = float(empirical_bernstein(values, span, delta))
    most = capacity(noise_var, low, high, fit_z.shape[1])
    return PopulationRate(
        value=min(limit, most),
        mean=float(values.mean()),
        range=span,
        n=len(values),
        asymptotic=float(central_limit(values, delta)),
        kind="empirical Bernstein" if limit < most else "capacity",
    )


def identification_error(rate_nats: float, n: int) -> float:
    r"""Lower bound on the error of picking the right one of n equally likely images (Fano).

    .. math:: P_{err} \ge 1 - (I + \log 2) / \log n

    An error where it excludes nothing (vacuous): I ≥ log n − log 2.

    >>> identification_error(0.0, 4), identification_error(math.log(2), 16)
    (0.5, 0.5)
    """
    if n <= 1:
        raise AuditError(f"identification needs at least 2 images, got {n}")
    if math.isnan(rate_nats) or rate_nats < 0:
        raise AuditError(f"a rate must be at least 0 nats, got {rate_nats}")
    if rate_nats >= math.log(n / 2):
        raise AuditError(
            f"vacuous: {rate_nats:.4g} nats are not below log {n} − log 2 = "
            f"{math.log(n / 2):.4g}, so Fano's bound excludes nothing"
        )
    return 1 - (rate_nats + math.log(2)) / math.log(n)


def same_class_error(spectrum: Spectrum, beyond: float = 0.0) -> float:
    r"""Lower bound on the error of picking the right image among those of its known class.

    .. math:: P_{err} \ge \sum_c \frac{N_c}{N} [1 - (I_c + \log 2) / \log N_c]_+

    `beyond` are nats that the attacker learns besides, added to each class's rate I_c. An error
    where it excludes nothing (vacuous): every class has a term of 0.
    """
    total = 0.0
    for rate, count in zip(spectrum.rates().tolist(), spectrum.count.tolist(), strict=True):
        if count > 1:
            nats = rate + beyond + math.log(2)
            total += count * max(0.0, 1 - nats / math.log(count))
    if total <= 0:
        raise AuditError("vacuous: no class's rate is below the log of half its images")
    return total / int(spectrum.count.sum())


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Errors of the optimal test between two images, over all pairs of `images` images.

    `least` is the error for the pair that is easiest to tell apart; 0.5 is a coin flip. With many
    images, `median` is over pairs of some that are evenly spread.
    """

    least: float
    median: float
    most: float
    images: int


def pair_error(distance: Float[Tensor, "*pairs"], repeats: int = 1) -> Float[Tensor, "*pairs"]:
    r"""Error of the optimal test between two equally likely images.

    .. math:: \Phi(-\sqrt{k}\, \Vert D^{-1/2} (z - z') \Vert / 2)

    `distance` is ‖D^-½(z − z')‖, `repeats` the number k of independent draws.

    >>> round(float(pair_error(torch.tensor(2.0), repeats=4)), 6)  # Φ(−2)
    0.02275
    """
    error: Tensor = torch.special.ndtr(-0.5 * math.sqrt(repeats) * distance.double())
    return error


def pairwise_error(
    z: Float[Tensor, "n d"], noise_var: NoiseVar | None, repeats: int = 1, limit: int = PAIRED
) -> Pairs:
    """The optimal errors over all pairs of a gallery; the median over at most `limit` images.

    >>> z = torch.tensor([[0.0], [1.0], [4.0]])
    >>> found = pairwise_error(z, 1.0)
    >>> [round(v, 6) for v in (found.most, found.median, found.least)]  # Φ(−½), Φ(−3/2), Φ(−2)
    [0.308538, 0.066807, 0.02275]
    """
    if len(z) <= 1:
        raise AuditError(f"a pair needs 2 images, got {len(z)}")
    rows, n = whiten(z, noise_var), min(len(z), limit)
    chosen = torch.arange(n, device=z.device) * len(z) // n
    largest, smallest = _extremes(rows)
    # `pdist` and `cdist` round differently; the median must stay between the extremes.
    middle = torch.nn.functional.pdist(rows[chosen]).median().clamp(smallest, largest)
    marks = torch.stack([largest, smallest, middle])
    least, most, median = pair_error(marks, repeats).tolist()
    return Pairs(least=least, median=median, most=most, images=len(z))


def _extremes(rows: Float[Tensor, "n d"]) -> tuple[Tensor, Tensor]:
    """The largest and the smallest distance of two rows."""
    largest, smallest = rows.new_zeros(()), rows.new_full((), math.inf)
    for start, part in zip(range(0, len(rows), CHUNK), torch.split(rows, CHUNK), strict=True):
        apart = torch.cdist(part, rows)
        largest = torch.maximum(largest, apart.max())
        apart.diagonal(start).fill_(math.inf)
        smallest = torch.minimum(smallest, apart.min())
    return largest, smallest


def matcher_errors(
    z: Float[Tensor, "n d"], noise_var: NoiseVar | None, generator: Generator, repeats: int = 1
) -> int:
    """How many of n sent images the optimal matcher takes for another of the n.

    The attacker holds the list of images and the encoder, and gets each image `repeats` times. If
    all images are equally likely, the optimal guess is the nearest listed z, in units of the noise.
    """
    rows = whiten(z, noise_var)
    sent = rows + normal_like(rows, generator) / math.sqrt(repeats)
    size = rows.square().sum(1)
    wrong = torch.zeros((), dtype=torch.int64, device=rows.device)
    for start, part in zip(range(0, len(rows), CHUNK), torch.split(sent, CHUNK), strict=True):
        guess = (size - 2 * part @ rows.T).argmin(1)
        own = torch.arange(start, start + len(part), device=rows.device)
        wrong += (guess != own).sum()
    return int(wrong)


def beaten(errors: int, n: int, at_least: float) -> bool:
    """Whether so few errors in n tries contradict an error probability of `at_least`.

    They do if the chance of so few or fewer is below 1 − `LEVEL`. `at_least` may bound the mean of
    unequal probabilities: few errors are likeliest if all are equal (Hoeffding 1956).

    >>> beaten(0, 28, 0.1), beaten(0, 29, 0.1)  # 0.9^28 = 0.052, 0.9^29 = 0.047
    (False, True)
    """
    if errors >= at_least * n - 1:  # as many as expected; Hoeffding's theorem ends here
        return False
    return float(bdtr(errors, n, at_least)) < 1 - LEVEL


def repeats_until_double(rate: Callable[[int], float], limit: int = 1024) -> int | None:
    """The smallest number of sendings k ≤ limit with rate(k) ≥ 2·rate(1); None if there is none.

    `rate` must not fall with k, as k is found by bisection.

    >>> repeats_until_double(lambda k: math.log(1 + k))  # log 4 = 2 log 2
    3
    """
    once = rate(1)
    if not once > 0:
        raise AuditError(f"nothing to double: the rate of one sending is {once}")
    sendings = range(1, limit + 1)
    at = bisect_left(sendings, 2 * once * (1 - _ROUNDING), key=rate)
    return sendings[at] if at < limit else None
