"""ResNet-20 for small images (He et al. 2016, section 4.2) as a flat list of blocks."""

from torch import nn

from splitveil.nets.blocks import ResidualBlock
from splitveil.nets.entries import Fork, Join, check_cutlayer, check_side, with_bottleneck

Shape = tuple[int, int, int]
Entries = list[tuple[nn.Module, int]]

WIDTHS = (16, 32, 64)
DEPTH = 3
MIN_SIDE = 4


def resnet20(
    image_shape: Shape,
    num_classes: int,
    *,
    cutlayer: int = 5,
    bottleneck: int | None = 8,
    opened: bool = False,
) -> nn.Sequential:
    """Stem, nine residual blocks, pool, linear map; entry `cutlayer` ends in vgg11's bottleneck.

    Stages of 16, 32 and 64 channels, the last two begin with stride 2; a shortcut that changes the
    shape is a 1×1 convolution (option B). With `bottleneck=None` it has 272,474 parameters and 40.8
    MMAC at 3×32×32 and ten classes. `cutlayer` counts as the CEM code does for ResNets: stem 1,
    blocks 2 to 10. Cut 5, where CEM cuts on TinyImageNet, is the first block after the first stage.
    CEM's own net is wider (32, 64, 128) and halves in every stage, so its wire is smaller there.

    `opened` gives each block as three entries, so that it can be cut inside; a cut there sends the
    shortcut's channels too. `cutlayer` then counts those: stem 1, block b ends at 3b + 1.
    """
    check_side("resnet20", image_shape, MIN_SIDE)
    maps: Entries = [(_stem(image_shape[0]), WIDTHS[0])]
    for block, width in _blocks():
        maps += _halves(block, width) if opened else [(block, width)]
    check_cutlayer(cutlayer, len(maps))
    entries = [
        *(entry for entry, _ in maps),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(WIDTHS[-1], num_classes),
    ]
    return nn.Sequential(*with_bottleneck(entries, cutlayer, maps[cutlayer - 1][1], bottleneck))


def _stem(channels: int) -> nn.Sequential:
    conv = nn.Conv2d(channels, WIDTHS[0], 3, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(WIDTHS[0]), nn.ReLU())


def _blocks() -> list[tuple[ResidualBlock, int]]:
    blocks, width = [], WIDTHS[0]
    for out in WIDTHS:
        for _ in range(DEPTH):
            blocks.append((ResidualBlock(width, out, 1 if out == width else 2), out))
            width = out
    return blocks


def _halves(block: ResidualBlock, width: int) -> Entries:
    """The block's layers as three entries with the channels that each gives."""
    first = nn.Sequential(block.conv1, block.bn1, nn.ReLU())
    second = nn.Sequential(block.conv2, block.bn2)
    return [
        (Fork(first, block.shortcut), 2 * width),
        (Join(second, width), width),
        (nn.ReLU(), width),
    ]
