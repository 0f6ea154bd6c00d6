from pathlib import Path

import numpy as np
import pytest
import torch

from splitveil.data.catalogue import load
from splitveil.data.dataset import Dataset
from splitveil.errors import DataError

Y = np.arange(20) % 2
RNG = np.random.default_rng(0)
GREY = RNG.integers(0, 256, (20, 5, 4), dtype=np.uint8)
RGB = RNG.integers(0, 256, (20, 5, 4, 3), dtype=np.uint8)
FIRST = torch.from_numpy(RGB).permute(0, 3, 1, 2)


def read(path: Path, **arrays: np.ndarray) -> Dataset:
    np.savez(path / "a.npz", allow_pickle=True, **arrays)
    return load(f"npz:{path / 'a.npz'}")


def test_layouts_are_recognised(tmp_path: Path) -> None:
    assert torch.equal(read(tmp_path, x=GREY, y=Y).images[:, 0], torch.from_numpy(GREY))
    assert torch.equal(read(tmp_path, x=RGB, y=Y).images, FIRST)
    assert torch.equal(read(tmp_path, x=FIRST.numpy(), y=Y).images, FIRST)


def test_floats_equal_bytes(tmp_path: Path) -> None:
    data = read(tmp_path, x=(RGB / 255).astype(np.float32), y=Y.astype(np.uint8))
    assert torch.equal(data.images, FIRST)
    assert data.labels.tolist() == Y.tolist()


def test_one_part_is_divided_and_two_parts_are_kept(tmp_path: Path) -> None:
    assert len(read(tmp_path, x=GREY, y=Y).test) == 4
    data = read(tmp_path, x_train=GREY[:12], y_train=Y[:12], x_test=GREY[12:], y_test=Y[12:])
    assert (data.pool.tolist(), data.test.tolist()) == (list(range(12)), list(range(12, 20)))
    assert torch.equal(data.images[:, 0], torch.from_numpy(GREY))


def test_classes_are_named(tmp_path: Path) -> None:
    assert read(tmp_path, x=GREY, y=Y).classes == ("0", "1")
    assert read(tmp_path, x=GREY, y=Y, classes=np.array(["cat", "dog"])).classes == ("cat", "dog")


def test_an_ambiguous_layout_asks_and_the_answer_counts(tmp_path: Path) -> None:
    x = RNG.integers(0, 256, (20, 3, 4, 3), dtype=np.uint8)
    with pytest.raises(DataError, match=r"both of the second .* add layout='nhwc'"):
        read(tmp_path, x=x, y=Y)
    assert read(tmp_path, x=x, y=Y, layout=np.array("nchw")).image_shape == (3, 4, 3)
    assert torch.equal(
        read(tmp_path, x=x, y=Y, layout=np.array("nhwc")).images,
        torch.from_numpy(x).permute(0, 3, 1, 2),
    )
    with pytest.raises(DataError, match="must be one of nhwc, nchw, got 'hwcn'"):
        read(tmp_path, x=x, y=Y, layout=np.array("hwcn"))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": GREY[..., None, None], "y": Y}, r"must be \(n, h, w\)"),
        ({"x": GREY.reshape(20, 2, 5, 2), "y": Y}, "neither of the second.*; convert the images"),
        ({"x": GREY}, "must have either x, y or x_train, .* it has x"),
        ({}, "it has nothing"),
        ({"x_train": GREY, "y_train": Y}, "it has x_train, y_train"),
        ({"x": GREY, "y": Y + 1}, r"label 2 at index 1 .* allowed are 0\.\.1"),
        ({"x": GREY, "y": Y * 10**15}, "label 1000000000000000 at index 1"),
        ({"x": GREY, "y": Y[:-1]}, "one for each of 20 images"),
        (
            {"x": np.zeros((20, 4, 4, 4), np.uint8), "y": Y, "layout": np.array("nhwc")},
            "grey .* or RGB .*, got 4 channels",
        ),
        ({"x": GREY, "y": Y.astype(str)}, "integers of shape .*; number the classes from 0"),
        ({"x": GREY, "y": Y[:, None]}, r"integers of shape \(n,\), got int64 \(20, 1\)"),
        ({"x": GREY, "y": Y / 2}, "must be integers"),
        ({"x": GREY[:0], "y": Y[:0]}, "empty"),
        ({"x": GREY.astype(float), "y": Y}, "divide by 255"),
        ({"x": GREY, "y": Y, "classes": np.array(["a", "b", "c"])}, "got 0 of 'c'"),
        ({"x": GREY, "y": Y, "classes": np.array(["a"])}, "at least 2 classes"),
        (
            {"x_train": GREY, "y_train": Y, "x_test": GREY[:, :4], "y_test": Y},
            r"training images have shape \(1, 5, 4\) but test images \(1, 4, 4\)",
        ),
    ],
)
def test_wrong_arrays_are_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path, **arrays)


def test_a_file_of_another_kind_is_called_that(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    path.write_text("lambd = 0.3")
    with pytest.raises(DataError, match=r"mine.npz: it is not an .npz file; save .* with np.savez"):
        load(f"npz:{path}")


def test_object_arrays_are_never_unpickled(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="plain arrays: Object arrays cannot be loaded"):
        read(tmp_path, x=np.array([{"a": 1}] * 20, dtype=object), y=Y)


@pytest.mark.parametrize("keep", [0, 3, 100, 700, -10])
def test_a_corrupt_file_is_refused(tmp_path: Path, keep: int) -> None:
    read(tmp_path, x=GREY, y=Y)
    path = tmp_path / "a.npz"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"cannot read .*a\.npz"):
        load(f"npz:{path}")


def test_other_files_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", GREY)
    with pytest.raises(DataError, match="is a single array"):
        load(f"npz:{tmp_path / 'a.npy'}")
    with pytest.raises(DataError, match="there is no"):
        load(f"npz:{tmp_path / 'none.npz'}")
    with pytest.raises(DataError, match="cannot read"):
        load(f"npz:{tmp_path}")
