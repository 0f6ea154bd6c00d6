"""Plans, engines and trials that take no time."""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from splitveil.sweep.engines import attempted
from splitveil.sweep.trial import Plan, pack
from splitveil.types import Json

IMAGES = 50


def plan(**changes: Any) -> Plan:  # noqa: ANN401
    facts: dict[str, Any] = {
        "defences": ("none", "noise"),
        "vary": ("noise_std=0.1,0.2",),
        "options": {"dataset": "digits", "epochs": 1},
        "trials": 3,
        "sampler": "grid",
        "profile": "smoke",
        "attacks": ("linear",),
    }
    return Plan(**facts | changes)


def answer(accuracy: float, leakage: float, *, ceiling: float = 0.05, **more: Any) -> Json:  # noqa: ANN401
    """What a worker says of a trial with these numbers."""
    mse = (1 - leakage) * ceiling
    right = np.arange(IMAGES) < round(accuracy * IMAGES)
    return {
        "run": "somewhere",
        "found": {
            "accuracy": accuracy, "mse": mse, "attack": "linear", "ceiling": ceiling,
            "leakage": leakage, "classes": 10,
        },
        "images": {"right": pack(right), "mse": pack(np.full(IMAGES, mse))},
        "seconds": 0.5,
        **more,
    }  # fmt: skip


def more_noise_hides_more(job: Json) -> Json:
    noise = job["options"].get("noise_std", 0.0)
    return answer(accuracy=0.9 - noise, leakage=0.8 - noise)


class Instant:
    """An engine that does the work when it is asked for the answer, last job first."""

    def __init__(self, work: Callable[[Json], Json], slots: int = 2) -> None:
        self.work, self.slots, self.jobs = work, slots, list[Json]()
        self._waiting: deque[tuple[str, Json]] = deque()

    def submit(self, key: str, job: Json) -> None:
        assert len(self._waiting) < self.slots
        self.jobs.append(job)
        self._waiting.append((key, job))

    def wait(self) -> tuple[str, Json]:
        key, job = self._waiting.pop()
        return key, attempted(self.work, job)

    def close(self) -> None:
        self._waiting.clear()
