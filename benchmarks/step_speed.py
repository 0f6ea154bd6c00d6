"""What a surrogate adds to a full training step: ratios to the plain step, within one run.

python benchmarks/step_speed.py OUT.json [--net vgg11] [--batch 128] [--repeats 5] [--device cpu]

On a GPU every row is measured twice, as written (eager) and replayed from a captured graph, and
one step of each runs under `torch.cuda.set_sync_debug_mode("error")`. Plain and penalised steps
alternate, so that a change of clock meets both.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from lightning_fabric import Fabric

from splitveil.config.resolve import TrainParts
from splitveil.config.run_config import RunConfig
from splitveil.defences.base import PenaltyPlan
from splitveil.defences.catalogue import DEFENCES
from splitveil.nets.catalogue import NETS
from splitveil.nets.split import SplitModel, cut
from splitveil.provenance import device_name, versions
from splitveil.surrogates.kmeans_cem import KMeansCEM
from splitveil.surrogates.rate import Rate
from splitveil.train.step import StepLoss, Stepper, TrainSet, Weights, new_state

SHAPE, CLASSES, IMAGES, NOISE = (3, 32, 32), 10, 4096, 0.025
PRESETS = ("rate", "veil", "gated-att", "slot-cross", "cem")


def steps_of(name: str | None, net: str, fabric: Fabric, *, capture: bool) -> Stepper:
    """A stepper with the surrogate of preset `name`, or none."""
    torch.manual_seed(0)
    defence = DEFENCES["veil" if name in (None, "rate") else str(name)]
    entry = NETS[net]
    model: SplitModel = cut(entry.build(SHAPE, CLASSES), entry.cut_at, defence.channel(NOISE))
    wire = model.wire_floats(SHAPE)
    surrogate = defence.surrogate(wire, CLASSES, NOISE)
    plan = defence.penalty_plan()
    if name == "rate":
        surrogate = Rate(wire, CLASSES, noise_std=NOISE)
    if name is None:
        surrogate, plan = None, PenaltyPlan()
    images = torch.randint(256, (IMAGES, *SHAPE), dtype=torch.uint8).to(fabric.device)
    labels = torch.randint(CLASSES, (IMAGES,)).to(fabric.device)
    if surrogate is not None:
        surrogate.to(fabric.device)
    if isinstance(surrogate, KMeansCEM):
        surrogate.refit(torch.rand(IMAGES, wire, device=fabric.device), labels)
    state = new_state(TrainParts(model, surrogate, penalty=plan), RunConfig(), fabric.device)
    model.train()
    data = TrainSet(images=images, labels=labels, crop_pad=0, flip=False)
    return Stepper(StepLoss(model, state, fabric), data, capture=capture)


def measure(
    net: str, batch: int, repeats: int, fabric: Fabric, *, capture: bool
) -> list[dict[str, object]]:
    """Best milliseconds of a step for the plain net and each preset, interleaved."""
    device = fabric.device
    on_gpu = device.type == "cuda"
    steppers = {n or "plain": steps_of(n, net, fabric, capture=capture) for n in (None, *PRESETS)}
    weights = {n: None if n == "plain" else Weights(0.3, 1.0) for n in steppers}
    rows = torch.arange(batch, device=device)
    inner = 20 if on_gpu else 1
    best = dict.fromkeys(steppers, float("inf"))
    for name, step in steppers.items():
        for _ in range(8 if on_gpu else 1):
            step(rows, 0.01, weights[name])
        if on_gpu:
            torch.cuda.set_sync_debug_mode("error")
            step(rows, 0.01, weights[name])
            torch.cuda.set_sync_debug_mode("default")
    for _ in range(repeats):
        for name, step in steppers.items():
            if on_gpu:
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(inner):
                step(rows, 0.01, weights[name])
            if on_gpu:
                torch.cuda.synchronize()
            best[name] = min(best[name], 1000 * (time.perf_counter() - start) / inner)
    mode = "captured" if capture else "eager"
    return [
        {"surrogate": n, "mode": mode, "best_ms": ms, "ratio": ms / best["plain"],
         "images_per_second": round(1000 * batch / ms), "repeats": repeats}
        for n, ms in best.items()
    ]  # fmt: skip


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--net", default="vgg11")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_flush_denormal(True)
    on_gpu = options.device == "cuda"
    fabric = Fabric(
        accelerator=options.device, devices=1, precision="bf16-mixed" if on_gpu else "32-true"
    )
    rows = []
    for capture in (False, True) if on_gpu else (False,):
        rows += measure(options.net, options.batch, options.repeats, fabric, capture=capture)
    for row in rows:
        print(f"{row['mode']:>9} {row['surrogate']:>12} {row['best_ms']:9.3f} ms  "
              f"×{row['ratio']:.3f}  {row['images_per_second']} images/s", flush=True)  # fmt: skip
    found = {"suite": "step", "net": options.net, "batch": options.batch,
             "device": device_name(fabric.device), "versions": versions(), "rows": rows,
             "ratios": {f"{r['surrogate']} {r['mode']}": r["ratio"] for r in rows}}  # fmt: skip
    options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
