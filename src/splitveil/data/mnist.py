"""The digits of scikit-learn, and Fashion-MNIST from its four IDX files.

An IDX file is a big-endian header, then bytes. Fashion-MNIST is read from the data folder, from
Debian's package, or downloaded. MNIST has files of the same names and shapes, so each file is
checked by the MD5 of its decompressed bytes; those of the .gz files differ between distributors.
"""

import math
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from splitveil.data.archive import fetch, file_bytes, md5_of
from splitveil.data.dataset import Arrays, Dataset, ReadRequest, join, make_dataset
from splitveil.errors import DataError

INK_LEVELS = 16
UBYTE = 0x08
URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
FOLDER = "fashion-mnist"
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
CLASSES = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"
# MD5 of a file as the project serves it (.gz), and of the bytes inside.
FILES = {
    "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe 9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79 8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310 15d484375f8d13e6eb1aabb0c3f46965",
}
PACKED = {name: sums.split()[0] for name, sums in FILES.items()}
UNPACKED = {name: sums.split()[1] for name, sums in FILES.items()}


def read_digits(request: ReadRequest) -> Dataset:
    """The digits (1797, 1, 8, 8): ink v in 0..16 becomes the byte round(v · 255 / 16)."""
    del request
    from sklearn.datasets import load_digits

    found = load_digits()
    images = np.rint(found.images[:, None] * (255 / INK_LEVELS)).astype(np.uint8)
    return make_dataset("digits", (images, found.target), tuple(str(c) for c in found.target_names))


def read_fashion(request: ReadRequest) -> Dataset:
    """Fashion-MNIST (70000, 1, 28, 28) from the first folder that has all four files."""
    home = request.root / FOLDER
    for folder in (home, request.root, DEBIAN):
        if len(found := locate(folder)) == len(UNPACKED):
            return assemble(found)
    found = locate(home)
    for name, md5 in PACKED.items():
        if name not in found:
            fetch(f"{URL}{name}.gz", home / f"{name}.gz", md5, request.progress)
    return assemble(locate(home))


def locate(folder: Path) -> dict[str, Path]:
    """Those of the four files that are in `folder`, plain or as .gz."""
    places = ((name, folder / f"{name}{suffix}") for name in UNPACKED for suffix in (".gz", ""))
    return {name: path for name, path in places if path.is_file()}


def assemble(files: Mapping[str, Path]) -> Dataset:
    """The dataset from the four files, after checking them."""
    blobs = {name: file_bytes(path) for name, path in files.items()}
    train, test = pair(blobs, "train"), pair(blobs, "t10k")
    for name, path in files.items():
        if (got := md5_of(blobs[name])) != UNPACKED[name]:
            raise DataError(
                f"the content of {path} has MD5 {got}, expected {UNPACKED[name]}; it is not "
                "Fashion-MNIST (MNIST has the same file names): delete it and fetch it again"
            )
    classes = tuple(CLASSES.split(","))
    data, first = join("fashion-mnist", train, test), len(train[0])
    return make_dataset("fashion-mnist", data, classes, first=first, crop_pad=2, flip=True)


def pair(blobs: Mapping[str, bytes], part: str) -> Arrays:
    """Images (n, 1, h, w) and labels (n,) of the part `train` or `t10k`."""
    images_name, labels_name = f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"
    images = parse_idx(blobs[images_name], 3, images_name)
    labels = parse_idx(blobs[labels_name], 1, labels_name)
    if len(images) != len(labels):
        raise DataError(
            f"{images_name} has {len(images)} images but {labels_name} {len(labels)} labels; "
            "fetch both again"
        )
    return np.expand_dims(images, 1), labels


def parse_idx(raw: bytes, ndim: int, name: str) -> np.ndarray:
    """The array with `ndim` axes in an IDX file of unsigned bytes; the header is checked.

    >>> parse_idx(bytes([0, 0, 8, 1, 0, 0, 0, 2, 5, 9]), 1, "labels").tolist()
    [5, 9]
    """
    magic, header = struct.pack(">HBB", 0, UBYTE, ndim), 4 + 4 * ndim
    if raw[:4] != magic:
        raise DataError(f"{name} begins with {raw[:4].hex()}, expected {magic.hex()} (IDX, ubyte)")
    if len(raw) < header:
        raise DataError(f"{name} ends inside its header: {len(raw)} of {header} bytes")
    shape = struct.unpack(f">{ndim}I", raw[4:header])
    if len(raw) - header != math.prod(shape):
        raise DataError(
            f"{name} announces {shape} = {math.prod(shape)} bytes but has {len(raw) - header}; "
            "delete it and fetch it again"
        )
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)
