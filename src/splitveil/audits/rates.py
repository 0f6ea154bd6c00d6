r"""Upper bounds, in nats, on what smashed data z̃ = z + n, n ~ N(0, D), tells of the image.

.. math::
    I(x; \tilde z \mid y) \le E\, KL(N(z, D) \,\|\, q_y) \quad\text{for every fixed } q_y

A gallery is a finite list, so its best Gaussian q is known exactly. A population is only sampled:
q is fixed on one part of the data, and the mean over another part gets a confidence limit.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from splitveil.errors import AuditError

Covariance = Literal["diagonal", "full"]
NoiseVar = float | Float[Tensor, " d"]


def noise_variance(
    noise_var: NoiseVar | None, dims: int, device: torch.device | str = "cpu"
) -> Float[Tensor, " d"]:
    """The diagonal of D in float64; refuses a channel without noise, or of unknown noise."""
    if noise_var is None:
        raise AuditError(
            "no certificate: noise of unknown scale; use a channel whose noise is Gaussian, of a "
            "stated standard deviation, and independent of the image"
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


def by_class(
    rows: Float[Tensor, "n d"], labels: Int64[Tensor, " n"] | None
) -> dict[int, Float[Tensor, "_ d"]]:
    """The rows of each label, labels ascending; all rows under 0 without labels."""
    if labels is None:
        return {0: rows}
    kinds, count = torch.unique(labels, return_counts=True)
    parts = torch.split(rows[labels.argsort(stable=True)], count.tolist())
    return dict(zip(kinds.tolist(), parts, strict=True))


@dataclass(frozen=True, kw_only=True, eq=False)
class Spectrum:
    """Signal-to-noise ratios of a gallery: eigenvalues (c, m) of D^-½ Cov_c D^-½, padded with 0.

    `count` (c,) are the images of each class. Without labels there is one class.
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
    """Signal-to-noise ratios of the listed images, by the plug-in (1/N) covariance."""
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


def gallery_rate(
    z: Float[Tensor, "n d"],
    noise_var: NoiseVar | None,
    labels: Int64[Tensor, " n"] | None = None,
    covariance: Covariance = "diagonal",
    repeats: int = 1,
) -> float:
    r"""Bound on I(x; z̃), given the class where labels are, for x uniform over N listed images.

    .. math:: I \le \sum_c \frac{N_c}{N} \tfrac12 \log\det(I + k D^{-1} \mathrm{Cov}_c)

    It holds exactly, without an interval: the covariance is that of the list itself.

    >>> gallery_rate(torch.tensor([[-1.0], [1.0]]), 1.0) == 0.5 * math.log(2)
    True
    """
    return gallery_spectrum(z, noise_var, labels, covariance).rate(repeats)


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
    """Refuse bounds that are none."""
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
    """How many values there are; refuses one, and a δ that is no probability."""
    if not 0 < delta < 1:
        raise AuditError(f"delta must lie in (0, 1), got {delta}; 0.05 is usual")
    n = values.shape[-1]
    if n <= 1:
        raise AuditError(f"a confidence limit needs at least 2 fresh images, got {n}")
    return n
