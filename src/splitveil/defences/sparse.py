"""Sparse coding in the client: what few atoms of a learned dictionary say of z."""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from splitveil.defences.base import Defence, Shape
from splitveil.nets import Channel, SparseCoding, before_squashing


@dataclass(frozen=True, kw_only=True)
class Sparse(Defence):
    """Each image's features become Wᵀ softthr(W z, θ), W learned: after SCA (ECCV 2024).

    `sparse_threshold` is θ; 0 leaves the layer away: no defence. It has no noise of its own.
    `sparse_place` "client" is that of the CEM code: before the sigmoid that ends the client, W
    with random rows of length 1, so that a penalty sees what is sent; "wire" is behind the client,
    W orthogonal at first, where W may magnify what was penalised.
    """

    sparse_threshold: float = 0.01
    sparse_place: Literal["client", "wire"] = "client"

    def __post_init__(self) -> None:
        SparseCoding(self.sparse_threshold)  # refuses what is no threshold

    def channel(self, noise_std: float) -> Channel:
        """The one layer, where its place is the wire; no noise."""
        del noise_std
        if self.sparse_place == "client" or not self.sparse_threshold:
            return Channel()
        return Channel([SparseCoding(self.sparse_threshold)])

    def encoder(self, layers: nn.Module, wire_shape: Shape) -> nn.Module:
        """The client with the layer in it, where that is its place."""
        if self.sparse_place == "wire" or not self.sparse_threshold:
            return layers
        code = SparseCoding(self.sparse_threshold, start="rows")
        code.size_to(wire_shape)
        return before_squashing(layers, code)
