"""ResSFL's defence: the encoder pays for what a decoder, trained beside it, can rebuild."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from splitveil.defences.base import NoiseOnly, Shape
from splitveil.errors import ConfigError
from splitveil.nets import ResidualDecoder, SplitModel
from splitveil.similarity import ssim


class DecodingAdversary(nn.Module):
    r"""A decoder N4C64 that maximises SSIM, and the hinge on what it reaches.

    .. math:: L_D = 1 - \mathrm{SSIM}(D(z), x), \quad
        L_{enc} = \alpha \max(0, \mathrm{SSIM}(D(z), x) - t)

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
    ) -> None:
        super().__init__()
        self.decoder = ResidualDecoder(wire_shape, image_shape, width=64, blocks=4)
        self.strength, self.threshold, self.lr = strength, threshold, lr

    def learn(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """1 − SSIM of what it rebuilds."""
        del y
        self.decoder.train()
        return 1 - _similarity(self.decoder(z.detach()), x)

    def penalty(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The encoder's share; call it after `learn`, which moves the statistics it reads."""
        del y
        self.decoder.eval()
        frozen = {k: v.detach() for k, v in self.decoder.named_parameters()}
        found = _similarity(functional_call(self.decoder, frozen, (z,)), x)
        return self.strength * torch.relu(found - self.threshold)


def _similarity(guess: Tensor, x: Tensor) -> Tensor:
    """SSIM in float32: bfloat16 would drown its variances."""
    with torch.autocast(x.device.type, enabled=False):
        return ssim(guess.float(), x.float())


@dataclass(frozen=True, kw_only=True)
class Arl(NoiseOnly):
    """Noise on the wire and a decoder as adversary: ResSFL (CVPR 2022), Noise_ARL in CEM's tables.

    The published values are `arl_strength` .3, `ssim_threshold` .5 and Adam 1e-3; the decoder
    takes one step per batch, on training images only. Unlike the published one it is not trained
    alone for thirty epochs first, and it sees z as the encoder's own pass made it.
    """

    arl_strength: float = 0.3
    ssim_threshold: float = 0.5
    adversary_lr: float = 1e-3

    def __post_init__(self) -> None:
        for name, value, good in (
            ("arl_strength", self.arl_strength, 0 <= self.arl_strength < float("inf")),
            ("adversary_lr", self.adversary_lr, 0 < self.adversary_lr < float("inf")),
            ("ssim_threshold", self.ssim_threshold, -1 <= self.ssim_threshold <= 1),
        ):
            if not good:
                raise ConfigError(f"{name} is out of range, got {value}; published: .3, 1e-3, .5")

    def companion(
        self, model: SplitModel, image_shape: Shape, num_classes: int
    ) -> nn.Module | None:
        """The decoder; none at strength 0, which is training with noise alone."""
        del num_classes
        if self.arl_strength == 0:
            return None
        return DecodingAdversary(
            model.wire_shape(image_shape),
            image_shape,
            strength=self.arl_strength,
            threshold=self.ssim_threshold,
            lr=self.adversary_lr,
        )
