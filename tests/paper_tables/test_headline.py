"""The script that makes the tables' records: its plans, what it continues, how it ends."""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from paper_tables.made import Called, Planned
from safetensors.torch import save_file
from typer.main import get_command

from splitveil.cli.app import app

RECORD = Path(__file__).parents[2] / "results" / "digits" / "cem" / "seed0" / "record.json"


def options(folder: Path, **others: object) -> argparse.Namespace:
    usual = {
        "table": "headline",
        "runs_dir": str(folder / "r"),
        "out": str(folder / "o"),
        "data_dir": None,
        "profile": "smoke",
        "attacks_first_only": False,
        "compile": False,
        "seeds": [0],
    }
    return argparse.Namespace(**(usual | others))


def half_trained(run: Path, *, epoch: int, saved: int) -> None:
    """A run of two epochs, ten steps each."""
    run.mkdir(parents=True)
    (run / "config.toml").write_text("epochs = 2\n")
    line = json.dumps({"kind": "epoch", "epoch": epoch, "step": 10 * epoch})
    (run / "metrics.jsonl").write_text(line + '\n{"kind": "step", "ep')
    state = {"state": json.dumps({"step": saved})}
    save_file(
        {"w": torch.zeros(1)},
        run / "checkpoint.safetensors",
        metadata={"format": "splitveil-1", **state},
    )


def test_every_row_is_trained_once_per_seed_and_audited(planned: Planned, tmp_path: Path) -> None:
    commands = planned("--out", str(tmp_path))
    trained = [c for c in commands if c[1] == "train"]
    recipes = [c[c.index("--recipe") + 1] for c in trained]
    assert len(trained) == 3 * len(set(recipes))
    assert all("--final" in c for c in trained)
    for name in ("none", "noise", "cem", "gated-att", "slot-cross", "arl-cem", "veil"):
        assert recipes.count(f"cifar10-{name}") == 3
    audits = [c for c in commands if c[1] == "audit"]
    assert len([c for c in audits if "test90" in c]) == 3
    seconds = [c[2] for c in audits if c[-1] == "1"]
    assert {Path(run).name.rpartition("-s")[0] for run in seconds} == {"cem", "veil"}


def test_within_a_seed_the_longest_training_starts_first(planned: Planned, tmp_path: Path) -> None:
    words = ("--rows", "none", "arl+cem", "veil", "--seeds", "1", "0", "--train-only")
    commands = planned("--out", str(tmp_path), *words)
    names = [c[c.index("--name") + 1] for c in commands]
    assert names == ["veil-s1", "arl+cem-s1", "none-s1", "veil-s0", "arl+cem-s0", "none-s0"]


def test_only_the_main_audits_or_only_audits(planned: Planned, tmp_path: Path) -> None:
    words = ("--out", str(tmp_path), "--rows", "veil", "--seeds", "0")
    assert [c[1] for c in planned(*words)] == ["train", "audit", "audit", "audit"]
    assert planned(*words, "--audit-only", "--runs-dir", str(tmp_path)) == []  # nothing trained
    half_trained(tmp_path / "veil-s0", epoch=2, saved=20)
    audits = planned(*words, "--audit-only", "--runs-dir", str(tmp_path))
    assert [c[1] for c in audits] == ["audit"] * 3
    main = planned(*words, "--attacks-first-only")
    assert [c[1] for c in main] == ["train", "audit"]
    assert main[1][-4:] == ["--aux", "train", "--seed", "0"]


def test_a_record_that_exists_is_not_made_again(planned: Planned, tmp_path: Path) -> None:
    place = tmp_path / "none" / "seed0" / "record.json"
    place.parent.mkdir(parents=True)
    place.write_text('{"audit": {"profile": "standard"}}')
    commands = planned("--out", str(tmp_path), "--rows", "none", "--seeds", "0", "1")
    assert [c[1] for c in commands] == ["train", "audit"]
    assert commands[1][2] == "runs/none-s1"


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("checkpoint.safetensors", b"torn", "checkpoint.safetensors is broken"),
        ("config.toml", b"epochs = ", "config.toml is not valid TOML"),
        ("config.toml", b"seed = 1", "not files of a training: KeyError('epochs')"),
    ],
)
def test_a_broken_run_stops_everything_before_training(
    file: str, content: bytes, why: str, in_folder: Path, called: Called
) -> None:
    half_trained(in_folder / "r" / "none-s1", epoch=1, saved=10)
    (in_folder / "r" / "none-s1" / file).write_bytes(content)
    code, _, err = called("--rows", "none", "--runs-dir", "r", "--out", "o")
    assert code == 2
    assert err.startswith("error: cannot continue the run r/none-s1: ")
    assert why in err
    assert err.endswith("; remove the folder to train it again\n")
    assert err.count("\n") == 1
    assert [folder.name for folder in (in_folder / "r").iterdir()] == ["none-s1"]


def test_a_log_with_a_stray_line_is_read(script: ModuleType, tmp_path: Path) -> None:
    half_trained(tmp_path / "run", epoch=1, saved=10)
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as log:
        log.write(b'\n[1]\n{"step": 3}\n\xff\n')
    assert script.epochs(tmp_path / "run") == (1, 2)


@pytest.mark.parametrize(
    ("epoch", "saved", "done"),
    [(2, 20, True), (1, 15, False), (2, 19, False)],  # the last one: killed before it was saved
)
def test_a_run_is_finished_when_its_last_epoch_is_saved(
    epoch: int, saved: int, done: bool, script: ModuleType, tmp_path: Path
) -> None:
    half_trained(tmp_path / "run", epoch=epoch, saved=saved)
    assert script.finished(tmp_path / "run") is done
    assert script.epochs(tmp_path / "run") == (2 if done else 1, 2)
    assert script.epochs(tmp_path / "nothing") == (0, 0)


def test_an_interrupted_run_continues_or_starts_again(script: ModuleType, tmp_path: Path) -> None:
    row = script.TABLES["table1"].rows[0]
    assert not {"--resume", "--overwrite"} & set(script.plan(row, 0, options(tmp_path)).train)
    run = tmp_path / "r" / "none-s0"
    half_trained(run, epoch=1, saved=10)
    job = script.plan(row, 0, options(tmp_path))
    assert job.train[-1] == "--resume"
    assert [c[0] for c in job.commands()] == ["train", "audit"]
    (run / "checkpoint.safetensors").unlink()
    assert script.plan(row, 0, options(tmp_path)).train[-1] == "--overwrite"


def test_a_trained_run_is_not_trained_again(script: ModuleType, tmp_path: Path) -> None:
    half_trained(tmp_path / "r" / "none-s0", epoch=2, saved=20)
    job = script.plan(script.TABLES["headline"].rows[0], 0, options(tmp_path))
    assert [c[0] for c in job.commands()] == ["audit"]


def test_the_end_says_what_is_done_and_what_is_missing(script: ModuleType, tmp_path: Path) -> None:
    half_trained(tmp_path / "r" / "veil-s0", epoch=1, saved=10)
    for place in ("veil/seed0", "veil-test90/seed0"):
        (tmp_path / "o" / place).mkdir(parents=True)
        (tmp_path / "o" / place / "record.json").write_text("{}")
    rows = [row for row in script.TABLES["headline"].rows if row.name in ("none", "veil")]
    assert script.standing(rows, options(tmp_path)).splitlines() == [
        "row   seed  epochs  records  missing",
        "none  0     –       0/1      train 0",
        "veil  0     1/2     2/3      train 1",
    ]


def test_at_the_limit_a_command_is_interrupted_and_may_save(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.write_text(
        # as a training does, it listens also where the shell had interrupts ignored
        f"#!{sys.executable} -IS\nimport signal, time\n"
        f"def save(*_): open({str(tmp_path / 'saved')!r}, 'w').close(); raise SystemExit\n"
        "signal.signal(signal.SIGINT, save)\ntime.sleep(60)\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(script.Stopped):
        script.call(["train"], script.Times(float("inf"), time.monotonic() + 3.0))
    assert (tmp_path / "saved").exists()
    with pytest.raises(script.Stopped):
        script.call(["train"], script.Times(float("inf"), time.monotonic() - 1.0))


def test_nothing_begins_after_its_time(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nothing/there")
    with pytest.raises(script.Stopped):
        script.call(["audit"], script.Times(time.monotonic() - 1.0, float("inf")))
    with pytest.raises(OSError, match="nothing"):
        script.call(["audit"], script.Times(time.monotonic() + 60.0, float("inf")))


def test_a_failing_row_is_named_and_the_exit_code_is_1(
    tmp_path: Path, called: Called, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho no archive >&2\nexit 2\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    out, runs = str(tmp_path / "o"), str(tmp_path / "r")
    code, said, err = called("--rows", "none", "--seeds", "0", "--out", out, "--runs-dir", runs)
    assert code == 1
    assert err.startswith("failed: splitveil train --recipe cifar10-none")
    assert err.endswith("no archive\n\n")
    assert "none  0     –       0/1      train 0" in said
    assert not (tmp_path / "o").exists()


def test_a_row_is_trained_audited_and_its_records_stored(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, out = tmp_path / "r" / "cem-s0", tmp_path / "o" / "cem" / "seed0"
    told: list[str] = []

    def call(command: Sequence[str], times: object) -> None:
        del times
        told.append(f"{command[0]} {command[-1]}")
        if command[0] == "train":
            half_trained(run, epoch=2, saved=20)
        else:
            (run / "record.json").write_text(RECORD.read_text(encoding="utf-8"))

    monkeypatch.setattr(script, "call", call)
    words = ["--rows", "cem", "--seeds", "0", "--out", str(out.parents[1]), "--profile", "quick"]
    monkeypatch.setattr(sys, "argv", ["headline.py", *words, "--runs-dir", str(run.parent)])
    sys.argv.append("--attacks-first-only")
    assert script.main() == 0
    assert told == [f"train {run.parent}", "audit 0"]
    assert capsys.readouterr().out.endswith("cem  0     2/2     1/2      train 1\n")
    sys.argv.pop()
    assert script.main() == 0
    assert told[2:] == ["audit 1"]
    assert capsys.readouterr().out.endswith("cem  0     2/2     2/2\n")
    stored = json.loads((out / "attack1" / "record.json").read_text())
    command = "splitveil audit runs/cem-s0 --profile quick --aux train --seed 1"
    assert stored["audit"].pop("command") == command
    made = json.loads(RECORD.read_text(encoding="utf-8"))
    made["audit"].pop("command")
    assert stored == made
    assert json.loads((out / "last_epoch.json").read_text())["epoch"] == 2


def test_ctrl_c_begins_nothing_more(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    told: list[str] = []
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a job of the background

    def call(command: Sequence[str], times: object) -> None:
        del times
        told.append(command[0])
        time.sleep(0.2)  # until the others wait for it
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)  # as long as a training takes to save itself
        raise RuntimeError("interrupted")

    monkeypatch.setattr(script, "call", call)
    words = ["--rows", "none", "--seeds", "0", "1", "2", "--out", str(tmp_path / "o")]
    monkeypatch.setattr(sys, "argv", ["headline.py", *words, "--runs-dir", str(tmp_path / "r")])
    assert script.main() == 130
    assert told == ["train"]
    shown = capsys.readouterr()
    assert (
        shown.err == "interrupted: running trainings are saved; the same command continues them\n"
    )
    assert "none  2     –       0/1      train 0" in shown.out


def test_the_commands_use_options_that_exist(planned: Planned, tmp_path: Path) -> None:
    known = {
        name: {word for param in command.params for word in param.opts}
        for name, command in get_command(app).commands.items()  # type: ignore[attr-defined]
    }
    for table in ("headline", "table1", "documents"):
        for command in planned("--table", table, "--out", str(tmp_path), "--data-dir", "d"):
            assert {word for word in command if word.startswith("--")} <= known[command[1]]
