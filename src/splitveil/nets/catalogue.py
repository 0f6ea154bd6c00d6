"""Nets by name, and the backbones among them; servers are in `servers`.

A name is one of `NETS`, `NAME@CUT` for another cut, or `client:SPEC` for a thin client. Backbones
are flat `nn.Sequential`s of stages, with a bottleneck where they are cut. `cutlayer` counts entries
as the CEM code does, from 1 and with max-pools, so that ``cut(vgg11(...), at=4)`` is the split of
the published tables.
"""

import itertools
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from inspect import signature

import torch
from torch import nn

from splitveil.errors import ConfigError, unknown
from splitveil.nets.blocks import (
    ResidualBlock,
    Shape,
    check_side,
    conv3x3,
    conv_bn_relu,
    is_plain,
    plain_conv,
    with_bottleneck,
    xavier_init,
)
from splitveil.nets.clients import (
    CLIENT_PREFIX,
    LARGE_SIDE,
    MIN_SIDE,
    THIN_CLIENTS,
    ClientSpec,
    InvertedBlock,
    build_client,
    parse_client,
)
from splitveil.nets.exit import tapped
from splitveil.nets.split import wire_shape

Wire = tuple[int, ...]
_VGG11 = (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M")


def _classifier(features: int, num_classes: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(features, 512),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, num_classes),
    )


def _vgg_entries(in_channels: int, start: int) -> list[nn.Module]:
    entries: list[nn.Module] = []
    width = in_channels
    for entry in _VGG11[start:]:
        if isinstance(entry, int):
            entries.append(conv_bn_relu(width, entry))
            width = entry
        else:
            entries.append(nn.MaxPool2d(2))
    return entries


def rest_of_vgg11(wire: Shape, halvings: int, num_classes: int) -> list[nn.Module]:
    """What follows the pool number `halvings` of VGG11, behind a 3×3 convolution from the wire."""
    pools = [i for i, entry in enumerate(_VGG11) if entry == "M"]
    start = pools[halvings - 1] + 1
    width = [w for w in _VGG11[:start] if isinstance(w, int)][-1]
    left = 2 ** (len(pools) - halvings)
    features = 512 * (wire[1] // left) * (wire[2] // left)
    enter = conv3x3(wire[0], width)
    return [enter, *_vgg_entries(width, start), _classifier(features, num_classes)]


def small_server(channels: int, num_classes: int) -> nn.Sequential:
    """The server of `small`: from a map of these channels to logits."""
    return nn.Sequential(
        conv_bn_relu(channels, 64),
        ResidualBlock(64, 64),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, num_classes),
    )


def vgg11(
    image_shape: Shape, num_classes: int, *, cutlayer: int = 4, bottleneck: int | None = 8
) -> nn.Sequential:
    """VGG11 with BatchNorm, whose entry `cutlayer` ends in a bottleneck and a sigmoid.

    Args:
        image_shape: (c, h, w), at least 32×32.
        num_classes: Number of logits, ≥ 1.
        cutlayer: Entry after which it is cut, 1..12.
        bottleneck: Channels on the wire: a 3×3 convolution to them ends the client, one back begins
            the server. None leaves both and the sigmoid out.

    Returns:
        The entries in order, ready for `cut`.

    >>> from splitveil.nets import cut
    >>> client = cut(vgg11((3, 32, 32), 10), at=4)
    >>> client.macs((3, 32, 32)), client.client_params(), client.wire_shape((3, 32, 32))
    (21233664, 85256, (8, 8, 8))
    """
    check_side("vgg11", image_shape, LARGE_SIDE)
    widths = [max(w for w in _VGG11[:i] if isinstance(w, int)) for i in range(1, len(_VGG11))]
    entries = with_bottleneck(_vgg_entries(image_shape[0], 0), cutlayer, widths, bottleneck)
    for entry in entries[:cutlayer]:
        xavier_init(entry)
    features = 512 * (image_shape[1] // 32) * (image_shape[2] // 32)
    return nn.Sequential(*entries, _classifier(features, num_classes))


def client_net(spec: ClientSpec, image_shape: Shape, num_classes: int) -> nn.Sequential:
    """A thin client in front of the rest of VGG11, to be cut at 1.

    For images under 32×32 the server is that of `small`.
    """
    client = build_client(spec, image_shape)
    if min(image_shape[1:]) < LARGE_SIDE:
        return nn.Sequential(client, small_server(spec.wire_channels, num_classes))
    wire = spec.wire_shape(image_shape)
    return nn.Sequential(client, *rest_of_vgg11(wire, spec.halvings, num_classes))


def small(image_shape: Shape, num_classes: int) -> nn.Sequential:
    """A small residual net for 8×8 to 28×28 images, to be cut at 1.

    Client: stem 16, residual blocks 16, 32 (stride 2), 32 (stride 2 from 16 pixels on), a 3×3
    convolution to 4 channels, sigmoid. It sends 64 numbers for 8×8, 196 for 28×28.
    """
    return nn.Sequential(small_client(image_shape), small_server(4, num_classes))


def small_client(image_shape: Shape) -> nn.Sequential:
    """The client of `small`, for images (c, h, w)."""
    channels, side = image_shape[0], min(image_shape[1:])
    check_side("small", image_shape, MIN_SIDE, "resize them to that or more")
    large = side >= 16  # noqa: PLR2004 - as `small` says
    return nn.Sequential(
        conv_bn_relu(channels, 16),
        ResidualBlock(16, 16),
        ResidualBlock(16, 32, 2),
        ResidualBlock(32, 32, 2 if large else 1),
        conv3x3(32, 4),
        nn.Sigmoid(),
    )


_RESNET_WIDTHS, _RESNET_DEPTH = (16, 32, 64), 3


def resnet20(
    image_shape: Shape, num_classes: int, *, cutlayer: int = 5, bottleneck: int | None = 8
) -> nn.Sequential:
    """ResNet-20 of He et al. (2016, section 4.2), with a bottleneck after entry `cutlayer`.

    A stem, nine residual blocks in stages of 16, 32 and 64 channels, a pool, a linear map. The last
    two stages begin with stride 2; a shortcut that changes the shape is a 1×1 convolution (option
    B). With `bottleneck=None` it has 272,474 parameters and 40.8 MMAC at 3×32×32 and ten classes.
    `cutlayer` counts the stem as 1, the blocks as 2 to 10. Cut 5, where CEM cuts on TinyImageNet,
    is the first block of the second stage. CEM's own net is wider (32, 64, 128) and halves the map
    in every stage, so its wire is smaller.
    """
    check_side("resnet20", image_shape, MIN_SIDE)
    widths = [_RESNET_WIDTHS[0], *(w for w in _RESNET_WIDTHS for _ in range(_RESNET_DEPTH))]
    entries: list[nn.Module] = [plain_conv(image_shape[0], widths[0])]
    for width, out in itertools.pairwise(widths):
        entries.append(ResidualBlock(width, out, 1 if out == width else 2))
    entries += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], num_classes)]
    return nn.Sequential(*with_bottleneck(entries, cutlayer, widths, bottleneck))


# Expansion, channels, blocks, stride of the first block.
_MOBILENET_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
_MOBILENET_STEM, _MOBILENET_LAST = 32, 1280
_PHOTOGRAPH_SIDE = 64  # from here on MobileNetV2's strides are those for photographs


def mobilenetv2(
    image_shape: Shape, num_classes: int, *, cutlayer: int = 8, bottleneck: int | None = 8
) -> nn.Sequential:
    """MobileNetV2 of Sandler et al. (2018, table 2), with a bottleneck after entry `cutlayer`.

    A stem, 17 inverted blocks, a 1×1 convolution, a pool, a linear map. From 64×64 on it halves the
    map five times, as published; below, stem and second stage keep the size, as is usual for CIFAR.
    ReLU takes the place of ReLU6, whose bound only helps low-bit arithmetic. With
    `bottleneck=None` it has 3,504,872 parameters and 300.8 MMAC at 3×224×224 and 1000 classes.

    `cutlayer` counts the stem as 1, block b as b + 1, the 1×1 convolution as 19. Cut 8 is the first
    block of 64 channels: 8×8×8 numbers for 32×32, 8×4×4 for 64×64.
    """
    check_side("mobilenetv2", image_shape, 8)
    large = min(image_shape[1:]) >= _PHOTOGRAPH_SIDE
    widths = [_MOBILENET_STEM]  # output channels of each entry
    entries: list[nn.Module] = [plain_conv(image_shape[0], widths[0], 2 if large else 1)]
    for stage, (expansion, out, depth, first) in enumerate(_MOBILENET_STAGES):
        for block in range(depth):
            stride = first if block == 0 and (large or stage > 1) else 1
            entries.append(InvertedBlock(widths[-1], out, stride, expansion=expansion))
            widths.append(out)
    entries.append(plain_conv(widths[-1], _MOBILENET_LAST, kernel=1))
    widths.append(_MOBILENET_LAST)
    classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(_MOBILENET_LAST, num_classes))
    entries += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), classifier]
    return nn.Sequential(*with_bottleneck(entries, cutlayer, widths, bottleneck))


@dataclass(frozen=True)
class Net:
    """A backbone with a name, and where it is cut.

    Args:
        summary: One line for `splitveil nets`.
        build: Makes it from an image's shape (c, h, w) and the number of classes.
        cut_at: How many of its stages the client gets, ≥ 1.

    >>> NETS["vgg11"].cut_at
    4
    """

    summary: str
    build: Callable[[Shape, int], nn.Sequential]
    cut_at: int


@dataclass(frozen=True)
class NamedClient:
    """A client that any server can follow.

    Args:
        summary: One line about it.
        build: Makes it from an image's shape (c, h, w).
    """

    summary: str
    build: Callable[[Shape], nn.Module]


@dataclass(frozen=True)
class NamedServer:
    """A server with a name.

    Args:
        summary: One line for `splitveil nets`.
        build: Makes it from the wire's shape, the images' shape and the number of classes. It takes
            what was sent (n, *wire) and gives logits (n, classes).
    """

    summary: str
    build: Callable[[Wire, tuple[int, int, int], int], nn.Module]


def find_client(name: str) -> NamedClient:
    """The client of a name: `small`, a thin client or its SPEC; `NAME@N` taps its body at layer N.

    >>> find_client("thin-deep@4").summary
    'client thin-deep, wire after layer 4'
    """
    base, at, place = name.removeprefix(CLIENT_PREFIX).partition("@")
    if base == "small":
        client = NamedClient("client small", small_client)
    elif base in THIN_CLIENTS or base.count("-") > 1:
        spec = THIN_CLIENTS[base] if base in THIN_CLIENTS else parse_client(base)
        client = NamedClient(f"client {base}", partial(build_client, spec))
    else:
        names = ["small", *THIN_CLIENTS, "SPEC", "MODULE:FUNCTION of your own"]
        raise ConfigError(f"{unknown('client', base, names)}. `splitveil clients` lists specs")
    if not at:
        return client
    if not re.fullmatch(r"[1-9][0-9]?", place):
        raise ConfigError(
            f"the tap in NAME@N must be a whole number in 1..99, got '{name}'; for example {base}@2"
        )
    build = partial(_tapped_client, client.build, int(place))
    return NamedClient(f"{client.summary}, wire after layer {place}", build)


def _tapped_client(build: Callable[[Shape], nn.Module], tap: int, image_shape: Shape) -> nn.Module:
    return tapped(build(image_shape), tap, image_shape)


def paired(client: NamedClient, server: NamedServer) -> Net:
    """A client and a server that is built for its wire, as a net to be cut at 1."""

    def build(image_shape: Shape, num_classes: int) -> nn.Sequential:
        front = client.build(image_shape)
        rest = server.build(wire_shape(front, image_shape), image_shape, num_classes)
        return nn.Sequential(front, *(rest if is_plain(rest) else [rest]))

    return Net(f"{client.summary}; {server.summary}", build, 1)


def has_cuts(net: Net) -> bool:
    """Whether a net can be cut elsewhere, too."""
    return "cutlayer" in signature(net.build).parameters


def every_cut(name: str) -> list[Net]:
    """The net of this name at every place where it can be cut.

    >>> len(every_cut("resnet20")), len(every_cut("small"))
    (10, 1)
    """
    if not has_cuts(NETS[name]):
        return [NETS[name]]
    found: list[Net] = []
    with suppress(ConfigError):  # beyond the last place
        for at in itertools.count(1):
            found.append(cut_elsewhere(name, at))
    return found


def cut_elsewhere(name: str, at: int) -> Net:
    """The net of this name, cut after entry `at` instead of at its default place."""
    net = NETS[name]
    if not has_cuts(net):
        movable = [n for n, one in NETS.items() if has_cuts(one)]
        raise ConfigError(
            f"{name} has only one cut; NAME@N works for {', '.join(movable)}. Use --net {name}"
        )
    summary = f"{name} cut after entry {at}, C8 bottleneck"
    build = partial(net.build, cutlayer=at)  # type: ignore[call-arg]
    # Built once here, so that a cut that does not exist is reported before any data is downloaded.
    with torch.device("meta"):  # tensors without values: nothing is allocated or drawn
        build((3, 64, 64), 2)
    return Net(summary, build, at)


def _thin(name: str, summary: str) -> Net:
    """A thin client of this name in front of VGG11's server."""
    return Net(f"{summary}, VGG11 server", partial(client_net, THIN_CLIENTS[name]), 1)


NETS: Mapping[str, Net] = {
    "mobilenetv2": Net("MobileNetV2 cut after block 7, C8 bottleneck, 29.9 MMAC", mobilenetv2, 8),
    "resnet20": Net("ResNet-20 cut after block 4, C8 bottleneck, 18.9 MMAC", resnet20, 5),
    "small": Net("residual client for small images (8×8 to 28×28)", small, 1),
    "thin-deep": _thin("thin-deep", "deep inverted-residual client to a 4×4 map, 19.9 MMAC"),
    "thin-mobilenet": _thin("thin-mobilenet", "thin inverted-residual client, 21.0 MMAC"),
    "thin-resnet": _thin("thin-resnet", "thin residual client, 19.9 MMAC"),
    "thin-strided": _thin("thin-strided", "thin client of plain strided convolutions, 19.6 MMAC"),
    "vgg11": Net("VGG11-BN cut after entry 4, C8 bottleneck, 21.2 MMAC", vgg11, 4),
}


def find_net(name: str) -> Net:
    """The net of a name: one of `NETS`, `NAME@N` for a cut after entry N, or `client:SPEC`.

    >>> find_net("client:strided-16-16.32.64-c8").summary
    'client strided-16-16.32.64-c8'
    >>> find_net("resnet20@8").cut_at
    8
    """
    if name.startswith(CLIENT_PREFIX):
        spec = parse_client(name.removeprefix(CLIENT_PREFIX))
        return Net(f"client {spec}", partial(client_net, spec), 1)
    base, at, place = name.partition("@")
    if base not in NETS:
        raise ConfigError(unknown("net", base, [*NETS, f"{CLIENT_PREFIX}SPEC", "auto"]))
    if not at:
        return NETS[base]
    if not re.fullmatch(r"[1-9][0-9]*", place):
        raise ConfigError(
            f"the cut in NAME@N must be a whole number from 1 on, got '{name}'; for example "
            f"{base}@{NETS[base].cut_at}, the default"
        )
    return cut_elsewhere(base, int(place))
