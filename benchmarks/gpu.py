"""Everything this repository still has to measure on a GPU, as named steps.

python benchmarks/gpu.py                                 all steps that have no result yet
python benchmarks/gpu.py --list                          the steps, and which are done
python benchmarks/gpu.py --steps tests step              these steps only
python benchmarks/gpu.py --jobs 3 --stop-after 1500      trainings side by side; end in time

A step writes one JSON file to benchmarks/results/gpu/ when it has ended; trainings also put their
records into results/. A step that has its file is left out, and an interrupted training continues:
call the command again until nothing is owed. What has no file here is not measured, and no page may
claim it.
"""

import argparse
import json
import math
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STORE = ROOT / "benchmarks" / "results" / "gpu"
sys.path.insert(0, str(ROOT))

from paper.headline import place  # noqa: E402 - found from the repository's root
from paper.headline_rows import TABLES  # noqa: E402
from splitveil.io import write_text  # noqa: E402
from splitveil.provenance import device_name, versions  # noqa: E402

RESULT = "RESULT"  # in a command: the file that it writes its result to
DATA = ("--data-dir", "DATA")  # in a command: where the images are; left out if not given
LEFT = "LEFT"  # in a command: seconds that are left

# Rows of the reference documents' experiment that need three seeds, the most important first.
DOCUMENT_ROWS = (
    "sparse+cem", "sparse+gated-att-simple", "sparse+gated-att", "sparse", "sparse+slot-cross",
    "sparse+gated-att-tuned",
)  # fmt: skip
DOCUMENT_SEEDS = (0, 1, 2)
REPORTED_ROWS = ("sparse+cem", "sparse+gated-att-simple")


@dataclass(frozen=True, kw_only=True)
class Step:
    """A measurement.

    Args:
        name: Of the step, and of its file.
        minutes: On an H200, about.
        command: Without the interpreter.
        alone: Times something, so nothing may run beside it.
        record: The record that it leaves, whose main figures become its result.
    """

    name: str
    minutes: float
    command: tuple[str, ...]
    alone: bool = True
    record: Path | None = None

    def done(self, store: Path) -> bool:
        """Whether its result is stored."""
        return self.file(store).is_file() or (self.record is not None and self.record.is_file())

    def file(self, store: Path) -> Path:
        """Where its result goes."""
        return store / f"{self.name}.json"


def timed(name: str, minutes: float, script: str, *options: str) -> Step:
    """A script of this folder that writes its own JSON."""
    command = (f"benchmarks/{script}", RESULT, "--device", "cuda", *options)
    return Step(name=name, minutes=minutes, command=command)


def training(table: str, name: str, seed: int, audit: int = 0) -> Step:
    """One training and one attack of a row of paper/headline.py."""
    chosen = TABLES[table]
    row = next(row for row in chosen.rows if row.name == name)
    called = name if table == "alone" else f"{table}-{name}{'-train' * audit}"
    return Step(
        name=f"{called}-s{seed}",
        minutes=row.length / 3,
        command=("-m", "paper.headline", "--table", table, "--rows", name, "--seeds", str(seed),
                 *["--attacks-first-only"] * (audit == 0), "--compile", "--stop-after", LEFT,
                 *DATA),
        alone=False,
        record=place(ROOT / "results" / chosen.folder, row, seed, row.audits[audit]),
    )  # fmt: skip


def documents() -> list[Step]:
    """One training and attack of each row and seed of the reference documents' experiment.

    Then the rows that R3 reports under the attacker who knows the training set, where the run of
    the first part is there; elsewhere it is trained again.
    """
    first = [training("documents", name, s) for s in DOCUMENT_SEEDS for name in DOCUMENT_ROWS]
    return first + [
        training("documents", name, s, 1) for s in DOCUMENT_SEEDS for name in REPORTED_ROWS
    ]


def steps() -> list[Step]:
    """All steps, in the order in which they run."""
    return [
        Step(name="tests", minutes=3, command=("-m", "pytest", "-q", "-m", "gpu", "tests")),
        timed("step", 1, "step_speed.py", "--batch", "512"),
        timed("step-batch128", 1, "step_speed.py", "--batch", "128"),
        timed("surrogates", 1, "surrogate_speed.py"),
        timed("laptop-to-standard", 9, "profile_gap.py", *DATA),
        *(training("alone", row.name, seed) for seed in (0, 1, 2) for row in TABLES["alone"].rows),
        *(
            training(f"frontier-{track}-standard", "early-exit", seed)
            for track in ("b1", "b5")
            for seed in (0, 1, 2)
        ),
        *documents(),
    ]


def filled(step: Step, result: Path, data: str | None, left: float) -> list[str]:
    """The step's command line, with its places filled in.

    >>> step = Step(name="a", minutes=1, command=("-m", "x", "--stop-after", LEFT, *DATA))
    >>> filled(step, Path("r"), None, 9.5)[1:]
    ['-m', 'x', '--stop-after', '9']
    """
    words = list(step.command)
    if data is None and DATA[1] in words:
        at = words.index(DATA[1])
        del words[at - 1 : at + 1]
    seconds = "2000000" if left == math.inf else str(int(left))
    places = {RESULT: str(result), DATA[1]: str(data), LEFT: seconds}
    return [sys.executable, *(places.get(word, word) for word in words)]


def found_by(step: Step, result: Path, said: str) -> dict[str, Any]:
    """What a step found: its own JSON, the main figures of its record, or its last line."""
    if result.is_file():
        own: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return own
    if step.record is not None:
        record = json.loads(step.record.read_text(encoding="utf-8"))
        best = record["strongest"]
        return {"record": str(step.record.relative_to(ROOT)), "accuracy": record["accuracy"],
                "mse": best["mse"], "by": best["mse_by"]}  # fmt: skip
    return {"said": said.strip().splitlines()[-1]}


def run_step(step: Step, store: Path, device: str, *, data: str | None, end: float) -> str:
    """Run one step and store its result; one line that says how it went."""
    if time.monotonic() >= end:
        return f"{step.name}: no time left"
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = filled(step, result, data, end - time.monotonic())
        began = time.monotonic()
        try:
            made = subprocess.run(  # noqa: S603 - our own scripts
                command, cwd=ROOT, capture_output=True, text=True, check=False,
                timeout=None if end == math.inf else max(1.0, end + 30 - began),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"{step.name}: stopped at the time limit"
        if made.returncode:
            return f"{step.name}: failed\n{(made.stdout + made.stderr)[-2000:]}"
        if step.record is not None and not step.record.is_file():
            return f"{step.name}: interrupted, saved"
        found = {
            "step": step.name, "command": shlex.join(["python", *step.command]),
            "seconds": round(time.monotonic() - began, 1), "device": device,
            "versions": versions(), "found": found_by(step, result, made.stdout),
        }  # fmt: skip
    store.mkdir(parents=True, exist_ok=True)
    write_text(step.file(store), json.dumps(found, indent=2) + "\n")
    return f"{step.name}: done in {found['seconds']} s"


def listing(all_steps: Sequence[Step], store: Path) -> str:
    """A line per step: its name, whether it is done, and about how long it takes."""
    return "\n".join(
        f"{step.name:40} {'done' if step.done(store) else f'owed, about {step.minutes:.0f} min'}"
        for step in all_steps
    )


def main() -> int:
    """Run what is owed; 1 if a step failed, 2 if nothing can begin."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", nargs="+", help="default: all that are owed")
    parser.add_argument("--list", action="store_true", help="print the steps and end")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at once")
    parser.add_argument("--stop-after", type=float, default=math.inf, metavar="SECONDS")
    parser.add_argument("--data-dir", help="folder with the CIFAR-10 files")
    parser.add_argument("--out", type=Path, default=STORE, help="folder for the results")
    options = parser.parse_args()
    known = {step.name: step for step in steps()}
    if wrong := [name for name in options.steps or () if name not in known]:
        parser.error(f"no step {', '.join(wrong)}; choose from {', '.join(known)}")
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {options.jobs}")
    if options.list:
        print(listing(list(known.values()), options.out))
        return 0
    import torch

    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; --list shows what is owed")
    device, end = device_name(torch.device("cuda")), time.monotonic() + options.stop_after
    chosen = [known[name] for name in options.steps or known]
    owed = [step for step in chosen if not step.done(options.out)]

    def work(step: Step) -> str:
        return run_step(step, options.out, device, data=options.data_dir, end=end)

    said = []
    for step in owed:
        if step.alone:
            said.append(work(step))
            print(said[-1], flush=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        for line in pool.map(work, [step for step in owed if not step.alone]):
            said.append(line)
            print(line, flush=True)
    return int(any(": failed" in line for line in said))


if __name__ == "__main__":
    raise SystemExit(main())
