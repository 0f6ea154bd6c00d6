"""The README and docs/results.md: their numbers come from record files, their links resolve."""

import importlib.util
import io
import json
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from splitveil.config import make_config
from splitveil.runs import flat_config
from splitveil.settings import parse_pair

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "docs" / "results.md"
RECORDS = sorted((ROOT / "results").rglob("record.json"))
PLACES = {"data_dir", "runs_dir"}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme", ROOT / "scripts" / "readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


@pytest.mark.parametrize("page", [README, RESULTS], ids=lambda p: p.name)
def test_pages_are_those_of_the_records(page: Path, script: ModuleType) -> None:
    """Run `python scripts/readme.py` when this fails."""
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


def test_the_figure_is_that_of_the_records(script: ModuleType) -> None:
    """Run `python scripts/readme.py` when this fails; other font rendering moves few pixels."""
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
    assert folder.parent.parent.name == record["config"]["dataset"]
    assert not PLACES & set(record["config"])


@pytest.mark.parametrize("path", RECORDS, ids=lambda p: str(p.parent.relative_to(ROOT / "results")))
def test_the_command_of_a_record_builds_its_settings(path: Path, script: ModuleType) -> None:
    record = read(path)
    program, command, *words = shlex.split(script.train_command(record))
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
