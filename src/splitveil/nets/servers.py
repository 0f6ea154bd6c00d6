"""Servers by name: what answers from the wire. Each is built for the wire of a client."""

import itertools
import re
from collections.abc import Mapping
from functools import partial

from torch import nn

from splitveil.errors import ConfigError, Range, unknown
from splitveil.nets.blocks import ResidualBlock, plain_conv
from splitveil.nets.catalogue import NamedServer, Wire, rest_of_vgg11, small_server

MAP = 3  # dimensions of a wire that is a map: channels, height and width
WORKED_AT = 8  # pixels of a side: a residual server first halves larger maps down to this
_NARROWEST, _WIDEST = 8, 1024


def residual_server(
    width: int, wire: Wire, image_shape: tuple[int, int, int], num_classes: int
) -> nn.Sequential:
    """A residual server that enters from any wire.

    A 3×3 convolution, then blocks that halve the map until its sides are at most 8, three blocks of
    `width` channels, two of twice as many (the first halves the map while a side is above 4), the
    mean over the map, a linear map. A wire without a map is taken as one pixel.

    Args:
        width: Channels of the main stage, 8..1024.
        wire: Shape of what is sent: (c, h, w) or (d,).
        image_shape: Not used: any image will do.
        num_classes: Number of logits, ≥ 1.

    >>> from splitveil.nets.split import Cost
    >>> Cost.of(residual_server(64, (8, 8, 8), (3, 32, 32), 10), (8, 8, 8)).macs
    22840576
    """
    Range(_NARROWEST, _WIDEST).check("the width of a residual server", width)
    enter = [] if len(wire) == MAP else [nn.Unflatten(1, (wire[0], 1, 1))]
    if len(wire) not in (1, MAP):
        raise ConfigError(
            f"a residual server takes maps (c, h, w) or rows of numbers, got shape {wire}; "
            "end the client with nn.Flatten(), or give a server of your own as MODULE:FUNCTION"
        )
    side = max(wire[1:], default=1)
    halvings = 0
    while side > WORKED_AT:
        side, halvings = -(-side // 2), halvings + 1
    widths = [max(_NARROWEST, width >> left) for left in range(halvings, -1, -1)]
    layers: list[nn.Module] = [*enter, plain_conv(wire[0], widths[0])]
    for narrow, wide in itertools.pairwise(widths):
        layers.append(ResidualBlock(narrow, wide, 2))
    layers += [ResidualBlock(width, width) for _ in range(3)]
    layers.append(ResidualBlock(width, 2 * width, 2 if side > WORKED_AT // 2 else 1))
    layers.append(ResidualBlock(2 * width, 2 * width))
    pooled = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, num_classes)]
    return nn.Sequential(*layers, *pooled)


def vgg11_server(wire: Wire, image_shape: tuple[int, int, int], num_classes: int) -> nn.Sequential:
    """The rest of VGG11 behind a client that halves the map one to four times."""
    halvings = {2**n: n for n in range(1, 5)}
    ratios = {image_shape[1] / wire[1], image_shape[2] / wire[2]} if len(wire) == MAP else set()
    ratio = ratios.pop() if len(ratios) == 1 else 0
    if ratio not in halvings or min(image_shape[1:]) < 32 or any(s % 32 for s in image_shape[1:]):  # noqa: PLR2004
        raise ConfigError(
            f"server 'vgg11' does not fit the wire: it needs maps of 1/2, 1/4, 1/8 or 1/16 of the "
            f"side of images whose sides are multiples of 32, got a wire of shape {wire} for "
            f"images of shape {image_shape}; use server resnet-128, which takes any wire"
        )
    return nn.Sequential(
        *rest_of_vgg11((wire[0], wire[1], wire[2]), halvings[int(ratio)], num_classes)
    )


def small_map_server(
    wire: Wire, image_shape: tuple[int, int, int], num_classes: int
) -> nn.Sequential:
    """The server of the net `small`, for any map."""
    if len(wire) != MAP:
        raise ConfigError(
            f"server 'small' does not fit the wire: it needs a map (c, h, w), got shape {wire}; "
            "use server resnet-64, which takes any wire"
        )
    return small_server(wire[0], num_classes)


SERVERS: Mapping[str, NamedServer] = {
    "resnet-64": NamedServer("residual, about 23 MMAC from 8×8×8", partial(residual_server, 64)),
    "resnet-128": NamedServer("residual, about 91 MMAC from 8×8×8", partial(residual_server, 128)),
    "resnet-256": NamedServer("residual, about 361 MMAC from 8×8×8", partial(residual_server, 256)),
    "small": NamedServer("one residual block, for maps of small images", small_map_server),
    "vgg11": NamedServer("the rest of VGG11, for images from 32×32", vgg11_server),
}


def find_server(name: str) -> NamedServer:
    """The server of a name: one of `SERVERS`, or `resnet-WIDTH` of any width.

    >>> find_server("resnet-96").summary
    'residual server of width 96'
    """
    if name in SERVERS:
        return SERVERS[name]
    if match := re.fullmatch(r"resnet-([1-9][0-9]{0,3})", name):
        width = int(match[1])
        Range(_NARROWEST, _WIDEST).check("the width of a residual server", width)
        return NamedServer(f"residual server of width {width}", partial(residual_server, width))
    raise ConfigError(
        unknown("server", name, [*SERVERS, "resnet-WIDTH", "MODULE:FUNCTION of your own"])
    )
