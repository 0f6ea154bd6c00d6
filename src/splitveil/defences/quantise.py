"""Coarse rounding of smashed values."""

from dataclasses import dataclass

from splitveil.defences.base import Defence
from splitveil.nets.channel import Channel, Quantise


@dataclass(frozen=True, kw_only=True)
class Quantisation(Defence):
    """Smashed values are rounded to 2^bits levels before the wire."""

    bits: int = 4

    def __post_init__(self) -> None:
        self.channel(0.0)  # the stage refuses what it cannot do

    def channel(self, noise_std: float) -> Channel:
        """The one stage; no noise."""
        del noise_std
        return Channel([Quantise(self.bits)])
