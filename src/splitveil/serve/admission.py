"""What a request passes before the model: token, limits, a queue; and the server's metrics.

Requests that arrive close together run as one batch. Everything but the call of the model happens
on the event loop, so no lock is needed.
"""

import asyncio
import hashlib
import hmac
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from splitveil.errors import ConfigError
from splitveil.serve.page import is_own, is_page
from splitveil.serve.transport import printable
from splitveil.serve.wire import Rows

OPEN_PATHS = ("/v2/health/live", "/v2/health/ready")  # for health checks, which have no token
RETRY = {"Retry-After": "1"}
BEARER = {"WWW-Authenticate": "Bearer"}
MIN_TOKEN = 16
MAX_VISITORS = 32  # requests for the page at once: slow browsers must not block infer calls
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


class BusyError(Exception):
    """The queue is full; the caller should try again later."""


class ClosingError(Exception):
    """The server is shutting down and accepts nothing new."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much work a server accepts.

    Args:
        max_batch: Rows the model runs at once, and the most rows of one request, ≥ 1.
        max_delay: Seconds a row may wait for others to share its batch, ≥ 0.
        max_waiting: Rows that may wait, ≥ max_batch; beyond, the answer is 429.
        max_in_flight: Requests that may be read or answered at once, ≥ 1; beyond, 503.
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


@dataclass(frozen=True, eq=False)
class Waiting:
    """Rows in the queue, since when, and the future that gets their answer."""

    rows: Rows
    since: float
    answer: asyncio.Future[Rows]


class Batcher:
    """Runs `model` on up to `max_batch` rows at a time, waiting at most `max_delay` s for more.

    At most `max_waiting` rows wait, besides those that run. `metrics` count every batch.
    """

    def __init__(
        self, model: Callable[[Rows], Rows], limits: Limits, metrics: ServerMetrics
    ) -> None:
        self._model, self._limits, self._metrics = model, limits, metrics
        metrics.waiting.set_function(lambda: self.waiting)
        self._queue: deque[Waiting] = deque()
        self._more = asyncio.Event()
        self._closing = False
        self._worker: asyncio.Task[None] | None = None
        self._pool = ThreadPoolExecutor(1, "splitveil-model")

    @property
    def waiting(self) -> int:
        """Rows that wait to run."""
        return sum(len(w.rows) for w in self._queue)

    @property
    def full(self) -> bool:
        """Whether the queue has no room for another row."""
        return self.waiting >= self._limits.max_waiting

    def start(self) -> None:
        """Start; call it on the running event loop."""
        self._worker = asyncio.create_task(self._work())

    async def submit(self, rows: Rows) -> Rows:
        """The model's answer for rows (1..max_batch, …); raises `BusyError` if the queue is full.

        A cancelled call leaves the queue.
        """
        if self._closing:
            raise ClosingError
        if self.waiting + len(rows) > self._limits.max_waiting:
            raise BusyError
        loop = asyncio.get_running_loop()
        entry = Waiting(rows, loop.time(), loop.create_future())
        self._queue.append(entry)
        self._more.set()
        try:
            return await entry.answer
        finally:
            if entry in self._queue:
                self._queue.remove(entry)

    async def close(self) -> None:
        """Accept nothing new, answer what was accepted, stop."""
        self._closing = True
        self._more.set()
        if self._worker is not None:
            await self._worker
        self._pool.shutdown()

    async def _work(self) -> None:
        while batch := await self._collect():
            await self._run(batch)

    async def _collect(self) -> list[Waiting]:
        """The next batch, oldest rows first; empty at the end."""
        while not self._queue:
            if self._closing:
                return []
            await self._something_new(None)
        due = self._queue[0].since + self._limits.max_delay
        while self._queue and self.waiting < self._limits.max_batch and not self._closing:
            if not await self._something_new(due):
                break
        batch: list[Waiting] = []
        room = self._limits.max_batch
        while self._queue and len(self._queue[0].rows) <= room:
            entry = self._queue.popleft()
            room -= len(entry.rows)
            batch.append(entry)
        # All callers may have been cancelled while the batch was filling.
        return batch or await self._collect()

    async def _something_new(self, until: float | None) -> bool:
        """Wait for a new entry or the end; False if the time ran out first."""
        self._more.clear()
        try:
            async with asyncio.timeout_at(until):
                await self._more.wait()
        except TimeoutError:
            return False
        return True

    async def _run(self, batch: list[Waiting]) -> None:
        loop = asyncio.get_running_loop()
        rows = np.concatenate([w.rows for w in batch])
        began = loop.time()
        try:
            found = await loop.run_in_executor(self._pool, self._model, rows)
        except Exception as err:  # every caller of this batch gets the model's error
            for entry in batch:
                if not entry.answer.done():
                    entry.answer.set_exception(err)
            return
        self._metrics.batch_rows.observe(len(rows))
        self._metrics.batch_seconds.observe(loop.time() - began)
        start = 0
        for entry in batch:
            if not entry.answer.done():
                entry.answer.set_result(found[start : start + len(entry.rows)])
            start += len(entry.rows)


def refuse(status: int, reason: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """An error answer with its reason."""
    return JSONResponse({"error": reason}, status, headers)


class ConcurrencyLimit:
    """An application that answers `limit` requests at once, and others with 503."""

    def __init__(self, app: ASGIApp, limit: int, reason: str) -> None:
        self._app, self._limit, self._reason = app, limit, reason
        self.now = 0  # requests being answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if self.now >= self._limit:
            await refuse(503, f"{self._reason}; try again later", RETRY)(scope, receive, send)
            return
        self.now += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self.now -= 1


class AdmissionGate:
    """Checks the token, limits the requests in flight, and counts every answer.

    If the application has a page, the page's paths have a limit of their own, and some need no
    token.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: ServerMetrics,
        max_in_flight: int,
        token: str | None,
        *,
        has_page: bool,
    ) -> None:
        if token is not None and not (printable(token) and len(token) >= MIN_TOKEN):
            raise ConfigError(
                f"a token must be at least {MIN_TOKEN} printable ASCII characters without spaces; "
                "make one: python -c 'import secrets; print(secrets.token_urlsafe())'"
            )
        self._app, self._metrics, self._has_page = app, metrics, has_page
        self._calls = ConcurrencyLimit(app, max_in_flight, "too many requests at once")
        self._visits = ConcurrencyLimit(
            app, MAX_VISITORS, "too many browsers load the page at once"
        )
        metrics.in_flight.set_function(lambda: self._calls.now)
        self._token = None if token is None else _digest(token.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the lifespan."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.requests.labels(str(message["status"])).inc()
            await send(message)

        await self._choose(scope)(scope, receive, counted)

    def _choose(self, scope: Scope) -> ASGIApp:
        """The application that answers a request."""
        path = scope["path"]
        if path in OPEN_PATHS:  # not limited: a busy server is alive and must not be restarted
            return self._app
        if not (self._has_page and is_own(path)) and not self._allowed(scope):
            return refuse(401, "a valid bearer token is needed", BEARER)
        return self._visits if self._has_page and is_page(path) else self._calls

    def _allowed(self, scope: Scope) -> bool:
        if self._token is None:
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, sent = (given[0] if given else b"").partition(b" ")
        # Digests have equal length, so the comparison takes the same time for every token.
        equal = hmac.compare_digest(_digest(sent), self._token)
        return equal and scheme.lower() == b"bearer"


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()
