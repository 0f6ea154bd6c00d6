import re
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from data.made import FEW, Blobs, cifar100_archive, cifar100_blobs, pack_tar, unpack

from splitveil.data import cifar
from splitveil.data.catalogue import load
from splitveil.data.cifar import CIFAR100
from splitveil.data.dataset import Dataset
from splitveil.errors import DataError

ARCHIVE, FOLDER = CIFAR100.name, CIFAR100.folder


@pytest.fixture
def blobs(monkeypatch: pytest.MonkeyPatch) -> Blobs:
    monkeypatch.setattr(cifar, "COUNTS100", FEW)
    return cifar100_blobs()


def pack(blobs: Blobs, folder: Path, prefix: str = FOLDER) -> Path:
    pack_tar(blobs, folder / ARCHIVE, prefix)
    return folder


def changed(blobs: Blobs, name: str, offset: int, value: int) -> Blobs:
    raw = bytearray(blobs[name])
    raw[offset] = value
    return {**blobs, name: bytes(raw)}


def same(one: Dataset, other: Dataset) -> bool:
    return torch.equal(one.images, other.images) and torch.equal(one.labels, other.labels)


def test_bytes_and_fine_labels_survive_the_archive(blobs: Blobs, tmp_path: Path) -> None:
    data = load("cifar100", pack(blobs, tmp_path))
    table = np.frombuffer(blobs["train.bin"] + blobs["test.bin"], np.uint8).reshape(-1, 3074)
    assert data.images.flatten(1).numpy().tobytes() == table[:, 2:].tobytes()
    assert data.labels.tolist() == table[:, 1].tolist()
    assert data.classes == ("fine_0", "fine_1", "fine_2")
    assert data.pool.tolist() == list(range(30))
    assert data.test.tolist() == list(range(30, 60))
    assert (data.crop_pad, data.flip, data.ordered_test90) == (4, True, True)


def test_the_three_places_give_the_same(blobs: Blobs, tmp_path: Path) -> None:
    packed, parent = tmp_path / "packed", tmp_path / "parent"
    packed.mkdir()
    inside = unpack(blobs, parent / FOLDER)
    first, *others = (load("cifar100", r) for r in (pack(blobs, packed), parent, inside))
    assert all(same(first, other) for other in others)


def test_cifar10_and_cifar100_share_a_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_batch.bin").touch()  # CIFAR-10's
    (tmp_path / "train.bin").touch()  # anybody's
    assert len(load("cifar100", cifar100_archive(tmp_path, monkeypatch))) == 60


def test_the_official_counts_are_those_of_the_publisher() -> None:
    counts = cifar.COUNTS100
    assert (counts.classes, counts.train, counts.test) == (100, 500, 100)
    assert CIFAR100.max_bytes == 153_700_000  # of train.bin


def test_other_sizes_than_the_official_ones_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train\.bin in .* has 92220 bytes, expected 153700000"):
        load("cifar100", pack(cifar100_blobs(), tmp_path))


@pytest.mark.parametrize("name", ["train.bin", "test.bin", "fine_label_names.txt"])
def test_a_missing_member_is_named(blobs: Blobs, tmp_path: Path, name: str) -> None:
    del blobs[name]
    with pytest.raises(DataError, match=f"lacks {re.escape(name)}; fetch the archive again"):
        load("cifar100", pack(blobs, tmp_path))


@pytest.mark.parametrize("cut", [1, 3074])
def test_a_short_member_is_refused(blobs: Blobs, tmp_path: Path, cut: int) -> None:
    blobs["test.bin"] = blobs["test.bin"][:-cut]
    with pytest.raises(
        DataError, match=rf"test\.bin .* {92220 - cut} bytes, .*; delete .*{ARCHIVE} and"
    ):
        load("cifar100", pack(blobs, tmp_path))


@pytest.mark.parametrize("name", ["train.bin", "test.bin"])
def test_a_label_beyond_the_classes_is_refused(blobs: Blobs, tmp_path: Path, name: str) -> None:
    wrong = changed(blobs, name, 5 * 3074 + 1, 3)
    part = "training" if name == "train.bin" else "test"
    message = (
        f"cifar100 has 10 {part} images of every class, got 9 of 'fine_2' (1 classes differ); "
        f"{tmp_path / ARCHIVE} is not the official one: fetch the archive again from {CIFAR100.url}"
    )
    with pytest.raises(DataError, match=re.escape(message)):
        load("cifar100", pack(wrong, tmp_path))


def test_an_archive_packed_with_a_leading_dot_is_read(blobs: Blobs, tmp_path: Path) -> None:
    assert len(load("cifar100", pack(blobs, tmp_path, f"./{FOLDER}"))) == 60


def test_a_class_that_occurs_too_often_is_refused(blobs: Blobs, tmp_path: Path) -> None:
    wrong = changed(blobs, "test.bin", 1, 2)  # was 0
    message = r"10 test images of every class, got 9 of 'fine_0' \(2 classes differ\)"
    with pytest.raises(DataError, match=message):
        load("cifar100", pack(wrong, tmp_path))


@pytest.mark.parametrize("names", [b"a\nb\n", b"a\nb\nb\n", b"a\nb\nc\nd\n", b""])
def test_another_number_of_names_is_refused(blobs: Blobs, tmp_path: Path, names: bytes) -> None:
    blobs["fine_label_names.txt"] = names
    with pytest.raises(
        DataError, match=r"has 3 classes, got \d names, \d of them different; .*fetch"
    ):
        load("cifar100", pack(blobs, tmp_path))


def test_names_that_are_no_text_are_refused(blobs: Blobs, tmp_path: Path) -> None:
    blobs["fine_label_names.txt"] = b"\xff\xfe\x00"
    with pytest.raises(DataError, match="is not a list of names"):
        load("cifar100", pack(blobs, tmp_path))


@pytest.mark.parametrize("prefix", [f"../{FOLDER}", f"/{FOLDER}", f"{FOLDER}/.."])
def test_members_that_point_elsewhere_are_not_read(
    blobs: Blobs, tmp_path: Path, prefix: str
) -> None:
    with pytest.raises(DataError, match=r"lacks train\.bin, test\.bin, fine_label_names\.txt"):
        load("cifar100", pack(blobs, tmp_path, prefix))
    assert [p.name for p in tmp_path.iterdir()] == [ARCHIVE]


def test_a_link_in_place_of_a_member_is_not_followed(blobs: Blobs, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(blobs.pop("train.bin"))
    link = tarfile.TarInfo(f"{FOLDER}/train.bin")
    link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "secret")
    with tarfile.open(tmp_path / ARCHIVE, "w:gz") as tar:
        tar.addfile(link)
    with pytest.raises(DataError, match=r"lacks train\.bin"):
        load("cifar100", tmp_path)


@pytest.mark.parametrize("keep", [0, 10, 1000, 100_000])
def test_a_truncated_archive_says_so(blobs: Blobs, tmp_path: Path, keep: int) -> None:
    path = pack(blobs, tmp_path) / ARCHIVE
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match="truncated or not a gzipped tar archive"):
        load("cifar100", tmp_path)


def test_without_network_the_place_for_the_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar, "CIFAR100", replace(CIFAR100, url=f"http://127.0.0.1:1/{ARCHIVE}"))
    with pytest.raises(DataError, match=f"put it at {tmp_path}/{ARCHIVE}"):
        load("cifar100", tmp_path)
    assert list(tmp_path.iterdir()) == []
