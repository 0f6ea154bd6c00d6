"""A model in two halves, a client and a server: made by cutting a backbone."""

import copy
import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from splitveil.cuda import compiled
from splitveil.errors import ConfigError
from splitveil.nets.blocks import stages_of, wire_shape
from splitveil.nets.channel import Channel, learned_stages
from splitveil.nets.cost import Cost, Shape
from splitveil.threat import Victim


class SplitOutput(NamedTuple):
    """One forward pass: clean smashed data z, what was sent, and the server's logits."""

    z: Tensor
    z_sent: Tensor
    logits: Tensor


class SplitModel(nn.Module):
    """A client (`encoder`, `channel`) and a server (`head`)."""

    def __init__(self, encoder: nn.Module, channel: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.encoder, self.channel, self.head = encoder, channel, head

    def split_forward(self, x: Tensor, generator: Generator | None = None) -> SplitOutput:
        """Everything one pass computes."""
        z = self.encoder(x)
        z_sent = self.channel(z, generator)
        return SplitOutput(z, z_sent, self.head(z_sent))

    def forward(self, x: Tensor, generator: Generator | None = None) -> Tensor:
        """Logits of images x (n, c, h, w), through the channel."""
        return self.split_forward(x, generator).logits

    def compiled(self, backend: str = "inductor") -> "SplitModel":
        """The same model on the same parameters, its halves compiled at their first use."""
        return SplitModel(
            compiled(self.encoder, backend), self.channel, compiled(self.head, backend)
        )

    def victim(self) -> Victim:
        """The deployed client, as an attacker meets it."""
        return Victim(self.encoder, self.channel)

    def macs(self, input_shape: Shape) -> int:
        """Multiply-adds of the client's convolutions and linear maps for one image (c, h, w)."""
        return Cost.of(self.encoder, input_shape).macs

    def wire_shape(self, input_shape: Shape) -> Shape:
        """Shape of the smashed data of one image."""
        return wire_shape(self.encoder, input_shape)

    def wire_floats(self, input_shape: Shape) -> int:
        """How many numbers cross the wire for one image."""
        return math.prod(self.wire_shape(input_shape))

    def client_params(self) -> int:
        """Parameters the client must store."""
        return sum(p.numel() for p in self.encoder.parameters())


def cut(backbone: nn.Module, at: int, channel: nn.Module | None = None) -> SplitModel:
    """Split a backbone after its first `at` top-level children: server(client(x)) = backbone(x).

    `backbone` must apply its children one after another, as `nn.Sequential` does; for another
    kind, wrap its stages into one. The parts share the backbone's parameters.

    >>> model = cut(nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Linear(3, 2)), at=2)
    >>> model.macs((1, 2, 2)), model.wire_floats((1, 2, 2))
    (12, 3)
    """
    stages = stages_of(backbone)
    if not isinstance(at, int) or isinstance(at, bool) or not 1 <= at < len(stages):
        raise ConfigError(
            f"at must leave a layer on both sides: 1..{len(stages) - 1} for this backbone of "
            f"{len(stages)} children, got {at!r}"
        )
    encoder, head = nn.Sequential(*stages[:at]), nn.Sequential(*stages[at:])
    return SplitModel(encoder, Channel() if channel is None else channel, head)


def with_stage_shapes(model: SplitModel, image_shape: Shape) -> SplitModel:
    """The same model, its stages with parameters for images (c, h, w); the net is not touched."""
    for stage in learned_stages(model.channel):
        where = next(model.encoder.parameters(), torch.zeros(())).device
        stage.size_to(model.wire_shape(image_shape), where)
    return model


@torch.no_grad()
def with_channel(model: SplitModel, channel: object, image_shape: Shape) -> SplitModel:
    """The same model, `sized`, with this channel; refuses one that does not keep z's shape."""
    if not isinstance(channel, Channel):
        raise ConfigError(
            f"a defence's channel must be a Channel, got {type(channel).__name__}; "
            "return Channel([stage, …]), without stages if nothing happens before the wire"
        )
    model.channel = channel
    z = torch.zeros(2, *with_stage_shapes(model, image_shape).wire_shape(image_shape))
    try:
        sent = copy.deepcopy(channel)(z, torch.Generator())  # a copy: a stage may count its calls
    except (RuntimeError, TypeError, ValueError) as err:
        raise ConfigError(
            f"smashed data of shape {tuple(z.shape)} does not pass the channel: {err}; a stage is "
            "called with (z, generator)"
        ) from err
    if not isinstance(sent, Tensor) or sent.shape != z.shape:
        got = f"shape {tuple(sent.shape)}" if isinstance(sent, Tensor) else type(sent).__name__
        raise ConfigError(
            f"a channel must keep the shape of smashed data, {tuple(z.shape)}, got {got}; "
            "make a layer that changes it part of the client: the defence's `encoder`"
        )
    return model
