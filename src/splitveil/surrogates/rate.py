r"""The rate: how many nats about the sample the channel lets through beyond its class.

.. math::
    I(x; \tilde z | y) \le \tfrac12 \sum_c p_c \log\det(I + \Sigma_c/\sigma^2)
                        \le \tfrac12 \sum_c p_c \sum_j \log(1 + \sigma_{cj}^2/\sigma^2)
"""

from typing import Literal

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from splitveil.surrogates.base import (
    BankedSurrogate,
    ByClass,
    ClassBatch,
    PerClass,
    PerSample,
    SurrogateOutput,
    check_noise,
    class_moments,
    compare_rates,
    diagonal_rate,
    intra_class_mse,
    one_of,
    uniform_weights,
)
from splitveil.surrogates.kmeans import cell_covariance

Covariance = Literal["diagonal", "full"]


def full_rate(batch: ClassBatch, weight: PerSample, mean: ByClass, noise_std: float) -> PerClass:
    r"""Rate of each class from its full covariance, nats per dimension.

    .. math:: R_c = \frac{1}{2d} \log\det(I + \Sigma_c/\sigma^2), \qquad
        \Sigma_c = \sum_i \alpha_i (z_i - \mu_c)(z_i - \mu_c)^\top

    Batch ∪ bank of n rows, b of them the batch's, takes whichever of two exact forms needs fewer
    numbers: `gram_rate` n², `covariance_rate` c·d·(d + b). A batch alone takes the first. Both
    multiply and factor in float64, which TF32 does not touch: where Σ/σ² is large and of low rank,
    float32 loses the determinant altogether.
    """
    dims = batch.z.shape[1]
    by_class = 0 if batch.own is None else batch.num_classes * dims * (dims + batch.own)
    form = covariance_rate if by_class and len(batch.z) ** 2 > by_class else gram_rate
    return form(batch, weight, mean, noise_std)


def gram_rate(batch: ClassBatch, weight: PerSample, mean: ByClass, noise_std: float) -> PerClass:
    r"""`full_rate` through one Gram matrix of all rows.

    .. math:: \log\det(I_d + \Sigma_c/\sigma^2) = \log\det(I_{M_c} + G_c/\sigma^2), \quad
        G_{ij} = \sqrt{\alpha_i \alpha_j} (z_i - \mu_c)\cdot(z_j - \mu_c)

    All classes share one (n, n) matrix: entries between classes are 0, so the Cholesky factor
    keeps the blocks and each class's determinant is read off its own rows of the diagonal.
    """
    root = weight.clamp_min(torch.finfo(weight.dtype).tiny).sqrt()
    centred = (root[:, None] * (batch.z - mean[batch.y])).double()  # (n, d)
    same = batch.y[:, None] == batch.y[None, :]
    gram = torch.where(same, centred @ centred.T, 0.0) / noise_std**2  # (n, n)
    eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    factor = torch.linalg.cholesky_ex(gram + eye).L
    logdet = 2.0 * torch.log(factor.diagonal())  # (n,)
    per_class = torch.zeros_like(batch.count, dtype=logdet.dtype).index_add(0, batch.y, logdet)
    return (0.5 * per_class / batch.z.shape[1]).to(batch.z)


def covariance_rate(
    batch: ClassBatch, weight: PerSample, mean: ByClass, noise_std: float
) -> PerClass:
    """`full_rate` of batch ∪ bank from one d × d covariance per class.

    The rows after the first `batch.own` come in equal blocks, one per class but the last, which
    never counts and gets 0. Because Σ_i α_i (z_i − μ_c) = 0, Σ_c has no gradient through μ_c, and
    the bank's part of it needs none at all.
    """
    classes = batch.num_classes - 1
    centred = (batch.z - mean.detach()[batch.y]).double()
    kinds = torch.arange(classes, device=batch.y.device)[:, None]
    member = torch.where(kinds == batch.y[: batch.own], weight[: batch.own], 0.0)
    cov = cell_covariance(centred[: batch.own], member)  # (c − 1, d, d)
    with torch.no_grad():
        held = torch.where(batch.y < classes, weight, 0.0)[batch.own :]
        rows = held.sqrt()[:, None] * centred[batch.own :]
        blocks = rearrange(rows, "(c k) d -> c k d", c=classes)
        stored = blocks.mT @ blocks
    eye = torch.eye(cov.shape[2], dtype=cov.dtype, device=cov.device)
    factor = torch.linalg.cholesky_ex((cov + stored) / noise_std**2 + eye).L
    logdet = 2.0 * torch.log(factor.diagonal(dim1=1, dim2=2)).sum(1)
    return F.pad(0.5 * logdet / batch.z.shape[1], (0, 1)).to(batch.z)


class Rate(BankedSurrogate):
    """The rate with uniform weights, nats per dimension: the honest surrogate, no parameters.

    `covariance="full"` uses the whole covariance of each class. A batch with M_c samples of a
    class spans at most M_c − 1 directions, so below M_c ≫ d it reports far too little
    (d = 512, M = 51: 28 % of the truth). `bank` rows of each class, the last ones seen in train
    mode, join the batch's in every statistic: make them many times d.
    """

    def __init__(
        self,
        feature_dim: int,
        num_classes: int,
        *,
        noise_std: float,
        covariance: Covariance = "diagonal",
        bank: int = 0,
    ) -> None:
        super().__init__(feature_dim, num_classes, bank)
        one_of("covariance", covariance, ("diagonal", "full"))
        check_noise(noise_std)
        self.noise_std, self.covariance = noise_std, covariance
        if not bank:
            self.skips = None  # without a bank no gradient is scaled, so none can be skipped

    def forward(self, z: Tensor, y: Tensor) -> SurrogateOutput:
        """Rate of the batch z (n, d) or (n, c, h, w) with labels y (n,)."""
        with torch.autocast(z.device.type, enabled=False):
            batch = self.batch_of(z, y)
            weight = uniform_weights(batch.y, batch.count)
            moments = class_moments(batch.z, weight, batch.y, batch.num_classes)
            loss = batch.average(diagonal_rate(moments.var, self.noise_std))
            true = loss.detach()  # uniform weights, raw z
            if self.covariance == "full":
                loss = batch.average(full_rate(batch, weight, moments.mean, self.noise_std))
            if batch.own is None:
                intra = batch.average(moments.var.detach().mean(1))
            else:
                intra = intra_class_mse(batch.z, moments.mean, batch)
            found = compare_rates(true, batch, self.noise_std, true) | {
                "attention_weights": weight[: batch.own],
                "effective_sample_size": torch.ones_like(true),
            }
            return SurrogateOutput(loss=loss, intra_mse=intra, diagnostics=found)
