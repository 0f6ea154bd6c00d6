"""`splitveil report` from the outside: files, exit codes, what it says about broken folders."""

import json
import re
from pathlib import Path

import pytest
from made_runs import make_record, write_run
from typer.testing import CliRunner, Result

from splitveil.cli.app import app


def call(*words: str) -> Result:
    return CliRunner().invoke(app, ["report", *words])


def told(result: Result) -> str:
    return " ".join(re.sub(r"\x1b\[[\d;]*m", "", result.output).split())


RECORD = make_record("veil") | {"attacks": {}, "strongest": {}}  # nothing to draw: pages are cheap


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write_run(tmp_path / "good", RECORD, None, None)


@pytest.fixture
def drawn(tmp_path: Path) -> Path:
    return write_run(tmp_path / "drawn", make_record("veil"), None, None)


def test_a_report_in_chinese_with_a_deck(drawn: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = call(str(drawn), "--out", str(out), "--lang", "zh", "--pptx", "--title", "报告 <1>")
    assert result.exit_code == 0, told(result)
    flat = result.output.replace("\n", "")
    assert f"页面：{out / 'report.html'}" in flat
    assert f"幻灯片：{out / 'deck.pptx'}" in flat
    html = (out / "report.html").read_text(encoding="utf-8")
    assert '<html lang="zh-CN">' in html
    assert "报告 &lt;1&gt;" in html
    assert (out / "deck.pptx").read_bytes()[:2] == b"PK"
    kinds = {path.suffix for path in out.iterdir()}
    assert kinds == {".html", ".png", ".svg", ".pptx"}


def test_the_deck_lies_beside_a_page_with_a_name_of_its_own(good: Path, tmp_path: Path) -> None:
    result = call(str(good), "--out", str(tmp_path / "out" / "mine.html"), "--pptx")
    assert result.exit_code == 0, told(result)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"mine.html", "deck.pptx"}


def test_slides_are_answered_with_what_to_use(good: Path, tmp_path: Path) -> None:
    result = call(str(good), "--out", str(tmp_path / "out"), "--slides")
    assert result.exit_code == 2
    assert "use --pptx" in told(result)
    assert not (tmp_path / "out").exists()


def test_a_deck_without_runs_or_without_room_exits_with_two(good: Path, tmp_path: Path) -> None:
    result = call(str(tmp_path / "ghost"), "--pptx", "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert "no run folder" in told(result)
    (tmp_path / "file").write_text("here")
    result = call(str(good), "--pptx", "--out", str(tmp_path / "file"))
    assert result.exit_code == 2
    assert "cannot write" in told(result)
    assert (tmp_path / "file").read_text() == "here"


def test_broken_folders_are_named_and_the_rest_is_reported(good: Path, tmp_path: Path) -> None:
    torn = tmp_path / "<torn>"
    torn.mkdir()
    (torn / "record.json").write_text("{")
    result = call(str(torn), str(tmp_path / "ghost"), str(good), "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, told(result)
    assert f"left out: {torn}" in told(result)
    assert "left out: " + str(tmp_path / "ghost") in told(result)
    html = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "&lt;torn&gt;</code>" in html
    assert "<torn>" not in html
    assert "could not be read and are left out: 2." in html


def test_nothing_to_report_exits_with_two(tmp_path: Path) -> None:
    result = call(str(tmp_path / "ghost"), str(tmp_path), "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert "no run folder" in told(result)
    assert "splitveil audit" in told(result)
    assert not (tmp_path / "out").exists()


def test_an_unknown_language_exits_with_two(good: Path) -> None:
    result = call(str(good), "--lang", "de")
    assert result.exit_code == 2
    assert "unknown language 'de'; choose from: en, zh" in told(result)
    assert not (good / "report.html").exists()


def test_published_rows_are_drawn_with_their_source(drawn: Path, tmp_path: Path) -> None:
    rows = {
        "cem": {"accuracy": 0.9, "mse": 0.01, "source": "A paper, its table 1"},
        "other": {"accuracy": 0.9, "mse": 0.01, "source": "Not comparable", "aux": "test90"},
        "far": {"accuracy": 0.9, "mse": 0.01, "source": "Not of digits", "dataset": "cifar10"},
    }
    rows = {name: {"dataset": "digits"} | row for name, row in rows.items()}
    (tmp_path / "published.json").write_text(json.dumps(rows))
    out = tmp_path / "out"
    result = call(str(drawn), "--out", str(out), "--published", str(tmp_path / "published.json"))
    assert result.exit_code == 0
    said = "published rows of another dataset left out: cifar10 (1); records: digits"
    assert said in told(result)
    html = (out / "report.html").read_text(encoding="utf-8")
    assert "not measured here: A paper." in html
    assert "Not comparable" not in html
    assert "Not of digits" not in html


def test_less_than_a_standard_audit_is_named(tmp_path: Path) -> None:
    whole, part = (
        RECORD | {"audit": {"profile": "standard"}},
        RECORD | {"audit": {"profile": "quick", "aux": "val", "only": ["linear"]}},
    )
    paths = [
        write_run(tmp_path / name, record, None, None)
        for name, record in (("whole", whole), ("part", part))
    ]
    said = told(call(*map(str, paths)))
    line = "standard audit (quick audit, some attacks, validation images): part"
    assert f"less than a {line}" in said
    assert f"{line}, whole" not in said
    assert said.count("less than") == 1


def test_json_prints_the_records_of_what_was_read(good: Path, tmp_path: Path) -> None:
    result = call(str(good), str(tmp_path / "ghost"), "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {str(good): RECORD}
    assert (good / "report.html").is_file()


def test_a_number_that_json_does_not_know_is_printed_as_null(tmp_path: Path) -> None:
    record = RECORD | {"leakage": float("nan"), "extra": [float("inf"), 1]}
    run = write_run(tmp_path / "run", record, None, None)
    result = call(str(run), "--json")
    assert result.exit_code == 0
    printed = json.loads(result.stdout)[str(run)]
    assert (printed["leakage"], printed["extra"]) == (None, [None, 1])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"accuracy": 1e308}, "`accuracy` must be in [0, 1], got 1e+308"),
        ({"floor": [1]}, "`floor` must be an object, got list"),
    ],
)
def test_one_impossible_record_does_not_stop_the_others(
    change: dict[str, object], reason: str, good: Path, tmp_path: Path
) -> None:
    bad = write_run(tmp_path / "bad", make_record("none") | change, None, None)
    result = call(str(good), str(bad), "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, told(result)
    assert f"left out: {bad}: {reason}" in told(result)


def test_a_record_nested_without_end_is_left_out(good: Path, tmp_path: Path) -> None:
    deep = tmp_path / "deep"
    deep.mkdir()
    (deep / "record.json").write_text("[" * 100_000)
    result = call(str(deep), str(good), "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, told(result)
    assert "nested too deep" in told(result)
