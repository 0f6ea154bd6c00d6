"""The server: the head behind the KServe v2 protocol. Uvicorn and onnxruntime, no torch.

A request passes, in this order: the token, the limit on requests in flight, the limit on its size,
the time limit of its arrival, the checks of `wire`, the limit of the queue, the time limit of its
answer. A request that fails gets a status and a reason; the model never sees it.
"""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import uvicorn
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from splitveil.errors import ExportError, ServerError, WireError
from splitveil.io import Json, check_file
from splitveil.serve import admission, kserve, page
from splitveil.serve.admission import CROWDED, RETRY, CrowdedError, Limits, refuse
from splitveil.serve.batching import Batcher, BusyError, ClosingError, Statistics, StoppedError
from splitveil.serve.connections import BoundedServer, ConnectionLimits
from splitveil.serve.kserve import VERSION
from splitveil.serve.manifest import SERVER, Manifest, OnnxHalf, load_half, open_export
from splitveil.serve.wire import HEADER_LENGTH, decode_request, encode_answer

LOG = logging.getLogger(__name__)
FAILED = 500
MAX_INDEX_BODY = 4096  # bytes
NEVER = 86_400  # seconds
BACKLOG = 1024  # connections the system holds before they are accepted
DRAIN_SECONDS = 30  # to answer what was accepted before stopping
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # Prometheus' text format

_ANSWERS: Mapping[type[Exception], tuple[int, str, Mapping[str, str] | None]] = {
    BusyError: (429, "too many rows are waiting; try again later", RETRY),
    CrowdedError: (503, CROWDED, RETRY),
    ClosingError: (503, "the server is shutting down", RETRY),
    StoppedError: (503, "the model has stopped; the server must be restarted", RETRY),
    TimeoutError: (504, "the answer took too long; try again later", RETRY),
    ClientDisconnect: (400, "the client went away before its body was read", None),
    Exception: (500, "the server failed; see its log", None),
}


class Service:
    """One model's head with its queue and metrics."""

    def __init__(self, manifest: Manifest, head: OnnxHalf, limits: Limits, *, token: bool) -> None:
        self.manifest, self.limits, self._head = manifest, limits, head
        self.batcher: Batcher | None = None
        self.metrics = admission.ServerMetrics()
        self.in_flight = admission.InFlight(limits.max_in_flight)
        self._max_body = manifest.wire.max_body(limits.max_batch)
        release = version("splitveil")
        self._document = kserve.document(manifest, release, limits.max_batch, token=token)

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Ready between start and stop; before it stops, it answers what was accepted."""
        self.batcher = batcher = Batcher(self._head, self.limits, self.metrics)
        batcher.start()
        yield
        await batcher.close()
        self.batcher = None

    @property
    def works(self) -> bool:
        """Whether the model answers."""
        return self.batcher is not None and self.batcher.works

    def routes(self) -> list[Route]:
        """All routes but the page's and the calls of `direct`."""
        manifest, limits = self.manifest, self.limits
        routes = [
            Route("/openapi.json", always(self._document)),
            Route("/v2", always(kserve.metadata())),
            Route("/v2/health/live", always({"live": True})),
            Route("/v2/health/ready", self.ready),
            Route("/v2/models/stats", self.statistics),
            Route("/v2/repository/index", self.index, methods=["POST"]),
            Route("/v2/repository/models/{name}/{verb:str}", self.manipulate, methods=["POST"]),
            Route("/metrics", self.scrape),
        ]
        for model in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
            routes += [
                Route(model, self.constant(kserve.model_metadata(manifest))),
                Route(f"{model}/config", self.constant(kserve.model_config(manifest, limits))),
                Route(f"{model}/ready", self.ready),
                Route(f"{model}/stats", self.statistics),
                Route(f"{model}/infer", self.infer, methods=["POST"]),
            ]
        return routes

    def direct(self) -> dict[tuple[str, str], ASGIApp]:
        """The calls that come often, by method and path: looked up, not matched with all routes."""

        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            request = Request(scope, receive)
            try:
                answer = await self.infer(request)
            except Exception as err:  # as Starlette does for the other routes
                answer = await self.failed(request, err)
            await answer(scope, receive, send)

        model = f"/v2/models/{self.manifest.name}"
        return {
            ("POST", f"{place}/infer"): call for place in (model, f"{model}/versions/{VERSION}")
        }

    async def infer(self, request: Request) -> Response:
        """Answer one infer call."""
        self._known(request)
        began = time.perf_counter()
        if self.batcher is None:
            raise ClosingError
        if self.batcher.full:  # before reading the body, which would cost time and memory
            raise BusyError
        self.in_flight.check()
        body = await self._body(request, self._max_body)
        length = request.headers.get(HEADER_LENGTH)
        wire, logits = self.manifest.wire, self.manifest.logits
        asked = decode_request(body, length, wire, logits.name, self.limits.max_batch)
        seconds = kserve.asked_seconds(asked.parameters, self.limits.answer_seconds)
        good = False
        try:
            with self.in_flight.answering():
                async with asyncio.timeout(seconds):
                    found = await self.batcher.submit(asked.rows)
            good = bool(np.isfinite(found).all())
        finally:
            spent = time.perf_counter() - began
            self.batcher.statistics.add_answer(spent, good=good)
        if not good:  # finite numbers far from any z can overflow in the head
            raise WireError("the model's answer to these numbers is not finite", 422)
        name = self.manifest.name
        answer = encode_answer(found, logits, name, asked.id, binary=asked.binary_answer)
        self.metrics.seconds.observe(spent)
        return Response(answer.body, headers=dict(answer.headers))

    async def _body(self, request: Request, most: int) -> bytes:
        """The body, up to the size of the largest valid one."""
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise WireError("compressed bodies are not supported; send it uncompressed", 415)
        told = request.headers.get("content-length", "0")
        if told.isdigit() and int(told[:19]) > most:
            raise WireError(f"the body is {told[:19]} bytes; the limit is {most}", 413)
        body = bytearray()
        try:
            async with self.in_flight.arriving(self.limits.read_seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        raise WireError(f"the body exceeds the limit of {most} bytes", 413)
        except TimeoutError as err:
            limit = self.limits.read_seconds
            raise WireError(
                f"the body did not arrive within {limit:g} s, or had to give way to others", 408
            ) from err
        return bytes(body)

    def _known(self, request: Request) -> None:
        path = request.path_params
        asked = path.get("name", self.manifest.name), path.get("version", VERSION)
        if asked != (self.manifest.name, VERSION):
            raise WireError(f"the only model is '{self.manifest.name}', version {VERSION}", 404)

    def constant(self, content: Json) -> Callable[[Request], Awaitable[Response]]:
        """A route of the model with a constant answer."""

        async def answer(request: Request) -> Response:
            self._known(request)
            return JSONResponse(content)

        return answer

    async def statistics(self, request: Request) -> Response:
        """Counts and times of the model."""
        self._known(request)
        found = Statistics() if self.batcher is None else self.batcher.statistics
        return JSONResponse(kserve.statistics(self.manifest, found))

    async def index(self, request: Request) -> Response:
        """The list of models."""
        body = await self._body(request, MAX_INDEX_BODY)
        return JSONResponse(kserve.index(self.manifest, body, ready=self.works))

    async def manipulate(self, request: Request) -> Response:
        """Refuse to load or unload a model."""
        if request.path_params["verb"] not in ("load", "unload"):
            raise WireError("Not Found", 404)
        raise WireError(kserve.ONE_MODEL)

    async def ready(self, request: Request) -> Response:
        """200 while the model answers, else 503."""
        self._known(request)
        if self.batcher is None:
            return refuse(503, "the server is starting or stopping", RETRY)
        if not self.batcher.works:
            return refuse(503, "the model does not answer; see the server's log", RETRY)
        return JSONResponse({"ready": True})

    async def scrape(self, _: Request) -> Response:
        """The metrics, for Prometheus."""
        return Response(generate_latest(self.metrics), headers={"Content-Type": METRICS_TYPE})

    async def failed(self, _: Request, error: Exception) -> Response:
        """An exception as an answer with a reason."""
        self.metrics.refusals.labels(type(error).__name__).inc()
        if isinstance(error, WireError):
            return refuse(error.status, str(error))
        if isinstance(error, HTTPException):
            return refuse(error.status_code, error.detail, error.headers)
        told = next(told for kind, told in _ANSWERS.items() if isinstance(error, kind))
        if told[0] == FAILED:
            LOG.error("a request failed: %s", type(error).__name__, exc_info=error)
        return refuse(*told)


def always(content: Json) -> Callable[[Request], Awaitable[Response]]:
    """A route with a constant answer."""

    async def answer(_: Request) -> Response:
        return JSONResponse(content)

    return answer


def make_app(
    manifest: Manifest,
    head: OnnxHalf,
    limits: Limits | None = None,
    token: str | None = None,
    *,
    folder: Path | None = None,
) -> ASGIApp:
    """The ASGI application of one model.

    Args:
        manifest: The export's manifest.
        head: The server's half as a function of rows.
        limits: How much work it accepts; default `Limits()`.
        token: Bearer token that all requests need, except `OPEN_PATHS` and the page's own files;
            None: no token.
        folder: The export, for a page at `/`; None: no page.

    Returns:
        The application, for `serve`, `running` or any ASGI server.

    Example:
        `make_app(read_manifest(folder), load_half(folder, manifest, "server.onnx"))`
    """
    service = Service(manifest, head, limits or Limits(), token=token is not None)
    pages = [] if folder is None else page.routes(manifest, folder, token=token is not None)
    app = Starlette(
        routes=[*service.routes(), *pages],
        lifespan=service.lifespan,
        exception_handlers=dict.fromkeys((HTTPException, WireError, *_ANSWERS), service.failed),
    )
    app.router.redirect_slashes = False  # a redirect would go to the host that the request names
    return admission.AdmissionGate(
        app,
        service.metrics,
        service.in_flight,
        token,
        has_page=folder is not None,
        direct=service.direct(),
    )


@dataclass(frozen=True, kw_only=True)
class Tls:
    """PEM files of a certificate (with its chain) and its private key."""

    certificate: Path
    key: Path


def load_app(
    folder: str | Path,
    *,
    limits: Limits | None = None,
    token: str | None = None,
    threads: int = 0,
    allow_no_noise: bool = False,
    verify: Path | None = None,
) -> ASGIApp:
    """The application of an export, with its page, for any ASGI server; checks the head's hash."""
    place = Path(folder)
    manifest = open_export(place, allow_no_noise=allow_no_noise, verify=verify)
    if manifest.silent:
        raise ExportError(
            f"{folder} answers alone on the device, so there is nothing to serve; use its client: "
            f"splitveil infer IMAGE --export {folder}"
        )
    head = load_half(place, manifest, SERVER, threads)
    found = head(np.zeros((1, *manifest.wire_shape), np.float32))
    if found.shape != (1, manifest.num_classes):
        raise ExportError(
            f"{place / SERVER} answers one row with shape {found.shape}, expected "
            f"{(1, manifest.num_classes)}; export the run again"
        )
    return make_app(manifest, head, limits or Limits(), token, folder=place)


def make_server(
    app: ASGIApp, tls: Tls | None = None, connections: ConnectionLimits | None = None
) -> BoundedServer:
    """A quiet Uvicorn for an application, which answers what it accepted before it stops.

    An application of `make_app` counts in its metrics the connections that a limit ends.
    """
    limits = connections or ConnectionLimits()
    gate = app if isinstance(app, admission.AdmissionGate) else None
    config = uvicorn.Config(
        app,
        loop="asyncio",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=NEVER,  # the room closes idle connections
        timeout_graceful_shutdown=DRAIN_SECONDS,
        ssl_certfile=None if tls is None else str(tls.certificate),
        ssl_keyfile=None if tls is None else str(tls.key),
    )
    try:
        for file in () if tls is None else (tls.certificate, tls.key):
            check_file(file)
        config.load()
    except OSError as err:  # ssl.SSLError is one
        raise ServerError(
            f"cannot use the certificate or its key: {err}; give two PEM files that match"
        ) from err
    return BoundedServer(config, limits, gate.count_ending if gate else lambda reason: None)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets that say TCP; without it, an answer waits some 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(BACKLOG)
        return listening
    except (OSError, OverflowError, UnicodeError) as err:  # the last two: bad port, bad host name
        listening.close()
        reason = getattr(err, "strerror", None) or err
        raise ServerError(
            f"cannot listen on {host}:{port}: {reason}; choose another --port or --host"
        ) from err


def address(listening: socket.socket, tls: Tls | None) -> str:
    """The address clients use."""
    host, port = listening.getsockname()[:2]
    scheme = "http" if tls is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def serve(
    app: ASGIApp,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    tls: Tls | None = None,
    connections: ConnectionLimits | None = None,
    ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until SIGTERM or Ctrl-C, then answer what was accepted and return.

    Args:
        app: An application of `make_app` or `load_app`.
        host: Address to listen on.
        port: Port; 0 takes a free one.
        tls: Certificate and key; None: no TLS.
        connections: How many there may be, and how slow; default `ConnectionLimits()`.
        ready: Called with the server's address once it accepts connections.

    Example:
        `serve(load_app("runs/first/export"), port=8000, ready=print)`
    """
    server = make_server(app, tls, connections)
    with listen(host, port) as listening:
        ready(address(listening, tls))
        # Uvicorn answers what it accepted and then raises Ctrl-C again; here it just means stop.
        with suppress(KeyboardInterrupt):
            asyncio.run(server.serve(sockets=[listening]))


@contextmanager
def running(
    app: ASGIApp,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tls: Tls | None = None,
    connections: ConnectionLimits | None = None,
) -> Iterator[str]:
    """Serve from a thread while the block runs, for tests and notebooks.

    Args:
        app: An application of `make_app` or `load_app`.
        host: Address to listen on.
        port: Port; 0 takes a free one.
        tls: Certificate and key; None: no TLS.
        connections: How many there may be, and how slow; default `ConnectionLimits()`.

    Returns:
        A context manager that gives the server's address.

    Example:
        `with running(app) as url: Client(folder, url).infer(images)`
    """
    server = make_server(app, tls, connections)
    with listen(host, port) as listening:
        thread = threading.Thread(
            target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True
        )
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.005)
        try:
            yield address(listening, tls)
        finally:
            server.should_exit = True
            thread.join()
