"""Twelve real trials, killed in the middle and resumed: none is lost, none is done twice."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from splitveil.runs import load_run
from splitveil.types import Json

STEEP = 1e30  # a learning rate at which every training diverges: its trials fail
SWEEP = (
    "--dataset", "digits", "--defence", "none", "--defence", "noise",
    "--vary", "noise_std=0.05,0.2", "--vary", f"lr=0.1,{STEEP}", "--vary", "batch_size=128,256",
    "--net", "client:strided-4s2-4-c1", "--trials", "6", "--epochs", "1", "--profile", "smoke",
    "--attack", "linear", "--jobs", "2", "--name", "cut", "--json",
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


def lines(journal: Path) -> int:
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


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


def kill_after(process: "subprocess.Popen[bytes]", journal: Path, count: int) -> None:
    """SIGKILL once the journal has so many lines; then nobody stays who could write."""
    until = time.monotonic() + PATIENCE
    while lines(journal) < count and process.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    assert process.poll() is None, (journal.parents[2] / "stderr").read_text()
    members = {m for m in family(process.pid) if b"Agent" not in words(m)}
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert len(members) > 2
    until = time.monotonic() + PATIENCE
    while any(member in family(member) for member in members) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(member in family(member) for member in members)


def stamps(folder: Path, entries: list[Json]) -> dict[str, int]:
    """When the finished trials' models were written."""
    runs = [e["run"] for e in entries if e["run"] is not None]
    return {r: (folder / r / "checkpoint.safetensors").stat().st_mtime_ns for r in runs}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "ray"])
def test_a_killed_sweep_goes_on_without_losing_or_repeating_a_trial(
    engine: str, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "cut"
    journal, trials = folder / "journal.jsonl", folder / "trials"
    kill_after(start(tmp_path, *SWEEP, "--engine", engine), journal, 5)
    kept = journal.read_bytes()
    before = [json.loads(line) for line in kept.splitlines()]
    assert 5 <= len(before) < 12
    times = stamps(trials, before)
    journal.write_bytes(kept + b'{"defence": "noi')  # as if it was killed while it wrote

    again = start(
        tmp_path, "--resume", "--name", "cut", "--jobs", "2", "--engine", engine, "--json"
    )
    assert again.wait(timeout=PATIENCE) == 0, (tmp_path / "stderr").read_text()
    whole = journal.read_bytes()
    assert whole.startswith(kept)
    written = [json.loads(line) for line in whole.splitlines()]
    entries = list({(e["defence"], e["number"]): e for e in written}.values())
    tried_again = [e for e in before if e["error"] is not None]
    assert len(written) == len(entries) + len(tried_again)
    assert sorted((e["defence"], e["number"]) for e in entries) == [
        (defence, number) for defence in ("noise", "none") for number in range(6)
    ]
    told = {json.dumps([e["defence"], e["settings"], e["seed"]], sort_keys=True) for e in entries}
    assert len(told) == 12
    assert stamps(trials, before) == times

    failed = [e for e in entries if e["error"] is not None]
    assert [e["settings"]["lr"] for e in failed] == [STEEP] * len(failed)
    assert 0 < len(failed) < 12
    assert all("training diverged" in e["error"] for e in failed)
    result = json.loads((tmp_path / "stdout").read_text())
    assert result == json.loads((folder / "result.json").read_text())
    assert len(result["trials"]) == 12
    assert result["front"]
    best = result["front"][0]
    run = load_run(best["run"])
    assert run.path.parent == trials
    assert run.config.seed == best["seed"]
    assert json.loads((run.path / "trial.json").read_text())["found"]["mse"] == best["mse"]
