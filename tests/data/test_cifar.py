import hashlib
import io
import runpy
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from splitveil.data import cifar
from splitveil.data.archive import Archive
from splitveil.data.catalogue import load
from splitveil.data.cifar import CIFAR10, NAMES10, read_records
from splitveil.data.dataset import Dataset, ReadRequest
from splitveil.errors import DataError

Blobs = dict[str, bytes]
REPOSITORY = Path(__file__).parents[2]
BUILDER = REPOSITORY.parent / "shared" / "data" / "cifar10.py"
CACHE = Path("~/.cache/splitveil-test").expanduser()


@pytest.fixture
def blobs() -> Blobs:
    """Six small batches of 20 random records, two of each class, and the names."""
    rng = np.random.default_rng(0)
    made: Blobs = {}
    for name in CIFAR10.files:
        table = rng.integers(0, 256, (20, 3073), dtype=np.uint8)
        table[:, 0] = np.arange(20) % 10
        made[name] = table.tobytes()
    made[NAMES10] = "\n".join(f"class{i}" for i in range(10)).encode() + b"\n\n"
    return made


@pytest.fixture
def official(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> Archive:
    """The archive whose checksums are those of the small batches."""
    sums = {n: hashlib.sha256(blobs[n]).hexdigest() for n in CIFAR10.files}
    archive = replace(CIFAR10, files=sums)
    monkeypatch.setattr(cifar, "CIFAR10", archive)
    return archive


def pack(blobs: Blobs, target: Path, prefix: str = "cifar-10-batches-bin/") -> Path:
    with tarfile.open(target, "w:gz") as tar:
        for name, raw in blobs.items():
            info = tarfile.TarInfo(prefix + name)
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
    return target


def unpack(blobs: Blobs, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name, raw in blobs.items():
        (folder / name).write_bytes(raw)
    return folder


def same(one: Dataset, other: Dataset) -> bool:
    return torch.equal(one.images, other.images) and torch.equal(one.labels, other.labels)


@pytest.mark.usefixtures("official")
def test_bytes_survive_the_archive(blobs: Blobs, tmp_path: Path) -> None:
    pack(blobs, tmp_path / CIFAR10.name)
    data = load("cifar10", tmp_path)
    assert data.image_shape == (3, 32, 32)
    table = torch.cat([data.labels[:, None].to(torch.uint8), data.images.flatten(1)], dim=1)
    assert table.numpy().tobytes() == b"".join(blobs[n] for n in CIFAR10.files)
    assert data.pool.tolist() == list(range(100))
    assert data.test.tolist() == list(range(100, 120))
    assert data.classes == tuple(f"class{i}" for i in range(10))
    assert (data.crop_pad, data.flip, data.ordered_test90) == (4, True, True)


@pytest.mark.usefixtures("official")
def test_the_three_places_give_the_same(blobs: Blobs, tmp_path: Path) -> None:
    packed, parent = tmp_path / "packed", tmp_path / "parent"
    packed.mkdir()
    parent.mkdir()
    pack(blobs, packed / "cifar-10-binary.tar.gz")
    inside = unpack(blobs, parent / "cifar-10-batches-bin")
    first, *others = (cifar.read_cifar10(ReadRequest(root=r)) for r in (packed, parent, inside))
    assert all(same(first, other) for other in others)


@pytest.mark.usefixtures("official")
def test_names_are_the_known_ones_without_the_file(blobs: Blobs, tmp_path: Path) -> None:
    del blobs[NAMES10]
    data = load("cifar10", unpack(blobs, tmp_path))
    assert data.classes[:2] == ("airplane", "automobile")


@pytest.mark.usefixtures("official")
def test_one_wrong_byte_is_found(blobs: Blobs, tmp_path: Path) -> None:
    raw = bytearray(blobs["data_batch_3.bin"])
    raw[5000] ^= 1
    blobs["data_batch_3.bin"] = bytes(raw)
    with pytest.raises(
        DataError, match=r"data_batch_3\.bin in .* has SHA-256 .*; delete .* and fetch it again"
    ):
        load("cifar10", unpack(blobs, tmp_path))


def test_the_official_checksums_refuse_other_data(blobs: Blobs, tmp_path: Path) -> None:
    pack(blobs, tmp_path / "cifar-10-binary.tar.gz")
    with pytest.raises(DataError, match=f"expected {CIFAR10.files['data_batch_1.bin']}"):
        load("cifar10", tmp_path)


def test_a_missing_batch_is_named(blobs: Blobs, tmp_path: Path) -> None:
    del blobs["test_batch.bin"]
    unpack(blobs, tmp_path)
    with pytest.raises(DataError, match=r"lacks test_batch\.bin"):
        load("cifar10", tmp_path)


def test_members_under_other_names_are_not_read(blobs: Blobs, tmp_path: Path) -> None:
    path = pack(blobs, tmp_path / CIFAR10.name, prefix="../cifar-10-batches-bin/")
    with pytest.raises(DataError, match=f"lacks {', '.join(CIFAR10.files)}; fetch"):
        load("cifar10", tmp_path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_leading_dot_is_passed_over(blobs: Blobs, official: Archive, tmp_path: Path) -> None:
    path = pack(blobs, tmp_path / CIFAR10.name, prefix="./cifar-10-batches-bin/")
    assert official.read(ReadRequest(root=tmp_path)) == (blobs, path)


def test_a_member_that_is_too_large_is_refused_unread(tmp_path: Path) -> None:
    large = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
    large.size = CIFAR10.max_bytes + 1
    with tarfile.open(tmp_path / CIFAR10.name, "w:gz", compresslevel=1) as tar:
        tar.addfile(large, io.BytesIO(bytes(large.size)))
    with pytest.raises(DataError, match=r"data_batch_1\.bin in .* has 30730001 bytes"):
        load("cifar10", tmp_path)


def test_links_are_not_read(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / CIFAR10.name, "w:gz") as tar:
        link = tarfile.TarInfo("cifar-10-batches-bin/test_batch.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        tar.addfile(link)
    with pytest.raises(DataError, match=r"lacks .*test_batch\.bin"):
        load("cifar10", tmp_path)


@pytest.mark.parametrize("keep", [0, 10, 1000, 200_000])
def test_a_truncated_archive_says_so(blobs: Blobs, tmp_path: Path, keep: int) -> None:
    path = pack(blobs, tmp_path / "cifar-10-binary.tar.gz")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match="truncated or not a gzipped tar archive"):
        load("cifar10", tmp_path)


def test_records_must_be_whole() -> None:
    with pytest.raises(DataError, match="3073 bytes each, got 3000 bytes in all"):
        read_records(bytes(3000), 1, "CIFAR-10")


def test_without_network_the_place_for_the_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = replace(CIFAR10, url=f"http://127.0.0.1:1/{CIFAR10.name}")
    monkeypatch.setattr(cifar, "CIFAR10", nowhere)
    with pytest.raises(DataError, match=f"put it at {tmp_path}/cifar-10-binary.tar.gz"):
        load("cifar10", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(not BUILDER.exists(), reason=f"{BUILDER} is absent")
def test_real_cifar10_has_the_known_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    target = CACHE / "cifar-10-binary.tar.gz"
    if not target.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(".part")
        monkeypatch.setattr(sys, "argv", [str(BUILDER), "archive", str(part)])
        runpy.run_path(str(BUILDER), run_name="__main__")
        part.replace(target)
    data = load("cifar10", CACHE)
    assert data.images.shape == (60_000, 3, 32, 32)
    assert data.labels[data.pool].bincount().tolist() == [5000] * 10
    assert data.labels[data.test].bincount().tolist() == [1000] * 10
    assert data.classes[6] == "frog"
    train = data.images[data.pool]
    means = torch.stack([train[data.labels[data.pool] == c].float().mean(0) for c in range(10)])
    test = data.labelled(data.test)
    class_mean = (test.images - means[test.labels] / 255).square().mean()
    mean_image = (test.images - means.mean(0) / 255).square().mean()
    assert float(class_mean) == pytest.approx(0.05739, abs=1e-4)
    assert float(mean_image) == pytest.approx(0.06178, abs=1e-4)
