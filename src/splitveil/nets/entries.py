"""Entries of a flat backbone: a bottleneck at the cut, and residual blocks opened to be cut inside.

Inside a residual block two maps are alive, the body's and the shortcut's. An opened block hands
both on as one map, the shortcut's channels last, so that a cut there sends all the server needs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from splitveil.errors import ConfigError
from splitveil.nets.blocks import conv3x3


class Fork(nn.Module):
    """Begin an opened block: the body's first layers and the shortcut, side by side."""

    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body, self.shortcut = body, shortcut

    def forward(self, x: Tensor) -> Tensor:
        """X (n, c, h, w) → (n, b+s, h', w'), b channels of the body and s of the shortcut."""
        return torch.cat([self.body(x), self.shortcut(x)], 1)


class Beside(nn.Module):
    """Go on in an opened block: layers for the body, the last `kept` channels pass by."""

    def __init__(self, body: nn.Module, kept: int) -> None:
        super().__init__()
        self.body, self.kept = body, kept

    def forward(self, x: Tensor) -> Tensor:
        """X (n, b+s, h, w) → (n, b'+s, h, w)."""
        return torch.cat([self.body(x[:, : -self.kept]), x[:, -self.kept :]], 1)


class Join(nn.Module):
    """End an opened block: the body's last layers, and the last `kept` channels added to them."""

    def __init__(self, body: nn.Module, kept: int) -> None:
        super().__init__()
        self.body, self.kept = body, kept

    def forward(self, x: Tensor) -> Tensor:
        """X (n, b+s, h, w) → (n, s, h, w)."""
        out: Tensor = self.body(x[:, : -self.kept]) + x[:, -self.kept :]
        return out


def check_cutlayer(cutlayer: int, last: int) -> None:
    """Refuse a bottleneck after an entry that is not there or gives no map."""
    if not 1 <= cutlayer <= last:
        raise ConfigError(f"cutlayer must be in 1..{last}, got {cutlayer}")


def check_side(net: str, image_shape: tuple[int, int, int], least: int) -> None:
    """Refuse images of which a net's strides would leave less than a pixel."""
    if min(image_shape[1:]) < least:
        raise ConfigError(
            f"{net} needs images of at least {least}×{least}, got {image_shape}; "
            "use larger images or the net 'small'"
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
