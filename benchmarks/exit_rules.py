"""Which exit rule answers best: three kinds of sureness, own thresholds per class, averaging.

python benchmarks/exit_rules.py OUT.json RUN [--shares 0.1 0.2 0.3 0.5] [--seed 0]

Every rule is set on one half of the validation images of an early-exit run and judged on the other,
both ways round. All rules see the same own answers and the same sending of all images. A threshold
for each class needs 50 images of it in each half; with fewer those rows are left out.
"""

import argparse
import copy
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import Tensor

import splitveil as sv
from splitveil.errors import ConfigError
from splitveil.nets.exit import Exit, Kind, Policy
from splitveil.nets.split import SplitModel
from splitveil.provenance import command, device_name, versions
from splitveil.rng import stream
from splitveil.threat import Labelled

CHUNK = 1000


def all_answers(model: SplitModel, images: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Own logits and the server's logits (n, classes) of the same images, all of them sent."""
    generator = stream(seed, "exit-rules")
    with torch.no_grad():
        parts = [model.both_answers(x, generator) for x in torch.split(images, CHUNK)]
    own, server = zip(*parts, strict=True)
    return torch.cat(own), torch.cat(server)


def judged(rule: Exit, own: Tensor, server: Tensor, labels: Tensor) -> tuple[float, float]:
    """Accuracy and share sent: set on one half, counted on the other, both ways round."""
    halves = torch.arange(len(labels)) % 2 == 0
    right = sent = 0
    for fit in (halves, ~halves):
        rule.settle(own[fit], server[fit], labels[fit])
        asked = rule.asks(own[~fit])
        answers = rule.answers(own[~fit], server[~fit], asked).argmax(1)
        right += int((answers == labels[~fit]).sum())
        sent += int(asked.sum())
    return right / len(labels), sent / len(labels)


def rows_of(
    model: SplitModel, images: Labelled, shares: list[float], seed: int
) -> Iterator[dict[str, Any]]:
    """Every rule at every share."""
    own, server = all_answers(model, images.images, seed)
    for kind, average, per_class, share in product(
        get_args(Kind), (False, True), (False, True), shares
    ):
        rule = cast(Exit, copy.deepcopy(model.exit))
        rule.kind, rule.average = kind, average
        rule.policy = Policy(send=share, per_class=per_class)
        try:
            accuracy, sent = judged(rule, own, server, images.labels)
        except ConfigError:  # too few images of a class
            continue
        yield {
            "rule": kind, "average": average, "per_class": per_class, "share": share,
            "sent": round(sent, 4), "accuracy": round(accuracy, 4),
        }  # fmt: skip


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--shares", nargs="+", type=float, default=[0.1, 0.2, 0.3, 0.5])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    run = sv.load_run(options.run)
    data, splits = run.data()
    val = data.labelled(splits.val)
    rows = list(rows_of(run.model.eval(), val, options.shares, options.seed))
    for row in rows:
        print(*row.values())
    found = {
        "suite": "exit-rules", "dataset": run.config.dataset, "defence": run.config.defence,
        "client": run.config.client, "epochs": run.config.epochs, "seed": run.config.seed,
        "images": len(val), "command": command(), "device": device_name(torch.device("cpu")),
        "versions": versions(), "rows": rows,
    }  # fmt: skip
    options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
