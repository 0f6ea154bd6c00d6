"""Files of published rows: what is refused, and how it is said."""

import json
from pathlib import Path
from typing import Any

import pytest
from made_runs import make_record, write_run
from typer.testing import CliRunner

from splitveil.cli.app import app
from splitveil.errors import RunError
from splitveil.report.columns import Published, elsewhere, read_published

ROW = {"accuracy": 0.9, "mse": 0.01, "source": "A paper", "dataset": "cifar10"}


def read(tmp_path: Path, content: str) -> dict[str, Published]:
    file = tmp_path / "published.json"
    file.write_text(content, encoding="utf-8")
    return read_published(file)


def test_ends_of_the_ranges_and_empty_extras_are_taken(tmp_path: Path) -> None:
    row = ROW | {"accuracy": 1.0, "mse": 0.0, "ssim_zeropad": None}
    assert read(tmp_path, json.dumps({"cem": row})) == {
        "cem": Published(1.0, 0.0, "A paper", "cifar10")
    }


def test_a_row_without_a_dataset_stands_beside_records_of_any(tmp_path: Path) -> None:
    bare = {key: value for key, value in ROW.items() if key != "dataset"}
    found = read(tmp_path, json.dumps({"cem": ROW, "none": bare, "noise": ROW | {"dataset": None}}))
    assert {name: row.is_of(["digits"]) for name, row in found.items()} == {
        "cem": False, "none": True, "noise": True,
    }  # fmt: skip
    assert elsewhere(found, {"digits"}) == [
        "published rows of another dataset left out: cifar10 (1); records: digits"
    ]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"accuracy": 90}, "`accuracy` must be in [0, 1], got 90"),
        ({"accuracy": True}, "`accuracy` must be a number, got bool"),
        ({"mse": None}, "no mse"),
        ({"mse": float("nan")}, "no mse"),
        ({"mse": float("inf"), "sorce": "x"}, "no mse, unknown sorce"),
        ({"mse": -0.1}, "`mse` must be in [0, 1], got -0.1"),
        ({"source": 3}, "`source` must be a text, got int 3"),
        ({"aux": 5}, "`aux` must be a text, got int 5"),
        ({"dataset": 10}, "`dataset` must be a text, got int 10"),
        (
            {"reconstruction_accuracy": 16.7},
            "`reconstruction_accuracy` must be in [0, 1], got 16.7",
        ),
        ({"psnr_pooled": "13"}, "`psnr_pooled` must be a number"),
    ],
)
def test_a_wrong_value_is_refused_by_its_row_and_key(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match="row 'cem'") as caught:
        read(tmp_path, json.dumps({"none": ROW, "cem": ROW | change}))
    assert reason in str(caught.value)
    assert "published.json is not a file of published rows" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[1]", "an object of rows, got list"),
        ('{"cem": 1}', "row 'cem' must be an object, got int"),
        ("[" * 100_000, "nested too deep"),
        ("", "Expecting value"),
    ],
)
def test_other_files_are_refused_in_words(content: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=reason):
        read(tmp_path, content)


@pytest.mark.parametrize("command", ["report", "compare"])
def test_commands_exit_with_two_and_write_nothing(command: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", make_record("veil"), None, None)
    before = sorted(run.iterdir())
    file = tmp_path / "published.json"
    file.write_text(json.dumps({"run": ROW | {"mse": 1e300}}))
    result = CliRunner().invoke(app, [command, str(run), "--published", str(file)])
    assert result.exit_code == 2
    assert "must be in [0, 1]" in " ".join(result.output.split())
    assert sorted(run.iterdir()) == before
