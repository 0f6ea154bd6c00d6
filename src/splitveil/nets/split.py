"""Cutting a backbone in two, and counting what the client's half costs."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, cast

import torch
from torch import Generator, Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from splitveil.errors import ConfigError
from splitveil.graphs import compiled
from splitveil.nets.channel import Channel
from splitveil.types import Victim

Shape = tuple[int, ...]
Tap = Callable[[Tensor], None]


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

    def split_forward(
        self, x: Tensor, generator: Generator | None = None, tap: Tap | None = None
    ) -> SplitOutput:
        """Everything one pass computes; `tap` is shown z before the channel and the head run."""
        z = self.encoder(x)
        if tap is not None:
            tap(z)
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
        return count_macs(self.encoder, input_shape)

    def wire_shape(self, input_shape: Shape) -> Shape:
        """Shape of the smashed data of one image."""
        return tuple(_passed(_probe(self.encoder), input_shape).shape[1:])

    def wire_floats(self, input_shape: Shape) -> int:
        """How many numbers cross the wire for one image."""
        return int(torch.Size(self.wire_shape(input_shape)).numel())

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
    plain = isinstance(backbone, nn.Sequential) and type(backbone).forward is nn.Sequential.forward
    if not (plain and isinstance(backbone, nn.Sequential)):
        raise ConfigError(
            f"cut needs a plain nn.Sequential, got {type(backbone).__name__}; wrap the stages of "
            "your model: nn.Sequential(stem, stage1, …, nn.Flatten(), classifier)"
        )
    # Not children(): that would yield a module used twice, one ReLU say, only once.
    children = list(backbone)
    if len(children) <= 1:
        raise ConfigError(
            f"a backbone of {'one child' if children else 'no children'} cannot be cut; wrap its "
            "stages: nn.Sequential(stem, stage1, …, nn.Flatten(), classifier)"
        )
    if not isinstance(at, int) or isinstance(at, bool) or not 1 <= at < len(children):
        raise ConfigError(
            f"at must leave a layer on both sides: 1..{len(children) - 1} for this backbone of "
            f"{len(children)} children, got {at!r}"
        )
    encoder, head = nn.Sequential(*children[:at]), nn.Sequential(*children[at:])
    return SplitModel(encoder, Channel() if channel is None else channel, head)


def count_macs(module: nn.Module, input_shape: Shape) -> int:
    """Multiply-adds of the convolutions and matrix products of `module` for one input.

    Attention is counted by the products it consists of, whichever fused kernel would run; so are
    functional calls.

    >>> count_macs(nn.Conv1d(3, 5, 3), (3, 10))  # 8 places, 5 channels, 3·3 weights
    360
    """
    probe = _probe(module)
    with _unfused(), FlopCounterMode(display=False) as counter:
        _passed(probe, input_shape)
    return int(counter.get_total_flops()) // 2  # a multiply-add is two operations


@contextmanager
def _unfused() -> Iterator[None]:
    """Layers as the matrix products they consist of: a fused kernel is not counted."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _probe(module: nn.Module) -> nn.Module:
    """A copy in eval mode: counting must not move BatchNorm statistics.

    Of what torch.compile wraps it is the module inside, whose products can be seen.
    """
    plain: nn.Module = getattr(module, "_orig_mod", module)
    return copy.deepcopy(plain).eval()


@torch.no_grad()
def _passed(probe: nn.Module, input_shape: Shape) -> Tensor:
    """What comes out for an image of zeros."""
    first = next(probe.parameters(), None)
    try:
        zeros = torch.zeros(1, *input_shape)
        return cast(Tensor, probe(zeros if first is None else zeros.to(first)))
    except (RuntimeError, TypeError, ValueError) as err:
        raise ConfigError(
            f"no image of shape {input_shape!r} passes through the client; give channels, height "
            f"and width, for example (3, 32, 32): {err}"
        ) from err
