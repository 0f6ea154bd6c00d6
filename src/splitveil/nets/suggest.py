"""Where a given backbone can be cut within a budget, and which bottleneck would make a cut fit."""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from splitveil.errors import ConfigError
from splitveil.nets.backbones import Net
from splitveil.nets.split import count_macs, cut

Shape = tuple[int, ...]

_TAPS = 9  # of a 3×3 kernel
_MAP = 3  # dimensions of a map: channels, height, width


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """A 3×3 convolution (padding 1, with bias) to `channels`, and a sigmoid, before the wire.

    `macs` and `params` are its own; the client's come on top.
    """

    channels: int
    macs: int
    params: int
    wire_floats: int


@dataclass(frozen=True, kw_only=True)
class CutCost:
    """What the client of ``cut(backbone, at)`` costs for one image.

    `layer` is the kind of its last layer. `fits`: it keeps the budget as it is. `bottleneck` is the
    widest that makes it fit; None where none is needed, or none would do.
    """

    at: int
    layer: str
    macs: int
    params: int
    wire_shape: Shape
    wire_floats: int
    fits: bool
    bottleneck: Bottleneck | None


def suggest_cuts(
    backbone: nn.Sequential, image_shape: Shape, max_macs: float | int, wire_floats: int
) -> list[CutCost]:
    """Every place where a backbone can be cut, with its costs, in the order of its layers.

    The backbone is only looked at: neither its weights nor its mode change.

    >>> net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.Flatten(), nn.Linear(128, 2))
    >>> first, second = suggest_cuts(net, (1, 4, 4), max_macs=5000, wire_floats=50)
    >>> first.macs, first.wire_floats, first.bottleneck
    (1152, 128, Bottleneck(channels=3, macs=3456, params=219, wire_floats=48))
    >>> second.fits, second.bottleneck
    (False, None)
    """
    _check_budget(max_macs, wire_floats)
    cut(backbone, 1)  # refuses what cannot be cut at all
    found, macs = [], 0
    for at, (more, shape) in enumerate(_walk(backbone, image_shape), start=1):
        macs += more
        sent = math.prod(shape)
        fits = macs <= max_macs and sent <= wire_floats
        found.append(
            CutCost(
                at=at,
                layer=type(backbone[at - 1]).__name__,
                macs=macs,
                params=cut(backbone, at).client_params(),
                wire_shape=shape,
                wire_floats=sent,
                fits=fits,
                bottleneck=None if fits else _bottleneck(shape, max_macs - macs, wire_floats),
            )
        )
    return found


def cuts_of_nets(
    nets: Sequence[Net],
    image_shape: tuple[int, int, int],
    num_classes: int,
    max_macs: float | int,
    wire_floats: int,
) -> list[CutCost]:
    """What each net costs where it is cut, its own bottleneck included.

    >>> from splitveil.nets import NETS
    >>> [found] = cuts_of_nets([NETS["vgg11"]], (3, 32, 32), 10, max_macs=21.9e6, wire_floats=512)
    >>> found.at, found.macs, found.wire_shape, found.fits
    (4, 21233664, (8, 8, 8), True)
    """
    _check_budget(max_macs, wire_floats)
    found = []
    for net in nets:
        with torch.device("meta"):  # tensors without values: nothing is allocated or drawn
            backbone = net.build(image_shape, num_classes)
            model = cut(backbone, net.cut_at)
            macs, shape = model.macs(image_shape), model.wire_shape(image_shape)
        sent = math.prod(shape)
        found.append(
            CutCost(
                at=net.cut_at,
                layer=type(backbone[net.cut_at - 1]).__name__,
                macs=macs,
                params=model.client_params(),
                wire_shape=shape,
                wire_floats=sent,
                fits=macs <= max_macs and sent <= wire_floats,
                bottleneck=None,
            )
        )
    return found


def _check_budget(max_macs: float | int, wire_floats: int) -> None:
    problems = [
        f"{name} must be {rule}, got {value}"
        for name, value, rule, good in (
            ("macs", max_macs, "a finite number > 0", 0 < max_macs < math.inf),
            ("wire", wire_floats, "at least 1", wire_floats >= 1),
        )
        if not good
    ]
    if problems:
        raise ConfigError("; ".join(problems))


def _walk(backbone: nn.Sequential, image_shape: Shape) -> Iterator[tuple[int, Shape]]:
    """Multiply-adds of each layer but the last, and the shape of what it gives."""
    shape = image_shape
    for place, layer in enumerate(list(backbone)[:-1], start=1):
        where = f"layer {place} ({type(layer).__name__}) of the backbone"
        try:
            out = _output(layer, shape)
        except (RuntimeError, ValueError, TypeError, IndexError) as err:
            raise ConfigError(
                f"{where} cannot take an input of shape {shape}: {err}; the images here are "
                f"{image_shape}, change them with --image or mend the layer"
            ) from err
        if not isinstance(out, Tensor) or out.ndim < 2:  # noqa: PLR2004 - images and their features
            raise ConfigError(
                f"{where} gives a {type(out).__name__}, not a tensor of one row per image; wrap it "
                "together with the layer that reads it"
            )
        macs, shape = count_macs(layer, shape), tuple(out.shape[1:])
        yield macs, shape


@torch.no_grad()
def _output(layer: nn.Module, shape: Shape) -> object:
    """What a copy of the layer, in eval mode, makes of zeros."""
    weight = next(layer.parameters(), torch.empty(0))
    return copy.deepcopy(layer).eval()(weight.new_zeros(1, *shape))


def _bottleneck(shape: Shape, macs_left: float | int, wire_floats: int) -> Bottleneck | None:
    """The most channels that wire and multiply-adds leave room for; None where not even one."""
    if len(shape) != _MAP:
        return None
    inputs, pixels = shape[0], shape[1] * shape[2]
    weights = _TAPS * inputs  # of each channel it makes
    channels = int(min(wire_floats // pixels, macs_left // (weights * pixels)))
    if channels < 1:
        return None
    return Bottleneck(
        channels=channels,
        macs=channels * weights * pixels,
        params=channels * (weights + 1),
        wire_floats=channels * pixels,
    )
