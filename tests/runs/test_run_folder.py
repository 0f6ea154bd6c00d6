"""What lies in a run's folder is of that run: nothing outlives its model, nothing is lost."""

import errno
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from audits.made import attacks_alone
from short_runs import config

import splitveil as sv
from splitveil.config import machine
from splitveil.config.resolve import flat_config, read_folder
from splitveil.errors import CheckpointError, RunError
from splitveil.io import folder_lock
from splitveil.record.schema import read_record


@pytest.fixture(autouse=True)
def brief_audits(monkeypatch: pytest.MonkeyPatch) -> None:
    attacks_alone(monkeypatch)


def test_a_record_of_half_a_training_is_flagged_then_set_aside(tmp_path: Path) -> None:
    made = config(tmp_path, "none", epochs=3)

    def stop(done: int, total: int, note: str = "") -> None:
        if 2 * done > total:
            raise KeyboardInterrupt(note)

    with pytest.raises(KeyboardInterrupt):
        sv.fit(made, progress=stop)
    half = sv.audit(sv.load_run(made.folder), profile="smoke", only=["linear"])
    told = {flag.name: flag.seen or "" for flag in half.flags or ()}
    assert re.fullmatch(r"\d+ of 30 steps were trained", told["training unfinished"])
    run = sv.fit(made, resume=True)
    assert run.record is None
    kept = json.loads((made.folder / "record.unfinished.json").read_text())
    assert kept == half.to_dict()
    assert not (made.folder / "gallery.json").exists()
    whole = sv.audit(run, profile="smoke", only=["linear"])
    assert "training unfinished" not in whole.flag_names
    sv.fit(made, resume=True)  # there is nothing left to train
    assert run.record == whole


def test_a_record_made_during_training_is_set_aside_at_the_end(tmp_path: Path) -> None:
    made = config(tmp_path, "none", epochs=1)
    flag = {"name": "training unfinished", "seen": "1 of 9 steps were trained"}
    record = {"strongest": {}, "config": {}, "flags": [flag]}

    def audit(done: int, total: int, note: str = "") -> None:
        if done == 1:
            assert total > done, note
            (made.folder / "record.json").write_text(json.dumps(record))

    assert sv.fit(made, progress=audit).record is None
    assert json.loads((made.folder / "record.unfinished.json").read_text()) == record


def test_an_audit_of_a_run_trained_again_meanwhile_is_dropped(tmp_path: Path) -> None:
    run = sv.fit(config(tmp_path, "none", epochs=1, name="x"))
    seen: list[str] = []

    def meanwhile(done: int, total: int, note: str = "") -> None:
        if not seen:
            seen.append(note or f"{done} of {total}")
            sv.fit(config(tmp_path, "noise", epochs=1, name="x"), overwrite=True)

    with pytest.raises(RunError, match="trained again meanwhile; nothing was written"):
        run.audit("smoke", only=["linear"], progress=meanwhile)
    assert sv.load_run(run.path).record is None
    assert not (run.path / "gallery.json").exists()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("left", [(), (".config.toml.tmp",)])
def test_a_folder_without_a_complete_file_is_no_run(
    left: tuple[str, ...], overwrite: bool, tmp_path: Path
) -> None:
    """It is what a training leaves that was killed before its first file, or while it wrote it."""
    made = config(tmp_path, "none", epochs=1)
    made.folder.mkdir()
    for name in left:
        (made.folder / name).write_text("data")
    assert sv.fit(made, overwrite=overwrite).path == made.folder
    assert not any((made.folder / name).exists() for name in left)


def test_an_empty_folder_cannot_be_resumed(tmp_path: Path) -> None:
    made = config(tmp_path, "none", epochs=1, name="r")
    made.folder.mkdir()
    with pytest.raises(RunError, match="nothing to resume"):
        sv.fit(made, resume=True)


def test_an_older_folder_gets_the_settings_of_its_time(tmp_path: Path) -> None:
    made = config(tmp_path, "sparse", epochs=1, settings={"sparse_place": "wire"})
    run = sv.fit(made)
    file = run.path / "config.toml"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if "sparse_place" not in line))
    again = sv.load_run(run.path)
    assert flat_config(again.config)["sparse_place"] == "wire"
    own, read = run.model.state_dict(), again.model.state_dict()
    assert own.keys() == read.keys()
    assert all(torch.equal(value, own[key]) for key, value in read.items())


def test_a_run_goes_on_in_the_precision_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = config(tmp_path, epochs=1)
    run = sv.fit(made)
    assert run.config.precision == "float32"
    assert 'precision = "float32"' in (run.path / "config.toml").read_text()
    monkeypatch.setattr(machine, "_cpu_facts", lambda: "flags : avx512_bf16")
    with pytest.raises(CheckpointError, match="precision was 'float32', is 'bf16'; give the set"):
        sv.fit(replace(made, precision="bf16"), resume=True)
    monkeypatch.setenv(machine.PRECISION, "bf16")  # the machine would choose otherwise now
    monkeypatch.setattr(machine, "LEAST_SIDE", 1)
    assert sv.fit(made, resume=True).config.precision == "float32"


def test_a_run_of_0_1_0_was_trained_in_the_usual_precision_of_its_device(tmp_path: Path) -> None:
    run = sv.fit(config(tmp_path, epochs=1))
    file = run.path / "config.toml"
    old = file.read_text().replace('precision = "float32"\n', "")
    for device, precision in (("cpu", "float32"), ("cuda", "bf16")):
        file.write_text(old.replace('device = "cpu"', f'device = "{device}"'))
        assert read_folder(run.path)[0].precision == precision


def test_a_run_is_read_from_inside_its_folder_and_odd_names_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = sv.fit(config(tmp_path, "none", name="inside", epochs=1))
    monkeypatch.chdir(run.path)
    assert sv.load_run(".").config.folder == run.path.resolve()
    odd = run.path.rename(tmp_path / "best model")
    with pytest.raises(RunError, match="got 'best model'; rename the folder"):
        sv.load_run(odd)


def test_overwrite_replaces(tmp_path: Path) -> None:
    for epochs in (2, 1):
        run = sv.fit(config(tmp_path, "none", name="o", epochs=epochs), overwrite=True)
    assert (run.path / "metrics.jsonl").read_text().count("epoch") >= 1
    assert sv.load_run(run.path).config.epochs == 1


def test_a_folder_below_a_file_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write"):
        sv.fit(config(tmp_path / "file"))


def test_an_audit_keeps_a_record_that_says_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = sv.fit(config(tmp_path, "none", epochs=1))

    def kept() -> set[str]:
        return {file.name for file in run.path.glob("record.*.json")}

    first = sv.audit(run, profile="smoke", only=["linear", "nearest"])
    pictures = (run.path / "gallery.json").read_bytes()
    sv.audit(run, profile="smoke", only=["linear", "nearest"])
    assert not kept()  # the same again
    assert "kept" not in caplog.text
    fewer = sv.audit(run, profile="smoke", only=["linear"])
    assert run.record == fewer
    assert kept() == {"record.smoke-train-seed0.json"}
    assert "kept as record.smoke-train-seed0.json" in caplog.text
    again = read_record(run.path / "record.smoke-train-seed0.json")
    assert again.attacks.keys() == first.attacks.keys()
    assert (run.path / "gallery.smoke-train-seed0.json").read_bytes() == pictures
    sv.audit(run, profile="smoke", aux="val", only=["linear"])
    second = kept() - {"record.smoke-train-seed0.json"}
    assert second == {"record.smoke-train-seed0-2.json"}  # the first one says more
    sv.audit(run, profile="smoke", only=["linear", "nearest"])
    sv.audit(run, profile="smoke", aux="val", only=["linear"])
    val = "record.smoke-val-seed0.json"
    assert kept() == {"record.smoke-train-seed0.json", *second, val}  # no copies pile up


def test_a_run_without_write_permission_must_be_copied_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = sv.fit(config(tmp_path, "none", epochs=1))

    def refused(dir: Path, **_: object) -> None:  # the superuser may write everywhere
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(dir))

    monkeypatch.setattr("splitveil.io.TemporaryDirectory", refused)
    with pytest.raises(RunError, match=r"cannot write .* Copy the run's folder .* audit the copy"):
        sv.audit(run, profile="smoke", only=["linear"])


def test_two_audits_of_one_run_do_not_overwrite_each_other(tmp_path: Path) -> None:
    run = sv.fit(config(tmp_path, "none", epochs=1))
    with (
        folder_lock(run.path / "audit", "busy"),
        pytest.raises(RunError, match=r"another process is auditing .*none.* wait"),
    ):
        sv.audit(run, profile="smoke", only=["linear"])
    assert run.record is None
    sv.audit(run, profile="smoke", only=["linear"])
    assert run.record is not None
    assert not list(run.path.glob(".*"))
