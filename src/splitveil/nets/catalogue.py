"""Nets by name: backbones, `NAME@CUT` for another cut, `client:SPEC` for a thin client; pairs."""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import count

import torch
from torch import nn

from splitveil.errors import ConfigError, unknown
from splitveil.nets.backbones import (
    client_net,
    mobilenetv2,
    resnet20,
    small,
    small_client,
    vgg11,
)
from splitveil.nets.blocks import Shape, is_plain
from splitveil.nets.clients import CLIENT_PREFIX, THIN_CLIENTS, build_client, parse_client
from splitveil.nets.exit import tapped
from splitveil.nets.servers import NamedServer
from splitveil.nets.split import wire_shape


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
        for at in count(1):
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
