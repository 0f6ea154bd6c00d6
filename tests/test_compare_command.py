"""`splitveil compare` as a user meets it, on the records of this repository."""

import json
from pathlib import Path

from typer.testing import CliRunner

from splitveil.cli import app
from splitveil.report.tracks import ARCHITECTURE, BUDGET

RESULTS = Path(__file__).parents[1] / "results"


def test_digits_are_compared_over_their_seeds(tmp_path: Path) -> None:
    target = tmp_path / "table.md"
    words = ["compare", str(RESULTS / "digits"), "--md", str(target)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "veil" in result.stdout
    assert "±" in result.stdout
    assert "Differences" in result.stdout
    veil = next(line for line in target.read_text().splitlines() if line.startswith("| `veil`"))
    assert "±" in veil
    assert "| `veil` | `none` |" in target.read_text()


def test_cifar10_is_compared_in_two_tracks_beside_what_is_reported() -> None:
    words = ["compare", str(RESULTS / "cifar10"), "--published",
             str(RESULTS / "published.json"), "--json"]  # fmt: skip
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    tables = {table["title"]: table["rows"] for table in json.loads(result.stdout)}
    assert {ARCHITECTURE, BUDGET} <= set(tables)
    assert {row["net"] for row in tables[ARCHITECTURE]} == {"vgg11"}
    none = next(row for row in tables[BUDGET] if row["row"] == "none")
    assert (none["reported accuracy"], none["reported MSE"]) == ("90.87", "0.0036")


def test_wrong_input_is_refused_with_a_reason(tmp_path: Path) -> None:
    nothing = CliRunner().invoke(app, ["compare", str(tmp_path)])
    assert nothing.exit_code == 2
    assert "no record.json" in nothing.output
    (tmp_path / "record.json").write_text("{")
    broken = CliRunner().invoke(app, ["compare", str(tmp_path)])
    assert broken.exit_code == 2
