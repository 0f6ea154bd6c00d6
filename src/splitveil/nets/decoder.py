"""The attacker's inverse network, from smashed data to images."""

from torch import Tensor, nn
from torch.nn import functional as F

from splitveil.errors import ConfigError
from splitveil.nets.blocks import ResidualBlock, conv3x3, conv_bn_relu, shortcut

Shape = tuple[int, ...]
LEAST_WIDTH = 16  # channels at the image's resolution


class PreActBlock(nn.Module):
    """Pre-activation residual block of the decoder of He et al. and ResSFL.

    BN-ReLU-Conv-BN-ReLU-Conv, with a 1×1 convolution and BatchNorm as shortcut where the width
    changes.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(in_channels),
            nn.ReLU(),
            conv3x3(in_channels, out_channels),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(),
            conv3x3(out_channels, out_channels),
        )
        self.shortcut = shortcut(in_channels, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """X (n, c, h, w) → (n, c', h, w)."""
        out: Tensor = self.body(x) + self.shortcut(x)
        return out


def entrance(wire_shape: Shape, image_shape: Shape) -> tuple[nn.Module, int, list[int]]:
    """The layer that gives smashed data as a map, the map's channels, and its two sides.

    A flat wire (d,) is mapped linearly to 8 channels and a quarter of the image's side.
    """
    if len(wire_shape) not in (1, 3):
        raise ConfigError(f"smashed data must have shape (d,) or (c, h, w), got {wire_shape}")
    if len(wire_shape) == 3:  # noqa: PLR2004 - (c, h, w)
        return nn.Identity(), wire_shape[0], list(wire_shape[1:])
    channels, side = 8, [max(1, s // 4) for s in image_shape[1:]]
    flat = nn.Linear(wire_shape[0], channels * side[0] * side[1])
    return nn.Sequential(flat, nn.Unflatten(1, (channels, *side))), channels, side


class ResidualDecoder(nn.Module):
    """Residual decoder of the published decoding attack, N`blocks`C`width`.

    A residual block from the wire's channels to `width`, `blocks` more at that width, one
    transposed convolution (stride 2) per doubling up to the image's size, a residual block to the
    image's channels, sigmoid. A flat wire (d,) is first mapped linearly to a map of 8 channels and
    a quarter of the image's side.

    Args:
        wire_shape: Shape of one image's smashed data, (d,) or (c, h, w).
        image_shape: Shape of one image (c, h, w).
        width: Channels inside, ≥ 1.
        blocks: Residual blocks at that width, ≥ 0.

    >>> sum(p.numel() for p in ResidualDecoder((8, 8, 8), (3, 32, 32)).parameters())
    711539
    """

    def __init__(
        self, wire_shape: Shape, image_shape: Shape, *, width: int = 64, blocks: int = 8
    ) -> None:
        super().__init__()
        self.enter, channels, side = entrance(wire_shape, image_shape)
        self.size = (image_shape[1], image_shape[2])
        layers: list[nn.Module] = [PreActBlock(channels, width), nn.ReLU()]
        for _ in range(blocks):
            layers += [PreActBlock(width, width), nn.ReLU()]
        while 2 * side[0] <= self.size[0] and 2 * side[1] <= self.size[1]:
            up = nn.ConvTranspose2d(width, width, 3, 2, padding=1, output_padding=1)
            layers += [up, nn.BatchNorm2d(width), nn.ReLU()]
            side = [2 * s for s in side]
        self.body = nn.Sequential(*layers)
        self.leave = PreActBlock(width, image_shape[0])

    def forward(self, z: Tensor) -> Tensor:
        """Z (n, …) → images (n, c, h, w) in [0, 1]."""
        y = self.body(self.enter(z))
        if y.shape[2:] != self.size:
            y = F.interpolate(y, self.size, mode="bilinear", align_corners=False)
        out: Tensor = self.leave(y).sigmoid()
        return out


class ShuffleDecoder(nn.Module):
    """Residual decoder that works at the wire's resolution, S`blocks`C`width`.

    A convolution to `width` channels, `blocks` residual blocks there, then for each doubling up to
    the image's size a convolution whose channels become pixels (Shi et al., 2016), with half the
    width and a residual block; a convolution to the image's channels, sigmoid. Most of its work is
    done on small maps: it takes a fraction of the time of a `ResidualDecoder` of that width.

    Args:
        wire_shape: Shape of one image's smashed data, (d,) or (c, h, w).
        image_shape: Shape of one image (c, h, w).
        width: Channels at the wire's resolution, ≥ 1.
        blocks: Residual blocks there, ≥ 0.

    >>> sum(p.numel() for p in ShuffleDecoder((8, 8, 8), (3, 32, 32), width=64).parameters())
    268691
    """

    def __init__(
        self, wire_shape: Shape, image_shape: Shape, *, width: int = 96, blocks: int = 2
    ) -> None:
        super().__init__()
        self.enter, channels, side = entrance(wire_shape, image_shape)
        self.size = (image_shape[1], image_shape[2])
        layers: list[nn.Module] = [conv_bn_relu(channels, width)]
        layers += [ResidualBlock(width, width) for _ in range(blocks)]
        while 2 * side[0] <= self.size[0] and 2 * side[1] <= self.size[1]:
            half = max(width // 2, LEAST_WIDTH)
            up = nn.Conv2d(width, 4 * half, 3, padding=1, bias=False)
            layers += [up, nn.PixelShuffle(2), nn.BatchNorm2d(half), nn.ReLU()]
            layers.append(ResidualBlock(half, half))
            width, side = half, [2 * s for s in side]
        self.body = nn.Sequential(*layers)
        self.leave = conv3x3(width, image_shape[0])

    def forward(self, z: Tensor) -> Tensor:
        """Z (n, …) → images (n, c, h, w) in [0, 1]."""
        y = self.leave(self.body(self.enter(z)))
        if y.shape[2:] != self.size:
            y = F.interpolate(y, self.size, mode="bilinear", align_corners=False)
        out: Tensor = y.sigmoid()
        return out
