"""What the server costs: its throughput against onnxruntime alone, and what it does when swamped.

python benchmarks/serve_load.py OUT.json [--net vgg11] [--rows 32] [--rounds 5] [--seconds 5]
python benchmarks/serve_load.py OUT.json --net small --rows 1
python benchmarks/serve_load.py OUT.json --strangers --net small --rows 1 --seconds 600

The server is `splitveil serve` in a process of its own; this one sends requests over loopback, all
on the same cores. They are a client's requests: z with noise (`--noise`), as integers on the
noise's grid. onnxruntime called directly and the server alternate, so that a busy machine meets
both; the best round of each counts. Then four times as many requests arrive as the server answered:
it must say no to what it cannot take, answer all it took, and not grow.

With `--strangers` good clients send at a fixed rate, first alone, then for `--seconds` among
strangers who are silent, slow, never read or talk nonsense, then alone again: their latency must
not double, the server must not grow, and its log must stay small.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from load_clients import NUMBERS, Tally, flood, http_request

from splitveil.nets.catalogue import NETS
from splitveil.nets.channel import Channel, GaussianNoise
from splitveil.nets.split import cut
from splitveil.provenance import device_name, versions
from splitveil.serve.admission import Limits
from splitveil.serve.export import export_model
from splitveil.serve.manifest import LOGITS, SERVER, Manifest, OnnxHalf, load_half
from splitveil.serve.stages import apply_stages
from splitveil.serve.wire import encode_request

SHAPES, CLASSES = {"small": (1, 8, 8)}, 10  # of images; others are 3×32×32
OVERLOAD, SENDERS = 4.0, 96  # of 32 rows: three times what may wait
SMALL_SENDERS = 32  # of one row
NOISE = 0.1  # σ of the channel
GOOD, RATE = 8, 25.0  # good clients among strangers, requests/s of each
SHED = (429, 503)


@contextmanager
def server(folder: Path, *options: str) -> Iterator[tuple[str, int]]:
    """`splitveil serve` until the block ends; gives its address and process."""
    words = [sys.executable, "-m", "splitveil", "serve", str(folder), "--port", "0", "--json"]
    words += ["--allow-no-noise", *options]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)  # noqa: S603
    assert process.stdout is not None  # noqa: S101 - a pipe was asked for
    try:
        told = "".join(iter(process.stdout.readline, "}\n")) + "}"
        yield json.loads(told)["url"], process.pid
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def resident(process: int) -> float:
    """MiB of memory a process holds."""
    pages = int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def directly(half: OnnxHalf, rows: np.ndarray[Any, np.dtype[np.float32]], seconds: float) -> float:
    """Rows per second of onnxruntime called in a loop."""
    began, done = time.perf_counter(), 0
    while (spent := time.perf_counter() - began) < seconds:
        half(rows)
        done += len(rows)
    return done / spent


def through(url: str, request: bytes, rows: int, seconds: float) -> tuple[float, Tally]:
    """Rows per second of the server with enough requests under way to fill its batches."""
    senders = min(SMALL_SENDERS, 2 * max(1, Limits().max_batch // rows))
    began = time.perf_counter()
    tally = flood(url, request, seconds, [None] * senders)
    return rows * len(tally.seconds) / (time.perf_counter() - began), tally


@contextmanager
def watched(process: int) -> Iterator[list[float]]:
    """MiB of memory a process holds, four times a second while the block runs."""
    memory: list[float] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.25):
            memory.append(resident(process))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield memory
    finally:
        over.set()
        watcher.join()


def growth(memory: list[float]) -> dict[str, float]:
    """The most memory in the first third of the time, and in all of it."""
    third = memory[: len(memory) // 3 + 1]
    return {
        "memory_mib_after_a_third": round(max(third), 1),
        "memory_mib_at_most": round(max(memory), 1),
    }


def overloaded(
    url: str, process: int, request: bytes, *, rate: float, seconds: float
) -> dict[str, Any]:
    """What happens when `rate` requests/s arrive for a while."""
    began = time.perf_counter()
    with watched(process) as memory:
        tally = flood(url, request, seconds, [rate / SENDERS] * SENDERS)
    spent = time.perf_counter() - began
    shed = sum(tally.statuses[str(s)] for s in SHED)
    return {
        "asked_per_second": round(rate, 1),
        "offered_per_second": round(sum(tally.statuses.values()) / seconds, 1),
        "answered_per_second": round(len(tally.seconds) / spent, 1),
        "statuses": dict(sorted(tally.statuses.items())),
        "shed": shed,
        "neither_answered_nor_shed": sum(tally.statuses.values()) - shed - len(tally.seconds),
        "latency": tally.spread(),
        **growth(memory),
    }


@contextmanager
def strangers(url: str, path: str, seconds: float) -> Iterator[None]:
    """Strangers of every kind, in a process of their own, while the block runs."""
    words = [sys.executable, str(Path(__file__).with_name("load_clients.py"))]
    process = subprocess.Popen([*words, url, path, "/page/main.js", str(seconds)])  # noqa: S603
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def among_strangers(folder: Path, request: bytes, path: str, seconds: float) -> dict[str, Any]:
    """The latency of good clients alone, among strangers for `seconds`, and alone again."""
    log = folder.parent / "serve.log"
    alone = Tally()
    rates: list[float | None] = [RATE] * GOOD
    with server(folder, "--log-file", str(log), "--access-log") as (url, process):
        flood(url, request, 1.0, rates)
        with watched(process) as memory:
            alone.add(flood(url, request, seconds / 4, rates))
            with strangers(url, path, seconds + 5):
                time.sleep(2)  # until they are all there
                crowd = flood(url, request, seconds, rates)
            alone.add(flood(url, request, seconds / 4, rates))
    size = sum(file.stat().st_size for file in log.parent.glob(f"{log.name}*"))
    return {
        "alone": alone.spread() | {"statuses": dict(alone.statuses)},
        "among_strangers": crowd.spread() | {"statuses": dict(crowd.statuses)},
        "log_bytes": size,
        **growth(memory),
    }


def make_export(net: str, folder: Path, noise: float = NOISE) -> Manifest:
    """A net with random weights, which cost the same as trained ones, and noise of this σ."""
    torch.manual_seed(0)
    entry, shape = NETS[net], SHAPES.get(net, (3, 32, 32))
    channel = Channel([GaussianNoise(noise)] if noise else [])
    model = cut(entry.build(shape, CLASSES), entry.cut_at, channel).eval()
    return export_model(model, shape, folder, name=net)


def passport(options: argparse.Namespace, manifest: Manifest) -> dict[str, Any]:
    """How a result was made."""
    return {
        "suite": "serve",
        "command": f"python benchmarks/serve_load.py {' '.join(sys.argv[1:])}",
        "net": options.net,
        "batch": options.rows,
        "dim": manifest.wire_floats,
        "sent": {"noise_std": manifest.noise_std, "datatype": manifest.wire.datatype},
        "device": device_name(torch.device("cpu")),
        "versions": versions(),
    }


def row(mode: str, rows: int, rates: list[float]) -> dict[str, Any]:
    """A line of the result from images per second of some rounds."""
    return {
        "mode": mode,
        "classes": CLASSES,
        "images_per_second": round(max(rates), 1),
        "best_ms": 1000 * rows / max(rates),
        "median_ms": 1000 * rows / statistics.median(rates),
        "repeats": len(rates),
    }


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Throughput, latency and overload."""
    manifest = make_export(options.net, folder, options.noise)
    half = load_half(folder, manifest, SERVER)
    draw = np.random.default_rng(0)
    sizes = sorted({options.rows, Limits().max_batch})
    batches = [draw.random((n, *manifest.wire_shape), dtype=np.float32) for n in sizes]
    request, _ = request_of(manifest, options.rows)
    direct: dict[str, list[float]] = {f"direct, batches of {n}": [] for n in sizes}
    served: list[float] = []
    busy = Tally()
    with server(folder) as (url, process):
        through(url, request, options.rows, 1.0)
        for _ in range(options.rounds):
            for kept, batch in zip(direct.values(), batches, strict=True):
                kept.append(directly(half, batch, options.seconds))
            rate, tally = through(url, request, options.rows, options.seconds)
            served.append(rate)
            busy.add(tally)
            print(f"direct {max(v[-1] for v in direct.values()):.0f}, server {rate:.0f} images/s "
                  f"{dict(tally.statuses)}", flush=True)  # fmt: skip
        alone = flood(url, request, options.seconds, [None])
        asked = OVERLOAD * max(served) / options.rows
        swamped = overloaded(url, process, request, rate=asked, seconds=3 * options.seconds)
        time.sleep(0.5)
        settled = resident(process)
    every = direct | {"server": served}
    best = {name: max(found) for name, found in every.items()}
    return passport(options, manifest) | {
        "rows": [row(name, options.rows, found) for name, found in every.items()],
        "latency": {"one at a time": alone.spread(), "at the best throughput": busy.spread()},
        "overload": swamped | {"memory_mib_afterwards": round(settled, 1)},
        "ratios": {"server to direct": best.pop("server") / max(best.values())},
    }


def request_of(manifest: Manifest, count: int) -> tuple[bytes, str]:
    """The bytes of an infer call, and its path."""
    shape, path = (count, *manifest.wire_shape), f"/v2/models/{manifest.name}/infer"
    z = np.random.default_rng(1).random(shape, dtype=np.float32)
    message = encode_request(apply_stages(z, manifest.stages), manifest.wire, LOGITS)
    return http_request(path, message), path


def measure_strangers(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What good clients notice of strangers."""
    manifest = make_export(options.net, folder, options.noise)
    found = among_strangers(folder, *request_of(manifest, options.rows), options.seconds)
    print(json.dumps(found, indent=2))
    alone, crowd = found["alone"], found["among_strangers"]
    return passport(options, manifest) | {
        "rows": [
            {
                "mode": mode,
                "classes": CLASSES,
                "best_ms": told["p50_ms"],
                "median_ms": told["p50_ms"],
                "repeats": told["requests"],
            }
            for mode, told in (("alone", alone), ("among strangers", crowd))
        ],
        "strangers": found | {"numbers": NUMBERS},
        "ratios": {"p99 among strangers to alone": crowd["p99_ms"] / alone["p99_ms"]},
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--net", default="vgg11")
    parser.add_argument("--rows", type=int, default=32, help="images in a request")
    parser.add_argument("--noise", type=float, default=NOISE, help="σ of the channel; 0: floats")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each part of a round")
    parser.add_argument("--strangers", action="store_true", help="good clients among strangers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run = measure_strangers if options.strangers else measure
        found = run(options, Path(scratch) / "export")
    shown = ("latency", "overload", "ratios")
    print(json.dumps({k: found[k] for k in shown if k in found}, indent=2))
    options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
