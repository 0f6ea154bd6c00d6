"""Folders from a command line: broken ones are named and left out, the rest keeps its numbers."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_runs import make_gallery, make_metrics, make_record, rich_record, write_run

from splitveil.errors import RunError
from splitveil.report.page import read_runs


def folder(place: Path, record: Any = None, **parts: Any) -> Path:  # noqa: ANN401
    return write_run(
        place,
        make_record("veil") if record is None else record,
        parts.get("metrics"),
        parts.get("gallery"),
    )


def test_broken_folders_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    good = folder(tmp_path / "good", metrics=make_metrics("veil", 2))
    torn = folder(tmp_path / "torn")
    (torn / "record.json").write_text("{")
    typed = folder(tmp_path / "typed", make_record("veil") | {"accuracy": "high"})
    listed = folder(tmp_path / "listed", make_record("veil") | {"attacks": [1]})
    flagged = folder(tmp_path / "flagged", make_record("veil") | {"flags": 3})
    logged = folder(tmp_path / "logged", metrics='{"kind": "epoch", "epoch": 1, "weight": "x"}')
    painted = folder(tmp_path / "painted", gallery=make_gallery("veil") | {"labels": []})
    bare = tmp_path / "bare"
    bare.mkdir()
    absent = tmp_path / "absent"
    bad = [torn, typed, listed, flagged, logged, painted, bare, absent]
    found = read_runs([*bad, good])
    assert [run.name for run in found.runs] == ["good"]
    assert [path for path, _ in found.skipped] == [str(path) for path in bad]
    reasons = dict(found.skipped)
    assert "not valid JSON" in reasons[str(torn)]
    assert "`accuracy` must be a number" in reasons[str(typed)]
    assert "`flags` must be a list" in reasons[str(flagged)]
    assert "splitveil audit" in reasons[str(bare)]
    assert "no run folder" in reasons[str(absent)]


def test_when_none_is_left_every_reason_is_told(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(RunError, match=r"a: run 'a' has no record.json.*b: no run folder"):
        read_runs([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(RunError, match="name at least one run folder"):
        read_runs([])


def test_a_folder_given_twice_counts_once(tmp_path: Path) -> None:
    one = folder(tmp_path / "one")
    other = folder(tmp_path / "other")
    found = read_runs([one, other, tmp_path / "other" / ".." / "one"])
    assert [run.name for run in found.runs] == ["one", "other"]


def test_namesakes_are_told_apart_by_the_folders_above(tmp_path: Path) -> None:
    places = ("veil/seed0", "none/seed0", "x/none/seed1", "y/none/seed1", "cem")
    found = read_runs([folder(tmp_path / place) for place in places])
    names = [run.name for run in found.runs]
    assert names == ["veil/seed0", "none/seed0", "x/none/seed1", "y/none/seed1", "cem"]


LEAVES = [
    (section, key)
    for section, inner in rich_record("veil").items()
    for key in (inner if isinstance(inner, dict) else [None])
]
junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(place=st.sampled_from(LEAVES), value=junk | st.just(10**400))
def test_whatever_a_record_holds_it_is_read_or_refused(
    place: tuple[str, str | None], value: object
) -> None:
    record = rich_record("veil")
    section, key = place
    if key is None:
        record[section] = value
    else:
        record[section] = {**record[section], key: value}
    with tempfile.TemporaryDirectory() as made:
        run = folder(Path(made) / "x")
        (run / "record.json").write_text(json.dumps(record))
        try:
            found = read_runs([run])
        except RunError as err:
            assert str(run) in str(err)  # noqa: PT017 - either outcome is right, others are not
        else:
            assert found.skipped == ()
