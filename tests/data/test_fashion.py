import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitveil.data import mnist
from splitveil.data.archive import file_bytes
from splitveil.data.catalogue import load
from splitveil.data.dataset import fingerprint
from splitveil.data.mnist import DEBIAN, UNPACKED, locate, parse_idx
from splitveil.errors import DataError

Blobs = dict[str, bytes]


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def blobs() -> Blobs:
    """40 images to train on, 20 to test, of 5×4 pixels."""
    rng = np.random.default_rng(0)
    made: Blobs = {}
    for part, n in (("train", 40), ("t10k", 20)):
        made[f"{part}-images-idx3-ubyte"] = idx(rng.integers(0, 256, (n, 5, 4), dtype=np.uint8))
        made[f"{part}-labels-idx1-ubyte"] = idx((np.arange(n) % 10).astype(np.uint8))
    return made


@pytest.fixture
def official(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksums are those of the small files."""
    sums = {n: hashlib.sha256(raw).hexdigest() for n, raw in blobs.items()}
    monkeypatch.setattr(mnist, "UNPACKED", sums)


def write(blobs: Blobs, folder: Path) -> None:
    """Every other file packed."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, (name, raw) in enumerate(blobs.items()):
        packed = i % 2 == 0
        (folder / (f"{name}.gz" if packed else name)).write_bytes(
            gzip.compress(raw) if packed else raw
        )


@pytest.mark.usefixtures("official")
def test_bytes_survive_the_files(blobs: Blobs, tmp_path: Path) -> None:
    write(blobs, tmp_path)
    data = load("fashion-mnist", tmp_path)
    n = len(data.pool)
    assert data.image_shape == (1, 5, 4)
    assert idx(data.images[:n, 0].numpy()) == blobs["train-images-idx3-ubyte"]
    assert idx(data.images[n:, 0].numpy()) == blobs["t10k-images-idx3-ubyte"]
    assert data.labels.tolist() == [i % 10 for i in range(40)] + [i % 10 for i in range(20)]
    assert data.classes[9] == "Ankle boot"
    assert (data.crop_pad, data.flip, data.ordered_test90) == (2, True, False)


@pytest.mark.usefixtures("official")
@pytest.mark.parametrize("place", ["fashion-mnist", "."])
def test_both_places_under_the_data_folder_are_found(
    blobs: Blobs, tmp_path: Path, place: str
) -> None:
    write(blobs, tmp_path / place)
    assert len(load("fashion-mnist", tmp_path)) == 60


def test_other_data_under_the_same_names_is_refused(blobs: Blobs, tmp_path: Path) -> None:
    write(blobs, tmp_path)
    with pytest.raises(DataError, match="not Fashion-MNIST"):
        load("fashion-mnist", tmp_path)


def test_counts_must_agree(blobs: Blobs, tmp_path: Path) -> None:
    blobs["train-labels-idx1-ubyte"] = blobs["t10k-labels-idx1-ubyte"]
    write(blobs, tmp_path)
    with pytest.raises(DataError, match="40 images but train-labels-idx1-ubyte 20 labels"):
        load("fashion-mnist", tmp_path)


def test_without_network_the_missing_file_is_named(
    blobs: Blobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mnist, "URL", "http://127.0.0.1:1/")
    monkeypatch.setattr(mnist, "DEBIAN", tmp_path / "absent")
    del blobs["t10k-labels-idx1-ubyte"]
    home = tmp_path / "fashion-mnist"
    write(blobs, home)
    with pytest.raises(DataError, match=f"put it at {home}/t10k-labels-idx1-ubyte.gz"):
        load("fashion-mnist", tmp_path)
    assert len(list(home.iterdir())) == 3


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "begins with "),
        (b"\x00\x00\x08\x01\x00\x00\x00\x02ab", "begins with 00000801, expected 00000803"),
        (b"\x00\x00\x0d\x03" + bytes(12), "begins with 00000d03"),
        (b"\x00\x00\x08\x03\x00\x00", "ends inside its header: 6 of 16"),
        (struct.pack(">HBB3I", 0, 8, 3, 2, 1, 2) + b"abc", r"\(2, 1, 2\) = 4 bytes but has 3"),
        (struct.pack(">HBB3I", 0, 8, 3, 1, 1, 2) + b"abc", "= 2 bytes but has 3"),
        (struct.pack(">HBB3I", 0, 8, 3, *(2**32 - 1,) * 3), "bytes but has 0"),
    ],
)
def test_headers_are_strict(raw: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_idx(raw, 3, "images")


@settings(deadline=None)
@given(st.binary(max_size=40), st.booleans())
def test_any_bytes_are_an_array_or_a_data_error(raw: bytes, prefixed: bool) -> None:
    raw = b"\x00\x00\x08\x01" + raw if prefixed else raw
    try:
        array = parse_idx(raw, 1, "labels")
    except DataError:
        return
    assert idx(array) == raw


def test_broken_gzip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    packed = gzip.compress(bytes(range(256)) * 10)
    for raw in (packed[:-6], b"plain text", packed[:-5] + b"\xff" + packed[-4:]):
        path.write_bytes(raw)
        with pytest.raises(DataError, match="truncated or not a gzip file"):
            file_bytes(path)


def test_a_gzip_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitveil.data.archive.MAX_UNPACKED", 1000)
    (tmp_path / "x.gz").write_bytes(gzip.compress(bytes(1001)))
    with pytest.raises(DataError, match="unpacks to more than 1000 bytes"):
        file_bytes(tmp_path / "x.gz")


@pytest.mark.skipif(
    len(locate(DEBIAN)) < len(UNPACKED), reason="dataset-fashion-mnist not installed"
)
def test_debian_package_is_found(tmp_path: Path) -> None:
    data = load("fashion-mnist", tmp_path)
    assert (len(data.pool), len(data.test), data.image_shape) == (60_000, 10_000, (1, 28, 28))
    assert data.labels[data.pool].bincount().tolist() == [6000] * 10
    assert float(data.images[data.pool].float().mean() / 255) == pytest.approx(0.2860, abs=1e-4)


@pytest.mark.skipif(
    len(locate(DEBIAN)) < len(UNPACKED), reason="dataset-fashion-mnist not installed"
)
def test_the_small_part_is_the_first_images_of_every_class(tmp_path: Path) -> None:
    whole, small = load("fashion-mnist", tmp_path), load("fashion-small")
    for here, there, each in ((small.pool, whole.pool, 500), (small.test, whole.test, 200)):
        for label in range(10):
            first = there[whole.labels[there] == label][:each]
            mine = here[small.labels[here] == label]
            assert torch.equal(whole.images[first], small.images[mine])


def test_the_small_part_is_always_the_same_and_small() -> None:
    data = load("fashion-small")
    assert (len(data.pool), len(data.test), data.image_shape) == (5000, 2000, (1, 28, 28))
    assert fingerprint(data) == "23975a140c3300b2"
    folder = Path(mnist.__file__).parent
    assert (folder / mnist.SMALL).stat().st_size < 3_000_000
    assert "MIT License" in (folder / "fashion-small.LICENSE").read_text()
