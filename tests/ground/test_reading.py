"""The one reader of files and texts of strangers: what it refuses, and at what cost."""

import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitveil.io import (
    MAX_DEPTH,
    MAX_SETTINGS,
    opened,
    parse_json,
    parse_toml,
    printable,
    read_bytes,
    read_text,
)


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 5_000, 100_000])
@pytest.mark.parametrize("brackets", [("[", "]"), ('{"a":', "}")])
def test_json_that_is_nested_too_deep_is_refused(depth: int, brackets: tuple[str, str]) -> None:
    begin, end = brackets
    with pytest.raises(ValueError, match="nested too deep"):
        parse_json(begin * depth + "1" + end * depth)
    parse_json(begin * MAX_DEPTH + "1" + end * MAX_DEPTH)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_a_number_that_is_not_finite_is_refused_or_counts_as_nothing(number: str) -> None:
    with pytest.raises(ValueError, match=r"is not JSON|must be finite"):
        parse_json(f'{{"a": [{number}]}}')
    assert parse_json(f'{{"a": [{number}, 2]}}', lenient=True) == {"a": [None, 2]}


def test_an_integer_beyond_the_floats_is_refused() -> None:
    with pytest.raises(ValueError, match="beyond the range of floats"):
        parse_json(f"[{10**400}]")
    with pytest.raises(ValueError, match="limit"):
        parse_json("1" * 100_000)


def test_a_key_that_is_given_twice_is_refused_or_told() -> None:
    with pytest.raises(ValueError, match="the key 'std' is given twice"):
        parse_json('{"stages": [{"std": 0.5, "std": 0}]}')
    twice: list[str] = []
    assert parse_json('{"a": 1, "a": 2, "b": 3}', twice=twice) == {"a": 2, "b": 3}
    assert twice == ["a"]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=30,
    )
)
def test_whatever_json_writes_is_read_back(value: object) -> None:
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value).encode(), lenient=True) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a=" + "[" * 5_000, "nested too deep"),
        ("a={" + "b={" * 5_000, "nested too deep"),
        ("a." * 100_000 + "a=1", "nested too deep"),  # tomllib alone fills the memory with it
        ('"a" . ' * 20_000 + "a=1", "nested too deep"),
        ("[" + "a." * 100_000 + "a]", "nested too deep"),
        ("#" * (MAX_SETTINGS + 1), "characters"),
        ("a=" + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested too deep"),
        ("a=1\na=2", "overwrite"),
    ],
)
def test_toml_that_could_fill_the_memory_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_toml(text)


def test_a_long_word_in_toml_costs_no_time() -> None:
    long = "x" * (MAX_SETTINGS - 20)
    assert parse_toml(f'path = "{long}"') == {"path": long}


def test_only_a_regular_file_is_read_and_nobody_waits_for_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero"), Path("/dev/null")):
        with pytest.raises(OSError, match="pipe or a device"):
            read_bytes(path)
    with pytest.raises(IsADirectoryError):
        read_bytes(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "absent")


def test_a_link_to_a_file_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content", encoding="utf-8")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_text(tmp_path / "link") == "content"


def test_a_file_above_its_bound_is_refused_before_it_is_read(tmp_path: Path) -> None:
    huge = tmp_path / "huge"
    with huge.open("wb") as file:
        file.truncate(1 << 40)  # a hole, which takes no space
    with pytest.raises(OSError, match="larger than the limit of 10 bytes") as caught:
        read_bytes(huge, 10)
    assert caught.value.errno == errno.EFBIG
    with pytest.raises(OSError, match="larger than the limit"):
        read_text(huge)


def test_a_file_that_grows_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 11)
    real = os.fstat
    monkeypatch.setattr(os, "fstat", lambda fd: os.stat_result((*real(fd)[:6], 3, *real(fd)[7:])))
    with opened(file, 10) as stream:
        assert stream.read() == b"x" * 11
    with pytest.raises(OSError, match="larger than the limit"):
        read_bytes(file, 10)


@given(st.text())
def test_printable_text_has_no_control_characters(text: str) -> None:
    found = printable(text)
    assert len(found) == len(text)
    assert all(c.isprintable() or c == "\n" for c in found)
    assert all(a == b for a, b in zip(text, found, strict=True) if a.isprintable())
