"""A model in two halves, client and server, made by cutting a backbone; what the halves cost.

Counted is what the protocol calls the cost of a device: every convolution, linear map and matrix
product of the client, own head and maps of the channel included; the numbers that it stores, after
BatchNorm is folded into the convolution before it; the bits that it sends. Pooling and activations
count 0 and are listed apart. The table of noise on a grid is part of the program, not of a model.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from splitveil.cuda import channels_last, compiled, to_device
from splitveil.errors import ConfigError, unknown
from splitveil.nets.blocks import is_plain
from splitveil.nets.channel import (
    Channel,
    GaussianNoise,
    adds_noise,
    deployed,
    learned_stages,
    wire_bits,
)
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

    @property
    def device(self) -> torch.device:
        """Where the client computes; the CPU if it has no parameters."""
        return next(self.encoder.parameters(), torch.zeros(())).device

    @property
    def noisy(self) -> bool:
        """Whether the channel adds noise, which a deployed client draws on a grid."""
        return adds_noise(self.channel)

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
        stage.size_to(model.wire_shape(image_shape), model.device)
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


@dataclass(frozen=True, kw_only=True)
class Caps:
    """The most that a client may have.

    Args:
        macs: Multiply-adds for one image.
        stored: Numbers stored: parameters after folding, tables, noise scales.
        wire_floats: Numbers sent for one image.
        number_bits: Bits of each.
    """

    macs: int
    stored: int
    wire_floats: int = 512
    number_bits: int = 32

    def hold(self, macs: float | int, stored: int, wire_floats: int, number_bits: int) -> bool:
        """Whether a client with these costs is within the caps."""
        got = (macs, stored, wire_floats, number_bits)
        most = (self.macs, self.stored, self.wire_floats, self.number_bits)
        return all(one <= cap for one, cap in zip(got, most, strict=True))


TRACKS: Mapping[str, Caps] = {  # smallest first
    "B1": Caps(macs=1_000_000, stored=16_000),
    "B5": Caps(macs=5_000_000, stored=64_000),
    "B21": Caps(macs=21_900_000, stored=500_000),
}


def track_of(
    macs: float | int, stored: int, wire_floats: int = 0, number_bits: int = 32
) -> str | None:
    """The smallest track that a client with these costs belongs to; None if it fits none.

    >>> track_of(4_900_000, 60_000, 512), track_of(4_900_000, 65_000, 512), track_of(1, 1, 513)
    ('B5', 'B21', None)
    """
    costs = (macs, stored, wire_floats, number_bits)
    return next((name for name, caps in TRACKS.items() if caps.hold(*costs)), None)


def find_track(name: str) -> Caps:
    """The caps of a track's name."""
    if name not in TRACKS:
        raise ConfigError(unknown("track", name, TRACKS))
    return TRACKS[name]


ACTIVATING = {  # names of torch's operations
    "relu", "relu_", "relu6", "sigmoid", "sigmoid_", "tanh", "tanh_", "silu", "silu_", "gelu",
    "elu", "leaky_relu", "hardtanh", "hardtanh_", "hardswish", "hardsigmoid", "softplus",
    "softshrink", "prelu", "_prelu_kernel", "_softmax", "_log_softmax",
}  # fmt: skip
POOLING = {
    "max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "adaptive_max_pool2d", "mean",
    "max_pool2d", "avg_pool1d", "adaptive_avg_pool1d", "avg_pool3d",
}  # fmt: skip
NORMS = {
    "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
    "_batch_norm_no_update", "cudnn_batch_norm",
}  # fmt: skip


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's base has no types
    """Notes what reads the result of a convolution or linear map, and what counts 0."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pooled = self.activated = 0
        self.kept: list[Any] = []  # so that no two results have the same id
        self.made: dict[int, tuple[int, int | None]] = {}  # result → ids of weight and bias
        self.readers: dict[int, int] = {}  # tensor → how many operations read it
        self.calls: dict[int, int] = {}  # weight → how many results
        self.normed: dict[int, int] = {}  # running mean → result that it reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's own types
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.kept += [args, out]
        for one in tree_leaves(args):
            if isinstance(one, Tensor):
                self.readers[id(one)] = self.readers.get(id(one), 0) + 1
        if name == "convolution":
            self._made(out, args[1], args[2])
        elif name == "addmm":  # the weight comes transposed: by its base
            self._made(out, _base(args[2]), args[0])
        elif name == "mm":
            self._made(out, _base(args[1]), None)
        elif name in NORMS:
            self.normed[id(args[3])] = id(args[0])
        elif name in ACTIVATING:
            self.activated += out.numel()
        elif name in POOLING:
            self.pooled += args[0].numel()
        return out

    def _made(self, out: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.made[id(out)] = (id(weight), None if bias is None else id(bias))
        self.calls[id(weight)] = self.calls.get(id(weight), 0) + 1

    def folded(self, norm: _BatchNorm) -> int:
        """Numbers that a BatchNorm adds: none or one per channel if it can be folded, else two."""
        result = self.normed.get(id(norm.running_mean))
        if result is None:  # not used
            return 0
        if result not in self.made or self.readers[result] > 1:
            return 2 * norm.num_features
        weight, bias = self.made[result]
        if self.calls[weight] > 1:
            return 2 * norm.num_features
        return norm.num_features if bias is None else 0


def _base(weight: Tensor) -> Tensor:
    return weight if weight._base is None else weight._base


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What a network costs for one image.

    Args:
        macs: Multiply-adds of convolutions, linear maps and matrix products.
        params: Parameters in training.
        stored: Numbers that it stores when it is deployed.
        pooled: Numbers that pooling reads; they count 0.
        activated: Numbers that activations compute; they count 0.
        shape: Of its output for one image.

    >>> count_network(nn.Sequential(nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8)), (1, 4, 4))
    Counted(macs=288, params=88, stored=80, pooled=0, activated=0, shape=(8, 2, 2))
    """

    macs: int
    params: int
    stored: int
    pooled: int
    activated: int
    shape: Shape


def count_network(network: nn.Module, shape: Shape, name: str = "the client") -> Counted:
    """Count a network by passing one input of zeros through it, in eval mode.

    Args:
        network: Images (n, *shape) to (n, …); it is not changed.
        shape: Of one input.
        name: What an error calls it.
    """
    network = copy.deepcopy(getattr(network, "_orig_mod", network)).eval()
    weight = next(network.parameters(), torch.zeros(()))
    with torch.random.fork_rng(devices=[]):  # a channel draws
        cost = Cost.of(network, shape, name)
        with torch.no_grad(), _Watch() as watch:
            network(torch.zeros(1, *shape).to(weight))
    norms = [m for m in network.modules() if isinstance(m, _BatchNorm)]
    own = {id(v) for m in norms for v in (*m.parameters(), *m.buffers())}
    used = [v for v in network.parameters() if id(v) in watch.readers]  # a tap leaves some out
    rest = [v for v in (*used, *network.buffers()) if id(v) not in own]
    scales = sum(isinstance(m, GaussianNoise) and m.std > 0 for m in network.modules())
    return Counted(
        macs=cost.macs,
        params=cost.params,
        stored=sum(v.numel() for v in rest) + sum(map(watch.folded, norms)) + scales,
        pooled=watch.pooled,
        activated=watch.activated,
        shape=cost.wire_shape,
    )


class OnDevice(nn.Module):
    """All that the client of a model computes for an image, as one network."""

    def __init__(self, model: SplitModel) -> None:
        super().__init__()
        self.encoder, self.channel, self.exit = model.encoder, model.channel, model.exit
        self.head = model.head if model.silent else None

    def forward(self, x: Tensor) -> Tensor:
        """What is sent (n, …), or the device's own answer where nothing is."""
        if self.head is not None:
            answer: Tensor = self.head(self.encoder(x))
            return answer
        if self.exit is not None and isinstance(self.encoder, TappedClient):
            z, features = self.encoder.both(x)
            self.exit.head(features)
        else:
            z = self.encoder(x)
        sent: Tensor = self.channel(z, None)
        return sent


@dataclass(frozen=True, kw_only=True)
class DeployedCost:
    """What both halves of a model cost for one image.

    Args:
        client: The device: body, projection, channel, own head.
        server: What follows the wire; None where nothing is sent.
        wire_floats: Numbers of one sending; 0 where nothing is sent.
        number_bits: Bits of each.
    """

    client: Counted
    server: Counted | None
    wire_floats: int
    number_bits: int

    @property
    def track(self) -> str | None:
        """The smallest track that the client belongs to."""
        made = self.client
        return track_of(made.macs, made.stored, self.wire_floats, self.number_bits)

    def to_json(self, sent: float = 1.0) -> dict[str, dict[str, Any]]:
        """The fields `client` and `server` of a record.

        Args:
            sent: Share of the images that leave the device; averages per image depend on it.
        """
        made, other = self.client, self.server
        bits = self.wire_floats * self.number_bits
        client = {
            "macs": made.macs, "params": made.params, "wire_floats": self.wire_floats,
            "stored": made.stored, "wire_bits": bits, "bits_per_image": sent * bits,
            "uncounted": {"pooling": made.pooled, "activations": made.activated},
            "track": self.track,
        }  # fmt: skip
        if other is None:
            none = dict.fromkeys(("macs", "params", "macs_per_image"), 0)
            return {"client": client, "server": none}
        server = {"macs": other.macs, "params": other.params, "macs_per_image": sent * other.macs}
        return {"client": client, "server": server}


def deployed_cost(model: SplitModel, image_shape: Shape) -> DeployedCost:
    """Count both halves of a model for images (c, h, w).

    >>> model = SplitModel(nn.Linear(4, 3), Channel([GaussianNoise(0.1)]), nn.Linear(3, 2))
    >>> found = deployed_cost(model, (4,))
    >>> found.client.macs, found.client.stored, found.wire_floats, found.number_bits, found.track
    (12, 16, 3, 32, 'B1')
    """
    client = count_network(OnDevice(model), image_shape)
    if model.silent:
        return DeployedCost(client=client, server=None, wire_floats=0, number_bits=0)
    return DeployedCost(
        client=client,
        server=count_network(model.head, client.shape, "the server"),
        wire_floats=math.prod(client.shape),
        number_bits=wire_bits(model.encoder, model.channel),
    )
