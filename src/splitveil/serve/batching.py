"""The queue before the model: requests that arrive close together run as one batch.

Everything but the call of the model happens on the event loop, so no lock is needed.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from splitveil.errors import ServerError
from splitveil.io import Json
from splitveil.serve.admission import Limits, ServerMetrics
from splitveil.serve.wire import Rows

LOG = logging.getLogger(__name__)


class BusyError(Exception):
    """The queue is full; the caller should try again later."""


class ClosingError(Exception):
    """The server is shutting down and accepts nothing new."""


class StoppedError(Exception):
    """The task that runs the model has ended; only a restart helps."""


@dataclass
class Statistics:
    """What the model did since the start, for `GET /v2/models/NAME/stats`; times in seconds."""

    answered: int = 0
    answered_seconds: float = 0.0
    failed: int = 0
    failed_seconds: float = 0.0
    queued_seconds: float = 0.0  # summed over requests
    computed_seconds: float = 0.0  # summed over requests: each waits for its whole batch
    rows: int = 0
    last: float = 0.0  # when the last batch began, since 1970
    batches: dict[int, tuple[int, float]] = field(default_factory=dict)  # by rows: count, seconds

    def add_batch(self, batch: Sequence["Waiting"], rows: int, began: float, ended: float) -> None:
        """Count a batch that ran; times of the event loop's clock."""
        self.queued_seconds += sum(began - w.since for w in batch)
        self.computed_seconds += (ended - began) * len(batch)
        self.rows += rows
        self.last = time.time()
        count, seconds = self.batches.get(rows, (0, 0.0))
        self.batches[rows] = count + 1, seconds + ended - began

    def add_answer(self, seconds: float, *, good: bool) -> None:
        """Count a request that was let in, and how long it took."""
        if good:
            self.answered, self.answered_seconds = (
                self.answered + 1,
                self.answered_seconds + seconds,
            )
        else:
            self.failed, self.failed_seconds = self.failed + 1, self.failed_seconds + seconds

    def to_dict(self) -> Json:
        """In the words of Triton's statistics; times in nanoseconds.

        >>> Statistics(answered=2, answered_seconds=0.5).to_dict()["inference_stats"]["success"]
        {'count': 2, 'ns': 500000000}
        """
        done = self.answered

        def told(count: int, seconds: float) -> Json:
            return {"count": count, "ns": round(1e9 * seconds)}

        return {
            "last_inference": round(1000 * self.last),
            "inference_count": self.rows,
            "execution_count": sum(count for count, _ in self.batches.values()),
            "inference_stats": {
                "success": told(done, self.answered_seconds),
                "fail": told(self.failed, self.failed_seconds),
                "queue": told(done, self.queued_seconds),
                "compute_input": told(done, 0.0),
                "compute_infer": told(done, self.computed_seconds),
                "compute_output": told(done, 0.0),
                "cache_hit": told(0, 0.0),
                "cache_miss": told(0, 0.0),
            },
            "batch_stats": [
                {
                    "batch_size": rows,
                    "compute_input": told(count, 0.0),
                    "compute_infer": told(count, seconds),
                    "compute_output": told(count, 0.0),
                }
                for rows, (count, seconds) in sorted(self.batches.items())
            ],
        }


@dataclass(frozen=True, eq=False)
class Waiting:
    """Rows in the queue, since when, and the future that gets their answer."""

    rows: Rows
    since: float
    answer: asyncio.Future[Rows]


class Batcher:
    """Runs `model` on up to `max_batch` rows at a time, waiting at most `max_delay` s for more.

    It waits no longer than the last batch took, because waiting longer cannot pay. At most
    `max_waiting` rows wait, besides those that run. `metrics` and `statistics` count every batch.
    """

    def __init__(
        self, model: Callable[[Rows], Rows], limits: Limits, metrics: ServerMetrics
    ) -> None:
        self._model, self._limits, self._metrics = model, limits, metrics
        self.statistics = Statistics()
        metrics.waiting.set_function(lambda: self.waiting)
        self._queue: deque[Waiting] = deque()
        self.waiting = 0  # rows that wait to run
        self._last_seconds = limits.max_delay
        self._running_since: float | None = None
        self._more = asyncio.Event()
        self._closing = False
        self._worker: asyncio.Task[None] | None = None
        self._pool = ThreadPoolExecutor(1, "splitveil-model")

    @property
    def full(self) -> bool:
        """Whether the queue has no room for another row."""
        return self.waiting >= self._limits.max_waiting

    @property
    def works(self) -> bool:
        """Whether batches are run: the task lives, and no batch exceeds the time of an answer."""
        if self._worker is None or self._worker.done():
            return False
        since = self._running_since
        return since is None or time.monotonic() - since <= self._limits.answer_seconds

    def start(self) -> None:
        """Start; call it on the running event loop."""
        self._worker = asyncio.create_task(self._work())
        self._worker.add_done_callback(self._ended)

    async def submit(self, rows: Rows) -> Rows:
        """The model's answer for rows (1..max_batch, …); raises `BusyError` if the queue is full.

        A cancelled call leaves the queue.
        """
        if self._closing:
            raise ClosingError
        if self._worker is None or self._worker.done():
            raise StoppedError
        if self.waiting + len(rows) > self._limits.max_waiting:
            raise BusyError
        loop = asyncio.get_running_loop()
        entry = Waiting(rows, loop.time(), loop.create_future())
        self._queue.append(entry)
        self.waiting += len(rows)
        self._more.set()
        try:
            return await entry.answer
        except asyncio.CancelledError:
            if entry in self._queue:
                self._queue.remove(entry)
                self.waiting -= len(rows)
            raise

    async def close(self) -> None:
        """Accept nothing new, answer what was accepted, stop."""
        self._closing = True
        self._more.set()
        if self._worker is not None:
            await asyncio.wait([self._worker])
        self._pool.shutdown()

    def _ended(self, worker: asyncio.Task[None]) -> None:
        """Without its task nothing would be answered: say so, and let nobody wait."""
        error = None if worker.cancelled() else worker.exception()
        if self._closing and error is None:
            return
        LOG.error("the task that runs the model has ended; restart the server", exc_info=error)
        while self._queue:
            entry = self._queue.popleft()
            if not entry.answer.done():
                entry.answer.set_exception(StoppedError())
        self.waiting = 0

    async def _work(self) -> None:
        while batch := await self._collect():
            await self._run(batch)

    async def _collect(self) -> list[Waiting]:
        """The next batch, oldest rows first; empty at the end."""
        while not self._queue:
            if self._closing:
                return []
            await self._something_new(None)
        due = self._queue[0].since + min(self._limits.max_delay, self._last_seconds)
        while self._queue and self.waiting < self._limits.max_batch and not self._closing:
            if not await self._something_new(due):
                break
        batch: list[Waiting] = []
        room = self._limits.max_batch
        while self._queue and len(self._queue[0].rows) <= room:
            entry = self._queue.popleft()
            room -= len(entry.rows)
            self.waiting -= len(entry.rows)
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
        began = loop.time()
        self._running_since = began
        try:
            rows = np.concatenate([w.rows for w in batch])
            found = await loop.run_in_executor(self._pool, self._model, rows)
            if len(found) != len(rows):
                raise ServerError(f"the model answered {len(rows)} rows with {len(found)}")
        except Exception as err:  # every caller of this batch gets the model's error
            for entry in batch:
                if not entry.answer.done():
                    entry.answer.set_exception(err)
            return
        except BaseException:  # the task ends here
            for entry in batch:
                if not entry.answer.done():
                    entry.answer.set_exception(StoppedError())
            raise
        finally:
            self._running_since = None
        ended = loop.time()
        self._last_seconds = ended - began
        self._metrics.batch_rows.observe(len(rows))
        self._metrics.batch_seconds.observe(ended - began)
        self.statistics.add_batch(batch, len(rows), began, ended)
        start = 0
        for entry in batch:
            if not entry.answer.done():
                entry.answer.set_result(found[start : start + len(entry.rows)])
            start += len(entry.rows)
