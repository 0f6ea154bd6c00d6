"""Of each attack the image it rebuilds best, the median one and the worst, with originals."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from splitveil.record.files import Gallery
from splitveil.record.schema import number, text
from splitveil.report.files import RunFiles
from splitveil.table import format_mse

LARGEST = 160  # px of a side; larger images are shown smaller


BUDGET = 5_000_000  # characters of all tiles together; the page must stay small enough to mail


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One test image and its reconstruction, as data: addresses; `rank` is a word of the table."""

    rank: str
    index: int
    class_name: str
    mse: str
    original: str
    made: str


@dataclass(frozen=True, kw_only=True)
class Strip:
    """An attack on a run: up to three tiles, worst for the defender first."""

    run: str
    attack: str
    mse: str
    strongest: bool
    tiles: tuple[Tile, ...]

    @property
    def size(self) -> int:
        """Characters its pictures take in a page."""
        return sum(len(tile.original) + len(tile.made) for tile in self.tiles)


def picks(errors: Sequence[float]) -> list[tuple[str, int]]:
    """Ranks and positions of the images to show: lowest, median and highest error.

    >>> picks([0.3, 0.1, 0.2, 0.9])
    [('worst', 1), ('median', 2), ('best', 3)]
    >>> picks([0.3]), picks([0.3, 0.1])
    ([('only', 0)], [('worst', 1), ('best', 0)])
    """
    order = sorted(range(len(errors)), key=lambda at: errors[at])
    if len(order) == 1:
        return [("only", order[0])]
    middle = [("median", order[(len(order) - 1) // 2])] if len(order) > 2 else []  # noqa: PLR2004
    return [("worst", order[0]), *middle, ("best", order[-1])]


def strips(runs: Sequence[RunFiles], budget: int = BUDGET) -> tuple[list[Strip], int]:
    """Strips in the order of runs and attacks, and how many found no room.

    Room goes to the strongest attack of every run first.
    """
    wanted = [
        (run, run.gallery, attack, attack == text(run.record, "strongest", "mse_by"))
        for run in runs
        if run.gallery is not None
        for attack in run.gallery.reconstructions
    ]
    made: dict[int, Strip] = {}
    for at in sorted(range(len(wanted)), key=lambda at: not wanted[at][3]):
        strip = _strip(*wanted[at])
        if strip.size > budget:
            break
        budget -= strip.size
        made[at] = strip
    return [made[at] for at in sorted(made)], len(wanted) - len(made)


def _strip(run: RunFiles, gallery: Gallery, attack: str, strongest: bool) -> Strip:
    errors = image_errors(gallery, attack)
    return Strip(
        run=run.name,
        attack=attack,
        mse=format_mse(number(run.record, "attacks", attack, "mse")),
        strongest=strongest,
        tiles=tuple(
            Tile(
                rank=rank,
                index=gallery.indices[at],
                class_name=gallery.class_name(gallery.labels[at]),
                mse=format_mse(errors[at]),
                original=_address(gallery.original[at]),
                made=_address(gallery.reconstructions[attack][at]),
            )
            for rank, at in picks(errors)
        ),
    )


def image_errors(gallery: Gallery, attack: str) -> list[float]:
    """MSE of each image: as the audit measured it, else from the saved levels."""
    known = gallery.mse.get(attack, ())
    if known and all(np.isfinite(known)):
        return list(known)
    levels = (gallery.original.astype(np.float64), gallery.reconstructions[attack])
    gaps = (levels[0] - levels[1]) / 255  # (n, c, h, w)
    return [float(value) for value in np.square(gaps).mean((1, 2, 3))]


def _address(image: NDArray[np.uint8]) -> str:
    """An image (c, h, w) as a data: address of a PNG."""
    return _encoded(image.tobytes(), image.shape)


@lru_cache(maxsize=256)
def _encoded(raw: bytes, shape: tuple[int, ...]) -> str:
    from PIL import Image

    image = np.frombuffer(raw, dtype=np.uint8).reshape(shape)
    picture = image[0] if shape[0] == 1 else np.moveaxis(image, 0, -1)
    buffer = io.BytesIO()
    tile = Image.fromarray(np.ascontiguousarray(picture))
    if max(tile.size) > LARGEST:
        tile.thumbnail((LARGEST, LARGEST), Image.Resampling.BOX)
    tile.save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
