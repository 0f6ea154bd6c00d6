"""A model in two halves, client and server, made by cutting a backbone; what the halves cost."""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from splitveil.cuda import channels_last, compiled, to_device
from splitveil.errors import ConfigError
from splitveil.nets.blocks import is_plain
from splitveil.nets.channel import Channel, deployed, learned_stages
from splitveil.nets.exit import Exit, TappedClient
from splitveil.threat import Victim

Shape = tuple[int, ...]


def stages_of(backbone: nn.Module) -> list[nn.Module]:
    """The stages between which a backbone can be cut: the children of a plain `nn.Sequential`.

    >>> len(stages_of(nn.Sequential(nn.Flatten(), nn.Linear(4, 2))))
    2
    """
    advice = "wrap its stages: nn.Sequential(stem, stage1, …, nn.Flatten(), classifier)"
    if not is_plain(backbone):
        raise ConfigError(
            f"cut needs a plain nn.Sequential, got {type(backbone).__name__}; {advice}"
        )
    # Not children(): that yields a module that is used twice, such as one ReLU, only once.
    stages = list(backbone)
    if len(stages) <= 1:
        many = "one child" if stages else "no children"
        raise ConfigError(f"a backbone of {many} cannot be cut; {advice}")
    return stages


@torch.no_grad()
def wire_shape(client: nn.Module, shape: Shape, name: str = "the client") -> Shape:
    """Shape of a module's output for one input of this shape, for example an image (c, h, w).

    `name` is what an error calls the module.
    """
    # A copy in eval mode, because BatchNorm's statistics must not move. Of a compiled module the
    # original, because operations inside a compiled graph cannot be counted.
    probe: nn.Module = copy.deepcopy(getattr(client, "_orig_mod", client)).eval()
    weight = next(probe.parameters(), torch.zeros(()))
    try:
        out = probe(torch.zeros(1, *shape).to(weight))
    except (RuntimeError, TypeError, ValueError, IndexError) as err:
        raise ConfigError(
            f"{name} cannot process an input of shape {shape!r}: {err}; change the layer, or the "
            "image's channels, height and width, for example (3, 32, 32)"
        ) from err
    if not isinstance(out, Tensor) or out.ndim < 2:  # noqa: PLR2004 - rows and their features
        raise ConfigError(
            f"{name} returns a {type(out).__name__}, not a tensor with one row per image; wrap it "
            "together with the layer that reads it"
        )
    return tuple(out.shape[1:])


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a client costs for one image.

    Args:
        macs: Multiply-adds of convolutions and matrix products.
        params: Parameters to store.
        wire_shape: Shape of the smashed data.
        wire_floats: How many numbers that is.
    """

    macs: int
    params: int
    wire_shape: Shape
    wire_floats: int

    @classmethod
    def of(cls, client: nn.Module, image_shape: Shape, name: str = "the client") -> "Cost":
        """Count a client by passing one image of zeros through a copy of it.

        Attention is counted by its matrix products, whichever fused kernel would run. `name` is
        what an error calls the module.

        >>> Cost.of(nn.Linear(4, 3), (4,))
        Cost(macs=12, params=15, wire_shape=(3,), wire_floats=3)
        >>> Cost.of(nn.Conv1d(3, 5, 3), (3, 10)).macs  # 8 places, 5 channels, 3·3 weights
        360
        """
        with _counted() as counter:
            shape = wire_shape(client, image_shape, name)
        return cls(
            macs=int(counter.get_total_flops()) // 2,  # a multiply-add is two operations
            params=sum(p.numel() for p in client.parameters()),
            wire_shape=shape,
            wire_floats=math.prod(shape),
        )


@contextmanager
def _counted() -> Iterator[FlopCounterMode]:
    """Count operations inside the block; fused kernels, which are not counted, are off."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            yield counter
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class SplitOutput(NamedTuple):
    """One forward pass: clean smashed data z, z_sent after the channel, the server's logits."""

    z: Tensor
    z_sent: Tensor
    logits: Tensor


class SplitModel(nn.Module):
    """A split network: `encoder` and `channel` run on the client, `head` on the server.

    Args:
        encoder: The client's layers: images (n, c, h, w) to smashed data z (n, …).
        channel: What happens to z before the wire, called with (z, generator); keeps its shape.
        head: The server's layers: what was sent to logits (n, classes).
        exit: The client's own head and the rule that decides what is sent; None sends everything.
            The encoder is then a `TappedClient`.
        silent: Whether nothing is ever sent: the head is the client's own, on the device.

    >>> model = SplitModel(nn.Flatten(), Channel(), nn.Linear(4, 2))
    >>> model(torch.zeros(3, 1, 2, 2)).shape
    torch.Size([3, 2])
    """

    def __init__(
        self,
        encoder: nn.Module,
        channel: nn.Module,
        head: nn.Module,
        exit: Exit | None = None,
        *,
        silent: bool = False,
    ) -> None:
        super().__init__()
        self.encoder, self.channel, self.head = encoder, channel, head
        self.exit, self.silent = exit, silent

    def split_forward(self, x: Tensor, generator: Generator | None = None) -> SplitOutput:
        """One pass over images x (n, c, h, w) with everything in between.

        `generator` draws the channel's noise; None means torch's global stream.
        """
        z = self.encoder(x)
        z_sent = self.channel(z, generator)
        return SplitOutput(z, z_sent, self.head(z_sent))

    def forward(self, x: Tensor, generator: Generator | None = None) -> Tensor:
        """Logits (n, classes) of images x (n, c, h, w), everything sent through the channel."""
        return self.split_forward(x, generator).logits

    def both_answers(self, x: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
        """The own head's logits and the server's, everything sent, each (n, classes)."""
        if self.exit is None or not isinstance(self.encoder, TappedClient):
            raise ConfigError(
                "this model has no own head, so only its server answers; train one with "
                "--defence early-exit"
            )
        z, features = self.encoder.both(x)
        return self.exit.head(features), self.head(self.channel(z, generator))

    def answer(self, x: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
        """What the device reports: its own answer where it is sure, the server's elsewhere.

        Args:
            x: Images (n, c, h, w).
            generator: Draws the channel's noise; None means torch's global stream.

        Returns:
            Logits (n, classes), and for each image whether the server was asked (n,). Without an
            exit every image is sent; a client that answers alone sends none.
        """
        if self.exit is None:
            asked = torch.full((len(x),), not self.silent, device=x.device)
            return self(x, generator), asked
        own, server = self.both_answers(x, generator)
        asked = self.exit.asks(own)
        return self.exit.answers(own, server, asked), asked

    def compiled(self, backend: str = "inductor") -> "SplitModel":
        """The same model with the same parameters; both halves compile at their first call."""
        return SplitModel(
            compiled(self.encoder, backend), self.channel, compiled(self.head, backend),
            self.exit, silent=self.silent,
        )  # fmt: skip

    def victim(self) -> Victim:
        """The deployed client, as an attacker sees it: its noise is on a grid."""
        return Victim(self.encoder, Withheld() if self.silent else deployed(self.channel))

    def deployed(self) -> "SplitModel":
        """The same model with the noise of its deployed client."""
        return SplitModel(
            self.encoder, deployed(self.channel), self.head, self.exit, silent=self.silent
        )

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


class Withheld(nn.Module):
    """The channel of a client that sends nothing: (n, …) to (n, 0)."""

    def forward(self, z: Tensor, generator: Generator | None = None) -> Tensor:
        """Rows without numbers."""
        return z.new_zeros(len(z), 0)


def cut(backbone: nn.Module, at: int, channel: nn.Module | None = None) -> SplitModel:
    """Split a backbone after its first `at` children, so that server(client(x)) = backbone(x).

    Args:
        backbone: An `nn.Sequential` of at least two stages; wrap the stages of any other module.
            Both halves share its parameters.
        at: How many children the client gets, 1..len(backbone) − 1.
        channel: What happens to smashed data before the wire; default: nothing.

    Returns:
        The split model; `encoder` and `head` are `nn.Sequential`s.

    >>> model = cut(nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Linear(3, 2)), at=2)
    >>> model.macs((1, 2, 2)), model.wire_floats((1, 2, 2))
    (12, 3)
    """
    stages = stages_of(backbone)
    if not isinstance(at, int) or isinstance(at, bool) or not 1 <= at < len(stages):
        raise ConfigError(
            f"at must be a whole number in 1..{len(stages) - 1}, because both halves of this "
            f"backbone of {len(stages)} children need a layer; got {at!r}"
        )
    encoder, head = nn.Sequential(*stages[:at]), nn.Sequential(*stages[at:])
    return SplitModel(encoder, Channel() if channel is None else channel, head)


def with_stage_shapes(model: SplitModel, image_shape: Shape) -> SplitModel:
    """The same model, with the parameters of learned stages made for images (c, h, w)."""
    for stage in learned_stages(model.channel):
        where = next(model.encoder.parameters(), torch.zeros(())).device
        stage.size_to(model.wire_shape(image_shape), where)
    return model


@torch.no_grad()
def check_layout(model: SplitModel, image_shape: Shape) -> None:
    """Refuse a net with a layer that cannot process maps whose channels lie last in memory."""
    probe = copy.deepcopy(model).eval()
    to_device(probe, torch.device("cpu"))
    try:
        probe(channels_last(torch.zeros(2, *image_shape)), torch.Generator())
    except RuntimeError as err:
        raise ConfigError(
            f"the net cannot process maps with their channels last in memory, as they are in a "
            f"training: {err} In a layer of your own write x.flatten(1) or x.reshape(...), not "
            "x.view(...)"
        ) from err


@torch.no_grad()
def with_channel(model: SplitModel, channel: object, image_shape: Shape) -> SplitModel:
    """The same model with this channel, which must keep the shape of smashed data."""
    if not isinstance(channel, Channel):
        raise ConfigError(
            f"a defence's channel must be a Channel, got {type(channel).__name__}; "
            "return Channel([stage, …]), or Channel() if nothing happens before the wire"
        )
    model.channel = channel
    z = torch.zeros(2, *with_stage_shapes(model, image_shape).wire_shape(image_shape))
    try:
        sent = copy.deepcopy(channel)(z, torch.Generator())  # a copy: a stage may count its calls
    except (RuntimeError, TypeError, ValueError) as err:
        raise ConfigError(
            f"the channel fails on smashed data of shape {tuple(z.shape)}: {err}; each stage is "
            "called with (z, generator)"
        ) from err
    if not isinstance(sent, Tensor) or sent.shape != z.shape:
        got = f"shape {tuple(sent.shape)}" if isinstance(sent, Tensor) else type(sent).__name__
        raise ConfigError(
            f"a channel must keep the shape of smashed data, {tuple(z.shape)}, got {got}; "
            "move a layer that changes the shape into the client: the defence's `encoder`"
        )
    return model
