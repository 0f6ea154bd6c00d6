"""Which clients and cuts fit a budget.

`split.count_network` counts a built client. The costs of a `ClientSpec` come from a list of its
convolutions, so that thousands of specs can be compared without building one; tests check both
against each other.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import product, zip_longest
from typing import NamedTuple

import torch
from torch import nn

from splitveil.errors import ConfigError, unknown
from splitveil.nets.catalogue import Net
from splitveil.nets.clients import (
    CLIENT_PREFIX,
    FAMILIES,
    LARGE_SIDE,
    MIN_SIDE,
    THIN_CLIENTS,
    ClientSpec,
    require,
)
from splitveil.nets.split import Cost, Shape, stages_of, track_of

ImageShape = tuple[int, int, int]

_TAPS = 9  # of a 3×3 kernel
_MAP = 3  # dimensions of a map: channels, height, width
_WIDTHS = (4, 8, 12, 16, 24, 32, 48, 64, 96)
_EXPANSIONS = (2, 4, 6)
_DEEPEST = 4


def check_budget(max_macs: float | int, wire_floats: int, max_params: int | None = None) -> None:
    """Reject a budget that no client could keep."""
    require(
        (0 < max_macs < math.inf, f"macs must be a finite number > 0, got {max_macs}"),
        (wire_floats >= 1, f"wire must be at least 1, got {wire_floats}"),
        (max_params is None or max_params >= 1, f"params must be at least 1, got {max_params}"),
    )


class Convolution(NamedTuple):
    """One convolution; `beside`: it is on a shortcut; `norm`: BatchNorm follows."""

    inputs: int
    outputs: int
    kernel: int = 3
    stride: int = 1
    groups: int = 1
    bias: bool = False
    norm: bool = True
    beside: bool = False

    @property
    def weights(self) -> int:
        """Numbers in the kernel, which are the multiply-adds per position of the output."""
        return self.outputs * (self.inputs // self.groups) * self.kernel**2


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A thin client and what it costs for one image.

    Args:
        net: Its name for `--net`: a registered name, or `client:` and the spec.
        spec: Its description.
        macs: Multiply-adds.
        params: Parameters in training.
        stored: Parameters after folding BatchNorm.
        wire_floats: Numbers it sends.
        depth: Convolutions one after another, without shortcuts.
        receptive_field: Side, in pixels, of the square that one number on the wire depends on.
    """

    net: str
    spec: ClientSpec
    macs: int
    params: int
    stored: int
    wire_floats: int
    depth: int
    receptive_field: int

    @property
    def track(self) -> str | None:
        """The smallest track that it belongs to."""
        return track_of(self.macs, self.stored, self.wire_floats)


def convolutions(spec: ClientSpec, channels: int) -> Iterator[Convolution]:
    """The convolutions of a client for images with this number of channels, in order."""
    yield Convolution(channels, spec.stem, stride=spec.stem_stride)
    for block in spec.blocks():
        yield from _convolutions_of_block(spec, *block)
    width = spec.widths[-1]
    if spec.family == "residual":
        yield Convolution(width, width, bias=True)
    elif spec.family == "inverted":
        yield Convolution(width, width, 1)
    yield Convolution(width, spec.wire_channels, bias=True, norm=False)


def _convolutions_of_block(
    spec: ClientSpec, width: int, out: int, stride: int
) -> Iterator[Convolution]:
    if spec.family == "inverted":
        inside = width * spec.expansion
        if spec.expansion > 1:
            yield Convolution(width, inside, 1)
        yield Convolution(inside, inside, stride=stride, groups=inside)
        yield Convolution(inside, out, 1)
        return
    yield Convolution(width, out, stride=stride)
    if spec.family == "residual":
        yield Convolution(out, out)
        if stride > 1 or width != out:
            yield Convolution(width, out, 1, stride, beside=True)


@lru_cache(maxsize=2**14)
def weigh(spec: ClientSpec, image_shape: ImageShape) -> Candidate:
    """The costs of a client for one image (c, h, w).

    >>> found = weigh(THIN_CLIENTS["thin-resnet"], (3, 32, 32))
    >>> found.macs, found.wire_floats, found.depth, found.receptive_field
    (19873792, 512, 11, 49)
    """
    height, width = image_shape[1:]
    macs = params = stored = depth = 0
    field = step = 1
    for conv in convolutions(spec, image_shape[0]):
        if not conv.beside:  # a shortcut ends on the same map as its block, already counted
            height, width = -(-height // conv.stride), -(-width // conv.stride)
            field, step = field + (conv.kernel - 1) * step, step * conv.stride
            depth += 1
        macs += conv.weights * height * width
        params += conv.weights + conv.outputs * (conv.bias + 2 * conv.norm)
        stored += conv.weights + conv.outputs * (conv.bias or conv.norm)
    names = [name for name, known in THIN_CLIENTS.items() if known == spec]
    named = names and min(image_shape[1:]) >= LARGE_SIDE
    return Candidate(
        net=names[0] if named else f"{CLIENT_PREFIX}{spec}",
        spec=spec,
        macs=macs,
        params=params,
        stored=stored,
        wire_floats=math.prod(spec.wire_shape(image_shape)),
        depth=depth,
        receptive_field=field,
    )


def _depths(stages: int) -> set[tuple[int, ...]]:
    """Depths of stages: all equal, all but the first deeper, or only the middle ones deeper."""
    found: set[tuple[int, ...]] = set()
    for depth in range(1, _DEEPEST + 1):
        found |= {
            (depth,) * stages,
            (1, *[depth] * (stages - 1)),
            (1, *[depth] * (stages - 2), 1)[:stages],
        }
    return found


@cache
def _bodies() -> tuple[ClientSpec, ...]:
    """The named clients, and a grid whose widths double per stage; `client_grid` sets the wires."""
    found: list[ClientSpec] = [*THIN_CLIENTS.values()]
    for stem_stride in (1, 2):
        for stages in range(3 - stem_stride, 5 - stem_stride + 1):
            for width in _WIDTHS:
                widths = tuple(width * 2**i for i in range(stages))
                for depths in sorted(_depths(stages)):
                    base = ClientSpec(
                        family="residual", stem=width, widths=widths, depths=depths,
                        wire_channels=1, stem_stride=stem_stride,
                    )  # fmt: skip
                    found += [base, replace(base, family="strided")]
                    found += [replace(base, family="inverted", expansion=e) for e in _EXPANSIONS]
    return tuple(found)


@lru_cache(maxsize=64)
def client_grid(
    image_shape: ImageShape, *, wire_floats: int, family: str | None = None, smaller: bool = False
) -> tuple[ClientSpec, ...]:
    """The specs of the grid that send at most `wire_floats` numbers for an image.

    Each sends as many channels as fit, but no more than its last stage has; with `smaller` also
    half, a quarter and so on of that number.
    """
    if family is not None and family not in FAMILIES:
        raise ConfigError(unknown("client family", family, FAMILIES))
    if min(image_shape[1:]) < MIN_SIDE or image_shape[0] < 1:
        raise ConfigError(f"images must be at least 1×{MIN_SIDE}×{MIN_SIDE}, got {image_shape}")
    found: dict[ClientSpec, None] = {}  # a set that keeps its order
    for body in _bodies():
        if family not in (None, body.family) or body.downsampling > min(image_shape[1:]):
            continue
        _, height, width = body.wire_shape(image_shape)
        channels = min(wire_floats // (height * width), body.widths[-1])
        while channels >= 1:
            found[replace(body, wire_channels=channels)] = None
            channels = channels // 2 if smaller else 0
    return tuple(found)


def candidates(
    image_shape: ImageShape,
    *,
    max_macs: float | int,
    wire_floats: int,
    max_params: int | None = None,
    max_stored: int | None = None,
    family: str | None = None,
    smaller: bool = False,
) -> list[Candidate]:
    """Thin clients within a budget, those first that spend it on depth.

    At equal cost, depth protects better than width. Clients that use the same tenth of wire and
    multiply-adds count as equal; among them, named nets come first, then deeper ones. Families take
    turns, because their depths do not compare: an inverted block has three convolutions where a
    plain one has one. Only an audit tells which client is private.

    Args:
        image_shape: Shape of one image (c, h, w).
        max_macs: Multiply-adds for one image, > 0.
        wire_floats: Numbers sent for one image, ≥ 1.
        max_params: Parameters in training, ≥ 1; None: any number.
        max_stored: Parameters after folding BatchNorm, ≥ 1; None: any number.
        family: Only clients of this family; None: all.
        smaller: Whether to list smaller wires too.

    >>> found = candidates((3, 32, 32), max_macs=21.9e6, wire_floats=512, family="residual")
    >>> [(client.net, client.depth) for client in found[:2]]
    [('thin-resnet', 11), ('client:residual-12-12.24x3.48x3.96-c32', 19)]
    """
    check_budget(max_macs, wire_floats, max_params)
    specs = client_grid(image_shape, wire_floats=wire_floats, family=family, smaller=smaller)
    weighed = (weigh(spec, image_shape) for spec in specs)
    fitting = [
        found
        for found in weighed
        if found.macs <= max_macs
        and (max_params is None or found.params <= max_params)
        and (max_stored is None or found.stored <= max_stored)
    ]

    def merit(found: Candidate) -> tuple[int, int, bool, int, int, str]:
        wire = math.ceil(10 * found.wire_floats / wire_floats)
        macs = math.ceil(10 * found.macs / max_macs)
        named = found.net in THIN_CLIENTS
        return -wire, -macs, not named, -found.depth, -found.macs, str(found.spec)

    by_family: dict[str, list[Candidate]] = {}
    for found in sorted(fitting, key=merit):
        by_family.setdefault(found.spec.family, []).append(found)
    turns = zip_longest(*(by_family[name] for name in sorted(by_family)))
    return [found for turn in turns for found in turn if found is not None]


@dataclass(frozen=True, kw_only=True)
class Answering:
    """A client that answers alone: the body of a spec, the mean over its map, a linear layer.

    Args:
        spec: Its description; what it would send is not built.
        macs: Multiply-adds for one image.
        stored: Numbers that it stores.
        depth: Convolutions one after another, without shortcuts.
    """

    spec: ClientSpec
    macs: int
    stored: int
    depth: int


@lru_cache(maxsize=2**14)
def weigh_alone(spec: ClientSpec, image_shape: ImageShape, num_classes: int) -> Answering:
    """The costs of a client that answers alone.

    >>> from splitveil.nets.clients import parse_client
    >>> found = weigh_alone(parse_client("strided-8s2-16-c1"), (1, 8, 8), 10)
    >>> found.macs, found.stored  # 16·(9·8 + 9·8·16) and 16·10; 80 + 1168 and 170
    (19744, 1418)
    """
    whole, width = weigh(spec, image_shape), spec.widths[-1]
    _, height, breadth = spec.wire_shape(image_shape)
    wire = Convolution(width, spec.wire_channels, bias=True, norm=False)
    return Answering(
        spec=spec,
        macs=whole.macs - wire.weights * height * breadth + width * num_classes,
        stored=whole.stored - wire.weights - wire.outputs + (width + 1) * num_classes,
        depth=whole.depth - 1,
    )


_GROWTH = (1.0, 1.5, 2.0)  # of the width from stage to stage
_BLOCKS = (1, 2, 3, 4, 6)  # of a stage of a client that answers alone
_SPENDS = 0.7  # of one cap at least, where some do


@cache
def _answering_bodies() -> tuple[ClientSpec, ...]:
    """A grid that is wider in depth and growth than that of `client_grid`."""
    found: dict[ClientSpec, None] = {}
    for stem_stride, growth, width in product((1, 2), _GROWTH, (*_WIDTHS, 20)):
        for stages in range(3 - stem_stride, 5 - stem_stride + 1):
            widths = tuple(4 * max(1, round(width * growth**i / 4)) for i in range(stages))
            for depth in _BLOCKS:
                later = (depth,) * (stages - 1)
                for depths in {(depth, *later), (1, *later), (2, *later)}:
                    base = ClientSpec(
                        family="residual", stem=widths[0], widths=widths, depths=depths,
                        wire_channels=1, stem_stride=stem_stride,
                    )  # fmt: skip
                    found |= dict.fromkeys([base, replace(base, family="strided")])
                    for e in (*_EXPANSIONS, 3):
                        found[replace(base, family="inverted", expansion=e)] = None
    return tuple(found)


def answering_clients(
    image_shape: ImageShape,
    num_classes: int,
    *,
    max_macs: float | int,
    max_stored: float | int | None = None,
    wire_floats: int = 512,
    most: int = 16,
    deepest: bool = True,
) -> list[Answering]:
    """Clients that can answer alone within a budget, as different from each other as the grid has.

    The deepest of each family come first, of those that use at least 0.7 of one cap. Then families
    take turns, inverted ones twice as often; within a family the sizes of the last map, each with
    the client that uses both caps most, then the one of another depth.

    Args:
        image_shape: Shape of one image (c, h, w).
        num_classes: Number of classes, ≥ 2.
        max_macs: Multiply-adds for one image, > 0.
        max_stored: Numbers stored, ≥ 1; None: any number.
        wire_floats: Numbers that the same client may send, if it is used as a split client.
        most: How many, ≥ 1.
        deepest: Whether the deepest of each family come first.

    Raises:
        ConfigError: Nothing fits.

    >>> found = answering_clients((1, 8, 8), 10, max_macs=2e5, max_stored=16_000)
    >>> len(found), max(one.macs for one in found) <= 2e5
    (16, True)
    """
    check_budget(max_macs, wire_floats, None if max_stored is None else math.ceil(max_stored))
    require((most >= 1, f"top must be at least 1, got {most}"))
    weighed = [
        weigh_alone(_sending(body, image_shape, wire_floats), image_shape, num_classes)
        for body in _answering_bodies()
        if body.downsampling <= min(image_shape[1:])
    ]
    room = math.inf if max_stored is None else max_stored
    fitting = [one for one in weighed if one.macs <= max_macs and one.stored <= room]
    if not fitting:
        cheap, small = min(weighed, key=_macs), min(weighed, key=lambda one: one.stored)
        raise ConfigError(
            f"no client answers {num_classes} classes of {image_shape} images alone within "
            f"{max_macs:,.0f} multiply-adds and {room:,.0f} stored numbers; the cheapest, "
            f"{cheap.spec}, needs {cheap.macs:,} multiply-adds, and the smallest, {small.spec}, "
            f"stores {small.stored:,} numbers; raise the budget, or use smaller images"
        )

    def used(one: Answering) -> float:
        return one.macs / max_macs * (one.stored / max_stored if max_stored else 1.0)

    by_use = sorted(fitting, key=lambda one: (-used(one), -one.depth, str(one.spec)))
    spent = [o for o in fitting if max(o.macs / max_macs, o.stored / room) >= _SPENDS] or fitting
    deep = [
        min(own, key=lambda one: (-one.depth, -used(one), str(one.spec)))
        for family in FAMILIES
        if deepest and (own := [one for one in spent if one.spec.family == family])
    ]
    return list(dict.fromkeys([*deep, *_by_turns(by_use)]))[:most]


def _macs(one: Answering) -> int:
    return one.macs


def _sending(body: ClientSpec, image_shape: ImageShape, wire_floats: int) -> ClientSpec:
    """The body with as many channels on the wire as fit, at least one."""
    _, height, width = body.wire_shape(image_shape)
    return replace(
        body, wire_channels=max(1, min(wire_floats // (height * width), body.widths[-1]))
    )


def _by_turns(ordered: Sequence[Answering]) -> list[Answering]:
    """Clients in an order in which the first few differ most, see `answering_clients`."""
    kinds: dict[tuple[str, int, int], list[Answering]] = {}
    for one in ordered:
        kind = one.spec.family, one.spec.stem_stride, one.spec.halvings
        kinds.setdefault(kind, []).append(one)
    families: dict[str, list[Answering]] = {name: [] for name in FAMILIES}
    for turn in zip_longest(*(_depths_first(own) for own in kinds.values())):
        for one in turn:
            if one is not None:
                families[one.spec.family].append(one)
    inverted, residual, strided = (iter(families[name]) for name in sorted(FAMILIES))
    found: list[Answering] = []
    while len(found) < len(ordered):
        turns = (inverted, residual, inverted, strided)
        found += [given for one in turns if (given := next(one, None)) is not None]
    return found


def _depths_first(own: Sequence[Answering]) -> list[Answering]:
    """The first client of each depth, then the others."""
    firsts: dict[int, Answering] = {}
    for one in own:
        firsts.setdefault(one.depth, one)
    return list(dict.fromkeys([*firsts.values(), *own]))


def nothing_fits(
    image_shape: ImageShape,
    *,
    max_macs: float | int,
    wire_floats: int,
    max_params: int | None = None,
    max_stored: int | None = None,
    family: str | None = None,
) -> str:
    """Message for a budget that no client fits, with the cost of the cheapest one."""
    kind = "client" if family is None else f"{family} client"
    specs = client_grid(image_shape, wire_floats=wire_floats, family=family)
    if not specs:
        all_specs = client_grid(image_shape, wire_floats=math.prod(image_shape), family=family)
        least = min(math.prod(spec.wire_shape(image_shape)[1:]) for spec in all_specs)
        return f"no {kind} sends {wire_floats} numbers or fewer; the smallest wire has {least}"
    weighed = [weigh(spec, image_shape) for spec in specs]
    cheap, small = min(weighed, key=lambda c: c.macs), min(weighed, key=lambda c: c.params)
    stored = "" if max_params is None else f", {max_params:,} parameters"
    stored += "" if max_stored is None else f", {max_stored:,} stored numbers"
    return (
        f"no {kind} fits {max_macs:,.0f} multiply-adds{stored} and {wire_floats} numbers on the "
        f"wire; the cheapest, {cheap.net}, costs {cheap.macs:,} multiply-adds, and the smallest, "
        f"{small.net}, has {small.params:,} parameters"
    )


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """A 3×3 convolution (padding 1, with bias) to `channels` and a sigmoid, before the wire.

    `macs` and `params` are its own, to be added to the client's.
    """

    channels: int
    macs: int
    params: int
    wire_floats: int


@dataclass(frozen=True, kw_only=True)
class CutCost(Cost):
    """What the client of ``cut(backbone, at)`` costs for one image.

    Args:
        at: Where it is cut.
        layer: Type of its last layer.
        fits: Whether it keeps the budget.
        bottleneck: The widest one that makes it fit; None if none is needed, or none would do.
    """

    at: int
    layer: str
    fits: bool
    bottleneck: Bottleneck | None = None


def suggest_cuts(
    backbone: nn.Sequential, image_shape: Shape, max_macs: float | int, wire_floats: int
) -> list[CutCost]:
    """Every place where a backbone can be cut, with its costs, in order.

    Args:
        backbone: An `nn.Sequential` of at least two stages; it is not changed.
        image_shape: Shape of one image (c, h, w).
        max_macs: Multiply-adds for one image, > 0.
        wire_floats: Numbers sent for one image, ≥ 1.

    >>> net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.Flatten(), nn.Linear(128, 2))
    >>> first, second = suggest_cuts(net, (1, 4, 4), max_macs=5000, wire_floats=50)
    >>> first.macs, first.wire_floats, first.bottleneck
    (1152, 128, Bottleneck(channels=3, macs=3456, params=219, wire_floats=48))
    >>> second.fits, second.bottleneck
    (False, None)
    """
    check_budget(max_macs, wire_floats)
    stages = stages_of(backbone)
    found, macs, shape = [], 0, image_shape
    for at, stage in enumerate(stages[:-1], start=1):
        cost = Cost.of(stage, shape, f"layer {at} ({type(stage).__name__}) of the backbone")
        macs, shape = macs + cost.macs, cost.wire_shape
        # Not a sum over stages: those that share parameters store them once.
        params = sum(p.numel() for p in nn.Sequential(*stages[:at]).parameters())
        one = _cut_cost(replace(cost, macs=macs, params=params), at, stages, max_macs, wire_floats)
        if not one.fits:
            one = replace(one, bottleneck=_bottleneck(shape, max_macs - macs, wire_floats))
        found.append(one)
    return found


def cuts_of_nets(
    nets: Sequence[Net],
    image_shape: ImageShape,
    num_classes: int,
    max_macs: float | int,
    wire_floats: int,
) -> list[CutCost]:
    """What each net costs at its own cut, its bottleneck included.

    >>> from splitveil.nets.catalogue import NETS
    >>> [found] = cuts_of_nets([NETS["vgg11"]], (3, 32, 32), 10, max_macs=21.9e6, wire_floats=512)
    >>> found.at, found.macs, found.wire_shape, found.fits
    (4, 21233664, (8, 8, 8), True)
    """
    check_budget(max_macs, wire_floats)
    found = []
    for net in nets:
        with torch.device("meta"):  # tensors without values: nothing is allocated or drawn
            stages = stages_of(net.build(image_shape, num_classes))
            cost = Cost.of(nn.Sequential(*stages[: net.cut_at]), image_shape)
        found.append(_cut_cost(cost, net.cut_at, stages, max_macs, wire_floats))
    return found


def _cut_cost(
    cost: Cost, at: int, stages: Sequence[nn.Module], max_macs: float | int, wire_floats: int
) -> CutCost:
    fits = cost.macs <= max_macs and cost.wire_floats <= wire_floats
    return CutCost(**vars(cost), at=at, layer=type(stages[at - 1]).__name__, fits=fits)


def _bottleneck(shape: Shape, macs_left: float | int, wire_floats: int) -> Bottleneck | None:
    """The bottleneck with the most channels that fit; None if not even one channel fits."""
    if len(shape) != _MAP:
        return None
    inputs, pixels = shape[0], shape[1] * shape[2]
    weights = _TAPS * inputs  # of each output channel
    channels = int(min(wire_floats // pixels, macs_left // (weights * pixels)))
    if channels < 1:
        return None
    return Bottleneck(
        channels=channels,
        macs=channels * weights * pixels,
        params=channels * (weights + 1),
        wire_floats=channels * pixels,
    )
