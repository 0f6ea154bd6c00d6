r"""The rate: how many nats about a sample pass the channel beyond the sample's class.

.. math::
    I(x; \tilde z | y) \le \tfrac12 \sum_c p_c \log\det(I + \Sigma_c/\sigma^2)
                        \le \tfrac12 \sum_c p_c \sum_j \log(1 + \sigma_{cj}^2/\sigma^2)
"""

from typing import Literal, get_args

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from splitveil.surrogates import base
from splitveil.surrogates.base import ByClass, ClassBatch, PerClass, PerSample
from splitveil.surrogates.kmeans import cell_covariance

Covariance = Literal["diagonal", "full"]


def full_rate(batch: ClassBatch, weight: PerSample, mean: ByClass, noise_std: float) -> PerClass:
    r"""Rate of each class from its full covariance, nats per dimension.

    .. math:: R_c = \frac{1}{2d} \log\det(I + \Sigma_c/\sigma^2), \qquad
        \Sigma_c = \sum_i \alpha_i (z_i - \mu_c)(z_i - \mu_c)^\top

    Of two exact forms it takes the one with fewer numbers: `gram_rate` with n², or
    `covariance_rate` with c·d·(d + b), where b of the n rows are the batch's and the others the
    bank's. A batch alone takes the first.
    """
    # Both forms multiply and factor in float64, which TF32 does not touch: where Σ/σ² is large and
    # of low rank, float32 loses the determinant altogether.
    dims = batch.z.shape[1]
    by_class = 0 if batch.own is None else batch.num_classes * dims * (dims + batch.own)
    form = covariance_rate if by_class and len(batch.z) ** 2 > by_class else gram_rate
    return form(batch, weight, mean, noise_std)


def gram_rate(batch: ClassBatch, weight: PerSample, mean: ByClass, noise_std: float) -> PerClass:
    r"""`full_rate` through one Gram matrix of all rows.

    .. math:: \log\det(I_d + \Sigma_c/\sigma^2) = \log\det(I_{M_c} + G_c/\sigma^2), \quad
        G_{ij} = \sqrt{\alpha_i \alpha_j} (z_i - \mu_c)\cdot(z_j - \mu_c)

    All classes share one (n, n) matrix. Entries between classes are 0, so its Cholesky factor is
    block diagonal, and the rows of a class give the determinant of that class.
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

    The rows after the first `batch.own` are the bank's, in equal blocks: one for each class but the
    last, which is never counted and gets 0. Because Σ_i α_i (z_i − μ_c) = 0, Σ_c has no gradient
    through μ_c; the bank's part has none at all.
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


class Rate(base.BankedSurrogate):
    r"""The rate with uniform weights: the honest surrogate of H(Z|Y), without parameters.

    .. math:: \mathrm{rob} = \sum_c p_c \frac{1}{2d} \sum_j \log(1 + \sigma_{cj}^2/\sigma^2)

    in nats per dimension; minimise it. It bounds from above what an attacker learns about a sample
    beyond its class, I(x; z̃ | y)/d.

    Args:
        feature_dim: Features per sample after flattening, d ≥ 1.
        num_classes: Number of classes, ≥ 1; labels are 0..num_classes − 1.
        noise_std: σ of the channel's Gaussian noise, > 0, in the units of z.
        covariance: `diagonal`, or `full` for (1/2d) log det(I + Σ_c/σ²), which is tighter. M_c
            samples span at most M_c − 1 directions, so without M_c ≫ d the full form reports far
            too little (d = 512, M = 51: 28 % of the truth) and needs a bank.
        bank: Rows kept of each class, ≥ 0. They join the batch in every statistic; for
            `covariance="full"` keep many times d.

    >>> surrogate = Rate(feature_dim=1, num_classes=2, noise_std=1.0)
    >>> found = surrogate(torch.tensor([[-1.0], [1.0]]), torch.tensor([0, 0]))
    >>> round(found.loss.item(), 4)  # variance 1 against noise 1: half log two
    0.3466
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
        base.one_of("covariance", covariance, get_args(Covariance))
        base.require_noise(noise_std)
        self.noise_std, self.covariance = noise_std, covariance
        if not bank:
            self.skips = None  # without a bank no gradient is scaled, so none can be skipped

    def forward(self, z: Tensor, y: Tensor) -> base.SurrogateOutput:
        """Rate of the batch z (n, d) or (n, c, h, w) with labels y (n,)."""
        with torch.autocast(z.device.type, enabled=False):
            batch = self.batch_of(z, y)
            weight = base.uniform_weights(batch.y, batch.count)
            moments = base.class_moments(batch.z, weight, batch.y, batch.num_classes)
            loss = batch.average(base.diagonal_rate(moments.var, self.noise_std))
            true = loss.detach()  # uniform weights, raw z
            if self.covariance == "full":
                loss = batch.average(full_rate(batch, weight, moments.mean, self.noise_std))
            if batch.own is None:
                intra = batch.average(moments.var.detach().mean(1))
            else:
                intra = base.intra_class_mse(batch.z, moments.mean, batch)
            found = base.compare_rates(true, batch, self.noise_std, true) | {
                "attention_weights": weight[: batch.own],
                "effective_sample_size": torch.ones_like(true),
            }
            return base.SurrogateOutput(loss=loss, intra_mse=intra, diagnostics=found)
