"""Stored records are read and written back byte for byte; fresh ones have the same keys."""

import json
from pathlib import Path

import pytest
from golden.face import GOLDEN, OLD, ROOT, differences, facts, told
from golden.outputs import audits_of

import splitveil as sv

RECORDS = sorted((ROOT / "results").rglob("record.json"))
FLOORS = {
    "run": 0.07198243588209152,
    "capture": 0.07198243588209152,
    "encoder": 0.07199841737747192,
}


def test_no_stored_record_is_missing() -> None:
    assert len(RECORDS) == 174


@pytest.mark.parametrize("path", [*RECORDS, *sorted(OLD.rglob("record.json"))], ids=str)
def test_a_record_is_written_as_it_was_read(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    known = json.loads(text)
    record = sv.Record.from_dict(known)
    assert record.to_dict() == known
    assert record.to_json() == text


def test_the_report_reads_every_record_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    runs = sorted((ROOT / "results" / "digits").rglob("seed0"))
    found = told("report", *runs, "--out", tmp_path)
    assert list(found) == [str(run) for run in runs]
    for run in runs:
        record = json.loads((run / "record.json").read_text(encoding="utf-8"))
        assert not list(differences(record, found[str(run)]))


@pytest.mark.slow
def test_fresh_audits_say_what_they_said(tmp_path: Path) -> None:
    """Keys, types, names and counts; numbers that the last bits decide are no machine's duty."""
    stored = json.loads((GOLDEN / "audits.json").read_text(encoding="utf-8"))
    records = audits_of(tmp_path)
    found = {name: facts(record) for name, record in records.items()}
    assert not list(differences(stored, found))
    for name, record in records.items():
        assert record["floor"]["mse"] == pytest.approx(FLOORS[name], rel=1e-5)
        assert record["attacks"]["mean"]["mse"] == record["floor"]["mse"]
