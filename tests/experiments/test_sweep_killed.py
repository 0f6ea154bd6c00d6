"""Twelve real trials, killed in the middle and resumed: none is lost, none is done twice."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from splitveil.io import Json
from splitveil.runs import load_run

STEEP = 1e30  # a learning rate at which every training diverges: its trials fail
SWEEP = (
    "--dataset", "digits", "--defence", "none", "--defence", "noise",
    "--vary", "noise_std=0.05,0.2", "--vary", f"lr=0.1,{STEEP}", "--vary", "batch_size=128,256",
    "--net", "client:strided-4s2-4-c1", "--trials", "6", "--epochs", "1", "--profile", "smoke",
    "--attack", "linear", "--name", "cut", "--json",
)  # fmt: skip
PATIENCE = 240.0


def start(folder: Path, *words: str) -> "subprocess.Popen[bytes]":
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("ab") as err:
        return subprocess.Popen(
            [sys.executable, "-m", "splitveil", "sweep", *words],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=out,
            stderr=err,
        )


def written(trials: Path) -> dict[str, Json]:
    """What the trials' files say, by label."""
    told = [
        json.loads(file.read_text()) | {"run": file.parent} for file in trials.glob("*/trial.json")
    ]
    return {one["label"]: one for one in told}


def family(pid: int) -> set[int]:
    """The processes below one, and it."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(") ")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            parents[int(stat.parent.name)] = int(parent)
    found = {pid}
    while more := {p for p, up in parents.items() if up in found} - found:
        found |= more
    return found & parents.keys()


def words(pid: int) -> bytes:
    """A process's command line; Ray's agents stay a minute longer, but run no trials."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def kill_after(process: "subprocess.Popen[bytes]", trials: Path, count: int) -> None:
    """SIGKILL once so many trials have their file; then nobody stays who could write."""
    until = time.monotonic() + PATIENCE
    while len(written(trials)) < count and process.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    assert process.poll() is None, (trials.parents[2] / "stderr").read_text()
    members = {m for m in family(process.pid) if b"Agent" not in words(m)}
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    until = time.monotonic() + PATIENCE
    while any(member in family(member) for member in members) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(member in family(member) for member in members)


def stamps(entries: dict[str, Json]) -> dict[str, int]:
    """When the models of the trials that came to their end were written."""
    return {
        label: (one["run"] / "checkpoint.safetensors").stat().st_mtime_ns
        for label, one in entries.items()
        if one["error"] is None
    }


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_killed_sweep_loses_and_repeats_no_trial(jobs: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "cut"
    trials = folder / "trials"
    kill_after(start(tmp_path, *SWEEP, "--jobs", jobs), trials, 5)
    before = written(trials)
    assert 5 <= len(before) < 12
    times = stamps(before)

    again = start(tmp_path, "--resume", "--name", "cut", "--jobs", jobs, "--json")
    # Trials with the steep learning rate fail, which the exit code tells.
    assert again.wait(timeout=PATIENCE) == 3, (tmp_path / "stderr").read_text()
    result = json.loads((tmp_path / "stdout").read_text())
    assert all((tmp_path / made).is_file() for made in result.pop("files"))
    assert result == json.loads((folder / "result.json").read_text())
    assert sorted(row["trial"] for row in result["trials"]) == [
        f"{defence}/{number}" for defence in ("noise", "none") for number in range(6)
    ]
    told = {
        json.dumps([row[key] for key in ("defence", "settings", "seed")], sort_keys=True)
        for row in result["trials"]
    }
    assert len(told) == 12
    assert stamps(before) == times

    failed = [row for row in result["trials"] if "error" in row]
    assert [row["settings"]["lr"] for row in failed] == [STEEP] * len(failed)
    assert 0 < len(failed) < 12
    assert all("training diverged" in row["error"] for row in failed)
    best = result["front"][0]
    run = load_run(best["run"])
    assert run.path.parent == trials
    assert run.config.seed == best["seed"]
    assert json.loads((run.path / "trial.json").read_text())["found"]["mse"] == best["mse"]
