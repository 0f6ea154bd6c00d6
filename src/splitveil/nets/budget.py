"""Which thin clients fit a budget of multiply-adds, parameters and numbers on the wire.

Costs come from a table of a spec's convolutions, so that thousands of specs can be weighed without
building one; the tests hold the table against `count_macs` of the built clients.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import NamedTuple

from splitveil.errors import ConfigError, unknown
from splitveil.nets.clients import CLIENT_PREFIX, FAMILIES, MIN_SIDE, ClientSpec, parse_client

Shape = tuple[int, int, int]

THIN_CLIENTS: Mapping[str, ClientSpec] = {
    "thin-deep": parse_client("inverted-16-16.24x3.64x3.128x3-e4-c32"),
    "thin-mobilenet": parse_client("inverted-16-16.32x4.64x4-e4-c8"),
    "thin-resnet": parse_client("residual-16-16.32x2.64-c8"),
    "thin-strided": parse_client("strided-16-16x3.32x3.64x3-c8"),
}
LARGE_SIDE = 32  # from here on VGG11's server can stand behind a client
_WIDTHS = (4, 8, 12, 16, 24, 32, 48, 64, 96)
_EXPANSIONS = (2, 4, 6)
_DEEPEST = 4


class Convolution(NamedTuple):
    """One convolution; `beside` is one on a shortcut, `norm` one that BatchNorm follows."""

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
        """Numbers in the kernel: multiply-adds at each position of the output."""
        return self.outputs * (self.inputs // self.groups) * self.kernel**2


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A client and what it costs for one image.

    `depth` counts the convolutions one after another, without shortcuts; `receptive_field` is the
    side, in pixels, of the square that one number on the wire can see.
    """

    net: str
    spec: ClientSpec
    macs: int
    params: int
    wire_floats: int
    depth: int
    receptive_field: int


def convolutions(spec: ClientSpec, channels: int) -> Iterator[Convolution]:
    """The convolutions of a client for images of so many channels, in order."""
    yield Convolution(channels, spec.stem, stride=spec.stem_stride)
    width = spec.stem
    for stage, (out, depth) in enumerate(zip(spec.widths, spec.depths, strict=True)):
        for block in range(depth):
            stride = 2 if stage > 0 and block == 0 else 1
            yield from _block(spec, width, out, stride)
            width = out
    if spec.family == "residual":
        yield Convolution(width, width, bias=True)
    elif spec.family == "inverted":
        yield Convolution(width, width, 1)
    yield Convolution(width, spec.wire_channels, bias=True, norm=False)


def _block(spec: ClientSpec, width: int, out: int, stride: int) -> Iterator[Convolution]:
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
def weigh(spec: ClientSpec, image_shape: Shape) -> Candidate:
    """The costs of a client for one image (c, h, w).

    >>> found = weigh(THIN_CLIENTS["thin-resnet"], (3, 32, 32))
    >>> found.macs, found.wire_floats, found.depth, found.receptive_field
    (19873792, 512, 11, 49)
    """
    height, width = image_shape[1:]
    macs = params = depth = 0
    field = step = 1
    for conv in convolutions(spec, image_shape[0]):
        if not conv.beside:  # a shortcut ends on the map its block has already made
            height, width = -(-height // conv.stride), -(-width // conv.stride)
            field, step = field + (conv.kernel - 1) * step, step * conv.stride
            depth += 1
        macs += conv.weights * height * width
        params += conv.weights + conv.outputs * (conv.bias + 2 * conv.norm)
    return Candidate(
        net=net_name(spec, image_shape),
        spec=spec,
        macs=macs,
        params=params,
        wire_floats=math.prod(spec.wire_shape(image_shape)),
        depth=depth,
        receptive_field=field,
    )


def net_name(spec: ClientSpec, image_shape: Shape) -> str:
    """What `--net` calls a client: its registered name, or `client:` and the spec."""
    names = [name for name, known in THIN_CLIENTS.items() if known == spec]
    large = min(image_shape[1:]) >= LARGE_SIDE
    return names[0] if names and large else f"{CLIENT_PREFIX}{spec}"


def _depths(stages: int) -> set[tuple[int, ...]]:
    """Every stage alike, all but the first deeper, or only the middle ones deeper."""
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
    """The named clients and a grid whose widths double with every stage; `grid` sets the wires."""
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


def grid(
    image_shape: Shape, *, wire_floats: int, family: str | None = None, smaller: bool = False
) -> list[ClientSpec]:
    """The specs of the grid that send at most `wire_floats` numbers for an image.

    Each sends as many channels as fit, but no more than its last stage has; with `smaller` also
    a half, a quarter and so on of them.
    """
    if family is not None and family not in FAMILIES:
        raise ConfigError(unknown("client family", family, FAMILIES))
    if min(image_shape[1:]) < MIN_SIDE or image_shape[0] < 1:
        raise ConfigError(f"images must be at least 1×{MIN_SIDE}×{MIN_SIDE}, got {image_shape}")
    return list(_grid(image_shape, wire_floats, family, smaller))


@lru_cache(maxsize=64)
def _grid(
    image_shape: Shape, wire_floats: int, family: str | None, smaller: bool
) -> tuple[ClientSpec, ...]:
    found: dict[ClientSpec, None] = {}  # in place of a set, for its order
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
    image_shape: Shape,
    *,
    max_macs: float | int,
    wire_floats: int,
    max_params: int | None = None,
    family: str | None = None,
    smaller: bool = False,
) -> list[Candidate]:
    """The clients of the grid within a budget, those that spend it on depth first.

    At equal cost depth protects better than width. So those that use the same tenth of wire and
    multiply-adds are taken as equals, and among them nets with a name of their own stand first,
    then the deeper ones. The families take turns: depth does not compare between them, an inverted
    block has three convolutions where a plain one has one. Which is private only an audit can tell.

    >>> found = candidates((3, 32, 32), max_macs=21.9e6, wire_floats=512, family="residual")
    >>> [(client.net, client.depth) for client in found[:2]]
    [('thin-resnet', 11), ('client:residual-12-12.24x3.48x3.96-c32', 19)]
    """
    problems = [
        f"{name} must be {rule}, got {value}"
        for name, value, rule, good in (
            ("macs", max_macs, "a finite number > 0", 0 < max_macs < math.inf),
            ("wire", wire_floats, "at least 1", wire_floats >= 1),
            ("params", max_params, "at least 1", max_params is None or max_params >= 1),
        )
        if not good
    ]
    if problems:
        raise ConfigError("; ".join(problems))
    specs = grid(image_shape, wire_floats=wire_floats, family=family, smaller=smaller)
    weighed = (weigh(spec, image_shape) for spec in specs)
    fitting = [
        found
        for found in weighed
        if found.macs <= max_macs and (max_params is None or found.params <= max_params)
    ]

    def merit(found: Candidate) -> tuple[int, int, bool, int, int, str]:
        wire = math.ceil(10 * found.wire_floats / wire_floats)
        macs = math.ceil(10 * found.macs / max_macs)
        named = found.net in THIN_CLIENTS
        return -wire, -macs, not named, -found.depth, -found.macs, str(found.spec)

    places: Counter[str] = Counter()
    turns: list[tuple[int, str, Candidate]] = []
    for found in sorted(fitting, key=merit):
        turns.append((places[found.spec.family], found.spec.family, found))
        places[found.spec.family] += 1
    return [found for _, _, found in sorted(turns, key=lambda turn: turn[:2])]


def nothing_fits(
    image_shape: Shape,
    *,
    max_macs: float | int,
    wire_floats: int,
    max_params: int | None = None,
    family: str | None = None,
) -> str:
    """Why a budget leaves no client, with the cost of the cheapest one."""
    kind = "client" if family is None else f"{family} client"
    specs = grid(image_shape, wire_floats=wire_floats, family=family)
    if not specs:
        all_specs = grid(image_shape, wire_floats=math.prod(image_shape), family=family)
        least = min(math.prod(spec.wire_shape(image_shape)[1:]) for spec in all_specs)
        return f"no {kind} sends {wire_floats} numbers or fewer; the smallest wire has {least}"
    weighed = [weigh(spec, image_shape) for spec in specs]
    cheap, small = min(weighed, key=lambda c: c.macs), min(weighed, key=lambda c: c.params)
    stored = "" if max_params is None else f", {max_params:,} parameters"
    return (
        f"no {kind} fits {max_macs:,.0f} multiply-adds{stored} and {wire_floats} numbers on the "
        f"wire; the cheapest, {cheap.net}, costs {cheap.macs:,} multiply-adds, and the smallest, "
        f"{small.net}, has {small.params:,} parameters"
    )
