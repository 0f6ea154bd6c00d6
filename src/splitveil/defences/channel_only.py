"""Defences without a penalty: a stage on the wire, or a layer of the client."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from splitveil.defences.base import Defence, NonNegative, Shape
from splitveil.nets.channel import (
    Channel,
    Clip,
    Dropout,
    Quantise,
    SparseCoding,
    Stage,
    TopK,
    insert_before_sigmoid,
)
from splitveil.nets.exit import TappedClient, unwrapped
from splitveil.nets.split import SplitModel


@dataclass(frozen=True, kw_only=True)
class ChannelOnly(Defence):
    """Base of defences that are one `stage`, made with their settings in order; no noise."""

    stage: ClassVar[Callable[..., Stage]]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.channel(0.0)  # raises for a value outside the stage's range

    def channel(self, noise_std: float) -> Channel:
        """The stage."""
        return Channel([type(self).stage(*self.settings().values())])


@dataclass(frozen=True, kw_only=True)
class Clipping(ChannelOnly):
    """Moves values outside [`clip_low`, `clip_high`] to the nearer end.

    In a stack it comes before the noise: the noise then has less to hide, and certificates are
    tighter.
    """

    stage: ClassVar = Clip
    clip_low: float = 0.25
    clip_high: float = 0.75


@dataclass(frozen=True, kw_only=True)
class FeatureDropout(ChannelOnly):
    """Zeroes each smashed value with probability `dropout`, in training and in deployment."""

    stage: ClassVar = Dropout
    dropout: float = 0.2


@dataclass(frozen=True, kw_only=True)
class Quantisation(ChannelOnly):
    """Rounds smashed values to 2^bits levels before the wire."""

    stage: ClassVar = Quantise
    bits: int = 4


@dataclass(frozen=True, kw_only=True)
class TopKPruning(ChannelOnly):
    """Zeroes the share `prune` of each image's smashed values, the smallest, before the wire."""

    stage: ClassVar = TopK
    prune: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Sparse(Defence):
    """Replaces z by Wᵀ softthr(W z, θ) with a learned W: after SCA (ECCV 2024). No noise.

    Args:
        sparse_threshold: θ ≥ 0; 0 leaves the layer out: no defence.
        sparse_place: `client`, as in the CEM code: before the sigmoid that ends the client, W at
            first random rows of length 1, so that a penalty sees what is sent. `wire`: after the
            client, W at first orthogonal; there W can magnify what was penalised.
    """

    sparse_threshold: NonNegative = 0.01
    sparse_place: Literal["client", "wire"] = "client"

    def channel(self, noise_std: float) -> Channel:
        """The layer if its place is the wire; no noise."""
        if self.sparse_place == "client" or not self.sparse_threshold:
            return Channel()
        return Channel([SparseCoding(self.sparse_threshold)])

    def assemble(self, model: SplitModel, image_shape: Shape, num_classes: int) -> SplitModel:
        """The model, with the layer in its client if that is its place."""
        if self.sparse_place == "wire" or not self.sparse_threshold:
            return model
        code = SparseCoding(self.sparse_threshold, start="rows")
        code.size_to(model.wire_shape(image_shape))
        client = unwrapped(model.encoder)
        if isinstance(client, TappedClient):
            client.projection = insert_before_sigmoid(client.projection, code)
        else:
            model.encoder = insert_before_sigmoid(model.encoder, code)
        return model
