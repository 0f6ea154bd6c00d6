"""How much faster one vectorised backward pass is than the loop over classes with two.

python benchmarks/oracle_speed.py OUT.json   B = 512, d = 512, C = 100; ratios within one run

Both get the same features, as an encoder would hand them over: the fast path is one forward and one
backward pass of task loss and penalty, the slow one the loop over classes of the tests' oracles, a
backward pass of the penalty, one of the task, and the sum of the two gradients.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from oracles import kmeans, slots
from oracles import surrogates as plain
from surrogate_speed import draw, timed
from torch import Tensor, nn

from splitveil.functional import scale_gradient
from splitveil.provenance import device_name, versions
from splitveil.surrogates.gated_attention import GatedAttentionCEM
from splitveil.surrogates.kmeans_cem import KMeansCEM
from splitveil.surrogates.rate import Rate
from splitveil.surrogates.slot_cross import SlotCrossAttentionCEM

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

BATCH, DIM, CLASSES, REPEATS, WEIGHT, NOISE = 512, 512, 100, 20, 0.3, 0.025
SLOW_REPEATS = 4


def fast(module: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """One forward, one backward pass, the penalty's gradient scaled on its way."""

    def work() -> None:
        z = x.clone().requires_grad_()
        (z.square().mean() + module(scale_gradient(z, WEIGHT), y).loss).backward()

    return work


def slow(loss: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], None]:
    """Two backward passes, as in the reference documents: penalty, then task; gradients added."""

    def work() -> None:
        z = x.clone().requires_grad_()
        (kept,) = torch.autograd.grad(loss(z), z, retain_graph=True)
        (task,) = torch.autograd.grad(z.square().mean(), z)
        task.add_(kept, alpha=WEIGHT)

    return work


def main() -> None:
    """Time both ways for each surrogate."""
    torch.set_flush_denormal(True)
    device = torch.device("cpu")
    z, y = draw(BATCH, DIM, CLASSES, device)
    x = z.detach()
    gated = GatedAttentionCEM(DIM, CLASSES)
    veil = GatedAttentionCEM(DIM, CLASSES, penalty="rate", attention="maximise")
    slot = SlotCrossAttentionCEM(DIM, CLASSES, slot_dim=64).eval()
    cem = KMeansCEM(DIM, CLASSES)
    cem.refit(x.repeat(2, 1), y.repeat(2))
    cases: dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]] = {
        "rate": (
            Rate(DIM, CLASSES, noise_std=NOISE),
            lambda f: plain.rate(f, y, CLASSES, NOISE),
        ),
        "rate, full": (
            Rate(DIM, CLASSES, noise_std=NOISE, covariance="full"),
            lambda f: plain.full_rate(f, y, CLASSES, NOISE),
        ),
        "gated": (gated, lambda f: plain.cem(gated, f, y)[0]),
        "gated-rate-maximise": (veil, lambda f: plain.cem(veil, f, y)[0]),
        "slots": (slot, lambda f: slots.cem(slot, f, y)[0]),
        "kmeans": (cem, lambda f: kmeans.hinge(cem, f, y)),
    }
    rows = []
    for name, (module, loss) in cases.items():
        quick = timed(fast(module, x, y), REPEATS, device)
        loop = timed(slow(loss, x), SLOW_REPEATS, device)
        again = timed(fast(module, x, y), REPEATS, device)
        best = min(quick["best_ms"], again["best_ms"])
        ratio = loop["best_ms"] / best
        rows.append({"surrogate": name, "classes": CLASSES, "oracle_best_ms": loop["best_ms"],
                     "speed_up": ratio} | quick | {"best_ms": best})  # fmt: skip
        print(f"{name}: {best:.2f} ms against {loop['best_ms']:.2f} ms, {ratio:.1f}×", flush=True)
    found = {"suite": "oracle", "batch": BATCH, "dim": DIM, "device": device_name(device),
             "versions": versions(), "rows": rows,
             "ratios": {f"{r['surrogate']} speed-up": r["speed_up"] for r in rows}}  # fmt: skip
    Path(sys.argv[1]).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
