"""`splitveil.audit` is the function and the room at once."""

import importlib
from dataclasses import asdict
from types import ModuleType
from typing import Any

import pytest

import splitveil
from splitveil.types import Progress, Record, silent


def record() -> Record:
    return Record(
        accuracy=0.5,
        attacks={},
        strongest={},
        worst_case={},
        ceiling={},
        floor={},
        leakage=0.0,
        true_rate_nats=None,
        client={},
        config={},
        splits={},
        seeds={},
        versions={},
        device="cpu",
        seconds={},
        audit={},
    )


class RunLike:
    """Remembers how it was audited."""

    def __init__(self) -> None:
        self.heard: dict[str, Any] = {}
        self.answer = record()

    def audit(
        self,
        profile: str = "?",
        *,
        aux: str = "?",
        seed: int = -1,
        progress: Progress,
    ) -> Record:
        self.heard = {"profile": profile, "aux": aux, "seed": seed, "progress": progress}
        return self.answer


@pytest.fixture
def room() -> Any:  # noqa: ANN401 - a module that can be called
    return importlib.import_module("splitveil.audit")


def test_the_package_and_the_function_are_one_object(room: Any) -> None:  # noqa: ANN401
    assert splitveil.audit is room
    assert isinstance(room, ModuleType)
    assert callable(room)
    assert importlib.import_module("splitveil.audit.metrics") is room.metrics
    assert importlib.import_module("splitveil.audit.suite").run_attacks is room.run_attacks


def test_calling_it_audits_the_run_with_the_defaults(room: Any) -> None:  # noqa: ANN401
    run = RunLike()
    assert room(run) is run.answer
    assert run.heard == {"profile": "quick", "aux": "train", "seed": 0, "progress": silent}


def test_calling_it_passes_every_argument_on(room: Any) -> None:  # noqa: ANN401
    def bar(done: int, total: int, note: str = "") -> None:
        del done, total, note

    run = RunLike()
    assert room(run, profile="smoke", aux="test90", seed=7, progress=bar) is run.answer
    assert run.heard == {"profile": "smoke", "aux": "test90", "seed": 7, "progress": bar}
    room(run, "paper")
    assert run.heard["profile"] == "paper"


def test_aux_and_seed_must_be_named(room: Any) -> None:  # noqa: ANN401
    with pytest.raises(TypeError):
        room(RunLike(), "quick", "train")


def test_a_record_survives_json() -> None:
    import json

    made = record()
    again = Record.from_dict(json.loads(made.to_json()))
    assert again == made
    assert asdict(again) == made.to_dict()


def test_a_record_with_nan_is_not_written() -> None:
    bad = Record.from_dict(record().to_dict() | {"leakage": float("nan")})
    with pytest.raises(ValueError, match="not JSON compliant"):
        bad.to_json()
