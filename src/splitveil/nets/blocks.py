"""Building blocks of backbones and clients: convolutions, residual blocks, the bottleneck of a cut.

A backbone is a flat `nn.Sequential` of stages, so that it can be cut after each of them.
"""

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitveil.errors import ConfigError, Range

Shape = tuple[int, int, int]


def conv3x3(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    """3×3 convolution that keeps the map's size, or divides it by the stride."""
    return nn.Conv2d(in_channels, out_channels, 3, stride, padding=1)


def conv_bn_relu(in_channels: int, out_channels: int, stride: int = 1) -> nn.Sequential:
    """3×3 convolution with bias, BatchNorm, ReLU."""
    conv = conv3x3(in_channels, out_channels, stride)
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels), nn.ReLU())


class StridedDepthwise(nn.Conv2d):
    """A depthwise convolution with a stride.

    When a CPU trains in bfloat16 it computes the convolution without the stride and keeps every
    stride-th place, which is the same map: oneDNN's backward pass of a strided depthwise
    convolution takes 2 to 14 times as long in bfloat16 (64 to 256 channels, 32² to 8² places).
    """

    def forward(self, input: Tensor) -> Tensor:
        """The map (n, c, ⌈h/stride⌉, ⌈w/stride⌉) of a map (n, c, h, w)."""
        mixed_on_cpu = input.device.type == "cpu" and torch.is_autocast_enabled("cpu")
        if not (mixed_on_cpu and torch.is_grad_enabled()):
            return super().forward(input)
        dense = F.conv2d(input, self.weight, self.bias, 1, self.padding, 1, self.groups)
        return dense[..., :: self.stride[0], :: self.stride[1]].contiguous(
            memory_format=torch.channels_last
        )


def plain_conv(
    in_channels: int, out_channels: int, stride: int = 1, *, kernel: int = 3, groups: int = 1
) -> nn.Sequential:
    """Convolution without bias, BatchNorm, ReLU."""
    strided_depthwise = stride > 1 and 1 < groups == in_channels == out_channels
    convolution = StridedDepthwise if strided_depthwise else nn.Conv2d
    conv = convolution(
        in_channels, out_channels, kernel, stride, kernel // 2, groups=groups, bias=False
    )
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels), nn.ReLU())


def shortcut(in_channels: int, out_channels: int, stride: int = 1) -> nn.Module:
    """The shortcut of a residual block: the identity, or a 1×1 convolution if the shape changes."""
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    conv = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels))


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with BatchNorm, and a shortcut."""

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut = shortcut(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """X (n, c, h, w) → (n, c', h/stride, w/stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def xavier_init(module: nn.Module) -> None:
    """Xavier-uniform weights and zero biases for convolutions and linear maps."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def is_plain(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether a module applies its children in order: an `nn.Sequential` with its own `forward`."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def check_side(
    net: str, image_shape: Shape, least: int, hint: str = "use larger images or the net 'small'"
) -> None:
    """Reject images that the strides of a net would reduce to less than one pixel."""
    if min(image_shape[1:]) < least:
        raise ConfigError(
            f"{net} needs images of at least {least}×{least}, got {image_shape}; {hint}"
        )


def with_bottleneck(
    entries: Sequence[nn.Module], cutlayer: int, widths: Sequence[int], bottleneck: int | None
) -> list[nn.Module]:
    """The entries with a bottleneck at the cut: a 3×3 convolution and a sigmoid, then one back.

    Args:
        entries: The backbone's entries.
        cutlayer: Entry that ends the client, 1..len(widths). The convolutions join this entry and
            the next, so the number of entries does not change.
        widths: Output channels of each entry after which a cut is allowed.
        bottleneck: Channels on the wire; None adds nothing.

    >>> with_bottleneck([nn.ReLU(), nn.ReLU()], 1, [64], 8)[0][1]
    Conv2d(64, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))
    """
    Range(1, len(widths)).check("cutlayer", cutlayer)
    entries = list(entries)
    if bottleneck is not None:
        width = widths[cutlayer - 1]
        end = nn.Sequential(entries[cutlayer - 1], conv3x3(width, bottleneck), nn.Sigmoid())
        begin = nn.Sequential(conv3x3(bottleneck, width), entries[cutlayer])
        entries[cutlayer - 1 : cutlayer + 1] = [end, begin]
    return entries
