"""Pictures of attention: how the weight is spread, and which samples get it.

Weights are relative: α_i·M_c, so that 1 is a sample's equal share whatever the size of its class.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from splitveil.explain.images import Tile, tile_sheet
from splitveil.report.canvas import GREY, INK, PALETTE, WRONG, board, png, shown

Floats = NDArray[np.floating]


Labels = NDArray[np.integer]


Pixels = NDArray[np.uint8]


COLUMNS = 100  # a class's samples, from the heaviest to the lightest, as this many columns


ROWS = 20  # classes shown


SHOWN = 10  # classes whose images are shown


PICKED = 5  # samples shown at either end of a class


LESS, MORE = PALETTE[0], PALETTE[1]


@dataclass(frozen=True, kw_only=True)
class Words:
    """What weights are called: headings, the quantity, its value 1, and its two ends."""

    heading: str = "How the weight is spread"
    chosen: str = "Which samples get it"
    axis: str = "relative weight α·M"
    equal: str = "equal share"
    most: str = "most weighted"
    least: str = "least weighted"


PLAIN_WORDS = Words()


def sorted_profile(weight: Floats, columns: int = COLUMNS) -> Floats:
    """Weights from the heaviest to the lightest, stretched over a fixed number of columns.

    >>> sorted_profile(np.array([1.0, 3.0]), 4).tolist()
    [3.0, 3.0, 1.0, 1.0]
    """
    ordered = np.sort(weight)[::-1]
    return ordered[np.arange(columns) * len(ordered) // columns]


def attention_heatmap(
    relative: Floats, y: Labels, classes: Sequence[str], words: Words = PLAIN_WORDS
) -> bytes:
    """PNG: one row per class, its samples from the heaviest to the lightest as colours."""
    from matplotlib.colors import LinearSegmentedColormap

    present = [c for c in range(len(classes)) if (y == c).any()][:ROWS]
    grid = np.stack([sorted_profile(relative[y == c]) for c in present])
    octaves = np.log2(np.clip(grid, 2.0**-8, 2.0**8))
    reach = max(0.1, float(np.abs(octaves).max()))
    low = 0.0 if octaves.min() >= 0 else -reach
    inks = ["#ffffff", MORE] if low == 0 else [LESS, "#ffffff", MORE]
    paper = LinearSegmentedColormap.from_list("share", inks)
    with board(7.4, 1.1 + 0.24 * len(present), laid_out=True) as figure:
        axes = figure.subplots()
        image = axes.imshow(octaves, aspect="auto", cmap=paper, vmin=low, vmax=reach,
                            extent=(0, 100, len(present), 0), interpolation="nearest")  # fmt: skip
        axes.grid(visible=False)
        axes.set_yticks([i + 0.5 for i in range(len(present))])
        axes.set_yticklabels([shown(classes[c], 14) for c in present], fontsize=8)
        axes.set_xlabel(f"samples of the class, {words.most} first (%)")
        axes.set_title(words.axis, loc="left")
        ends = sorted({low, 0.0, reach})
        bar = figure.colorbar(image, ax=axes, ticks=ends)
        bar.set_ticklabels([f"×{2.0**end:.3g}" for end in ends], fontsize=8)
    return png(figure)


def weighted_samples(
    relative: Floats,
    y: Labels,
    images: Pixels,
    classes: Sequence[str],
    words: Words = PLAIN_WORDS,
) -> bytes:
    """PNG: of each class the most and the least weighted images (n, c, h, w), with their weight."""
    present = [c for c in range(len(classes)) if (y == c).sum() >= 2 * PICKED][:SHOWN]
    present = present or [c for c in range(len(classes)) if (y == c).any()][:SHOWN]

    def tile(index: int) -> Tile:
        weight = float(relative[index])
        ink = MORE if weight > 1.05 else LESS if weight < 0.95 else GREY  # noqa: PLR2004
        return Tile(image=images[index], words=f"×{weight:.2f}", ink=ink)

    rows = []
    for label in present:
        own = np.flatnonzero(y == label)
        own = own[np.argsort(-relative[own], kind="stable")]
        half = min(PICKED, max(1, len(own) // 2))
        ends = [
            [tile(i) for i in own[:half].tolist()],
            [tile(i) for i in own[::-1][:half].tolist()],
        ]
        rows.append((classes[label], ends))
    return tile_sheet((words.most, words.least), rows, per_group=PICKED, size=0.62, words=True)


def sample_size_over_time(
    epochs: Sequence[float],
    sizes: Sequence[float],
    *,
    floor: float,
    last_epoch: float,
    shut: Sequence[float] = (),
) -> bytes:
    """PNG: effective sample size over the epochs; before the penalty started there is none.

    `floor` is 1/M_c, where one sample has all the weight; `shut` are epochs of the shut-off.
    """
    from matplotlib.ticker import MaxNLocator

    with board(6.4, 3.2, laid_out=True) as figure:
        axes = figure.subplots()
        if epochs[0] > 1:
            axes.axvspan(0.5, epochs[0] - 0.5, color="#eef1f4", zorder=0)
            axes.text((epochs[0]) / 2, 0.5, "no penalty yet", ha="center", color=GREY, fontsize=8,
                      rotation=90 if epochs[0] < 0.15 * last_epoch else 0)  # fmt: skip
        for at, epoch in enumerate(shut):
            axes.axvspan(epoch - 0.5, epoch + 0.5, color="#fbe3d6", zorder=0, linewidth=0,
                         label="shut off" if at == 0 else None)  # fmt: skip
        mark = "o" if len(epochs) <= 40 else ""  # noqa: PLR2004
        axes.plot(epochs, sizes, color=PALETTE[0], marker=mark, markersize=3)
        axes.axhline(
            floor, color=WRONG, linestyle=":", linewidth=1.2, label="one sample only (1/M)"
        )
        axes.axhline(1.0, color=INK, linestyle="--", linewidth=0.9, label="all samples alike")
        axes.set_xlim(0.5, max(last_epoch, 1) + 0.5)
        axes.set_ylim(0, 1.08)
        axes.set_xlabel("epoch")
        axes.set_ylabel("effective sample size (share)")
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
        axes.legend(loc="center right", fontsize=8, bbox_to_anchor=(1.0, 0.35))
    return png(figure)
