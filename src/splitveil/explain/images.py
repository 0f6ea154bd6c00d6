"""Rows of small pictures in one figure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from splitveil.report.canvas import GREY, INK, RULE, board, png, shown

RGB = 3
LEFT, HEAD, BETWEEN = 1.1, 0.36, 0.34  # inches: names, headings, between two groups
GAP = 0.04  # inches between two pictures


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A picture (c, h, w) and the words above it."""

    image: NDArray[np.uint8]
    words: str = ""
    ink: str = INK


def tile_sheet(
    heads: Sequence[str],
    rows: Sequence[tuple[str, Sequence[Sequence[Tile]]]],
    *,
    per_group: int,
    size: float,
    words: bool = False,
) -> bytes:
    """PNG: named rows of groups of tiles, one group under each heading; an empty group is a dash.

    All stand in one field over the whole figure: one for each of a hundred would take seconds.
    """
    from matplotlib.patches import Rectangle

    step, high = size + GAP, size + (0.2 if words else 0.1)
    column = per_group * step + BETWEEN
    width, height = LEFT + len(heads) * column, HEAD + len(rows) * high
    with board(width, height) as figure:
        field = figure.add_axes((0, 0, 1, 1))
        field.set_xlim(0, width)
        field.set_ylim(0, height)
        field.set_axis_off()
        field.set_autoscale_on(False)
        for at, head in enumerate(heads):
            middle = LEFT + at * column + (column - BETWEEN) / 2
            field.text(middle, height - 0.2, head, ha="center", fontsize=8, weight="bold")
        for place, (name, groups) in enumerate(rows):
            bottom = height - HEAD - (place + 1) * high + 0.04
            level = bottom + size / 2
            field.text(LEFT - 0.1, level, shown(name, 14), ha="right", va="center", fontsize=8)
            for at, group in enumerate(groups):
                left = LEFT + at * column
                if not group:
                    middle = left + (column - BETWEEN) / 2
                    field.text(middle, level, "–", ha="center", va="center", color=GREY)
                for x, tile in zip(left + step * np.arange(len(group)), group, strict=True):
                    image = tile.image
                    field.imshow(
                        image.transpose(1, 2, 0) if len(image) == RGB else image[0], cmap="gray",
                        vmin=0, vmax=255, interpolation="nearest", aspect="auto",
                        extent=(x, x + size, bottom, bottom + size),
                    )  # fmt: skip
                    field.add_patch(
                        Rectangle(
                            (x, bottom), size, size, fill=False, edgecolor=RULE, linewidth=0.6
                        )
                    )
                    field.text(x + size / 2, bottom + size + 0.02, tile.words, ha="center",
                               fontsize=6.5, color=tile.ink)  # fmt: skip
        return png(figure)
