"""`Dataset`: images and labels, their checks, and how arrays become a dataset."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Generator, Tensor

from splitveil.errors import DataError
from splitveil.io import Progress, silent
from splitveil.rng import stream
from splitveil.threat import Labelled

CHANNELS = (1, 3)  # what reports can draw and attacks can reconstruct
MIN_CLASSES = 2
# The defences shape the variance within a class; a single image has none.
MIN_PER_CLASS = 2
LEVELS = 255
MAX_DATA = 1 << 33  # bytes of a dataset in memory: 8 GiB
TOLD = 5  # classes that a message lists
TEST_FRACTION = 0.2
# The division into pool and test belongs to the dataset, so no seed of a run changes it.
PART_SEED = 0
Images = UInt8[Tensor, "n c h w"]
Labels = Int64[Tensor, " n"]
Indices = Int64[Tensor, " m"]
Arrays = tuple[np.ndarray, np.ndarray]  # images (n, c, h, w) uint8 and labels (n,)


@dataclass(frozen=True)
class Attributes:
    """Attributes by name, as integer codes: (n,) of the aux images, (m,) of the scored ones."""

    aux: Mapping[str, Tensor]
    scored: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """Images (n, c, h, w) uint8 and labels (n,) int64, checked when built.

    Args:
        name: The name that `load` was given.
        images: Bytes 0 to 255, grey (c = 1) or RGB (c = 3).
        labels: From 0 to the number of classes minus 1.
        classes: The name of each label.
        pool: Indices of the training part, from which train, val and held-out images are drawn.
        test: Indices of the test part. Like `pool` they stay on the CPU.
        ordered_test90: Whether the knowledge level test90 takes the first 90 % of test in file
            order and not a stratified draw.
        crop_pad: Pixels of padding for random crops; 0 if a crop could change the label.
        flip: Whether mirroring keeps the label.
        whole: Whether all images are used together and nothing is trained, so that the parts may
            be of any size.
        attributes: Facts about the images besides the label, as codes (n,) by name: secrets that an
            audit tries to guess. They stay on the CPU.

    >>> from splitveil.data import load
    >>> digits = load("digits")
    >>> len(digits), digits.image_shape, digits.num_classes
    (1797, (1, 8, 8), 10)
    """

    name: str
    images: Images
    labels: Labels
    classes: tuple[str, ...]
    pool: Indices
    test: Int64[Tensor, " k"]
    ordered_test90: bool = False
    crop_pad: int = 0
    flip: bool = False
    whole: bool = False
    attributes: Mapping[str, Labels] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_dataset(self.images, self.labels, self.classes, self.name)
        check_parts(len(self.labels), self.pool, self.test, self.name)
        if not self.whole:
            check_enough(self.labels.cpu(), self.classes, self.pool, self.test, self.name)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Shape (c, h, w) of each image."""
        _, c, h, w = self.images.shape
        return c, h, w

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.classes)

    def to(self, device: torch.device | str) -> "Dataset":
        """The same dataset with images and labels on `device`; the indices stay on the CPU."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def labelled(self, indices: Indices) -> Labelled:
        """The images at `indices` as floats in [0, 1] (m, c, h, w), with their labels (m,)."""
        where = indices.to(self.images.device)
        return Labelled(unit_floats(self.images[where]), self.labels[where])

    def own_attributes(
        self, aux: Int64[Tensor, " a"], scored: Int64[Tensor, " s"]
    ) -> Attributes | None:
        """The dataset's own attributes of aux and scored images; None if it has none."""
        if not self.attributes:
            return None
        both = ({k: v[rows.cpu()] for k, v in self.attributes.items()} for rows in (aux, scored))
        return Attributes(*both)


def unit_floats(images: UInt8[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Bytes to float32 in [0, 1].

    >>> unit_floats(torch.tensor([0, 51, 255], dtype=torch.uint8))
    tensor([0.0000, 0.2000, 1.0000])
    """
    return images.float() / LEVELS


def check_dataset(images: Tensor, labels: Tensor, classes: Sequence[str], name: str) -> None:
    """Raise DataError for images and labels that are not a dataset, saying what is wrong where.

    >>> pixels = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    >>> check_dataset(pixels, torch.tensor([0, 2]), ("a", "b"), "toy")
    Traceback (most recent call last):
    splitveil.errors.DataError: toy: label 2 at index 1 is out of range (1 such labels); allowed \
are 0..1, one for each class; number the classes from 0
    """
    if images.dtype != torch.uint8 or images.ndim != len("nchw"):
        raise DataError(
            f"{name}: images must be uint8 of shape (n, c, h, w), "
            f"got {images.dtype} {tuple(images.shape)}"
        )
    if images.shape[1] not in CHANNELS:
        raise DataError(
            f"{name}: images (n, c, h, w) must be grey (1 channel) or RGB (3), got "
            f"{images.shape[1]} channels in {tuple(images.shape)}; convert them, and decide what "
            "to do with depth or alpha"
        )
    if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
        raise DataError(
            f"{name}: labels must be int64, one for each of {len(images)} images, "
            f"got {labels.dtype} {tuple(labels.shape)}"
        )
    if images.numel() == 0:
        raise DataError(f"{name}: the dataset is empty, images have shape {tuple(images.shape)}")
    if len(classes) < MIN_CLASSES:
        raise DataError(
            f"{name}: at least {MIN_CLASSES} classes are needed, got {list(classes)}; "
            "add images of another class"
        )
    outside = (labels < 0) | (labels >= len(classes))
    if outside.any():
        first = int(outside.nonzero()[0])
        raise DataError(
            f"{name}: label {int(labels[first])} at index {first} is out of range "
            f"({int(outside.sum())} such labels); allowed are 0..{len(classes) - 1}, one for each "
            "class; number the classes from 0"
        )


def check_parts(images: int, pool: Tensor, test: Tensor, name: str) -> None:
    """Raise DataError if the parts overlap or contain indices that do not exist."""
    both = torch.cat([pool, test])
    if both.numel() and not 0 <= int(both.min()) <= int(both.max()) < images:
        raise DataError(
            f"{name}: pool and test must index {images} images, "
            f"got indices from {int(both.min())} to {int(both.max())}"
        )
    if repeated := int((both.bincount() - 1).clamp_min(0).sum()):
        raise DataError(f"{name}: pool and test share or repeat {repeated} indices")


def check_enough(
    labels: Labels, classes: Sequence[str], pool: Tensor, test: Tensor, name: str
) -> None:
    """Raise DataError if the parts are too small to train and test on."""
    if len(test) == 0:
        raise DataError(f"{name}: the test part is empty; add images to it")
    counts = labels[pool].bincount(minlength=len(classes)).tolist()
    few = {c: n for c, n in zip(classes, counts, strict=True) if n < MIN_PER_CLASS}
    if few:
        listed = [f"{n} of {c!r}" for c, n in islice(few.items(), TOLD)]
        listed += [f"and too few of {len(few) - TOLD} more classes"] * (len(few) > TOLD)
        raise DataError(
            f"{name}: every class needs at least {MIN_PER_CLASS} training images, "
            f"got {', '.join(listed)}; add images or remove the class"
        )


def to_uint8(x: np.ndarray, name: str) -> np.ndarray:
    """Pixel values as bytes, from uint8, other integers in 0..255, or floats in [0, 1].

    Floats are rounded to the nearest of the 256 levels k/255, an error of at most 1/510.

    >>> to_uint8(np.array([0.0, 0.2, 1.0]), "toy").tolist()
    [0, 51, 255]
    """
    if x.dtype == np.uint8 or x.size == 0:
        return x.astype(np.uint8, copy=False)
    if x.dtype.kind not in "fiu":
        raise DataError(f"{name}: images must be uint8 or floats in [0, 1], got {x.dtype}")
    missing = np.isnan(x)
    if missing.any():
        first = tuple(int(i) for i in np.argwhere(missing)[0])
        raise DataError(
            f"{name}: images contain {int(missing.sum())} NaN, the first at index {first}; "
            "replace them or remove those images"
        )
    # Floats up to 255 are refused and not rescaled: a guess would be wrong for dark images.
    low, high = x.min(), x.max()
    top = 1 if x.dtype.kind == "f" else LEVELS
    if low < 0 or high > top:
        hint = "divide by 255" if top == 1 else "store 8-bit levels"
        raise DataError(
            f"{name}: {x.dtype} images must lie in [0, {top}], got values from {low} to {high}; "
            f"{hint}"
        )
    return (np.rint(x * LEVELS) if top == 1 else x).astype(np.uint8)


def make_dataset(
    name: str,
    data: Arrays,
    classes: tuple[str, ...],
    *,
    first: int | None = None,
    ordered_test90: bool = False,
    crop_pad: int = 0,
    flip: bool = False,
    whole: bool = False,
    attributes: Mapping[str, np.ndarray] | None = None,
) -> Dataset:
    """A `Dataset` from arrays.

    Args:
        name: The name that `load` was given.
        data: Images (n, c, h, w) uint8 and integer labels (n,).
        classes: The name of each label.
        first: How many images, from the first on, are the training part; the others are the test
            part. None draws a stratified fifth of the images as the test part.
        ordered_test90: As in `Dataset`.
        crop_pad: As in `Dataset`.
        flip: As in `Dataset`.
        whole: As in `Dataset`.
        attributes: Codes (n,) by name, as in `Dataset`.

    Returns:
        The checked dataset. Images are copied only if torch could not write to their memory.

    >>> images, labels = np.zeros((10, 1, 2, 2), np.uint8), np.arange(10) % 2
    >>> toy = make_dataset("toy", (images, labels), ("a", "b"))
    >>> toy.labels[toy.pool].bincount().tolist(), toy.labels[toy.test].bincount().tolist()
    ([4, 4], [1, 1])
    """
    images = torch.from_numpy(np.require(data[0], requirements=["C", "W"]))
    labels = torch.from_numpy(data[1].astype(np.int64))
    if first is None:
        check_dataset(images, labels, classes, name)
        test, pool = stratified(labels, TEST_FRACTION, stream(PART_SEED, "parts/test"))
    else:
        pool, test = torch.arange(first), torch.arange(first, len(images))
    return Dataset(
        name=name,
        images=images,
        labels=labels,
        classes=classes,
        pool=pool,
        test=test,
        ordered_test90=ordered_test90,
        crop_pad=crop_pad,
        flip=flip,
        whole=whole,
        attributes={k: torch.from_numpy(v.astype(np.int64)) for k, v in (attributes or {}).items()},
    )


def join(name: str, train: Arrays, test: Arrays) -> Arrays:
    """Training and test part in one, the training part first."""
    if train[0].shape[1:] != test[0].shape[1:]:
        raise DataError(
            f"{name}: training images have shape {train[0].shape[1:]} but test images "
            f"{test[0].shape[1:]} (c, h, w); resize one of them"
        )
    return np.concatenate([train[0], test[0]]), np.concatenate([train[1], test[1]])


def stratified(
    labels: Int64[Tensor, " n"], fraction: float, generator: Generator
) -> tuple[Int64[Tensor, " t"], Int64[Tensor, " r"]]:
    """Divide positions so that every class gives the same share to `taken`.

    The exact shares are rounded by largest remainder (ties to the lower label). So they add up to
    round(fraction · n), and each is within 1 of its share. At least one image of every class stays
    in `rest`, even if `taken` then gets fewer.

    Args:
        labels: (n,).
        fraction: Share of `taken`, from 0 to 1.
        generator: Decides which images are taken.

    Returns:
        Sorted positions `taken` and `rest`.

    >>> taken, rest = stratified(torch.tensor([0, 1] * 10), 0.25, torch.Generator().manual_seed(0))
    >>> len(taken), len(rest), (taken % 2).bincount().tolist()
    (5, 15, [3, 2])
    """
    counts = labels.bincount()  # (C,)
    share = counts.double() * fraction
    take = share.floor().long()
    by_remainder = (share - take).argsort(descending=True, stable=True)
    take[by_remainder[: round(fraction * len(labels)) - int(take.sum())]] += 1
    take = torch.minimum(take, (counts - 1).clamp_min(0))

    shuffled = torch.randperm(len(labels), generator=generator)
    grouped = shuffled[labels[shuffled].argsort(stable=True)]  # (n,), class by class
    starts = counts.cumsum(0) - counts
    rank = torch.arange(len(labels)) - starts[labels[grouped]]  # place within its own class
    chosen = rank < take[labels[grouped]]
    return grouped[chosen].sort().values, grouped[~chosen].sort().values


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Number of classes of a published dataset, and images of each class in its two parts."""

    classes: int
    train: int
    test: int

    def check(
        self, name: str, labels: np.ndarray, first: int, classes: Sequence[str], again: str
    ) -> None:
        """Raise DataError if labels or class names are not those that were published.

        Args:
            name: The dataset, for the message.
            labels: (n,), those of the training part first.
            first: How many images the training part has.
            classes: Names of the classes.
            again: How to get the right files, for the message.
        """
        if not len(classes) == len(set(classes)) == self.classes:
            raise DataError(
                f"{name} has {self.classes} classes, got {len(classes)} names, "
                f"{len(set(classes))} of them different; {again}"
            )
        parts = (("training", labels[:first], self.train), ("test", labels[first:], self.test))
        for part, mine, expected in parts:
            # A label out of range also shows here: some class then lacks an image.
            counts = np.bincount(mine, minlength=self.classes)[: self.classes].tolist()
            wrong = [(c, n) for c, n in zip(classes, counts, strict=True) if n != expected]
            if wrong:
                raise DataError(
                    f"{name} has {expected} {part} images of every class, "
                    f"got {wrong[0][1]} of '{wrong[0][0]}' ({len(wrong)} classes differ); {again}"
                )


@dataclass(frozen=True, kw_only=True)
class ReadRequest:
    """What a reader is given.

    Args:
        root: The data folder, with archives.
        path: The user's own files, from `name:PATH`.
        progress: Called while files are downloaded or decoded.
        whole: As in `Dataset`.

    >>> ReadRequest(root=Path("/data")).path is None
    True
    """

    root: Path
    path: Path | None = None
    progress: Progress = silent
    whole: bool = False

    def existing_path(self) -> Path:
        """The path of the user's own files; raises DataError if nothing is there."""
        if self.path is None or not self.path.exists():
            raise DataError(f"there is no {self.path}; give an existing path after the colon")
        return self.path


@dataclass(frozen=True, kw_only=True)
class Source:
    """An entry of the catalogue.

    Args:
        summary: One line for `splitveil datasets`.
        read: Makes the dataset.
        needs_path: Whether it is named with a path, as in `folder:PATH`.
        attributes: Names of its attributes, as in `Dataset`.

    >>> from splitveil.data import DATASETS
    >>> [name for name, source in DATASETS.items() if source.needs_path]
    ['folder', 'npz']
    """

    summary: str
    read: Callable[[ReadRequest], Dataset]
    needs_path: bool = False
    attributes: tuple[str, ...] = ()


def check_memory(size: int, name: str) -> None:
    """Raise DataError for data that would take more than `MAX_DATA` bytes, before they do."""
    if size > MAX_DATA:
        raise DataError(
            f"{name} unpacks to {size / (1 << 30):.1f} GiB, more than the limit of "
            f"{MAX_DATA >> 30} GiB; store uint8 instead of floats, or smaller or fewer images"
        )


def fingerprint(dataset: Dataset) -> str:
    """The first 16 hex digits of the SHA-256 of the bytes of images and labels."""
    # A fixed byte order for labels, so that the hash is the same on every machine.
    digest = hashlib.sha256(dataset.images.cpu().numpy().tobytes())
    digest.update(dataset.labels.cpu().numpy().astype("<i8").tobytes())
    return digest.hexdigest()[:16]
