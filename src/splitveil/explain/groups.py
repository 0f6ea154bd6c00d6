"""Pictures of gates and of what the slots (or clusters) of a class collect."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from splitveil.explain.images import sheet, thumbnail
from splitveil.report.canvas import GREY, INK, PALETTE, board, png, shown

Floats = NDArray[np.floating]
Labels = NDArray[np.integer]
Pixels = NDArray[np.uint8]

KEPT = 3  # images shown per slot
MOST_SLOTS = 10


def gate_histogram(soft: Floats, hard: Floats, limits: tuple[float, float] | None = None) -> bytes:
    """PNG: the soft (learned) and the hard (SNR) gate over classes and dimensions.

    `limits` are the means above which the early shut-off closes, soft first; None without one.
    """
    with board(8.4, 3.0) as figure:
        titles = ("soft gate (learned, per dimension)", "hard gate (SNR)")
        for at, (title, gate) in enumerate(zip(titles, (soft, hard), strict=True)):
            axes = figure.add_axes((0.08 + 0.49 * at, 0.17, 0.41, 0.7))
            values = gate.ravel()
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
    present = [c for c in range(len(classes)) if (y == c).any()][:10]
    count = min(resp.shape[1], MOST_SLOTS)
    cell, gap, left, head = 0.34, 0.14, 0.95, 0.38
    column = KEPT * (cell + 0.03) + gap
    width, height = left + count * column, head + len(present) * (cell + 0.1) + 0.05
    chosen = resp.argmax(1)
    with board(width, height) as figure:
        field = sheet(figure)
        for slot in range(count):
            middle = left + slot * column + (column - gap) / 2
            title = f"{kind} {slot + 1}"
            field.text(middle, height - 0.22, title, ha="center", fontsize=8, weight="bold")
        for row, label in enumerate(present):
            bottom = height - head - (row + 1) * (cell + 0.1) + 0.1
            name, level = shown(classes[label], 12), bottom + cell / 2
            field.text(left - 0.1, level, name, ha="right", va="center", fontsize=8)
            for slot in range(count):
                own = np.flatnonzero((y == label) & (chosen == slot))
                own = own[np.argsort(-resp[own, slot], kind="stable")][:KEPT]
                start = left + slot * column
                if len(own) == 0:
                    middle = start + (column - gap) / 2
                    field.text(middle, level, "–", ha="center", va="center", color=GREY)
                for at, index in enumerate(own):
                    thumbnail(field, images[index], start + at * (cell + 0.03), bottom, cell)
        return png(figure)
