"""Shredder: noise with a learned mean and scale, and a reward for a large scale."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from splitveil.defences.base import Defence, NonNegative, Positive, Shape, TrainedBeside
from splitveil.defences.vib import NoisePrice, channel_noise
from splitveil.nets.channel import Channel, LearnedNoise
from splitveil.nets.split import SplitModel, with_stage_shapes


def loudness(log_scale: Tensor) -> Tensor:
    """Mean log scale of the noise, nats per value; maximise it.

    >>> import torch
    >>> loudness(torch.tensor([1.0, 2.0])).item()
    1.5
    """
    return log_scale.mean()


class LoudnessReward(NoisePrice):
    """A reward of κ for each nat of the noise's mean log scale."""

    def penalty(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """−κ times the loudness; below 0 for scales above 1."""
        return -self.weight * loudness(self._noise[0].log_scales())


@dataclass(frozen=True, kw_only=True)
class Shredder(Defence):
    r"""z̃ = z + m + e^s·ε with m and s learned per value, and −κ·mean(s) in the loss.

    Shredder (ASPLOS 2020). The published one learns many noise tensors for a frozen net, fits a
    Laplace distribution to them and draws from it.

    Args:
        shredder_reward: κ ≥ 0; 0 leaves the noise out: no defence.
        shredder_start: e^s before training, > 0.
        shredder_noise: Distribution of ε, `laplace` or `gaussian`.
    """

    learns_noise: ClassVar[bool] = True
    shredder_reward: NonNegative = 0.3
    shredder_start: Positive = 0.1
    shredder_noise: Literal["laplace", "gaussian"] = "laplace"

    def channel(self, noise_std: float) -> Channel:
        """The learned noise alone; stack it with `noise` for the run's own."""
        if self.shredder_reward == 0:
            return Channel()
        return Channel([LearnedNoise(self.shredder_start, self.shredder_noise, moves=True)])

    def companion(self, model: SplitModel, image_shape: Shape, num_classes: int) -> TrainedBeside:
        """The reward; none at κ = 0."""
        if self.shredder_reward == 0:
            return None
        return LoudnessReward(
            channel_noise(with_stage_shapes(model, image_shape)), self.shredder_reward
        )
