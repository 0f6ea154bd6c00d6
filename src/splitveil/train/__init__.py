"""Training: one step, one loop, its state and checkpoints."""

from splitveil.functional import scale_gradient

__all__ = ["scale_gradient"]
