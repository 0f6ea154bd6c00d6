"""Fixtures for every room."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from jaxtyping import config
from made_runs import MakeRun, make_gallery, make_metrics, make_record, write_run

from splitveil.record.files import RunFiles, read_run

# What a probe finds depends on the machine; tests, and the commands that they start, do not.
os.environ["SPLITVEIL_PRECISION"] = "float32"

# Time says nothing about a fact; a busy machine would fail the test.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Nets as small as those of the tests only lose time to threads."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def keep_denormals() -> None:
    """Training flushes denormals for the whole process; hypothesis needs them back."""
    torch.set_flush_denormal(False)


@pytest.fixture(autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands keep their draws in a folder of the test, not in the user's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.getbasetemp() / "state"))


@pytest.fixture
def as_users_run() -> Iterator[None]:
    """Without the shape and type checks that only the tests switch on.

    Wrong words and wrong shapes then reach the product's own messages, as they do for a user.
    """
    before = config.jaxtyping_disable
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", before)


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Writes a run folder and reads it back; parts can be replaced, or left out with None."""

    def make(name: str, defence: str = "veil", **parts: Any) -> RunFiles:  # noqa: ANN401
        folder = write_run(
            tmp_path / "runs" / name,
            parts.get("record", make_record(defence)),
            parts.get("metrics", make_metrics(defence)),
            parts.get("gallery", make_gallery(defence)),
        )
        return read_run(folder, audited=parts.get("record", {}) is not None)

    return make
