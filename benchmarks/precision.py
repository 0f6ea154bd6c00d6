"""How far bfloat16 is from float32: accuracy and strongest attack, over seeds.

python benchmarks/precision.py OUT.json [--dataset digits] [--seeds 0 1 2] [--threads 1]

Every pair is trained and attacked in float32, then both in bfloat16, with all else equal.
`--attacks` leaves out all other attacks. Runs and records that are in `--runs-dir` are used again.
"""

import argparse
import json
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch

import splitveil as sv
from splitveil.provenance import command, device_name, versions

PRECISIONS: tuple[Literal["float32", "bf16"], ...] = ("float32", "bf16")


def main() -> None:
    """Train, audit, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--defences", nargs="+", default=["none", "veil"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--client")
    parser.add_argument("--profile", default="quick")
    parser.add_argument("--attacks", nargs="*", default=["linear", "decoder"])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--data-dir")
    parser.add_argument("--runs-dir")
    options = parser.parse_args()
    rows = []
    with TemporaryDirectory() as scratch:
        place = Path(options.runs_dir or scratch)
        for seed in options.seeds:
            for defence in options.defences:
                for precision in PRECISIONS:
                    name = f"{options.dataset}-{defence}-{precision}-s{seed}"
                    config = sv.RunConfig(
                        dataset=options.dataset, defence=defence, seed=seed, name=name,
                        precision=precision, epochs=options.epochs, client=options.client,
                        threads=options.threads, data_dir=options.data_dir, runs_dir=str(place),
                        device="cpu",
                    )  # fmt: skip
                    rows.append(row_of(config, options))
                    print(*rows[-1].values(), flush=True)
    found = {
        "suite": "precision", "dataset": options.dataset, "profile": options.profile,
        "attacks": options.attacks, "command": command(),
        "device": device_name(torch.device("cpu")), "versions": versions(), "rows": rows,
        "means": [mean_of(rows, d, p) for d in options.defences for p in PRECISIONS],
    }  # fmt: skip
    options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def row_of(config: sv.RunConfig, options: argparse.Namespace) -> dict[str, Any]:
    """One pair, trained and attacked in its precision."""
    there = (config.folder / "checkpoint.safetensors").is_file()
    run = sv.load_run(config.folder) if there else sv.fit(config, overwrite=True)
    record = run.record
    made = None if record is None else record.audit
    if made is None or (made.profile, made.precision) != (options.profile, config.precision):
        record = run.audit(
            options.profile, only=options.attacks, precision=config.precision,
            threads=options.threads,
        )  # fmt: skip
    if record is None:
        raise RuntimeError(f"{config.folder} has no record")
    best = record.strongest
    return {
        "defence": config.defence, "precision": config.precision, "seed": config.seed,
        "accuracy": record.accuracy, "mse": best.mse, "by": best.mse_by,
    }  # fmt: skip


def mean_of(rows: list[dict[str, Any]], defence: str, precision: str) -> dict[str, Any]:
    """Mean and standard deviation over the seeds of one defence in one precision."""
    some = [r for r in rows if (r["defence"], r["precision"]) == (defence, precision)]
    said: dict[str, Any] = {"defence": defence, "precision": precision, "n": len(some)}
    for key in ("accuracy", "mse"):
        values = [row[key] for row in some]
        said[key] = statistics.mean(values)
        said[f"{key}_sd"] = statistics.stdev(values) if len(values) > 1 else None
    return said


if __name__ == "__main__":
    main()
