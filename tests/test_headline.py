"""The script that rebuilds the headline table: its plan, and one row of it for real."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "headline.py"


def planned(*words: str) -> list[list[str]]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--dry-run", *words],
        capture_output=True,
        text=True,
        check=True,
    )
    return [shlex.split(line) for line in done.stdout.splitlines()]


def test_every_row_is_trained_once_per_seed_and_audited(tmp_path: Path) -> None:
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


def test_a_record_that_exists_is_not_made_again(tmp_path: Path) -> None:
    place = tmp_path / "none" / "seed0" / "record.json"
    place.parent.mkdir(parents=True)
    place.write_text("{}")
    commands = planned("--out", str(tmp_path), "--rows", "none", "--seeds", "0", "1")
    audits = [c[2] for c in commands if c[1] == "audit"]
    assert audits == ["runs/none-s1"]


def test_a_failing_row_is_named_and_the_exit_code_says_so(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    missing.mkdir()
    (missing / "cifar-10-binary.tar.gz").write_bytes(b"no archive")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--rows", "none", "--seeds", "0",
         "--out", str(tmp_path / "o"), "--runs-dir", str(tmp_path / "r"),
         "--data-dir", str(missing)],
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "failed: splitveil train --recipe cifar10-none" in done.stderr
    assert not (tmp_path / "o").exists()


def test_a_run_that_exists_is_audited_and_its_record_stored(tmp_path: Path) -> None:
    run = tmp_path / "r" / "none-s0"
    words = ["train", "--dataset", "digits", "--defence", "none", "--epochs", "1", "--runs-dir",
             str(run.parent), "--name", run.name, "--device", "cpu"]  # fmt: skip
    subprocess.run([sys.executable, "-m", "splitveil", *words], check=True, capture_output=True)
    subprocess.run(
        [sys.executable, str(SCRIPT), "--rows", "none", "--seeds", "0", "--profile", "smoke",
         "--out", str(tmp_path / "o"), "--runs-dir", str(run.parent)],
        check=True,
        capture_output=True,
    )  # fmt: skip
    record = json.loads((tmp_path / "o" / "none" / "seed0" / "record.json").read_text())
    assert record["config"]["dataset"] == "digits"
    command = "splitveil audit runs/none-s0 --profile smoke --aux train --seed 0"
    assert record["audit"]["command"] == command
    assert json.loads((tmp_path / "o" / "none" / "seed0" / "last_epoch.json").read_text())
