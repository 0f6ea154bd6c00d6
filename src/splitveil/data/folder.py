"""`folder:PATH`: one folder per class, with images of one size.

`PATH/<class>/<image>` is divided into a training and a test part; `PATH/train/<class>/<image>` and
`PATH/test/<class>/<image>` are used as divided. EXIF rotation is ignored. `folder:PATH@64` reads
photographs of any size: each is turned upright, its middle square is cut out and becomes 64×64.
"""

import math
import re
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np
from einops import rearrange
from PIL import Image, ImageOps, UnidentifiedImageError

from splitveil.data.dataset import (
    TOLD,
    Arrays,
    Dataset,
    ReadRequest,
    check_memory,
    make_dataset,
)
from splitveil.errors import DataError
from splitveil.io import Progress, opened

FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
# From the mode of a file to the mode it is read in; any other mode would lose information.
MODES = {"1": "L", "L": "L", "RGB": "RGB"}
REPORT_EVERY = 256
MAX_FILE = 1 << 28  # bytes of one image file; Pillow bounds its pixels
SIDES = range(4, 1025)  # pixels of `folder:PATH@SIDE`
Files = list[tuple[Path, int]]


def read(request: ReadRequest) -> Dataset:
    """The dataset in a folder, classes in sorted order."""
    given = request.path or Path()
    folder, side = sized(given)
    path = replace(request, path=folder).existing_path()
    parts = parts_of(path)
    if len(parts) > 1:
        check_same_classes(*parts)
    classes, files = listed(parts)
    return make_dataset(
        f"folder:{given}",
        read_files(list(chain(*files)), request.progress, side),
        classes,
        first=len(files[0]) if len(files) > 1 else None,
        whole=request.whole,
    )


def sized(path: Path) -> tuple[Path, int | None]:
    """The folder of `PATH` or `PATH@SIDE`, and the side of the squares that its images become.

    >>> sized(Path("photos@64"))[1], sized(Path("photos"))[1]
    (64, None)
    """
    found = re.fullmatch(r"(.+)@([0-9]+)", str(path))
    if found is None or path.exists():
        return path, None
    if (side := int(found[2])) not in SIDES:
        raise DataError(f"{path} asks for images of {side}×{side}; give a side from 4 to 1024")
    return Path(found[1]), side


def parts_of(path: Path) -> list[Path]:
    """The folders that contain class folders: train/ and test/ if both exist, else the folder."""
    both = [path / "train", path / "test"]
    return both if all(part.is_dir() for part in both) else [path]


def listed(parts: Sequence[Path]) -> tuple[tuple[str, ...], list[Files]]:
    """Names of the classes, and the files of each part."""
    classes = class_names(parts[0])
    return classes, [list_files(part, classes) for part in parts]


def check_same_classes(train: Path, test: Path) -> None:
    """Raise DataError if two parts have different class folders."""
    for more, less in ((test, train), (train, test)):
        if missing := sorted(set(class_names(more)) - set(class_names(less))):
            named = missing[:TOLD] + [f"and {len(missing) - TOLD} more"] * (len(missing) > TOLD)
            raise DataError(
                f"{more} has classes that {less} lacks: {', '.join(named)}; both parts must have "
                f"the same class folders, so add them to {less} or remove them from {more}"
            )


def visible(folder: Path) -> list[Path]:
    """The entries of a folder, sorted, without hidden ones."""
    try:
        return sorted(p for p in folder.iterdir() if not p.name.startswith("."))
    except NotADirectoryError as err:
        raise DataError(
            f"{folder} is a file, not a folder; give the folder that contains one folder per class"
        ) from err
    except OSError as err:
        raise DataError(f"cannot list {folder}: {err.strerror}; make it readable") from err


def class_names(folder: Path) -> tuple[str, ...]:
    """Names of the class folders, sorted."""
    names = tuple(p.name for p in visible(folder) if p.is_dir())
    if not names:
        raise DataError(f"{folder} has no class folders; expected {folder}/<class>/<image>")
    return names


def list_files(folder: Path, classes: Sequence[str]) -> Files:
    """Image files with their labels; a class without a folder has none."""
    files: Files = []
    for label, name in enumerate(classes):
        if not (folder / name).is_dir():
            continue
        for path in visible(folder / name):
            if path.is_dir():
                raise DataError(
                    f"{path} is a folder inside a class folder; expected {folder}/<class>/<image>, "
                    "or train/ and test/ with class folders in both"
                )
            if path.suffix.lower() not in SUFFIXES:
                raise DataError(
                    f"{path} is not a supported image type ({', '.join(SUFFIXES)}); convert it or "
                    "move it away"
                )
            files.append((path, label))
    if not files:
        raise DataError(
            f"{folder} has no images in its class folders; put some there ({', '.join(SUFFIXES)})"
        )
    return files


def file_names(dataset: str) -> list[str] | None:
    """Paths of the images of a `folder:` dataset, relative to it, in its order; else None."""
    kind, _, place = dataset.partition(":")
    if kind != "folder":
        return None
    root, _ = sized(Path(place).expanduser())
    return [file.relative_to(root).as_posix() for file, _ in chain(*listed(parts_of(root))[1])]


def read_files(files: Files, progress: Progress, side: int | None = None) -> Arrays:
    """Images (n, c, h, w) uint8 and labels (n,) of files of one colour, and of one size or side."""
    first = files[0][0]
    shape = (len(files), *decode(first, str(first), side=side).shape)
    check_memory(math.prod(shape), f"the folder of {first}")
    images = np.empty(shape, np.uint8)
    for i, (path, _) in enumerate(files):
        pixels = decode(path, str(path), side=side)
        if pixels.shape != images.shape[1:]:
            raise DataError(
                f"{path} is {describe(pixels)}, but {first} is {describe(images[0])}; "
                + (
                    "resize the images, or let each become a square with folder:PATH@64"
                    if pixels.shape[0] == shape[1]
                    else "convert the images so that all have the same colours"
                )
            )
        images[i] = pixels
        if i % REPORT_EVERY == 0 or i + 1 == len(files):
            progress(i + 1, len(files), "reading images")
    return images, np.array([label for _, label in files])


def describe(pixels: np.ndarray) -> str:
    """Width, height and colour in words.

    >>> describe(np.zeros((3, 20, 10), np.uint8))
    '10×20 RGB'
    """
    c, h, w = pixels.shape
    return f"{w}×{h} {'RGB' if c > 1 else 'grey'}"


def decode(
    source: Path | BytesIO, name: str, advice: str | None = None, *, side: int | None = None
) -> np.ndarray:
    """Pixels (c, h, w) uint8 of an image, grey (c = 1) or RGB (c = 3).

    Args:
        source: The file, or its bytes.
        name: What messages call it.
        advice: What to do about a broken image, if the user cannot convert or replace it.
        side: If given, the upright image's middle square, resized to side × side.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with _bytes_of(source) as file, Image.open(file, formats=FORMATS) as image:
                if image.mode not in MODES:
                    raise DataError(
                        f"{name} has mode {image.mode}; only grey (L) and RGB are read: "
                        + (
                            advice
                            or "convert it, and decide what to do with palette, depth or alpha"
                        )
                    )
                kept = image.convert(MODES[image.mode])
                if side is not None:
                    ImageOps.exif_transpose(kept, in_place=True)
                    kept = ImageOps.fit(kept, (side, side))
                pixels = np.asarray(kept)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as err:
        raise DataError(f"{name} is suspiciously large ({err}); {advice or 'resize it'}") from err
    except (OSError, SyntaxError, ValueError) as err:
        # PIL raises any of these three, depending on the format. Its message for an unknown format
        # may contain the address of a buffer, so it is replaced.
        no_image = isinstance(err, UnidentifiedImageError)
        why = f"it is none of {', '.join(FORMATS)}" if no_image else err
        raise DataError(
            f"cannot read {name} as an image: {why}; {advice or 'replace or delete it'}"
        ) from err
    return pixels[None] if pixels.ndim == len("hw") else rearrange(pixels, "h w c -> c h w")


def _bytes_of(source: Path | BytesIO) -> AbstractContextManager[BinaryIO]:
    return nullcontext(source) if isinstance(source, BytesIO) else opened(source, MAX_FILE)
