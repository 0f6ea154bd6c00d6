"""The table of an experiment: of every row that lies in its folder and was made alike."""

import gc
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from cli.calling import TINY
from typer.testing import CliRunner, Result

from splitveil.attacks.profiles import PROFILES
from splitveil.audits import pipeline
from splitveil.cli.app import app
from splitveil.cli.console import show_table
from splitveil.config.run_config import RunConfig
from splitveil.errors import RunError
from splitveil.experiments import reproduction, runner
from splitveil.experiments.reproduction import (
    EXPERIMENTS,
    finished,
    folder_name,
    group_table,
    next_step,
)
from splitveil.io import Progress
from splitveil.nets.split import SplitModel
from splitveil.record.groups import Group
from splitveil.record.schema import Record
from splitveil.runs import Run, fit
from splitveil.table import Table

REPORT = EXPERIMENTS["gated-att-report"]
WRITTEN = ("record.json", "checkpoint.safetensors")
Json = dict[str, Any]


def command(folder: Path, *words: str) -> Result:
    common = ["reproduce", "gated-att-report", "--dataset", "digits", "--epochs", "1", "--profile",
              "smoke", "--device", "cpu", "--runs-dir", str(folder)]  # fmt: skip
    return CliRunner().invoke(app, [*common, *words], env={"COLUMNS": "80"})


def rows(result: Result) -> list[Json]:
    assert result.exit_code == 0, result.output
    made: list[Json] = json.loads(result.stdout)["rows"]
    return made


@pytest.fixture(scope="module", autouse=True)
def tiny_audits() -> Iterator[None]:
    """Audits of the smoke profile with a small decoder, and only their images measured."""
    with patch.dict(PROFILES, {"smoke": TINY}), patch.object(pipeline, "leaks_beyond_pixels") as no:
        no.return_value = {}
        yield


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CEM, then gated attention in a call of its own."""
    folder = tmp_path_factory.mktemp("runs")
    rows(command(folder, "--only", "cem", "--json"))
    made = rows(command(folder, "--only", "gated-att", "--json"))
    (folder / "second.json").write_text(json.dumps(made))
    return folder


@pytest.fixture
def runs(rehearsed: Path, tmp_path: Path) -> Path:
    """A copy to be changed."""
    return Path(shutil.copytree(rehearsed, tmp_path / "runs"))


def change_record(folder: Path, part: str, values: Mapping[str, object]) -> None:
    path = folder / "record.json"
    record = json.loads(path.read_text())
    record[part] |= values
    path.write_text(json.dumps(record))


def test_a_second_call_keeps_the_rows_of_the_first(rehearsed: Path) -> None:
    cem, gated = json.loads((rehearsed / "second.json").read_text())
    assert (cem["row"], gated["row"]) == ("cem", "gated-att")
    assert cem["training time / cem"] == 1.0
    assert gated["training time / cem"] > 0
    assert cem["memory / cem"] is gated["memory / cem"] is None  # on a CPU
    assert 0 < cem["strongest attack MSE"] < 1
    assert "| `cem` |" in (rehearsed / "table-smoke.md").read_text()


def test_what_is_finished_is_not_repeated(runs: Path) -> None:
    files = [runs / row / name for row in ("cem", "gated-att") for name in WRITTEN]
    before = [file.stat().st_mtime_ns for file in files]
    made = rows(command(runs, "--only", "cem", "--only", "gated-att", "--json"))
    assert made == json.loads((runs / "second.json").read_text())
    assert [file.stat().st_mtime_ns for file in files] == before
    assert (runs / "table-smoke.md").read_text().startswith("## gated-att report")


@pytest.mark.parametrize(
    ("old", "new"), [("epochs = 1\n", "epochs = 2\n"), ("lambd = 16.0", "lambd = 8.0")]
)
def test_rows_with_other_settings_stay_out(old: str, new: str, runs: Path) -> None:
    assert [row.name for row in finished(REPORT, [runs / "cem"], "smoke")] == ["cem", "gated-att"]
    path = runs / "gated-att" / "config.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    assert [row.name for row in finished(REPORT, [runs / "cem"], "smoke")] == ["cem"]


@pytest.mark.parametrize(
    "audit", [{"profile": "quick"}, {"aux": "train"}, {"only": ["linear"]}, {"only": None}]
)
def test_rows_attacked_otherwise_stay_out(audit: Json, runs: Path) -> None:
    change_record(runs / "gated-att", "audit", audit)
    assert [row.name for row in finished(REPORT, [runs / "cem"], "smoke")] == ["cem"]


def test_a_broken_record_of_another_row_is_named_and_left_out(
    runs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (runs / "gated-att" / "record.json").write_text("{")
    assert [row.name for row in finished(REPORT, [runs / "cem"], "smoke")] == ["cem"]
    assert "gated-att is left out of the table" in caplog.text


@pytest.mark.parametrize("kind", ["other attacks", "broken", "unfinished"])
def test_a_record_of_other_attacks_is_made_again(kind: str, runs: Path) -> None:
    wanted = json.loads((runs / "cem" / "record.json").read_text())["audit"]["only"]
    if kind == "broken":
        (runs / "cem" / "record.json").write_text("{")
    elif kind == "unfinished":  # audited by hand while it was trained
        record = json.loads((runs / "cem" / "record.json").read_text())
        flags = [{"name": "training unfinished", "seen": "9 of 99 steps were trained"}]
        (runs / "cem" / "record.json").write_text(json.dumps(record | {"flags": flags}))
        assert [row.name for row in finished(REPORT, [runs / "gated-att"], "smoke")] == [
            "gated-att"
        ]
    else:
        change_record(runs / "cem", "audit", {"only": ["linear"]})
    said = command(runs, "--only", "cem")
    assert said.exit_code == 0, said.output
    made = json.loads((runs / "cem" / "record.json").read_text())
    assert made["audit"]["only"] == wanted
    assert "training unfinished" not in [flag["name"] for flag in made["flags"]]


def test_nothing_of_a_row_is_held_while_the_next_one_trains(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []

    def watched(config: RunConfig, *, resume: bool, overwrite: bool, progress: Progress) -> Run:
        held.append(sum(issubclass(type(thing), SplitModel) for thing in gc.get_objects()))
        return fit(config, resume=resume, overwrite=overwrite, progress=progress)

    monkeypatch.setattr(runner, "fit", watched)
    assert command(runs, "--only", "cem", "--only", "gated-att").exit_code == 0
    assert len(held) == 2
    assert held[1] <= held[0]


def test_several_seeds_give_one_table_with_means(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "cem", tmp_path / "both" / "s0" / "cem")
    made = rows(command(tmp_path / "both", "--only", "cem", "--seeds", "0,1", "--json"))
    assert [row["row"] for row in made] == ["cem"]
    assert made[0]["seeds"] == 2
    folders = [tmp_path / "both" / seed / "cem" for seed in ("s0", "s1")]
    accuracies = [json.loads((f / "record.json").read_text())["accuracy"] for f in folders]
    mean = 100 * sum(accuracies) / 2
    table = (tmp_path / "both" / "table-smoke.md").read_text()
    assert f"{mean:.2f} ± " in table


def test_another_budget_and_attacker_audit_the_same_training_again(runs: Path) -> None:
    trained = (runs / "cem" / "checkpoint.safetensors").read_bytes()
    words = ("--only", "cem", "--profile", "paper", "--aux", "train", "--json")
    with patch.dict(PROFILES, {"paper": TINY}):
        (made,) = rows(command(runs, *words))
    record = json.loads((runs / "cem" / "record.json").read_text())
    assert (record["audit"]["profile"], record["audit"]["aux"]) == ("paper", "train")
    assert made["strongest attack MSE"] == pytest.approx(record["strongest"]["mse"], abs=5e-5)
    assert (runs / "cem" / "checkpoint.safetensors").read_bytes() == trained
    assert (runs / "cem" / "record.smoke-test90-seed0.json").is_file()
    table = (runs / "table-paper-train.md").read_text()
    assert "`paper` audit" in table
    assert "aux = train" in table
    assert "aux = test90" in (runs / "table-smoke.md").read_text()  # the other stays


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seeds", "0,x"], "--seeds must be whole numbers from 0, such as 0,1,2, got '0,x'"),
        (["--seeds", "1,1"], "names a seed twice: 1,1"),
        (["--seeds", "0", "--seed", "1"], "give one of them"),
        (["--aux", "tset"], "tset"),
    ],
)
def test_wrong_seeds_and_attackers_are_refused_first(
    words: list[str], said: str, tmp_path: Path
) -> None:
    result = command(tmp_path / "runs", "--only", "cem", *words)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
    assert not (tmp_path / "runs").exists()


def test_another_attacker_is_not_set_beside_the_reported_rows() -> None:
    by_train = replace(REPORT, aux="train")
    groups = [Group("cem", ((record(dataset="cifar10"),),))]
    made, shown = group_table(by_train, groups)
    assert [line[0] for line in made.cells(shown)] == ["`cem`"]


def test_the_table_says_which_model_the_authors_attack() -> None:
    text = made_of({"cem": record(dataset="cifar10")})[0].caption
    assert "The authors attack the model of the best epoch on the test images" in text


def test_the_terminal_shows_accuracy_time_and_memory(rehearsed: Path) -> None:
    shown = command(rehearsed, "--only", "cem").stdout.splitlines()
    heading = " ".join(shown[: next(i for i, line in enumerate(shown) if "──" in line)]).split()
    assert {"acc%", "rec%", "MSE", "SSIM₀", "time", "mem"} <= set(heading)


def test_the_widest_row_fits_eighty_characters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    made, rows = made_of({row: record(dataset="cifar10") for row in REPORT.rows})
    show_table(made.title, *made.brief(rows))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > len(REPORT.rows)
    assert max(len(line) for line in lines) <= 80


def test_a_rehearsal_has_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert folder_name("a", REPORT, {"dataset": "cifar10", "epochs": 240}) == "a-s0"
    assert folder_name("a", REPORT, {"epochs": 2}) == "a-s0-e2"
    assert folder_name("a", REPORT, {"dataset": "digits"}, [1]) == "a-s1-digits"
    assert folder_name("a", REPORT, {"epochs": 2}, [0, 2]) == "a-s0-2-e2"
    places: list[Path] = []

    def asked(config: RunConfig, **_: object) -> Run:
        places.append(config.folder)
        raise RunError(f"{config.net} stops here")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "fit", asked)
    monkeypatch.setattr(reproduction, "check_rows", lambda _: None)  # needs CIFAR-10
    words = ["reproduce", "gated-att-report", "--only", "cem", "--epochs", "3"]
    assert "auto stops here" in CliRunner().invoke(app, [*words, "--dataset", "digits"]).output
    assert "vgg11 stops here" in CliRunner().invoke(app, [*words, "--dataset", "cifar10"]).output
    assert [str(place) for place in places] == [
        "runs/gated-att-report-s0-digits-e3/cem", "runs/gated-att-report-s0-e3/cem",
    ]  # fmt: skip


def test_an_error_names_what_the_command_has(runs: Path) -> None:
    other = command(runs, "--only", "cem", "--seed", "1")
    assert other.exit_code == 2
    said = " ".join(other.output.split())
    assert "seed was 0, is 1; give the options as they were to continue" in said
    assert "another --runs-dir" in said
    assert "--name" not in said
    kept = "no data; give --data-dir"
    assert next_step(kept) == kept
    assert "--overwrite" not in next_step("x lacks y; train again with --overwrite")


def test_a_row_that_fails_does_not_end_the_others(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(config: RunConfig, *, resume: bool, overwrite: bool, progress: Progress) -> Run:
        if config.defence == "gated-att":
            raise RuntimeError("out of memory")
        return fit(config, resume=resume, overwrite=overwrite, progress=progress)

    monkeypatch.setattr(runner, "fit", asked)
    shutil.rmtree(runs / "gated-att")
    words = ("--only", "gated-att", "--only", "cem", "--json")
    result = command(runs, *words)
    assert result.exit_code == 3, result.output
    assert [row["row"] for row in json.loads(result.stdout)["rows"]] == ["cem"]
    assert "gated-att failed: out of memory" in result.stderr
    assert "the same command tries again what failed" in result.stderr
    alone = command(runs, "--only", "gated-att")
    assert alone.exit_code == 2
    assert "every row failed: gated-att: out of memory" in " ".join(alone.output.split())


def test_data_that_are_absent_are_told_once_before_any_row(tmp_path: Path) -> None:
    result = command(tmp_path / "runs", "--dataset", "npz:absent.npz")
    assert result.exit_code == 2
    assert result.output.count("absent.npz") == 1
    assert not (tmp_path / "runs").exists()


def test_an_interrupt_names_what_the_command_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> Run:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "fit", stopped)
    result = command(tmp_path, "--only", "cem")
    assert result.exit_code == 130
    said = " ".join(result.output.split())
    assert "To continue, repeat the command" in said
    assert "--resume" not in said


def record(*, dataset: str, device: str = "cuda (H200)", peak: int | None = 100) -> Record:
    made = {
        "accuracy": 0.8, "device": device, "attacks": {"decoder": {"mse": 0.04, "accuracy": 0.25}},
        "strongest": {"mse": 0.04, "mse_by": "decoder", "ssim_zeropad": 0.4, "psnr_pooled": 13.5},
        "config": {"net": "vgg11", "defence": "cem", "dataset": dataset},
        "seconds": {"train": 10.0}, "training": {"peak_bytes": peak},
    }  # fmt: skip
    return Record.from_dict(made)


def made_of(records: Mapping[str, Record]) -> tuple[Table, Sequence[Any]]:
    return group_table(REPORT, [Group(row, ((record,),)) for row, record in records.items()])


def test_reported_rows_stand_only_beside_the_same_data() -> None:
    made, rows = made_of({"cem": record(dataset="cifar10")})
    assert [line[0] for line in made.cells(rows)] == [
        "`cem`",
        "*cem*",
        "*gated-att*",
        "*gated-att tuned*",
    ]
    made, rows = made_of({"cem": record(dataset="digits")})
    assert [line[0] for line in made.cells(rows)] == ["`cem`"]


def test_an_approximate_row_is_marked() -> None:
    made, rows = made_of({"cem": record(dataset="cifar10")})
    cells = dict(zip([c.heading for c in made.columns], made.cells(rows)[-1], strict=True))
    assert cells["accuracy on reconstructions"] == "≈26"
    assert cells["strongest attack MSE"] == "≈0.045"
    assert (cells["zero-pad SSIM"], cells["pooled PSNR"]) == ("≈0.40", "≈13.3")
    assert cells["task accuracy"] == "–"
    assert "approximate" in cells["source"]


def test_the_caption_says_whose_each_measure_is() -> None:
    text = made_of({"cem": record(dataset="cifar10")})[0].caption
    assert "SSIM is of the attack with the largest SSIM" in text


def test_memory_stated_on_a_cpu_by_older_records_is_not_compared() -> None:
    old = record(dataset="cifar10", device="cpu (x86_64, 1 threads)")
    for one, shares in ((old, ["1.00", "–"]), (record(dataset="cifar10"), ["1.00", "1.00"])):
        made, rows = made_of({"cem": one})
        assert made.cells(rows)[0][-2:] == shares
