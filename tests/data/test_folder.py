import re
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from splitveil.config.resolve import resolve
from splitveil.config.run_config import RunConfig
from splitveil.data.catalogue import load
from splitveil.data.dataset import Dataset
from splitveil.data.folder import file_names
from splitveil.errors import ConfigError, DataError

ORIENTATION = 0x0112  # of EXIF


def pixels(seed: int, shape: tuple[int, ...] = (5, 4, 3)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def save(path: Path, array: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)
    return path


def two_classes(root: Path, n: int = 10, suffix: str = "png") -> Path:
    for label, name in enumerate(("dog", "ant")):
        for i in range(n):
            save(root / name / f"{i:02}.{suffix}", pixels(100 * label + i))
    return root


def read(root: Path) -> Dataset:
    return load(f"folder:{root}")


def test_classes_are_sorted_and_pixels_are_exact(tmp_path: Path) -> None:
    data = read(two_classes(tmp_path))
    assert data.classes == ("ant", "dog")
    assert data.image_shape == (3, 5, 4)
    assert data.labels.tolist() == [0] * 10 + [1] * 10
    expected = torch.from_numpy(pixels(103)).permute(2, 0, 1)
    assert torch.equal(data.images[3], expected)
    assert data.labels[data.test].bincount().tolist() == [2, 2]
    assert data.name == f"folder:{tmp_path}"


def test_train_and_test_folders_are_kept_apart(tmp_path: Path) -> None:
    two_classes(tmp_path / "train", n=4)
    two_classes(tmp_path / "test", n=3)
    data = read(tmp_path)
    assert (data.pool.tolist(), data.test.tolist()) == (list(range(8)), list(range(8, 14)))
    assert data.labels[data.test].tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("suffix", ["bmp", "webp", "jpg", "JPEG"])
def test_other_formats_are_read(tmp_path: Path, suffix: str) -> None:
    two_classes(tmp_path, n=3, suffix=suffix)
    first = min((tmp_path / "ant").iterdir())
    with Image.open(first) as image:
        expected = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    assert torch.equal(read(tmp_path).images[0], expected)


def test_grey_and_one_bit_share_a_family(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for i in range(3):
            save(tmp_path / name / f"{i}.png", pixels(i, (5, 4)))
    Image.fromarray(pixels(0, (5, 4)) > 127).save(tmp_path / "a" / "bit.png")
    data = read(tmp_path)
    assert data.image_shape == (1, 5, 4)
    assert sorted(set(data.images[3].flatten().tolist())) == [0, 255]


def test_hidden_entries_and_files_beside_the_classes_are_ignored(tmp_path: Path) -> None:
    two_classes(tmp_path, n=3)
    (tmp_path / "attributes.csv").touch()
    (tmp_path / ".git").mkdir()
    (tmp_path / "ant" / ".DS_Store").touch()
    assert len(read(tmp_path)) == 6


def test_progress_counts_to_the_end(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []

    def progress(done: int, total: int, note: str = "") -> None:
        told.append((done, total))

    load(f"folder:{two_classes(tmp_path, n=3)}", progress=progress)
    assert told[-1] == (6, 6)


def refused(root: Path, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(root)


def test_another_size_names_the_first_offender(tmp_path: Path) -> None:
    odd = save(two_classes(tmp_path) / "dog" / "04.png", pixels(0, (5, 6, 3)))
    refused(tmp_path, re.escape(f"{odd} is 6×5 RGB, but {tmp_path}/ant/00.png is 4×5 RGB; resize"))


def test_photographs_of_any_size_become_upright_squares(tmp_path: Path) -> None:
    half = np.concatenate([np.full((20, 40, 3), 250, np.uint8), np.zeros((20, 40, 3), np.uint8)])
    turned = Image.Exif()
    turned[ORIENTATION] = 6  # lies on its side; the top of the scene is at the left
    for name in ("dog", "ant"):
        for i in range(5):
            save(tmp_path / name / f"{i}.png", half[:, : 30 + i])
        Image.fromarray(np.rot90(half)).save(tmp_path / name / "9.png", exif=turned)
    data = load(f"folder:{tmp_path}@8")
    assert data.image_shape == (3, 8, 8)
    assert data.name == f"folder:{tmp_path}@8"
    assert (data.images[:, :, 0] > 240).all()
    assert (data.images[:, :, -1] < 10).all()
    assert file_names(data.name) == [f"{c}/{i}.png" for c in ("ant", "dog") for i in (*range(5), 9)]
    with pytest.raises(DataError, match="asks for images of 2×2; give a side from 4 to 1024"):
        load(f"folder:{tmp_path}@2")
    with pytest.raises(DataError, match=r"there is no .*photos; give an existing path"):
        load(f"folder:{tmp_path}/photos@8")


def test_a_folder_may_be_called_as_if_it_had_a_side(tmp_path: Path) -> None:
    assert read(two_classes(tmp_path / "pets@8")).image_shape == (3, 5, 4)


def test_another_colour_names_the_first_offender(tmp_path: Path) -> None:
    odd = save(two_classes(tmp_path) / "dog" / "04.png", pixels(0, (5, 4)))
    refused(tmp_path, re.escape(f"{odd} is 4×5 grey"))


def test_transparency_is_not_guessed(tmp_path: Path) -> None:
    odd = save(two_classes(tmp_path) / "ant" / "00.png", pixels(0, (5, 4, 4)))
    refused(tmp_path, f"{odd} has mode RGBA; only grey .* and RGB")


@pytest.mark.parametrize("raw", [b"", b"no image", b"\x89PNG\r\n\x1a\n"])
def test_an_unreadable_image_is_named(tmp_path: Path, raw: bytes) -> None:
    bad = two_classes(tmp_path) / "dog" / "05.png"
    bad.write_bytes(raw)
    message = f"cannot read {bad} as an image: it is none of PNG, JPEG, .*; replace or delete it"
    refused(tmp_path, message)


def test_a_truncated_image_is_named(tmp_path: Path) -> None:
    bad = two_classes(tmp_path) / "dog" / "05.png"
    bad.write_bytes(bad.read_bytes()[:60])
    refused(tmp_path, f"cannot read {bad} as an image")


@pytest.mark.parametrize("side", [10_000, 20_000])
def test_a_decompression_bomb_is_refused(tmp_path: Path, side: int) -> None:
    bomb = two_classes(tmp_path, n=3) / "ant" / "00.png"

    def chunk(kind: bytes, body: bytes) -> bytes:
        crc = zlib.crc32(kind + body).to_bytes(4, "big")
        return len(body).to_bytes(4, "big") + kind + body + crc

    header = side.to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    bomb.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b""))
    refused(tmp_path, f"{bomb} is suspiciously large")


def test_a_stray_file_or_nested_folder_is_refused(tmp_path: Path) -> None:
    two_classes(tmp_path, n=3)
    stray = tmp_path / "ant" / "notes.txt"
    stray.touch()
    refused(tmp_path, f"{stray} is not a supported image type")
    stray.unlink()
    (tmp_path / "ant" / "more").mkdir()
    refused(tmp_path, "is a folder inside a class folder")


def test_wrong_trees_are_refused(tmp_path: Path) -> None:
    refused(tmp_path / "none", "there is no .*none; give an existing path")
    refused(tmp_path, "has no class folders")
    refused(
        save(tmp_path / "file.png", pixels(0)),
        "file.png is a file, not a folder; give the folder that contains one folder per class",
    )
    (tmp_path / "ant").mkdir()
    refused(tmp_path, "has no images in its class folders; put some there")


def test_a_class_only_in_test_is_refused(tmp_path: Path) -> None:
    two_classes(tmp_path / "train", n=3)
    two_classes(tmp_path / "test", n=3)
    save(tmp_path / "test" / "bee" / "0.png", pixels(0))
    train, test = tmp_path / "train", tmp_path / "test"
    message = f"{test} has classes that {train} lacks: bee; .* add them to {train} or remove them"
    refused(tmp_path, message)


def test_classes_only_in_train_are_refused(tmp_path: Path) -> None:
    train, test = tmp_path / "train", tmp_path / "test"
    two_classes(train, n=3)
    for i in range(6):
        save(train / f"wasp{i}" / "0.png", pixels(i))
    save(test / "ant" / "0.png", pixels(0))
    message = (
        f"{train} has classes that {test} lacks: dog, wasp0, wasp1, wasp2, wasp3, and 2 more; "
    )
    refused(tmp_path, f"{message}.* add them to {test} or remove them from {train}")


def test_too_few_images_of_a_class_are_refused(tmp_path: Path) -> None:
    two_classes(tmp_path, n=5)
    save(tmp_path / "bee" / "0.png", pixels(0))
    refused(tmp_path, "at least 2 training images, got 1 of 'bee'")


def test_a_colour_image_among_grey_ones_names_the_first_offender(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for i in range(3):
            save(tmp_path / name / f"{i}.png", pixels(i, (5, 4)))
    odd = save(tmp_path / "b" / "1.png", pixels(0))
    message = f"{odd} is 4×5 RGB, but {tmp_path}/a/0.png is 4×5 grey; convert the images"
    refused(tmp_path, re.escape(message))


def test_one_class_is_not_enough(tmp_path: Path) -> None:
    for i in range(5):
        save(tmp_path / "ann" / f"{i}.png", pixels(i))
    refused(tmp_path, r"at least 2 classes are needed, got \['ann'\]; add images of another")


def test_images_of_one_pixel_are_read_and_refused_by_the_net(tmp_path: Path) -> None:
    for i in range(12):
        save(tmp_path / "ab"[i % 2] / f"{i}.png", pixels(i, (1, 1, 3)))
    data = read(tmp_path)
    assert data.image_shape == (3, 1, 1)
    plan = resolve(RunConfig(dataset=data.name, device="cpu"), data)
    message = r"^small needs images of at least 4×4, got \(3, 1, 1\); resize them"
    with pytest.raises(ConfigError, match=message):
        plan.build_model()


@pytest.mark.parametrize("side", [64, 96])
def test_one_folder_for_each_person_is_a_dataset_of_faces(tmp_path: Path, side: int) -> None:
    people = ("Ada_Lovelace", "Alan_Turing", "Emmy_Noether")
    for label, name in enumerate(people):
        for i in range(5 + label):  # LFW has as many images of a person as were found
            save(tmp_path / name / f"{name}_{i + 1:04}.jpg", pixels(i, (side, side, 3)))
    data = read(tmp_path)
    assert (data.classes, data.image_shape) == (people, (3, side, side))
    assert data.labels.bincount().tolist() == [5, 6, 7]
    assert data.labels[data.test].bincount(minlength=3).tolist() == [1, 1, 2]  # of 1, 1.2, 1.4
