"""Reconstructions beside their originals."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from splitveil.errors import RunError
from splitveil.record.files import Gallery, Pixels, RunFiles
from splitveil.record.schema import number
from splitveil.report.canvas import CEILING, DPI, GREY, INK, RULE, WRONG, Drawing, board, shown
from splitveil.table import format_mse, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MAX_COLUMNS = 10
MAX_RUNS, MAX_VALUES = 12, 1_500_000  # a larger picture is not read, and too heavy for a page
MAX_CLASS_NAME = 11
TILE, GAP, LABELS, MARGIN = 0.74, 0.07, 2.05, 0.12  # inches
NAMES, HEADER, BETWEEN = 0.24, 0.52, 0.34  # inches: class names, head of a model, between grids
Album = list[tuple[RunFiles, Gallery]]  # runs that show the same images


def reconstruction_grid(runs: Sequence[RunFiles]) -> bytes:
    """The grid of `draw_grid` as PNG."""
    return draw_grid(runs).png


def draw_grid(runs: Sequence[RunFiles]) -> Drawing:
    """Originals on top, below one row per model and attack, the strongest marked.

    Runs that scored the same images share their columns; others get a grid of their own.
    """
    albums = _albums(runs)
    if not albums:
        raise RunError(
            "none of the runs has a gallery.json; audit a run again to save reconstructions"
        )
    columns = max(_shown_columns(album) for album in albums)
    width = 2 * MARGIN + LABELS + columns * (TILE + GAP)
    height = 2 * MARGIN + sum(map(_height, albums)) + BETWEEN * (len(albums) - 1)
    with board(width, height) as figure:
        axes = figure.add_axes((0, 0, 1, 1))
        top = MARGIN
        for album in albums:
            _draw_album(axes, album, top, width)
            top += _height(album) + BETWEEN
        axes.set_axis_off()
        axes.set_xlim(0, width)
        axes.set_ylim(height, 0)
        axes.set_aspect("auto")
        return Drawing(figure)


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


def _shown_columns(album: Album) -> int:
    return min(MAX_COLUMNS, len(album[0][1].indices))


def _height(album: Album) -> float:
    """Height of a grid in inches."""
    rows = 1 + sum(len(gallery.reconstructions) for _, gallery in album)
    return NAMES + rows * (TILE + GAP) + HEADER * len(album)


def _draw_album(axes: "Axes", album: Album, top: float, width: float) -> None:
    """One grid: class names, originals, then each model with its attacks."""
    first, columns = album[0][1], _shown_columns(album)
    for column, label in enumerate(first.labels[:columns]):
        name = shown(first.class_name(label), MAX_CLASS_NAME)
        _say(axes, _centre(column), top + NAMES / 2, name, size=7.5, ink=GREY, ha="center")
    top += NAMES
    _say(axes, MARGIN, top + TILE / 2, "original", weight="bold")
    _draw_row(axes, first.original[:columns], top)
    top += TILE + GAP
    for run, gallery in album:
        axes.plot([MARGIN, width - MARGIN], [top + 0.03] * 2, color=RULE, linewidth=0.8)
        _draw_head(axes, run, gallery, top, columns)
        top += HEADER
        for attack, pixels in gallery.reconstructions.items():
            strongest = attack == run.record.strongest.mse_by
            _draw_label(axes, run, gallery, attack, top, strongest=strongest)
            _draw_row(axes, pixels[:columns], top, frame=CEILING if strongest else RULE)
            top += TILE + GAP


def _draw_head(axes: "Axes", run: RunFiles, gallery: Gallery, top: float, columns: int) -> None:
    """Name and accuracy of a model, and the server's answer over each column."""
    accuracy = percent(run.record.accuracy, 1)
    _say(axes, MARGIN, top + 0.19, shown(run.name, 24), size=10.0, weight="bold")
    _say(axes, MARGIN, top + 0.39, f"accuracy {accuracy} %", size=7.5, ink=GREY)
    _say(axes, MARGIN + LABELS, top + 0.19, "the server's answers", size=7.5, ink=GREY)
    for column in range(columns):
        answer, label = gallery.answers[column], gallery.labels[column]
        name = shown(gallery.class_name(answer), MAX_CLASS_NAME)
        words, ink = (name, INK) if answer == label else (f"{name} ✗", WRONG)
        _say(axes, _centre(column), top + 0.39, words, size=7.5, ink=ink, ha="center")


def _draw_label(
    axes: "Axes", run: RunFiles, gallery: Gallery, attack: str, top: float, *, strongest: bool
) -> None:
    """Name of an attack and its mean MSE: over all scored images, or else over those shown."""
    mse, suffix = number(run.record, f"attacks.{attack}.mse"), ""
    if mse is None and attack in gallery.mse:
        mse, suffix = float(np.mean(gallery.mse[attack])), " (shown images)"
    ink = CEILING if strongest else INK
    weight = "bold" if strongest else "normal"
    _say(axes, MARGIN, top + TILE / 2 - 0.10, shown(attack, 20), ink=ink, weight=weight)
    score = f"MSE {format_mse(mse)}{suffix}"
    if strongest:  # below the name: beside a long one it would reach into the images
        score += "  ★ strongest"
    ink = CEILING if strongest else GREY
    _say(axes, MARGIN, top + TILE / 2 + 0.10, score, size=8.0, ink=ink)


def _draw_row(axes: "Axes", pixels: Pixels, top: float, frame: str = RULE) -> None:
    """A row of images (n, c, h, w), pixels as they are."""
    for column, image in enumerate(pixels):
        left = MARGIN + LABELS + column * (TILE + GAP)
        picture = np.moveaxis(image, 0, -1)  # (h, w, c)
        box = (left, left + TILE, top + TILE, top)
        axes.imshow(
            np.repeat(picture, 3, axis=-1) if picture.shape[-1] == 1 else picture,
            extent=box,
            interpolation="none",
        )
        axes.plot(
            [left, left + TILE, left + TILE, left, left],
            [top, top, top + TILE, top + TILE, top],
            color=frame,
            linewidth=1.4 if frame == CEILING else 0.6,
        )


def _centre(column: int) -> float:
    return MARGIN + LABELS + column * (TILE + GAP) + TILE / 2


def _say(
    axes: "Axes",
    x: float,
    y: float,
    words: str,
    *,
    size: float = 9.0,
    ink: str = INK,
    weight: str = "normal",
    ha: str = "left",
) -> None:
    """A line of text at a place in inches from the top left corner."""
    axes.text(x, y, words, fontsize=size, color=ink, fontweight=weight, ha=ha, va="center")


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
