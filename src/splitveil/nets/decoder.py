"""The attacker's inverse network, from smashed data to images."""

from torch import Tensor, nn
from torch.nn import functional as F

from splitveil.errors import ConfigError
from splitveil.nets.blocks import conv3x3, shortcut

Shape = tuple[int, ...]


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
        if len(wire_shape) not in (1, 3):
            raise ConfigError(f"smashed data must have shape (d,) or (c, h, w), got {wire_shape}")
        if len(wire_shape) == 1:
            side = [max(1, s // 4) for s in image_shape[1:]]
            flat, channels = wire_shape[0], 8
            self.enter: nn.Module = nn.Sequential(
                nn.Linear(flat, channels * side[0] * side[1]), nn.Unflatten(1, (channels, *side))
            )
        else:
            channels, side = wire_shape[0], list(wire_shape[1:])
            self.enter = nn.Identity()
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
