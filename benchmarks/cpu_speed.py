"""What layout and precision gain on a CPU: ratios within one run.

python benchmarks/cpu_speed.py OUT.json [--batch 128] [--repeats 7] [--threads 2]

Three ways to compute the same networks: float32 as torch lays images out (NCHW), float32 with the
channels last, bfloat16 with the channels last (where the processor has it). Steps of all three
alternate, and medians are compared. GFLOP/s count the convolutions and matrix products of a step:
forward, and twice as many backward; a bare 3×3 convolution shows what the machine can reach.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitveil.config.machine import computing_threads, has_bf16, usable_cores
from splitveil.cuda import Precision, mixed
from splitveil.nets.blocks import ResidualBlock, conv3x3, plain_conv
from splitveil.nets.catalogue import find_net
from splitveil.nets.clients import build_client, parse_client
from splitveil.nets.decoder import ResidualDecoder, ShuffleDecoder
from splitveil.nets.split import Cost
from splitveil.provenance import device_name, versions

SHAPE, CLASSES = (3, 32, 32), 10
CPU = torch.device("cpu")
CLIENT = "strided-16s2-32.64x2-c8"  # 5 MMAC
WAYS: Mapping[str, tuple[torch.memory_format, Precision]] = {
    "NCHW float32": (torch.contiguous_format, "float32"),
    "channels last float32": (torch.channels_last, "float32"),
    "channels last bf16": (torch.channels_last, "bf16"),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A network to time.

    Args:
        name: Of its row.
        net: With fresh weights.
        shape: Of one input.
        kind: "classify" and "rebuild" are training steps, "encode" is a forward pass alone.
    """

    name: str
    net: nn.Module
    shape: tuple[int, ...]
    kind: str


def cases() -> list[Case]:
    """The networks: nets of the package, a small pair, decoders, a bare convolution."""

    def whole(name: str) -> nn.Module:
        return find_net(name).build(SHAPE, CLASSES)

    client = build_client(parse_client(CLIENT), SHAPE)
    server = nn.Sequential(
        plain_conv(8, 128), *(ResidualBlock(128, 128) for _ in range(3)),
        ResidualBlock(128, 256, 2), ResidualBlock(256, 256),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, CLASSES),
    )  # fmt: skip
    wire = (8, 8, 8)
    return [
        Case(name="VGG11", net=whole("vgg11"), shape=SHAPE, kind="classify"),
        Case(name="thin-deep", net=whole("thin-deep"), shape=SHAPE, kind="classify"),
        Case(name="small pair", net=nn.Sequential(client, server), shape=SHAPE, kind="classify"),
        Case(name="decoder N8C64", net=ResidualDecoder(wire, SHAPE), shape=wire, kind="rebuild"),
        Case(name="decoder S2C96", net=ShuffleDecoder(wire, SHAPE), shape=wire, kind="rebuild"),
        Case(name="encoding", net=client, shape=SHAPE, kind="encode"),
        Case(name="convolution", net=conv3x3(128, 128), shape=(128, 8, 8), kind="rebuild"),
    ]


def step_of(case: Case, batch: int, way: str) -> Callable[[], None]:
    """One step of a case, computed in one of the `WAYS`."""
    layout, precision = WAYS[way]
    net = copy.deepcopy(case.net).train(case.kind != "encode")
    net.to(memory_format=layout)  # type: ignore[call-overload]
    x = torch.rand(batch, *case.shape).contiguous(memory_format=layout)
    labels = torch.randint(CLASSES, (batch,))
    optimiser = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

    def loss(out: Tensor) -> Tensor:
        if case.kind == "classify":
            return F.cross_entropy(out.float(), labels)
        return out.float().square().mean()

    def step() -> None:
        if case.kind == "encode":
            with torch.no_grad(), mixed(CPU, precision):
                net(x)
            return
        optimiser.zero_grad(set_to_none=True)
        with mixed(CPU, precision):
            out = net(x)
        loss(out).backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    return step


def measure(case: Case, batch: int, repeats: int) -> list[dict[str, object]]:
    """A row for each way: median milliseconds, GFLOP/s, and how many times faster than NCHW."""
    ways = [way for way in WAYS if "bf16" not in way or has_bf16()]
    steps = {way: step_of(case, batch, way) for way in ways}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for index in range(repeats + 2):
        for way, step in steps.items():
            began = time.perf_counter()
            step()
            if index > 1:  # the first steps of a process are slower
                seconds[way].append(time.perf_counter() - began)
    passes = 1 if case.kind == "encode" else 3
    work = 2 * passes * batch * Cost.of(case.net, case.shape).macs
    median = {way: statistics.median(values) for way, values in seconds.items()}
    return [
        {"case": case.name, "way": way, "median_ms": 1000 * median[way],
         "best_ms": 1000 * min(seconds[way]), "gflops": work / median[way] / 1e9,
         "ratio": median["NCHW float32"] / median[way], "repeats": repeats}
        for way in ways
    ]  # fmt: skip


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=usable_cores())
    options = parser.parse_args()
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    rows = []
    with computing_threads(options.threads):
        for case in cases():
            for row in measure(case, options.batch, options.repeats):
                rows.append(row)
                print(f"{row['case']:>14} {row['way']:>22} {row['median_ms']:9.2f} ms  "
                      f"×{row['ratio']:.2f}  {row['gflops']:6.0f} GFLOP/s", flush=True)  # fmt: skip
        found = {"suite": "cpu", "batch": options.batch, "device": device_name(CPU),
                 "versions": versions(), "rows": rows,
                 "ratios": {f"{r['case']} {r['way']}": r["ratio"] for r in rows}}  # fmt: skip
    options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
