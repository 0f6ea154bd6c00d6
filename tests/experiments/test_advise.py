"""`splitveil advise` on digits from the command to the sentence, the table and the picture."""

import json
import math
from pathlib import Path

import pytest
from cli.calling import call, text

from splitveil.runs import load_run

ADVISE = ("advise", "--track", "B1", "--dataset", "digits", "--minutes", "0.05")


@pytest.mark.slow
def test_digits_are_advised_on_and_the_same_command_continues(tmp_path: Path) -> None:
    first = call(*ADVISE, "--runs-dir", str(tmp_path), "--json")
    assert first.exit_code == 0, text(first)
    found = json.loads(first.stdout)
    rows = found["rows"]
    assert {row["kind"] for row in rows} == {"alone", "split", "exit"}
    assert found["case"] in {"alone", "split", "exit"}
    (chosen,) = [row for row in rows if row["chosen"]]
    assert chosen["name"] == found["chosen"]
    assert f"{100 * chosen['accuracy']:.1f} %" in found["sentence"]
    for row in rows:
        assert row["macs"] <= 1e6
        assert row["stored"] <= 16_000
        if row["kind"] == "alone":
            assert row["sent"] == row["exposure"] == row["wire_bits"] == 0
        bits = row["wire_floats"] * (row["sent"] if row["sent"] else 0)
        assert row["wire_bits"] in (pytest.approx(16 * bits), pytest.approx(32 * bits))
        assert math.isfinite(row["exposure_high"])
    exits = [row for row in rows if row["kind"] == "exit"]
    assert len({round(row["sent"], 2) for row in exits}) >= 4  # shares of one training
    assert len({row["run"] for row in exits}) == 2
    own = {row["name"]: row["run"] for row in rows if " 0 % sent" in row["name"]}
    assert set(own.values()) == {row["run"] for row in exits}
    assert set(own) == {"early exit, noise, 0 % sent", "early exit, veil, 0 % sent"}
    assert load_run(exits[0]["run"]).model.exit is not None
    assert Path(found["picture"]).read_bytes().startswith(b"\x89PNG")
    assert any("seed" in words for words in found["not_tried"])
    assert json.loads((tmp_path / "advice" / "digits" / "advice.json").read_text()) == found

    trained = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("checkpoint.safetensors")}
    again = call(*ADVISE, "--runs-dir", str(tmp_path))
    assert again.exit_code == 0, text(again)
    assert {p: p.stat().st_mtime_ns for p in trained} == trained
    assert again.stdout.startswith(found["sentence"])
    assert "not tried:" in again.stdout


@pytest.mark.slow
def test_where_the_best_body_has_no_room_for_an_early_wire_a_smaller_one_asks(
    tmp_path: Path,
) -> None:
    words = ("--macs", "2e5", "--wire", "64", "--dataset", "digits", "--minutes", "0.05")
    found = json.loads(call("advise", *words, "--runs-dir", str(tmp_path), "--json").stdout)
    best = next(row for row in found["rows"] if row["kind"] == "alone")
    exits = [row for row in found["rows"] if row["kind"] == "exit"]
    assert exits
    assert all(row["macs"] <= 2e5 for row in exits)
    assert best["macs"] > 0.95 * 2e5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--macs", "5e6", "--exposure", "1.5"), "exposure must be in [0, 1], got 1.5"),
        (("--track", "B9"), "unknown track 'B9'"),
        (("--macs", "5e6", "--minutes", "0"), "minutes must be a finite number > 0, got 0"),
        (("--macs", "100", "--wire", "64"), "no client fits 100 multiply-adds"),
        (("--macs", "5e6", "--server", "resnet"), "unknown server 'resnet'"),
        ((), "give --macs and --wire"),
    ],
)
def test_advice_that_cannot_be_given_is_refused(
    words: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    result = call("advise", "--dataset", "digits", *words, "--runs-dir", str(tmp_path))
    assert result.exit_code == 2, text(result)
    assert said in text(result)
    assert list(tmp_path.iterdir()) == []
