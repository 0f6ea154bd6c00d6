"""Train and audit the rows of a table, and put their records into results/.

python -m paper.headline                       the headline table, three seeds; hours without GPU
python -m paper.headline --table table1        Table 1 of the CEM paper; or controls, documents
python -m paper.headline --table frontier-b1   one track by the laptop recipe; hours on two cores
python -m paper.headline --rows veil cem --seeds 0 --jobs 4 --runs-dir runs
python -m paper.headline --stop-after 560      end in time, and save what is under way
python -m paper.headline --dry-run             print the commands

A record is stored as soon as it is made. A row that has its records is skipped, and an interrupted
one continues: call it again until nothing is missing. If one row fails, the others go on.
"""

import argparse
import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paper.headline_options import GRACE_S, parse
from paper.headline_rows import TABLES, Audit, Row
from splitveil.config.run_config import read_toml
from splitveil.errors import RunError, SplitVeilError
from splitveil.io import as_run_error, write_text
from splitveil.train.state import read_meta

INTERRUPTED = 130  # as a shell says of Ctrl-C


class Stopped(Exception):  # noqa: N818 - nothing went wrong
    """The time limit is reached."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training and its audits that have no record yet, each with the record's place."""

    run: Path
    train: tuple[str, ...]
    audits: tuple[tuple[tuple[str, ...], Path], ...]

    def commands(self, *, train: bool = True, audit: bool = True) -> list[tuple[str, ...]]:
        """The commands left to run; a run must be trained before it is audited."""
        trained = finished(self.run)
        needed = bool(self.audits) and train and not trained
        audited = audit and (train or trained)
        return [self.train] * needed + [command for command, _ in self.audits if audited]


def place(out: Path, row: Row, seed: int, audit: Audit) -> Path:
    """Where an audit's record goes; one with other attacker's knowledge is a row of its own."""
    folder = row.name if audit.aux == row.audits[0].aux else f"{row.name}-{audit.aux}"
    inner = f"attack{audit.seed}" if audit.seed else ""
    return out / folder / f"seed{seed}" / inner / "record.json"


def profile_of(target: Path) -> str:
    """The audit profile of a stored record."""
    try:
        return str(json.loads(target.read_text(encoding="utf-8"))["audit"]["profile"])
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise RunError(
            f"{target} is not a record: {err!r}; remove it, or choose another --out"
        ) from err


def plan(row: Row, seed: int, options: argparse.Namespace) -> Job:
    """The commands of a row's seed; audits whose record exists are left out."""
    name = f"{row.stem}-s{seed}"
    run = Path(options.runs_dir) / name
    train = ["train", *row.options, "--seed", str(seed), "--name", name]
    train += ["--final"] * TABLES[options.table].final
    train += ["--runs-dir", options.runs_dir]
    train += ["--set", "compile=true"] if options.compile else []
    train += ["--data-dir", options.data_dir] if options.data_dir else []
    if (run / "checkpoint.safetensors").is_file():
        train.append("--resume")
    elif (run / "config.toml").is_file():  # ended before its first checkpoint
        train.append("--overwrite")
    audits = []
    for audit in row.audits[:1] if options.attacks_first_only else row.audits:
        target = place(Path(options.out), row, seed, audit)
        command = (
            "audit", f"{options.runs_dir}/{name}", "--profile", options.profile,
            "--aux", audit.aux, "--seed", str(audit.seed), *["--compile"] * options.compile,
            *(["--attacks", audit.attacks] if audit.attacks else []),
        )  # fmt: skip
        if not target.is_file():
            audits.append((command, target))
        elif (profile := profile_of(target)) != options.profile:
            raise RunError(
                f"{target} exists and has the profile {profile}, not {options.profile}; "
                "choose another --out"
            )
    return Job(run=run, train=tuple(train), audits=tuple(audits))


@dataclass(frozen=True)
class Times:
    """Until when commands may begin, and until when they may run, on the monotonic clock."""

    begin: float
    end: float


def call(command: Sequence[str], times: Times) -> None:
    """Run a command of splitveil; show its output only if it fails.

    At the end time it is interrupted, so that a training saves its state.
    """
    now = time.monotonic()
    left = times.end - now
    if left <= 0 or now > times.begin:
        raise Stopped
    with subprocess.Popen(  # noqa: S603 - our own program
        [sys.executable, "-m", "splitveil", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=None if left == float("inf") else left)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
            raise Stopped from None
    if process.returncode:
        raise RuntimeError(f"splitveil {shlex.join(command)}\n{said}")


def last_epoch(run: Path) -> dict[str, Any]:
    """The last epoch's line of a run's log; empty before the first."""
    try:
        log = (run / "metrics.jsonl").read_bytes().splitlines()
    except OSError:
        return {}
    for line in reversed(log):
        try:
            entry = json.loads(line)
        except ValueError:  # the line that was being written when the run was killed
            continue
        if isinstance(entry, dict) and entry.get("kind") == "epoch":
            return entry
    return {}


def epochs(run: Path) -> tuple[int, int]:
    """Epochs done and planned; both 0 before a run's first checkpoint."""
    checkpoint = run / "checkpoint.safetensors"
    if not checkpoint.is_file():
        return 0, 0
    last = last_epoch(run)
    try:
        saved, planned = read_meta(checkpoint)["step"], read_toml(run / "config.toml")["epochs"]
        done = int(last.get("epoch", 0))
        if last.get("step", 0) > saved:  # killed between the epoch's line and its checkpoint
            done -= 1
        return done, int(planned)
    except (SplitVeilError, KeyError, ValueError, TypeError) as err:
        why = err if isinstance(err, SplitVeilError) else f"not files of a training: {err!r}"
        raise RunError(
            f"cannot continue the run {run}: {why}; remove the folder to train it again"
        ) from err


def finished(run: Path) -> bool:
    """Whether a run was trained to its end."""
    done, planned = epochs(run)
    return 0 < planned == done


def work(job: Job, options: argparse.Namespace, times: Times) -> str:
    """Train what is not trained, audit, store the records."""
    if not job.audits:
        return f"{job.run.name}: all records exist"
    if not finished(job.run):
        if options.audit_only:
            return f"{job.run.name}: not trained yet"
        call(job.train, times)
    if options.train_only:
        return f"{job.run.name}: trained"
    said = []
    for command, target in job.audits:
        call(command, times)
        record = json.loads((job.run / "record.json").read_text(encoding="utf-8"))
        record["audit"]["command"] = shlex.join(
            ["splitveil", "audit", f"runs/{job.run.name}", *command[2:]]
        )
        with as_run_error(target.parent):
            target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target.parent / "last_epoch.json", json.dumps(last_epoch(job.run)) + "\n")
        write_text(target, json.dumps(record, indent=2) + "\n")
        best = record["strongest"]
        said.append(
            f"{target.parent}: {100 * record['accuracy']:.2f} % / {best['mse']:.4f} "
            f"by {best['mse_by']}"
        )
    return "\n".join(said)


def standing(rows: Sequence[Row], options: argparse.Namespace) -> str:
    """What is done and what is missing, one line per row and seed."""
    lines = [("row", "seed", "epochs", "records", "missing")]
    for seed in options.seeds:
        for row in rows:
            done, planned = epochs(Path(options.runs_dir) / f"{row.stem}-s{seed}")
            lacking = [
                a for a in row.audits if not place(Path(options.out), row, seed, a).is_file()
            ]
            lines.append(
                (
                    row.name,
                    str(seed),
                    f"{done}/{planned}" if planned else "–",
                    f"{len(row.audits) - len(lacking)}/{len(row.audits)}",
                    ", ".join(f"{audit.aux} {audit.seed}" for audit in lacking),
                )
            )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    padded = ("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in padded)


def main() -> int:
    """Parse, plan, run, say what is missing; 1 if a row failed, 2 if nothing could begin."""
    options = parse()
    try:
        return make(options)
    except SplitVeilError as err:
        sys.stderr.write(f"error: {err}\n")
        return 2


def make(options: argparse.Namespace) -> int:
    """Make the records that are missing; 1 if a row failed."""
    now = time.monotonic()
    times = Times(now + options.begin_until, now + options.stop_after)
    rows = [row for row in TABLES[options.table].rows if row.name in options.rows]
    longest_first = sorted(rows, key=lambda row: -row.length)
    jobs = [plan(row, seed, options) for seed in options.seeds for row in longest_first]
    for job in jobs:
        epochs(job.run)  # raises on a broken run before any other is trained
    if options.dry_run:
        todo = [
            each
            for job in jobs
            for each in job.commands(train=not options.audit_only, audit=not options.train_only)
        ]
        sys.stdout.writelines(f"splitveil {shlex.join(each)}\n" for each in todo)
        sys.stderr.write(
            "" if todo else "nothing to do: all records exist, or their runs are not trained yet\n"
        )
        return 0
    if shutil.which("nvidia-smi") is None and options.jobs > 1:
        sys.stderr.write("no GPU found: several jobs at once will be slow\n")
    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            futures = [pool.submit(work, job, options, times) for job in jobs]
            code = 1 if tell(futures) else 0
        except KeyboardInterrupt:  # the running commands got it too, and save their state
            pool.shutdown(wait=False, cancel_futures=True)
            sys.stderr.write(
                "interrupted: running trainings are saved; the same command continues them\n"
            )
            code = INTERRUPTED
    sys.stdout.write(f"\n{standing(rows, options)}\n")
    return code


def tell(futures: Sequence[Future[str]]) -> int:
    """Say what each job did as it ends; how many failed."""
    failed = 0
    for future in as_completed(futures):
        try:
            with suppress(Stopped):
                sys.stdout.write(f"{future.result()}\n")
        except (RuntimeError, SplitVeilError) as err:
            failed += 1
            sys.stderr.write(f"failed: {err}\n")
        sys.stdout.flush()
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
