"""A killed or interrupted run, continued, gives the same bits as one that was left alone."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

import splitveil as sv
from splitveil.cli.app import app
from splitveil.config.resolve import make_config
from splitveil.train.state import read_checkpoint

EPOCHS = 6
TRAIN = [sys.executable, "-m", "splitveil", "train"]
OPTIONS = ["--dataset", "digits", "--defence", "gated-att", "--epochs", str(EPOCHS),
           "--set", "attention_warmup_epochs=1", "--set", "batch_size=128"]  # fmt: skip

# A killed run goes on from its last checkpoint; the others write one when they are stopped.
STOPS = [
    ("killed", signal.SIGKILL, -signal.SIGKILL),
    ("interrupted", signal.SIGINT, 130),
    ("terminated", signal.SIGTERM, 143),
]


def start(folder: Path, name: str, *words: str) -> subprocess.Popen[bytes]:
    place = ["--runs-dir", str(folder), "--name", name]
    with (folder / f"{name}.err").open("wb") as err:
        return subprocess.Popen(
            [*TRAIN, *place, *words],
            stdout=subprocess.DEVNULL,
            stderr=err,
            env=os.environ | {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"},
        )


def said(folder: Path, name: str) -> str:
    """What the last process of this name wrote to stderr, in one line."""
    return " ".join((folder / f"{name}.err").read_text().split())


def epochs_logged(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count('"kind": "epoch"') if path.is_file() else 0


def stop_midway(process: subprocess.Popen[bytes], run: Path, number: int) -> None:
    """Send a signal once some epochs are done and some are left."""
    deadline = time.monotonic() + 120
    while epochs_logged(run) < 3 and time.monotonic() < deadline:
        assert process.poll() is None, said(run.parent, run.name)
        time.sleep(0.002)
    process.send_signal(number)
    process.wait(timeout=60)
    assert epochs_logged(run) < EPOCHS, "the run ended before it could be stopped"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four runs with the same settings: one whole, the others stopped by a signal and resumed."""
    place = tmp_path_factory.mktemp("runs")
    whole = start(place, "whole", *OPTIONS)
    assert whole.wait(timeout=300) == 0, said(place, "whole")
    for name, number, code in STOPS:
        process = start(place, name, *OPTIONS)
        stop_midway(process, place / name, number)
        assert process.returncode == code, said(place, name)
        # A crash may come between a log line and its checkpoint: the line must be rewound.
        with (place / name / "metrics.jsonl").open("a") as log:
            log.write('{"kind": "epoch", "step": 10000, "task_loss": 9}\n{"torn')
        resumed = start(place, name, "--resume")
        assert resumed.wait(timeout=300) == 0, said(place, name)
    return place


@pytest.mark.slow
@pytest.mark.parametrize("name", ["killed", "interrupted", "terminated"])
def test_same_weights_bit_for_bit(folder: Path, name: str) -> None:
    whole, other = (read_checkpoint(folder / n / "checkpoint.safetensors") for n in ("whole", name))
    assert set(whole.tensors) == set(other.tensors)
    different = [k for k, v in whole.tensors.items() if not torch.equal(v, other.tensors[k])]
    assert different == []
    assert whole.meta["step"] == other.meta["step"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["killed", "interrupted", "terminated"])
def test_same_log_without_repeats(folder: Path, name: str) -> None:
    def lines(run: str) -> list[dict[str, float]]:
        text = (folder / run / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(x).items() if k != "seconds"} for x in text]

    assert lines(name) == lines("whole")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["whole", "killed", "interrupted", "terminated"])
def test_tensorboard_shows_each_epoch_once(folder: Path, name: str) -> None:
    events = EventAccumulator(str(folder / name)).Reload()
    steps = [e.step for e in events.Scalars("epoch/val_accuracy")]
    assert steps == sorted(set(steps))
    assert len(steps) == EPOCHS


@pytest.mark.slow
def test_nothing_temporary_is_left(folder: Path) -> None:
    left = [
        n for run in folder.iterdir() if run.is_dir() for n in os.listdir(run) if n.endswith(".tmp")
    ]
    assert left == []


@pytest.mark.slow
def test_resume_with_other_settings_is_refused(folder: Path) -> None:
    process = start(folder, "whole", "--resume", "--set", "lambd=2.0", "--seed", "5")
    assert process.wait(timeout=120) == 2
    assert "lambd was 16.0, is 2.0" in said(folder, "whole")
    assert "seed was 0, is 5" in said(folder, "whole")


def test_a_folder_has_one_training_at_a_time(tmp_path: Path) -> None:
    """A second training, however it is asked for, is refused; the first one is not disturbed."""
    place = ["--dataset", "digits", "--runs-dir", str(tmp_path), "--name", "one"]
    log = tmp_path / "one" / "metrics.jsonl"
    refused: list[tuple[int, str]] = []

    def meanwhile(done: int, total: int, note: str = "") -> None:
        if done != total - 1 or refused:  # the first epoch has left a checkpoint
            return
        before = log.read_bytes()
        for word in ("--resume", "--overwrite"):
            result = CliRunner().invoke(app, ["train", *place, "--epochs", "2", word])
            refused.append((result.exit_code, " ".join(result.stderr.split())))
        assert log.read_bytes() == before

    options = {"dataset": "digits", "runs_dir": str(tmp_path), "name": "one", "epochs": 2}
    sv.fit(make_config(options), progress=meanwhile)
    assert [code for code, _ in refused] == [2, 2]
    assert all("another process is training in" in words for _, words in refused)
    assert all("or train under another name" in words for _, words in refused)
    assert epochs_logged(tmp_path / "one") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_run_resumes_on_a_gpu(tmp_path: Path) -> None:
    """Its optimiser steps are fused there, and want their state laid out as the parameters."""
    more = ["--device", "cuda", "--net", "thin-resnet", "--dataset", f"npz:{tmp_path}/made.npz"]
    images = np.random.default_rng(0).integers(0, 256, (600, 32, 32, 3), dtype=np.uint8)
    np.savez(tmp_path / "made.npz", x=images, y=np.arange(600) % 3)
    options = [*OPTIONS[2:], *more]
    stop_midway(start(tmp_path, "run", *options), tmp_path / "run", signal.SIGINT)
    again = start(tmp_path, "run", *options, "--resume")
    assert again.wait(timeout=300) == 0, said(tmp_path, "run")
    assert epochs_logged(tmp_path / "run") == EPOCHS
