"""Published experiments: their rows are valid runs, with what was reported beside them."""

import os
import subprocess
from pathlib import Path

import pytest

from splitveil.config.resolve import build_defence, make_config
from splitveil.errors import ConfigError
from splitveil.experiments.reproduction import (
    EXPERIMENTS,
    SEED_003,
    chosen_rows,
    find_experiment,
    group_table,
)
from splitveil.record.groups import Group
from splitveil.record.schema import Record

SCRIPTS = Path(__file__).parents[2] / "scripts"
SEED = EXPERIMENTS["seed-003"]


@pytest.mark.parametrize("row", SEED.rows)
def test_every_row_is_a_run_of_the_documents_experiment(row: str) -> None:
    config = make_config({**SEED.common, "defence": row})
    assert (config.dataset, config.epochs, config.net) == ("cifar10", 240, "vgg11")
    assert build_defence(config).penalty_plan().lambd == 16
    assert config.final  # the public scripts hold no training image back


def test_with_and_without_the_sparse_layer() -> None:
    plain = [row for row in SEED.rows if not row.startswith("sparse+")]
    assert plain == ["cem", "gated-att", "gated-att-simple", "slot-cross"]
    assert list(SEED.rows) == plain + [f"sparse+{row}" for row in plain]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown experiment 'seed-3'; did you mean 'seed-003'"):
        find_experiment("seed-3")
    with pytest.raises(ConfigError, match="unknown row 'gated'"):
        chosen_rows(SEED, ["gated"])


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
    made, rows = group_table(SEED, [slower, Group("cem", ((record(10.0, 100),),))])
    shares = {line[0]: line[-2:] for line in made.cells(rows)}
    assert shares["`cem`"] == ["1.00", "1.00"]
    assert shares["`gated-att`"] == ["1.50", "–"]
    assert len(rows) == 2 + len(SEED_003) + len(SEED.rough)
    several = Group("gated-att", ((record(15.0, 300),), (record(25.0, 100),)))
    made, rows = group_table(SEED, [several, Group("cem", ((record(10.0, 100),),))])
    cells = made.cells(rows)
    assert [line[0] for line in cells[:2]] == ["`cem`", "`gated-att`"]
    assert cells[1][-2:] == ["2.00", "2.00"]
    alone, rows = group_table(SEED, [several])
    assert alone.cells(rows)[0][-2:] == ["–", "–"]


@pytest.mark.parametrize(
    ("script", "row"), [("run_exp.sh", "gated-att"), ("run_exp1.sh", "slot-cross")]
)
def test_the_users_scripts_call_it(script: str, row: str, tmp_path: Path) -> None:
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
    assert words[:2] == ["reproduce", "seed-003"]
    assert words[-2:] == ["--seed", "1"]
    assert set(words[3:-2:2]) <= set(SEED.rows)
    assert row in words
