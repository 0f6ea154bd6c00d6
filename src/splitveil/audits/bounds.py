r"""The rate of a population of images, of which only samples are known.

.. math:: KL(N(z, D) \,\|\, N(m, D + A)) = \tfrac12 [\log\det(I + D^{-1}A)
    - \mathrm{tr}((D + A)^{-1}A) + (z - m)^\top (D + A)^{-1} (z - m)]

Its mean over all images bounds I(x; z̃ | y), whatever (m, A) are, if they were fixed beforehand.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from splitveil.audits.rates import (
    Covariance,
    NoiseVar,
    by_class,
    capacity,
    central_limit,
    check_box,
    empirical_bernstein,
    noise_variance,
    whiten,
)
from splitveil.errors import AuditError

GUARD = 1e-3  # costs 0.001 nats where it is not needed, and divides the range by hundreds
# How much of a class's covariance is its own and how much the classes' mean covariance; the rest
# is the diagonal of that mean. One of them is picked on the fit split.
MIXES = (
    (1.0, 0.0), (0.9, 0.1), (0.7, 0.3), (0.3, 0.7), (0.0, 1.0),
    (0.6, 0.3), (0.3, 0.4), (0.0, 0.9), (0.0, 0.6), (0.0, 0.3), (0.0, 0.0),
)  # fmt: skip

Rows = Float[Tensor, "n d"]
Labels = Int64[Tensor, " n"]


@dataclass(frozen=True, kw_only=True)
class PopulationRate:
    """Bound on the mean information about an image of the population, nats.

    `value` is not exceeded by the true rate with probability 1 − `delta` over the `n` fresh images;
    `mean` is what they measured, `range` how far apart two of them could lie. `asymptotic` is the
    central-limit bound: no certificate.
    """

    value: float
    mean: float
    range: float
    n: int
    delta: float
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

    The wide second part, of half-width h around the middle z̄ of the box, keeps a stray image from
    costing more than the capacity: KL to a mixture is at most KL to a part less its log weight.
    `absent` serves labels that the fit split does not have.
    """

    classes: Mapping[int, Gaussian]
    absent: Gaussian
    wide: Gaussian
    guard: float
    low: Float[Tensor, " d"]
    high: Float[Tensor, " d"]

    def divergence(self, rows: Rows, labels: Labels | None) -> Float[Tensor, " n"]:
        """Bound on KL(N(z, I) ‖ q_y) of each row, in the order of the labels."""
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
        """No two values of `divergence` lie farther apart, whatever labels and z in the box."""
        every = [*self.classes.values(), self.absent]
        most = max(g.worst(self.low, self.high) for g in every)
        least = min(g.constant for g in every)
        if self.guard:
            less, more = -math.log1p(-self.guard), -math.log(self.guard)
            most = min(most + less, self.wide.worst(self.low, self.high) + more)
            least = min(least + less, self.wide.constant + more)
        return most - least


def gaussian(mean: Float[Tensor, " d"], cov: Tensor) -> Gaussian:
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
    wide = gaussian((low + high) / 2, ((high - low) / 2).square())
    made = []
    for self_share, pool_share in MIXES:
        rest = 1 - self_share - pool_share
        shared = pool_share * pooled + rest * _only_diagonal(pooled)
        stray = (1 - rest) * total + rest * _only_diagonal(total)
        classes = {
            c: gaussian(part.mean(0), self_share * own[c] + shared) for c, part in parts.items()
        }
        absent = gaussian(rows.mean(0), stray)
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
    """Moments of the fit split in units of the noise.

    Fitted on every second image, each mix of covariances is tried on the others; the best is
    then fitted on all. `guard` is the weight of the wide part; 0 leaves it out.
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
    """The box as numbers of z's own type; refuses z outside it."""
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
    """Upper bound on I(x; z̃), or I(x; z̃ | y) with labels, at confidence 1 − δ.

    The fresh images must be independent draws of the population that neither training nor
    selection nor the fit split has seen; `certify` refuses those that overlap.
    """
    if (fit_y is None) != (fresh_y is None):
        raise AuditError("labels must be given for both splits, or for neither")
    low, high = inside_box(fresh_z, low, high)
    reference = fit_reference(
        fit_z,
        fit_y,
        noise_var=noise_var,
        low=low,
        high=high,
        covariance=covariance,
        guard=guard,
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
        delta=delta,
        asymptotic=float(central_limit(values, delta)),
        kind="empirical Bernstein" if limit < most else "capacity",
    )
