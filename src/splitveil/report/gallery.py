"""Reconstructions beside their originals: the grid, and tiles for the page."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from splitveil.errors import RunError
from splitveil.record.files import Gallery, RunFiles
from splitveil.record.schema import number
from splitveil.report.canvas import (
    CEILING,
    DPI,
    INK,
    RULE,
    WRONG,
    Drawing,
    Tile,
    TileRow,
    png_uri,
    shown,
    tile_sheet,
)
from splitveil.table import format_mse, percent

MAX_COLUMNS = 10
MAX_RUNS, MAX_VALUES = 12, 1_500_000  # a larger picture is not read, and too heavy for a page
MAX_CLASS_NAME = 11
TILE, LABELS = 0.74, 2.17  # inches
Album = list[tuple[RunFiles, Gallery]]  # runs that show the same images


def reconstruction_grid(runs: Sequence[RunFiles]) -> bytes:
    """The grid of `draw_grid` as PNG."""
    return draw_grid(runs).png


def draw_grid(runs: Sequence[RunFiles]) -> Drawing:
    """Originals on top, below one row per model and attack, the strongest marked.

    Runs that scored the same images share their columns; others get a grid of their own.
    """
    rows = [row for album in _albums(runs) for row in _album_rows(album)]
    if not rows:
        raise RunError(
            "none of the runs has a gallery.json; audit a run again to save reconstructions"
        )
    return tile_sheet(rows, size=TILE, labels=LABELS)


def _albums(runs: Sequence[RunFiles]) -> list[Album]:
    """Runs with a gallery, those of the same images together, in the order given."""
    albums: dict[object, Album] = {}
    for run, gallery in _chosen(runs):
        key = (gallery.indices, gallery.original.shape, gallery.original.tobytes())
        albums.setdefault(key, []).append((run, gallery))
    return list(albums.values())


def _chosen(runs: Sequence[RunFiles]) -> Album:
    """The first runs with a gallery, as many as there is room for, and at least one."""
    pairs = [(run, run.gallery) for run in runs if run.gallery is not None][:MAX_RUNS]
    values = accumulate(_values(gallery) for _, gallery in pairs)
    return pairs[: max(1, sum(total <= MAX_VALUES for total in values))]


def _values(gallery: Gallery) -> int:
    """Numbers that the reconstructions of a run bring into the picture."""
    n, c, h, w = (int(side) for side in gallery.original.shape)
    tile = c * min(h, round(TILE * DPI)) * min(w, round(TILE * DPI))
    return len(gallery.reconstructions) * min(n, MAX_COLUMNS) * tile


def left_out(runs: Sequence[RunFiles]) -> list[str]:
    """Names of the runs that have a gallery but no room in the grid."""
    return [run.name for run in runs if run.gallery is not None][len(_chosen(runs)) :]


def _album_rows(album: Album) -> list[TileRow]:
    """The originals under the names of their classes, then each model with its attacks."""
    first = album[0][1]
    names = [shown(first.class_name(label), MAX_CLASS_NAME) for label in first.labels]
    tiles = [Tile(image=i, words=n) for i, n in zip(first.original, names, strict=True)]
    rows = [TileRow(label="original", bold=True, tiles=tiles[:MAX_COLUMNS])]
    for run, gallery in album:
        rows.append(_head(run, gallery))
        rows += [_attack_row(run, gallery, attack) for attack in gallery.reconstructions]
    return rows


def _head(run: RunFiles, gallery: Gallery) -> TileRow:
    """Name and accuracy of a model, and the server's answer over each column."""
    tiles = []
    for answer, label in zip(gallery.answers, gallery.labels, strict=True):
        name, right = shown(gallery.class_name(answer), MAX_CLASS_NAME), answer == label
        tiles.append(Tile(words=name if right else f"{name} ✗", ink=INK if right else WRONG))
    note = f"accuracy {percent(run.record.accuracy, 1)} %; the server's answers:"
    name = shown(run.name, 24)
    return TileRow(label=name, note=note, bold=True, ruled=True, tiles=tiles[:MAX_COLUMNS])


def _attack_row(run: RunFiles, gallery: Gallery, attack: str) -> TileRow:
    """An attack's images and mean MSE: over all scored images, or else over those shown."""
    mse, suffix = number(run.record, f"attacks.{attack}.mse"), ""
    if mse is None and attack in gallery.mse:
        mse, suffix = float(np.mean(gallery.mse[attack])), " (shown images)"
    strongest = attack == run.record.strongest.mse_by
    frame = CEILING if strongest else RULE
    return TileRow(
        label=shown(attack, 20),
        note=f"MSE {format_mse(mse)}{suffix}{'  ★ strongest' if strongest else ''}",
        ink=CEILING if strongest else INK,
        bold=strongest,
        tiles=[Tile(image=i, frame=frame) for i in gallery.reconstructions[attack][:MAX_COLUMNS]],
    )


LARGEST = 160  # px of a side; larger images are shown smaller
BUDGET = 5_000_000  # characters of all tiles together; the page must stay small enough to mail


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
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
    tiles: tuple[Reconstruction, ...]

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
        (run, run.gallery, attack, attack == run.record.strongest.mse_by)
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
        mse=format_mse(number(run.record, f"attacks.{attack}.mse")),
        strongest=strongest,
        tiles=tuple(
            Reconstruction(
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
    from PIL import Image

    picture = image[0] if len(image) == 1 else np.moveaxis(image, 0, -1)
    tile = Image.fromarray(np.ascontiguousarray(picture))
    if max(tile.size) > LARGEST:
        tile.thumbnail((LARGEST, LARGEST), Image.Resampling.BOX)
    buffer = io.BytesIO()
    tile.save(buffer, "PNG", optimize=True)
    return png_uri(buffer.getvalue())
