"""`splitveil.audit` is a plain function, and `Run.audit` is the same one."""

import inspect
import json

import pytest

import splitveil
from splitveil.record.schema import Record


def record() -> Record:
    return Record.from_dict({"accuracy": 0.5, "device": "cpu"})


def test_auditing_a_run_is_one_function_with_named_options() -> None:
    assert inspect.isfunction(splitveil.audit)
    assert splitveil.audit is splitveil.Run.audit
    run, profile, *options = inspect.signature(splitveil.audit).parameters.values()
    assert (run.name, profile.name, profile.default) == ("run", "profile", "quick")
    assert all(option.kind is inspect.Parameter.KEYWORD_ONLY for option in options)


def test_a_record_survives_json() -> None:
    made = record()
    again = Record.from_dict(json.loads(made.to_json()))
    assert again == made
    assert again.to_dict() == made.to_dict()


def test_a_record_with_nan_is_not_written() -> None:
    bad = Record.from_dict(record().to_dict() | {"leakage": float("nan")})
    with pytest.raises(ValueError, match="not JSON compliant"):
        bad.to_json()
