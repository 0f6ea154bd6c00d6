"""Building blocks shared by the backbones and the decoders."""

from torch import Tensor, nn
from torch.nn import functional as F


def conv3x3(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    """3×3 convolution that keeps the size (or divides it by the stride)."""
    return nn.Conv2d(in_channels, out_channels, 3, stride, padding=1)


def conv_bn_relu(in_channels: int, out_channels: int, stride: int = 1) -> nn.Sequential:
    """Convolution, BatchNorm, ReLU."""
    return nn.Sequential(
        conv3x3(in_channels, out_channels, stride), nn.BatchNorm2d(out_channels), nn.ReLU()
    )


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with BatchNorm and a shortcut (1×1 where the shape changes)."""

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        same = stride == 1 and in_channels == out_channels
        self.shortcut: nn.Module = (
            nn.Identity()
            if same
            else nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """X (n, c, h, w) → (n, c', h/stride, w/stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


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
        self.shortcut: nn.Module = (
            nn.Identity()
            if in_channels == out_channels
            else nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, bias=False), nn.BatchNorm2d(out_channels)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """X (n, c, h, w) → (n, c', h, w)."""
        out: Tensor = self.body(x) + self.shortcut(x)
        return out


def xavier_init(module: nn.Module) -> None:
    """Xavier-uniform weights and zero biases for convolutions and linear maps."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
