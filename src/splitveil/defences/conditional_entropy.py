"""Penalties on H(Z|Y): CEM's k-means, gated attention (`veil` is one), slots."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from splitveil.defences.base import NonNegative, Penalised, Positive, Share
from splitveil.errors import Range
from splitveil.surrogates.gated_attention import GatedAttentionCEM
from splitveil.surrogates.kmeans_cem import KMeansCEM
from splitveil.surrogates.slot_cross import SlotCrossAttentionCEM

RateWeight = Literal["constant", "cem"]
Epochs = Annotated[int, Range(0)]


@dataclass(frozen=True, kw_only=True)
class Cem(Penalised):
    """Gaussian noise and a `KMeansCEM` penalty, as the CVPR 2025 code trains it.

    The clusters are fitted at the end of every epoch, so the first epoch has no penalty.

    Args:
        clusters: Clusters of a class, ≥ 1.
        w_lr: `cem` multiplies λ by 0.001/lr while lr ≥ 4.1e-4; `constant` does not.
        ramp: Share of the run, in [0, 1], over which λ grows to its full size.

    The other arguments are those of `Penalised` and of `KMeansCEM`.

    >>> Cem(summary="", lambd=8.0).penalty_plan().lambd
    8.0
    """

    estimator: ClassVar = KMeansCEM
    skip_first_epoch: ClassVar[bool] = True  # not a setting: there are no clusters yet
    w_lr: RateWeight = "cem"
    ramp: Share = 0.0
    form: Literal["hinge", "logdet"] = "hinge"
    covariance: Literal["diagonal", "full"] = "diagonal"
    clusters: int = 5
    var_threshold: float = 0.125
    gamma: float = 0.01
    log_entropy: bool = True


@dataclass(frozen=True, kw_only=True)
class GatedAttention(Penalised):
    """Gaussian noise and a `GatedAttentionCEM` penalty; fields have the documents' names.

    Args:
        attention_loss_scale: Weight on encoder and attention alike, ≥ 0.
        attention_warmup_epochs: Epochs without a penalty at the start, ≥ 0.

    The other arguments are those of `Penalised`, `PenaltyPlan` and `GatedAttentionCEM`.

    >>> GatedAttention(summary="").penalty_plan().scale  # attention_loss_scale
    0.1
    """

    estimator: ClassVar = GatedAttentionCEM
    attention_loss_scale: NonNegative = 0.1
    attention_warmup_epochs: Epochs = 5
    w_lr: RateWeight = "cem"
    skip_first_epoch: bool = True
    attention_gets_lambda: bool = False
    attention_lr: Positive | None = None
    ramp: Share = 0.0
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


@dataclass(frozen=True, kw_only=True)
class SlotCross(Penalised):
    """Gaussian noise and a `SlotCrossAttentionCEM` penalty; fields have the documents' names.

    Args:
        attention_loss_scale: Weight on encoder and slots alike, ≥ 0.
        attention_warmup_epochs: Epochs without a penalty at the start, ≥ 0.

    The other arguments are those of `Penalised`, `PenaltyPlan` and `SlotCrossAttentionCEM`.

    >>> SlotCross(summary="").penalty_plan().warmup_epochs  # attention_warmup_epochs
    3
    """

    estimator: ClassVar = SlotCrossAttentionCEM
    attention_loss_scale: NonNegative = 0.25
    attention_warmup_epochs: Epochs = 3
    w_lr: RateWeight = "cem"
    skip_first_epoch: bool = True
    attention_lr: Positive | None = None
    ramp: Share = 0.0
    num_slots: int = 8
    num_iterations: int = 3
    slot_dim: int | None = None
    num_heads: int = 4
    aggregate: Literal["mean", "sum"] = "mean"
    assign_from: Literal["enhanced", "layernorm"] = "enhanced"
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
