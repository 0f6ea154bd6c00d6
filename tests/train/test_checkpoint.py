"""Checkpoints: complete or absent, refused when they do not fit, never unpickled."""

import json
import pickle
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from splitveil.errors import CheckpointError, RunError
from splitveil.io import folder_lock, write_text
from splitveil.train.loop import MetricsLog
from splitveil.train.state import (
    Checkpoint,
    load_module,
    load_optimiser,
    optimiser_state,
    read_checkpoint,
    write_checkpoint,
)


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    tensors = {"a.x": torch.arange(3.0), "a.y": torch.tensor(7), "b": torch.zeros(2, 0)}
    write_checkpoint(path, Checkpoint(tensors, {"step": 3, "lr": 0.1 + 0.2}))
    back = read_checkpoint(path)
    assert back.meta == {"step": 3, "lr": 0.1 + 0.2}
    assert set(back.part("a")) == {"x", "y"}
    assert all(torch.equal(back.tensors[k], v) for k, v in tensors.items())
    assert [p.name for p in tmp_path.iterdir()] == ["c.safetensors"]


@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_an_optimiser_continues_bit_for_bit(kind: str, tmp_path: Path) -> None:
    def make() -> tuple[nn.Linear, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = nn.Linear(3, 2)
        if kind == "adam":
            return net, torch.optim.Adam(net.parameters(), lr=0.1)
        return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)

    def steps(net: nn.Linear, optimiser: torch.optim.Optimizer, n: int) -> None:
        for _ in range(n):
            optimiser.zero_grad()
            net(torch.ones(4, 3)).square().sum().backward()
            optimiser.step()

    net, optimiser = make()
    steps(net, optimiser, 6)
    half, half_optimiser = make()
    steps(half, half_optimiser, 3)
    tensors, meta = optimiser_state(half_optimiser)
    path = tmp_path / "o.safetensors"
    write_checkpoint(path, Checkpoint(tensors, meta))
    saved = read_checkpoint(path)
    resumed, resumed_optimiser = make()
    resumed.load_state_dict(half.state_dict())
    load_optimiser(resumed_optimiser, saved.tensors, saved.meta)
    steps(resumed, resumed_optimiser, 3)
    assert torch.equal(net.weight, resumed.weight)


@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_an_optimisers_state_has_its_parameters_strides(kind: str, tmp_path: Path) -> None:
    """Files are contiguous; the fused steps of a GPU refuse a state laid out otherwise."""
    net = nn.Conv2d(3, 4, 3)
    net.weight.data = net.weight.data.contiguous(memory_format=torch.channels_last)
    optimiser: torch.optim.Optimizer
    if kind == "adam":
        optimiser = torch.optim.Adam([*net.parameters(), nn.Parameter(torch.tensor(1.0))])
    else:
        optimiser = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.rand(2, 3, 5, 5)).square().sum().backward()
    optimiser.step()
    before = {
        (param, name): value.clone() if isinstance(value, torch.Tensor) else value
        for param, kept in optimiser.state.items()
        for name, value in kept.items()
    }
    tensors, meta = optimiser_state(optimiser)
    path = tmp_path / "o.safetensors"
    write_checkpoint(path, Checkpoint(tensors, meta))
    saved = read_checkpoint(path)
    load_optimiser(optimiser, saved.tensors, saved.meta)
    seen = 0
    for param, kept in optimiser.state.items():
        for name, value in kept.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, before[param, name])
                if value.shape == param.shape:
                    assert value.stride() == param.stride()
                    seen += value.dim() == 4
    assert seen == (2 if kind == "adam" else 1)


def test_another_architecture_is_named_and_nothing_is_loaded() -> None:
    net = nn.Linear(3, 2)
    before = net.weight.clone()
    wrong = {"weight": torch.zeros(5, 3), "extra": torch.zeros(1)}
    with pytest.raises(CheckpointError, match="another architecture") as caught:
        load_module(net, wrong, "model")
    for words in ("lacks bias", "extra extra", "weight is (5, 3), expected (2, 3)"):
        assert words in str(caught.value)
    assert torch.equal(net.weight, before)


def test_broken_and_foreign_files_are_refused(tmp_path: Path) -> None:
    absent, garbage, foreign, pickled, cut = (tmp_path / n for n in "agfpc")
    garbage.write_bytes(b"not a checkpoint")
    save_file({"x": torch.zeros(1)}, foreign)
    pickled.write_bytes(pickle.dumps({"x": 1}))
    write_checkpoint(cut, Checkpoint({"x": torch.zeros(100)}, {}))
    cut.write_bytes(cut.read_bytes()[:-50])
    for path, words in (
        (absent, "no checkpoint"),
        (garbage, "broken"),
        (foreign, "not a SplitVeil checkpoint"),
        (pickled, "broken"),
        (cut, "broken"),
    ):
        with pytest.raises(CheckpointError, match=words):
            read_checkpoint(path)


def test_a_full_disk_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    """A file-size limit in a child process stands for the full disk."""
    path = tmp_path / "c.safetensors"
    write_checkpoint(path, Checkpoint({"x": torch.ones(3)}, {"step": 1}))
    child = f"""
import resource, signal, sys, torch
from pathlib import Path
from splitveil.errors import RunError
from splitveil.train.state import Checkpoint, write_checkpoint
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, {resource.RLIM_INFINITY}))
try:
    write_checkpoint(Path({str(path)!r}), Checkpoint({{"x": torch.ones(100_000)}}, {{}}))
except RunError as error:
    print(error); sys.exit(2)
"""
    done = subprocess.run(
        [sys.executable, "-c", child], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "cannot write" in done.stdout
    assert read_checkpoint(path).meta == {"step": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["c.safetensors"]


def test_a_path_below_a_regular_file_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match=r"cannot write .* Choose another folder"):
        write_text(tmp_path / "file" / "config.toml", "a = 1\n")


def test_the_log_is_rewound_to_the_checkpoint(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.append({"kind": "epoch", "step": 1, "loss": 1.0})
        kept = log.offset
        log.append({"kind": "epoch", "step": 2, "loss": 2.0})
    with MetricsLog(tmp_path, kept) as log:
        log.append({"kind": "epoch", "step": 2, "loss": 3.0})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [1.0, 3.0]


def test_a_log_needs_no_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with MetricsLog(tmp_path) as log:
        log.append({"kind": "epoch", "step": 1, "loss": 1.0})
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 1
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    written = (tmp_path / "metrics.jsonl").stat().st_size
    with MetricsLog(tmp_path, written) as log:
        log.append({"kind": "epoch", "step": 2, "loss": 2.0})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert list(tmp_path.glob("events.out.tfevents.*")) == []


@pytest.mark.parametrize("harm", ["removed", "shortened", "damaged"])
def test_a_truncated_log_keeps_its_whole_lines(
    tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(tmp_path) as log:
        log.append({"kind": "epoch", "step": 1, "loss": 1.0})
        first = log.offset
        log.append({"kind": "epoch", "step": 2, "loss": 2.0})
        whole = log.offset
    match harm:
        case "removed":
            path.unlink()
        case "shortened":
            path.write_bytes(path.read_bytes()[: first + 9])
        case _:
            path.write_bytes(path.read_bytes()[:first].ljust(whole, b"\0"))
    with MetricsLog(tmp_path, whole) as log:
        assert log.offset == (0 if harm == "removed" else first)
        log.append({"kind": "epoch", "step": 3, "loss": 3.0})
    left = [json.loads(line)["loss"] for line in path.read_text().splitlines()]
    assert left == ([3.0] if harm == "removed" else [1.0, 3.0])
    assert "has lost lines" in caplog.text


def test_a_folder_is_held_under_every_name_it_has(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    busy = pytest.raises(RunError, match="another process is training")
    with folder_lock(tmp_path / "run"), busy, folder_lock(tmp_path / "link"):
        pass
    with folder_lock(tmp_path / "link"):
        pass
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "run"]


def test_a_name_that_is_too_long_is_called_so(tmp_path: Path) -> None:
    with (
        pytest.raises(RunError, match="Choose a shorter name"),
        folder_lock(tmp_path / ("x" * 250)),
    ):
        pass
