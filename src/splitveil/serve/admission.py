"""What a request passes before the queue: the token and the limits; and the server's metrics."""

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from splitveil.errors import ConfigError
from splitveil.serve import log
from splitveil.serve.page import is_own, is_page
from splitveil.serve.transport import header_safe

OPEN_PATHS = ("/v2/health/live", "/v2/health/ready")  # for health checks, which have no token
RETRY = {"Retry-After": "1"}
BEARER = {"WWW-Authenticate": "Bearer"}
MIN_TOKEN = 16
CROWDED = "too many requests at once; try again later"
ACCESS = logging.getLogger(log.ACCESS)
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
NAMED = frozenset(
    {
        "infer",
        "live",
        "ready",
        "config",
        "stats",
        "index",
        "load",
        "unload",
        "metrics",
        "openapi.json",
    }
)  # the last parts of paths that the log may name
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much work a server accepts.

    Args:
        max_batch: Rows the model runs at once, and the most rows of one request, ≥ 1.
        max_delay: Seconds a row may wait for others to share its batch, ≥ 0.
        max_waiting: Rows that may wait, ≥ max_batch; beyond, the answer is 429.
        max_in_flight: Requests that may be answered at once, and bodies that may arrive at once,
            ≥ 1; beyond, 503, and the oldest body gives way.
        read_seconds: Seconds a body may take to arrive, > max_delay; beyond, 408.
        answer_seconds: Seconds an answer may take, > max_delay; beyond, 504.

    >>> Limits(max_batch=8).max_waiting
    1024
    """

    max_batch: int = 64
    max_delay: float = 0.002
    max_waiting: int = 1024
    max_in_flight: int = 256
    read_seconds: float = 10.0
    answer_seconds: float = 30.0

    def __post_init__(self) -> None:
        if min(self.max_batch, self.max_in_flight) < 1 or self.max_waiting < self.max_batch:
            raise ConfigError(
                "max_batch and max_in_flight must be at least 1, max_waiting at least max_batch, "
                f"got {self.max_batch}, {self.max_in_flight} and {self.max_waiting}"
            )
        if not 0 <= self.max_delay < min(self.read_seconds, self.answer_seconds):
            raise ConfigError(
                "max_delay must be ≥ 0 and less than read_seconds and answer_seconds, got "
                f"{self.max_delay}, {self.read_seconds} and {self.answer_seconds}"
            )


class ServerMetrics(CollectorRegistry):
    """Metrics of one server; none depends on the content of a request.

    Values of labels come from a small fixed set, never from a request.
    """

    def __init__(self) -> None:
        super().__init__()
        count, histogram = partial(Counter, registry=self), partial(Histogram, registry=self)
        gauge = partial(Gauge, registry=self)
        self.requests = count("splitveil_requests_total", "Answers by HTTP status.", ["code"])
        self.refusals = count(
            "splitveil_refused_total", "Requests refused before the model, by reason.", ["reason"]
        )
        self.connections = count(
            "splitveil_connections_ended_total",
            "Connections that a limit refused or closed, by reason.",
            ["reason"],
        )
        seconds = partial(histogram, buckets=SECONDS)
        self.seconds = seconds("splitveil_infer_seconds", "From a call's headers to its answer.")
        self.batch_rows = histogram("splitveil_batch_rows", "Rows run at once.", buckets=ROWS)
        self.batch_seconds = seconds("splitveil_batch_seconds", "The model's time for a batch.")
        self.waiting = gauge("splitveil_rows_waiting", "Rows that wait for the model.")
        self.in_flight = gauge("splitveil_requests_in_flight", "Requests being answered.")

    def collect(self) -> Iterator[Metric]:
        """Every metric, without the `_created` time series that the library adds."""
        for metric in super().collect():
            metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
            yield metric


def refuse(status: int, reason: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """An error answer with its reason."""
    return JSONResponse({"error": reason}, status, headers)


class CrowdedError(Exception):
    """Too many requests are being answered."""


class InFlight:
    """The requests that are being answered, and those whose bodies are still arriving.

    Neither are more than `limit`. Answers are not interrupted: one too many is refused. But the
    body that has been arriving longest gives way to a new one, so that slow senders keep nobody
    out.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.now = 0
        self._bodies: dict[asyncio.Timeout, None] = {}  # the oldest first

    def check(self) -> None:
        """Raise `CrowdedError` if no other request may be answered."""
        if self.now >= self._limit:
            raise CrowdedError

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count one answer."""
        self.check()
        self.now += 1
        try:
            yield
        finally:
            self.now -= 1

    @asynccontextmanager
    async def arriving(self, seconds: float) -> AsyncIterator[None]:
        """Give a body this time, or less when too many arrive; raises `TimeoutError`."""
        if len(self._bodies) >= self._limit:
            oldest = next(iter(self._bodies))
            del self._bodies[oldest]
            oldest.reschedule(asyncio.get_running_loop().time())
        async with asyncio.timeout(seconds) as own:
            self._bodies[own] = None
            try:
                yield
            finally:
                self._bodies.pop(own, None)


class AdmissionGate:
    """Checks the token, limits the requests in flight, and counts every answer.

    The page, if there is one, has no limit beside that on connections: it costs little. Requests
    of `direct`, by method and path, go to their own application, which counts them itself.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: ServerMetrics,
        in_flight: InFlight,
        token: str | None,
        *,
        has_page: bool,
        direct: Mapping[tuple[str, str], ASGIApp],
    ) -> None:
        if token is not None and not (header_safe(token) and len(token) >= MIN_TOKEN):
            raise ConfigError(
                f"a token must be at least {MIN_TOKEN} printable ASCII characters without spaces; "
                "make one: python -c 'import secrets; print(secrets.token_urlsafe())'"
            )
        self._app, self._metrics, self._has_page = app, metrics, has_page
        self._in_flight, self._direct = in_flight, direct
        metrics.in_flight.set_function(lambda: in_flight.now)
        self._token = None if token is None else _digest(token.encode())
        self._answers: dict[int, Counter] = {}

    def count_ending(self, reason: str) -> None:
        """Count a connection that a limit of the server has ended."""
        self._metrics.connections.labels(reason).inc()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the lifespan."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                status = message["status"]
                if status not in self._answers:
                    self._answers[status] = self._metrics.requests.labels(str(status))
                self._answers[status].inc()
                if ACCESS.isEnabledFor(logging.INFO):
                    ACCESS.info(*access_line(scope, status, time.perf_counter() - began))
            await send(message)

        await self._choose(scope)(scope, receive, counted)

    def _choose(self, scope: Scope) -> ASGIApp:
        """The application that answers a request."""
        path = scope["path"]
        if path in OPEN_PATHS:  # not limited: a busy server is alive and must not be restarted
            return self._app
        if not (self._has_page and is_own(path)) and not self._allowed(scope):
            return refuse(401, "a valid bearer token is needed", BEARER)
        if self._has_page and is_page(path):
            return self._app
        return self._direct.get((scope["method"], path), self._limited)

    async def _limited(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._in_flight.check()
        except CrowdedError:
            await refuse(503, CROWDED, RETRY)(scope, receive, send)
            return
        with self._in_flight.answering():
            await self._app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        if self._token is None:
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, sent = (given[0] if given else b"").partition(b" ")
        # Digests have equal length, so the comparison takes the same time for every token.
        equal = hmac.compare_digest(_digest(sent), self._token)
        return equal and scheme.lower() == b"bearer"


def access_line(scope: Scope, status: int, seconds: float) -> tuple[str | int | float, ...]:
    """What the log says of an answer: nothing that a stranger wrote.

    >>> scope = {"method": "POST", "path": "/v2/models/m/infer", "client": ("127.0.0.1", 9)}
    >>> line, *values = access_line(scope, 200, 0.0123)
    >>> line % tuple(values)
    '127.0.0.1 POST infer 200 12.3 ms'
    """
    path: str = scope["path"]
    last = path.rpartition("/")[2]
    if path.startswith("/v2"):
        what = last if last in NAMED else "model"
    else:
        what = "page" if is_page(path) else (last if last in NAMED else "other")
    client = scope.get("client") or ("?",)
    method = scope["method"] if scope["method"] in METHODS else "?"
    return "%s %s %s %d %.1f ms", client[0], method, what, status, 1000 * seconds


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()
