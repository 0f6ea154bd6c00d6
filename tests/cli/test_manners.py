"""What every command owes its user: examples, headings, one name for one thing, a way to go on."""

import os
import re
import subprocess
import sys
from typing import Any

import pytest
import typer
from cli.calling import call, text

from splitveil.cli import console
from splitveil.cli.app import LONG, MANY, PANELS, app

COMMANDS: dict[str, Any] = {
    name: command
    for name, command in getattr(typer.main.get_command(app), "commands").items()  # noqa: B009
    if not command.hidden
}


def options_of(command: Any) -> list[Any]:  # noqa: ANN401 - typer keeps a click of its own
    return [p for p in command.params if p.param_type_name == "option" and not p.hidden]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_an_example_and_its_many_options_stand_below_headings(name: str) -> None:
    command = COMMANDS[name]
    assert re.search(rf"Example: `splitveil {name}\b", command.help)
    options = options_of(command)
    panels = {option.rich_help_panel for option in options}
    if len(options) > MANY:
        assert None not in panels, [o.opts for o in options if o.rich_help_panel is None]
        assert len(panels) > 2


def test_every_heading_is_of_an_option_that_there_is() -> None:
    known = {word for command in COMMANDS.values() for o in options_of(command) for word in o.opts}
    listed = [f"--{option}" for options in PANELS.values() for option in options]
    assert set(listed) <= known
    assert len(listed) == len(set(listed))


def test_one_thing_has_one_name() -> None:
    """What 0.1.0 called otherwise works still, and is not shown."""
    known = {name: {w for o in options_of(c) for w in o.opts} for name, c in COMMANDS.items()}
    for name, words in known.items():
        assert not words & {"--attack", "--lambda", "--output", "--language", "--cuda"}, name
        assert "--json" in words or name == "bench"
    assert {n for n, words in known.items() if "--attacks" in words} == {"audit", "sweep"}
    assert {"--data", "--dataset"} <= known["audit-encoder"]


STARTED = {  # the fewest words with which a long command begins its work
    "demo": [], "train": ["--dataset", "digits"], "audit": ["x"], "audit-encoder": ["a:b"],
    "audit-wire": ["x", "y"], "replay": ["x"], "sweep": [], "reproduce": ["gated-att-report"],
    "advise": ["--dataset", "digits", "--macs", "1e6"],
    "clients": ["--macs", "1e6", "--wire", "64", "--rank", "--dataset", "digits"],
}  # fmt: skip
GOES_ON = {
    "train": "add --resume", "sweep": "add --resume, and --name if it has one",
    "audit-encoder": "repeat the command; it begins anew",
    "replay": "repeat the command; it begins anew",
}  # fmt: skip


def stopped_by(error: BaseException, name: str, patch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401
    def stop() -> None:
        raise error

    patch.setattr(console, "start", stop)
    patch.setattr(console, "setup_logging", stop)
    return call(name, *STARTED[name])


def test_every_long_command_is_tried() -> None:
    assert set(STARTED) == LONG


@pytest.mark.parametrize("name", STARTED)
def test_ctrl_c_says_how_to_go_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = stopped_by(KeyboardInterrupt(), name, monkeypatch)
    assert result.exit_code == 130
    assert f"To continue, {GOES_ON.get(name, 'repeat the command')}" in text(result)


@pytest.mark.parametrize("name", STARTED)
def test_a_failed_command_says_how_to_go_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = stopped_by(MemoryError(), name, monkeypatch)
    assert result.exit_code == 2
    again = GOES_ON.get(name, "repeat the command")
    assert f"To continue once that is mended, {again}." in text(result)


def test_a_narrow_terminal_wraps_and_no_color_has_no_colour() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "splitveil", "recipes"], capture_output=True, check=True, text=True,
        env=os.environ | {"COLUMNS": "60", "NO_COLOR": "1", "FORCE_COLOR": "1"},
    ).stdout  # fmt: skip
    assert not re.search(r"\x1b\[(?:\d+;)*(?:3|9)\d", told)
    plain = re.sub(r"\x1b\[[\d;]*m", "", told)
    assert max(map(len, plain.splitlines())) <= 60
    assert "digits-veil" in plain
