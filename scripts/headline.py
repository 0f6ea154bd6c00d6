"""Train and audit the rows of the headline table, and put their records into results/.

python scripts/headline.py                       every row, three seeds; hours without a GPU
python scripts/headline.py --rows veil cem --seeds 0 --jobs 4 --runs-dir runs
python scripts/headline.py --dry-run             print the commands

A row that has its record is skipped; one that fails is named at the end and the others go on.
"""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from splitveil.settings import read_toml

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table: a recipe, and which audits each of its seeds gets."""

    name: str
    recipe: str
    attack_seeds: tuple[int, ...] = (0,)
    aux: tuple[str, ...] = ("train",)


ROWS = (
    Row(name="none", recipe="cifar10-none"),
    Row(name="noise", recipe="cifar10-noise"),
    Row(name="cem", recipe="cifar10-cem", attack_seeds=(0, 1)),
    Row(name="veil", recipe="cifar10-veil", attack_seeds=(0, 1), aux=("train", "test90")),
    Row(name="veil-accurate", recipe="cifar10-veil-accurate"),
    Row(name="veil-vgg11", recipe="cifar10-veil-vgg11"),
    Row(name="gated-att", recipe="cifar10-gated-att"),
    Row(name="slot-cross", recipe="cifar10-slot-cross"),
    Row(name="arl+cem", recipe="cifar10-arl-cem"),
    Row(name="arl+veil", recipe="cifar10-arl-veil"),
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training, and the audits that follow it, each with the place of its record."""

    train: tuple[str, ...]
    audits: tuple[tuple[tuple[str, ...], Path], ...]
    run: Path


def plan(row: Row, seed: int, options: argparse.Namespace) -> Job:
    """The commands of a row's seed; audits whose record exists are left out."""
    name = f"{row.name}-s{seed}"
    places = ["--runs-dir", options.runs_dir]
    places += ["--data-dir", options.data_dir] if options.data_dir else []
    train = ("train", "--recipe", row.recipe, "--seed", str(seed), "--name", name, "--final")
    audits = []
    for aux in row.aux:
        folder = Path(options.out) / (row.name if aux == "train" else f"{row.name}-{aux}")
        for attack in row.attack_seeds if aux == "train" else (0,):
            target = folder / f"seed{seed}" / (f"attack{attack}" if attack else "") / "record.json"
            command = (
                "audit", f"{options.runs_dir}/{name}", "--profile", options.profile,
                "--aux", aux, "--seed", str(attack),
            )  # fmt: skip
            if not target.is_file():
                audits.append((command, target))
    run = Path(options.runs_dir) / name
    return Job(train=(*train, *places), audits=tuple(audits), run=run)


def call(words: Sequence[str]) -> None:
    """Run a command of splitveil; its output is shown only if it fails."""
    done = subprocess.run(  # noqa: S603 - our own program
        [sys.executable, "-m", "splitveil", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"splitveil {shlex.join(words)}\n{done.stdout}{done.stderr}")


def last_epoch(run: Path) -> str:
    """The last epoch's line of a run's log; empty before the first."""
    log = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return next((line for line in reversed(log) if json.loads(line)["kind"] == "epoch"), "")


def finished(run: Path) -> bool:
    """Whether a run was trained to its end."""
    config, line = read_toml(run / "config.toml"), last_epoch(run)
    return bool(line) and json.loads(line)["epoch"] == config["epochs"]


def work(job: Job) -> str:
    """Train if there is no run yet, audit, copy the records."""
    if not job.audits:
        return f"{job.run.name}: all records exist"
    if not (job.run / "checkpoint.safetensors").is_file():
        call(job.train)
    elif not finished(job.run):
        call((*job.train, "--resume"))
    said = []
    for command, target in job.audits:
        call(command)
        record = json.loads((job.run / "record.json").read_text(encoding="utf-8"))
        record["audit"]["command"] = shlex.join(
            ["splitveil", "audit", f"runs/{job.run.name}", *command[2:]]
        )
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        last = target.parent / "last_epoch.json"
        last.write_text(last_epoch(job.run) + "\n", encoding="utf-8")
        best = record["strongest"]
        said.append(
            f"{target.parent}: {100 * record['accuracy']:.2f} % / {best['mse']:.4f} "
            f"by {best['mse_by']}"
        )
    return "\n".join(said)


def main() -> int:
    """Parse, plan, run; 1 if a row failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [row.name for row in ROWS]
    parser.add_argument("--rows", nargs="+", choices=names, default=names)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="trainings and audits at once")
    parser.add_argument("--profile", default="standard")
    parser.add_argument("--runs-dir", default="runs")
    parser.add_argument("--data-dir")
    parser.add_argument("--out", default=str(ROOT / "results" / "cifar10"))
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    chosen = [row for name in options.rows for row in ROWS if row.name == name]
    jobs = [plan(row, seed, options) for seed in options.seeds for row in chosen]
    if options.dry_run:
        for job in jobs:
            for words in (job.train, *(command for command, _ in job.audits)):
                sys.stdout.write(f"splitveil {shlex.join(words)}\n")
        return 0
    failed = 0
    if shutil.which("nvidia-smi") is None and options.jobs > 1:
        sys.stderr.write("no GPU found: several jobs at once will be slow\n")
    with ThreadPoolExecutor(options.jobs) as pool:
        for future in [pool.submit(work, job) for job in jobs]:
            try:
                sys.stdout.write(f"{future.result()}\n")
            except RuntimeError as err:
                failed += 1
                sys.stderr.write(f"failed: {err}\n")
            sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
