"""What a sweep found, as JSON: the front, hypervolumes, and the best of each defence."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from splitveil.errors import RunError
from splitveil.sweep.journal import Entry
from splitveil.sweep.pareto import (
    DRAWS,
    LEVEL,
    Point,
    front,
    hypervolume_interval,
    most_private,
)
from splitveil.sweep.trial import TRIALS, Plan, chosen_attacks, unpack
from splitveil.types import Json

FILE = "result.json"
LOSS = 0.01  # accuracy that privacy may cost: one point
UNDEFENDED = "none"
_ROUNDING = 1e-9


def point(entry: Entry) -> Point:
    """Accuracy and leakage of a trial that came to its end."""
    if entry.found is None:
        raise RunError(f"trial {entry.task.key} failed and has no numbers: {entry.error}")
    return float(entry.found["accuracy"]), max(float(entry.found["leakage"]), 0.0)


def row(entry: Entry, folder: Path) -> Json:
    """One finished trial."""
    found = {k: v for k, v in (entry.found or {}).items() if k != "classes"}
    said = {
        "trial": entry.task.key, "defence": entry.defence, "settings": dict(entry.settings),
        "seed": entry.seed, "seconds": entry.seconds,
    }  # fmt: skip
    if entry.found is None:
        return said | {"error": entry.error}
    return said | found | {"run": str(folder / TRIALS / str(entry.run))}


def summarise(plan: Plan, entries: Sequence[Entry], folder: Path) -> Json:
    """Everything a sweep has to say; refused where no trial came to its end."""
    place = {name: i for i, name in enumerate(plan.defences)}
    entries = sorted(entries, key=lambda e: (e.number, place[e.defence]))
    good = [e for e in entries if e.found is not None]
    if not good:
        told = "; ".join(f"{e.task.key}: {e.error}" for e in entries[:3])
        raise RunError(f"no trial came to an end: {told}; mend that, and try again with --resume")
    points = [point(e) for e in good]
    chance = 1.0 / int((good[0].found or {})["classes"])
    reference = _reference(good)
    least = reference["accuracy"] - LOSS - _ROUNDING
    marks = front(points)
    best = {}
    for name in plan.defences:
        own = [e for e in good if e.defence == name]
        found = most_private([point(e) for e in own], least)
        best[name] = {
            "trials": sum(e.defence == name for e in entries),
            "failed": sum(e.defence == name and e.found is None for e in entries),
            "accuracy": max((point(e)[0] for e in own), default=None),
            "hypervolume": _volume(own, chance),
            "best": None if found is None else row(own[found], folder),
        }
    members = [e for e, mark in zip(good, marks, strict=True) if mark]
    return {
        "sweep": str(folder),
        "plan": asdict(plan) | {"attacks": list(chosen_attacks(plan))},
        "measured_on": "validation images",
        "reference_point": {"accuracy": chance, "leakage": 1.0},
        "interval": f"{100 * LEVEL:g} %, {DRAWS} resamples of the validation images",
        "hypervolume": _volume(good, chance),
        "reference_accuracy": reference,
        "allowed_loss": LOSS,
        "defences": best,
        "front": [row(e, folder) for e in sorted(members, key=lambda e: -point(e)[0])],
        "trials": [row(e, folder) for e in entries],
    }


def _reference(good: Sequence[Entry]) -> Json:
    """The accuracy that a loss is counted from: the best undefended trial's, or the best of all."""
    bare = [e for e in good if e.defence == UNDEFENDED]
    best = max(bare or good, key=lambda e: point(e)[0])
    return {"accuracy": point(best)[0], "defence": best.defence, "trial": best.task.key}


def _volume(entries: Sequence[Entry], chance: float) -> Json | None:
    if not entries:
        return None
    pairs = np.array([point(e) for e in entries])
    right, mse = (np.stack([unpack(e.images[k]) for e in entries]) for k in ("right", "mse"))
    ceiling = float((entries[0].found or {})["ceiling"])
    return asdict(
        hypervolume_interval(
            (pairs[:, 0], pairs[:, 1]), (right, mse), ceiling=ceiling, chance=chance
        )
    )
