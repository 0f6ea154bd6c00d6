"""Values clipped to a box before the noise: less for the noise to hide, tighter certificates."""

from dataclasses import dataclass

from splitveil.defences.base import Defence
from splitveil.nets import Channel, Clip


@dataclass(frozen=True, kw_only=True)
class Clipping(Defence):
    """Moves values outside [`clip_low`, `clip_high`] to the nearer end, always.

    In a stack it stands before the noise, as a certificate needs it.
    """

    clip_low: float = 0.25
    clip_high: float = 0.75

    def __post_init__(self) -> None:
        Clip(self.clip_low, self.clip_high)  # refuses what is no box

    def channel(self, noise_std: float) -> Channel:
        """The clip alone."""
        del noise_std
        return Channel([Clip(self.clip_low, self.clip_high)])
