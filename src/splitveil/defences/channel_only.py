"""Defences that are a stage on the wire, or a layer of the client, and no penalty."""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from splitveil.defences.base import Defence, NonNegative, Shape
from splitveil.nets.channel import (
    Channel,
    Clip,
    Dropout,
    Quantise,
    SparseCoding,
    TopK,
    insert_before_sigmoid,
)


@dataclass(frozen=True, kw_only=True)
class ChannelOnly(Defence):
    """Base of those whose stage itself refuses settings that it cannot have."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.channel(0.0)


@dataclass(frozen=True, kw_only=True)
class Clipping(ChannelOnly):
    """Moves values outside [`clip_low`, `clip_high`] to the nearer end, always.

    There is less for the noise to hide, and certificates are tighter: in a stack it stands before
    the noise.
    """

    clip_low: float = 0.25
    clip_high: float = 0.75

    def channel(self, noise_std: float) -> Channel:
        """The clip alone."""
        return Channel([Clip(self.clip_low, self.clip_high)])


@dataclass(frozen=True, kw_only=True)
class FeatureDropout(ChannelOnly):
    """Each smashed value is zeroed with probability `dropout`, in training and in deployment."""

    dropout: float = 0.2

    def channel(self, noise_std: float) -> Channel:
        """The one stage; no noise."""
        return Channel([Dropout(self.dropout)])


@dataclass(frozen=True, kw_only=True)
class Quantisation(ChannelOnly):
    """Smashed values are rounded to 2^bits levels before the wire."""

    bits: int = 4

    def channel(self, noise_std: float) -> Channel:
        """The one stage; no noise."""
        return Channel([Quantise(self.bits)])


@dataclass(frozen=True, kw_only=True)
class TopKPruning(ChannelOnly):
    """The share `prune` of each image's smashed values, the smallest, is zeroed before the wire."""

    prune: float = 0.5

    def channel(self, noise_std: float) -> Channel:
        """The one stage; no noise."""
        return Channel([TopK(self.prune)])


@dataclass(frozen=True, kw_only=True)
class Sparse(Defence):
    """Each image's features become Wᵀ softthr(W z, θ), W learned: after SCA (ECCV 2024).

    `sparse_threshold` is θ; 0 leaves the layer away: no defence. It has no noise of its own.
    `sparse_place` "client" is that of the CEM code: before the sigmoid that ends the client, W
    with random rows of length 1, so that a penalty sees what is sent; "wire" is behind the client,
    W orthogonal at first, where W may magnify what was penalised.
    """

    sparse_threshold: NonNegative = 0.01
    sparse_place: Literal["client", "wire"] = "client"

    def channel(self, noise_std: float) -> Channel:
        """The one layer, where its place is the wire; no noise."""
        if self.sparse_place == "client" or not self.sparse_threshold:
            return Channel()
        return Channel([SparseCoding(self.sparse_threshold)])

    def encoder(self, layers: nn.Module, wire_shape: Shape) -> nn.Module:
        """The client with the layer in it, where that is its place."""
        if self.sparse_place == "wire" or not self.sparse_threshold:
            return layers
        code = SparseCoding(self.sparse_threshold, start="rows")
        code.size_to(wire_shape)
        return insert_before_sigmoid(layers, code)
