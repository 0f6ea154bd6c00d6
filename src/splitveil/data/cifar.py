"""CIFAR-10 from its official binary archive, its unpacked folder, or the network.

A `.bin` file is 10,000 records of one label byte and 3072 pixel bytes (red, green, blue planes of
32×32). Each is checked by its MD5; the archive around them is not, for it may be packed anew.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from splitveil.data.dataset import Dataset
from splitveil.data.download import fetch
from splitveil.data.parts import two_parts
from splitveil.data.records import PIXELS, from_archive, from_folder, records
from splitveil.data.source import Request
from splitveil.errors import DataError

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
ARCHIVE = "cifar-10-binary.tar.gz"
ARCHIVE_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
FOLDER = "cifar-10-batches-bin"
NAMES = "batches.meta.txt"
TEST = "test_batch.bin"
MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    TEST: "803d5f7f4d78ea53de84dbe85f74fb6d",
}
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MAX_BYTES = 10_000 * (1 + PIXELS)


def read(request: Request) -> Dataset:
    """CIFAR-10 from the data folder; downloaded into it where it is absent."""
    root = request.root
    for folder in (root / FOLDER, root):
        if any((folder / name).exists() for name in MD5):
            return assemble(from_folder(folder, (*MD5, NAMES)), MD5, folder)
    archive = root / ARCHIVE
    if not archive.exists():
        fetch(URL, archive, ARCHIVE_MD5, request.progress)
    return assemble(from_archive(archive, FOLDER, (*MD5, NAMES), MAX_BYTES), MD5, archive)


def assemble(blobs: Mapping[str, bytes], md5: Mapping[str, str], origin: Path) -> Dataset:
    """Check the `.bin` files against `md5` and join them: five to train on, one to test.

    Class names come from `batches.meta.txt`, or are the well-known ones where that is absent: the
    checksums leave no doubt which data it is.
    """
    missing = [name for name in md5 if name not in blobs]
    if missing:
        raise DataError(f"{origin} lacks {', '.join(missing)}; fetch the archive again from {URL}")
    for name, expected in md5.items():
        got = hashlib.md5(blobs[name], usedforsecurity=False).hexdigest()
        if got != expected:
            culprit = origin / name if origin.is_dir() else origin
            raise DataError(
                f"{name} in {origin} has MD5 {got}, expected {expected}; "
                f"delete {culprit} and fetch it again from {URL}"
            )
    train = b"".join(blobs[name] for name in md5 if name != TEST)
    names = tuple(blobs[NAMES].decode(errors="replace").split()) if NAMES in blobs else CLASSES
    return two_parts(
        "cifar10",
        records(train, 1, "CIFAR-10"),
        records(blobs[TEST], 1, "CIFAR-10"),
        names,
        ordered_test90=True,
        crop_pad=4,
        flip=True,
    )
