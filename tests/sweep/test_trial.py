"""What a worker does with a job: a run trained and attacked on validation images."""

import math
from pathlib import Path

import pytest
from sweep.made import plan

import splitveil.sweep.trial
from splitveil.data import load, make_splits
from splitveil.errors import AuditError, ConfigError
from splitveil.runs import load_run
from splitveil.sweep.trial import Task, chosen_attacks, job_of, pack, perform, unpack
from splitveil.types import Json


def test_a_job_gives_what_was_found_and_the_images_behind_it(tmp_path: Path) -> None:
    made = plan(
        attacks=("mean", "linear"), options={"dataset": "digits", "epochs": 2, "net": "small"}
    )
    task = Task(defence="noise", number=0, settings={"noise_std": 0.1, "lr": 0.05}, seed=3)
    answer = perform(job_of(made, task, tmp_path))
    found, images = answer["found"], answer["images"]
    right, mse = unpack(images["right"]), unpack(images["mse"])
    assert len(right) == len(mse) == len(make_splits(load("digits")).val)
    assert right.mean() == pytest.approx(found["accuracy"], abs=1e-12)
    assert mse.mean() == pytest.approx(found["mse"], rel=1e-3)
    assert found["classes"] == 10
    assert found["leakage"] == pytest.approx(1 - found["mse"] / found["ceiling"])
    run = load_run(tmp_path / "trials" / answer["run"])
    assert (run.config.seed, run.config.noise_std, run.config.lr) == (3, 0.1, 0.05)
    assert run.config.epochs == 2


def test_numbers_that_are_not_finite_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> tuple[Path, Json]:
        return tmp_path, {"accuracy": 0.5, "leakage": math.nan}

    monkeypatch.setattr(splitveil.sweep.trial, "trial", broken)
    task = Task(defence="none", number=0, settings={}, seed=0)
    with pytest.raises(AuditError, match="leakage of the trial are not finite"):
        perform(job_of(plan(), task, tmp_path))


def test_only_attacks_that_see_every_image_once_take_part() -> None:
    assert list(chosen_attacks(plan(attacks=("nearest", "linear")))) == ["nearest", "linear"]
    assert "rmle" not in chosen_attacks(plan(attacks=()))
    with pytest.raises(ConfigError, match="unknown attack of profile 'smoke' 'k-query'"):
        chosen_attacks(plan(attacks=("k-query",)))


def test_packed_numbers_keep_three_digits() -> None:
    values = [0.0, 0.25, 1.0, 0.0123, 1e-4]
    assert unpack(pack(values)).tolist() == pytest.approx(values, rel=5e-4)
