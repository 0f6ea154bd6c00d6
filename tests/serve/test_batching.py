"""The queue: who shares a batch, who is turned away, and that nobody is forgotten."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from splitveil.serve.admission import Limits, ServerMetrics
from splitveil.serve.batching import Batcher, BusyError, ClosingError

Rows = NDArray[np.float32]


def rows(n: int, value: float = 1.0) -> Rows:
    return np.full((n, 2), value, np.float32)


class Model:
    """Doubles its rows; remembers the batches; waits at a gate when told to."""

    def __init__(self, *, shut: bool = False) -> None:
        self.sizes, self.gate = list[int](), threading.Event()
        if not shut:
            self.gate.set()

    def __call__(self, batch: Rows) -> Rows:
        self.gate.wait(10)
        self.sizes.append(len(batch))
        return batch * 2


def run(
    model: Callable[[Rows], Rows],
    scene: Callable[[Batcher], Coroutine[Any, Any, None]],
    **limits: Any,  # noqa: ANN401
) -> None:
    async def play() -> None:
        patient = {"read_seconds": 100.0, "answer_seconds": 100.0}  # longer than any delay here
        found = Limits(**{"max_batch": 8, "max_delay": 0.02, "max_waiting": 16} | patient | limits)
        batcher = Batcher(model, found, ServerMetrics())
        batcher.start()
        await scene(batcher)
        await batcher.close()

    asyncio.run(play())


def test_requests_that_share_a_batch_get_their_own_rows() -> None:
    model = Model()

    async def scene(batcher: Batcher) -> None:
        found = await asyncio.gather(*(batcher.submit(rows(k, float(k))) for k in (1, 2, 3)))
        assert [f.tolist() for f in found] == [(2 * rows(k, float(k))).tolist() for k in (1, 2, 3)]

    run(model, scene)
    assert model.sizes == [6]


def test_a_full_batch_does_not_wait() -> None:
    model = Model()

    async def scene(batcher: Batcher) -> None:
        async with asyncio.timeout(5):
            await asyncio.gather(*(batcher.submit(rows(4)) for _ in range(4)))

    run(model, scene, max_delay=60.0)
    assert model.sizes == [8, 8]


def test_a_lonely_request_waits_no_longer_than_the_delay() -> None:
    async def scene(batcher: Batcher) -> None:
        async with asyncio.timeout(5):
            assert (await batcher.submit(rows(1))).tolist() == [[2.0, 2.0]]

    run(Model(), scene, max_delay=0.05)


def test_what_does_not_fit_waits_for_the_next_batch() -> None:
    model = Model()

    async def scene(batcher: Batcher) -> None:
        await asyncio.gather(*(batcher.submit(rows(n)) for n in (5, 5, 3)))

    run(model, scene)
    assert model.sizes == [5, 8]


def test_beyond_the_limit_requests_get_503_until_there_is_room() -> None:
    model = Model(shut=True)

    async def scene(batcher: Batcher) -> None:
        running = asyncio.ensure_future(batcher.submit(rows(8)))
        await asyncio.sleep(0.05)
        waiting = [asyncio.ensure_future(batcher.submit(rows(8))) for _ in range(2)]
        await asyncio.sleep(0.01)
        assert batcher.waiting == 16
        with pytest.raises(BusyError):
            await batcher.submit(rows(1))
        model.gate.set()
        await asyncio.gather(running, *waiting)
        assert len(await batcher.submit(rows(1))) == 1

    run(model, scene)


def test_a_request_that_gives_up_leaves_the_queue_and_is_not_run() -> None:
    model = Model(shut=True)

    async def scene(batcher: Batcher) -> None:
        running = asyncio.ensure_future(batcher.submit(rows(8)))
        await asyncio.sleep(0.05)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await batcher.submit(rows(3))
        assert batcher.waiting == 0
        model.gate.set()
        await running

    run(model, scene)
    assert model.sizes == [8]


def test_a_cancelled_request_does_not_disturb_its_batch() -> None:
    model = Model(shut=True)

    async def scene(batcher: Batcher) -> None:
        leaving, staying = (asyncio.ensure_future(batcher.submit(rows(4, v))) for v in (1.0, 2.0))
        await asyncio.sleep(0.05)
        leaving.cancel()
        model.gate.set()
        assert (await staying).tolist() == rows(4, 4.0).tolist()

    run(model, scene)


def test_closing_answers_what_was_accepted_and_takes_nothing_new() -> None:
    model = Model(shut=True)

    async def scene(batcher: Batcher) -> None:
        accepted = [asyncio.ensure_future(batcher.submit(rows(5))) for _ in range(3)]
        await asyncio.sleep(0.05)
        closing = asyncio.ensure_future(batcher.close())
        await asyncio.sleep(0)
        with pytest.raises(ClosingError):
            await batcher.submit(rows(1))
        model.gate.set()
        assert [len(a) for a in await asyncio.gather(*accepted)] == [5, 5, 5]
        await closing

    run(model, scene, max_delay=60.0)


def test_a_model_that_fails_fails_for_its_batch_only() -> None:
    def moody(batch: Rows) -> Rows:
        if batch[0, 0] < 0:
            raise RuntimeError("not this one")
        return batch

    async def scene(batcher: Batcher) -> None:
        with pytest.raises(RuntimeError, match="not this one"):
            await batcher.submit(rows(1, -1.0))
        assert len(await batcher.submit(rows(1))) == 1

    run(moody, scene)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=30), st.integers(0, 3))
def test_every_accepted_request_gets_exactly_its_rows(sizes: list[int], yields: int) -> None:
    async def scene(batcher: Batcher) -> None:
        async def one(k: int, n: int) -> None:
            for _ in range(yields * (k % 3)):
                await asyncio.sleep(0)
            found = await batcher.submit(rows(n, float(k)))
            assert found.tolist() == rows(n, 2.0 * k).tolist()

        await asyncio.gather(*(one(k, n) for k, n in enumerate(sizes)))

    model = Model()
    run(model, scene, max_waiting=1000, max_delay=0.001)
    assert max(model.sizes) <= 8
    assert sum(model.sizes) == sum(sizes)
