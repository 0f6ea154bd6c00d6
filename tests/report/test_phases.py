"""Phases of a penalty, read from logs written by hand."""

import json
from typing import Any

from made_runs import MakeRun, make_record

from splitveil.record.files import RunFiles
from splitveil.report.curves import phases


def logged(make_run: MakeRun, entries: list[dict[str, Any]], **config: Any) -> RunFiles:  # noqa: ANN401
    lines = [{"kind": "epoch", "epoch": at} | entry for at, entry in enumerate(entries, start=1)]
    record = make_record("veil")
    record["config"] |= config
    return make_run("x", record=record, gallery=None, metrics="\n".join(map(json.dumps, lines)))


def told(run: RunFiles) -> list[tuple[str, float, float]]:
    return [(phase.kind, phase.first, phase.last) for phase in phases(run)]


def test_leading_epochs_without_weight_are_the_warm_up(make_run: MakeRun) -> None:
    entries = [{"weight": w} for w in (0.0, 0.0, 0.3, 0.0, 0.3)]
    assert told(logged(make_run, entries)) == [("warm-up", 1, 2)]


def test_a_run_without_a_penalty_has_no_warm_up(make_run: MakeRun) -> None:
    assert told(logged(make_run, [{"weight": 0.0}] * 3, lambd=0.0)) == []


def test_a_run_that_ended_in_its_warm_up_is_all_warm_up(make_run: MakeRun) -> None:
    assert told(logged(make_run, [{"weight": 0.0}] * 3, lambd=0.3)) == [("warm-up", 1, 3)]


def test_each_stretch_of_shut_epochs_is_a_phase(make_run: MakeRun) -> None:
    shares = (None, 1.0, 0.5, 0.49, 0.0, 0.9)
    entries = [{"weight": 1.0} | ({} if s is None else {"shut": s}) for s in shares]
    assert told(logged(make_run, entries)) == [("shut off", 2, 3), ("shut off", 6, 6)]


def test_a_growing_weight_is_full_after_its_share_of_the_run(make_run: MakeRun) -> None:
    entries = [{"weight": 0.1}] * 8
    run = logged(make_run, entries, lambd=0.3, ramp=0.5, epochs=8)
    assert told(run) == [("full weight", 4, 4)]


def test_a_run_stopped_before_its_weight_was_full_has_no_mark(make_run: MakeRun) -> None:
    run = logged(make_run, [{"weight": 0.1}] * 3, lambd=0.3, ramp=0.5, epochs=8)
    assert told(run) == []
