"""The garbage collector is off while a step is captured."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from splitveil.cuda import WARM_UP, captured, no_collection


class Cycle:
    """An object that only the collector can free, like an earlier training with its graphs."""

    def __init__(self, held: object = None) -> None:
        self.me, self.held = self, held


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    gc.enable()


def test_garbage_is_collected_before_and_not_inside() -> None:
    old = weakref.ref(Cycle())
    with no_collection():
        assert old() is None
        inside = weakref.ref(Cycle())
        # enough to start the collector
        made: list[list[int]] = [[] for _ in range(20 * gc.get_threshold()[0])]
        assert inside() is not None
    assert len(made) > 1000
    assert gc.isenabled()


@pytest.mark.parametrize("before", [True, False])
def test_the_collector_is_left_as_it_was(before: bool) -> None:
    if not before:
        gc.disable()
    with pytest.raises(RuntimeError, match="no"), no_collection():
        raise RuntimeError("no")
    assert gc.isenabled() is before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_old_graph_does_not_break_a_capture() -> None:
    device = torch.device("cuda")
    total = torch.zeros(4, device=device)

    def add() -> None:
        total.add_(1)

    def add_and_litter() -> None:
        total.add_(1)
        [[] for _ in range(20 * gc.get_threshold()[0])]

    old = captured(add, device)
    for _ in range(WARM_UP + 1):
        old()
    total.zero_()
    new = captured(add_and_litter, device)
    for _ in range(WARM_UP):
        new()
    gc.disable()
    Cycle(old)
    del old
    gc.enable()
    for _ in range(3):
        new()
    assert total.tolist() == [WARM_UP + 3] * 4
