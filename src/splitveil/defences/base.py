"""What a defence is: a channel, a penalty and when it acts, a companion; stacks of defences."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from inspect import signature
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    Protocol,
    cast,
    get_type_hints,
    runtime_checkable,
)

import torch
from torch import Tensor, nn

from splitveil.errors import ConfigError, Range, check_ranges, unknown
from splitveil.nets.channel import Channel, Clip, GaussianNoise, SparseCoding
from splitveil.nets.split import SplitModel


@runtime_checkable
class Companion(Protocol):
    """A module that trains beside the model and makes the encoder pay: an adversary, say.

    One that is several has them as `parts`, an `nn.ModuleList`; each learns at its own rate.
    """

    @property
    def lr(self) -> float:
        """Adam's rate for its own parameters at the start of a run."""
        ...

    def own_loss(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Its own loss on a batch of clean z, images and labels; no gradient reaches z."""
        ...

    def penalty(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """What the encoder pays on the same batch, after `own_loss`; no gradient reaches itself."""
        ...


@runtime_checkable
class ActsBetweenSteps(Protocol):
    """A companion that also acts between steps."""

    def after_step(self, done: float) -> None:
        """Called after every step; `done` is the share of the run behind it, in (0, 1]."""
        ...


@dataclass(frozen=True, kw_only=True)
class PenaltyPlan:
    """When and how strongly a surrogate acts on the encoder and on its own parameters.

    `lambd` is the seeds' λ, `scale` their attention_loss_scale, `warmup_epochs` their
    attention_warmup_epochs. `w_lr` "cem" weighs by 0.001/lr while lr ≥ 4.1e-4, "constant" by 1.
    `skip_first_epoch` is the seeds' ¬random_ini_centers. `attention_gets_lambda`: the attention
    receives λ too (plain L_CE + λ·L). `attention_lr` trains it by Adam at that rate; None puts it
    into the model's own SGD optimiser. `ramp` is the share of the run over which the weight on the
    encoder grows linearly to its full size; 0 starts with it.
    """

    lambd: float = 0.0
    scale: float = 1.0
    warmup_epochs: int = 0
    w_lr: Literal["constant", "cem"] = "constant"
    skip_first_epoch: bool = False
    attention_gets_lambda: bool = False
    attention_lr: float | None = None
    ramp: float = 0.0


Shape = tuple[int, ...]
TrainedBeside = nn.Module | None  # a `Companion`, or nothing
DESCRIPTION = ("summary", "client")  # fields that no user sets
NonNegative = Annotated[float, Range(0, hint="0 switches it off")]
Positive = Annotated[float, Range(0, above=True)]
Share = Annotated[float, Range(0, 1)]


@dataclass(frozen=True, kw_only=True)
class Defence:
    """Base of every defence; itself the absence of one.

    `summary` is shown by `splitveil defences`; `client` is the net it prefers for images of at
    least 32×32. Every other field can be set from the command line; one that declares a `Range`
    is checked against it.
    """

    summary: str
    client: str = "vgg11"
    learns_noise: ClassVar[bool] = False  # a stack has room for one that does

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def noisy(self) -> bool:
        """Whether its channel adds Gaussian noise."""
        return False

    def channel(self, noise_std: float) -> Channel:
        """Channel stages; `noise_std` is the run's."""
        return Channel([GaussianNoise(noise_std)] if self.noisy and noise_std > 0 else [])

    def encoder(self, layers: nn.Module, wire_shape: Shape) -> nn.Module:
        """The client's layers; a defence may put its own among them. `wire_shape` is z's."""
        return layers

    def surrogate(self, feature_dim: int, num_classes: int, noise_std: float) -> nn.Module | None:
        """The penalty's estimator for this wire size; None: no penalty."""
        return None

    def penalty_plan(self) -> PenaltyPlan:
        """When and how strongly the penalty acts."""
        return PenaltyPlan()

    def companion(self, model: SplitModel, image_shape: Shape, num_classes: int) -> TrainedBeside:
        """What trains beside the model, a `Companion`; None: nothing."""
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


@dataclass(frozen=True, kw_only=True)
class Penalised(NoiseOnly):
    """Noise on the wire and a penalty on z; a subclass declares `estimator` and its fields.

    `estimator` is called with the wire's size, the number of classes, and those of the fields that
    it takes; `noise_std` and `reg_strength` are the channel's noise. Fields in `PLAN_FIELDS` say
    when and how strongly the penalty acts.
    """

    estimator: ClassVar[Callable[..., nn.Module]]
    lambd: NonNegative = 16.0

    def surrogate(self, feature_dim: int, num_classes: int, noise_std: float) -> nn.Module:
        """The estimator for this wire size."""
        make = type(self).estimator
        given = {"noise_std": noise_std, "reg_strength": noise_std} | self.settings()
        taken = signature(make).parameters
        return make(feature_dim, num_classes, **{k: v for k, v in given.items() if k in taken})

    def penalty_plan(self) -> PenaltyPlan:
        """What the fields say, under their names in a plan."""
        own = {plan: name for name, plan in PLAN_FIELDS.items() if hasattr(self, name)}
        return PenaltyPlan(**{plan: getattr(self, name) for plan, name in own.items()})


class FixedPenalty(nn.Module):
    """Base of companions that have nothing of their own to learn and only make others pay."""

    lr = 0.0

    def own_loss(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Zero."""
        return z.new_zeros(())


class CompanionStack(nn.Module):
    """Several companions as one; each learns at its own rate."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.lr = max(cast(Companion, part).lr for part in parts)

    def own_loss(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The sum of their own losses."""
        return torch.stack([cast(Companion, part).own_loss(z, x, y) for part in self.parts]).sum()

    def penalty(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The sum of what the encoder pays to each."""
        return torch.stack([cast(Companion, part).penalty(z, x, y) for part in self.parts]).sum()

    def after_step(self, done: float) -> None:
        """Told to those that act between steps."""
        for part in self.parts:
            if isinstance(part, ActsBetweenSteps):
                part.after_step(done)


@dataclass(frozen=True, kw_only=True)
class Stack(Defence):
    """Different presets on one channel, at most one of them with a penalty.

    Companions stand beside each other: what they learn and what the encoder pays them adds up. At
    most one part may learn the noise.

    The Gaussian noise of the run stands first, once, however many parts are noisy, or behind a
    clip, which lessens every variance; the parts' other stages follow in the order of the parts.
    What follows the noise can only lose information, so a penalty and `true_rate_nats`, both
    measured against the noise on z, stay bounds; rounding to levels or pruning before the noise
    could make small differences large.
    """

    parts: tuple[tuple[str, Defence], ...]

    def __post_init__(self) -> None:
        if problems := list(_problems(self.parts)):
            raise ConfigError("; ".join(problems))

    @property
    def noisy(self) -> bool:
        """Whether a part is."""
        return any(part.noisy for _, part in self.parts)

    def channel(self, noise_std: float) -> Channel:
        """Sparse coding, clips, the noise, then the parts' other stages."""
        stages = [stage for _, part in self.parts for stage in part.channel(noise_std).stages]
        codes = [s for s in stages if isinstance(s, SparseCoding)]
        clips = [s for s in stages if isinstance(s, Clip)]
        noise = super().channel(noise_std).stages
        rest = [s for s in stages if not isinstance(s, GaussianNoise | Clip | SparseCoding)]
        return Channel([*codes, *clips, *noise, *rest])

    def encoder(self, layers: nn.Module, wire_shape: Shape) -> nn.Module:
        """With the layers of all parts, in their order."""
        for _, part in self.parts:
            layers = part.encoder(layers, wire_shape)
        return layers

    def surrogate(self, feature_dim: int, num_classes: int, noise_std: float) -> nn.Module | None:
        """That of the part that has one."""
        return self._penalised().surrogate(feature_dim, num_classes, noise_std)

    def penalty_plan(self) -> PenaltyPlan:
        """That of the part with the surrogate."""
        return self._penalised().penalty_plan()

    def companion(self, model: SplitModel, image_shape: Shape, num_classes: int) -> TrainedBeside:
        """Those of the parts as one."""
        made = [part.companion(model, image_shape, num_classes) for _, part in self.parts]
        found = [one for one in made if one is not None]
        return CompanionStack(found) if len(found) > 1 else next(iter(found), None)

    def settings(self) -> dict[str, Any]:
        """Those of all parts; no two have one of the same name."""
        return {k: v for _, part in self.parts for k, v in part.settings().items()}

    def setting_types(self) -> dict[str, Any]:
        """Those of all parts."""
        return {k: v for _, part in self.parts for k, v in part.setting_types().items()}

    def with_settings(self, settings: Mapping[str, Any]) -> "Stack":
        """Each setting goes to the part that has it."""
        for key in settings:
            if key not in self.settings():
                raise ConfigError(unknown("setting", key, self.settings()))
        parts = (
            (n, p.with_settings({k: v for k, v in settings.items() if k in p.settings()}))
            for n, p in self.parts
        )
        return replace(self, parts=tuple(parts))

    def _penalised(self) -> Defence:
        """The part with a surrogate; without one, the absence of a defence."""
        return next((p for _, p in self.parts if has_surrogate(p)), Defence(summary=""))


def stack(parts: Sequence[tuple[str, Defence]]) -> Stack:
    """Named presets as one defence.

    Its net is that of the last part that prefers one other than the default.
    """
    clients = [p.client for _, p in parts if p.client != Defence.client]
    return Stack(
        summary=" + ".join(p.summary for _, p in parts),
        client=clients[-1] if clients else Defence.client,
        parts=tuple(parts),
    )


def has_surrogate(defence: Defence) -> bool:
    """Whether its class makes one; building it to see would draw random numbers."""
    return type(defence).surrogate is not Defence.surrogate


def _problems(parts: Sequence[tuple[str, Defence]]) -> Iterator[str]:
    """Why these cannot stand together."""
    names = [name for name, _ in parts]
    for name, part in parts:
        if type(part) is Defence:
            yield f"'{name}' is no defence and cannot be stacked; leave it out"
    for name in dict.fromkeys(n for n in names if names.count(n) > 1):
        yield f"'{name}' stands twice in the stack {'+'.join(names)}; give it once"
    penalised = dict.fromkeys(name for name, part in parts if has_surrogate(part))
    if len(penalised) > 1:
        yield f"{_both(penalised)} each have a penalty and a stack can have one; choose one of them"
        return  # their settings have common names because of it
    loud = dict.fromkeys(name for name, part in parts if part.learns_noise)
    if len(loud) > 1:
        yield f"{_both(loud)} each learn the noise and a stack can have one; choose one of them"
    for name, part in dict(parts).items():
        # With no noise in the run, whatever Gaussian noise is left is the part's own.
        if part.channel(0.0).noise_std:
            yield (
                f"'{name}' adds other Gaussian noise than the run's, and a stack has room for that "
                "alone; add GaussianNoise(noise_std), or draw the noise in a stage of your own"
            )
    yield from _shared(parts)


def _shared(parts: Sequence[tuple[str, Defence]]) -> Iterator[str]:
    """Settings that two of them have."""
    owners: dict[str, list[str]] = {}
    for name, part in dict(parts).items():
        for key in part.settings():
            owners.setdefault(key, []).append(name)
    for key, found in owners.items():
        if len(found) > 1:
            yield f"{_both(found)} each have a setting '{key}', which must name one; stack others"


def _both(names: Iterable[str]) -> str:
    return " and ".join(f"'{name}'" for name in names)
