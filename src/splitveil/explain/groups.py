"""Pictures of gates and of what the slots (or clusters) of a class collect."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from splitveil.explain.images import Tile, tile_sheet
from splitveil.report.canvas import GREY, INK, PALETTE, board, png

Floats = NDArray[np.floating]
Labels = NDArray[np.integer]
Pixels = NDArray[np.uint8]

KEPT = 3  # images shown per slot
MOST_SLOTS = 10
MOST_CLASSES = 10


def gate_histogram(soft: Floats, hard: Floats, limits: tuple[float, float] | None = None) -> bytes:
    """PNG: the soft (learned) and the hard (SNR) gate over classes and dimensions.

    `limits` are the means above which the early shut-off closes, soft first; None without one.
    """
    titles = ("soft gate (learned, per dimension)", "hard gate (SNR)")
    with board(8.4, 3.0, laid_out=True) as figure:
        for at, axes in enumerate(figure.subplots(1, 2)):
            title, values = titles[at], (soft, hard)[at].ravel()
            share = np.full(len(values), 100 / len(values))
            axes.hist(values, bins=np.linspace(0, 1, 41).tolist(), weights=share, color=PALETTE[at])
            mean = float(values.mean())
            axes.axvline(mean, color=INK, linewidth=1.3, label=f"mean {mean:.2f}")
            if limits is not None:
                text = f"shut-off above {limits[at]:g}"
                axes.axvline(limits[at], color=GREY, linestyle="--", linewidth=1.3, label=text)
            axes.set_xlim(0, 1)
            axes.set_title(title)
            axes.set_xlabel("0 closed · open 1")
            axes.set_ylabel("% of gates" if at == 0 else "")
            axes.legend(
                fontsize=8,
                loc="upper left" if mean > 0.5 else "upper right",  # noqa: PLR2004
                frameon=True,
                edgecolor="none",
                framealpha=0.9,
            )
    return png(figure)


def group_mass(resp: Floats, y: Labels, num_classes: int) -> Floats:
    """Share (c, s) of each class's samples that each of its slots answers for; NaN if absent.

    >>> group_mass(np.array([[1.0, 0.0], [0.5, 0.5]]), np.array([0, 0]), 1).tolist()
    [[0.75, 0.25]]
    """
    rows = [resp[y == c].mean(0) if (y == c).any() else np.full(resp.shape[1], np.nan)
            for c in range(num_classes)]  # fmt: skip
    return np.stack(rows)


def group_images(
    resp: Floats, y: Labels, images: Pixels, classes: Sequence[str], kind: str = "slot"
) -> bytes:
    """PNG: for each class (rows) and slot (columns) the images it answers for most.

    An image stands at the slot with its largest responsibility; an empty slot shows a dash.
    """
    present = [c for c in range(len(classes)) if (y == c).any()][:MOST_CLASSES]
    count = min(resp.shape[1], MOST_SLOTS)
    chosen = resp.argmax(1)

    def surest(label: int, slot: int) -> list[Tile]:
        own = np.flatnonzero((y == label) & (chosen == slot))
        own = own[np.argsort(-resp[own, slot], kind="stable")][:KEPT]
        return [Tile(image=images[i]) for i in own]

    heads = [f"{kind} {slot + 1}" for slot in range(count)]
    rows = [(classes[c], [surest(c, slot) for slot in range(count)]) for c in present]
    return tile_sheet(heads, rows, per_group=KEPT, size=0.34)
