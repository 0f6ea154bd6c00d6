"""MobileNetV2 (Sandler et al. 2018, table 2) as a flat list of inverted residual blocks."""

from torch import nn

from splitveil.nets.clients import InvertedBlock
from splitveil.nets.entries import Beside, Fork, Join, check_cutlayer, check_side, with_bottleneck

Shape = tuple[int, int, int]
Entries = list[tuple[nn.Module, int]]

# Expansion, channels, blocks, stride of the first block.
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
STEM, LAST = 32, 1280
MIN_SIDE = 8
LARGE_SIDE = 64  # from here on the strides are those for photographs


def mobilenetv2(
    image_shape: Shape,
    num_classes: int,
    *,
    cutlayer: int = 8,
    bottleneck: int | None = 8,
    opened: bool = False,
) -> nn.Sequential:
    """Stem, 17 inverted blocks, 1×1 convolution, pool, linear map; a bottleneck as vgg11's.

    From 64×64 on it halves the map five times, as published; below, stem and second stage keep it,
    as is usual for CIFAR. ReLU stands for ReLU6, whose bound serves arithmetic of few bits. With
    `bottleneck=None` it has 3,504,872 parameters and 300.8 MMAC at 3×224×224 and 1000 classes.

    `cutlayer` counts the stem as 1, block b as b + 1, the 1×1 convolution as 19. Cut 8 is the first
    block of 64 channels: 8×8×8 numbers for 32×32, 8×4×4 for 64×64. `opened` gives the parts of each
    block (widen, filter, narrow) as entries of their own, and `cutlayer` then counts those.
    """
    check_side("mobilenetv2", image_shape, MIN_SIDE)
    large = min(image_shape[1:]) >= LARGE_SIDE
    maps: Entries = [(_conv(image_shape[0], STEM, kernel=3, stride=2 if large else 1), STEM)]
    width = STEM
    for stage, (expansion, out, depth, first) in enumerate(STAGES):
        for b in range(depth):
            stride = first if b == 0 and (large or stage > 1) else 1
            block = InvertedBlock(width, out, stride, expansion=expansion)
            maps += _thirds(block, width, out, width * expansion) if opened else [(block, out)]
            width = out
    maps.append((_conv(width, LAST, kernel=1), LAST))
    check_cutlayer(cutlayer, len(maps))
    entries = [
        *(entry for entry, _ in maps),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Sequential(nn.Dropout(0.2), nn.Linear(LAST, num_classes)),
    ]
    return nn.Sequential(*with_bottleneck(entries, cutlayer, maps[cutlayer - 1][1], bottleneck))


def _conv(in_channels: int, out_channels: int, *, kernel: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels), nn.ReLU())


def _thirds(block: InvertedBlock, width: int, out: int, inside: int) -> Entries:
    """Widen, filter and narrow as entries with the channels that each gives."""
    widen, filtered, narrow = block.body[:-5], block.body[-5:-2], block.body[-2:]
    if not block.same:
        start: Entries = [(widen, inside)] if inside > width else []
        return [*start, (filtered, inside), (narrow, out)]
    return [
        (Fork(widen, nn.Identity()), inside + width),
        (Beside(filtered, width), inside + width),
        (Join(narrow, width), out),
    ]
