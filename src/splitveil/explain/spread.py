"""Pictures of the smashed data: spread against the noise, and a map of the classes."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from splitveil.report.canvas import GREY, PALETTE, WRONG, board, marker, png, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.floating]
Labels = NDArray[np.integer]

NAMED = 20  # classes that are written into a map
TINY = 1e-12
# The house palette and three more, so that ten classes have ten colours.
COLOURS = (*PALETTE, "#882255", "#999933", "#8b5e3c")


def class_variance(z: Floats, y: Labels) -> Floats:
    """Variance within classes of every dimension of z (n, d), weighted by class size.

    >>> class_variance(np.array([[0.0], [2.0], [5.0]]), np.array([0, 0, 1])).round(4).tolist()
    [0.6667]
    """
    total = np.zeros(z.shape[1])
    for label in np.unique(y):
        own = z[y == label]
        total += len(own) * own.var(0)
    return total / len(y)


def share_above(variance: Floats, noise_std: float) -> float:
    """Share of the dimensions whose variance exceeds that of the noise."""
    return float((variance > noise_std**2).mean())


def variance_against_noise(within: Floats, total: Floats, noise_std: float) -> bytes:
    """PNG: variance of each dimension, sorted; what rises above σ² can be read in the noise.

    `within` is the variance inside classes, which the penalty lowers; `total` over all images.
    """
    from matplotlib.ticker import FuncFormatter, NullFormatter

    with board(7.4, 3.4, laid_out=True) as figure:
        axes = figure.subplots()
        rank = np.arange(1, len(within) + 1)
        wide = {"drawstyle": "steps-mid", "linewidth": 1.5}
        for values, ink, words in (
            (total, PALETTE[5], "over all images"),
            (within, PALETTE[0], "within a class"),
        ):
            axes.plot(rank, np.maximum(np.sort(values)[::-1], TINY), color=ink, label=words, **wide)  # type: ignore[arg-type]
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        if noise_std > 0:
            above = 100 * share_above(within, noise_std)
            axes.axhline(noise_std**2, color=WRONG, linestyle="--", linewidth=1.3)
            axes.text(1.015, noise_std**2, f"noise σ² = {noise_std**2:.2g}",
                      transform=axes.get_yaxis_transform(), color=WRONG, fontsize=8,
                      va="center")  # fmt: skip
            title = f"{above:.0f} % of {len(within)} dimensions vary more than the noise"
        else:
            title = f"{len(within)} dimensions, no noise on the wire"
        axes.set_title(title, loc="left")
        axes.set_xlim(1, max(len(within), 2))
        axes.set_xlabel("dimension, sorted by variance")
        axes.set_ylabel("variance of z")
        low, high = axes.get_ylim()
        below = noise_std**2 > math.sqrt(low * high)  # the noise has its name in the upper half
        axes.legend(
            fontsize=8,
            loc="lower left" if below else "upper left",
            bbox_to_anchor=(1.01, 0.0 if below else 1.0),
        )
    return png(figure)


def class_maps(maps: Sequence[tuple[str, Floats]], y: Labels, classes: Sequence[str]) -> bytes:
    """PNG: plane maps (n, 2) side by side, one colour and marker per class."""
    present = [c for c in range(len(classes)) if (y == c).any()]
    with board(4.2 * len(maps), 4.3, laid_out=True) as figure:
        fields = figure.subplots(1, len(maps), squeeze=False)[0]
        for axes, (title, points) in zip(fields, maps, strict=True):
            axes.set_title(title)
            for label in present:
                own = points[y == label]
                axes.plot(own[:, 0], own[:, 1], marker(label), color=_ink(label), markersize=3.2,
                          alpha=0.65, markeredgewidth=0)  # fmt: skip
            _name_classes(axes, points, y, [(c, classes[c]) for c in present])
            axes.set_xticks([])
            axes.set_yticks([])
            axes.grid(visible=False)
            for side in ("top", "right", "bottom", "left"):
                axes.spines[side].set_visible(True)
                axes.spines[side].set_color(GREY)
    return png(figure)


def _ink(label: int) -> str:
    return COLOURS[label % len(COLOURS)]


def _name_classes(
    axes: "Axes", points: Floats, y: Labels, named: Sequence[tuple[int, str]]
) -> None:
    """Each class's name at the sample nearest to the median of its points."""
    if len(named) > NAMED:
        return
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.75}
    for label, name in named:
        own = points[y == label]
        centre = np.median(own, axis=0)
        x, height = own[((own - centre) ** 2).sum(1).argmin()]
        axes.text(float(x), float(height), shown(name, 12), color=_ink(label), weight="bold",
                  fontsize=9, ha="center", va="center", bbox=paper)  # fmt: skip
