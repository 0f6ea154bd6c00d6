"""How much faster one vectorised backward pass is than the loop over classes with two.

python benchmarks/oracle_speed.py OUT.json   B = 512, d = 512, C = 100; ratios within one run
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from splitveil.bench import draw, timed
from splitveil.passport import device_name, versions
from splitveil.surrogates import GatedAttentionCEM, Rate
from splitveil.train import scale_gradient

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from oracles import surrogates as oracle

BATCH, DIM, CLASSES, REPEATS, WEIGHT = 512, 512, 100, 10, 0.3


def fast(module: nn.Module, x: Tensor, y: Tensor, encoder: nn.Module) -> Callable[[], None]:
    """One forward, one backward pass, the penalty's gradient scaled on its way."""

    def work() -> None:
        z = encoder(x)
        (z.square().mean() + module(scale_gradient(z, WEIGHT), y).loss).backward()

    return work


def slow(loss: Callable[[Tensor], Tensor], x: Tensor, encoder: nn.Module) -> Callable[[], None]:
    """Two backward passes as in the seeds: the penalty first, then the task, gradients added."""

    def work() -> None:
        z = encoder(x)
        loss(z).backward(retain_graph=True)  # type: ignore[no-untyped-call]
        kept = [p.grad.clone() for p in encoder.parameters() if p.grad is not None]
        encoder.zero_grad()
        z.square().mean().backward()
        for p, g in zip(encoder.parameters(), kept, strict=True):
            if p.grad is not None:
                p.grad += WEIGHT * g

    return work


def main() -> None:
    """Time both ways for each surrogate that has an oracle."""
    device = torch.device("cpu")
    z, y = draw(BATCH, DIM, CLASSES, device)
    x = z.detach()
    encoder = nn.Linear(DIM, DIM)
    gated = GatedAttentionCEM(DIM, CLASSES)
    rate = Rate(DIM, CLASSES, noise_std=0.025)
    cases: dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]] = {
        "rate": (rate, lambda f: oracle.rate(f, y, CLASSES, 0.025)),
        "gated": (gated, lambda f: oracle.cem(gated, f, y)[0]),
    }
    rows = []
    for name, (module, loss) in cases.items():
        quick = timed(fast(module, x, y, encoder), REPEATS, device)
        loop = timed(slow(loss, x, encoder), REPEATS, device)
        ratio = loop["best_ms"] / quick["best_ms"]
        rows.append({"surrogate": name, "classes": CLASSES, "oracle_best_ms": loop["best_ms"],
                     "speed_up": ratio} | quick)  # fmt: skip
        print(f"{name}: {quick['best_ms']:.2f} ms against {loop['best_ms']:.2f} ms, {ratio:.1f}×")
    found = {"suite": "oracle", "batch": BATCH, "dim": DIM, "device": device_name(device),
             "versions": versions(), "rows": rows,
             "ratios": {f"{r['surrogate']} speed-up": r["speed_up"] for r in rows}}  # fmt: skip
    Path(sys.argv[1]).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
