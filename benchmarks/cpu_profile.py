"""Where the time goes on a CPU: one epoch of a small pair, and two `quick` audits.

python benchmarks/cpu_profile.py OUT.json [--data-dir DIR] [--threads 2]
python benchmarks/cpu_profile.py OUT.json --pair digits --client auto --profile smoke --no-compile

The epoch is that of a 5 MMAC client with a residual server on CIFAR-10, seen by torch's profiler:
the share of every kind of operator in the processor's time. The audits, of that run and of one on
digits, are seen by the seconds that their records have. `torch.compile` is tried on the same pair:
what it takes at first, what a step then takes, and after how many steps it has paid for itself.
"""

import argparse
import json
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import splitveil as sv
from splitveil.config.machine import computing_threads, usable_cores
from splitveil.cuda import Precision, mixed
from splitveil.provenance import device_name, versions
from splitveil.runs import Run

CPU = torch.device("cpu")
# What a reader would call an operator of torch, by the first pattern that its name has.
KINDS: Mapping[str, str] = {
    "convolutions": r"conv",
    "batch norm": r"batch_norm|BatchNorm",
    "matrix products": r"mm$|addmm|linear|matmul",
    "optimiser": r"Optimizer|_foreach|_fused_",
    "copies and casts": r"copy_|aten::to$|_to_copy|contiguous|clone",
    "augmentation and indexing": r"index|gather|where|arange|randint|random",
    "activations and sums": r"relu|clamp|threshold|sigmoid|add|mul|sub|sum|mean|div|fill|zero",
}
OTHER = "other"


def kind_of(name: str) -> str:
    """The kind of an operator.

    >>> kind_of("aten::convolution_backward"), kind_of("aten::native_batch_norm"), kind_of("x")
    ('convolutions', 'batch norm', 'other')
    """
    return next((kind for kind, words in KINDS.items() if re.search(words, name)), OTHER)


def epoch_of(config: sv.RunConfig) -> tuple[Run, dict[str, Any]]:
    """A training, and the share of each kind of operator in its processor time."""
    began = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        run = sv.fit(config, overwrite=True)
    spent: Counter[str] = Counter()
    for event in seen.key_averages():
        spent[kind_of(event.key)] += event.self_cpu_time_total
    whole = sum(spent.values())
    shares = {kind: round(time / whole, 4) for kind, time in spent.most_common()}
    return run, {
        "case": "epoch",
        "seconds": round(time.perf_counter() - began, 1),
        "shares": shares,
    }


def audit_of(run: Run, case: str, budget: str) -> dict[str, Any]:
    """The share of each attack in an audit's seconds; the rest is leaks and measuring."""
    record = run.audit(budget, fresh=True, precision=run.config.precision)
    whole = record.seconds["audit"] or 0.0
    spent = {name: attack.seconds or 0.0 for name, attack in record.attacks.items()}
    spent["everything else"] = max(0.0, whole - sum(spent.values()))
    ordered = sorted(spent.items(), key=lambda pair: -pair[1])
    shares = {name: round(seconds / whole, 4) for name, seconds in ordered}
    return {"case": case, "seconds": whole, "shares": shares}


def compiled(run: Run, batch: int, precision: Precision, repeats: int) -> dict[str, Any]:
    """What compiling costs and gains: seconds at first, medians of steps, steps until it pays."""
    shape = run.built.image_shape
    x = torch.rand(batch, *shape).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(run.built.num_classes, (batch,))

    net = nn.Sequential(run.model.encoder, run.model.head).train()  # the channel left out
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimiser = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

    def step_with(forward: Callable[[Tensor], Tensor]) -> float:
        began = time.perf_counter()
        optimiser.zero_grad(set_to_none=True)
        with mixed(CPU, precision):
            out = forward(x)
        F.cross_entropy(out.float(), labels).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        return time.perf_counter() - began

    fast = torch.compile(net)
    first = step_with(fast)
    seconds: dict[str, list[float]] = {"eager": [], "compiled": []}
    for index in range(repeats + 2):
        for name, forward in (("eager", net), ("compiled", fast)):
            took = step_with(forward)
            if index > 1:
                seconds[name].append(took)
    eager, quick = (statistics.median(seconds[name]) for name in ("eager", "compiled"))
    pays = None if quick >= eager else int(first / (eager - quick))
    return {
        "case": "compile", "batch": batch, "first_s": round(first, 1), "eager_ms": 1000 * eager,
        "compiled_ms": 1000 * quick, "ratio": eager / quick, "pays_after_steps": pays,
    }  # fmt: skip


def main() -> None:
    """Train, audit, compile, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--pair", default="cifar10", help="data of the pair")
    parser.add_argument("--client", default="strided-16s2-32.60x2-c8")
    parser.add_argument("--server", default="resnet-96")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--digits-epochs", type=int, default=20)
    parser.add_argument("--profile", default="quick", help="of the audits")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--data-dir")
    options = parser.parse_args()
    own = options.client != "auto"
    rows: list[dict[str, Any]] = []

    def told(row: dict[str, Any]) -> None:
        rows.append(row)
        print(" ".join(f"{k}={v}" for k, v in row.items() if k != "shares"), flush=True)
        for name, share in row.get("shares", {}).items():
            print(f"{100 * share:7.1f} %  {name}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        config = sv.RunConfig(
            dataset=options.pair, defence="noise", epochs=options.epochs, name="pair",
            runs_dir=folder, threads=options.threads, device="cpu", data_dir=options.data_dir,
            batch_size=250 if options.pair == "cifar10" else None,
            client=options.client if own else None, server=options.server if own else None,
        )  # fmt: skip
        run, row = epoch_of(config)
        told(row)
        with computing_threads(options.threads):
            if not options.no_compile:
                precision: Precision = "bf16" if run.config.precision == "bf16" else "float32"
                told(compiled(run, run.config.batch_size or 128, precision, repeats=9))
            told(audit_of(run, f"{options.profile} on {options.pair}", options.profile))
            small = sv.RunConfig(
                dataset="digits", defence="veil", epochs=options.digits_epochs, name="digits",
                runs_dir=folder, threads=options.threads, device="cpu",
            )  # fmt: skip
            told(audit_of(sv.fit(small), f"{options.profile} on digits", options.profile))
            found = {"suite": "profile", "command": "python benchmarks/cpu_profile.py OUT.json",
                     "pair": f"{options.client} with {options.server}",
                     "precision": run.config.precision, "device": device_name(CPU),
                     "versions": versions(), "rows": rows}  # fmt: skip
    options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
