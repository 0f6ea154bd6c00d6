"""Frozen records and protocols that cross rooms; nothing here knows of any room."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Generator, Tensor, nn

from splitveil.victim import BlackBox

Json = dict[str, Any]


@runtime_checkable
class Progress(Protocol):
    """Told how far a long piece of work has come; the command line draws a bar from it."""

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """`done` of `total` units are finished; `note` is a short text for the bar."""
        ...


def silent(done: int, total: int, note: str = "") -> None:
    """The progress display of somebody who wants none."""
    del done, total, note


@dataclass(frozen=True, kw_only=True)
class SurrogateOutput:
    """What a surrogate says of one batch.

    `loss` is the penalty rob_loss (scalar, minimise); `intra_mse` a detached log line;
    `diagnostics` detached tensors: scalars, at least `effective_sample_size` (fraction of M_c, mean
    over classes) and `true_rate` (nats per dimension, uniform weights, raw z); and
    `attention_weights` (n,), or (n, slots), of the batch's samples.
    """

    loss: Tensor
    intra_mse: Tensor
    diagnostics: dict[str, Tensor]


@runtime_checkable
class Surrogate(Protocol):
    """Estimates H(Z|Y) of a batch: z (n, d) or (n, c, h, w), y (n,) integers."""

    def __call__(self, z: Tensor, y: Tensor) -> SurrogateOutput:
        """The penalty of this batch."""
        ...


Features = Callable[[], Iterable[tuple[Tensor, Tensor]]]


@runtime_checkable
class Refits(Protocol):
    """A surrogate that is fitted to all training features at the end of an epoch."""

    def refit_stream(self, batches: Features, generator: Generator) -> None:
        """Fit anew; `batches()` gives clean features and labels, once per call."""
        ...


@runtime_checkable
class Remembers(Protocol):
    """A surrogate with a memory that fills while its penalty is not active yet."""

    def remember(self, z: Tensor, y: Tensor) -> None:
        """Keep what it needs of a batch, without measuring it."""
        ...


@runtime_checkable
class Reports(Protocol):
    """A surrogate with something to say at the logging cadence."""

    def report(self) -> None:
        """Write its log lines."""
        ...


@runtime_checkable
class Companion(Protocol):
    """A module that trains beside the model and makes the encoder pay: an adversary, say.

    One that is several has them as `parts`, an `nn.ModuleList`; each learns at its own rate.
    """

    @property
    def lr(self) -> float:
        """Adam's rate for its own parameters at the start of a run."""
        ...

    def learn(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Its own loss on a batch of clean z, images and labels; no gradient reaches z."""
        ...

    def penalty(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """What the encoder pays on the same batch, after `learn`; no gradient reaches itself."""
        ...


@runtime_checkable
class Paced(Protocol):
    """A companion that also acts between steps."""

    def pace(self, done: float) -> None:
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


@dataclass(frozen=True)
class Labelled:
    """Images (n, c, h, w) as floats in [0, 1] and their labels (n,), on one device."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


class Access(StrEnum):
    """What an attack may touch."""

    NONE = "none"
    LABEL = "label"
    BLACK_BOX = "black-box"
    REPEATS = "repeats"
    WHITE_BOX = "white-box"


@dataclass(frozen=True)
class Observation:
    """What the server holds for some images: smashed data z and its own answer (n,).

    `draws` (k, n, …) are the k sendings of the same images, for an attack that asks for repeats.
    """

    z: Tensor
    answer: Tensor
    draws: Tensor | None = None


Reconstruct = Callable[[Observation], Tensor]


@dataclass(frozen=True)
class Fitted:
    """A reconstructor, the training loss of each epoch it was fitted for, and its one network."""

    reconstruct: Reconstruct
    curve: tuple[float, ...] = ()
    net: nn.Module | None = None

    def __call__(self, seen: Observation) -> Tensor:
        """Images for what was observed."""
        return self.reconstruct(seen)


@runtime_checkable
class Attack(Protocol):
    """Fits on aux and queries, then turns observations into images. Success is not its business.

    It may also carry `min_aux` (fewer aux images are refused), `limit` (it is expensive: score it
    on that many images), `repeats` (how often each image is sent) and `effort` (its share of a
    progress bar); 1, none, 1 and 1 unless said.
    """

    @property
    def access(self) -> Access:
        """The threat model."""
        ...

    def fit(
        self, victim: BlackBox, aux: Labelled, generator: Generator, progress: Progress = silent
    ) -> Reconstruct:
        """Learn to reconstruct; `generator` is the only source of randomness."""
        ...


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Means over the scored images; `mse` low and `ssim`, `psnr` high favour the attacker.

    `accuracy` is the server's on the reconstructions: what they still tell of the class; None if
    nobody answers.
    """

    mse: float
    psnr: float
    psnr_pooled: float
    ssim: float | None
    ssim_zeropad: float
    ssim_valid: float | None
    accuracy: float | None
    lpips: float | None = None


@dataclass(frozen=True, kw_only=True)
class Record:
    """Everything measured of one run, with its passport; `record.json` is its `to_dict`.

    `accuracy` is None if nobody answers what the client sends.
    """

    accuracy: float | None
    attacks: Mapping[str, Json]
    strongest: Json
    worst_case: Json
    ceiling: Json
    floor: Json
    leakage: float
    true_rate_nats: float | None
    client: Json
    config: Json
    splits: Json
    seeds: Json
    versions: Json
    device: str
    seconds: Json
    audit: Json
    training: Json = field(default_factory=dict)
    strongest_blackbox: Json = field(default_factory=dict)
    flags: list[Json] = field(default_factory=list)
    per_image: Json = field(default_factory=dict)
    certificates: Json = field(default_factory=dict)
    leaks: Json = field(default_factory=dict)

    def to_dict(self) -> Json:
        """Plain JSON types only; what was not measured is null, never NaN."""
        return asdict(self)

    def to_json(self) -> str:
        """Text of `record.json`; strict JSON."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls, data: Json) -> "Record":
        """Read back what `to_dict` wrote."""
        return cls(**data)
