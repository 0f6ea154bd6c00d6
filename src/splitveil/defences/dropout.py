"""Random dropout of smashed values: a published baseline."""

from dataclasses import dataclass

from splitveil.defences.base import Defence
from splitveil.nets.channel import Channel, Dropout


@dataclass(frozen=True, kw_only=True)
class FeatureDropout(Defence):
    """Each smashed value is zeroed with probability `dropout`, in training and in deployment."""

    dropout: float = 0.2

    def __post_init__(self) -> None:
        self.channel(0.0)  # the stage refuses what it cannot do

    def channel(self, noise_std: float) -> Channel:
        """The one stage; no noise."""
        del noise_std
        return Channel([Dropout(self.dropout)])
