"""What an answer costs per image: the client alone, split, and with an early exit.

python benchmarks/exit_cost.py OUT.json [--net thin-deep] [--send 0.3] [--images 200] [--rounds 5]

One client architecture with random weights, which cost the same as trained ones, is exported three
times. `splitveil serve` runs in a process of its own, on the same cores and over loopback, so there
is no network between them. Images are answered one at a time. The three ways alternate, so that a
busy machine meets all of them; times are means per image of a round. Bytes are those of the request
and the answer without HTTP's headers, averaged over all images, sent or not.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from serve_load import CLASSES, NOISE, SHAPES, server

from splitveil.defences.catalogue import find_defence
from splitveil.nets.catalogue import NETS
from splitveil.nets.channel import Channel, GaussianNoise
from splitveil.nets.exit import sureness, threshold_for
from splitveil.nets.split import SplitModel, cut
from splitveil.provenance import device_name, versions
from splitveil.serve.client import Client
from splitveil.serve.export import export_model
from splitveil.serve.transport import HttpTransport, Reply
from splitveil.table import Column, Table, fixed

WAYS = {"alone": "alone", "split": "noise", "early exit": "early-exit"}  # and their defences
Images = np.ndarray[Any, np.dtype[np.float32]]

TABLE = Table(
    Column("mode", "answers"),
    Column("median_ms", "ms per image", fmt=fixed(2)),
    Column("sent", "images sent", fmt=fixed(2)),
    Column("bytes_per_image", "bytes per image", fmt=fixed(0)),
)


def built(net: str, defence: str, images: Images, send: float) -> SplitModel:
    """A net with a defence; an exit rule sends this share of the images."""
    torch.manual_seed(0)
    entry, shape = NETS[net], images.shape[1:]
    model = cut(entry.build(shape, CLASSES), entry.cut_at, Channel([GaussianNoise(NOISE)]))
    model = find_defence(defence).assemble(model, shape, CLASSES).eval()
    if model.exit is not None:
        with torch.no_grad():
            own, _ = model.both_answers(torch.from_numpy(images))
        found = threshold_for(sureness(own, model.exit.kind), send)
        model.exit.thresholds.fill_(found)
    return model


class Counted:
    """A transport that counts requests and the bytes of their bodies, both ways."""

    def __init__(self, url: str) -> None:
        self._inner = HttpTransport(url, timeout=10.0, ca_file=None)
        self.requests = self.bytes = 0

    def __call__(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """Pass a request on."""
        reply = self._inner(method, path, body, headers)
        if method == "POST":
            self.requests += 1
            self.bytes += len(body) + len(reply.body)
        return reply


@contextmanager
def opened(way: str, folder: Path) -> Iterator[tuple[Client, Counted | None]]:
    """A client of an export, with its server where it has one."""
    if way == "alone":
        with Client(folder) as client:
            yield client, None
        return
    with server(folder) as (url, _):
        counted = Counted(url)
        with Client(folder, counted, threads=1) as client:
            yield client, counted


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Milliseconds, bytes and share sent of each way."""
    shape = SHAPES.get(options.net, (3, 32, 32))
    x = np.random.default_rng(0).random((options.images, *shape), dtype=np.float32)
    spent: dict[str, list[float]] = {way: [] for way in WAYS}
    sent = dict.fromkeys(WAYS, 0.0)
    counts: dict[str, tuple[float, float]] = {}
    with ExitStack() as stack:
        running = {}
        for way, defence in WAYS.items():
            folder = scratch / way.replace(" ", "-")
            model = built(options.net, defence, x, options.send)
            export_model(model, shape, folder, name=way.replace(" ", "-"), validation=x)
            running[way] = stack.enter_context(opened(way, folder))
            running[way][0].answer(x[:8])  # the connection is open, everything is loaded
        before = {way: (0 if c is None else c.requests, 0 if c is None else c.bytes)
                  for way, (_, c) in running.items()}  # fmt: skip
        for _ in range(options.rounds):
            for way, (client, _) in running.items():
                began, asked = time.perf_counter(), 0
                for image in x:
                    asked += "server" in client.answer(image[None]).where
                spent[way].append(1000 * (time.perf_counter() - began) / len(x))
                sent[way] = asked / len(x)
        for way, (_, counted) in running.items():
            every = len(x) * options.rounds
            now = (0, 0) if counted is None else (counted.requests, counted.bytes)
            requests, size = (a - b for a, b in zip(now, before[way], strict=True))
            counts[way] = requests / every, size / every
    rows = [
        {
            "mode": way,
            "classes": CLASSES,
            "best_ms": min(spent[way]),
            "median_ms": statistics.median(spent[way]),
            "repeats": options.rounds,
            "sent": sent[way],
            "requests_per_image": counts[way][0],
            "bytes_per_image": counts[way][1],
        }
        for way in WAYS
    ]
    middle = {row["mode"]: row["median_ms"] for row in rows}
    return {
        "suite": "exit",
        "command": f"python benchmarks/exit_cost.py {' '.join(sys.argv[1:])}",
        "net": options.net,
        "batch": 1,
        "dim": int(np.prod(shape)),
        "images": options.images,
        "noise_std": NOISE,
        "device": device_name(torch.device("cpu")),
        "versions": versions(),
        "rows": rows,
        "ratios": {f"{way} to split": middle[way] / middle["split"] for way in WAYS},
    }


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--net", default="thin-deep")
    parser.add_argument("--send", type=float, default=0.3, help="share that the exit rule sends")
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(options, Path(scratch))
    print(TABLE.render(found["rows"], "markdown"))
    options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
