r"""The rate: how many nats about the sample the channel lets through beyond its class.

.. math::
    I(x; \tilde z | y) \le \tfrac12 \sum_c p_c \log\det(I + \Sigma_c/\sigma^2)
                        \le \tfrac12 \sum_c p_c \sum_j \log(1 + \sigma_{cj}^2/\sigma^2)
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from splitveil.errors import ConfigError
from splitveil.surrogates.batch import ClassBatch, FirstCall, class_batch, one_of, positive
from splitveil.surrogates.segments import class_moments, uniform_weights
from splitveil.types import SurrogateOutput

Covariance = Literal["diagonal", "full"]


def diagonal_rate(var: Float[Tensor, "c d"], noise_std: float) -> Float[Tensor, " c"]:
    r"""Rate of each class from its variances, nats per dimension; minimise it.

    .. math:: R_c = \frac{1}{2d} \sum_j \log(1 + \sigma_{cj}^2/\sigma^2)

    >>> round(float(diagonal_rate(torch.tensor([[1.0]]), 1.0)), 6)  # half log two
    0.346574
    """
    return 0.5 * torch.log1p(var / noise_std**2).mean(1)


def full_rate(
    batch: ClassBatch, weight: Float[Tensor, " n"], mean: Float[Tensor, "c d"], noise_std: float
) -> Float[Tensor, " c"]:
    r"""Rate of each class from its full covariance, nats per dimension, through a Gram matrix.

    .. math:: \log\det(I_d + \Sigma_c/\sigma^2) = \log\det(I_{M_c} + G_c/\sigma^2), \quad
        G_{ij} = \sqrt{\alpha_i \alpha_j} (z_i - \mu_c)\cdot(z_j - \mu_c)

    All classes share one (n, n) matrix: entries between classes are 0, so the Cholesky factor
    keeps the blocks and each class's determinant is read off its own rows of the diagonal.
    """
    root = weight.clamp_min(torch.finfo(weight.dtype).tiny).sqrt()
    centred = root[:, None] * (batch.z - mean[batch.y])  # (n, d)
    same = batch.y[:, None] == batch.y[None, :]
    gram = torch.where(same, centred @ centred.T, 0.0) / noise_std**2  # (n, n)
    eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    factor = torch.linalg.cholesky_ex(gram + eye).L
    logdet = 2.0 * torch.log(factor.diagonal())  # (n,)
    per_class = torch.zeros_like(batch.count).index_add(0, batch.y, logdet)
    return 0.5 * per_class / batch.z.shape[1]


def true_rate(batch: ClassBatch, noise_std: float) -> Float[Tensor, ""]:
    """Diagonal rate of the raw batch under uniform weights, nats per dimension; NaN if σ = 0."""
    if noise_std == 0:
        return batch.z.new_full((), torch.nan)
    with torch.no_grad():
        weight = uniform_weights(batch.y, batch.count)
        var = class_moments(batch.z, weight, batch.y, batch.num_classes).var
        return batch.average(diagonal_rate(var, noise_std))


def rate_diagnostics(
    var: Float[Tensor, "c d"], batch: ClassBatch, noise_std: float
) -> dict[str, Tensor]:
    """`true_rate`, and what the surrogate's own variances say as a share of it.

    `surrogate_to_true` is the diagonal rate of `var` over the true rate: 1 for an honest
    estimator, near 0 for one that has talked its own estimate down.
    """
    if noise_std == 0:
        return compare_rates(batch.z.new_full((), torch.nan), batch, noise_std)
    own = batch.average(diagonal_rate(var.detach(), noise_std))
    return compare_rates(own, batch, noise_std)


def compare_rates(own: Float[Tensor, ""], batch: ClassBatch, noise_std: float) -> dict[str, Tensor]:
    """The true rate of the batch, and a surrogate's own one as a share of it."""
    true = true_rate(batch, noise_std)
    ratio = own / true.clamp_min(torch.finfo(true.dtype).tiny)
    return {"true_rate": true, "surrogate_to_true": ratio}


def intra_class_mse(
    x: Float[Tensor, "n d"], mean: Float[Tensor, "c d"], batch: ClassBatch
) -> Float[Tensor, ""]:
    r"""Σ_c p_c mean_ij (x_ij − μ_cj)², detached: a log line, unweighted within the class."""
    with torch.no_grad():
        error = (x - mean[batch.y]).square().mean(1)  # (n,)
        per_class = torch.zeros_like(batch.count).index_add(0, batch.y, error)
        return batch.average(per_class / batch.count.clamp_min(1))


class Rate(nn.Module):
    """The rate with uniform weights, nats per dimension: the honest surrogate, no parameters.

    `covariance="full"` uses the whole covariance of each class. A batch with M_c samples of a
    class spans at most M_c − 1 directions, so below M_c ≫ d it reports far too little
    (d = 512, M = 51: 28 % of the truth); give it large batches or few dimensions.
    """

    def __init__(
        self,
        feature_dim: int,
        num_classes: int,
        *,
        noise_std: float,
        covariance: Covariance = "diagonal",
    ) -> None:
        super().__init__()
        one_of("covariance", covariance, ("diagonal", "full"))
        check_noise(noise_std)
        self.feature_dim, self.num_classes = feature_dim, num_classes
        self.noise_std, self.covariance = noise_std, covariance
        self._first = FirstCall()

    def forward(self, z: Tensor, y: Tensor) -> SurrogateOutput:
        """Rate of the batch z (n, d) or (n, c, h, w) with labels y (n,)."""
        with torch.autocast(z.device.type, enabled=False):
            batch = class_batch(z, y, self.feature_dim, self.num_classes, self._first).compact()
            weight = uniform_weights(batch.y, batch.count)
            moments = class_moments(batch.z, weight, batch.y, batch.num_classes)
            if self.covariance == "diagonal":
                per_class = diagonal_rate(moments.var, self.noise_std)
            else:
                per_class = full_rate(batch, weight, moments.mean, self.noise_std)
            return SurrogateOutput(
                loss=batch.average(per_class),
                intra_mse=intra_class_mse(batch.z, moments.mean, batch),
                diagnostics={
                    "effective_sample_size": torch.ones_like(batch.share.sum()),
                }
                | rate_diagnostics(moments.var, batch, self.noise_std),
            )


def check_noise(noise_std: float) -> None:
    """Refuse a rate against a channel without noise: it would be infinite."""
    positive("noise_std", noise_std, zero=True)
    if noise_std == 0:
        raise ConfigError(
            "a rate penalty needs channel noise: noise_std must be > 0, got 0; "
            "without noise the channel lets everything through and the rate is infinite"
        )
