"""Training: one step, one loop, its state and checkpoints."""

from splitveil.gradient import scale_gradient

__all__ = ["scale_gradient"]
