"""A run that learns from another: what is noted of it, what is refused, what stays untouched."""

import dataclasses
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
from splitveil.audits.trained_run import replay
from splitveil.cli.app import app
from splitveil.data.catalogue import load
from splitveil.data.splits import make_splits
from splitveil.errors import CheckpointError, ConfigError
from splitveil.experiments.runner import with_own_folder
from splitveil.experiments.search import make_plan
from splitveil.provenance import model_hash
from splitveil.runs import load_teacher
from splitveil.train.state import read_checkpoint
from splitveil.train.step import divergence


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> sv.Run:
    return sv.fit(config(tmp_path_factory.mktemp("teachers"), "noise", name="wise", epochs=4))


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
    own, theirs = (load_teacher(each.path).on(torch.device("cpu"))(x) for each in (run, teacher))
    return float(divergence(own, theirs, 2.0))


def test_a_pupil_comes_to_answer_as_its_teacher(teacher: sv.Run, tmp_path: Path) -> None:
    settings = {"teacher": str(teacher.path), "teacher_share": 1.0, "teacher_temperature": 2.0}
    taught, alone = (
        sv.fit(config(tmp_path, "none", name=name, epochs=4, seed=1, lr=0.02, **given))
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


def test_only_smoothed_labels_change_the_training(tmp_path: Path) -> None:
    plain, zero, smooth = (
        weights(sv.fit(config(tmp_path, name=name, epochs=1, **given)))
        for name, given in SMOOTHINGS.items()
    )
    assert all(torch.equal(v, plain[k]) for k, v in zero.items())
    assert not all(torch.equal(v, plain[k]) for k, v in smooth.items())


def test_the_record_names_the_teacher_and_no_place(teacher: sv.Run, pupil: sv.Run) -> None:
    record = pupil.audit("smoke", only=["linear"]).to_dict()
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
    loaded = load_teacher(teacher.path)
    whole = loaded.on(torch.device("cpu"))
    assert torch.equal(whole(x), whole(x))
    assert not any(p.requires_grad for p in loaded.model.parameters())


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"teacher": " "}, ConfigError, "teacher must be the folder of a trained run, got"),
        ({"teacher": "nobody"}, ConfigError, "teacher nobody cannot be used: nobody is not a run"),
        ({"name": "wise", "teacher": "{wise}"}, ConfigError, "cannot be its own teacher"),
        ({"teacher_share": 0.3}, ConfigError, "teacher_share is 0.3, but there is no teacher"),
        ({"teacher_temperature": 3.0}, ConfigError, "teacher_temperature is 3.0, but there is no"),
        ({"teacher": "{wise}", "held_out": 0.1}, ConfigError, r"trained on \d+ images that this"),
        ({"teacher": "{wise}", "split_seed": 1}, ConfigError, "this run .*split_seed=1; train a"),
        ({"teacher": "{wise}", "dataset": "npz:{npz}"}, ConfigError, "trained on other data"),
    ],
)
def test_an_unsuitable_teacher_is_refused(
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


@pytest.mark.parametrize(
    ("defence", "stage"),
    [
        ("dropout", "Dropout"),
        ("clip", "Clip"),
        ("quantise", "Quantise"),
        ("sparse", "SparseCoding"),
        ("shredder", "LearnedNoise"),
    ],
)
def test_a_teacher_that_does_more_than_add_noise_is_refused(
    defence: str, stage: str, tmp_path: Path
) -> None:
    settings = {"settings": {"sparse_place": "wire"}} if defence == "sparse" else {}
    odd = sv.fit(config(tmp_path, defence, name="odd", epochs=1, **settings))
    with pytest.raises(ConfigError, match=rf"channel stages other than noise \({stage}\)"):
        sv.fit(config(tmp_path, name="pupil", teacher=str(odd.path)))
    assert not (tmp_path / "pupil").exists()


def test_a_teacher_that_is_not_trained_to_its_end_is_refused(
    teacher: sv.Run, tmp_path: Path
) -> None:
    place = tmp_path / "half"
    shutil.copytree(teacher.path, place)
    text = (place / "config.toml").read_text()
    (place / "config.toml").write_text(text.replace("epochs = 4", "epochs = 5"))
    with pytest.raises(ConfigError, match="half is not fully trained: 40 of 50 steps"):
        sv.fit(config(tmp_path, name="pupil", teacher=str(place)))


@pytest.mark.parametrize("broken", ["checkpoint.safetensors", "config.toml"])
def test_a_broken_teacher_is_named_in_the_message(
    broken: str, teacher: sv.Run, tmp_path: Path
) -> None:
    place = tmp_path / "ill"
    shutil.copytree(teacher.path, place)
    (place / broken).write_text("net = 1")
    with pytest.raises(ConfigError, match=r"the teacher \S+ill cannot be used: .*folder\)$"):
        sv.fit(config(tmp_path, name="pupil", teacher=str(place)))


def test_a_teacher_of_a_file_of_settings_can_be_switched_off() -> None:
    assert sv.RunConfig(teacher="none").teacher is None


def test_a_pupil_may_go_on_when_its_teacher_was_moved(teacher: sv.Run, tmp_path: Path) -> None:
    shutil.copytree(teacher.path, tmp_path / "here")
    options = config(tmp_path, name="pupil", epochs=1, teacher=str(tmp_path / "here"))
    sv.fit(options)
    (tmp_path / "here").rename(tmp_path / "there")
    sv.fit(dataclasses.replace(options, teacher=str(tmp_path / "there")), resume=True)
    with pytest.raises(CheckpointError, match=r"hash was \w+, now it is None"):
        sv.fit(dataclasses.replace(options, teacher=None), resume=True)


def test_a_trial_under_another_teacher_is_another_trial(teacher: sv.Run, tmp_path: Path) -> None:
    place = tmp_path / "wise"
    shutil.copytree(teacher.path, place)
    options = config(tmp_path, teacher=str(place))
    first = with_own_folder(options).name
    assert with_own_folder(options).name == first
    sv.fit(config(tmp_path, "noise", name="wise", epochs=1, seed=3), overwrite=True)
    assert with_own_folder(options).name != first


def test_a_sweep_validates_its_teacher_first_and_keeps_it(
    teacher: sv.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(teacher.path, tmp_path / "wise")
    brief = ["--defence", "none", "--epochs", "1", "--profile", "smoke", "--attack", "linear"]
    brief += ["--jobs", "1", "--device", "cpu"]

    def sweep(*words: str) -> str:
        done = CliRunner().invoke(app, ["sweep", "--name", "s", *words])
        assert done.exit_code == (2 if "error" in done.output else 0), done.output
        return " ".join(done.output.split())

    assert "nobody cannot be used" in sweep(*brief, "--set", "teacher=nobody")
    assert "but there is no teacher" in sweep(*brief, "--vary", "teacher_share=0.3,0.5")
    assert "all trials of a sweep share teacher" in sweep(*brief, "--vary", "teacher=wise,other")
    held = ("--set", "held_out=0.1")
    assert "images that this run does not train on" in sweep(*brief, "--set", "teacher=wise", *held)
    assert not (tmp_path / "runs").exists()
    assert "error" not in sweep(*brief, "--set", "teacher=wise", "--vary", "teacher_share=0.5,1.0")
    sv.fit(config(tmp_path, "noise", name="wise", epochs=1, seed=3), overwrite=True)
    assert "teacher was" in sweep("--resume", "--trials", "3")


def test_a_sweep_may_learn_from_a_run_with_the_default_name(
    teacher: sv.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = sv.RunConfig().folder
    shutil.copytree(teacher.path, place)
    plan = make_plan({}, {}, [f"teacher={place}"], None)
    assert plan.teacher == model_hash(teacher.model)
    assert plan.options["teacher"] == str(tmp_path / place)


def test_a_record_from_before_is_replayed_without_a_difference(
    teacher: sv.Run, tmp_path: Path
) -> None:
    place = tmp_path / "old"
    shutil.copytree(teacher.path, place)
    run = sv.load_run(place)
    record = run.audit("smoke", only=["linear"]).to_dict()
    for key in ("label_smoothing", "teacher_share", "teacher_temperature"):
        del record["config"][key]
    assert replay(run, sv.Record.from_dict(record)) == []


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
        ("teacher_share=0.0", "teacher_share must be in (0, 1], got 0.0"),
        ("teacher_temperature=0.0", "teacher_temperature must be in (0, 100], got 0.0"),
        ("teacher=runs/nobody", "runs/nobody is not a run"),
    ],
)
def test_messages_of_the_command(setting: str, words: str, tmp_path: Path) -> None:
    command = ["train", "--dataset", "digits", "--runs-dir", str(tmp_path), "--set", setting]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())
    assert list(tmp_path.iterdir()) == []
