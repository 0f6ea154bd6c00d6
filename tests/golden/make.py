"""How the stored goldens were made, with the code of 0.1.0: `python tests/golden/make.py`.

They are not made again: a test that fails tells of a change, and only a change that was meant may
alter the stored value by hand.
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from golden.face import GOLDEN, OLD, ROOT, command, facts, told
from golden.outputs import OUTPUTS, audits_of, client_facts, key_facts, serving
from insight.planted_runs import PLANTED, plant

import splitveil as sv
from splitveil.serve.client import Client

sys.path.insert(0, str(Path(__file__).parents[1]))

EPOCHS = 8
NET = "client:strided-8s2-8x4-c1"
RUNS: dict[str, dict[str, Any]] = {
    "none": {"momentum": 0.0},
    "gated-att": {"momentum": 0.0, "settings": {"attention_warmup_epochs": 0}},
    "veil": {},
}
KEPT = ("config.toml", "checkpoint.safetensors", "metrics.jsonl", "record.json", "gallery.json")


class StoppedError(Exception):
    """The training is stopped half way."""


def halfway(done: int, total: int, note: str = "") -> None:
    """Stop after half of the epochs."""
    if done * 2 > total:
        raise StoppedError(note)


def dump(path: Path, value: Any) -> None:  # noqa: ANN401 - any JSON value
    """Write JSON that git can show."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def answers(run: sv.Run, images: torch.Tensor) -> list[list[float]]:
    """Logits without noise."""
    with torch.no_grad():
        logits: torch.Tensor = run.model.head(run.model.encoder(images))
    return [[float(v) for v in row] for row in logits]


def make_runs(images: torch.Tensor) -> None:
    """Three run folders: two whole ones, and one stopped half way."""
    expected: dict[str, Any] = {}
    for name, settings in RUNS.items():
        config = sv.RunConfig(
            dataset="digits", defence=name, name=name, epochs=EPOCHS, net=NET, device="cpu",
            runs_dir="runs", **settings,
        )  # fmt: skip
        whole = sv.fit(config)
        last = [json.loads(s) for s in (whole.path / "metrics.jsonl").read_text().splitlines()][-1]
        if name == "veil":
            shutil.rmtree(whole.path)
            try:
                sv.fit(config, progress=halfway)
            except StoppedError:
                print("veil stopped")
        run = sv.load_run(whole.path)
        run.audit("smoke")
        expected[name] = {"logits": answers(run, images), "last_epoch": last}
        (OLD / name).mkdir(parents=True)
        for file in KEPT:
            shutil.copy(run.path / file, OLD / name / file)
    dump(OLD / "expected.json", expected)


def without_paths(export: Path) -> None:
    """Take out the exporter's stack traces, which name folders, and Triton's copy of a half."""
    shutil.rmtree(export / "repository")
    manifest = json.loads((export / "manifest.json").read_text(encoding="utf-8"))
    manifest["files"] = {}
    for half in ("client.onnx", "server.onnx"):
        model = onnx.load(export / half)
        for node in [*model.graph.node, *(n for f in model.functions for n in f.node)]:
            del node.metadata_props[:]
        onnx.save(model, export / half)
        digest = hashlib.sha256((export / half).read_bytes()).hexdigest()
        manifest["files"][half] = digest
    (export / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def make_export(images: torch.Tensor) -> None:
    """Both halves of a run in service, and what one client sent."""
    said = command("export", OLD / "gated-att", "--out", OLD / "export")
    assert said.code == 0, said.err
    without_paths(OLD / "export")
    data = sv.data.load("digits")
    splits = sv.data.make_splits(data, split_seed=0, held_out=0.0, final=False)
    scored = data.labelled(sv.data.aux_view(data, splits, "train").scored).images
    with (
        serving(OLD / "export") as url,
        Client(OLD / "export", url, capture=OLD / "sent.jsonl") as client,
    ):
        client.infer(scored.numpy())
    session = client_facts(OLD / "export", images.numpy())
    dump(OLD / "export.json", session)


def main() -> None:
    """Make everything anew; refuses to touch what is there."""
    torch.set_num_threads(1)
    if OLD.exists():
        raise SystemExit(f"{OLD} is there; remove it first")
    images = sv.data.load("digits").images[:8]
    images = images.float() / (255 if images.dtype == torch.uint8 else 1)
    np.testing.assert_array_less(images.numpy(), 1.0001)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        make_runs(images)
        make_export(images)
        os.chdir(ROOT)
        for name, words in OUTPUTS.items():
            dump(GOLDEN / "json" / f"{name}.json", told(*words))
        dump(GOLDEN / "json_keys.json", key_facts(Path(folder)))
        records = audits_of(Path(folder))
        dump(GOLDEN / "audits.json", {name: facts(record) for name, record in records.items()})
        planted = {}
        for i, (rule, sick, *_) in enumerate(PLANTED):
            place = plant(Path(folder) / f"sick{i}", **sick)
            files = {file.name: file.read_text() for file in sorted(place.iterdir())}
            found = told("doctor", place)
            del found["run"]
            planted[f"{i}: {rule}"] = {"files": files, "doctor": found}
        dump(GOLDEN / "doctor.json", planted)


if __name__ == "__main__":
    main()
