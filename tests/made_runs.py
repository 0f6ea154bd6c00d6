"""Run folders made by hand: records, logs and galleries with digits-like or RGB pictures."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitveil.record.files import RunFiles

Json = dict[str, Any]
ATTACKS = ("mean", "class-mean", "linear", "decoder")
CEILING, FLOOR = 0.0493, 0.0712
STRENGTH: dict[str, tuple[float, float, float]] = {  # accuracy, linear MSE, decoder MSE
    "none": (0.9861, 0.0123, 0.00052),
    "gated-att": (0.9806, 0.0312, 0.0271),
    "veil": (0.9778, 0.0489, 0.0462),
}


def make_record(defence: str, seed: int = 0) -> Json:
    """A record as an audit writes it, with a key nobody knows."""
    accuracy, linear, decoder = STRENGTH[defence]
    mses = dict(zip(ATTACKS, (FLOOR, CEILING + 0.0004, linear, decoder), strict=True))
    access = dict(zip(ATTACKS, ("none", "none", "black-box", "black-box"), strict=True))
    attacks = {name: {**scores(mses[name]), "access": access[name]} for name in ATTACKS}
    return {
        "accuracy": accuracy,
        "attacks": attacks,
        "strongest": {**scores(decoder), "mse_by": "decoder", "ssim_by": "decoder"},
        "worst_case": {"mse": 0.9 * decoder, "psnr": 21.0, "ssim": 0.6, "mse_q01": 0.001},
        "ceiling": {"mse": CEILING},
        "floor": {"mse": FLOOR},
        "leakage": 1 - decoder / CEILING,
        "true_rate_nats": None if defence == "none" else 12.345,
        "client": {"macs": 1234567, "params": 4321, "wire_floats": 128},
        "config": {"dataset": "digits", "defence": defence, "seed": seed, "noise_std": 0.05},
        "splits": {"train": "a1b2c3", "val": "d4e5f6", "test": "0718aa"},
        "seeds": {"train": seed, "attack": 0},
        "versions": {"splitveil": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
        "device": "cpu",
        "seconds": {"train": 12.5, "audit": 31.25},
        "audit": {"profile": "quick", "aux": "train", "scored": 360},
        "training": {"best_epoch": 58},
        "from_the_future": [1, {"x": None}],
    }


def rich_record(defence: str, seed: int = 0) -> Json:
    """A record with flags, certificates and leaks beyond pixels."""
    bare = defence == "none"
    refused = {"refused": "no certificate: the channel is deterministic; add Gaussian noise"}
    return make_record(defence, seed) | {
        "flags": [
            {
                "name": "linearly invertible",
                "seen": "ridge regression has MSE 0.0005",
                "advice": "treat the client as sending the image itself",
            }
        ]
        if bare
        else [],
        "certificates": dict.fromkeys(("capacity", "gallery", "population"), refused)
        if bare
        else {
            "capacity": {"nats": 44.36, "dims": 64},
            "gallery": {
                "nats": 5.25,
                "vacuous": True,
                "nats_given_class": 2.5,
                "identification_error": {"at_least": 0.125},
                "doubles": {"repeats": 9},
            },
            "population": {"nats": 7.75, "nats_given_class": 5.5},
        },
        "leaks": {
            "re-id": {"wire": {"rank_1": 0.5}, "decoder/mse": {"rank_1": 0.25}},
            "membership": {
                "strongest": {"outputs": "loss", "wire": "distance"},
                "outputs": {"loss": {"auc": 0.625}},
                "wire": {"distance": {"auc": 0.5}},
            },
            "attribute": {"side": {"beyond_answer": 0.125}},
        },
    }


def scores(mse: float) -> Json:
    return {
        "mse": mse,
        "psnr": -10 * float(np.log10(mse)) + 0.4,
        "psnr_pooled": -10 * float(np.log10(mse)),
        "ssim": 1 - 9 * mse,
        "ssim_zeropad": 1 - 10 * mse,
        "seconds": 1.25,
    }


def make_metrics(defence: str, epochs: int = 20) -> str:
    """A log with step lines between, as the loop writes it."""
    lines: list[Json] = []
    for epoch in range(1, epochs + 1):
        lines.append({"kind": "step", "epoch": epoch, "task_loss": 1 / epoch})
        entry: Json = {"kind": "epoch", "epoch": epoch, "step": 10 * epoch, "task_loss": 1 / epoch}
        entry |= {"train_accuracy": 1 - 0.5 / epoch, "val_accuracy": 0.98 - 0.5 / epoch}
        if defence != "none":
            entry |= {"rob_loss": 2 / epoch, "intra_mse": 0.1 + 1 / epoch, "true_rate": None}
            entry["effective_sample_size"] = 0.5 + 0.4 * epoch / epochs
        lines.append(entry)
    return "".join(json.dumps(line) + "\n" for line in lines)


def encode(images: NDArray[np.floating]) -> str:
    pixels = (np.clip(images, 0, 1) * 255).round().astype(np.uint8)
    return base64.b64encode(pixels.tobytes()).decode()


def make_gallery(
    defence: str, shape: tuple[int, int, int] = (1, 8, 8), first: int = 0, n: int = 8
) -> Json:
    """Smooth blobs as originals; stronger attacks blur and darken them less."""
    rng = np.random.default_rng(first)
    c, h, w = shape
    rows, cols = np.mgrid[0:h, 0:w] / max(h, w)
    centres = rng.uniform(0.2, 0.8, (n, c, 2))
    near = (rows - centres[..., 0, None, None]) ** 2 + (cols - centres[..., 1, None, None]) ** 2
    x = np.exp(-12 * near) * (0.7 + 0.3 * np.sin(20 * rows))
    keep = {"none": 0.95, "gated-att": 0.5, "veil": 0.08}[defence]
    mean = np.broadcast_to(x.mean(0), x.shape)
    guesses = {"linear": 0.8 * keep * x + (1 - 0.8 * keep) * mean}
    guesses["decoder"] = keep * x + (1 - keep) * mean
    names = [str(i) for i in range(10)] if c == 1 else ["airplane", "automobile", "bird", "cat"]
    labels = [int(i) for i in rng.integers(0, len(names), n)]
    answers = [*labels[:-1], (labels[-1] + 1) % len(names)]
    errors = {
        name: [float(e) for e in ((g - x) ** 2).mean((1, 2, 3))] for name, g in guesses.items()
    }
    return {
        "image_shape": list(shape),
        "indices": list(range(first, first + n)),
        "labels": labels,
        "answers": answers,
        "classes": names,
        "original": encode(x),
        "reconstructions": {name: encode(g) for name, g in guesses.items()},
        "mse": errors,
    }


def write_run(folder: Path, record: Json | None, metrics: str | None, gallery: Json | None) -> Path:
    folder.mkdir(parents=True)
    if record is not None:
        (folder / "record.json").write_text(json.dumps(record))
    if metrics is not None:
        (folder / "metrics.jsonl").write_text(metrics)
    if gallery is not None:
        (folder / "gallery.json").write_text(json.dumps(gallery))
    return folder


MakeRun = Callable[..., RunFiles]
