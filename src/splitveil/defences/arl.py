"""ResSFL's defence: the encoder pays for what a decoder, trained beside it, can rebuild."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from splitveil.defences.base import NoiseOnly, Shape, TrainedBeside
from splitveil.errors import Range
from splitveil.functional import ssim
from splitveil.nets.decoder import ResidualDecoder
from splitveil.nets.split import SplitModel

Measure = Literal["ssim", "explained"]


def explained(guess: Tensor, x: Tensor) -> Tensor:
    r"""Share of the images' variance that a guess explains: 1 is a copy, 0 the mean image.

    .. math:: E = 1 - \frac{\|\hat x - x\|^2}{\|x - \bar x\|^2}

    guess and x (n, …); x̄ is the mean over the n images of each pixel. Images that are all alike
    count as having a variance of 1e-6 per pixel.

    >>> x = torch.tensor([[0.0], [1.0]])
    >>> float(explained(torch.tensor([[0.25], [0.75]]), x))
    0.75
    """
    around = (x - x.mean(0)).square().sum()
    return 1 - (guess - x).square().sum() / around.clamp_min(1e-6 * x.numel())


MEASURES: Mapping[Measure, Callable[[Tensor, Tensor], Tensor]] = {
    "ssim": ssim,
    "explained": explained,
}


class DecodingAdversary(nn.Module):
    r"""A decoder N4C64 that maximises a measure S of likeness, and the hinge on what it reaches.

    .. math:: L_D = 1 - S(D(z), x), \quad
        L_{enc} = \alpha \max(0, S(D(z), x) - t)

    z (n, c, h, w) is clean, x (n, c', h', w') in [0, 1]. The encoder's pass sees D frozen, with
    the BatchNorm statistics it would have in deployment.
    """

    def __init__(
        self,
        wire_shape: Shape,
        image_shape: Shape,
        *,
        strength: float,
        threshold: float,
        lr: float,
        measure: Measure = "ssim",
    ) -> None:
        super().__init__()
        self.decoder = ResidualDecoder(wire_shape, image_shape, width=64, blocks=4)
        self.strength, self.threshold, self.lr = strength, threshold, lr
        self.measure: Measure = measure

    def own_loss(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """1 − S of what it rebuilds."""
        self.decoder.train()
        return 1 - self._likeness(self.decoder(z.detach()), x)

    def penalty(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The encoder's share; call it after `own_loss`, which moves the statistics it reads."""
        self.decoder.eval()
        frozen = {k: v.detach() for k, v in self.decoder.named_parameters()}
        found = self._likeness(functional_call(self.decoder, frozen, (z,)), x)
        return self.strength * torch.relu(found - self.threshold)

    def _likeness(self, guess: Tensor, x: Tensor) -> Tensor:
        """S in float32: bfloat16 would drown its variances."""
        with torch.autocast(x.device.type, enabled=False):
            return MEASURES[self.measure](guess.float(), x.float())


@dataclass(frozen=True, kw_only=True)
class Arl(NoiseOnly):
    """Noise on the wire and a decoder as adversary: ResSFL (CVPR 2022), Noise_ARL in CEM's tables.

    The published values are `arl_strength` .3, `ssim_threshold` .5 and Adam 1e-3; the decoder
    takes one step per batch, on training images only. Unlike the published one it is not trained
    alone for thirty epochs first, and it sees z as the encoder's own pass made it. With
    `arl_measure` "explained" both play for the squared error instead, in units of the images'
    variance, and `explained_threshold` is the share that the decoder may explain.
    """

    arl_strength: Annotated[float, Range(0, hint="published: 0.3")] = 0.3
    ssim_threshold: Annotated[float, Range(-1, 1, hint="published: 0.5")] = 0.5
    adversary_lr: Annotated[float, Range(0, above=True, hint="published: 0.001")] = 1e-3
    arl_measure: Measure = "ssim"
    explained_threshold: Annotated[
        float, Range(0, 1, hint="0.3 lets the decoder explain 30 % of the images' variance")
    ] = 0.3

    def companion(self, model: SplitModel, image_shape: Shape, num_classes: int) -> TrainedBeside:
        """The decoder; none at strength 0, which is training with noise alone."""
        if self.arl_strength == 0:
            return None
        return DecodingAdversary(
            model.wire_shape(image_shape),
            image_shape,
            strength=self.arl_strength,
            threshold=self.threshold,
            lr=self.adversary_lr,
            measure=self.arl_measure,
        )

    @property
    def threshold(self) -> float:
        """The one of the measure that is played for."""
        return self.ssim_threshold if self.arl_measure == "ssim" else self.explained_threshold
