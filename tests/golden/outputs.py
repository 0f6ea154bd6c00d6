"""What the goldens ask of the package: commands with `--json`, fresh audits, a server that runs."""

import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from golden.face import OLD, command, facts, told
from numpy.typing import NDArray

import splitveil as sv
from splitveil.serve.client import Client

Json = dict[str, Any]

# Of the repository's root; every value is the same on every machine.
OUTPUTS: dict[str, tuple[str, ...]] = {
    "datasets": ("datasets",),
    "defences": ("defences",),
    "attacks": ("attacks",),
    "recipes": ("recipes",),
    "clients": ("clients", "--macs", "21e6", "--wire", "512", "--limit", "12"),
    "clients-small": (
        "clients", "--macs", "4e4", "--wire", "16", "--image", "1x8x8", "--limit", "9",
    ),
    "clients-family": (
        "clients", "--macs", "5e6", "--wire", "256", "--params", "60000", "--family", "residual",
        "--image", "3x64x64", "--limit", "9",
    ),
    "cuts-vgg11": ("clients", "--macs", "4e7", "--wire", "9999", "--backbone", "vgg11"),
    "cuts-resnet20": (
        "clients", "--macs", "2e7", "--wire", "4096", "--backbone", "resnet20", "--classes", "7",
    ),
    "compare-digits": ("compare", "results/digits", "--against", "none"),
    "compare-laws": ("compare", "results/digits-laws"),
    "compare-threads": ("compare", "results/digits-threads"),
    "compare-cifar10": ("compare", "results/cifar10", "--published", "results/published.json"),
    "compare-reported": ("compare", "results/cifar10-seed-003", "results/cifar10-table1"),
    "doctor-none": ("doctor", "tests/golden/v0_1_0/none"),
    "doctor-veil": (
        "doctor", "tests/golden/v0_1_0/veil", "--plain", "tests/golden/v0_1_0/none",
    ),
}  # fmt: skip

ENCODER = '''"""A client and a server in NumPy."""

import numpy as np


def send(x):
    z = x.reshape(len(x), 4, 2, 4, 2).mean(axis=(2, 4)).reshape(len(x), 16)
    return z + 0.05 * np.random.standard_normal(z.shape)


def answer(z):
    return z[:, :10].argmax(1)
'''


def copied(name: str, folder: Path, *, audited: bool = True) -> Path:
    """A run of 0.1.0 that may be changed, with or without its record."""
    place = folder / name
    shutil.copytree(OLD / name, place)
    if not audited:
        (place / "record.json").unlink()
        (place / "gallery.json").unlink()
    return place


def audits_of(folder: Path) -> dict[str, Json]:
    """Fresh records with the smoke profile: of a run, of an encoder, of what a client sent."""
    run = copied("gated-att", folder / "fresh", audited=False)
    (folder / "golden_encoder.py").write_text(ENCODER, encoding="utf-8")
    made = {"run": sv.load_run(run).audit("smoke").to_dict()}
    commands = {
        "encoder": (
            "audit-encoder", "golden_encoder:send", "--data", "digits", "--server",
            "golden_encoder:answer", "--noise", "0.05",
        ),
        "capture": ("audit-wire", run, OLD / "sent.jsonl"),
    }  # fmt: skip
    with chdir(folder):
        for name, words in commands.items():
            said = command(*words, "--profile", "smoke", "--out", folder / name)
            assert said.code == 0, said.err
            made[name] = json.loads((folder / name / "record.json").read_text(encoding="utf-8"))
    return made


def key_facts(folder: Path) -> Json:
    """Keys and types of what commands print that train, measure or draw."""
    runs = folder / "keys"
    short = ("--dataset", "digits", "--epochs", "1", "--device", "cpu")
    run = copied("veil", runs)
    made = {
        "train": told("train", *short, "--defence", "veil", "--name", "t", "--runs-dir", runs),
        "audit": told("audit", runs / "t", "--profile", "smoke", "--attacks", "linear"),
        "explain": told("explain", run, "--out", runs / "explained"),
        "report": next(iter(told("report", run, "--out", runs / "page").values())),
    }  # fmt: skip
    return facts(made)


@contextmanager
def serving(export: Path) -> Iterator[str]:
    """The address of `splitveil serve` in a process of its own."""
    words = [sys.executable, "-m", "splitveil", "serve", str(export), "--port", "0", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        text = ""
        while "}" not in text:
            line = process.stdout.readline()
            assert line, "the server ended before it was ready"
            text += line
        try:
            yield json.loads(text)["url"]
        finally:
            process.terminate()


def client_facts(export: Path, images: NDArray[np.float32]) -> Json:
    """What the client's file computes of images without noise, and what the server answers."""
    import onnxruntime  # type: ignore[import-untyped]

    session = onnxruntime.InferenceSession(str(export / "client.onnx"))
    (z,) = session.run(None, {session.get_inputs()[0].name: images})
    manifest = json.loads((export / "manifest.json").read_text(encoding="utf-8"))
    with serving(export) as url:
        with urllib.request.urlopen(f"{url}/v2/models/{manifest['name']}") as reply:  # noqa: S310
            metadata = json.load(reply)
        tensor = {
            "name": metadata["inputs"][0]["name"], "shape": list(z.shape), "datatype": "FP32",
            "data": [float(v) for v in z.ravel()],
        }  # fmt: skip
        request = urllib.request.Request(  # noqa: S310
            f"{url}/v2/models/{manifest['name']}/infer",
            data=json.dumps({"inputs": [tensor]}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as reply:  # noqa: S310
            answered = json.load(reply)
        with Client(export, url) as client:
            noisy = client.infer(images)
    apart = float(
        np.abs(noisy - np.array(answered["outputs"][0]["data"]).reshape(len(z), -1)).max()
    )
    return {"metadata": metadata, "sent": z.tolist(), "answered": answered, "noise_moves": apart}
