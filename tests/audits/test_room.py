"""`splitveil.audit` is a plain function."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import splitveil
from splitveil.io import Progress, silent
from splitveil.record.schema import Record


def record() -> Record:
    return Record.from_dict({"accuracy": 0.5, "device": "cpu"})


class RunLike(splitveil.Run):
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
        progress: Progress = silent,
        fresh: bool = False,
        only: Sequence[str] = (),
        compile: bool = False,
        attributes: Path | None = None,
    ) -> Record:
        self.heard = {"profile": profile, "aux": aux, "seed": seed, "progress": progress}
        self.heard |= {"fresh": fresh, "only": only, "compile": compile, "attributes": attributes}
        return self.answer


USUAL = {
    "aux": "train",
    "seed": 0,
    "progress": silent,
    "fresh": False,
    "only": (),
    "compile": False,
    "attributes": None,
}


def audit(run: RunLike, *words: Any, **options: Any) -> Record:  # noqa: ANN401 - whatever is tried
    return splitveil.audit(run, *words, **options)


def test_calling_it_audits_the_run_with_the_defaults() -> None:
    run = RunLike()
    assert audit(run) is run.answer
    assert run.heard == {"profile": "quick"} | USUAL


def test_calling_it_passes_every_argument_on() -> None:
    def bar(done: int, total: int, note: str = "") -> None:
        del done, total, note

    run = RunLike()
    more = {"aux": "test90", "seed": 7, "progress": bar, "fresh": True, "only": ["a"]}
    more |= {"attributes": Path("table.csv")}
    assert audit(run, profile="smoke", compile=True, **more) is run.answer
    assert run.heard == {"profile": "smoke", "compile": True} | more
    audit(run, "paper")
    assert run.heard["profile"] == "paper"


def test_aux_and_seed_must_be_named() -> None:
    with pytest.raises(TypeError):
        audit(RunLike(), "quick", "train")


def test_a_record_survives_json() -> None:
    import json

    made = record()
    again = Record.from_dict(json.loads(made.to_json()))
    assert again == made
    assert again.to_dict() == made.to_dict()


def test_a_record_with_nan_is_not_written() -> None:
    bad = Record.from_dict(record().to_dict() | {"leakage": float("nan")})
    with pytest.raises(ValueError, match="not JSON compliant"):
        bad.to_json()
