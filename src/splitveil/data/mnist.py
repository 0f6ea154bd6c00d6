"""The digits of scikit-learn, a small Fashion-MNIST that ships with the package, and all of it.

An IDX file is a big-endian header, then bytes. Fashion-MNIST is read from the data folder, from
Debian's package, or downloaded. MNIST has files of the same names and shapes, so each file is
checked by the SHA-256 of its decompressed bytes; that of a .gz file differs between distributors.
`fashion-small.xz`, beside this module with its licence, holds a part of it: labels, then images;
`scripts/fashion_small.py` makes it.
"""

import lzma
import math
import struct
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import numpy as np

from splitveil.data.archive import fetch, file_bytes, sha256_of
from splitveil.data.dataset import Arrays, Dataset, ReadRequest, join, make_dataset
from splitveil.errors import DataError

INK_LEVELS = 16
SMALL, SMALL_TRAIN, SMALL_TEST, SIDE = "fashion-small.xz", 5000, 2000, 28
UBYTE = 0x08
URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
FOLDER = "fashion-mnist"
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
CLASSES = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"
# SHA-256 of a file as the project serves it (.gz), and of the bytes inside.
PACKED = {
    "train-images-idx3-ubyte": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "train-labels-idx1-ubyte": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "t10k-images-idx3-ubyte": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "t10k-labels-idx1-ubyte": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
}
UNPACKED = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}


def read_digits(request: ReadRequest) -> Dataset:
    """The digits (1797, 1, 8, 8): ink v in 0..16 becomes the byte round(v · 255 / 16)."""
    del request
    from sklearn.datasets import load_digits

    found = load_digits()
    images = np.rint(found.images[:, None] * (255 / INK_LEVELS)).astype(np.uint8)
    return make_dataset("digits", (images, found.target), tuple(str(c) for c in found.target_names))


def read_fashion_small(request: ReadRequest) -> Dataset:
    """5,000 training and 2,000 test images of Fashion-MNIST (7000, 1, 28, 28), no files needed."""
    del request
    packed = resources.files("splitveil.data").joinpath(SMALL).read_bytes()
    values, count = np.frombuffer(lzma.decompress(packed), np.uint8), SMALL_TRAIN + SMALL_TEST
    images = values[count:].reshape(count, 1, SIDE, SIDE)
    data, classes = (images, values[:count]), tuple(CLASSES.split(","))
    return make_dataset("fashion-small", data, classes, first=SMALL_TRAIN)


def read_fashion(request: ReadRequest) -> Dataset:
    """Fashion-MNIST (70000, 1, 28, 28) from the first folder that has all four files."""
    home = request.root / FOLDER
    for folder in (home, request.root, DEBIAN):
        if len(found := locate(folder)) == len(UNPACKED):
            return assemble(found)
    found = locate(home)
    for name, sha256 in PACKED.items():
        if name not in found:
            fetch(f"{URL}{name}.gz", home / f"{name}.gz", sha256, request.progress)
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
        if (got := sha256_of(blobs[name])) != UNPACKED[name]:
            raise DataError(
                f"the content of {path} has SHA-256 {got}, expected {UNPACKED[name]}; it is not "
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
