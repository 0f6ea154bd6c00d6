"""CIFAR-100 from its official binary archive, its unpacked folder, or the network.

A record is a coarse and a fine label byte and 3072 pixel bytes; the fine labels are taken. A
download is checked by the MD5 its publisher gives for the archive. None is published for the files
inside, so those are checked by their size and by how often each class occurs.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from splitveil.data.dataset import Dataset
from splitveil.data.download import fetch
from splitveil.data.parts import Counts, two_parts
from splitveil.data.records import PIXELS, from_archive, from_folder, records
from splitveil.data.source import Request
from splitveil.errors import DataError

URL = "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz"
ARCHIVE = "cifar-100-binary.tar.gz"
ARCHIVE_MD5 = "03b5dce01913d631647c71ecec9e9cb8"
FOLDER = "cifar-100-binary"
TRAIN, TEST, NAMES = "train.bin", "test.bin", "fine_label_names.txt"
FILES = (TRAIN, TEST, NAMES)
COUNTS = Counts(classes=100, train=500, test=100)
LABEL_BYTES = 2
MAX_BYTES = 50_000 * (LABEL_BYTES + PIXELS)


def read(request: Request) -> Dataset:
    """CIFAR-100 from the data folder; downloaded into it where it is absent."""
    root = request.root
    # In the data folder itself a train.bin may be anything; the list of names is CIFAR-100's alone.
    for folder, signs in ((root / FOLDER, FILES), (root, (NAMES,))):
        if any((folder / name).exists() for name in signs):
            return assemble(from_folder(folder, FILES), COUNTS, folder)
    archive = root / ARCHIVE
    if not archive.exists():
        fetch(URL, archive, ARCHIVE_MD5, request.progress)
    return assemble(from_archive(archive, FOLDER, FILES, MAX_BYTES), COUNTS, archive)


def assemble(blobs: Mapping[str, bytes], counts: Counts, origin: Path) -> Dataset:
    """Join the training and the test file, with the names of the fine labels."""
    missing = [name for name in FILES if name not in blobs]
    if missing:
        raise DataError(f"{origin} lacks {', '.join(missing)}; fetch the archive again from {URL}")
    sizes = {TRAIN: counts.train * counts.classes, TEST: counts.test * counts.classes}
    for name, n in sizes.items():
        expected = n * (LABEL_BYTES + PIXELS)
        if len(blobs[name]) != expected:
            culprit = origin / name if origin.is_dir() else origin
            raise DataError(
                f"{name} in {origin} has {len(blobs[name])} bytes, expected {expected}; "
                f"delete {culprit} and fetch it again from {URL}"
            )
    try:
        names = tuple(blobs[NAMES].decode("ascii").split())
    except UnicodeDecodeError as err:
        raise DataError(f"{NAMES} in {origin} is no list of names: {err}; fetch it again") from err
    if len(set(names)) != counts.classes or len(names) != counts.classes:
        raise DataError(
            f"{NAMES} in {origin} must give {counts.classes} different names, got {len(names)}, "
            f"{len(set(names))} of them different; fetch the archive again from {URL}"
        )
    train, test = (records(blobs[name], LABEL_BYTES, "CIFAR-100") for name in (TRAIN, TEST))
    for name, (_, labels) in ((TRAIN, train), (TEST, test)):
        outside = np.flatnonzero(labels >= counts.classes)
        if len(outside):
            raise DataError(
                f"{name} in {origin} has label {labels[outside[0]]} in record {outside[0]} "
                f"({len(outside)} such records); allowed 0..{counts.classes - 1}; "
                f"fetch the archive again from {URL}"
            )
    data = two_parts(
        "cifar100",
        train,
        test,
        names,
        ordered_test90=True,
        crop_pad=4,
        flip=True,
    )
    return counts.check(data, f"{origin} is not the official one: fetch it again from {URL}")
