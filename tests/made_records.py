"""Records as an audit writes them, in rows."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from splitveil.record.groups import Group
from splitveil.record.schema import Record


def record(
    accuracy: float = 0.9,
    mse: float = 0.05,
    *,
    seed: int = 0,
    attack: int = 0,
    net: str = "thin-resnet",
    macs: int = 19_873_792,
    dataset: str = "cifar10",
    **audit: str | bool,
) -> dict[str, Any]:
    return {
        "accuracy": accuracy,
        "strongest": {
            "mse": mse,
            "mse_by": "decoder",
            "ssim": 0.25,
            "ssim_zeropad": 0.4,
            "psnr_pooled": 13.0,
        },
        "worst_case": {"mse": 0.04},
        "ceiling": {"mse": 0.0574},
        "leakage": 0.125,
        "true_rate_nats": None,
        "client": {"macs": macs, "wire_floats": 512},
        "seconds": {"train": 61.5},
        "seeds": {"train": seed, "attack": attack},
        "config": {"net": net, "dataset": dataset, "defence": "veil", "epochs": 80},
        "audit": {"profile": "standard", "aux": "train", "scored": 10_000} | audit,
        "splits": {"scored": "abc"},
        "attacks": {"decoder": {"accuracy": 0.26}},
        "flags": [],
    }


def put(folder: Path, what: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    file = folder / "record.json"
    file.write_text(json.dumps(what), encoding="utf-8")
    return file


def grouped(name: str, seeds: Iterable[Iterable[dict[str, Any]]]) -> Group:
    """A row of records by training seed."""
    return Group(name, tuple(tuple(map(Record.from_dict, seed)) for seed in seeds))


def one(name: str, what: dict[str, Any] | None = None) -> Group:
    return grouped(name, [[record() if what is None else what]])


def trained(seed: int = 0, **settings: str | float) -> dict[str, Any]:
    made = record(seed=seed)
    return made | {"config": made["config"] | settings}
