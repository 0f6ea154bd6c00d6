"""`npz:PATH`: a NumPy archive with images and labels.

Its keys are `x` and `y`, which are divided into a training and a test part, or `x_train`,
`y_train`, `x_test` and `y_test`; an array `classes` of strings may name the labels. Images are
(n, h, w), or have a channel axis of length 1 or 3. That is the last axis if only the last has such
a length, the second if only the second has. If both have, a key `layout` with the text "nhwc" or
"nchw" decides. Pickled arrays are refused: unpickling can run code.
"""

from collections.abc import Mapping
from pathlib import Path
from zipfile import ZipFile

import numpy as np
from einops import rearrange

from splitveil.data.archive import UNREADABLE
from splitveil.data.dataset import (
    CHANNELS,
    Arrays,
    Dataset,
    ReadRequest,
    check_memory,
    join,
    make_dataset,
    to_uint8,
)
from splitveil.errors import DataError
from splitveil.io import opened

ONE = ("x", "y")
TWO = ("x_train", "y_train", "x_test", "y_test")
ZIP, SINGLE = b"PK", b"\x93N"  # first bytes of the files of np.savez and np.save
OPTIONAL = ("classes", "layout")
LAYOUTS = ("nhwc", "nchw")
ASK = "add layout='nhwc' or layout='nchw' to the file"
SAVE = "save images and labels with np.savez"
CONVERT = "convert the images to grey or RGB, and decide what to do with depth or alpha"


def read(request: ReadRequest) -> Dataset:
    """The dataset in an .npz file."""
    path = request.existing_path()
    arrays = read_arrays(path)
    name, layout = f"npz:{path}", str(arrays.get("layout", ""))
    if layout not in ("", *LAYOUTS):
        raise DataError(f"layout in {path} must be one of {', '.join(LAYOUTS)}, got '{layout}'")
    first = None
    if "x" in arrays:
        data = part(arrays, *ONE, layout, path)
    else:
        train = part(arrays, *TWO[:2], layout, path)
        data = join(name, train, part(arrays, *TWO[2:], layout, path))
        first = len(train[0])
    classes = class_names(arrays, data[1])
    return make_dataset(name, data, classes, first=first, whole=request.whole)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file; exactly one of the two sets of keys must be complete."""
    try:
        # Opened here, because NumPy does not close a file that turns out to be broken.
        with opened(path) as stream:
            beginning = stream.read(2)
            if beginning == SINGLE:
                raise DataError(f"{path} is a single array; {SAVE}")
            if beginning != ZIP:
                raise DataError(f"cannot read {path}: it is not an .npz file; {SAVE}")
            stream.seek(0)
            with ZipFile(stream) as packed:
                check_memory(sum(member.file_size for member in packed.infolist()), str(path))
            stream.seek(0)
            archive = np.load(stream, allow_pickle=False)
            keys = set(archive.files)
            one, two = keys.issuperset(ONE), keys.issuperset(TWO)
            if one == two:
                raise DataError(
                    f"{path} must have either {', '.join(ONE)} or {', '.join(TWO)}; "
                    f"it has {', '.join(sorted(keys)) or 'nothing'}"
                )
            wanted = (*(ONE if one else TWO), *OPTIONAL)
            return {key: archive[key] for key in wanted if key in keys}
    except UNREADABLE as err:
        raise DataError(f"cannot read {path} as an .npz file of plain arrays: {err}") from err


def part(arrays: Mapping[str, np.ndarray], x: str, y: str, layout: str, path: Path) -> Arrays:
    """Images (n, c, h, w) uint8 and labels (n,) under the keys `x` and `y`."""
    labels = arrays[y]
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise DataError(
            f"{y} in {path} must be integers of shape (n,), got {labels.dtype} {labels.shape}; "
            "number the classes from 0 and name them in an array `classes`"
        )
    images = channels_first(arrays[x], layout, f"{x} in {path}")
    return to_uint8(images, f"{x} in {path}"), labels


def channels_first(x: np.ndarray, layout: str, name: str) -> np.ndarray:
    """Images as (n, c, h, w); the module docstring says how the layout is recognised.

    >>> channels_first(np.zeros((5, 8, 9, 3)), "", "x").shape
    (5, 3, 8, 9)
    """
    if x.ndim == len("nhw"):
        return x[:, None]
    if x.ndim != len("nchw"):
        raise DataError(f"{name} must be (n, h, w), (n, h, w, c) or (n, c, h, w), got {x.shape}")
    first, last = x.shape[1] in CHANNELS, x.shape[3] in CHANNELS
    if first == last and not layout:
        raise DataError(
            f"{name} has shape {x.shape}: {'both' if first else 'neither'} of the second and the "
            f"last axis could be channels (1 or 3); {ASK if first else CONVERT}"
        )
    if layout == "nhwc" or (not layout and last):
        return rearrange(x, "n h w c -> n c h w")
    return x


def class_names(arrays: Mapping[str, np.ndarray], labels: np.ndarray) -> tuple[str, ...]:
    """The strings in `classes`, or "0", "1", … for as many labels as occur."""
    if "classes" in arrays:
        return tuple(str(c) for c in arrays["classes"].ravel())
    return tuple(str(c) for c in range(len(np.unique(labels))))
