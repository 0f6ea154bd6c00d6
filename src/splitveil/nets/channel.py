"""Channel stages: everything that happens to smashed data on the client before the wire.

A stage is a module called with (z, generator). It acts the same in training, in deployment and
under attack; `Channel` chains stages. A new stage is one class here.
"""

from collections.abc import Sequence

import torch
from torch import Generator, Tensor, nn

from splitveil.errors import ConfigError
from splitveil.rng import normal_like

MAX_BITS = 16  # float32 still tells all levels apart


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


def _without(z: Tensor, mask: Tensor) -> Tensor:
    """Z with zeros where the mask is true."""
    return z.clone().masked_fill_(mask, 0.0)  # out of place it would lose z's memory layout


class Dropout(nn.Module):
    """Zeroes each value with probability `p`, by a fresh mask per call; the rest is not rescaled.

    Also in eval mode, and without the factor 1/(1 − p) of `nn.Dropout`, as published. The gradient
    is 1 where a value is sent and 0 where it is not.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ConfigError(f"dropout must be in [0, 1), got {p}; 0 drops nothing")
        self.p = p

    def forward(self, z: Tensor, generator: Generator | None = None) -> Tensor:
        """Z with zeros drawn from `generator` (None: torch's global stream)."""
        where = z.device if generator is None else generator.device
        # float32 whatever z is: in bfloat16 the share would come in steps of 1/256.
        drawn = torch.rand(z.shape, dtype=torch.float32, device=where, generator=generator)
        return _without(z, (drawn < self.p).to(z.device))

    def extra_repr(self) -> str:
        """The one number."""
        return f"p={self.p}"


class TopK(nn.Module):
    """Zeroes the share `prune` of each image's values, those of smallest magnitude.

    Of d values round(prune · d) go; of equal ones the first go first. The published code prunes
    the smallest values, signs counted, of the whole flattened batch, so that what is sent of one
    image depends on its neighbours; here it does not. The gradient is 1 where a value is sent and
    0 where it is not.

    >>> TopK(0.5)(torch.tensor([[0.1, -0.9, 0.3, 0.2]])).tolist() == [
    ...     torch.tensor([0.0, -0.9, 0.3, 0.0]).tolist()
    ... ]
    True
    """

    def __init__(self, prune: float) -> None:
        super().__init__()
        if not 0 <= prune < 1:
            raise ConfigError(f"prune must be in [0, 1), got {prune}; 0 prunes nothing")
        self.prune = prune

    def forward(self, z: Tensor, generator: Generator | None = None) -> Tensor:
        """Z (n, …) with round(prune · d) zeros more in every image; draws nothing."""
        del generator
        size = z.detach().flatten(1).abs()  # (n, d)
        smallest = size.argsort(dim=1, stable=True)[:, : round(self.prune * size.shape[1])]
        pruned = torch.zeros_like(size, dtype=torch.bool).scatter(1, smallest, value=True)
        return _without(z, pruned.reshape(z.shape))

    def extra_repr(self) -> str:
        """The one number."""
        return f"prune={self.prune}"


class Quantise(nn.Module):
    """Rounds to the nearest of 2^bits equally spaced levels from 0 to 1, both included.

    .. math:: q(z) = round(s · clip(z, 0, 1)) / s,  s = 2^{bits} − 1

    [0, 1] is the range of the encoder's sigmoid; what lies outside, after noise say, is clipped.
    The gradient is straight through: 1 in [0, 1], 0 outside.

    >>> Quantise(2)(torch.tensor([-0.3, 0.2, 0.6, 0.9])).mul(3).round().tolist()
    [0.0, 1.0, 2.0, 3.0]
    """

    def __init__(self, bits: int) -> None:
        super().__init__()
        if not 1 <= bits <= MAX_BITS:
            raise ConfigError(f"bits must be in 1..{MAX_BITS}, got {bits}")
        self.bits = bits

    def forward(self, z: Tensor, generator: Generator | None = None) -> Tensor:
        """The nearest levels of z; draws nothing."""
        del generator
        steps = (1 << self.bits) - 1
        clipped = z.clamp(0, 1)
        # Never in half precision, whose products would round to a neighbouring level.
        wide = clipped.detach().to(torch.promote_types(z.dtype, torch.float32))
        # By a tensor: a GPU would multiply by the reciprocal of a number, one bit beside the CPU.
        whole = torch.full((), float(steps), dtype=wide.dtype, device=wide.device)
        level = ((wide * whole).round() / whole).to(z.dtype)
        return level + (clipped - clipped.detach())  # exactly 0, with the gradient of the clip

    def extra_repr(self) -> str:
        """The one number."""
        return f"bits={self.bits}"


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
