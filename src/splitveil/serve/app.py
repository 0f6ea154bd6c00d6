"""The ASGI application: every check a request must pass, and the routes of the KServe v2 protocol.

A request meets, in this order: the token, the bound on requests in flight, the bound on its size,
the time it may take to arrive, the checks of `wire`, the bound on the queue, the time it may wait.
Whatever fails is answered with a status and a reason; the model never sees it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from splitveil.serve.batching import Batcher, BusyError, ClosingError
from splitveil.serve.faults import WireError
from splitveil.serve.gate import OPEN_PATHS, RETRY, Gate, refuse
from splitveil.serve.limits import Limits
from splitveil.serve.manifest import DATATYPE, LOGITS, WIRE, Manifest
from splitveil.serve.metrics import CONTENT_TYPE, ServerMetrics
from splitveil.serve.openapi import document
from splitveil.serve.page import ASSETS, Page, is_page
from splitveil.serve.session import Half
from splitveil.serve.wire import HEADER_LENGTH, TensorSpec, decode_request, encode_answer

VERSION = "1"  # an export holds one version of its model


class Service:
    """One head, its queue and its counters."""

    def __init__(self, manifest: Manifest, head: Half, limits: Limits) -> None:
        self.manifest, self.limits, self._head = manifest, limits, head
        self.batcher: Batcher | None = None
        self.metrics = ServerMetrics(lambda: 0 if self.batcher is None else self.batcher.waiting)
        self._wire = TensorSpec(name=WIRE, shape=manifest.wire_shape)
        self._logits = TensorSpec(name=LOGITS, shape=(manifest.num_classes,))
        self._max_body = self._wire.max_body(limits.max_batch)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Ready between start and stop; stopping answers what was accepted."""
        del app
        batcher = Batcher(
            self._head,
            max_batch=self.limits.max_batch,
            max_delay=self.limits.max_delay,
            max_waiting=self.limits.max_waiting,
            observe=self.metrics.batch,
        )
        batcher.start()
        self.batcher = batcher
        yield
        await batcher.close()
        self.batcher = None

    async def infer(self, request: Request) -> Response:
        """Answer one infer call."""
        self._known(request)
        began = time.perf_counter()
        if self.batcher is None:
            raise ClosingError
        if self.batcher.full:  # said before the body costs anything
            raise BusyError
        body = await self._body(request)
        length = request.headers.get(HEADER_LENGTH)
        asked = decode_request(body, length, self._wire, LOGITS, self.limits.max_batch)
        async with asyncio.timeout(self.limits.answer_seconds):
            logits = await self.batcher.submit(asked.rows)
        if not np.isfinite(logits).all():  # finite numbers far from any z can overflow in the head
            raise WireError("the model has no finite answer for these numbers", 422)
        answer = encode_answer(
            logits, self._logits, self.manifest.name, asked.id, binary=asked.binary_answer
        )
        self.metrics.seconds.observe(time.perf_counter() - began)
        return Response(answer.body, headers=dict(answer.headers))

    async def _body(self, request: Request) -> bytes:
        """The body, never more than the largest valid one."""
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise WireError("compressed bodies are not read; send it plain", 415)
        told = request.headers.get("content-length", "0")
        if told.isdigit() and int(told[:19]) > self._max_body:
            raise WireError(f"the body is {told[:19]} bytes; the limit is {self._max_body}", 413)
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.limits.read_seconds):
                async for part in request.stream():
                    size += len(part)
                    if size > self._max_body:
                        raise WireError(
                            f"the body exceeds the limit of {self._max_body} bytes", 413
                        )
                    parts.append(part)
        except TimeoutError as err:
            limit = self.limits.read_seconds
            raise WireError(f"the body did not arrive within {limit:g} s", 408) from err
        return b"".join(parts)

    def _known(self, request: Request) -> None:
        name, version = request.path_params["name"], request.path_params.get("version", VERSION)
        if (name, version) != (self.manifest.name, VERSION):
            raise WireError(f"the only model is '{self.manifest.name}', version {VERSION}", 404)

    async def about(self, request: Request) -> Response:
        """The server's metadata."""
        del request
        told = {"name": "splitveil", "version": version("splitveil")}
        return JSONResponse(told | {"extensions": ["binary_tensor_data"]})

    async def model(self, request: Request) -> Response:
        """The model's metadata."""
        self._known(request)

        def tensor(spec: TensorSpec) -> dict[str, Any]:
            return {"name": spec.name, "datatype": DATATYPE, "shape": [-1, *spec.shape]}

        return JSONResponse(
            {
                "name": self.manifest.name,
                "versions": [VERSION],
                "platform": "onnxruntime_onnx",
                "inputs": [tensor(self._wire)],
                "outputs": [tensor(self._logits)],
                "parameters": {"export": self.manifest.identity},
            }
        )

    async def model_ready(self, request: Request) -> Response:
        """200 while the model answers."""
        self._known(request)
        return await self.ready(request)

    async def ready(self, request: Request) -> Response:
        """200 between start and stop."""
        del request
        if self.batcher is None:
            return refuse(503, "the server is starting or stopping", RETRY)
        return JSONResponse({"ready": True})

    async def live(self, request: Request) -> Response:
        """200 while the process answers."""
        del request
        return JSONResponse({"live": True})

    async def scrape(self, request: Request) -> Response:
        """The counters, for Prometheus."""
        del request
        return PlainTextResponse(self.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def failed(self, request: Request, error: Exception) -> Response:
        """Whatever was raised, as an answer with a reason."""
        del request
        status, reason, headers = explain(error)
        self.metrics.refusals.add(type(error).__name__)
        return refuse(status, reason, headers)


_ANSWERS: Mapping[type[Exception], tuple[int, str, Mapping[str, str] | None]] = {
    BusyError: (429, "too many rows are waiting; try again later", RETRY),
    ClosingError: (503, "the server is shutting down", RETRY),
    TimeoutError: (504, "the answer took too long; try again later", RETRY),
    ClientDisconnect: (400, "the client went away before its body was read", None),
    Exception: (500, "the server failed; its log says more", None),
}


def explain(error: Exception) -> tuple[int, str, Mapping[str, str] | None]:
    """Status, reason and headers for what went wrong."""
    if isinstance(error, WireError):
        return error.status, str(error), None
    if isinstance(error, HTTPException):
        return error.status_code, error.detail, error.headers
    return next(answer for kind, answer in _ANSWERS.items() if isinstance(error, kind))


def make_app(
    manifest: Manifest,
    head: Half,
    limits: Limits | None = None,
    token: str | None = None,
    *,
    folder: Path | None = None,
) -> ASGIApp:
    """The application of one model, with a page at `/` where the export's `folder` is given.

    With a token, only `OPEN_PATHS` and the page's own files answer without it.
    """
    service = Service(manifest, head, limits or Limits())
    described = document(
        manifest, version("splitveil"), service.limits.max_batch, token=token is not None
    )

    async def openapi(request: Request) -> Response:
        del request
        return JSONResponse(described)

    routes = [
        Route("/openapi.json", openapi),
        Route("/v2", service.about),
        Route("/v2/health/live", service.live),
        Route("/v2/health/ready", service.ready),
        Route("/metrics", service.scrape),
    ]
    for model in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        routes += [
            Route(model, service.model),
            Route(f"{model}/ready", service.model_ready),
            Route(f"{model}/infer", service.infer, methods=["POST"]),
        ]
    if folder is not None:
        routes += Page(manifest, folder, token=token is not None).routes()
    app = Starlette(
        routes=routes,
        lifespan=service.lifespan,
        exception_handlers=dict.fromkeys((HTTPException, WireError, *_ANSWERS), service.failed),
    )
    limit = service.limits.max_in_flight
    if folder is None:
        return Gate(app, service.metrics, limit, token)
    is_open = frozenset((*OPEN_PATHS, *ASSETS)).__contains__
    return Gate(app, service.metrics, limit, token, is_open=is_open, is_page=is_page)
