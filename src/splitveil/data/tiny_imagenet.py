"""Tiny ImageNet from the official tiny-imagenet-200.zip or its unpacked folder.

The images of val/ are the test part; those of test/ have no labels and are ignored. Classes are in
the order of wnids.txt and named by their first word in words.txt. The few grey images become RGB
with three equal channels. The images of an archive are decoded once and stored next to it; those of
a folder are decoded each time.

A download is checked by the SHA-256 of the archive, on which many public readers agree. An archive
or folder that the user put there is checked by its sizes and class counts.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np

from splitveil.data.archive import UNREADABLE, Archive, damage_explained, file_sha256
from splitveil.data.dataset import Counts, Dataset, ReadRequest, make_dataset
from splitveil.data.folder import REPORT_EVERY, decode, describe
from splitveil.errors import DataError
from splitveil.io import Progress, opened, replacing

WNIDS, WORDS, ANNOTATIONS = "wnids.txt", "words.txt", "val/val_annotations.txt"

TINY = Archive(
    url="http://cs231n.stanford.edu/tiny-imagenet-200.zip",
    sha256="6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
    folder="tiny-imagenet-200",
    files={WNIDS: None},
    max_bytes=1 << 24,  # words.txt has 2.6 MB, an image a few kB
)

DECODED = "tiny-imagenet-200.decoded.npz"
SOURCE = "source_sha256"  # key in that file: SHA-256 of the archive it was made from
COUNTS = Counts(classes=200, train=500, test=50)
SIDE = 64
TRAIN_IMAGE = re.compile(r"train/(n\d{8})/images/[^/\\]+\.JPEG")
VAL_IMAGE = re.compile(r"val/images/([^/\\]+\.JPEG)")

Arrays = dict[str, np.ndarray]
LabelledFiles = list[tuple[str, int]]


@dataclass(frozen=True, kw_only=True)
class Tree:
    """Files of the dataset by their names below tiny-imagenet-200/, in a folder or an archive."""

    origin: Path
    names: frozenset[str]
    read: Callable[[str], bytes]

    def lines(self, name: str) -> list[str]:
        """The lines of a text file, without empty ones."""
        if name not in self.names:
            raise DataError(f"{self.origin} lacks {TINY.folder}/{name}; {TINY.again}")
        try:
            text = self.read(name).decode()
        except UnicodeDecodeError as err:
            raise DataError(f"{name} in {self.origin} is not text: {err}; {TINY.again}") from err
        return [line for line in text.splitlines() if line.strip()]


def read(request: ReadRequest) -> Dataset:
    """Tiny ImageNet (110000, 3, 64, 64) from the data folder, downloaded if it is absent."""
    origin = TINY.find(request)
    if origin.is_dir():
        return assemble(decode_all(in_folder(origin), request.progress), origin)
    # Decoding 110,000 JPEGs is slow; reading the stored arrays is not.
    target, sha256 = request.root / DECODED, file_sha256(origin)
    arrays = stored(target, sha256)
    if arrays is not None:
        return assemble(arrays, origin)
    with in_archive(origin) as tree:
        arrays = decode_all(tree, request.progress)
    data = assemble(arrays, origin)  # checked before anything is stored
    store(target, arrays, sha256)
    return data


def stored(target: Path, sha256: str) -> Arrays | None:
    """The arrays in `target`; None if it is absent or was made from another archive."""
    if not target.exists():
        return None
    try:
        with opened(target) as stream, np.load(stream, allow_pickle=False) as archive:
            if SOURCE not in archive or str(archive[SOURCE]) != sha256:
                return None
            return {key: archive[key] for key in archive.files if key != SOURCE}
    except (*UNREADABLE, KeyError) as err:
        raise DataError(
            f"{target}, the store of decoded images, is damaged ({err}); delete it, and it will "
            "be made again"
        ) from err


def store(target: Path, arrays: Arrays, sha256: str) -> None:
    """Write the arrays to `target`, or nothing if the folder is read-only or the disk is full."""
    contents: dict[str, Any] = {SOURCE: np.array(sha256), **arrays}
    with suppress(OSError), replacing(target) as file:
        np.savez(file, **contents)


def in_folder(folder: Path) -> Tree:
    """The files of an unpacked folder."""
    patterns = ("*.txt", "val/*.txt", "val/images/*.JPEG", "train/*/images/*.JPEG")
    found = (path for pattern in patterns for path in folder.glob(pattern) if path.is_file())

    def read_file(name: str) -> bytes:
        try:
            return (folder / name).read_bytes()
        except OSError as err:
            raise DataError(f"cannot read {folder / name}: {err}") from err

    names = frozenset(path.relative_to(folder).as_posix() for path in found)
    return Tree(origin=folder, names=names, read=read_file)


@contextmanager
def in_archive(archive: Path) -> Iterator[Tree]:
    """The members of an archive below tiny-imagenet-200/, read in memory."""
    with damage_explained(archive, "zip archive", TINY.again):
        unpacked = ZipFile(archive)
    with unpacked as zipped:

        def read_member(name: str) -> bytes:
            member = zipped.getinfo(f"{TINY.folder}/{name}")
            if member.file_size > TINY.max_bytes:  # a zip bomb would fill the memory
                raise DataError(
                    f"{name} in {archive} has {member.file_size} bytes, more than any of the "
                    f"official ones; delete the archive and {TINY.again}"
                )
            with damage_explained(archive, f"zip archive (at {name})", TINY.again):
                return zipped.read(member)

        prefix = f"{TINY.folder}/"
        names = frozenset(n.removeprefix(prefix) for n in zipped.namelist() if n.startswith(prefix))
        yield Tree(origin=archive, names=names, read=read_member)


def decode_all(tree: Tree, progress: Progress) -> dict[str, np.ndarray]:
    """Images (n, 3, 64, 64), labels (n,), class names, and the size of the training part."""
    wnids = [line.strip() for line in tree.lines(WNIDS)]
    if repeated := [w for w, n in Counter(wnids).items() if n > 1]:
        raise DataError(f"{WNIDS} in {tree.origin} names {repeated[0]} twice; {TINY.again}")
    labels = {wnid: label for label, wnid in enumerate(wnids)}
    train, val = train_files(tree, labels), val_files(tree, labels)
    files = train + val
    if not files:
        raise DataError(f"{tree.origin} has no images; {TINY.again}")
    images = np.empty((len(files), 3, SIDE, SIDE), np.uint8)
    for i, (name, _) in enumerate(files):
        images[i] = read_image(tree, name)
        if i % REPORT_EVERY == 0 or i + 1 == len(files):
            progress(i + 1, len(files), "reading images")
    return {
        "images": images,
        "labels": np.array([label for _, label in files]),
        "classes": np.array(class_names(tree, wnids)),
        "first": np.array(len(train)),
    }


def train_files(tree: Tree, labels: dict[str, int]) -> LabelledFiles:
    """The training images, class by class."""
    matches = [match for name in sorted(tree.names) if (match := TRAIN_IMAGE.fullmatch(name))]
    if strangers := sorted({match[1] for match in matches} - labels.keys()):
        raise DataError(
            f"{tree.origin} has training images of {strangers[0]}, which {WNIDS} does not name "
            f"({len(strangers)} such classes); {TINY.again}"
        )
    return sorted(((m[0], labels[m[1]]) for m in matches), key=lambda file: file[1])


def val_files(tree: Tree, labels: dict[str, int]) -> LabelledFiles:
    """The images of val/ in the order of their annotations."""
    files: LabelledFiles = []
    for number, line in enumerate(tree.lines(ANNOTATIONS), start=1):
        image, _, rest = line.partition("\t")
        name, wnid = f"val/images/{image}", rest.partition("\t")[0].strip()
        where = f"line {number} of {ANNOTATIONS} in {tree.origin}"
        if wnid not in labels:
            raise DataError(f"{where} has the class '{wnid}', which {WNIDS} lacks; {TINY.again}")
        if name not in tree.names or not VAL_IMAGE.fullmatch(name):
            raise DataError(f"{where} names '{image}', which is not in val/images; {TINY.again}")
        files.append((name, labels[wnid]))
    counts = Counter(name for name, _ in files)
    if repeated := [name for name, n in counts.items() if n > 1]:
        raise DataError(f"{ANNOTATIONS} in {tree.origin} names {repeated[0]} twice; {TINY.again}")
    if bare := sorted(n for n in tree.names if VAL_IMAGE.fullmatch(n) and n not in counts):
        raise DataError(
            f"{bare[0]} in {tree.origin} has no line in {ANNOTATIONS} ({len(bare)} such images); "
            f"{TINY.again}"
        )
    return files


def read_image(tree: Tree, name: str) -> np.ndarray:
    """Pixels (3, 64, 64), or (1, 64, 64) of a grey image."""
    pixels = decode(BytesIO(tree.read(name)), f"{name} in {tree.origin}", TINY.again)
    if pixels.shape[1:] != (SIDE, SIDE):
        raise DataError(
            f"{name} in {tree.origin} is {describe(pixels)}; Tiny ImageNet's images are "
            f"{SIDE}×{SIDE}: {TINY.again}"
        )
    return pixels


def class_names(tree: Tree, wnids: list[str]) -> list[str]:
    """The first word of each class; if two classes share it, their ids follow in brackets.

    words.txt has lines such as "n01443537<tab>goldfish, Carassius auratus".
    """
    entries = (line.partition("\t") for line in tree.lines(WORDS))
    words = {wnid.strip(): text.partition(",")[0].strip() for wnid, _, text in entries}
    if nameless := [wnid for wnid in wnids if not words.get(wnid)]:
        raise DataError(
            f"{WORDS} in {tree.origin} has no name for {nameless[0]} ({len(nameless)} such "
            f"classes); {TINY.again}"
        )
    often = Counter(words[wnid] for wnid in wnids)
    return [words[w] if often[words[w]] == 1 else f"{words[w]} ({w})" for w in wnids]


def assemble(arrays: Arrays, origin: Path) -> Dataset:
    """The dataset of decoded images, checked by the official counts."""
    images, labels, first = arrays["images"], arrays["labels"], int(arrays["first"])
    classes = tuple(str(c) for c in arrays["classes"])
    again = f"{origin} is not the official one: {TINY.again}"
    COUNTS.check("tiny-imagenet", labels, first, classes, again)
    return make_dataset(
        "tiny-imagenet", (images, labels), classes, first=first, crop_pad=8, flip=True
    )
