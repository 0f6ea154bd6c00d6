"""NoPeek: the encoder pays for the distance correlation of images and smashed data."""

from dataclasses import dataclass

from torch import Tensor

from splitveil.defences.base import FixedPenalty, NoiseOnly, NonNegative, Shape, TrainedBeside
from splitveil.functional import distance_correlation
from splitveil.nets.split import SplitModel


class DistanceCorrelation(FixedPenalty):
    r"""A price on the distance correlation of images and smashed data.

    .. math:: L_{enc} = \alpha\, \mathrm{dCor}(x, z)

    z (n, …) is clean, x (n, c, h, w).
    """

    def __init__(self, strength: float) -> None:
        super().__init__()
        self.strength = strength

    def penalty(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """L_enc, in [0, α]."""
        return self.strength * distance_correlation(x, z)


@dataclass(frozen=True, kw_only=True)
class NoPeek(NoiseOnly):
    """Noise on the wire and a penalty on dCor(x, z): NoPeek (ICDM workshops 2020).

    With noise it is Noise_NoPeek of CEM's tables; the published defence adds none (`noise_std` 0).

    Args:
        nopeek_strength: α ≥ 0; 0 is training with noise alone.
    """

    nopeek_strength: NonNegative = 0.3

    def companion(self, model: SplitModel, image_shape: Shape, num_classes: int) -> TrainedBeside:
        """The price; none at strength 0."""
        return DistanceCorrelation(self.nopeek_strength) if self.nopeek_strength else None
