"""The script that makes the tables' records, and the commands it would run."""

import importlib
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest
from paper_tables.made import SCRIPT, Planned


@pytest.fixture
def script() -> ModuleType:
    return importlib.import_module("paper.headline")


@pytest.fixture
def planned(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Planned:
    """The commands that the script would run."""

    def run(*words: str) -> list[list[str]]:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--dry-run", *words])
        assert script.main() == 0
        return [shlex.split(line) for line in capsys.readouterr().out.splitlines()]

    return run


@pytest.fixture
def in_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path
