"""Run folders, records and an export that 0.1.0 wrote open and answer."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from golden.face import OLD, command, differences, told
from golden.outputs import client_facts, copied
from torch import Tensor

import splitveil as sv
from splitveil.serve.manifest import read_manifest

NAMES = ("none", "gated-att", "veil")
EXPECTED: dict[str, Any] = json.loads((OLD / "expected.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def images() -> Tensor:
    return sv.data.load("digits").images[:8].float() / 255


@pytest.mark.parametrize("name", NAMES)
def test_a_run_opens_and_answers(name: str, images: Tensor) -> None:
    run = sv.load_run(OLD / name)
    with torch.no_grad():
        logits = run.model.head(run.model.encoder(images))
    torch.testing.assert_close(logits, torch.tensor(EXPECTED[name]["logits"]), atol=1e-4, rtol=0)
    assert run.config.defence == run.config.name == name
    assert run.noise_std == (0.0 if name == "none" else 0.05)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_gives_its_record(name: str) -> None:
    record = sv.load_run(OLD / name).record
    assert record is not None
    stored = json.loads((OLD / name / "record.json").read_text(encoding="utf-8"))
    assert not list(differences(stored, record.to_dict()))


@pytest.mark.parametrize("how", ["command", "call"])
def test_a_run_that_was_stopped_goes_on(how: str, tmp_path: Path, images: Tensor) -> None:
    place = copied("veil", tmp_path)
    if how == "command":
        said = command("train", "--resume", "--name", "veil", "--runs-dir", tmp_path)
        assert said.code == 0, said.err
    else:
        sv.fit(sv.load_run(place).config, resume=True)
    lines = [json.loads(s) for s in (place / "metrics.jsonl").read_text().splitlines()]
    old = EXPECTED["veil"]["last_epoch"]
    assert list(lines[-1]) == list(old)
    assert [line["epoch"] for line in lines] == list(range(1, old["epoch"] + 1))
    assert lines[-1]["kind"] == old["kind"]
    for key in old.keys() - {"kind", "seconds"}:
        # What is scheduled is exact, what is measured is nearly the same on every machine.
        near = 1e-9 if key in ("step", "epoch", "lr", "weight", "skipped") else 0.02
        assert lines[-1][key] == pytest.approx(old[key], rel=near, abs=1e-9), key
    assert sv.load_run(place).model.encoder(images).shape == (8, 1, 4, 4)
    assert (place / "record.unfinished.json").is_file()
    assert not (place / "record.json").exists()


def test_settings_of_a_run_are_written_as_they_were(tmp_path: Path) -> None:
    """A training with the settings of a stored run writes its config.toml, and later settings."""
    old = (OLD / "gated-att" / "config.toml").read_text(encoding="utf-8")
    config = tmp_path / "config.toml"
    kept = [s for s in old.splitlines() if not s.startswith(("image_", "num_classes", "data_hash"))]
    config.write_text("\n".join(kept), encoding="utf-8")
    said = command("train", "--config", config, "--runs-dir", tmp_path)
    assert said.code == 0, said.err
    new = (tmp_path / "gated-att" / "config.toml").read_text(encoding="utf-8")
    own = old.replace('runs_dir = "runs"', f'runs_dir = "{tmp_path}"')
    later = ("precision = ", "nesterov = ", "flips = ")
    assert [line for line in new.splitlines() if not line.startswith(later)] == own.splitlines()


def test_runs_compare_and_report(tmp_path: Path) -> None:
    runs = [OLD / name for name in NAMES]
    said = command("compare", *runs)
    assert said.code == 0, said.err
    assert all(name in said.out for name in NAMES)
    found = told("report", *runs, "--out", tmp_path)
    assert list(found) == [str(run) for run in runs]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert all(name in page for name in NAMES)


def test_an_export_serves_and_answers(tmp_path: Path, images: Tensor) -> None:
    export = shutil.copytree(OLD / "export", tmp_path / "export")
    manifest = read_manifest(export)
    assert (manifest.name, manifest.image_shape) == ("gated-att", (1, 8, 8))
    old = json.loads((OLD / "export.json").read_text(encoding="utf-8"))
    new = client_facts(export, images.numpy())
    assert old.pop("noise_moves") > 0
    assert 0 < new.pop("noise_moves") < 5
    assert not list(differences(old, new, rel=1e-4))
    answered = torch.tensor(new["answered"]["outputs"][0]["data"]).reshape(8, 10)
    stored = torch.tensor(EXPECTED["gated-att"]["logits"])
    torch.testing.assert_close(answered, stored, atol=1e-4, rtol=0)
