"""Smashed data in units of its own spread: a client that rescales what it sends hides nothing."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from splitveil.rng import stream
from splitveil.types import BlackBox

PROBED = 1000  # aux images whose sendings are measured


def in_units(z: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(z − mean) / std in float64, given in float32.

    >>> in_units(torch.tensor([4.0, 1.0]), torch.tensor(3.0), torch.tensor(0.5)).tolist()
    [2.0, -4.0]
    """
    return ((z.double() - mean) / std).float()


@dataclass(frozen=True)
class Units:
    r"""Mean and deviation of all numbers of z̃ over aux, and z̃ in terms of them.

    .. math:: u = (\tilde z - m) / s

    Computed in float64, given in float32: networks, distances and BatchNorm's ε then meet the same
    numbers whatever the client's scale and offset are.

    >>> Units(torch.tensor(3.0), torch.tensor(0.5))(torch.tensor([4.0, 1.0])).tolist()
    [2.0, -4.0]
    """

    mean: Tensor
    std: Tensor

    def __call__(self, z: Tensor) -> Tensor:
        """U of the shape of z, float32."""
        return in_units(z, self.mean, self.std)


class InUnits(nn.Module):
    """A network behind its units: takes z̃ as it was sent."""

    mean: Tensor
    std: Tensor

    def __init__(self, net: nn.Module, units: Units) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("mean", units.mean)
        self.register_buffer("std", units.std)

    def forward(self, z: Tensor) -> Tensor:
        """What the network makes of z̃ (n, …)."""
        # Not through Units: the compilers of torch 2.11 and before cannot make a frozen dataclass.
        out: Tensor = self.net(in_units(z, self.mean, self.std))
        return out


@torch.no_grad()
def units_of(z: Tensor) -> Units:
    """The units of some z̃; what is not finite does not count.

    >>> units_of(torch.tensor([1.0, 3.0, torch.inf]))(torch.tensor([3.0])).tolist()
    [1.0]
    """
    z = z.double()
    known = z.isfinite()
    count = known.sum().clamp_min(1)
    mean = torch.where(known, z, 0.0).sum() / count
    std = (torch.where(known, z - mean, 0.0).square().sum() / count).sqrt()
    return Units(mean, torch.where(std > 0, std, torch.ones_like(std)))


def measured_units(victim: BlackBox, images: Tensor, generator: Generator) -> Units:
    """The units of a victim's z̃, by draws of their own: those of the attack are not moved."""
    apart = stream(generator.initial_seed(), "units", generator.device)
    return units_of(victim.send(images[:PROBED], apart))
