"""Backbones as flat `nn.Sequential`s of stages, each with a private place to cut them.

`vgg11` counts its entries as the CEM code counts `cutlayer` (max-pools included, from 1), so that
``cut(vgg11(...), at=4)`` is the split of the published tables.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import count

import torch
from torch import nn

from splitveil.errors import ConfigError
from splitveil.nets.blocks import ResidualBlock, conv3x3, conv_bn_relu, xavier_init
from splitveil.nets.budget import LARGE_SIDE, THIN_CLIENTS
from splitveil.nets.clients import ClientSpec, build_client
from splitveil.nets.entries import check_cutlayer, with_bottleneck
from splitveil.nets.mobilenet import mobilenetv2
from splitveil.nets.resnet import resnet20

Shape = tuple[int, int, int]
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


def _rest_of_vgg11(wire: Shape, halvings: int, num_classes: int) -> list[nn.Module]:
    """VGG11 after so many of its five pools, entered by a 3×3 convolution from the wire's map."""
    pools = [i for i, entry in enumerate(_VGG11) if entry == "M"]
    start = pools[halvings - 1] + 1
    width = [w for w in _VGG11[:start] if isinstance(w, int)][-1]
    left = 2 ** (len(pools) - halvings)
    features = 512 * (wire[1] // left) * (wire[2] // left)
    enter = conv3x3(wire[0], width)
    return [enter, *_vgg_entries(width, start), _classifier(features, num_classes)]


def _small_server(channels: int, num_classes: int) -> nn.Sequential:
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
    """VGG11 with BatchNorm; entry `cutlayer` ends in the bottleneck and a sigmoid.

    The bottleneck is a 3×3 convolution to `bottleneck` channels on the client and one back on the
    server, part of the entries before and after the cut; None leaves it out. At 3×32×32, cut 4,
    the client has 85,256 parameters, 21.2 MMAC and sends 8×8×8 numbers.
    """
    channels, side = image_shape[0], min(image_shape[1:])
    if side < 32:  # noqa: PLR2004 - five halvings must leave a pixel
        raise ConfigError(
            f"vgg11 needs images of at least 32×32, got {image_shape}; "
            "use larger images or the net 'small'"
        )
    check_cutlayer(cutlayer, len(_VGG11) - 1)
    width = [w for w in _VGG11[:cutlayer] if isinstance(w, int)][-1]
    entries = with_bottleneck(_vgg_entries(channels, 0), cutlayer, width, bottleneck)
    for entry in entries[:cutlayer]:
        xavier_init(entry)
    features = 512 * (image_shape[1] // 32) * (image_shape[2] // 32)
    return nn.Sequential(*entries, _classifier(features, num_classes))


def thin_resnet(image_shape: Shape, num_classes: int) -> nn.Sequential:
    """A thin, deep residual client in front of VGG11's own server: depth instead of width.

    Client: stem 16, residual blocks 16, 32 (stride 2), 32, 64 (stride 2), a 3×3 convolution 64,
    one to 8 channels, sigmoid. At 3×32×32: 19.87 MMAC and 8×8×8 numbers on the wire. Cut at 1.
    """
    channels, side = image_shape[0], min(image_shape[1:])
    if side < 32:  # noqa: PLR2004 - the server halves three times after the client's two
        raise ConfigError(
            f"thin-resnet needs images of at least 32×32, got {image_shape}; "
            "use larger images or the net 'small'"
        )
    client = nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        ResidualBlock(16, 16),
        ResidualBlock(16, 32, 2),
        ResidualBlock(32, 32),
        ResidualBlock(32, 64, 2),
        conv_bn_relu(64, 64),
        conv3x3(64, 8),
        nn.Sigmoid(),
    )
    # The client's strides round up, the server's pools round down.
    height, width = (-(-side // 4) for side in image_shape[1:])
    return nn.Sequential(client, *_rest_of_vgg11((8, height, width), 2, num_classes))


def client_net(spec: ClientSpec, image_shape: Shape, num_classes: int) -> nn.Sequential:
    """A thin client in front of the rest of VGG11, of the small net's server under 32×32. Cut at 1.

    With the thin ResNet's spec it is `thin_resnet`, bit for bit.
    """
    client = build_client(spec, image_shape)
    if min(image_shape[1:]) < LARGE_SIDE:
        return nn.Sequential(client, _small_server(spec.wire_channels, num_classes))
    wire = spec.wire_shape(image_shape)
    return nn.Sequential(client, *_rest_of_vgg11(wire, spec.halvings, num_classes))


def small(image_shape: Shape, num_classes: int) -> nn.Sequential:
    """A small residual net for 8×8 to 28×28 images; sends 4 channels of a quarter-size map.

    Client: stem 16, residual blocks 16, 32 (stride 2), 32 (stride 2 from 16 pixels on), a 3×3
    convolution to 4 channels, sigmoid: 64 numbers for 8×8, 196 for 28×28. Cut at 1.
    """
    channels, side = image_shape[0], min(image_shape[1:])
    if side < 4:  # noqa: PLR2004 - two pixels must be left after the stride
        raise ConfigError(
            f"images must be at least 4×4, got {image_shape} (c, h, w); resize them to that or more"
        )
    large = side >= 16  # noqa: PLR2004 - as the docstring says
    client = nn.Sequential(
        conv_bn_relu(channels, 16),
        ResidualBlock(16, 16),
        ResidualBlock(16, 32, 2),
        ResidualBlock(32, 32, 2 if large else 1),
        conv3x3(32, 4),
        nn.Sigmoid(),
    )
    return nn.Sequential(client, _small_server(4, num_classes))


@dataclass(frozen=True)
class Net:
    """A backbone that can be asked for by name, and where it is cut."""

    summary: str
    build: Callable[[Shape, int], nn.Sequential]
    cut_at: int


def has_cuts(net: Net) -> bool:
    """Whether a net can be cut elsewhere than at its own place."""
    return "cutlayer" in signature(net.build).parameters


def every_cut(name: str) -> list[Net]:
    """The net of this name at each place where it can be cut.

    >>> len(every_cut("resnet20")), len(every_cut("small"))
    (10, 1)
    """
    if not has_cuts(NETS[name]):
        return [NETS[name]]
    found: list[Net] = []
    with suppress(ConfigError):  # beyond the last place
        for at in count(1):
            found.append(cut_elsewhere(name, at))
    return found


def cut_elsewhere(name: str, at: int) -> Net:
    """The net of this name, cut after entry `at` instead of at its own place.

    A place that it does not have is refused here, before any data is fetched for it.
    """
    net = NETS[name]
    if not has_cuts(net):
        movable = [n for n, one in NETS.items() if has_cuts(one)]
        raise ConfigError(f"{name} has one cut only; NAME@N is for {', '.join(movable)}")
    summary = f"{name} cut after entry {at}, C8 bottleneck"
    build = partial(net.build, cutlayer=at)  # type: ignore[call-arg]
    with torch.device("meta"):  # tensors without values: nothing is allocated or drawn
        build((3, 64, 64), 2)
    return Net(summary, build, at)


NETS: Mapping[str, Net] = {
    "mobilenetv2": Net("MobileNetV2 cut after block 7, C8 bottleneck, 29.9 MMAC", mobilenetv2, 8),
    "resnet20": Net("ResNet-20 cut after block 4, C8 bottleneck, 18.9 MMAC", resnet20, 5),
    "small": Net("residual client for small images (8×8 to 28×28)", small, 1),
    "thin-deep": Net(
        "deep inverted-residual client to a 4×4 map, 19.9 MMAC, VGG11 server",
        partial(client_net, THIN_CLIENTS["thin-deep"]),
        1,
    ),
    "thin-mobilenet": Net(
        "thin inverted-residual client, 21.0 MMAC, VGG11 server",
        partial(client_net, THIN_CLIENTS["thin-mobilenet"]),
        1,
    ),
    "thin-resnet": Net("thin residual client, 19.9 MMAC, VGG11 server", thin_resnet, 1),
    "thin-strided": Net(
        "thin client of plain strided convolutions, 19.6 MMAC, VGG11 server",
        partial(client_net, THIN_CLIENTS["thin-strided"]),
        1,
    ),
    "vgg11": Net("VGG11-BN cut after entry 4, C8 bottleneck, 21.2 MMAC", vgg11, 4),
}
