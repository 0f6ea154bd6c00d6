"""Pruning of the smallest smashed values: a published baseline."""

from dataclasses import dataclass

from splitveil.defences.base import Defence
from splitveil.nets.channel import Channel, TopK


@dataclass(frozen=True, kw_only=True)
class TopKPruning(Defence):
    """The share `prune` of each image's smashed values, the smallest, is zeroed before the wire."""

    prune: float = 0.5

    def __post_init__(self) -> None:
        self.channel(0.0)  # the stage refuses what it cannot do

    def channel(self, noise_std: float) -> Channel:
        """The one stage; no noise."""
        del noise_std
        return Channel([TopK(self.prune)])
