"""Siamese embedding: pulls smashed data of a class together and those of two classes apart."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from splitveil.defences.base import NonNegative, Penalised, Positive, Share
from splitveil.functional import distances
from splitveil.surrogates.base import (
    FirstCallCheck,
    SurrogateOutput,
    class_batch,
    class_moments,
    true_rate,
    uniform_weights,
)


def contrastive_loss(z: Tensor, y: Tensor, margin: float) -> Tensor:
    r"""Contrastive loss over all pairs of a batch z (n, d) with labels y (n,).

    .. math:: L = \frac{1}{n(n-1)} \sum_{i \ne j} \begin{cases}
        \delta_{ij}^2 & y_i = y_j \\ \max(0, m - \delta_{ij})^2 & y_i \ne y_j \end{cases},
        \qquad \delta_{ij} = \|z_i - z_j\| / \sqrt d

    δ is a root mean square difference, so that the margin m does not depend on the wire's size.

    >>> z = torch.tensor([[0.0], [0.5], [2.0]])
    >>> contrastive_loss(z, torch.tensor([0, 0, 1]), 2.0).item()  # (.5² + 0 + .5²)/3
    0.1666666716337204
    """
    gap = distances(z) / z.shape[1] ** 0.5
    same = y[:, None] == y[None, :]
    each = torch.where(same, gap, torch.relu(margin - gap)).square()
    return each.sum() / max(len(z) * (len(z) - 1), 1)  # the diagonal adds 0


class SiameseEmbedding(nn.Module):
    """The contrastive loss as a surrogate; no parameters."""

    def __init__(
        self, feature_dim: int, num_classes: int, *, noise_std: float, siamese_margin: float
    ) -> None:
        super().__init__()
        self.feature_dim, self.num_classes = feature_dim, num_classes
        self.noise_std, self.siamese_margin = noise_std, siamese_margin
        self._first = FirstCallCheck(finite=False)

    def forward(self, z: Tensor, y: Tensor) -> SurrogateOutput:
        """Loss of the batch z (n, d) or (n, c, h, w) with labels y (n,)."""
        with torch.autocast(z.device.type, enabled=False):
            batch = class_batch(z, y, self.feature_dim, self.num_classes, self._first)
            loss = contrastive_loss(batch.z, batch.y, self.siamese_margin)
            with torch.no_grad():
                weight = uniform_weights(batch.y, batch.count)
                moments = class_moments(batch.z, weight, batch.y, batch.num_classes)
                intra = batch.average(moments.var.mean(1))
                found = {
                    "true_rate": true_rate(batch, self.noise_std),
                    "effective_sample_size": torch.ones_like(intra),
                    "attention_weights": weight,
                }
            return SurrogateOutput(loss=loss, intra_mse=intra, diagnostics=found)


@dataclass(frozen=True, kw_only=True)
class Siamese(Penalised):
    """Noise on the wire and a contrastive loss on z: Osia et al. (IEEE IoT Journal 2020).

    Args:
        lambd: λ ≥ 0; 0 is training with noise alone.
        ramp: Share of the run, in [0, 1], over which λ grows to its full size.
        siamese_margin: m > 0, the root mean square difference of two classes that costs nothing.
    """

    estimator: ClassVar = SiameseEmbedding
    lambd: NonNegative = 1.0
    ramp: Share = 0.0
    siamese_margin: Positive = 0.5
