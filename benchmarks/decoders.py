"""Decoders against each other in equal time, on three validation clients of CIFAR-10.

python benchmarks/decoders.py OUT.json [--arms S2C96 N8C64] [--seconds 300] [--data-dir DIR]

Clients of the recipe `cifar10-laptop` are trained without a defence, with noise, with `veil`. Each
decoder is fitted on the training images for the same CPU seconds (its steps follow from a probe)
and scored on validation images. `N8C64-16` is the published decoder with its 16 epochs, however
long they take. Rows that OUT.json has already are left out: call it again to continue.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch

import splitveil as sv
from splitveil.attacks.decoder import Decoder
from splitveil.attacks.profiles import PROFILES
from splitveil.audits.target import Target
from splitveil.audits.trained_run import open_run
from splitveil.config.resolve import merge
from splitveil.io import write_text
from splitveil.provenance import command, device_name, versions
from splitveil.rng import stream
from splitveil.runs import flush_denormals
from splitveil.threat import Observation

CLIENTS = {"none": {}, "noise": {"noise_std": 0.1}, "veil": {}}
LAPTOP = PROFILES["laptop"]["decoder"]
PUBLISHED = PROFILES["standard"]["decoder"]
assert isinstance(LAPTOP, Decoder)  # noqa: S101 - for the type checker
assert isinstance(PUBLISHED, Decoder)  # noqa: S101
ARMS = {
    "S2C64": LAPTOP,
    "S2C96": replace(LAPTOP, width=96),
    "S2C128": replace(LAPTOP, width=128),
    "S4C64": replace(LAPTOP, width=64, blocks=4),
    "N2C64": replace(PUBLISHED, blocks=2),
    "N8C64": PUBLISHED,
    "N8C64-16": PUBLISHED,
}
PROBE = (5, 10, 50)  # steps; the first fit pays for what is made once


def timed(target: Target, decoder: Decoder) -> tuple[float, float]:
    """MSE on the scored images and CPU seconds of a fit."""
    began = time.process_time()
    fitted = decoder.fit(target.victim.black_box(), target.aux, stream(0, "attack/decoder"))
    seconds = time.process_time() - began
    seen = Observation(target.sent.z, target.scored.labels)
    return float((fitted.reconstruct(seen) - target.scored.images).square().mean()), seconds


def steps_of(target: Target, decoder: Decoder, seconds: float) -> int:
    """Steps that take so many CPU seconds, by two short fits."""
    _, few, more = (timed(target, replace(decoder, epochs=0, min_steps=n))[1] for n in PROBE)
    if more <= few:
        raise SystemExit(f"{PROBE[2]} steps took no longer than {PROBE[1]}: try again")
    return round(seconds * (PROBE[2] - PROBE[1]) / (more - few))


def trained(defence: str, options: argparse.Namespace) -> sv.Run:
    """The client, from the runs folder if it is there."""
    place = Path(options.runs_dir) / f"decoders-{defence}"
    if (place / "checkpoint.safetensors").is_file():
        return sv.load_run(place)
    settings = {
        "defence": defence, "name": place.name, "runs_dir": options.runs_dir, "seed": options.seed,
        "epochs": options.epochs, "data_dir": options.data_dir, "device": "cpu",
        "threads": options.threads, **CLIENTS[defence],
    }  # fmt: skip
    return sv.fit(merge("cifar10-laptop-none", None, [], settings), overwrite=True)


def main() -> None:
    """Train, fit, print, write after every row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--arms", nargs="+", default=["S2C64", "S2C96", "N8C64"], choices=ARMS)
    parser.add_argument("--clients", nargs="+", default=list(CLIENTS), choices=CLIENTS)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", default="auto", choices=["auto", "float32", "bf16"])
    parser.add_argument("--data-dir")
    parser.add_argument("--runs-dir", default="runs")
    options = parser.parse_args()
    flush_denormals()
    torch.set_num_threads(options.threads)
    rows = json.loads(options.out.read_text())["rows"] if options.out.is_file() else []
    done = {(row["arm"], row["client"]) for row in rows}
    for client in options.clients:
        run = trained(client, options)
        target, facts = open_run(run, aux="val", precision=options.precision)
        for arm in options.arms:
            if (arm, client) in done:
                continue
            decoder = replace(ARMS[arm], precision=facts.precision)
            if not arm.endswith("-16"):
                steps = steps_of(target, decoder, options.seconds)
                decoder = replace(decoder, epochs=0, min_steps=steps)
            steps = decoder.budget.steps(len(target.aux))
            mse, seconds = timed(target, decoder)
            rows.append(
                {"arm": arm, "client": client, "mse": mse, "cpu_seconds": round(seconds, 1),
                 "steps": steps, "batch": decoder.batch_size, "precision": decoder.precision}
            )  # fmt: skip
            print(*rows[-1].values(), flush=True)
            found = {
                "suite": "decoders", "dataset": "cifar10", "aux": len(target.aux),
                "scored": len(target.scored), "epochs": options.epochs, "seed": options.seed,
                "seconds": options.seconds, "command": command(),
                "device": device_name(torch.device("cpu")), "versions": versions(), "rows": rows,
            }  # fmt: skip
            write_text(options.out, json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
