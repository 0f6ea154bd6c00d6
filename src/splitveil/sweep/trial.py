"""One trial of a sweep: what it is, and the work of a worker process."""

import base64
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from splitveil.audits.pipeline import ACCURACY_DRAWS
from splitveil.audits.target import Attempt, answer, from_bytes, send
from splitveil.config import make_config
from splitveil.data import Dataset, load
from splitveil.errors import AuditError, ConfigError, unknown
from splitveil.runs import load_data, load_run, prepare_process
from splitveil.sweep.space import applies
from splitveil.trials import ranking_attacks, trial
from splitveil.types import Attack, Json

Sampler = Literal["grid", "random", "optuna"]
TRIALS = "trials"  # folder of the trials' runs, below the sweep's
SAME = 1e-4  # a mean taken on another device differs in its last bits


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that decides which trials a sweep has and how each is measured.

    `options` are the run's common settings, `vary` the texts of what differs; `trials` is the
    budget of every defence. `attacks` empty: all of the profile that see every image once.
    `teacher` is the hash of the model that all trials learn from, if there is one.
    """

    defences: tuple[str, ...]
    vary: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    trials: int
    sampler: Sampler
    profile: str = "quick"
    attacks: tuple[str, ...] = ()
    seed: int = 0
    teacher: str | None = None


@dataclass(frozen=True, kw_only=True)
class Task:
    """Trial `number` of a defence: its varied settings and its training seed."""

    defence: str
    number: int
    settings: Mapping[str, Any]
    seed: int

    @property
    def key(self) -> str:
        """Its name in the sweep.

        >>> Task(defence="veil", number=2, settings={}, seed=0).key
        'veil/2'
        """
        return f"{self.defence}/{self.number}"


def chosen_attacks(plan: Plan) -> dict[str, Attack]:
    """The attacks of the plan, with the budgets of its profile."""
    known = ranking_attacks(plan.profile)
    for name in plan.attacks:
        if name not in known:
            raise ConfigError(unknown(f"attack of profile '{plan.profile}'", name, known))
    return {name: known[name] for name in plan.attacks or known}


def options_of(plan: Plan, task: Task, folder: Path) -> Json:
    """The run of a trial in flat settings; common ones that its defence lacks are left out."""
    common = {k: v for k, v in plan.options.items() if applies(k, task.defence)}
    own = {"defence": task.defence, "seed": task.seed, "runs_dir": str(folder / TRIALS)}
    return common | dict(task.settings) | own


def job_of(plan: Plan, task: Task, folder: Path) -> Json:
    """What a worker needs for a trial, as plain JSON."""
    attacks = list(chosen_attacks(plan))
    return {
        "options": options_of(plan, task, folder), "profile": plan.profile, "attacks": attacks
    }  # fmt: skip


def perform(job: Json) -> Json:
    """Train and attack one trial on validation images, in a worker's process.

    Returns the run's folder name, what was found, and per validation image the share of right
    answers and the MSE of the strongest attack.
    """
    started = time.perf_counter()
    prepare_process()
    torch.set_num_threads(1)
    known = ranking_attacks(job["profile"])
    config = make_config(job["options"])
    data = _data(config.dataset, config.data_dir)
    folder, found = trial(config, data, {name: known[name] for name in job["attacks"]})
    bad = [name for name in ("accuracy", "leakage") if not math.isfinite(found[name])]
    if bad:
        raise AuditError(f"{' and '.join(bad)} of the trial are not finite numbers; see {folder}")
    return {
        "run": folder.name,
        "found": found | {"classes": data.num_classes},
        "images": _per_image(folder, found),
        "seconds": round(time.perf_counter() - started, 3),
    }


@lru_cache(maxsize=1)
def _data(name: str, data_dir: str | None) -> Dataset:
    return load(name, data_dir)


@torch.no_grad()
def _per_image(folder: Path, found: Json) -> Json:
    """Right answers and MSE of each validation image, packed."""
    run = load_run(folder)
    data, splits = load_data(run)
    scored = data.to(run.victim.device).labelled(splits.val)
    victim, head, seed = run.victim, run.model.head.eval(), run.config.seed
    right = [
        answer(head, send(victim, scored.images, seed, f"accuracy/{i}")) == scored.labels
        for i in range(ACCURACY_DRAWS)
    ]
    share = torch.stack(right).double().mean(0).cpu()
    kept = [from_bytes(f.read_bytes(), torch.device("cpu")) for f in _files(folder)]
    best = _strongest([a for a in kept if a is not None and len(a.mse) == len(scored)], found)
    return {"right": pack(share.numpy()), "mse": pack(best.mse.numpy())}


def _files(folder: Path) -> list[Path]:
    return sorted((folder / "audit").glob("*.safetensors"))


def _strongest(attempts: list[Attempt], found: Json) -> Attempt:
    """The attempt whose mean was reported; others may lie there from before."""
    far = {i: abs(float(a.mse.mean()) - found["mse"]) for i, a in enumerate(attempts)}
    place = min(far, key=far.__getitem__, default=None)
    if place is None or far[place] > SAME * found["mse"]:
        raise AuditError(f"the strongest attack left no images behind; its MSE was {found['mse']}")
    return attempts[place]


def pack(values: ArrayLike) -> str:
    """Numbers as base64 of little-endian float16, each within 0.05 %."""
    return base64.b64encode(np.asarray(values).astype("<f2").tobytes()).decode("ascii")


def unpack(text: str) -> NDArray[np.float64]:
    """Read back what `pack` wrote.

    >>> unpack(pack(np.array([0.25, 1.0]))).tolist()
    [0.25, 1.0]
    """
    return np.frombuffer(base64.b64decode(text), dtype="<f2").astype(np.float64)
