"""Keys and values of what the commands print with `--json` are those of 0.1.0."""

import json
from pathlib import Path
from typing import Any

import pytest
from golden.face import GOLDEN, ROOT, differences, told
from golden.outputs import OUTPUTS, key_facts


def stored(name: str) -> Any:  # noqa: ANN401 - any JSON value
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", OUTPUTS)
def test_output_is_as_stored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert not list(differences(stored(f"json/{name}.json"), told(*OUTPUTS[name])))


def test_every_stored_output_is_asked_for() -> None:
    assert {path.stem for path in (GOLDEN / "json").iterdir()} == set(OUTPUTS)


def test_the_doctor_finds_in_planted_runs_what_it_found(tmp_path: Path) -> None:
    for number, (name, planted) in enumerate(stored("doctor.json").items()):
        run = tmp_path / f"run{number}"
        run.mkdir()
        for file, text in planted["files"].items():
            (run / file).write_text(text, encoding="utf-8")
        found = told("doctor", run)
        assert found.pop("run") == str(run)
        assert not list(differences(planted["doctor"], found)), name


@pytest.mark.slow
def test_commands_that_measure_print_the_same_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not list(differences(stored("json_keys.json"), key_facts(tmp_path)))
