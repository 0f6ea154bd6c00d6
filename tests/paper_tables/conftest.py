"""The script that makes the tables' records, and the commands it would run."""

import importlib
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest
from paper_tables.made import Called, Planned


@pytest.fixture
def script() -> ModuleType:
    return importlib.import_module("paper.headline")


@pytest.fixture
def called(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Called:
    """What the script says when it is called: exit code, output, errors."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["headline.py", *words])
        code = script.main()
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def planned(called: Called) -> Planned:
    """The commands that the script would run."""

    def run(*words: str) -> list[list[str]]:
        code, out, _ = called("--dry-run", *words)
        assert code == 0
        return [shlex.split(line) for line in out.splitlines()]

    return run


@pytest.fixture
def in_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path
