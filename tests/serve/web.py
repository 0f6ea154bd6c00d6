"""A served page and what its server was sent; an export with an attacker."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper
from serve.browser import Browser
from serve.conftest import NOISE, Exported
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from splitveil.grid import step_of
from splitveil.serve import page
from splitveil.serve.manifest import ATTACKER, FILE, WIRE, sha256
from splitveil.serve.server import load_app, running
from splitveil.serve.wire import TensorSpec, decode_request

Rows = NDArray[np.float32]

Z = TensorSpec(name=WIRE, shape=(8, 4, 4), datatype="INT16", step=float(step_of(NOISE)))
READY = "document.body?.dataset.state === 'ready'"


def need_runtime() -> None:
    """Leave a test out where the page cannot run; in CI it fails."""
    if page.has_runtime():
        return
    if os.environ.get("CI") == "true":
        pytest.fail("onnxruntime-web is not here; CI must run `make web` first")
    pytest.skip("onnxruntime-web is not here; run `make web` for this test")


@dataclass(frozen=True)
class Call:
    """A request as it arrived."""

    method: str
    path: str
    query: bytes
    headers: dict[str, str]
    body: bytes

    def rows(self) -> Rows:
        length = self.headers["inference-header-content-length"]
        found: Rows = decode_request(self.body, length, Z, "logits", 1).rows
        return found


@dataclass
class Recorder:
    """Passes everything on to an application and keeps what was asked."""

    app: ASGIApp
    calls: list[Call] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts: list[bytes] = []

        async def listened() -> Message:
            message = await receive()
            parts.append(message.get("body", b""))
            return message

        if scope["type"] == "http":
            found = {k.decode(): v.decode() for k, v in scope["headers"]}
            asked = (scope["method"], scope["path"], scope["query_string"], found)
            await self.app(scope, listened, send)
            self.calls.append(Call(*asked, b"".join(parts)))
        else:
            await self.app(scope, receive, send)

    def sent(self) -> list[Call]:
        return [c for c in self.calls if c.path.endswith("/infer")]


@contextmanager
def served(folder: Path, token: str | None = None) -> Iterator[tuple[str, Recorder]]:
    recorder = Recorder(load_app(folder, threads=1, token=token))
    with running(recorder) as url:
        yield url, recorder


def with_attacker(exported: Exported, folder: Path) -> Path:
    """A copy of an export with an attacker: a sigmoid of a random map of z."""
    copytree(exported.folder, folder)
    weight = np.random.default_rng(0).normal(0, 0.5, (128, 64)).astype(np.float32)
    nodes = [
        helper.make_node("Flatten", ["z"], ["flat"]),
        helper.make_node("MatMul", ["flat", "w"], ["sum"]),
        helper.make_node("Sigmoid", ["sum"], ["grey"]),
        helper.make_node("Reshape", ["grey", "shape"], ["image"]),
    ]
    graph = helper.make_graph(
        nodes,
        "attacker",
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, ["n", 8, 4, 4])],
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["n", 1, 8, 8])],
        [
            helper.make_tensor("w", TensorProto.FLOAT, weight.shape, weight.ravel()),
            helper.make_tensor("shape", TensorProto.INT64, [4], [-1, 1, 8, 8]),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    content = model.SerializeToString()
    (folder / ATTACKER).write_bytes(content)
    files = {**exported.manifest.files, ATTACKER: sha256(content)}
    made = replace(exported.manifest, files=files, attacker={"attack": "decoder-small"})
    (folder / FILE).write_text(made.to_json(), encoding="utf-8")
    return folder


def visit(browser: Browser, url: str) -> None:
    browser.visit("about:blank")
    browser.visit(url)
    browser.wait(READY)


def send(browser: Browser) -> None:
    browser.value("document.getElementById('status').className = ''")
    browser.value("document.getElementById('send').click()")
    browser.wait("document.getElementById('status').className !== ''")
    assert text(browser, "status") == "Answered."


def upload(browser: Browser, path: Path) -> None:
    """Take a file, and wait until its pixels are in the page."""
    browser.value("document.getElementById('taken').textContent = ''")
    browser.choose("#file", path)
    browser.wait("document.getElementById('taken').textContent !== ''")


def text(browser: Browser, where: str) -> str:
    return str(browser.value(f"document.getElementById('{where}').innerText"))


def shown(browser: Browser, canvas: str) -> NDArray[np.uint8]:
    """Red values of a canvas' own pixels."""
    found: list[Any] = browser.value(
        f"(() => {{ const c = document.getElementById('{canvas}'); const d = c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height); return [c.height, c.width, ...d.data]; })()"
    )
    return np.array(found[2:], np.uint8).reshape(found[0], found[1], 4)[..., 0]
