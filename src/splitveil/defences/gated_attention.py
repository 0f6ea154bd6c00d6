"""Penalties weighted by gated attention: the seeds' three forms, and ours."""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from splitveil.defences.base import Defence, check_penalty, plan_from, settings_for
from splitveil.surrogates import GatedAttentionCEM
from splitveil.types import PenaltyPlan


@dataclass(frozen=True, kw_only=True)
class GatedAttention(Defence):
    """Gaussian noise and a `GatedAttentionCEM` penalty; the fields are the seeds' names."""

    lambd: float = 16.0
    attention_loss_scale: float = 0.1
    attention_warmup_epochs: int = 5
    w_lr: Literal["constant", "cem"] = "cem"
    skip_first_epoch: bool = True
    attention_gets_lambda: bool = False
    attention_lr: float | None = None
    ramp: float = 0.0
    form: Literal["gated", "hinge", "trace"] = "gated"
    attention: Literal["minimise", "maximise", "uniform"] = "minimise"
    statistic: Literal["layernorm", "raw"] | None = None
    penalty: Literal["rate"] | None = None
    hidden_dim: int | None = None
    bias: bool = True
    attention_norm: bool = True
    var_threshold: float = 0.125
    gamma: float = 0.0
    eps: float = 1e-6
    class_gate_a: float = 10.0
    class_gate_b: float = 0.05
    snr_thresh: float = 0.3
    snr_sharp: float = 10.0
    softplus_beta: float = 1.0
    margin_m: float = 0.1
    slot_power: float = 2.0
    bank: int = 0

    def __post_init__(self) -> None:
        check_penalty(self.penalty_plan())

    @property
    def noisy(self) -> bool:
        """Yes: the penalty is measured against the channel's noise."""
        return True

    def surrogate(self, feature_dim: int, num_classes: int, noise_std: float) -> nn.Module:
        """The estimator; reg_strength and the rate's σ are both the channel's noise."""
        return GatedAttentionCEM(
            feature_dim,
            num_classes,
            noise_std=noise_std,
            reg_strength=noise_std,
            **settings_for(self, GatedAttentionCEM),
        )

    def penalty_plan(self) -> PenaltyPlan:
        """When and how strongly the penalty acts."""
        return plan_from(self)
