"""What the server costs: its throughput against onnxruntime alone, and what it does when swamped.

python benchmarks/serve_load.py OUT.json [--net vgg11] [--rows 32] [--rounds 5] [--seconds 5]

The server is `splitveil serve` in a process of its own; this one sends requests over loopback, all
on the same cores. onnxruntime called directly and the server alternate, so that a busy machine
meets both; the best round of each counts. Then four times as many requests arrive as the server
answered: it must say no to what it cannot take, answer all it took, and not grow.
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
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch

from splitveil.nets.catalogue import NETS
from splitveil.nets.channel import Channel
from splitveil.nets.split import cut
from splitveil.provenance import device_name, versions
from splitveil.serve.admission import Limits
from splitveil.serve.export import export_model
from splitveil.serve.manifest import LOGITS, SERVER, WIRE, Manifest, OnnxHalf, load_half
from splitveil.serve.wire import Message, TensorSpec, encode_request

SHAPE, CLASSES = (3, 32, 32), 10
OVERLOAD, SENDERS = 4.0, 96  # of 32 rows: three times what may wait
OK, SHED = 200, (429, 503)


@dataclass
class Tally:
    """What came back: seconds of every answer, and how often each status or fault."""

    seconds: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, status: int | str, seconds: float) -> None:
        """Count one answer; only those with logits have a latency."""
        with self.lock:
            self.statuses[str(status)] += 1
            if status == OK:
                self.seconds.append(seconds)


@contextmanager
def server(folder: Path) -> Iterator[tuple[str, int]]:
    """`splitveil serve` until the block ends; gives its address and process."""
    words = [sys.executable, "-m", "splitveil", "serve", str(folder), "--port", "0", "--json"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)  # noqa: S603
    assert process.stdout is not None  # noqa: S101 - a pipe was asked for
    try:
        told = "".join(iter(process.stdout.readline, "}\n")) + "}"
        yield json.loads(told)["url"], process.pid
    finally:
        process.terminate()
        process.wait()


def send(connection: HTTPConnection, path: str, message: Message, tally: Tally) -> bool:
    """One request; False when the connection broke."""
    began = time.perf_counter()
    try:
        connection.request("POST", path, message.body, dict(message.headers))
        answer = connection.getresponse()
        answer.read()
    except (OSError, HTTPException) as err:
        tally.add(type(err).__name__, 0.0)
        connection.close()
        return False
    tally.add(answer.status, time.perf_counter() - began)
    return True


def flood(url: str, path: str, message: Message, until: float, rates: list[float | None]) -> Tally:
    """One sender per rate in requests/s; None sends the next when the last is answered."""
    tally = Tally()

    def sender(number: int) -> None:
        connection = HTTPConnection(str(urlsplit(url).netloc), timeout=60)
        rate, due = rates[number], time.perf_counter() + number / len(rates) * 0.1
        while (now := time.perf_counter()) < until:
            if rate is not None:
                time.sleep(max(0.0, min(due, until) - now))
                due += 1 / rate
            send(connection, path, message, tally)
        connection.close()

    with ThreadPoolExecutor(len(rates)) as pool:
        list(pool.map(sender, range(len(rates))))
    return tally


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


def through(
    url: str, path: str, message: Message, rows: int, seconds: float
) -> tuple[float, Tally]:
    """Rows per second of the server with enough requests under way to fill its batches."""
    senders = 2 * max(1, Limits().max_batch // rows)
    began = time.perf_counter()
    tally = flood(url, path, message, began + seconds, [None] * senders)
    return rows * len(tally.seconds) / (time.perf_counter() - began), tally


def overloaded(
    url: str, process: int, path: str, message: Message, *, rate: float, seconds: float
) -> dict[str, Any]:
    """What happens when `rate` requests/s arrive for a while."""
    memory: list[float] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.25):
            memory.append(resident(process))

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    tally = flood(url, path, message, began + seconds, [rate / SENDERS] * SENDERS)
    spent = time.perf_counter() - began
    over.set()
    watcher.join()
    third = len(memory) // 3
    shed = sum(tally.statuses[str(s)] for s in SHED)
    return {
        "asked_per_second": round(rate, 1),
        "offered_per_second": round(sum(tally.statuses.values()) / seconds, 1),
        "answered_per_second": round(len(tally.seconds) / spent, 1),
        "statuses": dict(sorted(tally.statuses.items())),
        "shed": shed,
        "neither_answered_nor_shed": sum(tally.statuses.values()) - shed - len(tally.seconds),
        "latency": spread(tally.seconds),
        "memory_mib_after_a_third": round(max(memory[: third + 1]), 1),
        "memory_mib_at_most": round(max(memory), 1),
    }


def spread(seconds: list[float]) -> dict[str, float]:
    """Median and 99th percentile in milliseconds, and of how many."""
    p50, p99 = (round(1000 * float(np.percentile(seconds or [0.0], q)), 2) for q in (50, 99))
    return {"p50_ms": p50, "p99_ms": p99, "requests": len(seconds)}


def make_export(net: str, folder: Path) -> Manifest:
    """A net with random weights: they cost the same as trained ones."""
    torch.manual_seed(0)
    entry = NETS[net]
    model = cut(entry.build(SHAPE, CLASSES), entry.cut_at, Channel()).eval()
    return export_model(model, SHAPE, folder, name=net)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All of it."""
    manifest = make_export(options.net, folder)
    half = load_half(folder, manifest, SERVER)
    draw = np.random.default_rng(0)
    sizes = sorted({options.rows, Limits().max_batch})
    batches = [draw.random((n, *manifest.wire_shape), dtype=np.float32) for n in sizes]
    spec = TensorSpec(name=WIRE, shape=manifest.wire_shape)
    rows = draw.random((options.rows, *manifest.wire_shape), dtype=np.float32)
    message, path = encode_request(rows, spec, LOGITS), f"/v2/models/{options.net}/infer"
    direct: dict[str, list[float]] = {f"direct, batches of {n}": [] for n in sizes}
    served: list[float] = []
    busy: list[float] = []
    with server(folder) as (url, process):
        through(url, path, message, options.rows, 1.0)
        for _ in range(options.rounds):
            for kept, batch in zip(direct.values(), batches, strict=True):
                kept.append(directly(half, batch, options.seconds))
            rate, tally = through(url, path, message, options.rows, options.seconds)
            served.append(rate)
            busy += tally.seconds
            print(f"direct {max(v[-1] for v in direct.values()):.0f}, server {rate:.0f} images/s "
                  f"{dict(tally.statuses)}", flush=True)  # fmt: skip
        until = time.perf_counter() + options.seconds
        alone = flood(url, path, message, until, [None]).seconds
        swamped = overloaded(
            url,
            process,
            path,
            message,
            rate=OVERLOAD * max(served) / options.rows,
            seconds=3 * options.seconds,
        )
        time.sleep(0.5)
        settled = resident(process)
    every = direct | {"server": served}
    best = {name: max(found) for name, found in every.items()}
    return {
        "suite": "serve",
        "net": options.net,
        "batch": options.rows,
        "dim": manifest.wire_floats,
        "device": device_name(torch.device("cpu")),
        "versions": versions(),
        "rows": [
            {
                "mode": name,
                "classes": CLASSES,
                "images_per_second": round(max(found), 1),
                "best_ms": 1000 * options.rows / max(found),
                "median_ms": 1000 * options.rows / statistics.median(found),
                "repeats": len(found),
            }
            for name, found in every.items()
        ],
        "latency": {"one at a time": spread(alone), "at the best throughput": spread(busy)},
        "overload": swamped | {"memory_mib_afterwards": round(settled, 1)},
        "ratios": {"server to direct": best.pop("server") / max(best.values())},
    }  # fmt: skip


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--net", default="vgg11")
    parser.add_argument("--rows", type=int, default=32, help="images in a request")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each part of a round")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(options, Path(scratch) / "export")
    print(json.dumps({k: found[k] for k in ("latency", "overload", "ratios")}, indent=2))
    options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
