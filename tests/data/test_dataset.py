import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from splitveil.data.catalogue import data_root
from splitveil.data.dataset import Dataset, check_dataset, to_uint8
from splitveil.errors import DataError

CLASSES = ("cat", "dog")


def pixels(n: int = 6) -> Tensor:
    return torch.arange(n * 12, dtype=torch.uint8).reshape(n, 1, 3, 4)


def toy(pool: list[int], test: list[int]) -> Dataset:
    return Dataset(
        name="toy",
        images=pixels(),
        labels=torch.tensor([0, 0, 1, 1, 0, 1]),
        classes=CLASSES,
        pool=torch.tensor(pool, dtype=torch.int64),
        test=torch.tensor(test, dtype=torch.int64),
    )


def test_labelled_gives_the_very_pixels_over_255() -> None:
    data = toy([0, 1, 2, 3], [4, 5])
    got = data.labelled(torch.tensor([3, 0]))
    assert got.images.dtype == torch.float32
    assert torch.equal((got.images * 255).round().to(torch.uint8), pixels()[[3, 0]])
    assert got.labels.tolist() == [1, 0]
    assert (data.image_shape, data.num_classes, len(data)) == ((1, 3, 4), 2, 6)


def test_moving_keeps_everything_else() -> None:
    data = toy([0, 1, 2, 3], [4, 5])
    moved = data.to("cpu")
    assert torch.equal(moved.images, data.images)
    assert (moved.name, moved.classes, moved.flip) == (data.name, data.classes, data.flip)


@pytest.mark.parametrize(
    ("images", "labels", "classes", "message"),
    [
        (pixels().float(), torch.zeros(6).long(), CLASSES, "must be uint8"),
        (
            pixels()[:, 0],
            torch.zeros(6).long(),
            CLASSES,
            r"\(n, c, h, w\), got torch.uint8 \(6, 3, 4\)",
        ),
        (
            pixels().repeat(1, 4, 1, 1)[:, :4],
            torch.zeros(6).long(),
            CLASSES,
            r"grey \(1 channel\) or RGB \(3\), got 4 channels .*; convert them",
        ),
        (pixels(), torch.zeros(5).long(), CLASSES, "one for each of 6 images"),
        (pixels(), torch.zeros(6), CLASSES, "labels must be int64"),
        (pixels()[:0], torch.zeros(0).long(), CLASSES, "the dataset is empty"),
        (pixels(), torch.zeros(6).long(), ("cat",), "at least 2 classes"),
        (
            pixels(),
            torch.tensor([0, 1, 2, 0, 7, 1]),
            CLASSES,
            r"label 2 at index 2 .*2 such labels.*0\.\.1, .*; number the classes from 0",
        ),
        (pixels(), torch.tensor([0, 1, 1, 0, 0, -1]), CLASSES, "label -1 at index 5"),
    ],
)
def test_check_says_what_is_wrong(
    images: Tensor, labels: Tensor, classes: tuple[str, ...], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        check_dataset(images, labels, classes, "toy")


@pytest.mark.parametrize(
    ("pool", "test", "message"),
    [
        ([0, 1, 2, 3], [3, 4, 5], "share or repeat 1"),
        ([0, 1, 2, 3], [4, 6], "indices from 0 to 6"),
        ([0, 1, 2, 3], [], "test part is empty"),
        ([0, 1, 2, 4], [3, 5], "at least 2 training images, got 1 of 'dog'"),
    ],
)
def test_parts_are_checked(pool: list[int], test: list[int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        toy(pool, test)


def test_a_message_names_few_of_many_classes_that_are_too_small() -> None:
    classes = tuple(f"c{i}" for i in range(100))
    with pytest.raises(DataError, match=r"got 1 of 'c0'.* 'c4', and too few of 95 more classes; "):
        Dataset(
            name="toy", images=torch.zeros(101, 1, 2, 2, dtype=torch.uint8), classes=classes,
            labels=torch.arange(101) % 100, pool=torch.arange(100), test=torch.tensor([100]),
        )  # fmt: skip


@settings(deadline=None)
@given(st.lists(st.integers(0, 255), min_size=1, max_size=40), st.sampled_from(["f2", "f4", "f8"]))
def test_floats_come_back_as_the_bytes_they_were(levels: list[int], dtype: str) -> None:
    expected = np.array(levels, np.uint8)
    assert np.array_equal(to_uint8((expected / 255).astype(dtype), "toy"), expected)


@settings(deadline=None)
@given(st.floats(0, 1))
def test_rounding_error_is_at_most_half_a_level(value: float) -> None:
    assert abs(to_uint8(np.array([value]), "toy")[0] / 255 - value) <= 1 / 510 + 1e-12


def test_bytes_and_small_integers_pass_unchanged() -> None:
    raw = np.arange(256, dtype=np.uint8)
    assert to_uint8(raw, "toy") is raw
    assert np.array_equal(to_uint8(raw.astype(np.int32), "toy"), raw)
    assert to_uint8(np.zeros((0, 3)), "toy").dtype == np.uint8


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.array([[0.5, np.nan], [np.nan, 0.1]]), r"2 NaN, the first at index \(0, 1\)"),
        (np.array([0.0, 200.0]), r"from 0.0 to 200.0; divide by 255"),
        (np.array([-0.5, 1.0]), "from -0.5 to 1.0"),
        (np.array([0.5, np.inf]), "to inf"),
        (np.array([0, 256]), r"lie in \[0, 255\], got values from 0 to 256"),
        (np.array([-1, 5], np.int8), "from -1 to 5"),
        (np.array([True, False]), "got bool"),
        (np.array(["a"]), "got <U1"),
    ],
)
def test_pixels_outside_the_range_are_refused(x: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message):
        to_uint8(x, "toy")


def test_data_root_prefers_the_argument_then_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SPLITVEIL_DATA", raising=False)
    assert data_root() == tmp_path / ".cache/splitveil/data"
    monkeypatch.setenv("SPLITVEIL_DATA", "~/there")
    assert data_root() == tmp_path / "there"
    assert data_root(tmp_path) == tmp_path


def test_a_file_is_no_data_folder(tmp_path: Path) -> None:
    file = tmp_path / "cifar.tar.gz"
    file.touch()
    with pytest.raises(DataError, match=re.escape(f"{file} is a file")):
        data_root(file)
