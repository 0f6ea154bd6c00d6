"""Dynamic batching: requests that arrive close together run as one batch; the queue is bounded.

Everything but the model's call happens on the event loop, so no lock is needed.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]


class BusyError(Exception):
    """As many rows wait as may wait; the caller should come back later."""


class ClosingError(Exception):
    """The server is shutting down and takes nothing new."""


@dataclass(frozen=True, eq=False)
class Waiting:
    """Rows in the queue, since when, and where their answer goes."""

    rows: Rows
    since: float
    answer: asyncio.Future[Rows]


class Batcher:
    """Runs `model` on up to `max_batch` rows at a time, waiting at most `max_delay` s for more.

    At most `max_waiting` rows wait, those that run not counted. `observe(rows, seconds)` is told of
    every batch.
    """

    def __init__(
        self,
        model: Callable[[Rows], Rows],
        *,
        max_batch: int,
        max_delay: float,
        max_waiting: int,
        observe: Callable[[int, float], None] = lambda rows, seconds: None,
    ) -> None:
        self._model, self._observe = model, observe
        self._max_batch, self._max_delay, self._max_waiting = max_batch, max_delay, max_waiting
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
        """Whether not even one row more may wait."""
        return self.waiting >= self._max_waiting

    def start(self) -> None:
        """Begin to work; call on the running event loop."""
        self._worker = asyncio.create_task(self._work())

    async def submit(self, rows: Rows) -> Rows:
        """The model's answer for rows (1..max_batch, …); raises when too many wait.

        Cancelled while it waits, it leaves the queue.
        """
        if self._closing:
            raise ClosingError
        if self.waiting + len(rows) > self._max_waiting:
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
        """Take nothing new, answer what was accepted, stop."""
        self._closing = True
        self._more.set()
        if self._worker is not None:
            await self._worker
        self._pool.shutdown()

    async def _work(self) -> None:
        while batch := await self._collect():
            await self._run(batch)

    async def _collect(self) -> list[Waiting]:
        """The next batch, oldest first; empty when closing and nothing waits."""
        while not self._queue:
            if self._closing:
                return []
            await self._something_new(None)
        due = self._queue[0].since + self._max_delay
        while self._queue and self.waiting < self._max_batch and not self._closing:
            if not await self._something_new(due):
                break
        batch: list[Waiting] = []
        room = self._max_batch
        while self._queue and len(self._queue[0].rows) <= room:
            entry = self._queue.popleft()
            room -= len(entry.rows)
            batch.append(entry)
        # Everyone may have left while the batch was gathering.
        return batch or await self._collect()

    async def _something_new(self, until: float | None) -> bool:
        """Wait for a new entry or for the closing; False when the time came first."""
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
        except Exception as err:  # whatever the model raises belongs to those who asked
            for entry in batch:
                if not entry.answer.done():
                    entry.answer.set_exception(err)
            return
        self._observe(len(rows), loop.time() - began)
        start = 0
        for entry in batch:
            if not entry.answer.done():
                entry.answer.set_result(found[start : start + len(entry.rows)])
            start += len(entry.rows)
