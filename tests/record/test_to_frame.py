"""Records as a data frame: one line per record, every value under its keys."""

import sys
from pathlib import Path

import pytest
from made_records import put, record

import splitveil as sv
from splitveil.errors import RunError


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    put(tmp_path / "runs" / "veil" / "seed0", record(0.9, 0.05))
    put(tmp_path / "runs" / "veil" / "seed1", record(0.8, 0.04, seed=1))
    put(tmp_path / "runs" / "none", record(0.95, 0.01) | {"true_rate_nats": None})
    (tmp_path / "runs" / "unaudited").mkdir()
    (tmp_path / "runs" / "notes.txt").write_text("not a run")
    return tmp_path / "runs"


def test_a_frame_has_a_line_per_record_and_dotted_keys(runs: Path) -> None:
    pytest.importorskip("pandas")
    frame = sv.records(runs).to_frame()
    assert len(frame) == 3
    assert sorted(frame["row"]) == ["none", "veil", "veil"]
    best = frame[frame["accuracy"] >= 0.9].sort_values("strongest.mse", ascending=False)
    assert list(best["row"]) == ["veil", "none"]
    assert list(best["strongest.mse"]) == [0.05, 0.01]
    assert set(frame["seeds.train"]) == {0, 1}
    assert frame["attacks.decoder.accuracy"].mean() == pytest.approx(0.26)
    assert set(frame["config.net"]) == {"thin-resnet"}


def test_a_pattern_takes_the_audited_runs_among_what_it_matches(runs: Path) -> None:
    found = sv.records(f"{runs}/*")
    assert [group.name for group in found.groups] == ["none", "veil"]
    assert found.broken == {}
    assert [group.name for group in sv.records([runs / "veil", str(runs / "none")]).groups] == [
        "veil",
        "none",
    ]
    with pytest.raises(RunError, match=r"no audited run matches .*un\*; audit one"):
        sv.records(f"{runs}/un*")
    with pytest.raises(RunError, match="did you mean"):
        sv.records(runs / "viel")


def test_without_pandas_the_error_says_what_to_install(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(RunError, match="needs pandas; install it: pip install"):
        sv.records(runs).to_frame()
