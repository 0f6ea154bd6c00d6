"""Fashion-MNIST from its four IDX files: the data folder, Debian's package, or the network.

MNIST has files of the same names and shapes, so each file is also checked by the MD5 of its
unpacked bytes (the packed ones differ between distributors).
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from splitveil.data.dataset import Dataset
from splitveil.data.download import fetch
from splitveil.data.idx import parse_idx, read_bytes
from splitveil.data.parts import Arrays, two_parts
from splitveil.data.source import Request
from splitveil.errors import DataError

URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
FOLDER = "fashion-mnist"
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


@dataclass(frozen=True, kw_only=True)
class Checksum:
    """MD5 of a file as the project serves it (.gz), and of the bytes inside."""

    packed: str
    unpacked: str


FILES = {
    "train-images-idx3-ubyte": Checksum(
        packed="8d4fb7e6c68d591d4c3dfef9ec88bf0d", unpacked="f4a8712d7a061bf5bd6d2ca38dc4d50a"
    ),
    "train-labels-idx1-ubyte": Checksum(
        packed="25c81989df183df01b3e8a0aad5dffbe", unpacked="9018921c3c673c538a1fc5bad174d6f9"
    ),
    "t10k-images-idx3-ubyte": Checksum(
        packed="bef4ecab320f06d8554ea6380940ec79", unpacked="8181f5470baa50b63fa0f6fddb340f0a"
    ),
    "t10k-labels-idx1-ubyte": Checksum(
        packed="bb300cfdad3c16e7a12a480ee83cd310", unpacked="15d484375f8d13e6eb1aabb0c3f46965"
    ),
}


def read(request: Request) -> Dataset:
    """Fashion-MNIST (70000, 1, 28, 28) from the first place that has all four files."""
    home = request.root / FOLDER
    for folder in (home, request.root, DEBIAN):
        if len(found := locate(folder)) == len(FILES):
            return assemble(found, FILES)
    found = locate(home)
    for name, checksum in FILES.items():
        if name not in found:
            packed = f"{name}.gz"
            fetch(URL + packed, home / packed, checksum.packed, request.progress)
    return assemble(locate(home), FILES)


def locate(folder: Path) -> dict[str, Path]:
    """Which of the four files lie in `folder`, plain or packed."""
    places = {name: (folder / name, folder / f"{name}.gz") for name in FILES}
    found = {name: [p for p in paths if p.is_file()] for name, paths in places.items()}
    return {name: paths[0] for name, paths in found.items() if paths}


def assemble(files: Mapping[str, Path], checksums: Mapping[str, Checksum]) -> Dataset:
    """Check the four files and join them into a dataset."""
    blobs = {name: read_bytes(path) for name, path in files.items()}
    train, test = pair(blobs, "train"), pair(blobs, "t10k")
    for name, path in files.items():
        got = hashlib.md5(blobs[name], usedforsecurity=False).hexdigest()
        if got != checksums[name].unpacked:
            raise DataError(
                f"{path} holds bytes of MD5 {got}, expected {checksums[name].unpacked}; it is not "
                "Fashion-MNIST (MNIST has the same file names): delete it and fetch it again"
            )
    return two_parts("fashion-mnist", train, test, CLASSES, crop_pad=2, flip=True)


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
