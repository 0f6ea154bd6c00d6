"""From arrays as a file holds them to a `Dataset` with a training and a test part."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from splitveil.data.dataset import Dataset, check
from splitveil.data.splits import stratified
from splitveil.errors import DataError
from splitveil.rng import stream

TEST_FRACTION = 0.2
# The division into pool and test is part of what the dataset is, so no seed of a run reaches it.
PART_SEED = 0

Arrays = tuple[np.ndarray, np.ndarray]


def one_part(name: str, data: Arrays, classes: tuple[str, ...], *, whole: bool = False) -> Dataset:
    """Divide images (n, c, h, w) and labels (n,): a stratified fifth becomes the test part.

    >>> toy = one_part("toy", (np.zeros((10, 1, 2, 2), np.uint8), np.arange(10) % 2), ("a", "b"))
    >>> toy.labels[toy.pool].bincount().tolist(), toy.labels[toy.test].bincount().tolist()
    ([4, 4], [1, 1])
    """
    images, labels = _tensors(data)
    check(images, labels, classes, name)
    test, pool = stratified(labels, TEST_FRACTION, stream(PART_SEED, "parts/test"))
    return Dataset(
        name=name, images=images, labels=labels, classes=classes, pool=pool, test=test, whole=whole
    )


def two_parts(
    name: str,
    train: Arrays,
    test: Arrays,
    classes: tuple[str, ...],
    *,
    ordered_test90: bool = False,
    crop_pad: int = 0,
    flip: bool = False,
    whole: bool = False,
) -> Dataset:
    """Join a training and a test part that came apart, in this order.

    >>> part = (np.zeros((4, 1, 2, 2), np.uint8), np.arange(4) % 2)
    >>> two_parts("toy", part, part, ("a", "b")).test.tolist()
    [4, 5, 6, 7]
    """
    if train[0].shape[1:] != test[0].shape[1:]:
        raise DataError(
            f"{name}: training images are {train[0].shape[1:]} but test images "
            f"{test[0].shape[1:]} (c, h, w); resize one of them"
        )
    return in_order(
        name,
        (np.concatenate([train[0], test[0]]), np.concatenate([train[1], test[1]])),
        len(train[0]),
        classes,
        ordered_test90=ordered_test90,
        crop_pad=crop_pad,
        flip=flip,
        whole=whole,
    )


def in_order(
    name: str,
    data: Arrays,
    first: int,
    classes: tuple[str, ...],
    *,
    ordered_test90: bool = False,
    crop_pad: int = 0,
    flip: bool = False,
    whole: bool = False,
) -> Dataset:
    """One array of which the first `first` images are the training part; nothing is copied."""
    images, labels = _tensors(data)
    return Dataset(
        name=name,
        images=images,
        labels=labels,
        classes=classes,
        pool=torch.arange(first),
        test=torch.arange(first, len(images)),
        ordered_test90=ordered_test90,
        crop_pad=crop_pad,
        flip=flip,
        whole=whole,
    )


@dataclass(frozen=True, kw_only=True)
class Counts:
    """How many classes a published dataset has, and how many images of each in both parts."""

    classes: int
    train: int
    test: int

    def check(self, data: Dataset, again: str) -> Dataset:
        """The dataset itself where it agrees; `again` says how to get the right files."""
        if data.num_classes != self.classes:
            raise DataError(
                f"{data.name} has {self.classes} classes, got {data.num_classes}; {again}"
            )
        for part, indices, expected in (
            ("training", data.pool, self.train),
            ("test", data.test, self.test),
        ):
            counts = data.labels[indices].bincount(minlength=self.classes).tolist()
            wrong = [(c, n) for c, n in zip(data.classes, counts, strict=True) if n != expected]
            if wrong:
                raise DataError(
                    f"{data.name} has {expected} {part} images of every class, "
                    f"got {wrong[0][1]} of '{wrong[0][0]}' ({len(wrong)} classes differ); {again}"
                )
        return data


def _tensors(data: Arrays) -> tuple[Tensor, Tensor]:
    """Tensors that own writable memory: torch warns about memory it must not write."""
    images, labels = data
    return (
        torch.from_numpy(np.require(images, requirements=["C", "W"])),
        torch.from_numpy(labels.astype(np.int64)),
    )
