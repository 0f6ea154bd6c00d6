"""The clip stage, and what a certificate must know of a channel: what stands before its noise."""

import math
from dataclasses import dataclass
from itertools import takewhile

from torch import Generator, Tensor, nn

from splitveil.errors import ConfigError
from splitveil.nets.channel import Channel, Dropout, GaussianNoise, Quantise, TopK
from splitveil.nets.stages import SQUASHED_TO, SparseCoding

Bounds = tuple[float, float]

_TRANSPARENT = (nn.Identity, nn.Flatten, nn.Unflatten)


class Clip(nn.Module):
    """Moves values outside [low, high] to the nearer end; the gradient there is 0.

    Before the noise it bounds z, which a certificate over a population needs.

    >>> import torch
    >>> Clip(-1.0, 1.0)(torch.tensor([-3.0, 0.5, 2.0])).tolist()
    [-1.0, 0.5, 1.0]
    """

    def __init__(self, low: float, high: float) -> None:
        super().__init__()
        if not -math.inf < low < high < math.inf:
            raise ConfigError(f"clip needs finite low < high, got [{low}, {high}]")
        self.low, self.high = low, high

    def forward(self, z: Tensor, generator: Generator | None = None) -> Tensor:
        """Z inside the bounds; draws nothing."""
        del generator
        return z.clamp(self.low, self.high)

    def extra_repr(self) -> str:
        """The two numbers."""
        return f"low={self.low}, high={self.high}"


@dataclass(frozen=True, kw_only=True)
class Front:
    """A channel up to its first Gaussian noise; what follows can only lose information.

    `noise_std` is 0 if nothing random is sent, and None if the randomness is of another kind than
    Gaussian noise. `bounds` hold for every z that enters the noise, or are None; `random` says
    whether a stage before the noise draws.
    """

    stages: Channel
    noise_std: float | None
    bounds: Bounds | None
    random: bool


def front_of(encoder: nn.Module, channel: nn.Module) -> Front:
    """What stands before the noise of a client; a stage it does not know counts as unbounded.

    >>> found = front_of(nn.Sigmoid(), Channel([TopK(0.5), GaussianNoise(0.1), Quantise(4)]))
    >>> found.noise_std, found.bounds, len(found.stages.stages)
    (0.1, (0.0, 1.0), 1)
    """
    every = list(channel.stages) if type(channel) is Channel else [channel]
    stds = [s.std if type(s) is GaussianNoise else None for s in every]
    stages = [(s, std) for s, std in zip(every, stds, strict=True) if std != 0]
    start = next((i for i, (_, std) in enumerate(stages) if std), len(stages))
    before = [s for s, _ in stages[:start]]
    noise = [std for _, std in takewhile(lambda stage: stage[1], stages[start:])]
    bounds = _output_range(encoder)
    for stage in before:
        bounds = _through(stage, bounds)
    random = any(type(s) not in (Clip, SparseCoding, TopK, Quantise) for s in before)
    return Front(
        stages=Channel(before),
        noise_std=None if random and not noise else math.hypot(*(s for s in noise if s)),
        bounds=bounds,
        random=random,
    )


def _output_range(module: nn.Module) -> Bounds | None:
    """Where a module's outputs lie whatever the input, as far as its last layer says."""
    if type(module) in SQUASHED_TO:
        return SQUASHED_TO[type(module)]
    if type(module) is Clip:
        return module.low, module.high
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        layers = [m for m in module if type(m) not in _TRANSPARENT]
        return _output_range(layers[-1]) if layers else None
    return None


def _through(stage: nn.Module, bounds: Bounds | None) -> Bounds | None:
    """The bounds of what a stage makes of values inside `bounds`."""
    if type(stage) is Clip:
        return stage.low, stage.high
    if type(stage) is Quantise:
        return 0.0, 1.0
    if type(stage) in (Dropout, TopK) and bounds is not None:
        return min(bounds[0], 0.0), max(bounds[1], 0.0)
    return None
