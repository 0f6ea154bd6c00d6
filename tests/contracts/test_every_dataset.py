"""What holds for every line of `DATASETS`; a new reader only adds its files to `FILES`."""

import hashlib
import io
import struct
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from data.made import cifar100_archive, coarse_archive, tiny_archive
from PIL import Image

from splitveil.data import cifar, mnist
from splitveil.data.catalogue import DATASETS
from splitveil.data.dataset import Dataset, ReadRequest
from splitveil.data.splits import KNOWLEDGE, aux_view, make_splits
from splitveil.io import silent
from splitveil.threat import check_images

RNG = np.random.default_rng(0)
LABELS = (np.arange(60) % 10).astype(np.uint8)


def noise(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def no_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    del monkeypatch
    return folder


def cifar_archive(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    blobs = {n: np.c_[LABELS, noise(60, 3072)].tobytes() for n in cifar.CIFAR10.files}
    sums = {name: sha256(raw) for name, raw in blobs.items()}
    monkeypatch.setattr(cifar, "CIFAR10", replace(cifar.CIFAR10, files=sums))
    with tarfile.open(folder / cifar.CIFAR10.name, "w:gz", compresslevel=1) as tar:
        for name, raw in blobs.items():
            info = tarfile.TarInfo(f"{cifar.CIFAR10.folder}/{name}")
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
    return folder


def idx_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    sums = {}
    for name in mnist.UNPACKED:
        array = noise(60, 28, 28) if "images" in name else LABELS
        shape = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
        raw = shape + array.tobytes()
        (folder / name).write_bytes(raw)
        sums[name] = sha256(raw)
    monkeypatch.setattr(mnist, "UNPACKED", sums)
    return folder


def image_folders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    del monkeypatch
    for i in range(30):
        path = folder / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(noise(6, 6, 3)).save(path)
    return folder


def npz_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    del monkeypatch
    np.savez(folder / "a.npz", x=noise(60, 6, 6, 3), y=LABELS)
    return folder / "a.npz"


FILES: dict[str, Callable[[Path, pytest.MonkeyPatch], Path]] = {
    "digits": no_files,
    "fashion-small": no_files,
    "cifar10": cifar_archive,
    "fashion-mnist": idx_files,
    "folder": image_folders,
    "npz": npz_file,
    "cifar100": cifar100_archive,
    "cifar100-coarse": coarse_archive,
    "tiny-imagenet": tiny_archive,
}


@pytest.fixture(params=sorted(DATASETS))
def request_of(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, ReadRequest]:
    """A name of the catalogue and a request its reader can answer."""
    name: str = request.param
    where = FILES[name](tmp_path, monkeypatch)
    if DATASETS[name].needs_path:
        return name, ReadRequest(root=tmp_path / "unused", path=where, progress=silent)
    return name, ReadRequest(root=where, path=None, progress=silent)


@pytest.fixture
def dataset(request_of: tuple[str, ReadRequest]) -> Dataset:
    name, asked = request_of
    return DATASETS[name].read(asked)


def test_it_is_named_as_it_is_loaded(request_of: tuple[str, ReadRequest]) -> None:
    name, asked = request_of
    read = DATASETS[name].read(asked)
    assert read.name == (f"{name}:{asked.path}" if asked.path else name)


def test_images_are_bytes_and_come_out_in_the_unit_interval(dataset: Dataset) -> None:
    assert dataset.images.dtype == torch.uint8
    some = dataset.labelled(dataset.test)
    check_images(some.images, "test")
    assert some.images.shape == (len(dataset.test), *dataset.image_shape)
    assert float(some.images.max()) > 0.9


def test_parts_are_disjoint_and_complete(dataset: Dataset) -> None:
    both = torch.cat([dataset.pool, dataset.test]).sort().values
    assert both.tolist() == list(range(len(dataset)))


def test_every_class_is_in_train_and_test(dataset: Dataset) -> None:
    splits = make_splits(dataset, held_out=0.2)
    for indices in (splits.train, splits.test):
        counts = dataset.labels[indices].bincount(minlength=dataset.num_classes)
        assert int(counts.min()) >= 1


def test_every_knowledge_level_has_a_view(dataset: Dataset) -> None:
    splits = make_splits(dataset, held_out=0.2)
    for level in KNOWLEDGE:
        view = aux_view(dataset, splits, level)
        assert not set(view.aux.tolist()) & set(view.scored.tolist())
        judged = splits.judged(level)
        assert set(view.scored.tolist()) <= set(judged.tolist())
        assert judged.tolist() == (splits.val if level == "val" else splits.test).tolist()


def test_reading_twice_gives_the_same_bytes_and_hashes(request_of: tuple[str, ReadRequest]) -> None:
    name, asked = request_of
    torch.manual_seed(0)
    one = DATASETS[name].read(asked)
    torch.manual_seed(1)
    other = DATASETS[name].read(asked)
    assert torch.equal(one.images, other.images)
    assert make_splits(one).hashes() == make_splits(other).hashes()


def test_this_table_covers_the_catalogue() -> None:
    assert FILES.keys() == DATASETS.keys()
