"""Datasets: a catalogue, readers of the canonical formats, disjoint splits, augmentation.

`load("digits")` or `load("folder:photos")` gives a `Dataset`; `make_splits` divides it. A new
dataset is one module with a `read(request)` and one line in `DATASETS`.
"""

from collections.abc import Mapping
from pathlib import Path

from splitveil.data import cifar, cifar100, digits, fashion, folder, npz, tiny_imagenet
from splitveil.data.augment import augment
from splitveil.data.dataset import Dataset, check, data_root, to_uint8
from splitveil.data.source import Request, Source
from splitveil.data.splits import (
    KNOWLEDGE,
    AuxView,
    Knowledge,
    Splits,
    aux_view,
    make_splits,
    stratified,
)
from splitveil.errors import ConfigError, unknown
from splitveil.types import Progress, silent

DATASETS: Mapping[str, Source] = {
    "digits": Source(
        summary="1797 handwritten digits, 1×8×8, 10 classes; ships with scikit-learn",
        needs_path=False,
        read=digits.read,
    ),
    "cifar10": Source(
        summary="60000 photographs, 3×32×32, 10 classes; official binary archive, 170 MB",
        needs_path=False,
        read=cifar.read,
    ),
    "cifar100": Source(
        summary="60000 photographs, 3×32×32, 100 classes; official binary archive, 169 MB",
        needs_path=False,
        read=cifar100.read,
    ),
    "tiny-imagenet": Source(
        summary="110000 photographs, 3×64×64, 200 classes; official zip archive, 248 MB",
        needs_path=False,
        read=tiny_imagenet.read,
    ),
    "fashion-mnist": Source(
        summary="70000 pieces of clothing, 1×28×28, 10 classes; IDX files, 30 MB",
        needs_path=False,
        read=fashion.read,
    ),
    "folder": Source(
        summary="your images, PATH/<class>/<image>, with or without train/ and test/",
        needs_path=True,
        read=folder.read,
    ),
    "npz": Source(
        summary="your arrays, a NumPy archive with x, y or x_train, y_train, x_test, y_test",
        needs_path=True,
        read=npz.read,
    ),
}

__all__ = [
    "DATASETS",
    "KNOWLEDGE",
    "AuxView",
    "Dataset",
    "Knowledge",
    "Request",
    "Source",
    "Splits",
    "augment",
    "aux_view",
    "check",
    "data_root",
    "load",
    "make_splits",
    "stratified",
    "to_uint8",
]


def load(
    name: str,
    data_dir: str | Path | None = None,
    progress: Progress = silent,
    *,
    whole: bool = False,
) -> Dataset:
    """The dataset `name`, or `name:PATH` for those that read your own files.

    `whole`: all images are used together, so that few are enough.

    >>> load("digits").image_shape
    (1, 8, 8)
    """
    key, colon, path = name.partition(":")
    if key not in DATASETS:
        raise ConfigError(unknown("dataset", key, DATASETS))
    source = DATASETS[key]
    if source.needs_path and not path:
        raise ConfigError(f"dataset '{key}' needs a path: write {key}:PATH")
    if colon and not source.needs_path:
        raise ConfigError(f"dataset '{key}' takes no path, got '{name}'; write {key}")
    return source.read(
        Request(
            root=data_root(data_dir),
            path=Path(path).expanduser() if path else None,
            progress=progress,
            whole=whole,
        )
    )
