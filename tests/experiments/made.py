"""Plans, and trials that take no time."""

from collections.abc import Callable
from typing import Any

import pytest

from splitveil.config.resolve import DataFacts
from splitveil.config.run_config import RunConfig
from splitveil.experiments import runner
from splitveil.experiments.search import SearchPlan
from splitveil.io import Json
from splitveil.nets.catalogue import NETS
from splitveil.nets.split import cut
from splitveil.runs import Run

CEILING = 0.05
MODEL = cut(NETS["small"].build((1, 8, 8), 10), NETS["small"].cut_at)
Work = Callable[[RunConfig], tuple[float, float]]


def plan(**changes: Any) -> SearchPlan:  # noqa: ANN401
    facts: dict[str, Any] = {
        "defences": ("none", "noise"),
        "vary": ("noise_std=0.1,0.2",),
        "options": {"dataset": "digits", "epochs": 1},
        "trials": 3,
        "sampler": "grid",
        "profile": "smoke",
        "attacks": ("linear",),
    }
    return SearchPlan(**facts | changes)


def found(accuracy: float, leakage: float) -> Json:
    """What is measured of a trial with these numbers."""
    return {
        "accuracy": accuracy, "mse": (1 - leakage) * CEILING, "attack": "linear",
        "ceiling": CEILING, "leakage": leakage,
    }  # fmt: skip


def more_noise_hides_more(config: RunConfig) -> tuple[float, float]:
    noise = config.noise_std or 0.0
    return 0.9 - noise, 0.8 - noise


class Instant:
    """Trainings and attacks that only note what was asked for; `work` says what they find."""

    def __init__(self, patch: pytest.MonkeyPatch, work: Work = more_noise_hides_more) -> None:
        self.work, self.configs = work, list[RunConfig]()
        patch.setattr(runner, "fit", self.fit)
        patch.setattr(runner, "_free_memory", lambda: None)
        patch.setattr(runner, "validate_on_val", self.validate)

    def fit(self, config: RunConfig, **_: object) -> Run:
        config.folder.mkdir(parents=True, exist_ok=True)
        (config.folder / "config.toml").touch()
        self.configs.append(config)
        return Run(config.folder, config, DataFacts((1, 8, 8), 10, ""), MODEL)

    def validate(self, run: Run, *_: object) -> Json:
        return found(*self.work(run.config))


def no_memory_at(noise: float) -> Work:
    """Work that fails at this noise."""

    def picky(config: RunConfig) -> tuple[float, float]:
        if config.noise_std == noise:
            raise RuntimeError("out of memory")
        return more_noise_hides_more(config)

    return picky
