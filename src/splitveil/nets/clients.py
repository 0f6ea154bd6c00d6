"""Thin private clients: three families of encoders, each described by a `ClientSpec`.

Every client is a stem, stages of blocks, and a 3×3 convolution to the wire's channels with a
sigmoid; each stage but the first begins by halving the map. A spec has exactly one spelling, which
names the client: ``--net client:residual-16-16.32x2.64-c8`` is the thin ResNet.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from splitveil.errors import ConfigError, Range, unknown
from splitveil.nets.blocks import ResidualBlock, Shape, conv3x3, conv_bn_relu, plain_conv

FAMILIES: Mapping[str, str] = {
    "inverted": "inverted residual blocks with depthwise convolutions, as in MobileNetV2",
    "residual": "residual blocks of two 3×3 convolutions",
    "strided": "plain 3×3 convolutions",
}
CLIENT_PREFIX = "client:"
MIN_SIDE = 4
_MAX_HALVINGS, _MAX_WIDTH, _MAX_DEPTH, _MAX_EXPANSION = 4, 4096, 64, 64
_EXAMPLE = "residual-16-16.32x2.64-c8"


@dataclass(frozen=True, kw_only=True)
class ClientSpec:
    """A thin client in numbers.

    Args:
        family: One of `FAMILIES`.
        stem: Channels of the first convolution, 1..4096.
        widths: Channels of each stage, 1..4096.
        depths: Blocks of each stage, 1..64.
        wire_channels: Channels it sends, 1..4096.
        expansion: How much wider an inverted block is inside, 1..64; 1 for other families.
        stem_stride: 2 if the first convolution halves the map, else 1.

    >>> spec = ClientSpec(
    ...     family="residual", stem=16, widths=(16, 32, 64), depths=(1, 2, 1), wire_channels=8
    ... )
    >>> str(spec), spec.downsampling
    ('residual-16-16.32x2.64-c8', 4)
    """

    family: str
    stem: int
    widths: tuple[int, ...]
    depths: tuple[int, ...]
    wire_channels: int
    expansion: int = 1
    stem_stride: int = 1

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ConfigError(unknown("client family", self.family, FAMILIES))
        only_inverted = "only inverted clients have an expansion"
        halving = "each stage after the first halves the map, and so does a stem_stride of 2"
        expansion = Range(1, _MAX_EXPANSION if self.family == "inverted" else 1, hint=only_inverted)
        named = [
            *((Range(1, _MAX_WIDTH), "widths", width) for width in self.widths),
            *((Range(1, _MAX_DEPTH), "depths", depth) for depth in self.depths),
            (Range(1, _MAX_WIDTH), "stem", self.stem),
            (Range(1, _MAX_WIDTH), "wire_channels", self.wire_channels),
            (Range(1, 2), "stem_stride", self.stem_stride),
            (Range(1, _MAX_HALVINGS, hint=halving), "halvings", self.halvings),
            (expansion, "expansion", self.expansion),
        ]
        problems = [allowed.problem(name, value) for allowed, name, value in named]
        if len(self.depths) != len(self.widths):
            problems.append(f"depths must be as many as widths {self.widths}, got {self.depths}")
        require(*((problem is None, str(problem)) for problem in problems))

    @property
    def halvings(self) -> int:
        """How many times the client halves the map, 1..4."""
        return len(self.widths) - 1 + (self.stem_stride == 2)  # noqa: PLR2004 - a halving

    @property
    def downsampling(self) -> int:
        """Side of the image divided by side of the wire's map."""
        return int(2**self.halvings)

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """Input channels, output channels and stride of each block, in order."""
        width = self.stem
        for stage, (out, depth) in enumerate(zip(self.widths, self.depths, strict=True)):
            for block in range(depth):
                yield width, out, 2 if stage > 0 and block == 0 else 1
                width = out

    def wire_shape(self, image_shape: Shape) -> Shape:
        """Shape (c, h, w) of the smashed data of one image; strides round up."""
        height, width = (-(-side // self.downsampling) for side in image_shape[1:])
        return self.wire_channels, height, width

    def __str__(self) -> str:
        stem = f"{self.stem}s2" if self.stem_stride > 1 else str(self.stem)
        stages = ".".join(
            f"{width}x{depth}" if depth > 1 else str(width)
            for width, depth in zip(self.widths, self.depths, strict=True)
        )
        inside = f"-e{self.expansion}" if self.family == "inverted" else ""
        return f"{self.family}-{stem}-{stages}{inside}-c{self.wire_channels}"


def require(*rules: tuple[bool, str]) -> None:
    """Raise one error with the messages of all rules that do not hold."""
    problems = [problem for holds, problem in rules if not holds]
    if problems:
        raise ConfigError("; ".join(problems))


_NUMBER = r"[1-9][0-9]{0,5}"
_STAGE = rf"{_NUMBER}(?:x{_NUMBER})?"
_SPEC = re.compile(
    rf"(?P<family>[a-z]+)-(?P<stem>{_NUMBER})(?P<strided>s2)?-(?P<stages>{_STAGE}(?:\.{_STAGE})*)"
    rf"(?:-e(?P<expansion>{_NUMBER}))?-c(?P<wire>{_NUMBER})"
)


def parse_client(text: str) -> ClientSpec:
    """Read a spec from its name, the inverse of ``str(spec)``.

    FAMILY-STEM-WIDTHxDEPTH.WIDTHxDEPTH…-eEXPANSION-cCHANNELS: a depth of 1 is omitted, `s2` after
    the stem halves the map there, and only inverted clients have an expansion.

    >>> parse_client("inverted-16s2-24x2.48-e4-c8").depths
    (2, 1)
    """
    match = _SPEC.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"malformed client '{text}'; write FAMILY-STEM-WIDTHxDEPTH.…-cCHANNELS, for example "
            f"{_EXAMPLE} or inverted-16s2-24x2.48-e4-c8. `splitveil clients` lists some"
        )
    stages = [stage.partition("x") for stage in match["stages"].split(".")]
    spec = ClientSpec(
        family=match["family"],
        stem=int(match["stem"]),
        widths=tuple(int(width) for width, _, _ in stages),
        depths=tuple(int(depth or 1) for _, _, depth in stages),
        wire_channels=int(match["wire"]),
        expansion=int(match["expansion"] or 1),
        stem_stride=2 if match["strided"] else 1,
    )
    if str(spec) != text:
        raise ConfigError(f"malformed client '{text}'; write {spec}")
    return spec


THIN_CLIENTS: Mapping[str, ClientSpec] = {
    "thin-deep": parse_client("inverted-16-16.24x3.64x3.128x3-e4-c32"),
    "thin-mobilenet": parse_client("inverted-16-16.32x4.64x4-e4-c8"),
    "thin-resnet": parse_client("residual-16-16.32x2.64-c8"),
    "thin-strided": parse_client("strided-16-16x3.32x3.64x3-c8"),
}
LARGE_SIDE = 32  # least side of images for which VGG11's server fits behind a client


def parse_image(text: str) -> Shape:
    """Read an image's channels, height and width.

    >>> parse_image("3x32x32")
    (3, 32, 32)
    """
    match = re.fullmatch(r"([1-9][0-9]{0,3})x([1-9][0-9]{0,3})x([1-9][0-9]{0,3})", text)
    if match is None:
        raise ConfigError(
            f"an image is CHANNELSxHEIGHTxWIDTH, each in 1..9999, such as 3x32x32; got '{text}'"
        )
    return int(match[1]), int(match[2]), int(match[3])


class InvertedBlock(nn.Module):
    """Widen by 1×1, filter each channel by 3×3, narrow by 1×1 without ReLU; shortcut where it fits.

    The inverted residual of MobileNetV2 (Sandler et al. 2018); expansion 1 leaves out the widening.
    """

    def __init__(
        self, in_channels: int, out_channels: int, stride: int = 1, *, expansion: int
    ) -> None:
        super().__init__()
        inside = in_channels * expansion
        self.body = nn.Sequential(
            *(plain_conv(in_channels, inside, kernel=1) if expansion > 1 else ()),
            *plain_conv(inside, inside, stride, groups=inside),
            nn.Conv2d(inside, out_channels, 1, bias=False),
            nn.BatchNorm2d(out_channels),
        )
        self.same = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        """X (n, c, h, w) → (n, c', h/stride, w/stride)."""
        out: Tensor = self.body(x)
        return x + out if self.same else out


def _block(spec: ClientSpec, in_channels: int, out_channels: int, stride: int) -> nn.Module:
    if spec.family == "residual":
        return ResidualBlock(in_channels, out_channels, stride)
    if spec.family == "inverted":
        return InvertedBlock(in_channels, out_channels, stride, expansion=spec.expansion)
    return plain_conv(in_channels, out_channels, stride)


# What comes between the last stage and the convolution to the wire.
_TAILS: Mapping[str, Callable[[int], tuple[nn.Module, ...]]] = {
    "residual": lambda width: (conv_bn_relu(width, width),),
    "inverted": lambda width: (plain_conv(width, width, kernel=1),),
    "strided": lambda width: (),
}


def build_client(spec: ClientSpec, image_shape: Shape) -> nn.Sequential:
    """The encoder of a spec for images (c, h, w) in [0, 1]; its smashed data lie in [0, 1].

    >>> client = build_client(parse_client("strided-8-8.16-c4"), (1, 8, 8))
    >>> sum(p.numel() for p in client.parameters())
    2444
    """
    least = max(MIN_SIDE, spec.downsampling)
    if min(image_shape[1:]) < least:
        raise ConfigError(
            f"client {spec} needs images of at least {least}×{least}, got {image_shape}; "
            "use larger images, the net 'small', or a client that halves the map less often"
        )
    width = spec.widths[-1]
    layers = [
        *plain_conv(image_shape[0], spec.stem, spec.stem_stride),
        *(_block(spec, *block) for block in spec.blocks()),
        *_TAILS[spec.family](width),
        conv3x3(width, spec.wire_channels),
        nn.Sigmoid(),
    ]
    return nn.Sequential(*layers)
