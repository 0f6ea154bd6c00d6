"""ResSFL's defence: a decoder is trained along, and the encoder pays for what it rebuilds."""

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


def explained_share(guess: Tensor, x: Tensor) -> Tensor:
    r"""Share of the images' variance that a guess explains: 1 is a copy, 0 the mean image.

    .. math:: E = 1 - \frac{\|\hat x - x\|^2}{\|x - \bar x\|^2}

    guess and x are (n, …); x̄ is each pixel's mean over the n images. If all images are equal, their
    variance counts as 1e-6 per pixel.

    >>> x = torch.tensor([[0.0], [1.0]])
    >>> float(explained_share(torch.tensor([[0.25], [0.75]]), x))
    0.75
    """
    around = (x - x.mean(0)).square().sum()
    return 1 - (guess - x).square().sum() / around.clamp_min(1e-6 * x.numel())


class DecodingAdversary(nn.Module):
    r"""A decoder N4C64 that maximises a similarity S, and a hinge on the S it reaches.

    .. math:: L_D = 1 - S(D(z), x), \quad
        L_{enc} = \alpha \max(0, S(D(z), x) - t)

    z (n, c, h, w) is clean, x (n, c', h', w') in [0, 1]. For L_enc, D is frozen and in eval mode,
    as it would be after training.

    Args:
        wire_shape: Shape of one image's smashed data.
        image_shape: Shape of one image (c, h, w).
        strength: α ≥ 0.
        threshold: t, the similarity that costs nothing.
        lr: Adam's rate for D.
        measure: S: `ssim`, or `explained`, the explained share of the images' variance.
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
        """1 − S of the decoder's images."""
        self.decoder.train()
        return 1 - self._likeness(self.decoder(z.detach()), x)

    def penalty(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """L_enc; call it after `own_loss`, which updates the BatchNorm statistics it uses."""
        self.decoder.eval()
        # Detached copies, not requires_grad_(False): `own_loss` of this step needs their gradient.
        frozen = {k: v.detach() for k, v in self.decoder.named_parameters()}
        found = self._likeness(functional_call(self.decoder, frozen, (z,)), x)
        return self.strength * torch.relu(found - self.threshold)

    def _likeness(self, guess: Tensor, x: Tensor) -> Tensor:
        """S in float32; bfloat16 is too coarse for its variances."""
        similarity = ssim if self.measure == "ssim" else explained_share
        with torch.autocast(x.device.type, enabled=False):
            return similarity(guess.float(), x.float())


@dataclass(frozen=True, kw_only=True)
class Arl(NoiseOnly):
    """Noise on the wire and a decoder as adversary: ResSFL (CVPR 2022), Noise_ARL in CEM's tables.

    The decoder takes one step per batch, on training images only. Unlike the published one it is
    not trained alone for thirty epochs first, and it reads z from the encoder's own pass.

    Args:
        arl_strength: α ≥ 0; 0 is training with noise alone.
        ssim_threshold: SSIM in [−1, 1] that costs nothing; for `arl_measure="ssim"`.
        adversary_lr: Adam's rate for the decoder, > 0.
        arl_measure: What both optimise: `ssim`, or `explained`, the squared error in units of the
            images' variance.
        explained_threshold: Share of the variance that the decoder may explain, in [0, 1].
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
        """The threshold of the chosen measure."""
        return self.ssim_threshold if self.arl_measure == "ssim" else self.explained_threshold
