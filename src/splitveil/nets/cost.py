"""What clients and servers cost, and the tracks that cap a client.

Counted is what the protocol calls the cost of a device: every convolution, linear map and matrix
product of the client, own head and maps of the channel included; the numbers that it stores, after
BatchNorm is folded into the convolution before it; the bits that it sends. Pooling and activations
count 0 and are listed apart. The table of noise on a grid is part of the program, not of a model.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from splitveil.errors import ConfigError, unknown
from splitveil.nets.channel import GaussianNoise, wire_bits
from splitveil.nets.exit import TappedClient
from splitveil.nets.split import Cost, Shape, SplitModel


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

    >>> from splitveil.nets.channel import Channel
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
