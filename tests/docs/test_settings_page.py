"""`docs/guides/settings.md` lists every setting of a run, with its default and its option."""

import dataclasses
import re
from pathlib import Path

from typer.main import get_command

import splitveil as sv
from splitveil.cli.app import app

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "settings.md"
ROW = re.compile(r"^\| `(\w+)`(?: \(`(--[\w-]+)`\))? \| (.+?) \|", re.MULTILINE)


def rows() -> dict[str, tuple[str, str]]:
    return {key: (option, shown) for key, option, shown in ROW.findall(PAGE.read_text("utf-8"))}


def test_the_rows_are_the_fields() -> None:
    fields = [field.name for field in dataclasses.fields(sv.RunConfig)]
    assert [*rows(), "settings"] == fields


def test_what_they_are_by_themselves() -> None:
    for key, (_, shown) in rows().items():
        value = getattr(sv.RunConfig, key)
        told = str(value).lower() if isinstance(value, bool) else str(value)
        assert value is None or shown.strip("`") == told, key


def test_the_options_are_those_of_train() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    options = {word for param in commands["train"].params for word in param.opts}
    for key, (option, _) in rows().items():
        own = f"--{key.replace('_', '-')}"
        assert option == (own if own in options else ""), key
