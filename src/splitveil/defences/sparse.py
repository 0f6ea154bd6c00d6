"""Sparse coding at the wire: what few atoms of a learned dictionary say of z."""

from dataclasses import dataclass

from splitveil.defences.base import Defence
from splitveil.nets import Channel, SparseCoding


@dataclass(frozen=True, kw_only=True)
class Sparse(Defence):
    """Each image's z is sent as Wᵀ softthr(W z, θ), W learned: after SCA (ECCV 2024).

    `sparse_threshold` is θ; 0 leaves the layer away: no defence. It has no noise of its own.
    """

    sparse_threshold: float = 0.01

    def __post_init__(self) -> None:
        SparseCoding(self.sparse_threshold)  # refuses what is no threshold

    def channel(self, noise_std: float) -> Channel:
        """The one layer; no noise."""
        del noise_std
        return Channel([SparseCoding(self.sparse_threshold)] if self.sparse_threshold else [])
