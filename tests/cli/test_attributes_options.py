"""`--attributes` and `--members` of audits: tables beside images, and training data."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from cli.calling import call, text
from PIL import Image

import splitveil as sv
from splitveil.attacks.baseline import MeanImage
from splitveil.attacks.linear import Linear
from splitveil.attacks.profiles import PROFILES
from splitveil.data.catalogue import load
from splitveil.data.folder import file_names

CODE = """
def send(x):
    return x.reshape(len(x), -1)
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current folder, images, and tiny attacks."""
    name = f"sender_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(CODE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    attacks = {"mean": MeanImage(), "linear": Linear()}
    monkeypatch.setitem(cast(dict[str, Any], PROFILES), "smoke", attacks)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (140, 8, 8), dtype=np.uint8)
    images[::2, :, :4] //= 4  # of every second image the left half is dark
    for i, image in enumerate(images[:100]):
        path = Path("photos") / "ab"[i // 2 % 2] / f"{i:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    np.savez("others.npz", x=images[100:], y=np.arange(40) // 2 % 2, classes=["a", "b"])
    np.savez("same.npz", x=images[:40], y=np.arange(40) // 2 % 2, classes=["a", "b"])
    return f"{name}:send"


def table(name: str = "table.csv", *, key: str = "file", rows: int = 100) -> str:
    """Whether the left half is dark, by file name or by place."""
    files = [f"{'ab'[i // 2 % 2]}/{i:03}.png" for i in range(rows)]
    keys = files if key == "file" else list(map(str, range(rows)))
    dark = [("yes", "no")[i % 2] for i in range(rows)]
    lines = [f"{key},dark", *(f"{k},{d}" for k, d in zip(keys, dark, strict=True))]
    Path(name).write_text("\n".join(lines), encoding="utf-8")
    return name


pytestmark = pytest.mark.usefixtures("no_page")
WORDS = ("--data", "folder:photos", "--profile", "smoke")


def test_file_names_come_in_the_order_of_the_dataset() -> None:
    names = file_names("folder:photos")
    assert names is not None
    dataset = load("folder:photos")
    assert len(names) == len(dataset) == 100
    with Image.open(Path("photos") / names[7]) as picture:
        assert np.array_equal(dataset.images[7, 0].numpy(), np.asarray(picture))
    assert file_names("digits") is None
    Path("photos").rename("train")
    Path("both").mkdir()
    Path("train").rename("both/train")
    (Path("both") / "test" / "a").mkdir(parents=True)
    (Path("both") / "train" / "a" / "000.png").rename("both/test/a/000.png")
    assert file_names("folder:both") == [
        *(f"train/{n}" for n in names if n != "a/000.png"), "test/a/000.png",
    ]  # fmt: skip


def test_attributes_of_a_table_are_attacked(place: str) -> None:
    result = call("audit-encoder", place, *WORDS, "--attributes", table(), "--json")
    assert result.exit_code == 0, text(result)
    record = json.loads(result.stdout)
    row = record["leaks"]["attribute"]["dark"]
    assert row["accuracy"] > 0.9 > row["chance"]
    assert record["audit"]["attributes"] == ["dark"]


def test_one_table_serves_two_sets_of_images(place: str) -> None:
    rows = [str(i % 2 == 0) for i in range(80)]
    Path("t.csv").write_text("\n".join(["dark", *rows]), encoding="utf-8")
    words = ("--aux-data", "npz:same.npz", "--test-data", "npz:others.npz", "--profile", "smoke")
    result = call("audit-encoder", place, *words, "--attributes", "t.csv", "--json")
    assert result.exit_code == 0, text(result)
    assert json.loads(result.stdout)["leaks"]["attribute"]["dark"]["accuracy"] > 0.8


def test_an_audit_with_attributes_is_not_replayed() -> None:
    config = {"dataset": "folder:photos", "defence": "none", "epochs": 1, "runs_dir": "runs"}
    run = sv.fit(sv.RunConfig(**config, name="a", device="cpu"))  # type: ignore[arg-type]
    result = call("audit", run.path, "--profile", "smoke", "--attributes", table(), "--json")
    assert result.exit_code == 0, text(result)
    assert json.loads(result.stdout)["leaks"]["attribute"].keys() == {"dark"}
    replayed = call("replay", run.path / "record.json")
    assert replayed.exit_code == 2
    assert "was made with a table of attributes, so it cannot be replayed" in text(replayed)


def test_members_are_found_or_refused(place: str) -> None:
    result = call("audit-encoder", place, *WORDS, "--members", "npz:others.npz", "--json")
    assert result.exit_code == 0, text(result)
    record = json.loads(result.stdout)
    assert "members" in record["splits"]
    assert record["leaks"]["membership"]["n"] == 20  # half of 20 pairs
    result = call("audit-encoder", place, *WORDS, "--members", "npz:same.npz")
    assert result.exit_code == 2
    assert "images of --members are among those that are scored" in text(result)
    result = call("audit-encoder", place, *WORDS, "--members", "digits")
    assert (result.exit_code, "--members has classes" in text(result)) == (2, True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.replace("a/000.png", "a/999.png"), "unknown file 'a/999.png'"),
        (lambda t: t.rsplit("\n", 1)[0], "no row for 1 of 100 images: 'b/099.png'"),
        (lambda t: t.replace("no", "yes"), "attribute 'dark' in table.csv has only one value"),
        (lambda t: t.replace("file,dark", "file"), "2 values for 1 columns"),
    ],
)
def test_a_faulty_table_exits_with_2_before_any_attack(
    change: Callable[[str], str], said: str, place: str
) -> None:
    path = Path(table())
    path.write_text(change(path.read_text()), encoding="utf-8")
    result = call("audit-encoder", place, *WORDS, "--attributes", path)
    assert result.exit_code == 2, text(result)
    assert said in text(result)
    assert not Path("runs").exists()
