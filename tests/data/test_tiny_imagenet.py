import io
import re
import zipfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from data.made import FEW, WNIDS, Blobs, jpeg, pack_zip, tiny_archive, tiny_blobs, unpack
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from splitveil.data import tiny_imagenet
from splitveil.data.catalogue import load
from splitveil.data.dataset import Dataset
from splitveil.data.tiny_imagenet import DECODED, TINY
from splitveil.errors import DataError

ARCHIVE, FOLDER = TINY.name, TINY.folder

VAL = "val/val_annotations.txt"
GOOD = tiny_blobs()


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_imagenet, "COUNTS", FEW)


@pytest.fixture
def blobs() -> Blobs:
    return dict(GOOD)


def read(blobs: Blobs, folder: Path) -> Dataset:
    pack_zip(blobs, folder / ARCHIVE)
    return load("tiny-imagenet", folder)


def cmyk() -> bytes:
    stream = io.BytesIO()
    Image.new("CMYK", (64, 64)).save(stream, "JPEG")
    return stream.getvalue()


def refused(blobs: Blobs, folder: Path, message: str) -> None:
    """By the archive and by the folder, and nothing is left behind."""
    packed, parent = folder / "packed", folder / "parent"
    packed.mkdir()
    with pytest.raises(DataError, match=message):
        read(blobs, packed)
    assert [p.name for p in packed.iterdir()] == [ARCHIVE]
    unpack(blobs, parent / FOLDER)
    with pytest.raises(DataError, match=message):
        load("tiny-imagenet", parent)
    assert [p.name for p in parent.iterdir()] == [FOLDER]


def same(one: Dataset, other: Dataset) -> bool:
    return (
        torch.equal(one.images, other.images)
        and torch.equal(one.labels, other.labels)
        and one.classes == other.classes
        and torch.equal(one.test, other.test)
    )


def test_images_labels_and_names_are_those_of_the_files(blobs: Blobs, tmp_path: Path) -> None:
    data = read(blobs, tmp_path)
    assert data.images.shape == (60, 3, 64, 64)
    assert data.classes == ("Egyptian cat", "goldfish", "reel")  # in the order of wnids.txt
    assert data.labels[data.pool].tolist() == [0] * 10 + [1] * 10 + [2] * 10
    assert data.labels[data.test].tolist() == [0, 1, 2] * 10
    for index, name in ((12, f"train/{WNIDS[1]}/images/{WNIDS[1]}_2"), (34, "val/images/val_4")):
        with Image.open(io.BytesIO(blobs[f"{name}.JPEG"])) as image:
            expected = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        assert torch.equal(data.images[index], expected)
    assert (data.crop_pad, data.flip, data.ordered_test90) == (8, True, False)


def test_a_grey_image_has_three_equal_channels(blobs: Blobs, tmp_path: Path) -> None:
    data = read(blobs, tmp_path)
    grey, colour = data.images[0], data.images[1]
    assert torch.equal(grey[0], grey[1])
    assert torch.equal(grey[0], grey[2])
    assert not torch.equal(colour[0], colour[1])


def test_the_three_places_give_the_same(blobs: Blobs, tmp_path: Path) -> None:
    packed, parent = tmp_path / "packed", tmp_path / "parent"
    packed.mkdir()
    inside = unpack(blobs, parent / FOLDER)
    first = read(blobs, packed)
    assert all(same(first, load("tiny-imagenet", root)) for root in (parent, inside))
    assert [p.name for p in parent.iterdir()] == [FOLDER]


def test_images_are_decoded_once(
    blobs: Blobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = read(blobs, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([ARCHIVE, DECODED])
    monkeypatch.setattr(tiny_imagenet, "decode", None)  # a second decoding would fail
    assert same(load("tiny-imagenet", tmp_path), first)


def test_another_archive_is_decoded_anew(blobs: Blobs, tmp_path: Path) -> None:
    first = read(blobs, tmp_path)
    blobs["val/images/val_0.JPEG"] = jpeg(np.zeros((64, 64, 3), np.uint8))
    second = read(blobs, tmp_path)
    assert int(second.images[30].max()) == 0 < int(first.images[30].max())


def test_a_damaged_store_of_decoded_images_is_named(blobs: Blobs, tmp_path: Path) -> None:
    read(blobs, tmp_path)
    target = tmp_path / DECODED
    target.write_bytes(target.read_bytes()[:-100])
    with pytest.raises(DataError, match=f"{target}, .*is damaged .*delete it"):
        load("tiny-imagenet", tmp_path)


def test_a_store_of_an_earlier_version_is_made_again(blobs: Blobs, tmp_path: Path) -> None:
    first = read(blobs, tmp_path)
    target = tmp_path / DECODED
    with np.load(target) as stored:
        arrays = {key: stored[key] for key in stored.files if not key.startswith("source_")}
    np.savez(target, source_md5="0" * 32, **arrays)
    assert same(load("tiny-imagenet", tmp_path), first)
    with np.load(target) as stored:
        assert "source_md5" not in stored.files


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_half_a_store_of_decoded_images_is_never_left(
    blobs: Blobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def half(stream: io.BytesIO, **arrays: np.ndarray) -> None:
        stream.write(b"half")
        raise error

    monkeypatch.setattr(np, "savez", half)
    if isinstance(error, OSError):
        assert len(read(blobs, tmp_path)) == 60  # the images are good, only not stored
    else:
        with pytest.raises(KeyboardInterrupt):
            read(blobs, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [ARCHIVE]


def test_classes_of_one_name_are_told_apart(blobs: Blobs, tmp_path: Path) -> None:
    blobs["words.txt"] = "".join(f"{w}\tcrane, {w}\n" for w in WNIDS[:2]).encode()
    blobs["words.txt"] += f"{WNIDS[2]}\treel\n".encode()
    assert read(blobs, tmp_path).classes == (f"crane ({WNIDS[0]})", f"crane ({WNIDS[1]})", "reel")


@pytest.mark.parametrize("name", ["wnids.txt", "words.txt", VAL])
def test_a_missing_text_is_named(blobs: Blobs, tmp_path: Path, name: str) -> None:
    del blobs[name]
    with pytest.raises(DataError, match=f"lacks {FOLDER}/{name}; fetch the archive again"):
        read(blobs, tmp_path)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        (VAL, b"val_3.JPEG\tn02124075\t0\t32\t44\t62\n", b"", r"val_3\.JPEG in .* has no line in"),
        (VAL, b"val_3.JPEG", b"val_99.JPEG", "line 4 of .* names 'val_99.JPEG', which is not in"),
        (VAL, b"val_3.JPEG", b"../val_3.JPEG", "line 4 of .* which is not in val/images"),
        (VAL, b"val_3.JPEG", b"val_2.JPEG", r"names val/images/val_2\.JPEG twice"),
        (VAL, b"val_0.JPEG\tn02124075", b"val_0.JPEG\tn99999999", "line 1 .*class 'n99999999'"),
        (VAL, b"val_0.JPEG\tn02124075\t", b"val_0.JPEG ", "line 1 .*the class '32'"),
        (VAL, b"val_0.JPEG\tn02124075", b"val_0.JPEG\tn04067472", "10 test images of every class"),
        (VAL, b"val_0.JPEG", b"\xff\xff", "is not text"),
        ("wnids.txt", b"n04067472\n", b"", "has training images of n04067472, which wnids.txt"),
        ("wnids.txt", b"n04067472\n", b"n04067472\nn04067472\n", "names n04067472 twice"),
        ("wnids.txt", b"n04067472\n", b"n04067472\nn1\n", "no name for n1"),
        ("words.txt", b"n04067472\treel", b"n04067472\t", "no name for n04067472"),
    ],
)
def test_texts_that_do_not_fit_are_refused(
    *, blobs: Blobs, tmp_path: Path, name: str, old: bytes, new: bytes, message: str
) -> None:
    assert blobs[name].count(old) == 1
    blobs[name] = blobs[name].replace(old, new)
    refused(blobs, tmp_path, message)


def test_a_class_too_many_is_refused(blobs: Blobs, tmp_path: Path) -> None:
    blobs["wnids.txt"] += b"n00001740\n"  # in words.txt, but without images
    refused(blobs, tmp_path, "has 3 classes, got 4 names")


def test_a_missing_training_image_is_noticed(blobs: Blobs, tmp_path: Path) -> None:
    del blobs[f"train/{WNIDS[2]}/images/{WNIDS[2]}_7.JPEG"]
    refused(blobs, tmp_path, r"10 training images of every class, got 9 of 'reel' \(1 classes")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (jpeg(np.zeros((64, 63, 3), np.uint8)), "is 63×64 RGB; Tiny ImageNet's images are 64×64"),
        (jpeg(np.zeros((1, 1), np.uint8)), "is 1×1 grey; Tiny ImageNet's images are 64×64"),
        (b"", "cannot read .* as an image: it is none of PNG, JPEG"),
        (cmyk(), "has mode CMYK; only grey"),
        (GOOD["val/images/val_5.JPEG"][:700], "cannot read .* as an image"),
    ],
)
def test_an_image_that_is_none_is_named(
    blobs: Blobs, tmp_path: Path, raw: bytes, message: str
) -> None:
    blobs["val/images/val_5.JPEG"] = raw
    with pytest.raises(DataError, match=message) as caught:
        read(blobs, tmp_path)
    assert f"val/images/val_5.JPEG in {tmp_path / ARCHIVE}" in str(caught.value)
    assert str(caught.value).endswith(f"fetch the archive again from {TINY.url}")
    assert "BytesIO" not in str(caught.value)
    assert not (tmp_path / DECODED).exists()


def test_a_member_that_is_too_large_is_refused_unread(blobs: Blobs, tmp_path: Path) -> None:
    blobs["words.txt"] = bytes(TINY.max_bytes + 1)
    pack_zip(blobs, tmp_path / ARCHIVE, packing=zipfile.ZIP_DEFLATED)
    with pytest.raises(DataError, match=r"words\.txt in .* has 16777217 bytes, more than any"):
        load("tiny-imagenet", tmp_path)


@pytest.mark.parametrize("prefix", [f"../{FOLDER}", f"/{FOLDER}", "other"])
def test_members_that_point_elsewhere_are_not_read(
    blobs: Blobs, tmp_path: Path, prefix: str
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    pack_zip(blobs, root / ARCHIVE, prefix)
    with pytest.raises(DataError, match=r"lacks tiny-imagenet-200/wnids\.txt"):
        load("tiny-imagenet", root)
    assert [p.name for p in tmp_path.rglob("*")] == ["root", ARCHIVE]


def test_strange_members_beside_good_ones_are_never_written(blobs: Blobs, tmp_path: Path) -> None:
    blobs["../../evil.txt"] = b"evil"
    blobs[f"train/{WNIDS[0]}/images/../../evil.JPEG"] = b"evil"
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert len(read(blobs, tmp_path / "a" / "b")) == 60
    found = {p.name for p in tmp_path.rglob("*") if p.is_file()}
    assert found == {ARCHIVE, DECODED}


@pytest.mark.parametrize("keep", [0, 10, 10_000, -1, -30])
def test_a_truncated_archive_says_so(blobs: Blobs, tmp_path: Path, keep: int) -> None:
    path = pack_zip(blobs, tmp_path / ARCHIVE)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"truncated or not a zip archive .*; delete it and fetch"):
        load("tiny-imagenet", tmp_path)


@pytest.mark.parametrize(
    ("offset", "value", "why"),
    [(6, 99, "zip file version 9.9"), (8, 1, "encrypted"), (10, 99, "compression"), (16, 0, "CRC")],
)
def test_a_directory_entry_with_a_wrong_byte_says_so(
    blobs: Blobs, tmp_path: Path, offset: int, value: int, why: str
) -> None:
    path = pack_zip(blobs, tmp_path / ARCHIVE)
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"PK\x01\x02") + offset] = value  # of wnids.txt, the first member
    path.write_bytes(raw)
    with pytest.raises(DataError, match=f"truncated or not a zip archive .*{why}"):
        load("tiny-imagenet", tmp_path)


@settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(place=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255), tail=st.booleans())
def test_one_wrong_byte_is_an_error_of_ours_or_no_matter(
    tmp_path: Path, place: float, value: int, tail: bool
) -> None:
    path = pack_zip(GOOD, tmp_path / ARCHIVE, packing=zipfile.ZIP_DEFLATED)
    raw = bytearray(path.read_bytes())
    start = raw.index(b"PK\x01\x02") if tail else 0  # the directory, where most can go wrong
    raw[start + int(place * (len(raw) - start))] = value
    path.write_bytes(raw)
    (tmp_path / DECODED).unlink(missing_ok=True)
    with suppress(DataError):
        assert len(load("tiny-imagenet", tmp_path)) == 60


def test_the_official_counts_are_those_of_the_publisher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    counts = tiny_imagenet.COUNTS
    assert (counts.classes, counts.train, counts.test) == (200, 500, 50)


def test_another_number_of_classes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    tiny_archive(tmp_path, monkeypatch)
    monkeypatch.undo()
    with pytest.raises(DataError, match=r"has 200 classes, got 3 names, .* is not the official"):
        load("tiny-imagenet", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [ARCHIVE]


def test_without_network_the_place_for_the_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_imagenet, "TINY", replace(TINY, url=f"http://127.0.0.1:1/{ARCHIVE}"))
    with pytest.raises(DataError, match=re.escape(f"put it at {tmp_path}/{ARCHIVE}")):
        load("tiny-imagenet", tmp_path)
    assert list(tmp_path.iterdir()) == []
