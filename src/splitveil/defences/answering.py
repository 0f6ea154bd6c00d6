"""Defences by answering on the device: `alone` sends nothing, `early-exit` only what it must."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from splitveil.defences.base import Defence, NoiseOnly, Positive, Shape
from splitveil.defences.base import Share as ShareOf
from splitveil.errors import ConfigError, Range
from splitveil.nets.channel import Channel
from splitveil.nets.exit import (
    Exit,
    Kind,
    Policy,
    Pooling,
    TappedClient,
    body_and_projection,
    own_head,
    unwrapped,
)
from splitveil.nets.split import SplitModel


@dataclass(frozen=True, kw_only=True)
class Alone(Defence):
    """The client answers by itself; nothing leaves the device, and the server is not built.

    The body of the net's client, pooling or flattening, and one linear layer.

    Args:
        pooling: "mean" over the map's places, or "flatten" for all of its numbers.
    """

    sends: ClassVar[bool] = False
    pooling: Pooling = "mean"

    def assemble(self, model: SplitModel, image_shape: Shape, num_classes: int) -> SplitModel:
        """The body of the client with a head of its own."""
        body, _ = body_and_projection(model.encoder)
        head = own_head(body, image_shape, num_classes, self.pooling)
        return SplitModel(body, Channel(), head, silent=True)


@dataclass(frozen=True, kw_only=True)
class EarlyExit(NoiseOnly):
    """The client answers what it is sure of, and sends only the rest, with the run's noise.

    Its own head is trained beside the server's: loss(server) + own_weight · loss(own head).
    Temperature and threshold are set on the validation images after the last epoch.

    Args:
        send: Share of the images to send, in [0, 1]; least sure first.
        target_accuracy: Least accuracy to reach on the validation images with as few sent as
            possible; 0 takes `send` instead.
        exit_rule: What sureness is: "confidence", "margin" or "entropy" of the own answer.
        own_weight: Weight of the own head's loss, above 0.
        own_pooling: "mean" over the map's places, or "flatten" for all of its numbers.
        per_class: Whether each class that the client answers has a threshold of its own.
        average: Whether the device averages its own answer with the server's.
        penalty_focus: How much another defence's penalty on z leans on images that would be sent,
            in [0, 1]: 0 weighs all alike, 1 in proportion to how unsure the own head is.
    """

    needs_val: ClassVar[bool] = True
    send: ShareOf = 0.3
    target_accuracy: Annotated[float, Range(0, 1, below=True)] = 0.0
    exit_rule: Kind = "confidence"
    own_weight: Positive = 1.0
    own_pooling: Pooling = "mean"
    per_class: bool = False
    average: bool = False
    penalty_focus: ShareOf = 0.0

    def assemble(self, model: SplitModel, image_shape: Shape, num_classes: int) -> SplitModel:
        """The model with an own head on the end of its client's body."""
        if model.silent:
            raise ConfigError("'alone' sends nothing, so there is nothing to exit from; drop one")
        body, projection = body_and_projection(model.encoder)
        client = unwrapped(model.encoder)
        if not isinstance(client, TappedClient):
            client = TappedClient(body, projection, len(body))
        model.encoder = client
        model.exit = Exit(
            own_head(body, image_shape, num_classes, self.own_pooling),
            num_classes,
            kind=self.exit_rule,
            weight=self.own_weight,
            policy=Policy(
                send=self.send, accuracy=self.target_accuracy or None, per_class=self.per_class
            ),
            average=self.average,
            focus=self.penalty_focus,
        )
        return model
