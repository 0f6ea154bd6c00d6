"""`splitveil compare` as a user meets it, on the records of this repository."""

import json
from pathlib import Path

from typer.testing import CliRunner

from splitveil.cli import app

RESULTS = Path(__file__).parents[1] / "results"


def test_digits_are_compared_over_their_seeds(tmp_path: Path) -> None:
    target = tmp_path / "table.md"
    words = ["compare", str(RESULTS / "digits"), "--md", str(target)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "veil" in result.stdout
    assert "±" in result.stdout
    veil = next(line for line in target.read_text().splitlines() if line.startswith("| `veil`"))
    assert "| 3 | 99.63 ± 0.33 | 0.0403 ± 0.0003 | decoder |" in veil


def test_reported_rows_stand_beside_measured_ones() -> None:
    words = ["compare", str(RESULTS / "cifar10" / "none"), "--published",
             str(RESULTS / "published.json"), "--json"]  # fmt: skip
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)
    assert row["row"] == "none"
    assert row["reported"] == "90.87 / 0.0036 (CEM paper, bottleneck)"


def test_wrong_input_is_refused_with_a_reason(tmp_path: Path) -> None:
    nothing = CliRunner().invoke(app, ["compare", str(tmp_path)])
    assert nothing.exit_code == 2
    assert "no record.json" in nothing.output
    (tmp_path / "record.json").write_text("{")
    broken = CliRunner().invoke(app, ["compare", str(tmp_path)])
    assert broken.exit_code == 2
