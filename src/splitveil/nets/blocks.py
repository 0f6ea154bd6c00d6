"""Building blocks of backbones and clients: convolutions, residual blocks, a cut's bottleneck.

A backbone is a flat `nn.Sequential` of stages, so that it can be cut after any of them.
"""

import copy
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitveil.errors import ConfigError

Shape = tuple[int, int, int]
AnyShape = tuple[int, ...]


def conv3x3(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    """3×3 convolution that keeps the size (or divides it by the stride)."""
    return nn.Conv2d(in_channels, out_channels, 3, stride, padding=1)


def conv_bn_relu(in_channels: int, out_channels: int, stride: int = 1) -> nn.Sequential:
    """Convolution, BatchNorm, ReLU."""
    return nn.Sequential(
        conv3x3(in_channels, out_channels, stride), nn.BatchNorm2d(out_channels), nn.ReLU()
    )


def plain_conv(
    in_channels: int, out_channels: int, stride: int = 1, *, kernel: int = 3, groups: int = 1
) -> nn.Sequential:
    """Convolution without bias, BatchNorm, ReLU."""
    conv = nn.Conv2d(
        in_channels, out_channels, kernel, stride, kernel // 2, groups=groups, bias=False
    )
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels), nn.ReLU())


def shortcut(in_channels: int, out_channels: int, stride: int = 1) -> nn.Module:
    """What passes a residual block by: the input, or a 1×1 convolution where the shape changes."""
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    conv = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels))


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with BatchNorm and a shortcut (1×1 where the shape changes)."""

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


def stages_of(backbone: nn.Module) -> list[nn.Module]:
    """The stages between which a backbone can be cut: the children of a plain `nn.Sequential`.

    >>> len(stages_of(nn.Sequential(nn.Flatten(), nn.Linear(4, 2))))
    2
    """
    if not (
        isinstance(backbone, nn.Sequential) and type(backbone).forward is nn.Sequential.forward
    ):
        raise ConfigError(
            f"cut needs a plain nn.Sequential, got {type(backbone).__name__}; wrap the stages of "
            "your model: nn.Sequential(stem, stage1, …, nn.Flatten(), classifier)"
        )
    # Not children(): that would yield a module used twice, one ReLU say, only once.
    stages = list(backbone)
    if len(stages) <= 1:
        raise ConfigError(
            f"a backbone of {'one child' if stages else 'no children'} cannot be cut; wrap its "
            "stages: nn.Sequential(stem, stage1, …, nn.Flatten(), classifier)"
        )
    return stages


def wire_shape(client: nn.Module, image_shape: AnyShape) -> AnyShape:
    """AnyShape of what a client makes of one image (c, h, w)."""
    return tuple(passed(client, image_shape).shape[1:])


def passed(client: nn.Module, image_shape: AnyShape) -> Tensor:
    """What a client makes of one image of zeros."""
    try:
        return cast(Tensor, output_of(client, image_shape))
    except (RuntimeError, TypeError, ValueError) as err:
        raise ConfigError(
            f"no image of shape {image_shape!r} passes through the client; give channels, height "
            f"and width, for example (3, 32, 32): {err}"
        ) from err


@torch.no_grad()
def output_of(module: nn.Module, shape: AnyShape) -> object:
    """What a copy in eval mode makes of zeros: BatchNorm statistics must not move.

    Of what torch.compile wraps it is the module inside, whose products can be counted.
    """
    probe: nn.Module = copy.deepcopy(getattr(module, "_orig_mod", module)).eval()
    weight = next(probe.parameters(), torch.zeros(()))
    return probe(torch.zeros(1, *shape).to(weight))


def check_cutlayer(cutlayer: int, last: int) -> None:
    """Refuse a bottleneck after an entry that is not there or gives no map."""
    if not 1 <= cutlayer <= last:
        raise ConfigError(f"cutlayer must be in 1..{last}, got {cutlayer}")


def check_side(
    net: str, image_shape: Shape, least: int, hint: str = "use larger images or the net 'small'"
) -> None:
    """Refuse images of which a net's strides would leave less than a pixel."""
    if min(image_shape[1:]) < least:
        raise ConfigError(
            f"{net} needs images of at least {least}×{least}, got {image_shape}; {hint}"
        )


def with_bottleneck(
    entries: Sequence[nn.Module], cutlayer: int, width: int, bottleneck: int | None
) -> list[nn.Module]:
    """The entries, with a 3×3 convolution and a sigmoid on the client's side and one back.

    Both join the entries before and after the cut, so the count of entries stays; `width` is the
    channels there. None adds nothing.

    >>> with_bottleneck([nn.ReLU(), nn.ReLU()], 1, 64, 8)[0][1]
    Conv2d(64, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))
    """
    entries = list(entries)
    if bottleneck is not None:
        end = nn.Sequential(entries[cutlayer - 1], conv3x3(width, bottleneck), nn.Sigmoid())
        begin = nn.Sequential(conv3x3(bottleneck, width), entries[cutlayer])
        entries[cutlayer - 1 : cutlayer + 1] = [end, begin]
    return entries
