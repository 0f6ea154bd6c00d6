"""The README and the results page: their numbers come from record files, their links resolve."""

import importlib
import io
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from splitveil.config.resolve import flat_config, make_config
from splitveil.config.settings import parse_pair
from splitveil.record.groups import Group
from splitveil.record.schema import Record
from splitveil.report.columns import Published

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
RESULTS = ROOT / "docs" / "project" / "results.md"
RECORDS = sorted((ROOT / "results").rglob("record.json"))
PLACES = {"data_dir", "runs_dir"}


def load_script() -> ModuleType:
    return importlib.reload(importlib.import_module("paper.readme"))  # what it caches is forgotten


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script()


def read(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


@pytest.mark.parametrize("page", [README, RESULTS], ids=lambda p: p.name)
def test_pages_are_those_of_the_records(page: Path, script: ModuleType) -> None:
    """Run `python -m paper.readme` when this fails."""
    text = page.read_text(encoding="utf-8")
    assert script.with_blocks(text) == text
    assert (
        text.count("<!-- built: ") == text.count("<!-- end -->") == len(script.BLOCK.findall(text))
    )


def test_every_row_is_in_the_page_of_results_and_every_block_in_a_page(script: ModuleType) -> None:
    text = RESULTS.read_text(encoding="utf-8")
    for path in RECORDS:
        row = next(p for p in path.parents if p.parent.parent == ROOT / "results")
        assert f"| `{row.name}` |" in text, path
    names = {m[1] for m in script.BLOCK.findall(text + README.read_text(encoding="utf-8"))}
    assert names == set(script.BLOCKS)


def test_a_track_within_another_is_named_and_its_rows_told_once(script: ModuleType) -> None:
    text = script.short("cifar10")
    rows = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    tracks = {
        track.title: {g.name for g in track.groups} for track in script.main_tracks("cifar10")
    }
    (inner, within), (outer, all_rows) = tracks.items()
    assert within < all_rows
    assert sorted(rows) == sorted(all_rows)
    assert text.startswith(f"**{outer}.** The rows of `vgg11` are also *{inner}*. ")


def test_verdicts_come_before_rows_without_one(script: ModuleType) -> None:
    for line in script.verdicts("cifar10").splitlines():
        kinds = line.partition(" – ")[2].split("; ")
        without = ["no verdict" in kind for kind in kinds]
        assert without == sorted(without)
        assert not all(without)


def test_the_figure_is_that_of_the_records(script: ModuleType) -> None:
    """Run `python -m paper.readme` when this fails; other font rendering moves few pixels."""
    drawn, kept = (
        np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)
        for png in (script.figure(), script.FIGURE.read_bytes())
    )
    assert drawn.shape == kept.shape
    assert (np.abs(drawn - kept).max(-1) > 96).mean() < 1e-4


@pytest.mark.parametrize("path", RECORDS, ids=lambda p: str(p.parent.relative_to(ROOT / "results")))
def test_a_record_lies_where_its_seeds_say(path: Path) -> None:
    record = read(path)
    folder, seeds = path.parent, record["seeds"]
    if folder.name.startswith("attack"):
        assert folder.name == f"attack{seeds['attack']}"
        folder = folder.parent
    assert folder.name == f"seed{seeds['train']}" == f"seed{record['config']['seed']}"
    place, dataset = folder.parent.parent.name, record["config"]["dataset"]
    assert place == dataset or place.startswith(f"{dataset}-")  # another table on the same data
    assert not PLACES & set(record["config"])


@pytest.mark.parametrize("path", RECORDS, ids=lambda p: str(p.parent.relative_to(ROOT / "results")))
def test_the_command_of_a_record_builds_its_settings(path: Path, script: ModuleType) -> None:
    record = read(path)
    program, command, *words = shlex.split(
        script.train_command(Record.from_dict(record), record["config"]["name"])
    )
    assert (program, command) == ("splitveil", "train")
    options: dict[str, Any] = {"final": "--final" in words}
    words = [word for word in words if word != "--final"]
    for key, value in zip(words[::2], words[1::2], strict=True):
        name, parsed = parse_pair(value if key == "--set" else f"{key[2:]}={value}")
        options[name] = parsed
    built = flat_config(make_config(options))
    for key, value in record["config"].items():
        if key in built and key != "device":
            assert built[key] == value, key


def test_a_block_that_nobody_builds_is_an_error(script: ModuleType) -> None:
    with pytest.raises(KeyError):
        script.with_blocks("<!-- built: other -->\n<!-- end -->")
    assert script.with_blocks("no block") == "no block"


def test_links_resolve() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target


@pytest.mark.parametrize(
    ("accuracies", "errors", "said"),
    [  # t = (mean - reported) / (sd/√3), against 4.30
        ((0.90, 0.91, 0.92), (0.040, 0.041, 0.042), ""),  # t = 20.8 and 19.1
        ((0.87, 0.88, 0.89), (0.040, 0.041, 0.042), "the accuracies are not told apart"),
        ((0.90, 0.91, 0.92), (0.029, 0.030, 0.031), "the errors are not told apart"),
        ((0.87, 0.88, 0.89), (0.029, 0.030, 0.031), "neither is told apart"),
    ],
)
def test_a_lead_that_the_seeds_do_not_carry_is_said(
    accuracies: tuple[float, ...], errors: tuple[float, ...], said: str, script: ModuleType
) -> None:
    records = (
        Record.from_dict({"accuracy": accuracy, "strongest": {"mse": mse}})
        for accuracy, mse in zip(accuracies, errors, strict=True)
    )
    row = Group("row", tuple((record,) for record in records))
    reported = Published(accuracy=0.879, mse=0.0299, source="paper")
    parts = sys.modules[script.in_a_sentence.__module__]
    told = parts.told_apart(row, reported)
    assert told == (f" ({said} over the seeds)" if said else "")


@pytest.fixture
def planted(tmp_path: Path) -> Iterator[ModuleType]:
    """The script over a folder of one real record under several names, accuracy and MSE changed."""
    module = load_script()
    module.RESULTS = tmp_path  # type: ignore[attr-defined]
    record = read(ROOT / "results" / "cifar10" / "veil-fast" / "seed0" / "record.json")
    del record["per_image"]
    for place, aux, accuracy, mse in (
        ("cifar10-table1/arl", "train", 0.88, 0.02),
        ("cifar10-table1/arl+veil", "train", 0.87, 0.05),
        ("cifar10-seed-003/cem", "test90", 0.86, 0.03),
        ("cifar10-seed-003/gated-att", "test90", 0.85, 0.02),
        ("cifar10-seed-003/sparse+gated-att-wire-train", "train", 0.81, 0.04),
    ):
        made = json.loads(json.dumps(record | {"accuracy": accuracy}))
        made["strongest"]["mse"] = made["attacks"]["decoder"]["mse"] = mse
        made["audit"]["aux"] = aux
        folder = tmp_path / place / "seed0"
        folder.mkdir(parents=True)
        (folder / "record.json").write_text(json.dumps(made))
    shutil.copy(ROOT / "results" / "published.json", tmp_path)
    yield module
    load_script()  # the other tests share the module: it reads the real records again


def test_the_papers_table_is_built_from_its_records(planted: ModuleType) -> None:
    text = planted.with_blocks("<!-- built: table1 -->\n<!-- end -->")
    (alone,) = [line for line in text.splitlines() if line.startswith("| `arl` |")]
    cells = [cell.strip() for cell in alone.split("|")]
    assert cells[5:9] == ["88.00", "87.78", "0.0200", "0.0290"]  # measured, reported
    assert (
        "- **Noise_ARL**, alone MSE 0.0200 at 88.00 %: highest with `arl+veil`, 0.0500 (2.50×), "
        "-1.00 points.\n" in text
    )
    assert "of the ceiling: `arl+veil` (87 %, accuracy 87.00 %).\n" in text  # 0.05/0.05739
    assert "Do not, it is under 50 %: `arl` (35 %, accuracy 88.00 %)." in text
    assert "No record yet: `none`, " in text


def test_the_seeds_table_is_built_from_its_records(planted: ModuleType) -> None:
    text = planted.with_blocks("<!-- built: seed-003 -->\n<!-- end -->")
    text, _, every = text.partition("### Under every attack\n")
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]
    measured, reported = ["`cem`", "`gated-att`"], ["*cem*", "*gated-att*", "*gated-att tuned*"]
    assert rows == ["row", "---", *measured, *reported]
    assert "MSE does not hold: lower, 0.0200 against 0.0300 (reported higher, 0.0473" in text
    assert "`gated-att`, `cem` differs from the reported `cem`, `gated-att`." in text
    assert "No record yet: `gated-att-simple`, " in text
    assert "| `sparse+gated-att-wire-train` | thin-resnet | 1 | 81.00 | 0.0400 |" in every
    assert "| attack | sparse+gated-att-wire-train |" in every
    assert "aux = train (50,000 images)" in every


def test_the_flagship_stands_beside_the_seeds_rows(planted: ModuleType) -> None:
    source = planted.RESULTS / "cifar10-seed-003" / "cem"
    shutil.copytree(source, planted.RESULTS / "cifar10" / "veil-test90")
    text = planted.seed_003()
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]
    assert rows[2:6] == ["`cem`", "`gated-att`", "`veil-test90`", "*cem*"]


def test_a_table_without_records_says_how_to_make_them(planted: ModuleType) -> None:
    for name in ("table1", "seed-003"):
        shutil.rmtree(planted.RESULTS / f"cifar10-{name}")
        told = f"No records yet: paper/headline.py --table {name} makes them."
        assert planted.BLOCKS[name]() == told


def test_the_remarks_and_commands_of_every_table_are_built(planted: ModuleType) -> None:
    assert "**cifar10-table1**" in planted.rebuild()
    assert "**cifar10-seed-003**" in planted.rebuild()
    assert "cifar10-table1, `arl`: flagged" in planted.remarks()


def test_a_flag_names_the_attack_it_was_raised_for(script: ModuleType) -> None:
    flags = [
        {"name": "decoder not converged", "seen": "the loss of k-query still fell, not decoder's"},
        {"name": "one draw of a random channel", "seen": "two sendings differ in the mean"},
    ]
    record = {"attacks": {"mean": {}, "decoder": {}, "k-query": {}}, "flags": flags}
    other = record | {"flags": [flags[0] | {"seen": "decoder has MSE 0.1"}]}
    one, two = Record.from_dict(record), Record.from_dict(other)
    assert script.flagged(Group("row", ((one, two), (Record.from_dict({}),)))) == [
        "“decoder not converged” (`decoder`, `k-query`)",
        "“one draw of a random channel”",
    ]


def test_the_commands_of_two_rows_name_two_runs(script: ModuleType) -> None:
    """Rows of several tables had runs of one name: to follow the page must not mix them."""
    for line in script.rebuild().splitlines():
        if line.startswith("splitveil train"):
            name = line.split("--name ")[1].split()[0].strip("'")
        elif line.startswith("splitveil audit"):
            assert shlex.split(line)[2] == f"runs/{name}"
    told = re.findall(r"--name (\S+)", script.rebuild())
    assert len(told) == len(set(told)) > 40
