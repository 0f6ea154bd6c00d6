"""A client's trial: a brief training and a quick audit, in a folder of its own below the runs.

Everything is measured on the validation images, because what chooses a client must not see the
test images (`splitveil audit --aux val`, in brief); an audit without that scores it on those.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from splitveil import __version__
from splitveil.audits import ceiling_mse, run_attacks, strongest
from splitveil.audits.pipeline import ACCURACY_DRAWS
from splitveil.audits.suite import Share, accuracy, folder_store
from splitveil.audits.trained_run import PLACES, open_run
from splitveil.config import RunConfig, find_profile, resolve
from splitveil.data import Dataset
from splitveil.errors import CheckpointError
from splitveil.nets import CLIENT_PREFIX
from splitveil.runs import Run, fingerprint, fit, flat_config
from splitveil.teaching import ready_teacher
from splitveil.train.files import write_text
from splitveil.types import Attack, Json, Progress, silent

FOUND = ("accuracy", "mse", "attack", "ceiling", "leakage")  # what `measure` tells of a run


def ranking_attacks(profile: str) -> dict[str, Attack]:
    """The attacks of a profile that see one draw of every image: only those can be `strongest`."""
    return {
        name: attack
        for name, attack in find_profile(profile).items()
        if getattr(attack, "limit", None) is None and getattr(attack, "repeats", 1) == 1
    }


def trial(
    config: RunConfig,
    dataset: Dataset,
    attacks: Mapping[str, Attack],
    progress: Progress = silent,
) -> tuple[Path, Json]:
    """The folder of a trial, and what `measure` found; a finished one is read, not repeated."""
    config = placed(config, dataset)
    file = config.folder / "trial.json"
    key = _digest([config.folder.name, repr(attacks)])
    found = _read(file, key)
    if found is None:
        run = _trained(config, Share(progress, "training", 0.0, 0.5, 1.0))
        found = measure(run, attacks, Share(progress, "attacks", 0.5, 0.5, 1.0))
        write_text(file, json.dumps({"key": key, "found": found}, indent=2) + "\n")
    return config.folder, found


def placed(config: RunConfig, dataset: Dataset) -> RunConfig:
    """The run with a name of its own: other settings or other data, another folder."""
    settings = flat_config(resolve(config, dataset))
    same = {k: v for k, v in settings.items() if k not in (*PLACES, "name")}
    if teacher := ready_teacher(config, dataset):
        same["teacher"] = teacher.noted["model"]
    words = f"{config.dataset}-{config.defence}-{config.net.removeprefix(CLIENT_PREFIX)}"
    stem = re.sub(r"[^A-Za-z0-9._+-]+", "-", words)
    return replace(config, name=f"{stem}-{_digest([same, fingerprint(dataset), __version__])}")


def _digest(parts: Sequence[object]) -> str:
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _read(file: Path, key: str) -> Json | None:
    """What a finished trial found; None where there is none, or it was another one."""
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        return {name: saved["found"][name] for name in FOUND} if saved["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _trained(config: RunConfig, progress: Progress) -> Run:
    if (config.folder / "checkpoint.safetensors").is_file():
        try:
            return fit(config, resume=True, progress=progress)
        except CheckpointError:  # broken, or of a net that has changed: nothing to go on from
            pass
    return fit(config, overwrite=True, progress=progress)


def measure(run: Run, attacks: Mapping[str, Attack], progress: Progress = silent) -> Json:
    """Accuracy and what the strongest attack got, on validation images, attacker knowing train."""
    target, _ = open_run(run, aux="val", seed=run.config.seed)
    store = folder_store(run.path / "audit", __version__)  # a trial's folder is of one version
    best = strongest(run_attacks(target, attacks, progress, store=store))
    ceiling = ceiling_mse(target.aux, target.scored, target.num_classes)
    return {
        "accuracy": accuracy(target, ACCURACY_DRAWS),
        "mse": best["mse"],
        "attack": best["mse_by"],
        "ceiling": ceiling,
        "leakage": 1.0 - best["mse"] / ceiling,
    }
