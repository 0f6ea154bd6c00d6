"""Training: composition of gradients, schedules, the loop and its checkpoints."""

from splitveil.gradient import scale_gradient
from splitveil.train.compose import Guard, compose_losses
from splitveil.train.schedule import Schedule, Weights

__all__ = ["Guard", "Schedule", "Weights", "compose_losses", "scale_gradient"]
