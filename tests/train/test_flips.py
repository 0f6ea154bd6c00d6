"""Alternating flips and Nesterov momentum in a whole training."""

import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

import splitveil as sv
from splitveil.data import DATASETS, Dataset, ReadRequest, Source, make_dataset
from splitveil.errors import ConfigError
from splitveil.train import step
from splitveil.train.state import read_checkpoint

EPOCHS = 4


def arrows(request: ReadRequest) -> Dataset:
    """100 grey images of two classes that may be mirrored."""
    del request
    labels = np.arange(100) % 2
    images = np.random.default_rng(0).integers(0, 256, (100, 1, 8, 8)).astype(np.uint8)
    return make_dataset("arrows", (images, labels), ("up", "down"), flip=True)


@pytest.fixture(autouse=True)
def dataset() -> Iterator[None]:
    source = Source(summary="arrows", needs_path=False, read=arrows)
    with patch.dict(DATASETS, {"arrows": source}):
        yield


def config(folder: Path, name: str) -> sv.RunConfig:
    return sv.RunConfig(
        dataset="arrows", defence="noise", name=name, runs_dir=str(folder), device="cpu",
        epochs=EPOCHS, batch_size=20, nesterov=True, flips="alternating",
    )  # fmt: skip


def test_every_image_is_mirrored_in_every_other_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    epochs: list[dict[bytes, bool]] = [{}]
    real = step.crop_and_flip

    def seen(x: Tensor, *, mirrored: Tensor, **others: object) -> Tensor:
        if len(epochs[-1]) + len(x) > 72:  # of the 80 training images 8 are for validation
            epochs.append({})
        keys = (image.numpy().tobytes() for image in x)
        epochs[-1].update(zip(keys, mirrored.tolist(), strict=True))
        return real(x, mirrored=mirrored, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(step, "crop_and_flip", seen)
    sv.fit(config(tmp_path, "seen"))
    assert len(epochs) == EPOCHS
    for one, two in pairwise(epochs):
        both = one.keys() & two.keys()
        assert len(both) > 40
        assert all(one[key] != two[key] for key in both)


def test_a_run_stopped_between_flips_continues_with_the_same_bits(tmp_path: Path) -> None:
    sv.fit(config(tmp_path, "whole"))

    def stop(done: int, total: int, note: str = "") -> None:
        del total, note
        if done == 5:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        sv.fit(config(tmp_path, "stopped"), progress=stop)
    sv.fit(config(tmp_path, "stopped"), resume=True)
    whole, other = (
        read_checkpoint(tmp_path / name / "checkpoint.safetensors").tensors
        for name in ("whole", "stopped")
    )
    assert whole.keys() == other.keys()
    assert not [k for k, v in whole.items() if not torch.equal(v, other[k])]


def test_nesterov_without_momentum_is_refused() -> None:
    with pytest.raises(ConfigError, match="nesterov needs a momentum above 0, got 0"):
        sv.RunConfig(nesterov=True, momentum=0.0)
