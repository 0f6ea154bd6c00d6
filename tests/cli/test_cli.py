"""The command line through its runner: what a user types and sees."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from cli.calling import TINY, call, text

from splitveil.attacks.linear import Linear
from splitveil.attacks.profiles import PROFILES
from splitveil.audits import pipeline
from splitveil.cli.app import app
from splitveil.experiments.demo import SHOWN


@pytest.fixture(scope="module", autouse=True)
def tiny_audits() -> Iterator[None]:
    """Audits of the smoke profile with small attacks, and only their images measured."""
    with patch.dict(PROFILES, {"smoke": TINY}), patch.object(pipeline, "leaks_beyond_pixels") as no:
        no.return_value = {}
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A demo in the smallest form: six runs, audited, and a page."""
    folder = tmp_path_factory.mktemp("demo")
    result = call(
        "demo",
        "--runs-dir",
        str(folder),
        "--epochs",
        "1",
        "--profile",
        "smoke",
        "--json",
        "--dataset",
        "digits",
    )
    assert result.exit_code == 0, text(result)
    records = json.loads(result.stdout)
    assert [Path(k).name for k in records] == list(SHOWN)
    assert "trained and attacked on digits." in text(result)  # no promise of minutes
    return folder


def test_the_demo_leaves_runs_and_a_page(runs: Path) -> None:
    page = (runs / "report.html").read_text()
    assert all(name in page for name in SHOWN)
    for name in SHOWN:
        files = {p.name for p in (runs / name).iterdir()}
        assert {"config.toml", "metrics.jsonl", "checkpoint.safetensors", "record.json"} <= files


def test_a_run_is_trained_and_audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = call("train", "--dataset", "digits", "--defence", "veil", "--name", "a", "--epochs",
                  "1", "--runs-dir", str(tmp_path), "--set", "lambd=0.5",
                  "--seed", "4")  # fmt: skip
    assert result.exit_code == 0, text(result)
    assert "effective weight λ·w_lr·scale 0.5" in text(result)
    assert "epoch 1/1" in text(result)
    assert "doctor: 1 epochs are too few to judge" in text(result)
    run = tmp_path / "a"
    result = call("audit", str(run), "--profile", "smoke")
    assert result.exit_code == 0, text(result)
    record = json.loads((run / "record.json").read_text())
    assert f"{100 * record['accuracy']:.2f}" in result.stdout
    assert f"{record['strongest']['mse']:.4f}" in result.stdout
    assert (record["config"]["lambd"], record["config"]["seed"]) == (0.5, 4)
    assert (run / "report.html").is_file()
    assert "To choose settings, use --aux val or splitveil sweep" in text(result)
    monkeypatch.setattr("splitveil.report.page.write_page", lambda *_: "not written twice")
    result = call("audit", str(run), "--profile", "smoke", "--aux", "val", "--attacks", "linear")
    assert result.exit_code == 0, text(result)
    assert "flag: validation images scored" in text(result)
    assert "To choose settings" not in text(result)


def test_options_override_set_and_set_overrides_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('defence = "gated-att"\nlambd = 8\nseed = 7\nepochs = 1\nreg_strength = 0.1\n')
    result = call("train", "--config", str(file), "--set", "lambd=2", "--seed", "9",
                  "--runs-dir", str(tmp_path), "--name", "b", "--json")  # fmt: skip
    assert result.exit_code == 0, text(result)
    written = (tmp_path / "b" / "config.toml").read_text()
    for line in ('defence = "gated-att"', "lambd = 2.0", "seed = 9", "noise_std = 0.1"):
        assert line in written
    assert json.loads(result.stdout)["last_epoch"]["epoch"] == 1


def test_resuming_a_finished_run_changes_nothing(runs: Path) -> None:
    before = (runs / "veil" / "checkpoint.safetensors").read_bytes()
    words = ("train", "--resume", "--runs-dir", str(runs), "--name", "veil")
    result = call(*words)
    assert result.exit_code == 0, text(result)
    assert (runs / "veil" / "checkpoint.safetensors").read_bytes() == before
    result = call(*words, "--set", "reg_strength=0.05")
    assert result.exit_code == 0, text(result)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--defence", "noise"), "with other settings: defence was 'veil', is 'noise'; "),
        (("--overwrite",), "--resume and --overwrite exclude each other; give one"),
        (("--overwrite", "--defence", "noise"), "exclude each other"),
    ],
)
def test_a_run_is_not_resumed_with_other_settings(
    more: tuple[str, ...], said: str, runs: Path
) -> None:
    before = (runs / "veil" / "checkpoint.safetensors").read_bytes()
    result = call("train", "--resume", "--runs-dir", str(runs), "--name", "veil", *more)
    assert result.exit_code == 2
    assert said in text(result)
    assert (runs / "veil" / "checkpoint.safetensors").read_bytes() == before


@pytest.mark.parametrize("command", ["datasets", "defences", "attacks", "recipes"])
def test_a_list_names_everything(command: str) -> None:
    names = json.loads(call(command, "--json").stdout)
    shown = call(command)
    assert shown.exit_code == 0
    assert all(name in shown.stdout for name in names)


class Terse(Linear):
    __slots__ = ()


def test_an_attack_without_a_docstring_is_listed() -> None:
    with patch.dict(PROFILES, {"smoke": {**PROFILES["smoke"], "mine": Terse()}}):
        shown = json.loads(call("attacks", "--json").stdout)
    assert shown["mine"] == "black-box: "
    assert shown.keys() == {"mine"} | {name for profile in PROFILES.values() for name in profile}


COMMANDS = [
    command.callback.__name__.replace("_", "-")
    for command in app.registered_commands
    if command.callback and not command.hidden
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example_and_json(command: str) -> None:
    result = call(command, "--help")
    assert result.exit_code == 0
    assert f"splitveil {command}" in text(result)
    assert "--json" in text(result)


@pytest.mark.usefixtures("no_page")
def test_a_record_says_that_attacks_were_left_out(runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "none"
    shutil.copytree(runs / "undefended", run)
    result = call("audit", str(run), "--profile", "smoke", "--attacks", "linear, decoder")
    assert result.exit_code == 0, text(result)
    record = json.loads((run / "record.json").read_text(encoding="utf-8"))
    assert list(record["attacks"]) == ["mean", "class-mean", "linear", "decoder"]
    assert record["audit"]["only"] == ["linear", "decoder"]
    [flag] = [f for f in record["flags"] if f["name"] == "attacks left out"]
    assert "rmle" in flag["seen"]
    replayed = call("replay", str(run / "record.json"))
    assert replayed.exit_code == 0, text(replayed)
    other = call("replay", str(run / "record.json"), "--seed", "7")
    assert other.exit_code == 2  # the record says all of it
    wrong = call("audit", str(run), "--profile", "smoke", "--attacks", "decodr")
    assert wrong.exit_code == 2
    assert "decoder" in text(wrong)


def test_an_audit_on_a_cpu_is_not_compiled(runs: Path) -> None:
    result = call("audit", str(runs / "undefended"), "--profile", "smoke", "--compile")
    assert result.exit_code == 2
    assert "--compile is for a GPU" in text(result)


def test_existing_name_is_refused_and_kept(runs: Path) -> None:
    before = (runs / "undefended" / "config.toml").read_bytes()
    result = call("train", "--runs-dir", str(runs), "--name", "undefended", "--epochs", "1")
    assert result.exit_code == 2
    assert "--resume" in text(result)
    assert "--overwrite" in text(result)
    assert (runs / "undefended" / "config.toml").read_bytes() == before


def test_overwrite_removes_only_runs(tmp_path: Path) -> None:
    keep = tmp_path / "photos" / "holiday.txt"
    keep.parent.mkdir()
    keep.write_text("dear")
    words = ("--runs-dir", str(tmp_path), "--name", "photos", "--epochs", "1", "--overwrite")
    result = call("train", *words)
    assert result.exit_code == 2
    assert "is not a run" in text(result)
    assert keep.read_text() == "dear"


def test_version_and_no_arguments() -> None:
    from splitveil import __version__

    assert __version__ in call("--version").stdout
    assert "demo" in text(call())


@pytest.mark.usefixtures("no_page")
def test_one_command_trains_and_audits(tmp_path: Path) -> None:
    words = ("--dataset", "digits", "--defence", "none", "--epochs", "1", "--runs-dir",
             str(tmp_path), "--name", "one", "--audit", "smoke", "--json")  # fmt: skip
    result = call("train", *words)
    assert result.exit_code == 0, text(result)
    said = json.loads(result.stdout)
    assert said["last_epoch"]["epoch"] == 1
    assert said["record"] == json.loads((tmp_path / "one" / "record.json").read_text())
    assert said["record"]["audit"]["profile"] == "smoke"


@pytest.mark.parametrize(
    "words",
    [("demo", "--profile"), ("reproduce", "gated-att-report", "--profile"), ("train", "--audit")],
)
def test_an_unknown_profile_costs_no_training(words: tuple[str, ...], tmp_path: Path) -> None:
    result = call(*words, "foo", "--runs-dir", str(tmp_path / "r"))
    assert result.exit_code == 2
    assert "unknown profile 'foo'" in text(result)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--net resnet20@99", "cutlayer must be in [1, 10], got 99"),
        ("--net resnet21", "did you mean 'resnet20'"),
        ("--defence none --set noise_std=0.1", "adds no noise"),
        ("--defence arl --set explained_threshold=3", "in [0, 1], got 3.0"),
        ("--device cpu --set compile=true", "compile=true needs a GPU"),
        ("--set noise_std=0", "needs channel noise"),
        ("--set bank=-2", "bank must be at least 0, got -2; rows kept of each class"),
        ("--defence slot-cross --set num_slots=0", "num_slots"),
    ],
)
def test_bad_settings_are_refused_before_data_are_read(
    words: str, said: str, tmp_path: Path
) -> None:
    """A corrupt archive would be met, and said, if it were read."""
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(b"broken")
    result = call(
        "train", "--dataset", "cifar10", "--data-dir", str(tmp_path), *words.split(),
        "--runs-dir", str(tmp_path / "runs"),
    )  # fmt: skip
    assert result.exit_code == 2
    assert said in text(result)
    assert not (tmp_path / "runs").exists()


def test_several_seeds_make_a_run_each_and_resume_finishes_those_that_are_missing(
    tmp_path: Path,
) -> None:
    words = ["train", "--dataset", "digits", "--epochs", "1", "--defence", "noise", "--name", "n",
             "--runs-dir", str(tmp_path), "--json"]  # fmt: skip
    result = call(*words, "--seeds", "3,0")
    assert result.exit_code == 0, text(result)
    assert [Path(run["run"]).name for run in json.loads(result.stdout)] == ["n-s3", "n-s0"]
    shutil.rmtree(tmp_path / "n-s0")
    kept = (tmp_path / "n-s3" / "checkpoint.safetensors").read_bytes()
    result = call(*words[:-1], "--seeds", "3,0", "--resume")
    assert result.exit_code == 0, text(result)
    assert (
        f"next: splitveil compare {tmp_path}/n-s3 {tmp_path}/n-s0, after `audit`" in result.stdout
    )
    assert "seed = 0" in (tmp_path / "n-s0" / "config.toml").read_text()
    assert (tmp_path / "n-s3" / "checkpoint.safetensors").read_bytes() == kept
    for seeds, said in (("1,1", "names a seed twice"), ("a", "must be whole numbers")):
        assert said in text(call(*words, "--seeds", seeds))
    assert "give one of them" in text(call(*words, "--seeds", "1", "--seed", "1"))
