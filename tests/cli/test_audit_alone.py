"""`splitveil audit RUN --alone RUN2`: what the server adds, written into the record."""

import json
from pathlib import Path

import numpy as np
import pytest
from made_records import record as made_record
from short_runs import config
from typer.testing import CliRunner, Result

import splitveil as sv
from splitveil.cli.app import app
from splitveil.record.schema import read_record, right_answers

QUICKLY = {"device": "cpu", "precision": "float32", "threads": 1}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with noise, not audited yet."""
    folder = tmp_path_factory.mktemp("runs")
    sv.fit(config(folder, "noise", name="noise", **QUICKLY))
    return folder


def called(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.slow
def test_the_record_holds_the_gain_and_a_second_call_attacks_nothing(runs: Path) -> None:
    sv.fit(config(runs, "alone", name="alone", **QUICKLY)).audit("smoke")
    said = called("audit", runs / "noise", "--profile", "smoke", "--alone", runs / "alone")
    assert said.exit_code == 0, said.output
    record, alone = (read_record(runs / name / "record.json") for name in ("noise", "alone"))
    assert record.alone.row == record.alone.same_client == "alone"
    assert record.alone.track is not None
    expected = 100 * ((record.accuracy or 0) - (alone.accuracy or 0))
    assert record.server_gain == pytest.approx(expected)
    assert record.gain_over_same_client == record.server_gain
    low, high = record.intervals["server_gain"]
    assert low < expected < high
    right = right_answers(record)
    assert right is not None
    assert float(np.mean(right)) == pytest.approx(record.accuracy)
    assert record.raw["training"]["val_accuracy"] is not None
    assert (alone.sent, alone.exposure, alone.alone.row) == (0, 0, None)

    again = called(
        "audit", runs / "noise", "--profile", "smoke", "--alone", runs / "alone", "--json"
    )
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout) == record.to_dict()
    assert json.loads(again.stdout)["seconds"] == record.to_dict()["seconds"]
    replayed = called("replay", runs / "noise" / "record.json")
    assert replayed.exit_code == 0, replayed.output


def test_other_runs_are_refused_before_anything_is_attacked(runs: Path, tmp_path: Path) -> None:
    data = made_record(0.8) | {"config": {"dataset": "fashion-mnist", "defence": "alone"}}
    other = tmp_path / "fashion"
    other.mkdir()
    (other / "record.json").write_text(json.dumps(data))
    said = called("audit", runs / "noise", "--alone", other)
    assert said.exit_code == 2
    words = " ".join(said.output.split())
    assert "fashion answers 'fashion-mnist' and this run 'digits'" in words
    assert "give runs of --defence alone on digits" in words
    data["config"] |= {"dataset": "digits", "defence": "veil"}
    (other / "record.json").write_text(json.dumps(data))
    refused = " ".join(called("audit", runs / "noise", "--alone", other).output.split())
    assert "--alone takes runs of the defence 'alone'" in refused
