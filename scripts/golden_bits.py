"""Check that two source trees train and audit the same, bit for bit, on this machine.

Both trees train every defence of the old tree's catalogue for 40 steps on digits: once in one go,
once stopped half way and resumed. The weights, metrics and settings must be equal. Both then audit
some of the runs and an encoder with the smoke profile. The records must be equal except for times,
versions and places; a tree from before the noise on a grid differs in every audit of a noisy run.
Finally the new tree replays a record of the old tree's run.

Each tree runs in its own process, and only through its public names.

Example: `python scripts/golden_bits.py ../old/src src`
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

EPOCHS = 4  # of ten steps on digits
AUDITED = ("none", "veil", "slot-cross", "vib")
UNEQUAL = ("seconds", "versions", "runs_dir", "data_dir", "device", "command")
ENCODER = """import numpy as np

def send(x):
    z = x.reshape(len(x), 4, 2, 4, 2).mean(axis=(2, 4)).reshape(len(x), 16)
    return z + 0.05 * np.random.standard_normal(z.shape)

def answer(z):
    return z[:, :10].argmax(1)
"""
Json = dict[str, Any]


class HalfwayError(Exception):
    """A training is stopped on purpose."""


def lasting(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Without what differs between two runs of the same code."""
    if isinstance(value, dict):
        return {k: lasting(v) for k, v in value.items() if k not in UNEQUAL and "second" not in k}
    return [lasting(v) for v in value] if isinstance(value, list) else value


def work(names: list[str], audited: list[str], folder: Path) -> None:
    """All trainings and audits of the tree that this process imports, into `facts.json`."""
    import torch

    import splitveil as sv

    def halfway(done: int, total: int, note: str = "") -> None:
        if done * 2 > total:
            raise HalfwayError(note)

    def measured(run: sv.Run) -> Json:
        digest = hashlib.sha256()
        for key, tensor in run.model.state_dict().items():
            digest.update(f"{key} {tuple(tensor.shape)} {tensor.dtype} ".encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        lines = (run.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        settings = (run.path / "config.toml").read_text(encoding="utf-8")
        return {
            "weights": digest.hexdigest(),
            "metrics": [lasting(json.loads(line)) for line in lines],
            "settings": [
                s for s in settings.splitlines() if not s.startswith(("runs_dir", "name"))
            ],
        }

    torch.set_num_threads(1)
    os.chdir(folder)
    facts: Json = {}
    for name in names:
        common: Json = {
            "dataset": "digits", "defence": name, "epochs": EPOCHS, "device": "cpu",
            "runs_dir": "runs",
        }  # fmt: skip
        straight = sv.fit(sv.RunConfig(name=f"{name}-straight", **common))
        facts[f"{name} straight"] = measured(straight)
        config = sv.RunConfig(name=f"{name}-resumed", **common)
        try:
            sv.fit(config, progress=halfway)
        except HalfwayError:
            facts[f"{name} resumed"] = measured(sv.fit(config, resume=True))
        if name in audited:
            record = straight.audit("smoke", fresh=True).to_dict()
            facts[f"{name} audited"] = {"record": lasting(record)}
        print(f"  {name}", file=sys.stderr, flush=True)
    (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


def called(tree: Path, *words: object, folder: Path | None = None) -> str:
    """What a Python process with the tree first on its path prints."""
    env = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(  # noqa: S603
        [sys.executable, *map(str, words)], check=False, env=env, cwd=folder, text=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    if done.returncode > 1:  # 1: a replay that found differences, which it prints
        raise SystemExit(f"{tree}: {words} ended with {done.returncode}")
    return done.stdout


def is_first_edition(tree: Path) -> bool:
    """Whether `audit` of a tree still takes functions and records, as that of 0.1.0."""
    return (tree / "splitveil" / "cli.py").is_file()


def facts_of(tree: Path, names: list[str], audited: list[str], folder: Path) -> Json:
    """Everything about one tree."""
    folder.mkdir()
    (folder / "golden_encoder.py").write_text(ENCODER, encoding="utf-8")
    print(f"{tree}:", file=sys.stderr)
    called(tree, Path(__file__).resolve(), "--work", folder, ",".join(names), ",".join(audited))
    facts: Json = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    if audited:
        command = "audit" if is_first_edition(tree) else "audit-encoder"
        called(
            tree, "-m", "splitveil", command, "golden_encoder:send", "--data", "digits", "--server",
            "golden_encoder:answer", "--noise", "0.05", "--profile", "smoke", "--out", "encoder",
            folder=folder,
        )  # fmt: skip
        text = (folder / "encoder" / "record.json").read_text(encoding="utf-8")
        facts["encoder audited"] = {"record": lasting(json.loads(text))}
    return facts


def first_difference(old: Any, new: Any, at: str = "") -> str:  # noqa: ANN401
    """Where two values differ first; empty where they are equal."""
    if isinstance(old, dict) and isinstance(new, dict) and list(old) == list(new):
        found = (first_difference(old[key], new[key], f"{at}/{key}") for key in old)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        found = (first_difference(a, b, f"{at}/{i}") for i, (a, b) in pairs)
    else:
        same = repr(old) == repr(new)  # of floats all digits, and NaN equals NaN
        return "" if same else f"{at}: {str(old)[:60]} became {str(new)[:60]}"
    return next((line for line in found if line), "")


def replayed(tree: Path, run: Path) -> str:
    """What a tree finds different when it measures a record of the other tree again."""
    record = run / "record.json"
    words = ("audit", run, "--replay", record) if is_first_edition(tree) else ("replay", record)
    told = called(tree, "-m", "splitveil", *words, "--json")
    found = json.loads(told)["differences"]
    return str(found[0]) if found else ""


def compare(old: Path, new: Path, names: list[str], audited: list[str], folder: Path) -> bool:
    """Print a table of all comparisons; whether everything is equal."""
    olds = facts_of(old, names, audited, folder / "old")
    news = facts_of(new, names, audited, folder / "new")
    rows = {
        what: first_difference(olds[what], news[what]) if what in news else "missing"
        for what in olds
    }
    for name in names:
        one, other = news[f"{name} straight"], news[f"{name} resumed"]
        rows[f"{name} straight = resumed"] = first_difference(one["weights"], other["weights"])
    for name in audited[:1]:
        run = folder / "replay" / f"{name}-straight"
        shutil.copytree(folder / "old" / "runs" / run.name, run)
        rows[f"{name} replayed"] = replayed(new, run)
    print("| what | equal | first difference |\n|---|---|---|")
    for what, line in rows.items():
        print(f"| {what} | {'no' if line else 'yes'} | {line} |")
    return not any(rows.values())


def main() -> None:
    """Compare two trees, or do the work of one in a process that was started for it."""
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[3].split(","), sys.argv[4].split(","), Path(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("old", type=Path, help="folder that holds the package, as old/src")
    parser.add_argument("new", type=Path, help="the same of the other tree")
    parser.add_argument("--defences", help="only these, with commas between")
    parser.add_argument("--audits", help="audit runs of these (default: %(default)s; '' for none)",
                        default=",".join(AUDITED))  # fmt: skip
    given = parser.parse_args()
    old, new = given.old.resolve(), given.new.resolve()
    names: list[str] = list(json.loads(called(old, "-m", "splitveil", "defences", "--json")))
    names = given.defences.split(",") if given.defences else names
    audited = [name for name in given.audits.split(",") if name in names]
    with tempfile.TemporaryDirectory() as folder:
        same = compare(old, new, names, audited, Path(folder))
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
