"""Exports small enough to know by heart, and an application without sockets."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper
from starlette.types import ASGIApp

from splitveil.serve.exits import NOTHING
from splitveil.serve.manifest import (
    CLIENT,
    FILE,
    IMAGE,
    LOGITS,
    OWN,
    SERVER,
    WIRE,
    Manifest,
    sha256,
)  # fmt: skip

Rows = NDArray[np.float32]

SHAPE = (1, 2, 3)  # of an image and of its smashed data
CLASSES = 4
WEIGHT: Rows = ((np.arange(24).reshape(6, 4) - 11) / 10).astype(np.float32)
NOISY = ({"kind": "gaussian", "std": 0.5},)


def head(rows: Rows) -> Rows:
    """What the tiny server computes."""
    return rows.reshape(len(rows), -1) @ WEIGHT


def encode(images: Rows) -> Rows:
    """What the tiny client computes before its channel."""
    return (1 / (1 + np.exp(-images))).astype(np.float32)


def manifest(**changes: Any) -> Manifest:  # noqa: ANN401
    facts: dict[str, Any] = {
        "name": "tiny", "image_shape": SHAPE, "wire_shape": SHAPE, "num_classes": CLASSES
    }  # fmt: skip
    return Manifest(**facts | changes)


def onnx_bytes(nodes: list[Any], given: str, got: dict[str, tuple[int, ...]]) -> bytes:
    """A network from a tensor of shape `SHAPE` to tensors of these shapes."""
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info(given, TensorProto.FLOAT, ["n", *SHAPE])],
        [helper.make_tensor_value_info(k, TensorProto.FLOAT, ["n", *v]) for k, v in got.items()],
        [helper.make_tensor("w", TensorProto.FLOAT, WEIGHT.shape, WEIGHT.ravel())],
    )
    opset = [helper.make_opsetid("", 18)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=10)
    onnx.checker.check_model(model)
    found: bytes = model.SerializeToString()
    return found


def write_export(
    folder: Path, stages: tuple[Any, ...] = NOISY, exit: dict[str, Any] | None = None
) -> Path:
    """A folder as `export_model` writes it: sigmoid on the device, a linear map on the server.

    With an exit, the same linear map of the image is the own head.
    """
    folder.mkdir()
    encoder = helper.make_node("Sigmoid", [IMAGE], [WIRE])
    own = linear(IMAGE, OWN)
    wire: dict[str, tuple[int, ...]] = {WIRE: SHAPE}
    logits: dict[str, tuple[int, ...]] = {OWN: (CLASSES,)}
    if exit == NOTHING:
        networks = {CLIENT: onnx_bytes(own, IMAGE, logits)}
    else:
        both = onnx_bytes([encoder, *own], IMAGE, wire | logits)
        networks = {
            CLIENT: onnx_bytes([encoder], IMAGE, wire) if exit is None else both,
            SERVER: onnx_bytes(linear(WIRE, LOGITS), WIRE, {LOGITS: (CLASSES,)}),
        }
    for name, content in networks.items():
        (folder / name).write_bytes(content)
    files = {name: sha256(content) for name, content in networks.items()}
    changes = {"wire_shape": (), "stages": ()} if exit == NOTHING else {"stages": stages}
    made = manifest(files=files, exit=exit, **changes)
    (folder / FILE).write_text(made.to_json(), encoding="utf-8")
    return folder


def linear(given: str, got: str) -> list[Any]:
    flat = helper.make_node("Flatten", [given], [f"flat {got}"])
    return [flat, helper.make_node("MatMul", [f"flat {got}", "w"], [got])]


def pictures(n: int, seed: int = 0) -> Rows:
    return np.random.default_rng(seed).random((n, *SHAPE), dtype=np.float32)


@dataclass(frozen=True)
class Answer:
    """What an application answered; header names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:  # noqa: ANN401 - any JSON value
        return json.loads(self.body)


async def call(
    app: ASGIApp,
    method: str,
    path: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """One request, straight into the application."""
    sent: list[Any] = []
    parts = [body]

    async def receive() -> dict[str, Any]:
        if parts:
            return {"type": "http.request", "body": parts.pop(), "more_body": False}
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:  # noqa: ANN401
        sent.append(message)

    given = {"content-length": str(len(body))} | {k.lower(): v for k, v in (headers or {}).items()}
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
        "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
        "root_path": "", "headers": [(k.encode(), v.encode("latin-1")) for k, v in given.items()],
        "client": ("test", 1), "server": ("test", 80),
    }  # fmt: skip
    await app(scope, receive, send)
    start, *rest = sent
    got = {k.decode().lower(): v.decode() for k, v in start["headers"]}
    return Answer(start["status"], got, b"".join(m.get("body", b"") for m in rest))


@asynccontextmanager
async def started(app: ASGIApp) -> AsyncIterator[ASGIApp]:
    """The application between its startup and its shutdown."""
    inbox: asyncio.Queue[Any] = asyncio.Queue()
    outbox: asyncio.Queue[Any] = asyncio.Queue()
    task = asyncio.ensure_future(app({"type": "lifespan", "state": {}}, inbox.get, outbox.put))
    await inbox.put({"type": "lifespan.startup"})
    assert (await outbox.get())["type"] == "lifespan.startup.complete"
    yield app
    await inbox.put({"type": "lifespan.shutdown"})
    assert (await outbox.get())["type"] == "lifespan.shutdown.complete"
    await task
