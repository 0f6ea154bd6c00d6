"""Small pictures inside a figure."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from splitveil.report.canvas import RULE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RGB = 3


def sheet(figure: "Figure") -> "Axes":
    """One empty field over the whole figure, measured in inches from the lower left corner.

    A field of its own for each of a hundred thumbnails would take seconds.
    """
    width, height = figure.get_size_inches()
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, float(width))
    axes.set_ylim(0, float(height))
    axes.set_axis_off()
    axes.set_autoscale_on(False)
    return axes


def thumbnail(
    axes: "Axes", image: NDArray[np.uint8], x: float | int, y: float | int, size: float | int
) -> None:
    """Draw one image (c, h, w) with its lower left corner at (x, y), framed."""
    from matplotlib.patches import Rectangle

    extent = (x, x + size, y, y + size)
    pixels = image.transpose(1, 2, 0) if image.shape[0] == RGB else image[0]
    axes.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest", extent=extent,
                aspect="auto")  # fmt: skip
    frame = Rectangle((x, y), size, size, fill=False, edgecolor=RULE, linewidth=0.6)
    axes.add_patch(frame)
