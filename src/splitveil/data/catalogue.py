"""Datasets by name.

A new dataset is one module with a reader and one line in `DATASETS`.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from splitveil.data import cifar, folder, mnist, npz, tiny_imagenet
from splitveil.data.dataset import Dataset, ReadRequest, Source
from splitveil.errors import ConfigError, DataError, unknown
from splitveil.io import Progress, silent

DATASETS: Mapping[str, Source] = {
    "digits": Source(
        summary="1797 handwritten digits, 1×8×8, 10 classes; ships with scikit-learn",
        read=mnist.read_digits,
    ),
    "fashion-small": Source(
        summary="7000 pieces of clothing, 1×28×28, 10 classes; ships with the package",
        read=mnist.read_fashion_small,
    ),
    "cifar10": Source(
        summary="60000 photographs, 3×32×32, 10 classes; official binary archive, 170 MB",
        read=cifar.read_cifar10,
    ),
    "cifar100": Source(
        summary="60000 photographs, 3×32×32, 100 classes; official binary archive, 169 MB",
        read=cifar.read_cifar100,
    ),
    "cifar100-coarse": Source(
        summary="the same photographs, 20 coarse classes; the fine class is a secret to guess",
        read=cifar.read_cifar100_coarse,
        attributes=(cifar.FINE,),
    ),
    "tiny-imagenet": Source(
        summary="110000 photographs, 3×64×64, 200 classes; official zip archive, 248 MB",
        read=tiny_imagenet.read,
    ),
    "fashion-mnist": Source(
        summary="70000 pieces of clothing, 1×28×28, 10 classes; IDX files, 30 MB",
        read=mnist.read_fashion,
    ),
    "folder": Source(
        summary="your images, PATH/<class>/<image>; PATH@64 makes squares of them",
        needs_path=True,
        read=folder.read,
    ),
    "npz": Source(
        summary="your arrays, a NumPy archive with x, y or x_train, y_train, x_test, y_test",
        needs_path=True,
        read=npz.read,
    ),
}


def data_root(data_dir: str | Path | None = None) -> Path:
    """The data folder: `data_dir`, else $SPLITVEIL_DATA, else ~/.cache/splitveil/data.

    >>> data_root("/data").as_posix()
    '/data'
    """
    given = data_dir or os.environ.get("SPLITVEIL_DATA") or "~/.cache/splitveil/data"
    root = Path(given).expanduser()
    if root.is_file():
        raise DataError(f"the data folder {root} is a file; give the folder that contains it")
    return root


def load(
    name: str,
    data_dir: str | Path | None = None,
    progress: Progress = silent,
    *,
    whole: bool = False,
) -> Dataset:
    """Read a dataset, downloading it if necessary.

    Args:
        name: A name of the catalogue, such as `cifar10`; or `folder:PATH`, `folder:PATH@SIDE` or
            `npz:PATH` for your own files.
        data_dir: Where archives lie and are downloaded to; see `data_root`.
        progress: Called while files are downloaded or decoded.
        whole: Whether all images are used together and nothing is trained; a few are then enough.

    Returns:
        The checked dataset, on the CPU.

    >>> load("digits").image_shape
    (1, 8, 8)
    """
    key, colon, path = name.partition(":")
    if key not in DATASETS:
        raise ConfigError(unknown("dataset", key, DATASETS))
    source = DATASETS[key]
    if source.needs_path and not path:
        raise ConfigError(f"dataset '{key}' needs a path; write {key}:PATH")
    if colon and not source.needs_path:
        raise ConfigError(f"dataset '{key}' takes no path, got '{name}'; write {key}")
    return source.read(
        ReadRequest(
            root=data_root(data_dir),
            path=Path(path).expanduser() if path else None,
            progress=progress,
            whole=whole,
        )
    )
