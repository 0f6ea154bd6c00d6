"""The journal: what is on disk is believed, what is half there is not."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitveil.errors import RunError
from splitveil.sweep.journal import Entry, Journal, read_lines


def entry(number: int, **changes: object) -> Entry:
    facts = {"defence": "veil", "settings": {"lambd": 0.1}, "seed": 0, "seconds": 1.0}
    return Entry(**facts | {"number": number, "found": {"accuracy": 0.5}} | changes)  # type: ignore[arg-type]


def write(folder: Path, numbers: range) -> bytes:
    with Journal(folder) as journal:
        for number in numbers:
            journal.append(entry(number))
    return (folder / "journal.jsonl").read_bytes()


def test_what_was_appended_is_read_back_and_nothing_is_rewritten(tmp_path: Path) -> None:
    first = write(tmp_path, range(2))
    both = write(tmp_path, range(2, 3))
    assert both.startswith(first)
    assert both.count(b"\n") == 3
    with Journal(tmp_path) as journal:
        assert journal.entries == [entry(0), entry(1), entry(2)]


def test_a_line_is_on_disk_when_append_returns(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.append(entry(0, error="boom", found=None))
        line = json.loads((tmp_path / "journal.jsonl").read_text())
    assert (line["error"], line["number"], line["found"]) == ("boom", 0, None)


@given(st.integers(0, 10_000))
def test_cut_anywhere_the_whole_lines_are_kept(where: int) -> None:
    lines = [json.dumps(vars(entry(n))).encode() + b"\n" for n in range(3)]
    data = b"".join(lines)
    cut = data[: where % (len(data) + 1)]
    entries, whole = read_lines(cut, Path("j"))
    assert entries == [entry(n) for n in range(cut.count(b"\n"))]
    assert cut[:whole] == b"".join(lines[: len(entries)])


def test_a_torn_last_line_is_dropped_and_overwritten(tmp_path: Path) -> None:
    kept = write(tmp_path, range(2))
    path = tmp_path / "journal.jsonl"
    path.write_bytes(kept + b'{"defence": "ve')
    after = write(tmp_path, range(2, 3))
    assert after.startswith(kept)
    assert [json.loads(line)["number"] for line in after.splitlines()] == [0, 1, 2]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"not json\n", "line 2 is not a finished trial"),
        (b'{"defence": "veil"}\n', "line 2 is not a finished trial"),
        (b"[1]\n", "line 2 is not a finished trial"),
        (None, "line 2: trial veil/0 stands there twice"),
    ],
)
def test_a_broken_line_inside_is_named(line: bytes | None, said: str, tmp_path: Path) -> None:
    kept = write(tmp_path, range(1))
    (tmp_path / "journal.jsonl").write_bytes(kept + (kept if line is None else line) + kept)
    with pytest.raises(RunError, match=said):
        Journal(tmp_path)


def test_of_a_trial_that_was_tried_again_the_last_line_counts(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.append(entry(0, error="boom", found=None))
        journal.append(entry(1))
        assert journal.failed == [entry(0, error="boom", found=None)]
        journal.append(entry(0))
        assert (journal.entries, journal.failed) == ([entry(1), entry(0)], [])
    kept = (tmp_path / "journal.jsonl").read_bytes()
    assert [json.loads(line)["error"] for line in kept.splitlines()] == ["boom", None, None]
    assert read_lines(kept, Path("j")) == ([entry(1), entry(0)], len(kept))


def test_two_processes_do_not_share_a_journal(tmp_path: Path) -> None:
    with Journal(tmp_path), pytest.raises(RunError, match="another process is working"):
        Journal(tmp_path)
    with Journal(tmp_path) as journal:
        assert journal.entries == []


def test_numbers_that_are_not_finite_never_reach_it(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        with pytest.raises(ValueError, match="not JSON compliant"):
            journal.append(entry(0, found={"accuracy": float("nan")}))
        assert journal.entries == []
    assert (tmp_path / "journal.jsonl").read_bytes() == b""
