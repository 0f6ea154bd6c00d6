"""What a defence is: a frozen value that says which channel, which penalty and which schedule."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from inspect import signature
from typing import Any, ClassVar, get_type_hints

from torch import Tensor, nn

from splitveil.errors import ConfigError
from splitveil.nets import Channel, GaussianNoise, SplitModel
from splitveil.types import PenaltyPlan

Shape = tuple[int, ...]
DESCRIPTION = ("summary", "client")  # fields that no user sets


@dataclass(frozen=True, kw_only=True)
class Defence:
    """Base of every defence; itself the absence of one.

    `summary` is shown by `splitveil defences`; `client` is the net it prefers for images of at
    least 32×32. Every other field can be set from the command line.
    """

    summary: str
    client: str = "vgg11"
    learns_noise: ClassVar[bool] = False  # a stack has room for one that does

    @property
    def noisy(self) -> bool:
        """Whether its channel adds Gaussian noise."""
        return False

    def channel(self, noise_std: float) -> Channel:
        """Channel stages; `noise_std` is the run's."""
        return Channel([GaussianNoise(noise_std)] if self.noisy and noise_std > 0 else [])

    def encoder(self, layers: nn.Module, wire_shape: Shape) -> nn.Module:
        """The client's layers; a defence may put its own among them. `wire_shape` is z's."""
        del wire_shape
        return layers

    def surrogate(self, feature_dim: int, num_classes: int, noise_std: float) -> nn.Module | None:
        """The penalty's estimator for this wire size; None: no penalty."""
        del feature_dim, num_classes, noise_std
        return None

    def penalty_plan(self) -> PenaltyPlan:
        """When and how strongly the penalty acts."""
        return PenaltyPlan()

    def companion(
        self, model: SplitModel, image_shape: Shape, num_classes: int
    ) -> nn.Module | None:
        """What trains beside the model, a `Companion`; None: nothing."""
        del model, image_shape, num_classes
        return None

    def settings(self) -> dict[str, Any]:
        """What a user may set, and what it is set to."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in DESCRIPTION}

    def setting_types(self) -> dict[str, Any]:
        """What a user may set, and of which type it is."""
        hints = get_type_hints(type(self))
        return {name: hints[name] for name in self.settings()}

    def with_settings(self, settings: Mapping[str, Any]) -> "Defence":
        """The same defence with some settings changed."""
        return replace(self, **settings)


@dataclass(frozen=True, kw_only=True)
class NoiseOnly(Defence):
    """Gaussian noise on the wire, in training and in deployment; no penalty."""

    @property
    def noisy(self) -> bool:
        """Yes: it is all it does."""
        return True


class Price(nn.Module):
    """Base of companions that have nothing of their own to learn and only make others pay."""

    lr = 0.0

    def learn(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Zero."""
        del x, y
        return z.new_zeros(())


def settings_for(defence: Defence, module: type[nn.Module]) -> dict[str, Any]:
    """The defence's fields that the module's constructor takes, under their common names.

    A field that the constructor does not know is the run's own (`lambd`, `w_lr`, …).
    """
    taken = signature(module).parameters
    return {f.name: getattr(defence, f.name) for f in fields(defence) if f.name in taken}


PLAN_FIELDS = {
    "lambd": "lambd",
    "attention_loss_scale": "scale",
    "attention_warmup_epochs": "warmup_epochs",
    "w_lr": "w_lr",
    "skip_first_epoch": "skip_first_epoch",
    "attention_gets_lambda": "attention_gets_lambda",
    "attention_lr": "attention_lr",
    "ramp": "ramp",
}


def plan_from(defence: Defence) -> PenaltyPlan:
    """The plan that the defence's own fields describe, under the seeds' names."""
    own = {f.name for f in fields(defence)}
    return PenaltyPlan(**{t: getattr(defence, n) for n, t in PLAN_FIELDS.items() if n in own})


def check_penalty(plan: PenaltyPlan) -> PenaltyPlan:
    """Refuse weights that would turn a penalty into a reward."""
    for name, value in (("lambd", plan.lambd), ("attention_loss_scale", plan.scale)):
        if not 0 <= value < float("inf"):
            raise ConfigError(f"{name} must be a finite number ≥ 0, got {value}; 0 switches it off")
    if plan.warmup_epochs < 0:
        raise ConfigError(f"attention_warmup_epochs must be ≥ 0, got {plan.warmup_epochs}")
    if not 0 <= plan.ramp <= 1:
        raise ConfigError(f"ramp must be a share of the run in [0, 1], got {plan.ramp}")
    if plan.attention_lr is not None and not 0 < plan.attention_lr < float("inf"):
        raise ConfigError(f"attention_lr must be a finite number > 0, got {plan.attention_lr}")
    return plan
