"""What settings do to the recipe `cifar10-laptop-none`: accuracy on validation images, CPU seconds.

python benchmarks/recipe_settings.py OUT.json [--arms plain nesterov] [--seeds 0 1] [--epochs 4]

An arm is the recipe with some settings changed. Rows that OUT.json has already are left out: call
it again to continue, with other arms, seeds or epochs.
"""

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import splitveil as sv
from splitveil.config.resolve import merge
from splitveil.io import write_text
from splitveil.provenance import command, device_name, versions
from splitveil.record.files import last_epoch
from splitveil.runs import flush_denormals

ARMS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"nesterov": False},
    "nesterov": {"nesterov": True},
    "flips": {"nesterov": False, "flips": "alternating"},
    "nesterov-float32": {"nesterov": True, "precision": "float32"},
}


def main() -> None:
    """Train, print, write after every row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--arms", nargs="+", default=["plain", "nesterov", "flips"], choices=ARMS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--epochs", nargs="+", type=int, default=[4])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--data-dir")
    options = parser.parse_args()
    flush_denormals()
    torch.set_num_threads(options.threads)
    rows = json.loads(options.out.read_text())["rows"] if options.out.is_file() else []
    done = {(row["arm"], row["seed"], row["epochs"]) for row in rows}
    todo = [(a, s, e) for e in options.epochs for s in options.seeds for a in options.arms]
    for arm, seed, epochs in todo:
        if (arm, seed, epochs) in done:
            continue
        with TemporaryDirectory() as scratch:
            settings = {
                "name": arm, "runs_dir": scratch, "data_dir": options.data_dir, "device": "cpu",
                "seed": seed, "epochs": epochs, "threads": options.threads, "precision": "bf16",
                **ARMS[arm],
            }  # fmt: skip
            began = time.process_time()
            run = sv.fit(merge("cifar10-laptop-none", None, [], settings), overwrite=True)
            seconds, last = time.process_time() - began, last_epoch(run.path)
        rows.append(
            {"arm": arm, "seed": seed, "epochs": epochs, "val_accuracy": last["val_accuracy"],
             "cpu_seconds": round(seconds, 1)}
        )  # fmt: skip
        print(*rows[-1].values(), flush=True)
        found = {
            "suite": "settings", "recipe": "cifar10-laptop-none", "command": command(),
            "device": device_name(torch.device("cpu")), "versions": versions(), "rows": rows,
        }  # fmt: skip
        write_text(options.out, json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
