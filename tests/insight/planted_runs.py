"""Run folders made by hand for the tuning doctor: sick ones, and the same runs mended."""

import base64
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from splitveil.config.run_config import write_toml
from splitveil.defences.catalogue import find_defence

Json = dict[str, Any]
EPOCHS, STEPS = 20, 10


def healthy_lines(epochs: int = EPOCHS) -> list[Json]:
    """A run that learns, keeps its accuracy and lowers its spread."""
    return [
        {
            "kind": "epoch", "step": STEPS * e, "epoch": e, "lr": 0.1, "weight": 0.3,
            "task_loss": 2.0 / e**3, "train_accuracy": 1 - 0.5 / e,
            "val_accuracy": 0.97 - 0.5 / e**2,
            "rob_loss": 1.0 / e, "intra_mse": 0.1 / e, "effective_sample_size": 0.9,
            "true_rate": 0.6 / e, "surrogate_to_true": 1.01, "skipped": 0, "seconds": float(e),
        }
        for e in range(1, epochs + 1)
    ]  # fmt: skip


def edited(*changes: Mapping[str, Any], last: int = EPOCHS, epochs: int = EPOCHS) -> list[Json]:
    """Healthy lines, the last ones changed; a value may be a function of the epoch."""
    lines = healthy_lines(epochs)
    for line in lines[-last:]:
        for key, value in (pair for change in changes for pair in change.items()):
            line[key] = value(line["epoch"]) if callable(value) else value
    return lines


def without_penalty(lines: list[Json]) -> list[Json]:
    gone = ("rob_loss", "intra_mse", "effective_sample_size", "true_rate", "surrogate_to_true")
    return [{k: v for k, v in line.items() if k not in gone} | {"weight": 0.0} for line in lines]


def plant(
    folder: Path, defence: str = "veil", lines: list[Json] | None = None,
    record: Json | None = None, beside: "Mapping[str, Plan] | None" = None,
    **settings: Any,  # noqa: ANN401
) -> Path:  # fmt: skip
    """A run folder made by hand, and others beside it by name."""
    folder.mkdir(parents=True)
    for name, plan in (beside or {}).items():
        if not (folder.parent / name).exists():
            plant(folder.parent / name, **plan)
    noise = {"noise_std": 0.05} if find_defence(defence).noisy else {}
    flat = {
        "dataset": "digits", "defence": defence, "epochs": EPOCHS, "batch_size": 128, "lr": 0.1,
        "net": "small", "split_seed": 0,
    }  # fmt: skip
    built = {"image_shape": [1, 8, 8], "num_classes": 10, "data_hash": "made"}
    (folder / "config.toml").write_text(write_toml(flat | noise | built | settings))
    text = "".join(json.dumps(line) + "\n" for line in lines or healthy_lines())
    (folder / "metrics.jsonl").write_text(text)
    if record is not None:
        (folder / "record.json").write_text(json.dumps(record))
    return folder


def open_slots(shut: float, hard: float = 0.3, soft: float = 0.3) -> Json:
    return {"shut": shut, "hard_gate": hard, "soft_gate": soft}


Plan = dict[str, Any]


def judged(accuracy: float, defence: str, **more: Any) -> Json:  # noqa: ANN401
    """A record of a B1 client on 4,000 test images."""
    return {
        "accuracy": accuracy, "strongest": {"mse": 0.01}, "leakage": 0.8, "flags": [],
        "client": {"macs": 900_000, "params": 12_000, "wire_floats": 64},
        "config": {"dataset": "digits", "defence": defence, "net": "small", "send": 0.2},
        "splits": {"test": "t"}, "audit": {"aux": "train", "scored": 4000},
    } | more  # fmt: skip


NEEDLESS = {
    "name": "server not needed",
    "seen": "a linear head on what is sent answers 94.90 %; the server adds +0.10 points, at most "
    "+0.40",
}
SILENT: Plan = {
    "defence": "alone",
    "record": judged(0.90, "alone", sent=0.0, exposure=0.0),
}
EXIT: Plan = {
    "defence": "early-exit",
    "record": judged(0.949, "early-exit", sent=0.2, exposure=0.16),
}
OWN_HEAD = np.packbits(np.arange(4000) < 0.92 * 4000).tobytes()  # answers 92 % of the images
TEACHES: Plan = {
    "defence": "early-exit",
    "record": judged(0.949, "early-exit", sent=0.2, exposure=0.16)
    | {"per_image": {"own_right": base64.b64encode(OWN_HEAD).decode("ascii")}},
}
ZERO: Json = {"rob_loss": 0.0, "true_rate": 0.01}
SHUT = open_slots(1.0, hard=0.96)

# rule, sick run, the same run mended, words of what was seen, words of the advice
PLANTED: list[tuple[str, Plan, Plan, str, str]] = [
    (
        "run not converged",
        {"lines": healthy_lines(8)},
        {},
        "stopped after epoch 8 of 20",
        "--resume",
    ),
    (
        "run not converged",
        {"lines": edited({"task_loss": lambda e: 2 * 0.9**e})},
        {"lines": edited({"task_loss": lambda e: 0.5 + 2 * 0.5**e})},
        "fell by 10 % per epoch",
        "epochs 20 → 30",
    ),
    (
        "accuracy at chance",
        {"lines": edited({"val_accuracy": 0.1, "train_accuracy": 0.11}), "ramp": 0.0},
        {},
        "10.0 % is no better than guessing (10.0 %), with a penalty of weight 0.3",
        "ramp 0 → 0.5",
    ),
    (
        "accuracy at chance",
        {"lines": edited({"val_accuracy": 0.1, "train_accuracy": 0.11}), "ramp": 0.5},
        {"lines": edited({"val_accuracy": 0.25, "train_accuracy": 0.3}), "ramp": 0.5},
        "guessing",
        "lambd 0.3 → 0.03",
    ),
    (
        "accuracy lost",
        {"defence": "gated-att", "lines": edited({"val_accuracy": 0.9}, last=3)},
        {"defence": "gated-att", "lines": edited({"val_accuracy": 0.96}, last=3)},
        "fell from 96.8 to 90.0 %",
        "attention_loss_scale 0.1 → 0.05; var_threshold 0.125 → 0.5",
    ),
    (
        "accuracy lost",
        {"lines": edited({"val_accuracy": 0.9}, last=3), "ramp": 0.0},
        {},
        "fell from",
        "attention_loss_scale 1 → 0.5; ramp 0 → 0.5",
    ),
    (
        "rob_loss stuck at 0",
        {"defence": "gated-att", "lines": without_penalty(healthy_lines()),
         "attention_warmup_epochs": 20},
        {"defence": "gated-att", "attention_warmup_epochs": 5},
        "starts in epoch 21, the run has 20",
        "attention_warmup_epochs 20 → 5",
    ),
    (
        "rob_loss stuck at 0",
        {"lines": without_penalty(healthy_lines()), "lambd": 0.0},
        {"lambd": 0.3},
        "switched off",
        "set lambd",
    ),
    (
        "rob_loss stuck at 0",
        {"defence": "slot-cross", "lines": edited(ZERO, SHUT), "early_shut_steps": 1000},
        {"defence": "slot-cross", "lines": edited(open_slots(0.0)), "early_shut_steps": 100},
        "early_shut_steps keeps the penalty off, step 200 of 1000",
        "early_shut_steps 1000 → 20",
    ),
    (
        "rob_loss stuck at 0",
        {"defence": "slot-cross",
         "lines": edited(open_slots(0.0), last=20)[:10] + edited(ZERO, SHUT, last=10)[10:]},
        {"defence": "slot-cross", "lines": edited(open_slots(0.0))},
        "again at the end: the rule early_hard_thresh shut the penalty off",
        "early_hard_thresh 0.5 → 1",
    ),
    (
        "rob_loss stuck at 0",
        {"defence": "gated-att-simple",
         "lines": edited({"rob_loss": 0.0, "intra_mse": 1e-4}, last=6),
         "var_threshold": 1.0},
        {"defence": "gated-att-simple", "var_threshold": 0.02},
        "since epoch 15: every variance is under the threshold var_threshold·noise_std² = 0.0025",
        "var_threshold 1 → 0.02",  # half of intra_mse 1e-4 over 0.05²
    ),
    (
        "shut-off never opens",
        {"defence": "slot-cross", "lines": edited(ZERO, SHUT)},
        {"defence": "slot-cross", "lines": edited(SHUT, {"shut": lambda e: float(e < 12)})},
        "all 20 epochs after the warm-up by the rule early_hard_thresh: the gate's mean is 0.96",
        "early_hard_thresh 0.5 → 1",
    ),
    (
        "shut-off never opens",
        {"defence": "slot-cross", "lines": edited(ZERO, open_slots(1.0, hard=0.2, soft=0.71))},
        {"defence": "slot-cross", "lines": edited(open_slots(0.0, hard=0.2, soft=0.5))},
        "after the warm-up by the rule early_gate_thresh",
        "early_gate_thresh 0.6 → 0.75",
    ),
    (
        "too few per class",
        {"num_classes": 100, "batch_size": 128},
        {"num_classes": 100, "batch_size": 128, "bank": 64},
        "1.3 samples per class",
        "batch_size 128 → 800, or bank 0 → 64",
    ),
    (
        "too few per class",
        {"defence": "gated-att", "num_classes": 10, "class_gate_a": 40.0, "class_gate_b": 0.2},
        {"defence": "gated-att", "num_classes": 10, "class_gate_a": 10.0, "class_gate_b": 0.2},
        "the class gate lets 2 % through at p_c = 0.1",  # 1/(1 + e⁴) = .018
        "class_gate_a 40 → 10 or class_gate_b → 0.1",
    ),
    (
        "values not finite",
        {"lines": edited({"skipped": 7}, last=2)},
        {},
        "left out 7 times in 200 steps",
        "lambd 0.3 → 0.15 or lr 0.1 → 0.05; if it goes on, look for NaN in the images",
    ),
    (
        "estimator collapsed",
        {"defence": "gated-att", "lines": edited({"surrogate_to_true": 0.2})},
        {"defence": "gated-att", "lines": edited({"surrogate_to_true": 0.6})},
        "reports 20 % of the true rate",
        "attention minimise → maximise and statistic=raw",
    ),
    (
        "estimator collapsed",
        {"defence": "cem", "lines": edited({"surrogate_to_true": 0.3})},
        {"defence": "cem"},
        "30 %",
        "clusters 5 → 2",
    ),
    (
        "attention uniform",
        {"lines": edited({"effective_sample_size": 0.999})},
        {"lines": edited({"effective_sample_size": lambda e: 0.999 if e > 9 else 0.95})},
        "never fell below 0.999",
        "attention_lr 0.001 → 0.01",
    ),
    (
        "attention one-hot",
        {"lines": edited({"effective_sample_size": 0.09}, last=3)},
        {"lines": edited({"effective_sample_size": 0.13}, last=3)},  # 1.5/12.8 = .117
        "0.090 of a class's samples",
        "attention_lr 0.001 → 0.0001",
    ),
    (
        "classes still scattered",
        {"defence": "gated-att", "lines": edited({"intra_mse": 0.1})},
        {"defence": "gated-att", "lines": edited({"intra_mse": lambda e: 0.1 if e < 9 else 0.05})},
        "from 0.1 to 0.1",
        "slot-cross (num_slots 8)",
    ),
    (
        "classes still scattered",
        {"lines": edited({"intra_mse": 0.1})},
        {"lines": edited({"intra_mse": lambda e: 0.1 if e < 9 else 0.05})},
        "from 0.1 to 0.1",
        "epochs 20 → 40, since the penalty needs time at full weight; else lambd 0.3 → 0.6",
    ),
    (
        "noise too small",
        {"record": {"true_rate_nats": 64 * 0.5 * math.log(5), "client": {"wire_floats": 64}}},
        {"record": {"true_rate_nats": 64 * 0.3, "client": {"wire_floats": 64}}},
        "0.80 nats per dimension",
        "noise_std 0.05 → 0.1 or lambd 0.3 → 0.6",  # signal is four times the noise
    ),
    (
        "noise too small",
        {"defence": "cem", "noise_std": 0.0},
        {"defence": "cem"},
        "noise_std is 0",
        "noise_std 0 → 0.05",
    ),
    (
        "server not needed",
        {"record": judged(0.885, "veil"), "beside": {"alone": SILENT}},
        {"record": judged(0.95, "veil"), "beside": {"alone": SILENT}},
        "the client alone alone answers 90.00 %; the server adds -1.50 points",
        "ship the client alone: /",
    ),
    (
        "server not needed",
        {"record": judged(0.905, "veil"), "beside": {"alone": SILENT, "exit": TEACHES}},
        {"record": judged(0.98, "veil"), "beside": {"alone": SILENT, "exit": TEACHES}},
        "the client alone exit (0 % sent) answers 92.00 %; the server adds -1.50 points",
        "exit alone: export it, and run it with --never-ask",
    ),
    (
        "server not needed",
        {"record": judged(0.95, "veil", flags=[NEEDLESS])},
        {"record": judged(0.95, "veil")},
        "a linear head on what is sent answers 94.90 %; the server adds +0.10 points",
        "train it with --defence alone",
    ),
    (
        "sends what it is sure of",
        {"record": judged(0.95, "veil"), "beside": {"alone": SILENT, "exit": EXIT}},
        {"record": judged(0.97, "veil"), "beside": {"alone": SILENT, "exit": EXIT}},
        "exit sends 20 % of the images and answers 94.9 %, this run sends all and answers 95.0 %: "
        "exposure 16 % instead of 80 %",
        "send only what it is unsure of: --defence early-exit --set send=0.2",
    ),
]  # fmt: skip
