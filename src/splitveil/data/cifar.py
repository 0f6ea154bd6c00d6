"""CIFAR-10 and CIFAR-100 from their official binary archives or unpacked folders.

A record is a label byte and 3072 pixel bytes (red, green and blue planes of 32×32). CIFAR-100 has
two label bytes, coarse and fine. Dataset `cifar100` has the fine one as its label,
`cifar100-coarse` the coarse one, with the fine class as an attribute that a client should keep
secret. The files of CIFAR-10 are checked by SHA-256, taken of files with the published MD5. For
those of CIFAR-100 none is published, so their sizes and class counts are checked instead.
"""

from pathlib import Path

import numpy as np
from einops import rearrange

from splitveil.data.archive import Archive, Blobs
from splitveil.data.dataset import Arrays, Counts, Dataset, ReadRequest, make_dataset
from splitveil.errors import DataError

PIXELS = 3 * 32 * 32
TEST10, NAMES10 = "test_batch.bin", "batches.meta.txt"
CIFAR10 = Archive(
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    folder="cifar-10-batches-bin",
    files={
        "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        TEST10: "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    },
    optional=(NAMES10,),
    max_bytes=10_000 * (1 + PIXELS),
)
CLASSES10 = "airplane automobile bird cat deer dog frog horse ship truck"

TRAIN100, TEST100, NAMES100 = "train.bin", "test.bin", "fine_label_names.txt"
COARSE_NAMES100, FINE = "coarse_label_names.txt", "fine_class"
CIFAR100 = Archive(
    url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
    sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    folder="cifar-100-binary",
    files={TRAIN100: None, TEST100: None, NAMES100: None},
    # A train.bin in the data folder may be anything; only CIFAR-100 has this list of names.
    optional=(COARSE_NAMES100,),
    signs=(NAMES100,),
    max_bytes=50_000 * (2 + PIXELS),
)
COUNTS100 = Counts(classes=100, train=500, test=100)
COUNTS20 = Counts(classes=20, train=2500, test=500)


def read_cifar10(request: ReadRequest) -> Dataset:
    """CIFAR-10 (60000, 3, 32, 32) from the data folder, downloaded if it is absent.

    Class names come from `batches.meta.txt`. Without that file they are the well-known ones, since
    the checksums prove which data it is.
    """
    blobs, _ = CIFAR10.read(request)
    raw = b"".join(blobs[name] for name in CIFAR10.files)  # the test part is the last
    images, labels = read_records(raw, 1, "CIFAR-10")
    names = blobs[NAMES10].decode(errors="replace") if NAMES10 in blobs else CLASSES10
    return make_dataset(
        "cifar10",
        (images, labels),
        tuple(names.split()),
        first=len(images) - len(blobs[TEST10]) // (1 + PIXELS),
        ordered_test90=True,
        crop_pad=4,
        flip=True,
    )


def read_cifar100(request: ReadRequest) -> Dataset:
    """CIFAR-100 (60000, 3, 32, 32) from the data folder, downloaded if it is absent."""
    blobs, origin = CIFAR100.read(request)
    (images, fine), names, first = _fine(blobs, origin)
    return make_dataset(
        "cifar100", (images, fine), names, first=first, ordered_test90=True, crop_pad=4, flip=True
    )


def read_cifar100_coarse(request: ReadRequest) -> Dataset:
    """CIFAR-100 with its 20 coarse classes as the task, and the 100 fine ones as an attribute."""
    blobs, origin = CIFAR100.read(request)
    (images, fine), _, first = _fine(blobs, origin)
    if COARSE_NAMES100 not in blobs:
        raise DataError(f"{origin} lacks {COARSE_NAMES100}; {CIFAR100.again}")
    names = _names(blobs, COARSE_NAMES100, origin)
    raw = np.frombuffer(blobs[TRAIN100] + blobs[TEST100], np.uint8)
    coarse = raw.reshape(-1, 2 + PIXELS)[:, 0]
    again = f"{origin} is not the official one: {CIFAR100.again}"
    COUNTS20.check("cifar100-coarse", coarse, first, names, again)
    pairs = len(set(zip(fine.tolist(), coarse.tolist(), strict=True)))
    if pairs != COUNTS100.classes:
        raise DataError(
            f"in cifar100 each of {COUNTS100.classes} fine classes has one coarse class, but "
            f"{origin} has {pairs} pairs of them; {CIFAR100.again}"
        )
    return make_dataset(
        "cifar100-coarse",
        (images, coarse),
        names,
        first=first,
        ordered_test90=True,
        crop_pad=4,
        flip=True,
        attributes={FINE: fine},
    )


def _fine(blobs: Blobs, origin: Path) -> tuple[Arrays, tuple[str, ...], int]:
    """Images and checked fine labels, the names of the fine classes, size of the training part."""
    first = COUNTS100.train * COUNTS100.classes
    for name, n in ((TRAIN100, first), (TEST100, COUNTS100.test * COUNTS100.classes)):
        if len(blobs[name]) != n * (2 + PIXELS):
            raise CIFAR100.wrong(
                name, origin, f"{len(blobs[name])} bytes, expected {n * (2 + PIXELS)}"
            )
    names = _names(blobs, NAMES100, origin)
    images, labels = read_records(blobs[TRAIN100] + blobs[TEST100], 2, "CIFAR-100")
    again = f"{origin} is not the official one: {CIFAR100.again}"
    COUNTS100.check("cifar100", labels, first, names, again)
    return (images, labels), names, first


def _names(blobs: Blobs, file: str, origin: Path) -> tuple[str, ...]:
    try:
        return tuple(blobs[file].decode("ascii").split())
    except UnicodeDecodeError as err:
        raise DataError(
            f"{file} in {origin} is not a list of names: {err}; {CIFAR100.again}"
        ) from err


def read_records(raw: bytes, label_bytes: int, what: str) -> Arrays:
    """Images (n, 3, 32, 32) and labels (n,) of n records; the label is the last label byte.

    >>> images, labels = read_records(bytes([4, 7]) + bytes(3072), 2, "train.bin")
    >>> images.shape, labels.tolist()
    ((1, 3, 32, 32), [7])
    """
    size = label_bytes + PIXELS
    if len(raw) % size:
        raise DataError(f"{what} records have {size} bytes each, got {len(raw)} bytes in all")
    table = np.frombuffer(raw, np.uint8).reshape(-1, size)
    images = rearrange(table[:, label_bytes:], "n (c h w) -> n c h w", c=3, h=32)
    return images, table[:, label_bytes - 1]
