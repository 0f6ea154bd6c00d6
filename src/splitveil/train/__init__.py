"""Training: one step, one loop, schedules, state and checkpoints."""

from splitveil.functional import scale_gradient
from splitveil.train.schedule import Schedule, Weights

__all__ = [
    "Schedule",
    "Weights",
    "scale_gradient",
]
