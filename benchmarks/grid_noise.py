"""What noise on a grid changes: accuracy and attacks on one run, with floating point and the grid.

python benchmarks/grid_noise.py RUN OUT.json [--sendings 4] [--fits 3] [--aux 20000] [--scored 2000]

The same checkpoint sends the test images with the noise of its training and with that of a deployed
client. `linear` and the `decoder` of profile `quick` are fitted on training images and scored on
test images; the decoder once.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import splitveil as sv
from splitveil.attacks.profiles import PROFILES
from splitveil.nets.channel import deployed
from splitveil.provenance import command, device_name, versions
from splitveil.rng import stream
from splitveil.threat import Attack, Labelled, Observation, Victim


def accuracy(victim: Victim, head: Callable[[Tensor], Tensor], test: Labelled, seed: int) -> float:
    """Share of right answers of one sending of all test images."""
    generator, right = stream(seed, "accuracy"), 0
    parts = zip(torch.split(test.images, 1000), torch.split(test.labels, 1000), strict=True)
    with torch.no_grad():
        for x, y in parts:
            right += int((head(victim.send(x, generator)).argmax(1) == y).sum())
    return right / len(test)


def error(victim: Victim, attack: Attack, aux: Labelled, test: Labelled, seed: int) -> float:
    """MSE of an attack on one sending."""
    fitted = attack.fit(victim.black_box(), aux, stream(seed, "attack"))
    seen = Observation(victim.send(test.images, stream(seed, "sent")), test.labels)
    rebuilt = getattr(fitted, "reconstruct", fitted)(seen)
    return float((rebuilt - test.images).square().mean())


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sendings", type=int, default=4)
    parser.add_argument("--fits", type=int, default=3)
    parser.add_argument("--aux", type=int, default=20_000)
    parser.add_argument("--scored", type=int, default=2000)
    options = parser.parse_args()
    run = sv.load_run(options.run)
    data, splits = run.data()
    model, test = run.model.eval(), data.labelled(splits.test)
    aux = data.labelled(splits.train[: options.aux])
    scored = data.labelled(splits.test[: options.scored])
    attacks = PROFILES["quick"]
    rows = []
    for noise, channel in (("floating point", model.channel), ("grid", deployed(model.channel))):
        victim = Victim(model.encoder, channel)
        row = {
            "noise": noise,
            "accuracy": [accuracy(victim, model.head, test, s) for s in range(options.sendings)],
            "linear": [
                error(victim, attacks["linear"], aux, scored, s) for s in range(options.fits)
            ],
            "decoder": error(victim, attacks["decoder"], aux, scored, 0),
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
    found = {
        "suite": "grid", "dataset": run.config.dataset, "defence": run.config.defence,
        "seed": run.config.seed, "epochs": run.config.epochs, "noise_std": run.noise_std,
        "aux": len(aux), "scored": len(scored), "command": command(),
        "device": device_name(torch.device("cpu")), "versions": versions(), "rows": rows,
    }  # fmt: skip
    options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
