"""Tables, figure and commands of the pages are those of the records."""

import io
import json
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from paper import tables
from paper.commands import train_command
from paper.headline_rows import TABLES
from splitveil.config.resolve import flat_config, make_config
from splitveil.config.run_config import parse_pair
from splitveil.record.groups import Group
from splitveil.record.schema import Record

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
COMMANDS = ROOT / "docs" / "project" / "results" / "commands.md"


@cache
def records() -> dict[Path, dict[str, Any]]:
    paths = sorted(tables.RESULTS.rglob("record.json"))
    return {path: json.loads(path.read_text(encoding="utf-8")) for path in paths}


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda p: p.name)
def test_tables_are_those_of_the_records(page: Path) -> None:
    """Run `python -m paper.tables` when this fails."""
    text = page.read_text(encoding="utf-8")
    assert tables.with_blocks(text) == text
    assert text.count("<!-- built: ") == text.count("<!-- end -->") >= 1


def test_every_block_stands_in_a_page() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in tables.PAGES)
    assert {m[1] for m in tables.BLOCK.findall(pages)} == set(tables.BLOCKS)
    with pytest.raises(KeyError):
        tables.with_blocks("<!-- built: other -->\n<!-- end -->")
    assert tables.with_blocks("no block") == "no block"


def test_every_row_is_in_a_table_and_has_its_command() -> None:
    pages = {page: page.read_text(encoding="utf-8") for page in tables.PAGES}
    text = "".join(told for page, told in pages.items() if page != COMMANDS)
    for path in records():
        row = next(p for p in path.parents if p.parent.parent == tables.RESULTS)
        assert f"| `{row.name}` |" in text, path
        assert f"# {row.name}: training seeds" in pages[COMMANDS], path


def test_table_1_has_every_row_of_its_folder() -> None:
    found = {group.name for group in tables.found("cifar10-table1").groups}
    assert found == {row.name for row in TABLES["table1"].rows}


def test_the_readme_and_the_results_stay_short() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    assert len(text.split()) <= 900
    assert len(tables.SUMMARY) <= 7
    results = (ROOT / "docs" / "project" / "results.md").read_text(encoding="utf-8")
    assert len(results.split()) <= 1200


def test_the_links_of_the_readme_resolve() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text(encoding="utf-8")):
        assert target.startswith("http") or (ROOT / target).exists(), target


@pytest.mark.slow
def test_the_figures_are_those_of_the_records() -> None:
    """Run `python -m paper.tables figure` when this fails; other fonts move few pixels."""
    for name, png in tables.figures().items():
        drawn, kept = (
            np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)
            for data in (png, (tables.IMAGES / f"{name}.png").read_bytes())
        )
        assert drawn.shape == kept.shape, name
        assert (np.abs(drawn - kept).max(-1) > 96).mean() < 1e-4, name


def test_a_record_lies_where_its_seeds_say() -> None:
    for path, record in records().items():
        folder, seeds = path.parent, record["seeds"]
        if folder.name.startswith("attack"):
            assert folder.name == f"attack{seeds['attack']}", path
            folder = folder.parent
        assert folder.name == f"seed{seeds['train']}" == f"seed{record['config']['seed']}", path
        place, dataset = folder.parent.parent.name, record["config"]["dataset"]
        assert place == dataset or place.startswith(f"{dataset}-"), path
        assert not {"data_dir", "runs_dir"} & set(record["config"]), path


def test_the_command_of_a_record_builds_its_settings() -> None:
    alike = {
        json.dumps(r["config"] | {"seed": 0, "name": ""}): (p, r) for p, r in records().items()
    }
    for path, record in alike.values():
        command = train_command(Record.from_dict(record), record["config"]["name"])
        program, verb, *words = shlex.split(command)
        assert (program, verb) == ("splitveil", "train")
        options: dict[str, Any] = {"final": "--final" in words}
        words = [word for word in words if word != "--final"]
        for key, value in zip(words[::2], words[1::2], strict=True):
            name, parsed = parse_pair(value if key == "--set" else f"{key[2:]}={value}")
            options[name] = parsed
        built = flat_config(make_config(options))
        for key, value in record["config"].items():
            if key in built and key != "device":
                assert built[key] == value, (path, key)


def test_no_two_commands_train_a_run_of_one_name() -> None:
    told = re.findall(r"^splitveil train .*--name (\S+)", tables.commands(), re.MULTILINE)
    audited = re.findall(r"^splitveil audit (\S+)", tables.commands(), re.MULTILINE)
    assert len(told) == len(set(told)) > 40
    assert [f"runs/{name.strip(chr(39))}" for name in told] == [a.strip("'") for a in audited]


def test_a_flag_names_the_attack_it_was_raised_for() -> None:
    flags = [
        {"name": "decoder not converged", "seen": "the loss of k-query still fell, not decoder's"},
        {"name": "one draw of a random channel", "seen": "two sendings differ in the mean"},
    ]
    record = {"attacks": {"mean": {}, "decoder": {}, "k-query": {}}, "flags": flags}
    other = record | {"flags": [flags[0] | {"seen": "decoder has MSE 0.1"}]}
    one, two = Record.from_dict(record), Record.from_dict(other)
    assert tables.flagged(Group("row", ((one, two), (Record.from_dict({}),)))) == (
        "decoder not converged (`decoder`, `k-query`); one draw of a random channel"
    )
