"""The server: the head behind the KServe v2 protocol. Uvicorn and onnxruntime, no torch.

A request passes, in this order: the token, the limit on requests in flight, the limit on its size,
the time limit of its arrival, the checks of `wire`, the limit of the queue, the time limit of its
answer. A request that fails gets a status and a reason; the model never sees it.
"""

import asyncio
import json
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
from starlette.types import ASGIApp

from splitveil.errors import ServerError, WireError
from splitveil.serve import admission, page
from splitveil.serve.admission import RETRY, BusyError, ClosingError, Limits, refuse
from splitveil.serve.manifest import SERVER, Manifest, OnnxHalf, load_half, open_export
from splitveil.serve.wire import HEADER_LENGTH, Json, decode_request, encode_answer

VERSION = "1"  # an export holds one version of its model
BACKLOG = 1024  # connections the system holds before they are accepted
DRAIN_SECONDS = 30  # to answer what was accepted before stopping
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # Prometheus' text format

_ANSWERS: Mapping[type[Exception], tuple[int, str, Mapping[str, str] | None]] = {
    BusyError: (429, "too many rows are waiting; try again later", RETRY),
    ClosingError: (503, "the server is shutting down", RETRY),
    TimeoutError: (504, "the answer took too long; try again later", RETRY),
    ClientDisconnect: (400, "the client went away before its body was read", None),
    Exception: (500, "the server failed; see its log", None),
}


class Service:
    """One model's head with its queue and metrics."""

    def __init__(self, manifest: Manifest, head: OnnxHalf, limits: Limits, *, token: bool) -> None:
        self.manifest, self.limits, self._head = manifest, limits, head
        self.batcher: admission.Batcher | None = None
        self.metrics = admission.ServerMetrics()
        self._max_body = manifest.wire.max_body(limits.max_batch)
        self._document = document(manifest, version("splitveil"), limits.max_batch, token=token)

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Ready between start and stop; before it stops, it answers what was accepted."""
        self.batcher = batcher = admission.Batcher(self._head, self.limits, self.metrics)
        batcher.start()
        yield
        await batcher.close()
        self.batcher = None

    def routes(self) -> list[Route]:
        """All routes but the page's."""
        about: Json = {"name": "splitveil", "version": version("splitveil")}
        about["extensions"] = ["binary_tensor_data"]
        routes = [
            Route("/openapi.json", always(self._document)),
            Route("/v2", always(about)),
            Route("/v2/health/live", always({"live": True})),
            Route("/v2/health/ready", self.ready),
            Route("/metrics", self.scrape),
        ]
        for model in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
            routes += [
                Route(model, self.model),
                Route(f"{model}/ready", self.model_ready),
                Route(f"{model}/infer", self.infer, methods=["POST"]),
            ]
        return routes

    async def infer(self, request: Request) -> Response:
        """Answer one infer call."""
        self._known(request)
        began = time.perf_counter()
        if self.batcher is None:
            raise ClosingError
        if self.batcher.full:  # before reading the body, which would cost time and memory
            raise BusyError
        body = await self._body(request)
        length = request.headers.get(HEADER_LENGTH)
        wire, logits = self.manifest.wire, self.manifest.logits
        asked = decode_request(body, length, wire, logits.name, self.limits.max_batch)
        async with asyncio.timeout(self.limits.answer_seconds):
            found = await self.batcher.submit(asked.rows)
        if not np.isfinite(found).all():  # finite numbers far from any z can overflow in the head
            raise WireError("the model's answer to these numbers is not finite", 422)
        answer = encode_answer(
            found, logits, self.manifest.name, asked.id, binary=asked.binary_answer
        )
        self.metrics.seconds.observe(time.perf_counter() - began)
        return Response(answer.body, headers=dict(answer.headers))

    async def _body(self, request: Request) -> bytes:
        """The body, up to the size of the largest valid one."""
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise WireError("compressed bodies are not supported; send it uncompressed", 415)
        told = request.headers.get("content-length", "0")
        if told.isdigit() and int(told[:19]) > self._max_body:
            raise WireError(f"the body is {told[:19]} bytes; the limit is {self._max_body}", 413)
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.read_seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > self._max_body:
                        raise WireError(
                            f"the body exceeds the limit of {self._max_body} bytes", 413
                        )
        except TimeoutError as err:
            limit = self.limits.read_seconds
            raise WireError(f"the body did not arrive within {limit:g} s", 408) from err
        return bytes(body)

    def _known(self, request: Request) -> None:
        asked = request.path_params["name"], request.path_params.get("version", VERSION)
        if asked != (self.manifest.name, VERSION):
            raise WireError(f"the only model is '{self.manifest.name}', version {VERSION}", 404)

    async def model(self, request: Request) -> Response:
        """The model's metadata."""
        self._known(request)
        return JSONResponse(
            {
                "name": self.manifest.name,
                "versions": [VERSION],
                "platform": "onnxruntime_onnx",
                "inputs": [self.manifest.wire.metadata()],
                "outputs": [self.manifest.logits.metadata()],
                "parameters": {"export": self.manifest.identity},
            }
        )

    async def model_ready(self, request: Request) -> Response:
        """200 while the model answers."""
        self._known(request)
        return await self.ready(request)

    async def ready(self, _: Request) -> Response:
        """200 between start and stop, else 503."""
        if self.batcher is None:
            return refuse(503, "the server is starting or stopping", RETRY)
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
        return refuse(*next(told for kind, told in _ANSWERS.items() if isinstance(error, kind)))


def always(content: Json) -> Callable[[Request], Awaitable[Response]]:
    """A route with a constant answer."""

    async def answer(_: Request) -> Response:
        return JSONResponse(content)

    return answer


def document(manifest: Manifest, release: str, max_rows: int, *, token: bool) -> Json:
    """The OpenAPI 3.1 document of one model's server.

    >>> from splitveil.serve.manifest import Manifest
    >>> m = Manifest(name="m", image_shape=(1, 2, 2), wire_shape=(3,), num_classes=2)
    >>> sorted(document(m, "1", 64, token=False)["paths"])[:2]
    ['/metrics', '/v2']
    """
    text = Path(__file__).with_name("openapi.json").read_text(encoding="utf-8")
    found: Json = json.loads(
        text.replace("{{name}}", manifest.name)
        .replace("{{version}}", release)
        .replace('"{{wire_shape}}"', _shape_schema(max_rows, manifest.wire_shape))
        .replace('"{{logits_shape}}"', _shape_schema(max_rows, (manifest.num_classes,)))
    )
    if token:
        found["components"] = {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}}
        found["security"] = [{"token": []}]
    return found


def _shape_schema(max_rows: int, shape: tuple[int, ...]) -> str:
    """JSON schema of a tensor's shape: 1 to `max_rows` rows of exactly this shape."""
    rows = {"type": "integer", "minimum": 1, "maximum": max_rows}
    sizes = [rows, *({"const": n} for n in shape)]
    n = len(sizes)
    return json.dumps({"type": "array", "prefixItems": sizes, "minItems": n, "maxItems": n})


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
    limit = service.limits.max_in_flight
    return admission.AdmissionGate(app, service.metrics, limit, token, has_page=folder is not None)


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
) -> ASGIApp:
    """The application of an export, with its page, for any ASGI server; checks the head's hash."""
    place = Path(folder)
    manifest = open_export(place, allow_no_noise=allow_no_noise)
    head = load_half(place, manifest, SERVER, threads)
    return make_app(manifest, head, limits or Limits(), token, folder=place)


def make_server(app: ASGIApp, tls: Tls | None = None) -> uvicorn.Server:
    """A quiet Uvicorn for an application, which answers what it accepted before it stops."""
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=DRAIN_SECONDS,
        ssl_certfile=None if tls is None else str(tls.certificate),
        ssl_keyfile=None if tls is None else str(tls.key),
    )
    try:
        config.load()
    except OSError as err:  # ssl.SSLError is one
        raise ServerError(
            f"cannot use the certificate or its key: {err}; give two PEM files that match"
        ) from err
    return uvicorn.Server(config)


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
    ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until SIGTERM or Ctrl-C, then answer what was accepted and return.

    Args:
        app: An application of `make_app` or `load_app`.
        host: Address to listen on.
        port: Port; 0 takes a free one.
        tls: Certificate and key; None: no TLS.
        ready: Called with the server's address once it accepts connections.

    Example:
        `serve(load_app("runs/first/export"), port=8000, ready=print)`
    """
    server = make_server(app, tls)
    with listen(host, port) as listening:
        ready(address(listening, tls))
        # Uvicorn answers what it accepted and then raises Ctrl-C again; here it just means stop.
        with suppress(KeyboardInterrupt):
            asyncio.run(server.serve(sockets=[listening]))


@contextmanager
def running(
    app: ASGIApp, *, host: str = "127.0.0.1", port: int = 0, tls: Tls | None = None
) -> Iterator[str]:
    """Serve from a thread while the block runs, for tests and notebooks.

    Args:
        app: An application of `make_app` or `load_app`.
        host: Address to listen on.
        port: Port; 0 takes a free one.
        tls: Certificate and key; None: no TLS.

    Returns:
        A context manager that gives the server's address.

    Example:
        `with running(app) as url: Client(folder, url).infer(images)`
    """
    server = make_server(app, tls)
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
