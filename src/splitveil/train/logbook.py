"""What a run writes down while it trains, and what it warns of."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from splitveil.errors import RunError
from splitveil.train.schedule import Schedule
from splitveil.train.state import TrainState
from splitveil.types import Json, Reports

log = logging.getLogger("splitveil")
COLLAPSE_STEPS = 100
SAVING_SHARE = 50


class Clock:
    """Seconds of training, over all sittings, and since the last checkpoint."""

    def __init__(self, before: float) -> None:
        self._start = self._last = time.perf_counter()
        self._before, self._cost = before, 0.0

    def seconds(self) -> float:
        """Seconds of training so far."""
        return round(self._before + time.perf_counter() - self._start, 3)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A checkpoint is written inside."""
        begun = time.perf_counter()
        yield
        self._last = time.perf_counter()
        self._cost = self._last - begun

    def affordable(self) -> bool:
        """Whether another one would take less than a fiftieth of the time since the last."""
        return time.perf_counter() - self._last >= SAVING_SHARE * self._cost

    def overdue(self, seconds: float) -> bool:
        """Whether the last checkpoint is older than that."""
        return time.perf_counter() - self._last > seconds


def log_line(kind: str, state: TrainState, schedule: Schedule, clock: Clock) -> Json:
    """What is logged after a step; refuses to go on once the task loss is not finite.

    Reads the counters on the device, and lets the surrogate speak.
    """
    step = state.step - 1
    epoch, weights = schedule.epoch_of(step), schedule.weights_at(step)
    line: Json = {"kind": kind, "step": state.step, "epoch": epoch, "lr": schedule.lr_at(step)}
    line["weight"] = weights.effective if weights else 0.0
    line |= state.meters.means() | {"skipped": warn_skipped(state), "seconds": clock.seconds()}
    warn_collapsed(state)
    if isinstance(state.surrogate, Reports):
        state.surrogate.report()
    if line["task_loss"] is None:
        raise RunError(
            f"training diverged in epoch {epoch}: the task loss is not finite; "
            "lower lr or lambd and train again"
        )
    return line


def warn_skipped(state: TrainState) -> int:
    """Warn at the first skipped penalty and at every hundredth; returns the count."""
    skipped = state.skipped()
    if skipped and (state.warned == 0 or skipped // 100 > state.warned // 100):
        knobs = ["lambd"] if state.surrogate is not None else []
        if state.companion is not None:
            knobs.append("the strength and rate of what learns beside the model")
        log.warning(
            "the penalty's loss or gradient was not finite %d times and was left out; the task's "
            "own gradient was kept. Lower %s or the learning rate if this goes on",
            skipped,
            ", ".join(knobs),
        )
        state.warned = skipped
    return skipped


def warn_collapsed(state: TrainState) -> None:
    """Warn once when the surrogate has reported under half of the true rate for long enough."""
    low = int(state.guard.low)
    if low >= COLLAPSE_STEPS and not state.collapsed:
        log.warning(
            "estimator collapsed: for %d steps the surrogate has reported less than half of the "
            "true rate, and what it does not see is not protected. Use attention=maximise or "
            "uniform and statistic=raw; with cem, fewer clusters",
            low,
        )
    state.collapsed = low >= COLLAPSE_STEPS


def in_short(line: Json) -> str:
    """The numbers that fit behind a progress bar."""
    parts = [f"loss {line['task_loss']:.3f}"]
    for key, name in (("rob_loss", "rob"), ("val_accuracy", "val")):
        if line.get(key) is not None:
            parts.append(f"{name} {line[key]:.3f}")
    return " " + " ".join(parts)
