"""The list of what the reference documents say: every row leads to something that is there."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from splitveil.cli.app import COMMANDS
from splitveil.config.resolve import build_defence, make_config
from splitveil.config.run_config import DOCUMENT_NAMES, RUN_KEYS
from splitveil.defences.catalogue import DEFENCES
from splitveil.errors import ConfigError

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "statements.md"
NAMES = ROOT / "docs" / "reference" / "document-names.md"
ERRATA = ROOT / "docs" / "project" / "errata.md"
COUNTS = {0: 45, 1: 54, 2: 27, 3: 47, 4: 34}  # statements of R0 to R4
OURS = ("gated-att", "gated-att-simple", "gated-att-trace", "slot-cross")
COMMAND_NAMES = {c.__name__.replace("_", "-") for commands in COMMANDS.values() for c in commands}


class Statement(NamedTuple):
    """A row of the list."""

    number: str
    text: str
    state: str
    where: str


def read_statements() -> list[Statement]:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| R")]
    return [Statement(*row) for row in rows]


STATEMENTS = read_statements()
each = pytest.mark.parametrize("row", STATEMENTS, ids=lambda row: row.number)


def section(anchor: str) -> str:
    """The text of a section of the errata."""
    for part in ERRATA.read_text(encoding="utf-8").split("\n## "):
        title = part.partition("\n")[0].lower().replace(" ", "-")
        if title == anchor:
            return part
    raise AssertionError(f"errata has no section {anchor}")


def test_no_statement_is_missing() -> None:
    expected = [f"R{d}.{n}" for d, count in COUNTS.items() for n in range(1, count + 1)]
    assert [row.number for row in STATEMENTS] == expected
    assert len(expected) == 207


@each
def test_a_statement_holds_or_is_named_in_the_errata(row: Statement) -> None:
    assert row.text
    if row.state == "errata":
        found = re.fullmatch(r"\[errata\]\(\.\./project/errata\.md#([\w-]+)\): (.+)", row.where)
        assert found
        assert f"| {found[2]} " in section(found[1]) or f"| {found[2]}," in section(found[1])
        return
    assert row.state == "as said"
    link = re.fullmatch(r"\[[^\]]+\]\(([^)#]+)(#[^)]+)?\)", row.where)  # anchors: see the links
    if link:
        assert (PAGE.parent / link[1]).is_file()
        return
    name = row.where.strip("`")
    if name.startswith("splitveil "):
        assert name.removeprefix("splitveil ") in COMMAND_NAMES
    elif "/" in name:
        assert (ROOT / name).is_file()
    else:
        assert name in RUN_KEYS or any(name in DEFENCES[d].settings() for d in OURS)


def table_rows(title: str) -> list[list[str]]:
    """The rows of a section of the page of names."""
    part = NAMES.read_text(encoding="utf-8").split(f"## {title}")[1].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")]
    return rows[1:]


def test_every_setting_is_reached_by_its_name_in_the_documents() -> None:
    """Those that have the same name; the others are answered, or stand beside ours on the page."""
    reached = set()
    for row in table_rows("Parameters") + table_rows("Switches"):
        for name in re.findall(r"`([\w.]+)`", row[0]):
            homes = [d for d in OURS if name in DEFENCES[d].settings()]
            for defence in homes:
                value = DEFENCES[defence].settings()[name]
                config = make_config({"dataset": "digits", "defence": defence, name: value})
                assert build_defence(config).settings()[name] == value
            if homes:
                reached.add(name)
            elif name not in DOCUMENT_NAMES:
                assert len(row) > 2, f"{name} is neither a setting nor explained"
    assert {"var_threshold", "eps", "lambd", "attention_loss_scale", "num_slots", "snr_sharp",
            "class_gate_b", "early_gate_thresh", "slot_power", "margin_m"} <= reached  # fmt: skip


def test_the_noise_has_the_name_of_the_documents_too() -> None:
    config = make_config({"dataset": "digits", "defence": "gated-att", "reg_strength": 0.2})
    assert config.noise_std == 0.2


@pytest.mark.parametrize("name", sorted(DOCUMENT_NAMES))
def test_a_name_that_is_another_one_here_is_answered(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{re.escape(name)}' has another name here; "):
        build_defence(make_config({"dataset": "digits", "defence": "slot-cross", name: 1}))
