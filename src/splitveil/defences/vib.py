"""The variational information bottleneck: learned Gaussian noise, and a price on its use."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from splitveil.defences.base import (
    Defence,
    FixedPenalty,
    NonNegative,
    Positive,
    Shape,
    TrainedBeside,
)
from splitveil.errors import ConfigError
from splitveil.functional import wide
from splitveil.nets.channel import Channel, LearnedNoise, learned_stages
from splitveil.nets.split import SplitModel, with_stage_shapes


def normal_divergence(z: Tensor, log_scale: Tensor) -> Tensor:
    r"""KL of N(z, e^{2s}) from N(0, 1) in nats, summed over values, mean over samples.

    .. math:: \mathrm{KL} = \tfrac12 \sum_j \left(e^{2 s_j} + z_j^2 - 1 - 2 s_j\right)

    z (n, …), s (…): an upper bound on I(x; z + e^s ε).

    >>> import torch
    >>> normal_divergence(torch.tensor([[1.0, 1.0]]), torch.zeros(2)).item()
    1.0
    """
    rows, s = wide(z), log_scale.flatten()
    return 0.5 * ((2 * s).exp() + rows.square() - 1 - 2 * s).sum(1).mean()


class NoisePrice(FixedPenalty):
    """Base of penalties on learned noise, times `weight`."""

    def __init__(self, noise: LearnedNoise, weight: float) -> None:
        super().__init__()
        self._noise = (noise,)  # in a tuple, so that its parameters stay the model's alone
        self.weight = weight


class BottleneckPenalty(NoisePrice):
    """The price β·KL on encoder and noise, read from the channel's noise."""

    def penalty(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """β·KL of this batch, nats."""
        return self.weight * normal_divergence(z, self._noise[0].log_scales())


@dataclass(frozen=True, kw_only=True)
class VariationalBottleneck(Defence):
    r"""z̃ = z + e^s·ε with s learned per value, and β·KL(N(z, e^{2s}) ‖ N(0, 1)) in the loss.

    The deep variational information bottleneck (ICLR 2017); as a defence, MID (AAAI 2021).

    Args:
        vib_beta: β ≥ 0; 0 leaves noise and price out: no defence.
        vib_start: e^s before training, > 0.
    """

    learns_noise: ClassVar[bool] = True
    vib_beta: NonNegative = 1e-3
    vib_start: Positive = 0.1

    def channel(self, noise_std: float) -> Channel:
        """The learned noise alone; stack it with `noise` for the run's own."""
        return Channel([LearnedNoise(self.vib_start)] if self.vib_beta else [])

    def companion(self, model: SplitModel, image_shape: Shape, num_classes: int) -> TrainedBeside:
        """The price; none at β = 0."""
        if self.vib_beta == 0:
            return None
        return BottleneckPenalty(
            channel_noise(with_stage_shapes(model, image_shape)), self.vib_beta
        )


def channel_noise(model: SplitModel) -> LearnedNoise:
    """The learned noise of a model's channel."""
    for stage in learned_stages(model.channel):
        if isinstance(stage, LearnedNoise):
            return stage
    raise ConfigError(
        "the model's channel has no learned noise; build it with the defence's `channel`"
    )
