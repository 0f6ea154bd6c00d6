"""Speed of the surrogates: ratios within one run, because absolute times vary with the machine.

python benchmarks/surrogate_speed.py OUT.json [--batch 512] [--dim 512] [--repeats 10] [--device D]

Forward and backward of every surrogate at 10, 100 and 1000 classes, best and median of the repeats.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from splitveil.io import Json
from splitveil.provenance import device_name, versions
from splitveil.surrogates.gated_attention import GatedAttentionCEM
from splitveil.surrogates.kmeans_cem import KMeansCEM
from splitveil.surrogates.rate import Rate
from splitveil.surrogates.slot_cross import SlotCrossAttentionCEM

CLASSES = (10, 100, 1000)

SURROGATES: Mapping[str, Callable[[int, int], nn.Module]] = {
    "rate": lambda d, c: Rate(d, c, noise_std=0.025),
    "gated": GatedAttentionCEM,
    "gated-rate-maximise": lambda d, c: GatedAttentionCEM(
        d, c, penalty="rate", attention="maximise"
    ),
    "slots": lambda d, c: SlotCrossAttentionCEM(d, c, slot_dim=min(64, max(4, d - d % 4))),
    "kmeans": KMeansCEM,
}


def timed(work: Callable[[], None], repeats: int, device: torch.device) -> Json:
    """Best and median milliseconds of `repeats` calls after two warm-ups, device included."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    times = []
    for _ in range(repeats + 2):
        wait()
        start = time.perf_counter()
        work()
        wait()
        times.append(1000 * (time.perf_counter() - start))
    kept = times[2:]
    return {"best_ms": min(kept), "median_ms": statistics.median(kept), "repeats": repeats}


def draw(batch: int, dim: int, classes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Features that want a gradient and labels, the same for every surrogate."""
    g = torch.Generator().manual_seed(0)
    z = torch.rand(batch, dim, generator=g)
    return z.to(device).requires_grad_(), torch.randint(classes, (batch,), generator=g).to(device)


def measure(*, batch: int, dim: int, repeats: int, device: torch.device) -> Json:
    """Forward and backward of every surrogate at 10, 100 and 1000 classes."""
    rows: list[Json] = []
    for name, build in SURROGATES.items():
        for classes in CLASSES:
            z, y = draw(batch, dim, classes, device)
            module = build(dim, classes).to(device)
            if isinstance(module, KMeansCEM):
                module.refit(z.detach(), y)

            def work(module: nn.Module = module, z: Tensor = z, y: Tensor = y) -> None:
                module(z, y).loss.backward()

            rows.append({"surrogate": name, "classes": classes} | timed(work, repeats, device))
            print(f"{name:<20} {classes:4d} classes  best {rows[-1]['best_ms']:.2f} ms", flush=True)
    best = {(r["surrogate"], r["classes"]): r["best_ms"] for r in rows}
    return {
        "suite": "surrogates",
        "batch": batch,
        "dim": dim,
        "device": device_name(device),
        "versions": versions(),
        "rows": rows,
        "ratios": {f"{n} 1000/10": best[n, 1000] / best[n, 10] for n in SURROGATES},
    }


def main() -> None:
    """Time every surrogate and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    asked = parser.parse_args()
    torch.set_flush_denormal(True)
    found = measure(
        batch=asked.batch,
        dim=asked.dim,
        repeats=asked.repeats,
        device=torch.device(asked.device),
    )
    asked.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
