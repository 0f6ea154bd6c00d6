"""A record can be measured again: the same numbers, or the name of each that differs."""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from audits.made import Counting, attacks_alone
from torch import Tensor, nn
from typer.testing import CliRunner

import splitveil as sv
from splitveil.attacks import profiles
from splitveil.attacks.baseline import ClassMean, MeanImage
from splitveil.attacks.linear import Linear
from splitveil.audits import certificates, pipeline, trained_run
from splitveil.audits.beyond_pixels import leaks_beyond_pixels
from splitveil.audits.certificates import certify
from splitveil.audits.trained_run import differences, open_run, replay
from splitveil.cli.app import app
from splitveil.errors import AuditError, RunError
from splitveil.nets.channel import Channel, GaussianNoise
from splitveil.provenance import model_hash
from splitveil.record.schema import read_record
from splitveil.threat import Access, Attack

SUBSET = Counting(access=Access.WHITE_BOX, limit=11)
TINY: Mapping[str, Attack] = {
    "mean": MeanImage(), "class-mean": ClassMean(), "linear": Linear(), "subset": SUBSET,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def tiny_profile() -> Iterator[None]:
    """The profile `smoke` without its slow attacks; no leaks beyond pixels, no certificates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiles, "PROFILES", {"smoke": TINY})
        attacks_alone(patch)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> sv.Run:
    folder = str(tmp_path_factory.mktemp("runs"))
    return sv.fit(sv.RunConfig(dataset="digits", defence="noise", epochs=1, runs_dir=folder))


@pytest.fixture(scope="module")
def record(run: sv.Run) -> sv.Record:
    return run.audit("smoke", seed=3)


def call(*words: object) -> Any:  # noqa: ANN401 - typer's result type is not public
    return CliRunner().invoke(app, [str(w) for w in words])


def text(result: Any) -> str:  # noqa: ANN401
    return re.sub(r"\s+", " ", result.output + result.stderr)


def changed(record: sv.Record, **parts: Any) -> sv.Record:  # noqa: ANN401
    """The record with some keys of its parts replaced."""
    data = json.loads(record.to_json())
    for part, keys in parts.items():
        data[part] |= keys
    return sv.Record.from_dict(data)


def test_the_record_holds_flags_headlines_and_accuracies(record: sv.Record, run: sv.Run) -> None:
    data = json.loads((run.path / "record.json").read_text())
    assert data == record.to_dict()
    assert {"one draw of a random channel"} <= {f["name"] for f in data["flags"]}
    assert all(f.keys() == {"name", "seen", "advice"} for f in data["flags"])
    assert data["strongest_blackbox"]["mse_by"] in ("mean", "class-mean", "linear")
    assert data["strongest"] == data["strongest_blackbox"]  # the subset stands apart
    assert all(0 <= a["accuracy"] <= 1 for a in data["attacks"].values())
    assert data["attacks"]["subset"]["images"] == 11
    assert data["attacks"]["subset"]["beside"]["attack"] == "linear"
    assert data["attacks"]["subset"]["curve"] == [0.5, 0.25]
    assert data["audit"]["not_finite"] == []
    assert data["audit"]["model"] == model_hash(run.model)


@pytest.mark.usefixtures("record")
def test_a_replay_runs_every_attack_and_writes_nothing(run: sv.Run) -> None:
    before = {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()}
    SUBSET.fits.clear()
    assert replay(sv.load_run(run.path), read_record(run.path / "record.json")) == []
    assert len(SUBSET.fits) == 1
    assert {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()} == before


def test_leaks_and_certificates_replay_too(
    run: sv.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "leaks_beyond_pixels", leaks_beyond_pixels)
    monkeypatch.setattr(certificates, "certify", certify)
    shutil.copytree(run.path, tmp_path / "copy")
    own = sv.load_run(tmp_path / "copy")
    made = own.audit("smoke", only=["linear"])
    assert {"attribute", "membership", "re-id", "repeats"} <= made.leaks.keys()
    assert made.certificates["gallery"].nats is not None
    assert replay(own, made) == []


def test_a_record_with_floating_point_noise_is_not_called_different(
    run: sv.Run, record: sv.Record
) -> None:
    assert record.audit.grid == 16
    with pytest.raises(AuditError, match=r"drew the noise in floating point\. .* no fault of the r"):
        replay(run, changed(record, audit={"grid": None}))


def test_what_differs_is_named(run: sv.Run, record: sv.Record) -> None:
    wrong = changed(record, strongest={"mse": 0.5}, seconds={"audit": 1e9})
    assert replay(run, wrong) == [
        f"strongest.mse: 0.5 was recorded, {record.strongest.mse!r} was measured"
    ]
    reseeded = replay(run, changed(record, seeds={"attack": 4}))
    assert any(line.startswith("attacks.linear.mse: ") for line in reseeded)
    assert not any(line.startswith("attacks.mean.mse") for line in reseeded)


def test_differences_go_deep_and_leave_times_and_commands_out() -> None:
    old = {"a": {"b": [1, {"c": 2}]}, "gone": 1, "l": [1, 2], "command": "x", "x": None}
    new = {"a": {"b": [1, {"c": 3}]}, "new": 0.5, "l": [1], "command": "y"}
    assert list(differences(old, new)) == [
        "a.b[1].c: 2 was recorded, 3 was measured",
        "gone: 1 was recorded, None was measured",
        "l: [1, 2] was recorded, [1] was measured",
        "new: None was recorded, 0.5 was measured",
    ]
    assert list(differences(old, old)) == []


def test_the_record_of_another_model_is_refused_before_any_attack(
    run: sv.Run, record: sv.Record
) -> None:
    SUBSET.fits.clear()
    with pytest.raises(AuditError, match="of another model: its hash is 0123, the run's is "):
        replay(run, changed(record, audit={"model": "0123"}))
    assert SUBSET.fits == []


@pytest.mark.parametrize("parts", [{"audit": {"profile": None}}, {"seeds": {"attack": None}}])
def test_a_record_that_does_not_say_how_it_was_made_is_refused(
    run: sv.Run, record: sv.Record, parts: dict[str, Any]
) -> None:
    with pytest.raises(AuditError, match="does not say how it was made; audit the run again"):
        replay(run, changed(record, **parts))
    for odd in ({"audit": {"aux": 3}}, {"seeds": {"attack": "0"}}):
        with pytest.raises(RunError, match=r"must be a .*, got"):
            changed(record, **odd)


@pytest.mark.usefixtures("as_users_run")
@pytest.mark.parametrize("broken", ["", "{", "[]", "3", "{}", '{"mse": 1}', "\xff"])
def test_a_broken_record_is_refused_with_its_reason(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(broken, encoding="latin-1")
    with pytest.raises(RunError, match=r"record\.json is not a record: .*writes records"):
        read_record(path)


def test_records_with_foreign_parts_and_absent_files_are_refused(
    tmp_path: Path, record: sv.Record, as_users_run: None
) -> None:
    del as_users_run
    path = tmp_path / "record.json"
    with pytest.raises(RunError, match=r"cannot read .*: No such file"):
        read_record(path)
    path.write_text(json.dumps(record.to_dict() | {"audit": 3}))
    with pytest.raises(RunError, match="`audit` must be an object, got int 3"):
        read_record(path)
    path.write_text(json.dumps(record.to_dict() | {"unheard": 3}))
    assert read_record(path).to_dict()["unheard"] == 3


def test_the_hash_of_a_model_is_of_structure_weights_and_noise() -> None:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        layer = torch.nn.Linear(2, 2)
    first = model_hash(layer, Channel([GaussianNoise(0.1)]))
    assert model_hash(layer, Channel([GaussianNoise(0.1)])) == first
    assert model_hash(layer, Channel([GaussianNoise(0.2)])) != first
    with torch.no_grad():
        layer.bias[0] += 1e-7
    assert model_hash(layer, Channel([GaussianNoise(0.1)])) != first


class Plugin(nn.Module):
    """A stage from outside the package."""

    def forward(self, z: Tensor) -> Tensor:
        return z


@pytest.mark.parametrize("version", [None, "2"])
def test_code_from_outside_needs_a_version_for_an_identity(
    run: sv.Run, version: str | None
) -> None:
    own = sv.load_run(run.path)
    assert open_run(own, aux="train")[0].identity
    plugin = Plugin()
    if version is not None:
        plugin.version = version  # type: ignore[assignment]  # a plain text
    own.model.head = nn.Sequential(own.model.head, plugin)
    found = open_run(own, aux="train")[0].identity
    assert bool(found) is (version is not None)


def test_the_command_exits_with_0_1_or_2(run: sv.Run, record: sv.Record, tmp_path: Path) -> None:
    good = run.path / "record.json"
    result = call("replay", good)
    assert result.exit_code == 0, text(result)
    assert "every number is the same, bit for bit" in text(result)

    wrong = tmp_path / "wrong.json"
    wrong.write_text(changed(record, floor={"mse": 0.5}).to_json())
    result = call("replay", wrong, "--run", run.path)
    assert result.exit_code == 1, text(result)
    assert "floor.mse: 0.5 was recorded" in text(result)
    assert "1 differences" in text(result)
    result = call("replay", wrong, "--run", run.path, "--json")
    assert result.exit_code == 1
    assert len(json.loads(result.stdout)["differences"]) == 1

    wrong.write_text(changed(record, audit={"model": "0123"}).to_json())
    result = call("replay", wrong, "--run", run.path)
    assert result.exit_code == 2
    assert "another model" in text(result)
    wrong.write_text("{")
    assert call("replay", wrong, "--run", run.path).exit_code == 2
    assert call("replay", tmp_path / "absent.json").exit_code == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--replay", "record.json"], "splitveil replay RECORD"),
        (["runs/x", "--replay=record.json", "--json"], "splitveil replay RECORD"),
        (["runs/x", "--wire", "a.jsonl"], "splitveil audit-wire RUN"),
        (["mycode:send", "--data", "digits"], "splitveil audit-encoder mycode:send"),
        (["runs/x", "--profil", "smoke"], "no option or argument '--profil'"),
        (["--fres", "runs/x"], "no option or argument '--fres'"),
        (["runs/x", "more"], "no option or argument 'more'"),
    ],
)
def test_old_forms_of_audit_exit_with_2_and_name_the_new_ones(words: list[str], said: str) -> None:
    result = call("audit", *words)
    assert result.exit_code == 2
    assert said in text(result)


def test_an_audit_of_nothing_exits_with_2() -> None:
    result = call("audit")
    assert result.exit_code == 2
    assert "which run? give its folder" in text(result)


def test_finished_attacks_are_kept_until_a_fresh_audit(
    run: sv.Run, record: sv.Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPLITVEIL_COMMIT", "a-commit")  # code with changes would keep nothing
    folder = tmp_path / "copy"
    shutil.copytree(run.path, folder, ignore=shutil.ignore_patterns("audit"))
    first = sv.load_run(folder).audit("smoke", seed=3)
    SUBSET.fits.clear()
    again = sv.load_run(folder).audit("smoke", seed=3)
    assert SUBSET.fits == []
    assert again.to_dict()["attacks"] == first.to_dict()["attacks"]

    words = ("audit", folder, "--profile", "smoke", "--seed", "3", "--json")
    result = call(*words, "--fresh")
    assert result.exit_code == 0, text(result)
    assert len(SUBSET.fits) == 1
    assert json.loads(result.stdout)["strongest"] == record.to_dict()["strongest"]

    stored = {p: p.read_bytes() for p in (folder / "audit").iterdir()}
    assert len(stored) == len(TINY)
    for path in stored:
        path.write_bytes(b"spoiled")
    sv.load_run(folder).audit("smoke", seed=3, fresh=True)
    assert all(p.read_bytes() != b"spoiled" for p in stored)
    sv.load_run(folder).audit("smoke", seed=3)
    assert len(SUBSET.fits) == 2
