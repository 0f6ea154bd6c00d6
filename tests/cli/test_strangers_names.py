"""What strangers named and wrote reaches neither a terminal nor a spreadsheet as a command."""

import csv
import io
import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest
from cli.calling import call, text
from made_runs import make_gallery, make_metrics, make_record, write_run
from PIL import Image

from splitveil.cli import console
from splitveil.errors import DataError
from splitveil.table import Cell, Column, Table, csv_text

EVIL = "veil\x1b]0;title\x07\x1b[2J\x9b31m\u202e"


def test_control_characters_of_names_never_reach_the_terminal(tmp_path: Path) -> None:
    record = make_record("veil")
    record["config"]["dataset"] = EVIL
    record["strongest"]["mse_by"] = EVIL
    gallery = make_gallery("veil")
    gallery["classes"] = [EVIL] * len(gallery["classes"])
    write_run(tmp_path / EVIL, record, make_metrics("veil"), gallery)
    broken = write_run(tmp_path / f"{EVIL}2", record, make_metrics("veil"), gallery)
    (broken / "record.json").write_text("{", encoding="utf-8")
    for words in (
        ["compare", tmp_path],
        ["report", *tmp_path.iterdir(), "--out", tmp_path / "out"],
        ["doctor", tmp_path / EVIL],
        ["explain", tmp_path / EVIL],
        ["audit", tmp_path / EVIL],
    ):
        result = call(*words)
        shown = result.output + result.stderr
        assert "]0;title" in shown or words[0] == "doctor", shown
        assert {c for c in shown if not c.isprintable()} <= {"\n"}, (words[0], shown)


def test_a_log_line_is_shown_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    console.setup_logging()
    logging.getLogger("splitveil").warning("%s is odd", EVIL)
    console.warn(EVIL)
    told = capsys.readouterr()
    assert {c for c in told.out + told.err if not c.isprintable()} <= {"\n"}


def test_a_table_for_a_terminal_has_no_control_characters() -> None:
    table = Table(Column("row", "row", brief="row"))
    assert "\x1b" not in table.render([{"row": EVIL}], "terminal")


@pytest.mark.parametrize("sign", ["=", "+", "-", "@", "\t", "\r"])
def test_a_text_that_looks_like_a_formula_is_defused_in_csv(sign: str) -> None:
    evil = f"{sign}cmd|' /C calc'!A0"
    rows: list[dict[str, Cell]] = [
        {"row": evil, evil: 1.5, "low": -0.5, "words": "-0.5", "none": None}
    ]
    header, cells = csv.reader(io.StringIO(csv_text(rows), newline=""))
    shown = "'" + evil.replace("\r", " ")
    assert header == ["row", shown, "low", "words", "none"]
    assert cells == [shown, "1.5", "-0.5", "-0.5", ""]


def test_compare_writes_a_csv_without_formulas(tmp_path: Path) -> None:
    write_run(tmp_path / "=1+1", make_record("veil"), make_metrics("veil"), make_gallery("veil"))
    result = call("compare", tmp_path / "=1+1", "--csv", tmp_path / "out.csv")
    assert result.exit_code == 0, text(result)
    told = (tmp_path / "out.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(io.StringIO(told)))
    assert all(not cell.startswith(("=", "+", "@")) for row in rows for cell in row.values())
    assert rows[0]["row"] == "'=1+1"


def test_pipes_and_devices_are_refused_as_inputs(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    run = write_run(
        tmp_path / "run", make_record("veil"), make_metrics("veil"), make_gallery("veil")
    )
    picture = tmp_path / "images" / "a" / "x.png"
    picture.parent.mkdir(parents=True)
    os.mkfifo(picture)
    train = ["train", "--epochs", "1", "--runs-dir", tmp_path / "runs"]
    for words in (
        [*train, "--config", pipe],
        [*train, "--dataset", f"npz:{pipe}"],
        [*train, "--dataset", "npz:/dev/zero"],
        [*train, "--dataset", f"folder:{tmp_path / 'images'}"],
        ["compare", run, "--published", pipe],
        ["replay", pipe],
    ):
        result = call(*words)
        assert result.exit_code == 2, (words, text(result), result.exception)
        assert "pipe or a device" in text(result), (words, text(result))


def test_arrays_that_would_fill_the_memory_are_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splitveil.data.dataset.MAX_DATA", 1 << 20)
    x, y = np.zeros((300, 64, 64), np.uint8), np.arange(300) % 3
    np.savez_compressed(tmp_path / "bomb.npz", x=x, y=y)
    assert (tmp_path / "bomb.npz").stat().st_size < 20_000
    train = ["train", "--epochs", "1", "--runs-dir", tmp_path / "runs", "--dataset"]
    result = call(*train, f"npz:{tmp_path / 'bomb.npz'}")
    assert (result.exit_code, "more than the limit of" in text(result)) == (2, True), text(result)
    for n in range(2):
        (tmp_path / "folder" / str(n)).mkdir(parents=True)
        Image.new("RGB", (600, 600)).save(tmp_path / "folder" / str(n) / "x.png")
    result = call(*train, f"folder:{tmp_path / 'folder'}")
    assert (result.exit_code, "more than the limit of" in text(result)) == (2, True), text(result)


def test_a_picture_of_too_many_pixels_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    from splitveil.data.folder import decode

    Image.new("1", (20_000, 20_000)).save(tmp_path / "bomb.png")
    assert (tmp_path / "bomb.png").stat().st_size < 200_000
    with pytest.raises(DataError, match="suspiciously large"):
        decode(tmp_path / "bomb.png", "bomb.png")


@pytest.mark.parametrize(
    ("defence", "setting", "words"),
    [
        ("dropout", "dropout=5", "dropout must be in [0, 1), got 5"),
        ("topk", "prune=7", "prune must be in [0, 1), got 7"),
        ("quantise", "bits=-3", "bits must be in [1, 16], got -3"),
        ("quantise", "bits=2.5", "bits must be a whole number"),
        ("quantise", "bits=1e9", "bits must be a whole number"),
        ("clip", "clip_low=2", "clip needs finite low < high"),
    ],
)
def test_a_channel_stage_outside_its_range_is_refused(
    defence: str, setting: str, words: str
) -> None:
    result = call("train", "--defence", defence, "--set", setting)
    assert (result.exit_code, words in text(result)) == (2, True), text(result)


def test_json_output_escapes_control_characters(tmp_path: Path) -> None:
    record = make_record("veil")
    record["config"]["dataset"] = EVIL
    write_run(tmp_path / "run", record, make_metrics("veil"), make_gallery("veil"))
    result = call("compare", tmp_path / "run", "--json")
    assert json.loads(result.stdout)
    assert "\x1b" not in result.stdout
