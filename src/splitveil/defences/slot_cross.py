"""Slots and gated cross-attention: seed 001's penalty, and its honest form."""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from splitveil.defences.base import Defence, check_penalty, plan_from, settings_for
from splitveil.surrogates import SlotCrossAttentionCEM
from splitveil.types import PenaltyPlan


@dataclass(frozen=True, kw_only=True)
class SlotCross(Defence):
    """Gaussian noise and a `SlotCrossAttentionCEM` penalty; the fields are the seeds' names."""

    lambd: float = 16.0
    attention_loss_scale: float = 0.25
    attention_warmup_epochs: int = 3
    w_lr: Literal["constant", "cem"] = "cem"
    skip_first_epoch: bool = True
    attention_lr: float | None = None
    ramp: float = 0.0
    num_slots: int = 8
    num_iterations: int = 3
    slot_dim: int | None = None
    num_heads: int = 4
    attention: Literal["minimise", "maximise", "uniform"] = "minimise"
    statistic: Literal["layernorm", "raw"] | None = None
    penalty: Literal["rate"] | None = None
    assign_temp: float = 12.0
    slot_power: float = 2.5
    class_gate_a: float = 12.0
    class_gate_b: float = 0.04
    snr_thresh: float = 0.25
    snr_sharp: float = 14.0
    softplus_beta: float = 1.5
    margin_m: float = 0.05
    early_shut_steps: int = 100
    early_hard_thresh: float = 0.5
    early_gate_thresh: float = 0.6
    var_threshold: float = 0.125
    gamma: float = 0.0
    eps: float = 1e-6
    bank: int = 0

    def __post_init__(self) -> None:
        check_penalty(self.penalty_plan())

    @property
    def noisy(self) -> bool:
        """Yes: the penalty is measured against the channel's noise."""
        return True

    def surrogate(self, feature_dim: int, num_classes: int, noise_std: float) -> nn.Module:
        """The estimator; reg_strength and the rate's σ are both the channel's noise."""
        return SlotCrossAttentionCEM(
            feature_dim,
            num_classes,
            noise_std=noise_std,
            reg_strength=noise_std,
            **settings_for(self, SlotCrossAttentionCEM),
        )

    def penalty_plan(self) -> PenaltyPlan:
        """When and how strongly the penalty acts."""
        return plan_from(self)
