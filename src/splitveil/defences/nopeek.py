"""NoPeek: the encoder pays for the distance correlation of images and smashed data."""

from dataclasses import dataclass

from torch import Tensor

from splitveil.defences.base import FixedPenalty, NoiseOnly, NonNegative, Shape, TrainedBeside
from splitveil.functional import distance_correlation
from splitveil.nets.split import SplitModel


class DistanceCorrelation(FixedPenalty):
    r"""Has nothing to learn; the encoder pays α·dCor(x, z).

    .. math:: L_{enc} = \alpha\, \mathrm{dCor}(x, z)

    z (n, …) is clean, x (n, c, h, w).
    """

    def __init__(self, strength: float) -> None:
        super().__init__()
        self.strength = strength

    def penalty(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The encoder's share, between 0 and α."""
        return self.strength * distance_correlation(x, z)


@dataclass(frozen=True, kw_only=True)
class NoPeek(NoiseOnly):
    """Noise on the wire and a penalty on dCor(x, z): NoPeek (ICDM workshops 2020).

    The published defence adds no noise (`noise_std` 0 does that); with it, it is Noise_NoPeek of
    CEM's tables. `nopeek_strength` is α; 0 is training with noise alone.
    """

    nopeek_strength: NonNegative = 0.3

    def companion(self, model: SplitModel, image_shape: Shape, num_classes: int) -> TrainedBeside:
        """What measures the dependence; none at strength 0."""
        return DistanceCorrelation(self.nopeek_strength) if self.nopeek_strength else None
