"""A run that learns from another: what is noted of it, what is refused, what stays untouched."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from short_runs import config
from typer.testing import CliRunner

import splitveil as sv
from splitveil.cli import app
from splitveil.data import load, make_splits
from splitveil.errors import CheckpointError, ConfigError, RunError
from splitveil.passport import model_hash
from splitveil.teaching import Undivided
from splitveil.train.checkpoint import read_checkpoint
from splitveil.train.task import divergence


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> sv.Run:
    return sv.fit(config(tmp_path_factory.mktemp("teachers"), "noise", name="wise", epochs=6))


@pytest.fixture(scope="module")
def pupil(teacher: sv.Run, tmp_path_factory: pytest.TempPathFactory) -> sv.Run:
    folder = tmp_path_factory.mktemp("pupils")
    return sv.fit(config(folder, name="pupil", teacher=str(teacher.path), teacher_share=1.0))


def weights(run: sv.Run) -> dict[str, torch.Tensor]:
    return read_checkpoint(run.path / "checkpoint.safetensors").part("model")


def distance(run: sv.Run, teacher: sv.Run) -> float:
    """From the teacher's answers, on test images."""
    dataset = load("digits")
    x = dataset.labelled(make_splits(dataset).test).images
    own, theirs = (Undivided(each.model.cpu())(x) for each in (run, teacher))
    return float(divergence(own, theirs, 2.0))


def test_a_pupil_comes_to_answer_as_its_teacher(teacher: sv.Run, tmp_path: Path) -> None:
    settings = {"teacher": str(teacher.path), "teacher_share": 1.0, "teacher_temperature": 2.0}
    taught, alone = (
        sv.fit(config(tmp_path, "none", name=name, epochs=12, seed=1, lr=0.02, **given))
        for name, given in (("taught", settings), ("alone", {}))
    )
    assert distance(taught, teacher) < 0.5 * distance(alone, teacher)


def test_a_teacher_is_left_as_it_was(teacher: sv.Run, pupil: sv.Run) -> None:
    assert pupil.path.is_dir()
    assert model_hash(sv.load_run(teacher.path).model) == model_hash(teacher.model)


def test_teaching_repeats_bit_for_bit(teacher: sv.Run, pupil: sv.Run, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"teacher": str(teacher.path), "teacher_share": 1.0}
    again, other = (
        sv.fit(config(tmp_path, name=name, **given))
        for name, given in (("again", settings), ("other", {}))
    )
    first = weights(pupil)
    assert all(torch.equal(v, first[k]) for k, v in weights(again).items())
    assert not all(torch.equal(v, first[k]) for k, v in weights(other).items())


SMOOTHINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "zero": {"label_smoothing": 0.0},
    "smooth": {"label_smoothing": 0.2},
}


def test_smoothed_labels_change_the_training_and_their_absence_does_not(tmp_path: Path) -> None:
    plain, zero, smooth = (
        weights(sv.fit(config(tmp_path, name=name, epochs=1, **given)))
        for name, given in SMOOTHINGS.items()
    )
    assert all(torch.equal(v, plain[k]) for k, v in zero.items())
    assert not all(torch.equal(v, plain[k]) for k, v in smooth.items())


def test_the_record_names_the_teacher_and_no_place(teacher: sv.Run, pupil: sv.Run) -> None:
    record = pupil.audit("smoke").to_dict()
    assert record["config"]["teacher"] == "wise"
    assert record["training"]["teacher"] == {"run": "wise", "model": model_hash(teacher.model)}
    assert str(teacher.path.parent) not in json.dumps(record["config"])


def test_a_run_with_a_teacher_is_loaded_and_audited_without_it(
    pupil: sv.Run, tmp_path: Path
) -> None:
    shutil.copytree(pupil.path, tmp_path / "moved")
    text = (tmp_path / "moved" / "config.toml").read_text()
    (tmp_path / "moved" / "config.toml").write_text(text.replace("wise", "gone"))
    assert model_hash(sv.load_run(tmp_path / "moved").model) == model_hash(pupil.model)


def test_it_answers_without_the_noise_of_its_channel(teacher: sv.Run) -> None:
    x = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    whole = Undivided(teacher.model)
    assert torch.equal(whole(x), whole(x))
    assert not any(p.requires_grad for p in whole.parameters())


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"teacher": "nobody"}, RunError, "nobody is not a run"),
        ({"name": "wise", "teacher": "{wise}"}, ConfigError, "cannot be its own teacher"),
        ({"teacher_share": 0.3}, ConfigError, "teacher_share is 0.3, but there is no teacher"),
        ({"teacher_temperature": 3.0}, ConfigError, "teacher_temperature is 3.0, but there is no"),
        ({"teacher": "{wise}", "held_out": 0.1}, ConfigError, r"trained on \d+ images that this"),
        ({"teacher": "{wise}", "split_seed": 1}, ConfigError, "this run .*split_seed=1; train one"),
        ({"teacher": "{wise}", "dataset": "npz:{npz}"}, ConfigError, "trained on other data"),
    ],
)
def test_what_no_teacher_may_be(
    given: dict[str, Any], error: type[Exception], words: str, teacher: sv.Run, tmp_path: Path
) -> None:
    images = np.zeros((60, 8, 8), np.uint8)
    np.savez(tmp_path / "other.npz", x=images, y=np.arange(60) % 10)
    places = {"wise": str(teacher.path), "npz": str(tmp_path / "other.npz")}
    settings = {k: v.format(**places) if isinstance(v, str) else v for k, v in given.items()}
    folder = teacher.path.parent if "name" in given else tmp_path / "runs"
    with pytest.raises(error, match=words):
        sv.fit(config(folder, **settings), overwrite=True)
    assert not (tmp_path / "runs").exists()
    assert (teacher.path / "checkpoint.safetensors").is_file()


def test_a_final_run_may_learn_from_one_that_saw_less(teacher: sv.Run, tmp_path: Path) -> None:
    run = sv.fit(config(tmp_path, epochs=1, final=True, teacher=str(teacher.path)))
    assert run.config.final
    with pytest.raises(ConfigError, match="it has final=true"):
        sv.fit(config(tmp_path, epochs=1, name="late", teacher=str(run.path)))


def test_another_teacher_in_the_same_place_is_refused_on_resume(
    teacher: sv.Run, tmp_path: Path
) -> None:
    place = tmp_path / "wise"
    shutil.copytree(teacher.path, place)
    options = config(tmp_path, name="pupil", epochs=1, teacher=str(place))
    sv.fit(options)
    sv.fit(options, resume=True)
    sv.fit(config(tmp_path, "noise", name="wise", epochs=1, seed=3), overwrite=True)
    with pytest.raises(CheckpointError, match="the teacher is not the one this run began with"):
        sv.fit(options, resume=True)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("label_smoothing=1.0", "label_smoothing must be in [0, 1), got 1.0"),
        ("label_smoothing=-0.1", "label_smoothing must be in [0, 1), got -0.1"),
        ("teacher_share=0.0", "teacher_share must be above 0 and at most 1, got 0.0"),
        ("teacher_temperature=0.0", "teacher_temperature must be a finite number > 0, got 0.0"),
        ("teacher=runs/nobody", "runs/nobody is not a run"),
    ],
)
def test_messages_of_the_command(setting: str, words: str, tmp_path: Path) -> None:
    command = ["train", "--dataset", "digits", "--runs-dir", str(tmp_path), "--set", setting]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())
    assert list(tmp_path.iterdir()) == []
