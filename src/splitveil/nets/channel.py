"""Channel stages: everything that happens to smashed data on the client before the wire.

A stage is a module called with (z, generator). It acts the same in training, in deployment and
under attack; `Channel` chains stages. A new stage is one class here.
"""

from collections.abc import Sequence

import torch
from torch import Generator, Tensor, nn

from splitveil.errors import ConfigError
from splitveil.rng import normal_like


class GaussianNoise(nn.Module):
    """Adds independent Gaussian noise of standard deviation `std`: z̃ = z + σ·n.

    Also in eval mode: the noise is the defence, not a training trick.
    """

    def __init__(self, std: float) -> None:
        super().__init__()
        if not 0 <= std < float("inf"):
            raise ConfigError(f"noise_std must be a finite number ≥ 0, got {std}")
        self.std = std

    def forward(self, z: Tensor, generator: Generator | None = None) -> Tensor:
        """Z with fresh noise from `generator` (None: torch's global stream)."""
        return z + self.std * normal_like(z, generator)

    def extra_repr(self) -> str:
        """The one number."""
        return f"std={self.std}"


class Channel(nn.Module):
    """Stages in order; with none it is the identity."""

    def __init__(self, stages: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    @property
    def noise_std(self) -> float:
        """Standard deviation of the Gaussian noise it adds in all; 0 without noise."""
        variances = [s.std**2 for s in self.stages if isinstance(s, GaussianNoise)]
        return float(torch.tensor(sum(variances), dtype=torch.float64).sqrt())

    def forward(self, z: Tensor, generator: Generator | None = None) -> Tensor:
        """What is sent for smashed data z."""
        for stage in self.stages:
            z = stage(z, generator)
        return z
