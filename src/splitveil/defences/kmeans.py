"""The published baseline: k-means per class at the end of an epoch, a penalty on its spread."""

from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from splitveil.defences.base import Defence, check_penalty, plan_from, settings_for
from splitveil.surrogates import KMeansCEM
from splitveil.types import PenaltyPlan


@dataclass(frozen=True, kw_only=True)
class KMeans(Defence):
    """Gaussian noise and a `KMeansCEM` penalty, as the CVPR 2025 code trains it."""

    lambd: float = 16.0
    w_lr: Literal["constant", "cem"] = "cem"
    ramp: float = 0.0
    form: Literal["hinge", "logdet"] = "hinge"
    covariance: Literal["diagonal", "full"] = "diagonal"
    clusters: int = 5
    var_threshold: float = 0.125
    gamma: float = 0.01
    log_entropy: bool = True

    def __post_init__(self) -> None:
        check_penalty(self.penalty_plan())

    @property
    def noisy(self) -> bool:
        """Yes: the penalty's threshold is a share of the channel's noise."""
        return True

    def surrogate(self, feature_dim: int, num_classes: int, noise_std: float) -> nn.Module:
        """The estimator; it is fitted anew at the end of every epoch."""
        return KMeansCEM(
            feature_dim,
            num_classes,
            noise_std=noise_std,
            **settings_for(self, KMeansCEM),
        )

    def penalty_plan(self) -> PenaltyPlan:
        """From the second epoch on: the first one has no clusters yet."""
        return replace(plan_from(self), skip_first_epoch=True)
