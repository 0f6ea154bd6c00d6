"""What a training leaves for readers: `train.log`, the gates' means and the learned scalars."""

import json
import logging
from pathlib import Path

import pytest
from typer.testing import CliRunner

import splitveil as sv
from splitveil.cli.app import app
from splitveil.record.files import read_run
from splitveil.report.curves import LEARNED, gate_values, learned_scalars, phases
from splitveil.surrogates.slot_cross import SlotCrossAttentionCEM

SOON = {"attention_warmup_epochs": 1, "early_shut_steps": 4, "early_hard_thresh": 1.0}


@pytest.fixture(scope="module")
def slots(tmp_path_factory: pytest.TempPathFactory) -> sv.Run:
    folder = tmp_path_factory.mktemp("训练")
    config = sv.RunConfig(
        dataset="digits", defence="slot-cross", epochs=3, device="cpu", batch_size=256,
        runs_dir=str(folder), settings=SOON,
    )  # fmt: skip
    return sv.fit(config)


def test_the_log_tells_the_training_in_order(slots: sv.Run) -> None:
    lines = (slots.path / "train.log").read_text(encoding="utf-8").splitlines()
    said = [line.split(" ", 3)[3] for line in lines]
    assert said[0] == "training starts at step 0"
    assert [line.partition(":")[0] for line in said if line.startswith("epoch")] == [
        "epoch 1 of 3", "epoch 2 of 3", "epoch 3 of 3",
    ]  # fmt: skip
    gates = [line for line in said if line.startswith("[CEM-GATE]")]
    assert gates[0].startswith("[CEM-GATE] call 1: SHUTOFF by early_shut_steps")
    assert gates[1].startswith("[CEM-GATE] call 5: OK")


def test_logging_is_left_as_it_was(slots: sv.Run) -> None:
    log = logging.getLogger("splitveil")
    assert not any(isinstance(handler, logging.FileHandler) for handler in log.handlers)
    assert log.level == logging.NOTSET or log.level >= logging.INFO
    assert (slots.path / "train.log").stat().st_size > 0


def test_every_line_of_metrics_has_the_scalars_and_the_gates(slots: sv.Run) -> None:
    lines = [json.loads(line) for line in (slots.path / "metrics.jsonl").read_text().splitlines()]
    assert all(set(LEARNED) <= set(line) for line in lines)
    assert lines[0]["assign_temp"] == 12.0  # nothing is learned before the penalty
    assert {"soft_gate", "hard_gate", "shut"} <= set(lines[-1])
    run = read_run(slots.path, audited=False)
    assert set(learned_scalars(run)) == set(LEARNED)
    surrogate = SlotCrossAttentionCEM(4, 2)
    assert list(surrogate.report()) == list(LEARNED)


def test_phases_need_no_audit(slots: sv.Run) -> None:
    found = [(p.kind, p.first, p.last) for p in phases(read_run(slots.path, audited=False))]
    assert found[0] == ("warm-up", 1.0, 1.0)


def test_a_report_without_an_audit_has_curves(slots: sv.Run, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(slots.path), "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    pictures = sorted(path.name for path in tmp_path.glob("*.png"))
    assert pictures == [f"curves-{slots.path.name}.png"]
    assert "Not audited yet" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_explain_prints_where_the_scalars_stand(slots: sv.Run, tmp_path: Path) -> None:
    words = ["explain", str(slots.path), "--flow", "slot-cross", "--out", str(tmp_path)]
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 0, told.output
    assert "last epoch: soft_gate " in told.output
    values = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["values"]
    assert values == gate_values(read_run(slots.path, audited=False))
    assert set(LEARNED) <= set(values)


def test_a_continued_training_goes_on_in_the_same_log(slots: sv.Run, tmp_path: Path) -> None:
    config = sv.RunConfig(defence="none", epochs=1, device="cpu", runs_dir=str(tmp_path))
    run = sv.fit(config)
    sv.fit(config, resume=True)
    text = (run.path / "train.log").read_text(encoding="utf-8")
    assert text.count("training starts at step 0") == 1
    assert text.count("training continues at step ") == 1
