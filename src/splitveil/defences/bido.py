"""Bilateral dependency: less of the image and more of the label in z, both measured by HSIC."""

from dataclasses import dataclass

from torch import Tensor

from splitveil.defences.base import (
    FixedPenalty,
    NoiseOnly,
    NonNegative,
    Positive,
    Shape,
    TrainedBeside,
)
from splitveil.functional import gaussian_kernel, label_kernel, normalised_hsic
from splitveil.nets.split import SplitModel


class BilateralDependency(FixedPenalty):
    r"""A price on what z tells about the image, and a reward for what it tells about the label.

    .. math:: L_{enc} = \alpha\,(\mathrm{nHSIC}(x, z) - \rho\, \mathrm{nHSIC}(z, y))

    Gaussian kernels of one bandwidth on x and z, a linear one on labels. z (n, …) is clean.
    """

    def __init__(self, *, strength: float, label_share: float, bandwidth: float) -> None:
        super().__init__()
        self.strength, self.label_share, self.bandwidth = strength, label_share, bandwidth

    def penalty(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """L_enc; below 0 where z depends more on the label than on the image."""
        kernel = gaussian_kernel(z, self.bandwidth)
        leak = normalised_hsic(gaussian_kernel(x, self.bandwidth), kernel)
        use = normalised_hsic(kernel, label_kernel(y, kernel))
        return self.strength * (leak - self.label_share * use)


@dataclass(frozen=True, kw_only=True)
class Bido(NoiseOnly):
    """Noise on the wire, a penalty on HSIC(x, z) and a reward on HSIC(z, y): BiDO (KDD 2022).

    The published loss sums over many hidden layers; here z, which is what is sent, is the only one.

    Args:
        bido_strength: α ≥ 0; 0 is training with noise alone.
        bido_label_share: ρ ≥ 0, weight of the reward relative to the price.
        bido_bandwidth: Bandwidth of the Gaussian kernels, > 0, in units of √d.
    """

    bido_strength: NonNegative = 0.05
    bido_label_share: NonNegative = 10.0
    bido_bandwidth: Positive = 5.0

    def companion(self, model: SplitModel, image_shape: Shape, num_classes: int) -> TrainedBeside:
        """Price and reward; none at strength 0."""
        if self.bido_strength == 0:
            return None
        return BilateralDependency(
            strength=self.bido_strength,
            label_share=self.bido_label_share,
            bandwidth=self.bido_bandwidth,
        )
