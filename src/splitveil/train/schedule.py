"""Schedules: pure functions of the step."""

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from splitveil.defences.base import PenaltyPlan

ScheduleKind = Literal["one-cycle", "cem"]


def one_cycle(progress: float, peak: float) -> float:
    """Learning rate that rises linearly for a fifth of the run, then falls by a cosine to 0.

    >>> one_cycle(0.2, 0.5), round(one_cycle(0.6, 0.5), 6), round(one_cycle(1.0, 0.5), 6)
    (0.5, 0.25, 0.0)
    """
    rise = 0.2
    if progress < rise:
        return peak * (0.04 + 0.96 * progress / rise)
    return peak * 0.5 * (1.0 + math.cos(math.pi * (progress - rise) / (1.0 - rise)))


def multi_step(progress: float, peak: float) -> float:
    """The published CEM schedule: ×0.2 at 25, 50, 75 and 87.5 % of the epochs.

    >>> round(multi_step(0.5, 0.05), 6)
    0.002
    """
    drops = sum(progress >= milestone for milestone in (0.25, 0.5, 0.75, 0.875))
    return peak * 0.2**drops


def companion_rate(progress: float, lr: float) -> float:
    """A companion's learning rate: ×0.2 at 25 and at 62.5 % of the run, as ResSFL's.

    >>> [round(companion_rate(done, 1e-3), 9) for done in (0.0, 0.25, 0.7)]
    [0.001, 0.0002, 4e-05]
    """
    return lr * 0.2 ** sum(progress >= milestone for milestone in (0.25, 0.625))


def lr_weight(lr: float, kind: Literal["constant", "cem"]) -> float:
    """w_lr: 1, or as in the CEM code 0.001/lr while lr ≥ 4.1e-4 and 1 below.

    >>> lr_weight(0.05, "cem"), lr_weight(8e-5, "cem"), lr_weight(0.05, "constant")
    (0.02, 1.0, 1.0)
    """
    return 0.001 / lr if kind == "cem" and lr >= 4.1e-4 else 1.0  # noqa: PLR2004


def ramp_up(progress: float, ramp: float) -> float:
    """Linear growth from 0 to 1 over the share `ramp` of the run.

    >>> ramp_up(0.1, 0.2), ramp_up(0.5, 0.2), ramp_up(0.0, 0.0)
    (0.5, 1.0, 1.0)
    """
    return min(1.0, progress / ramp) if ramp > 0 else 1.0


@dataclass(frozen=True)
class Weights:
    """How one step composes its losses: the gradient of z is scaled by `encoder`, rob by `scale`.

    Effective weight on the encoder: encoder · scale. Numbers, or tensors for a step that is
    replayed.
    """

    encoder: float | Tensor
    scale: float | Tensor

    @property
    def effective(self) -> float:
        """λ·w_lr·attention_loss_scale: what multiplies ∇rob in the encoder."""
        return float(self.encoder * self.scale)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate and penalty weight of every step of a run; epochs count from 1."""

    kind: ScheduleKind
    peak_lr: float
    epochs: int
    steps_per_epoch: int
    penalty: PenaltyPlan

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.epochs * self.steps_per_epoch

    def epoch_of(self, step: int) -> int:
        """Epoch of a step, from 1."""
        return step // self.steps_per_epoch + 1

    def lr_at(self, step: int) -> float:
        """Learning rate of a step."""
        if self.kind == "cem":
            return multi_step(self.epoch_of(step) / self.epochs, self.peak_lr)
        return one_cycle(step / self.total_steps, self.peak_lr)

    def weights_at(self, step: int) -> Weights | None:
        """Weights of the penalty at a step; None while it is not active.

        Active iff λ > 0, the epoch is past the warm-up, and it is not a skipped first epoch.
        """
        plan, epoch = self.penalty, self.epoch_of(step)
        first = plan.skip_first_epoch and epoch == 1
        if plan.lambd == 0 or epoch <= plan.warmup_epochs or first:
            return None
        w_lr = lr_weight(self.lr_at(step), plan.w_lr) * ramp_up(step / self.total_steps, plan.ramp)
        if plan.attention_gets_lambda:
            return Weights(w_lr, plan.lambd * plan.scale)
        return Weights(plan.lambd * w_lr, plan.scale)
