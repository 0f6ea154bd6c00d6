"""The memory of a training is its own: not of what ran before, and none where none is known."""

import pytest
import torch
from torch import nn

from splitveil.config.resolve import TrainParts
from splitveil.config.run_config import RunConfig
from splitveil.nets.channel import Channel
from splitveil.nets.split import SplitModel
from splitveil.train import step as training
from splitveil.train.state import peak_bytes, restore, snapshot
from splitveil.train.step import TrainState, forget_peak, new_state

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def fresh() -> TrainState:
    model = SplitModel(nn.Linear(2, 2), Channel(), nn.Linear(2, 2))
    return new_state(TrainParts(model), RunConfig(), CPU)


def test_a_training_begins_with_the_peak_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", forgotten.append)
    forget_peak(CPU)
    assert forgotten == []
    forget_peak(CUDA)
    assert forgotten == [CUDA]
    monkeypatch.setattr(training, "forget_peak", forgotten.append)
    fresh()
    assert forgotten == [CUDA, CPU]


def test_a_process_on_a_cpu_states_no_peak() -> None:
    assert peak_bytes(CPU) is None
    assert peak_bytes(CPU, 600) is None  # what older checkpoints state is of the whole process
    assert snapshot(fresh(), {}).meta["peak_bytes"] is None


@pytest.mark.parametrize(("saved", "now", "most"), [(None, 5, 5), (7, 5, 7), (7, 9, 9)])
def test_a_resumed_training_keeps_the_higher_peak(
    saved: int | None, now: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: now)
    checkpoint = snapshot(fresh(), {})
    checkpoint.meta["peak_bytes"] = saved
    resumed = fresh()
    restore(resumed, checkpoint)
    assert resumed.peak_bytes == saved
    assert peak_bytes(CUDA, resumed.peak_bytes) == most


def test_a_checkpoint_that_states_no_peak_is_read() -> None:
    checkpoint = snapshot(fresh(), {})
    del checkpoint.meta["peak_bytes"]
    resumed = fresh()
    restore(resumed, checkpoint)
    assert resumed.peak_bytes is None
