"""What a defence is: a channel, a penalty and its plan, a companion; and stacks of defences."""

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
    """A module that is trained along with the model and adds to its loss, such as an adversary.

    A companion made of several has them in `parts`, an `nn.ModuleList`; each has its own rate.
    """

    @property
    def lr(self) -> float:
        """Adam's learning rate for its own parameters at the start of a run."""
        ...

    def own_loss(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Its own loss on a batch: clean z (n, …), images x, labels y; no gradient reaches z."""
        ...

    def penalty(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """What it adds to the model's loss, after `own_loss`; its parameters get no gradient."""
        ...


@runtime_checkable
class ActsBetweenSteps(Protocol):
    """A companion that also does something between steps."""

    def after_step(self, done: float) -> None:
        """Called after every step; `done` is the finished share of the run, in (0, 1]."""
        ...


@dataclass(frozen=True, kw_only=True)
class PenaltyPlan:
    """When and how strongly a surrogate acts on the encoder and on its own parameters.

    Names in parentheses are those of the reference documents.

    Args:
        lambd: Weight λ ≥ 0 on the encoder.
        scale: Weight on encoder and surrogate alike, ≥ 0 (attention_loss_scale).
        warmup_epochs: Epochs without a penalty at the start, ≥ 0 (attention_warmup_epochs).
        w_lr: `cem` multiplies λ by 0.001/lr while lr ≥ 4.1e-4; `constant` does not.
        skip_first_epoch: Whether the first epoch has no penalty (¬random_ini_centers).
        attention_gets_lambda: Whether λ weighs the surrogate's gradient too (plain L_CE + λ·L).
        attention_lr: Adam's rate for the surrogate; None: the model's own SGD trains it.
        ramp: Share of the run, in [0, 1], over which λ grows linearly to its full size.
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
TrainedBeside = nn.Module | None  # a `Companion`, or none
DESCRIPTION = ("summary", "client")  # fields that are not settings
NonNegative = Annotated[float, Range(0, hint="0 switches it off")]
Positive = Annotated[float, Range(0, above=True)]
Share = Annotated[float, Range(0, 1)]


@dataclass(frozen=True, kw_only=True)
class Defence:
    """Base of every defence, and itself no defence at all.

    Every field of a subclass is a setting of the command line, checked against the `Range` that it
    declares.

    Args:
        summary: One line for `splitveil defences`.
        client: Name of the net to use for images of at least 32×32, unless another is given.

    >>> Defence(summary="no defence").channel(0.025)
    Channel(
      (stages): ModuleList()
    )
    """

    summary: str
    client: str = "vgg11"
    learns_noise: ClassVar[bool] = False  # a stack can have one that does
    needs_val: ClassVar[bool] = False  # whether it sets something on validation images
    sends: ClassVar[bool] = True  # whether anything leaves the device

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def noisy(self) -> bool:
        """Whether its channel adds Gaussian noise."""
        return False

    def channel(self, noise_std: float) -> Channel:
        """What happens to smashed data before the wire; `noise_std` is the run's σ ≥ 0."""
        # No stage of std 0: it would draw random numbers and send them at no effect.
        return Channel([GaussianNoise(noise_std)] if self.noisy and noise_std > 0 else [])

    def assemble(self, model: SplitModel, image_shape: Shape, num_classes: int) -> SplitModel:
        """The model with the defence's own layers in its client; its channel is added later.

        Args:
            model: The halves of the net.
            image_shape: (c, h, w) of the images.
            num_classes: Number of classes.
        """
        return model

    def surrogate(self, feature_dim: int, num_classes: int, noise_std: float) -> nn.Module | None:
        """The penalty's `Surrogate` for z of `feature_dim` numbers; None: no penalty."""
        return None

    def penalty_plan(self) -> PenaltyPlan:
        """When and how strongly the penalty acts."""
        return PenaltyPlan()

    def companion(self, model: SplitModel, image_shape: Shape, num_classes: int) -> TrainedBeside:
        """The `Companion` that is trained along with the model; None: none."""
        return None

    def settings(self) -> dict[str, Any]:
        """Settings and their values."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in DESCRIPTION}

    def setting_types(self) -> dict[str, Any]:
        """Settings and their types."""
        hints = get_type_hints(type(self))
        return {name: hints[name] for name in self.settings()}

    def with_settings(self, settings: Mapping[str, Any]) -> "Defence":
        """The same defence with some settings changed."""
        return replace(self, **settings)


@dataclass(frozen=True, kw_only=True)
class NoiseOnly(Defence):
    """Gaussian noise on the wire, in training and in deployment; no penalty.

    The arguments are those of `Defence`.

    >>> NoiseOnly(summary="").channel(0.1).noise_std
    0.1
    """

    @property
    def noisy(self) -> bool:
        """True."""
        return True


# Fields of a plan that a defence calls by the reference documents' names.
PLAN_FIELDS = {"scale": "attention_loss_scale", "warmup_epochs": "attention_warmup_epochs"}


@dataclass(frozen=True, kw_only=True)
class Penalised(NoiseOnly):
    """Noise on the wire and a penalty on z; a subclass declares `estimator` and its fields.

    `estimator` is called with the size of the wire, the number of classes and every field that it
    has an argument for; its `noise_std` and `reg_strength` are the channel's noise. Fields named as
    in `PenaltyPlan`, or in `PLAN_FIELDS`, say when and how strongly the penalty acts.

    Args:
        lambd: Weight λ ≥ 0 of the penalty's gradient in the encoder; 0 switches it off.

    Example:
        `class PlainRate(Penalised): estimator: ClassVar = splitveil.surrogates.Rate`
    """

    estimator: ClassVar[Callable[..., nn.Module]]
    lambd: NonNegative = 16.0

    def surrogate(self, feature_dim: int, num_classes: int, noise_std: float) -> nn.Module:
        """The estimator for z of `feature_dim` numbers."""
        make = type(self).estimator
        # The reference documents call the channel's noise reg_strength.
        given = {"noise_std": noise_std, "reg_strength": noise_std} | self.settings()
        taken = signature(make).parameters
        return make(feature_dim, num_classes, **{k: v for k, v in given.items() if k in taken})

    def penalty_plan(self) -> PenaltyPlan:
        """The plan that the fields describe."""
        own = {f.name: PLAN_FIELDS.get(f.name, f.name) for f in fields(PenaltyPlan)}
        return PenaltyPlan(**{k: getattr(self, n) for k, n in own.items() if hasattr(self, n)})


class FixedPenalty(nn.Module):
    """Base of companions without parameters, which only add a penalty."""

    lr = 0.0

    def own_loss(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """0: nothing to learn."""
        return z.new_zeros(())


class CompanionStack(nn.Module):
    """Several companions as one; each learns at its own rate."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        # Above 0 if any part learns; the training loop reads the rates of the parts.
        self.lr = max(cast(Companion, part).lr for part in parts)

    def own_loss(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Sum of their own losses."""
        return torch.stack([cast(Companion, part).own_loss(z, x, y) for part in self.parts]).sum()

    def penalty(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Sum of their penalties."""
        return torch.stack([cast(Companion, part).penalty(z, x, y) for part in self.parts]).sum()

    def after_step(self, done: float) -> None:
        """Pass the call on to those that act between steps."""
        for part in self.parts:
            if isinstance(part, ActsBetweenSteps):
                part.after_step(done)


@dataclass(frozen=True, kw_only=True)
class Stack(Defence):
    """Several defences on one channel; at most one has a penalty, and at most one learns the noise.

    Losses and penalties of companions add up. On the channel, sparse coding and clips come first,
    then the Gaussian noise of the run, once, however many parts are noisy; the other stages follow
    in the order of the parts. Stages after the noise can only lose information, so the penalty and
    `true_rate_nats`, both measured against the noise on z, remain bounds. Before the noise,
    rounding or pruning could turn small differences of z into large ones.

    Args:
        parts: Names and defences.

    The other arguments are those of `Defence`; `stack` fills them in.

    >>> Stack(summary="", parts=(("noise", NoiseOnly(summary="")),)).noisy
    True
    """

    parts: tuple[tuple[str, Defence], ...]

    def __post_init__(self) -> None:
        if problems := list(_problems(self.parts)):
            raise ConfigError("; ".join(problems))

    @property
    def noisy(self) -> bool:
        """Whether a part is noisy."""
        return any(part.noisy for _, part in self.parts)

    @property
    def needs_val(self) -> bool:  # type: ignore[override] # of a stack its parts decide
        """Whether a part sets something on validation images."""
        return any(part.needs_val for _, part in self.parts)

    def channel(self, noise_std: float) -> Channel:
        """Sparse coding, clips, the noise, then the parts' other stages."""
        stages = [stage for _, part in self.parts for stage in part.channel(noise_std).stages]
        codes = [s for s in stages if isinstance(s, SparseCoding)]
        clips = [s for s in stages if isinstance(s, Clip)]
        noise = super().channel(noise_std).stages  # the run's, once; the parts' copies are dropped
        rest = [s for s in stages if not isinstance(s, GaussianNoise | Clip | SparseCoding)]
        return Channel([*codes, *clips, *noise, *rest])

    def assemble(self, model: SplitModel, image_shape: Shape, num_classes: int) -> SplitModel:
        """The model with the layers of all parts added, in order."""
        for _, part in self.parts:
            model = part.assemble(model, image_shape, num_classes)
        return model

    def surrogate(self, feature_dim: int, num_classes: int, noise_std: float) -> nn.Module | None:
        """The surrogate of the part that has one."""
        return self._penalised().surrogate(feature_dim, num_classes, noise_std)

    def penalty_plan(self) -> PenaltyPlan:
        """The plan of the part with a surrogate."""
        return self._penalised().penalty_plan()

    def companion(self, model: SplitModel, image_shape: Shape, num_classes: int) -> TrainedBeside:
        """The companions of all parts as one."""
        made = [part.companion(model, image_shape, num_classes) for _, part in self.parts]
        found = [one for one in made if one is not None]
        return CompanionStack(found) if len(found) > 1 else next(iter(found), None)

    def settings(self) -> dict[str, Any]:
        """Settings of all parts; no two parts share a name."""
        return {k: v for _, part in self.parts for k, v in part.settings().items()}

    def setting_types(self) -> dict[str, Any]:
        """Types of the settings of all parts."""
        return {k: v for _, part in self.parts for k, v in part.setting_types().items()}

    def with_settings(self, settings: Mapping[str, Any]) -> "Stack":
        """The same stack with each setting given to the part that has it."""
        for key in settings:
            if key not in self.settings():
                raise ConfigError(unknown("setting", key, self.settings()))
        parts = (
            (n, p.with_settings({k: v for k, v in settings.items() if k in p.settings()}))
            for n, p in self.parts
        )
        return replace(self, parts=tuple(parts))

    def _penalised(self) -> Defence:
        """The part with a surrogate; without one, no defence."""
        return next((p for _, p in self.parts if has_surrogate(p)), Defence(summary=""))


def stack(parts: Sequence[tuple[str, Defence]]) -> Stack:
    """Named defences as one.

    Args:
        parts: Names and defences, in the order of their stages on the channel.

    Returns:
        The stack; its net is that of the last part with another net than the default.

    >>> from splitveil.defences.channel_only import TopKPruning
    >>> both = stack([("topk", TopKPruning(summary="")), ("noise", NoiseOnly(summary=""))])
    >>> [type(stage).__name__ for stage in both.channel(0.1).stages]
    ['GaussianNoise', 'TopK']
    """
    clients = [p.client for _, p in parts if p.client != Defence.client]
    return Stack(
        summary=" + ".join(p.summary for _, p in parts),
        client=clients[-1] if clients else Defence.client,
        parts=tuple(parts),
    )


def has_surrogate(defence: Defence) -> bool:
    """Whether a defence has a surrogate."""
    # Asked of the class: building the surrogate would draw random numbers.
    return type(defence).surrogate is not Defence.surrogate


def _problems(parts: Sequence[tuple[str, Defence]]) -> Iterator[str]:
    """Why these defences cannot be stacked."""
    names = [name for name, _ in parts]
    for name, part in parts:
        if type(part) is Defence:
            yield f"'{name}' is not a defence and cannot be stacked; leave it out"
        if not part.sends:
            yield f"'{name}' sends nothing, so nothing is left for another defence; give it alone"
    for name in dict.fromkeys(n for n in names if names.count(n) > 1):
        yield f"'{name}' appears twice in the stack {'+'.join(names)}; give it once"
    penalised = dict.fromkeys(name for name, part in parts if has_surrogate(part))
    if len(penalised) > 1:
        yield f"{_both(penalised)} each have a penalty, but a stack can have only one; choose one"
        return  # their settings share names, which would be reported as a second problem
    loud = dict.fromkeys(name for name, part in parts if part.learns_noise)
    if len(loud) > 1:
        yield f"{_both(loud)} each learn the noise, but only one part of a stack can; choose one"
    for name, part in dict(parts).items():
        # In a run without noise, the Gaussian noise that remains is the part's own.
        if part.channel(0.0).noise_std:
            yield (
                f"'{name}' adds Gaussian noise of its own, but a stack adds only the run's; use "
                "GaussianNoise(noise_std), or add the noise in a stage of your own"
            )
    yield from _shared(parts)


def _shared(parts: Sequence[tuple[str, Defence]]) -> Iterator[str]:
    """Settings that two of these defences have."""
    owners: dict[str, list[str]] = {}
    for name, part in dict(parts).items():
        for key in part.settings():
            owners.setdefault(key, []).append(name)
    for key, found in owners.items():
        if len(found) > 1:
            yield f"{_both(found)} each have a setting '{key}', which would be ambiguous; drop one"


def _both(names: Iterable[str]) -> str:
    return " and ".join(f"'{name}'" for name in names)
