"""`Dataset`: images as bytes, their labels, and which of them belong to which official part."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from splitveil.errors import DataError
from splitveil.types import Labelled

CHANNELS = (1, 3)  # what reports can draw and attacks are made for
MIN_CLASSES = 2
# The defences shape the variance within a class, and one image alone has none.
MIN_PER_CLASS = 2
LEVELS = 255
TOLD = 5  # classes that a message names

Images = UInt8[Tensor, "n c h w"]
Labels = Int64[Tensor, " n"]
Indices = Int64[Tensor, " m"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """Images (n, c, h, w) uint8 and labels (n,) int64, checked when built.

    `pool` indexes the official training part, from which train, val and held-out are drawn, and
    `test` the test part; both stay on the CPU. `ordered_test90` takes the first 90 % of test in
    file order for the knowledge level test90 instead of a stratified draw. `crop_pad` and `flip`
    are the augmentations that keep a label. `whole`: all images are used together and nothing is
    trained, so the parts may be as small as they like.
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

    def __post_init__(self) -> None:
        check(self.images, self.labels, self.classes, self.name)
        check_parts(len(self.labels), self.pool, self.test, self.name)
        if not self.whole:
            check_enough(self.labels.cpu(), self.classes, self.pool, self.test, self.name)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(c, h, w) of every image."""
        _, c, h, w = self.images.shape
        return c, h, w

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.classes)

    def to(self, device: torch.device | str) -> "Dataset":
        """The same dataset with images and labels on `device`; the index sets stay on the CPU."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def labelled(self, indices: Indices) -> Labelled:
        """The images `indices` as floats in [0, 1] (m, c, h, w) with their labels (m,)."""
        where = indices.to(self.images.device)
        return Labelled(unit_floats(self.images[where]), self.labels[where])


def unit_floats(images: UInt8[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Bytes to float32 in [0, 1].

    >>> unit_floats(torch.tensor([0, 51, 255], dtype=torch.uint8))
    tensor([0.0000, 0.2000, 1.0000])
    """
    return images.float() / LEVELS


def check(images: Tensor, labels: Tensor, classes: Sequence[str], name: str) -> None:
    """Refuse images and labels that are no dataset; the message names what and where.

    >>> pixels = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    >>> check(pixels, torch.tensor([0, 2]), ("a", "b"), "toy")
    Traceback (most recent call last):
    splitveil.errors.DataError: toy: label 2 at index 1 is out of range (1 in all); allowed 0..1, \
one for each class; number the classes from 0
    """
    if images.dtype != torch.uint8 or images.ndim != len("nchw"):
        raise DataError(
            f"{name}: images must be uint8 of shape (n, c, h, w), "
            f"got {images.dtype} {tuple(images.shape)}"
        )
    if images.shape[1] not in CHANNELS:
        raise DataError(
            f"{name}: images (n, c, h, w) must be grey (1 channel) or RGB (3), got "
            f"{images.shape[1]} channels in {tuple(images.shape)}; convert them, saying what "
            "becomes of depth or alpha"
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
            f"({int(outside.sum())} in all); allowed 0..{len(classes) - 1}, one for each class; "
            "number the classes from 0"
        )


def check_parts(images: int, pool: Tensor, test: Tensor, name: str) -> None:
    """Refuse parts that overlap or point outside."""
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
    """Refuse parts that nothing can be trained and tested on."""
    if len(test) == 0:
        raise DataError(f"{name}: the test part is empty; add images to it")
    counts = labels[pool].bincount(minlength=len(classes)).tolist()
    few = {c: n for c, n in zip(classes, counts, strict=True) if n < MIN_PER_CLASS}
    if few:
        told = [f"{n} of {c!r}" for c, n in islice(few.items(), TOLD)]
        told += [f"and too few of {len(few) - TOLD} more classes"] * (len(few) > TOLD)
        raise DataError(
            f"{name}: every class needs at least {MIN_PER_CLASS} training images, "
            f"got {', '.join(told)}; add images or drop the class"
        )


def to_uint8(x: np.ndarray, name: str) -> np.ndarray:
    """Pixel values as bytes: uint8 as is, integers in 0..255, floats in [0, 1].

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
            f"{name}: images hold {int(missing.sum())} NaN, the first at index {first}; "
            "replace them or drop those images"
        )
    low, high = x.min(), x.max()
    top = 1 if x.dtype.kind == "f" else LEVELS
    if low < 0 or high > top:
        hint = "divide by 255" if top == 1 else "store 8-bit levels"
        raise DataError(
            f"{name}: {x.dtype} images must lie in [0, {top}], got values from {low} to {high}; "
            f"{hint}"
        )
    return (np.rint(x * LEVELS) if top == 1 else x).astype(np.uint8)


def data_root(data_dir: str | Path | None = None) -> Path:
    """Where datasets lie: `data_dir`, else $SPLITVEIL_DATA, else ~/.cache/splitveil/data.

    >>> data_root("/data").as_posix()
    '/data'
    """
    given = data_dir or os.environ.get("SPLITVEIL_DATA") or "~/.cache/splitveil/data"
    root = Path(given).expanduser()
    if root.is_file():
        raise DataError(f"the data folder {root} is a file; give the folder that holds it")
    return root
