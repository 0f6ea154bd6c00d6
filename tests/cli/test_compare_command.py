"""`splitveil compare` as a user meets it, on the records of this repository."""

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from splitveil.cli.app import app
from splitveil.report.columns import EVERYTHING
from splitveil.report.comparison import ARCHITECTURE, BUDGET

RESULTS = Path(__file__).parents[2] / "results"
KEYS = {column.key for column in EVERYTHING.columns}


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


def test_cifar10_is_compared_in_two_tracks() -> None:
    words = ["compare", str(RESULTS / "cifar10"), "--published",
             str(RESULTS / "published.json"), "--json"]  # fmt: skip
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    tables = {table["title"]: table["rows"] for table in json.loads(result.stdout)}
    assert {ARCHITECTURE, BUDGET} <= set(tables)
    assert {row["net"] for row in tables[ARCHITECTURE]} == {"vgg11"}
    none = next(row for row in tables[BUDGET] if row["row"] == "none")
    assert (none["reported-accuracy"], none["reported-mse"]) == (0.9087, 0.0036)


def test_published_rows_of_another_dataset_are_left_out(tmp_path: Path) -> None:
    words = ["compare", str(RESULTS / "digits"), "--published", str(RESULTS / "published.json")]
    result = CliRunner().invoke(app, [*words, "--md", str(tmp_path / "table.md")])
    assert result.exit_code == 0, result.output
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "| `cem` |" in table  # the name of a published row, too
    assert "reported" not in table.lower()
    said = "published rows of another dataset left out: cifar10 (14); records: digits"
    assert said in " ".join(result.stderr.split())


def test_a_row_of_less_than_a_standard_audit_says_so(rows: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        file = rows / "veil" / f"seed{seed}" / "record.json"
        record = json.loads(file.read_text())
        record["audit"] |= {"profile": "standard"} | ({"only": ["decoder"]} if seed else {})
        file.write_text(json.dumps(record))
    target = tmp_path / "table.csv"
    result = compare(str(rows / "veil"), str(rows / "none"), "--csv", str(target))
    assert result.exit_code == 0, result.output
    assert "remark" in result.stdout
    assert {(row["row"], row["remark"]) for row in read_csv(target)} == {
        ("veil", "some attacks"),
        ("none", "quick audit"),
    }
    file = RESULTS / "cifar10" / "none" / "seed0" / "record.json"
    assert "remark" not in compare(str(file)).stdout  # a standard audit


def test_wrong_input_is_refused_with_a_reason(tmp_path: Path) -> None:
    nothing = CliRunner().invoke(app, ["compare", str(tmp_path)])
    assert nothing.exit_code == 2
    assert "no record.json" in nothing.output
    (tmp_path / "record.json").write_text("{")
    broken = CliRunner().invoke(app, ["compare", str(tmp_path)])
    assert broken.exit_code == 2


def compare(*words: str) -> Result:
    return CliRunner().invoke(app, ["compare", *words])


def plant(folder: Path, accuracies: list[float], mse: float, net: str = "thin-deep") -> None:
    """A row of records made by hand, one per training seed, with MSEs a tenth apart."""
    for seed, accuracy in enumerate(accuracies):
        record = {
            "accuracy": accuracy,
            "strongest": {"mse": mse * (0.95 + 0.1 * seed), "mse_by": "decoder"},
            "true_rate_nats": 1 / 3,
            "config": {"defence": folder.name, "dataset": "cifar10", "net": net},
            "audit": {"aux": "train", "profile": "quick"},
            "client": {"macs": 20_000_000, "wire_floats": 512},
            "seeds": {"train": seed, "attack": 0},
        }
        (folder / f"seed{seed}").mkdir(parents=True)
        (folder / f"seed{seed}" / "record.json").write_text(json.dumps(record), encoding="utf-8")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Three rows of two seeds: `veil` on a thin client, `none` and `slot_cross` on VGG11."""
    plant(tmp_path / "rows" / "veil", [0.92, 0.94], 0.05)
    plant(tmp_path / "rows" / "none", [0.90, 0.91], 0.01, "vgg11")
    plant(tmp_path / "rows" / "slot_cross", [0.80, 0.82], 0.02, "vgg11")
    return tmp_path / "rows"


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_rows_are_compared_against_one(rows: Path, tmp_path: Path) -> None:
    files = {kind: tmp_path / "out" / f"table.{kind}" for kind in ("md", "csv", "latex")}
    (tmp_path / "out").mkdir()
    options = [word for kind, path in files.items() for word in (f"--{kind}", str(path))]
    paths = (str(rows / "none"), str(rows / "slot_cross"))
    result = compare(*paths, "--against", "none", *options)
    assert result.exit_code == 0, result.output
    read = read_csv(files["csv"])
    assert [row["row"] for row in read] == ["none", "slot_cross"] * 2  # both tracks
    assert float(read[1]["mse_gap"]) == pytest.approx(0.01)
    assert float(read[1]["accuracy_gap"]) == pytest.approx(-0.095)
    assert read[1]["interval_over"] == "paired seeds"
    assert (read[0]["against"], read[0]["mse_gap"]) == ("", "")
    lines = files["md"].read_text(encoding="utf-8").splitlines()
    heading = "| row | net | seeds | accuracy (%) ↑ | strongest attack MSE ↑ | by |"
    assert sum(line.startswith(heading) for line in lines) == 2
    # t(1) .975 = 12.706, sd of the differences -.10 and -.09 is .01/√2, its mean's error .005
    start = "| `slot_cross` | `none` | -9.50 [-15.85, -3.15] |"
    assert sum(line.startswith(start) for line in lines) == 2
    text = files["latex"].read_text(encoding="utf-8")
    assert text.count(r"\begin{table}") == text.count(r"\end{table}") == 4
    assert r"    \texttt{slot\_cross} & vgg11 & 2 & 81.00 $\pm$ 1.41 &" in text
    assert sorted((tmp_path / "out").iterdir()) == sorted(files.values())  # nothing temporary


@pytest.mark.parametrize(
    "option", [("--where", "accuracy>80%"), ("--sort", "-mse"), ("--columns", "defence,mse")]
)
def test_options_that_are_gone_say_what_to_use(option: tuple[str, str], rows: Path) -> None:
    result = compare(str(rows), *option)
    assert result.exit_code == 2
    said = "".join(result.output.split())
    assert option[0] in said
    assert f'sv.records(["{rows}"]).to_frame()' in said
    assert option[0] not in compare("--help").stdout


def test_precision_of_the_csv_is_that_of_the_record(rows: Path, tmp_path: Path) -> None:
    target = tmp_path / "one.csv"
    file = rows / "veil" / "seed1" / "record.json"
    assert compare(str(file), "--csv", str(target)).exit_code == 0
    (row,) = read_csv(target)
    assert float(row["mse"]) == json.loads(file.read_text())["strongest"]["mse"]
    assert float(row["rate"]) == 1 / 3
    assert set(row) > KEYS


def test_the_json_has_the_keys_and_numbers_of_the_csv(rows: Path, tmp_path: Path) -> None:
    target = tmp_path / "all.csv"
    words = (str(rows), "--against", "none")
    assert compare(*words, "--csv", str(target)).exit_code == 0
    result = compare(*words, "--json")
    assert result.exit_code == 0, result.output
    tables = json.loads(result.stdout)
    made = [row for table in tables for row in table["rows"] if "Differences" not in table["title"]]
    for there, row in zip(made, read_csv(target), strict=True):
        assert list(there) == list(row)
        for key, cell in row.items():
            value = there[key]
            if value is None or isinstance(value, str):
                assert (value or "") == cell
            else:
                assert value == float(cell)
    assert made[0]["worst"] is None
    assert isinstance(made[0]["accuracy"], float)
    (gap,) = next(t["rows"] for t in tables if t["title"] == f"Differences – {ARCHITECTURE}")
    assert (gap["row"], gap["against"]) == ("slot_cross", "none")
    assert gap["mse_gap"] == pytest.approx(0.01)
    assert gap["verdict"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--against", "nono"), "unknown row to compare against 'nono'; did you mean 'none'?"),
        (("--csv", "/nowhere/x.csv"), "cannot write /nowhere/x.csv"),
    ],
)
def test_an_option_that_cannot_be_met_is_refused(
    option: tuple[str, str], message: str, rows: Path
) -> None:
    result = compare(str(rows), *option)
    assert result.exit_code == 2
    assert message in result.output.replace("\n", " ")
    assert "--runs-dir" not in result.output  # an option of other commands


def test_tracks_without_the_row_compared_against_are_named(rows: Path) -> None:
    result = compare(str(rows), "--against", "veil")
    assert result.exit_code == 0, result.output
    assert f"{ARCHITECTURE}: no differences, since it has no row veil" in result.output
    assert f"{BUDGET}: no differences" not in result.output


def test_a_broken_record_is_named_and_the_rest_compared(rows: Path) -> None:
    (rows / "none" / "seed0" / "record.json").write_text('{"strongest": {}, "config": 3}')
    result = compare(str(rows / "none"), "--json")
    assert result.exit_code == 0, result.output
    assert "skipped, not a record:" in result.stderr
    assert "(it has no config)" in result.stderr
    table = json.loads(result.stdout)[0]
    assert [(row["row"], row["accuracy"]) for row in table["rows"]] == [("none", 0.91)]


def test_a_folder_of_links_names_its_rows(rows: Path, tmp_path: Path) -> None:
    links = tmp_path / "links"
    (links / "mine").mkdir(parents=True)
    for seed in (0, 1):
        (links / "mine" / f"seed{seed}").symlink_to(rows / "veil" / f"seed{seed}")
    (links / "plain").symlink_to(rows / "none", target_is_directory=True)
    (links / "round").symlink_to(links, target_is_directory=True)
    for paths in ([links], [links, rows / "veil"]):  # a record that is met twice counts once
        target = tmp_path / "all.csv"
        result = compare(*map(str, paths), "--csv", str(target))
        assert result.exit_code == 0, result.output
        found = {(row["row"], row["seeds"]) for row in read_csv(target)}
        assert found == {("mine", "2"), ("plain", "2")}


def test_a_missing_path_is_named_with_a_near_one(rows: Path) -> None:
    result = compare(str(rows / "viel"))
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert f"there is no {rows / 'viel'}; did you mean {rows / 'veil'}? check the path" in said
    assert "audit a run first" not in said


def test_an_empty_path_is_not_the_current_folder(
    rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(rows)
    assert compare(".").exit_code == 0
    result = compare("")
    assert result.exit_code == 2
    assert "got an empty path" in " ".join(result.output.split())


def test_one_file_for_two_tables_is_refused(rows: Path, tmp_path: Path) -> None:
    target = tmp_path / "table"
    result = compare(str(rows), "--md", str(target), "--csv", f"{rows}/../table")
    assert result.exit_code == 2
    assert "--md and --csv name the same file" in " ".join(result.output.split())
    assert not target.exists()


def test_the_help_names_every_column() -> None:
    said = compare("--help").stdout
    assert all(key in said for key in KEYS)


@pytest.mark.parametrize("command", ["compare", "report", "doctor"])
def test_a_path_that_the_system_refuses_is_a_user_error(command: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [command, str(tmp_path / ("x" * 300))])
    assert result.exit_code == 2
    assert "check the path" in " ".join(result.output.split())
