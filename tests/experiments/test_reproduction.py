"""Published experiments: their rows are valid runs, with what was reported beside them."""

import os
import subprocess
from pathlib import Path

import pytest

from splitveil.config.resolve import build_defence, make_config, noise_of
from splitveil.errors import ConfigError
from splitveil.experiments.reproduction import (
    EXPERIMENTS,
    find_experiment,
    group_table,
    reproduce,
)
from splitveil.record.groups import Group
from splitveil.record.schema import Record

SCRIPTS = Path(__file__).parents[2] / "scripts"
REPORT = EXPERIMENTS["gated-att-report"]


@pytest.mark.parametrize("row", REPORT.rows)
def test_every_row_has_the_settings_of_the_public_scripts(row: str) -> None:
    config = make_config(REPORT.settings(row))
    assert (config.dataset, config.epochs, config.net) == ("cifar10", 240, "vgg11")
    assert config.final  # the public scripts hold no training image back
    weight = build_defence(config).penalty_plan().lambd
    assert weight == {"sparse": 0, "sparse+gated-att-tuned": 32}.get(row, 16)
    assert config.defence == {"sparse": "noise+sparse"}.get(row, row.replace("tuned", "simple"))
    # A row without the others' noise would not be their layer alone, nor stand in their table.
    assert noise_of(config, build_defence(config)) == 0.025


def test_every_row_exists_with_and_without_the_sparse_layer() -> None:
    plain = [row for row in REPORT.rows if not row.startswith("sparse")]
    assert plain == ["cem", "gated-att", "gated-att-simple", "slot-cross"]
    layered = [row for row in REPORT.rows if row.startswith("sparse") and "tuned" not in row]
    assert layered == ["sparse", *(f"sparse+{row}" for row in plain)]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown experiment 'gated-att'; did you mean 'gated-a"):
        find_experiment("gated-att")
    with pytest.raises(ConfigError, match="unknown row 'gated'"):
        reproduce("gated-att-report", only=["gated"])


def test_the_old_name_is_accepted_and_the_new_one_named(caplog: pytest.LogCaptureFixture) -> None:
    assert find_experiment("gated-att-report") is REPORT
    assert not caplog.messages
    assert find_experiment("seed-003") is REPORT
    assert "now called 'gated-att-report'" in caplog.text


def test_time_and_memory_are_shares_of_the_row_it_compares_with() -> None:
    def record(seconds: float, peak: int | None) -> Record:
        made = {
            "accuracy": 0.8, "strongest": {"mse": 0.04, "mse_by": "decoder"},
            "attacks": {"decoder": {"mse": 0.04, "accuracy": 0.25}},
            "config": {"net": "vgg11", "defence": "cem", "dataset": "cifar10"},
            "seconds": {"train": seconds}, "training": {"peak_bytes": peak},
        }  # fmt: skip
        return Record.from_dict(made)

    slower = Group("gated-att", ((record(15.0, None),),))
    made, rows = group_table(REPORT, [slower, Group("cem", ((record(10.0, 100),),))])
    shares = {line[0]: line[-2:] for line in made.cells(rows)}
    assert shares["`cem`"] == ["1.00", "1.00"]
    assert shares["`gated-att`"] == ["1.50", "–"]
    assert len(rows) == 2 + len(REPORT.reported) + len(REPORT.rough)
    several = Group("gated-att", ((record(15.0, 300),), (record(25.0, 100),)))
    made, rows = group_table(REPORT, [several, Group("cem", ((record(10.0, 100),),))])
    cells = made.cells(rows)
    assert [line[0] for line in cells[:2]] == ["`cem`", "`gated-att`"]
    assert cells[1][-2:] == ["2.00", "2.00"]
    alone, rows = group_table(REPORT, [several])
    assert alone.cells(rows)[0][-2:] == ["–", "–"]


@pytest.mark.parametrize(
    ("script", "row"), [("run_exp.sh", "gated-att"), ("run_exp1.sh", "slot-cross")]
)
def test_the_shell_scripts_call_the_command(script: str, row: str, tmp_path: Path) -> None:
    told = tmp_path / "told"
    fake = tmp_path / "fake"
    fake.write_text(f'#!/bin/sh\necho "$@" > {told}\n')
    fake.chmod(0o755)
    subprocess.run(
        [str(SCRIPTS / script), "--seed", "1"],
        check=True,
        env={**os.environ, "SPLITVEIL": str(fake)},
    )
    words = told.read_text().split()
    assert words[:2] == ["reproduce", "gated-att-report"]
    assert words[-2:] == ["--seed", "1"]
    assert set(words[3:-2:2]) <= set(REPORT.rows)
    assert row in words
