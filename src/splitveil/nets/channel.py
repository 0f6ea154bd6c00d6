"""Channel stages: everything that happens to smashed data on the client before the wire.

A stage is a module called with (z, generator), where None means torch's global stream. It acts the
same in training, in deployment and under attack; `Channel` chains stages. A new stage is one class
here.

Noise is continuous in training. In a client that is deployed or attacked it is noise on a grid, see
`splitveil.grid`: `deployed` sets that.

A learned stage has parameters in the shape of the wire. A defence does not know that shape when it
names its stages; `split.with_stage_shapes` sets it once the net is cut. A stage that is called
earlier takes the shape of its input.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import ClassVar, Literal, get_args

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from splitveil.errors import ConfigError, Range
from splitveil.grid import REACH, STEPS, step_of
from splitveil.nets.blocks import is_plain
from splitveil.nets.exit import TappedClient
from splitveil.rng import normal_like, rounded_like

Shape = tuple[int, ...]
Bounds = tuple[float, float]
Noise = Literal["gaussian", "laplace"]

MAX_BITS = 16  # float32 can still represent all levels
LOG_SCALE_LIMIT = 10.0  # keeps exp and its gradient finite
# Learned scales move by 3 g for a parameter g: SGD steps that suit weights would hardly move them.
RATE = 3.0
SPARE = 0.8  # of 16 bits that z may take: the rest is for the noise and an int8 client's error
MAX_WIRE = 4096  # numbers on the wire; a dictionary has their square
SQUASHED_TO: Mapping[type[nn.Module], Bounds] = {nn.Sigmoid: (0.0, 1.0), nn.Tanh: (-1.0, 1.0)}
_TRANSPARENT = (nn.Identity, nn.Flatten, nn.Unflatten)


class Stage(nn.Module):
    """Base of the stages here; `repr` shows the attributes named in `shown`."""

    shown: ClassVar[tuple[str, ...]] = ()

    def extra_repr(self) -> str:
        """The settings of the stage."""
        return ", ".join(f"{name}={getattr(self, name)}" for name in self.shown)


def nearest_step(z: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The integers q = rint(z/h), as float64, and the step h of the grid for noise of this scale.

    |q| is at most `REACH`; what is not finite becomes NaN. Nothing here depends on the machine.
    """
    step = (scale.detach().to(torch.float32) / STEPS).double()
    q = (z.detach().double() / step).round().clamp(-REACH, REACH)
    return torch.where(z.isfinite(), q, math.nan), step


def on_grid(z: Tensor, scale: Tensor, kind: Noise, generator: Generator | None) -> Tensor:
    """Z with noise on the grid, h·(q + K): the same numbers as the client of an export sends."""
    q, step = nearest_step(z, scale)
    sent = ((q + rounded_like(z, kind, generator)) * step).to(z.dtype)
    return sent + (z - z.detach())  # adds exactly 0, with the gradient of z


class GaussianNoise(Stage):
    """Adds independent Gaussian noise: z̃ = z + σ·n, in eval mode too.

    The noise is the defence, not a training trick. `grid` says whether it is noise on a grid.

    Args:
        std: Standard deviation σ ≥ 0, in the units of z.

    >>> sent = GaussianNoise(0.1)(torch.zeros(10_000), torch.Generator().manual_seed(0))
    >>> round(sent.std().item(), 2)
    0.1
    """

    shown = ("std",)

    def __init__(self, std: float) -> None:
        super().__init__()
        Range(0).check("noise_std", std)
        self.std, self.grid = std, False

    def forward(self, z: Tensor, generator: Generator | None = None) -> Tensor:
        """Z with fresh noise."""
        if self.grid and self.std > 0:
            return on_grid(z, _on(z, self.std), "gaussian", generator)
        return z + self.std * normal_like(z, generator)


def _on(z: Tensor, value: float) -> Tensor:
    """A number on the device of z, made there: copied from the host it would break a CUDA graph."""
    return torch.full((), value, dtype=torch.float32, device=z.device)


def _without(z: Tensor, mask: Tensor) -> Tensor:
    """Z with zeros where the mask is true."""
    # On a clone: masked_fill out of place would lose z's memory layout.
    return z.clone().masked_fill_(mask, 0.0)


class Dropout(Stage):
    """Zeroes each value with probability p, in eval mode too.

    As published, the other values are not multiplied by 1/(1 − p), unlike in `nn.Dropout`. The
    gradient is 1 where a value is sent and 0 where it is not.

    Args:
        p: Probability in [0, 1).

    >>> sent = Dropout(0.25)(torch.ones(200_000), torch.Generator().manual_seed(0))
    >>> round(sent.mean().item(), 2)
    0.75
    """

    shown = ("p",)

    def __init__(self, p: float) -> None:
        super().__init__()
        Range(0, 1, below=True, hint="0 drops nothing").check("dropout", p)
        self.p = p

    def forward(self, z: Tensor, generator: Generator | None = None) -> Tensor:
        """Z with freshly drawn zeros."""
        where = z.device if generator is None else generator.device
        # float32 whatever z is: in bfloat16 the share would come in steps of 1/256.
        drawn = torch.rand(z.shape, dtype=torch.float32, device=where, generator=generator)
        return _without(z, (drawn < self.p).to(z.device))


class TopK(Stage):
    """Zeroes the share `prune` of each image's values, those of smallest magnitude.

    Of d values, round(prune · d) become 0; among equal magnitudes the first ones. The published
    code prunes the smallest signed values of the whole flattened batch, so that what is sent of an
    image depends on the others; here it does not. The gradient is 1 where a value is sent and 0
    where it is not.

    Args:
        prune: Share in [0, 1).

    >>> TopK(0.5)(torch.tensor([[0.1, -0.9, 0.3, 0.2]])).tolist() == [
    ...     torch.tensor([0.0, -0.9, 0.3, 0.0]).tolist()
    ... ]
    True
    """

    shown = ("prune",)

    def __init__(self, prune: float) -> None:
        super().__init__()
        Range(0, 1, below=True, hint="0 prunes nothing").check("prune", prune)
        self.prune = prune

    def forward(self, z: Tensor, generator: Generator | None = None) -> Tensor:
        """Z (n, …) with round(prune · d) values of every image zeroed; draws nothing."""
        size = z.detach().flatten(1).abs()  # (n, d)
        smallest = size.argsort(dim=1, stable=True)[:, : round(self.prune * size.shape[1])]
        pruned = torch.zeros_like(size, dtype=torch.bool).scatter(1, smallest, value=True)
        return _without(z, pruned.reshape(z.shape))


class Quantise(Stage):
    """Rounds to the nearest of 2^bits equally spaced levels from 0 to 1, both included.

    .. math:: q(z) = round(s · clip(z, 0, 1)) / s,  s = 2^{bits} − 1

    [0, 1] is the range of the encoder's sigmoid; values outside, for example after noise, are
    clipped. The gradient is straight-through: 1 in [0, 1], 0 outside.

    Args:
        bits: Whole number in 1..16.

    >>> Quantise(2)(torch.tensor([-0.3, 0.2, 0.6, 0.9])).mul(3).round().tolist()
    [0.0, 1.0, 2.0, 3.0]
    """

    shown = ("bits",)

    def __init__(self, bits: int) -> None:
        super().__init__()
        Range(1, MAX_BITS).check("bits", bits)
        self.bits = bits

    def forward(self, z: Tensor, generator: Generator | None = None) -> Tensor:
        """The nearest levels of z; draws nothing."""
        steps = (1 << self.bits) - 1
        clipped = z.clamp(0, 1)
        # Not in half precision, where products could round to a neighbouring level.
        wide = clipped.detach().to(torch.promote_types(z.dtype, torch.float32))
        # A tensor, because a GPU multiplies by the reciprocal of a number: one bit off the CPU.
        whole = torch.full((), float(steps), dtype=wide.dtype, device=wide.device)
        level = ((wide * whole).round() / whole).to(z.dtype)
        return level + (clipped - clipped.detach())  # adds exactly 0, with the clip's gradient


class Clip(Stage):
    """Moves values outside [low, high] to the nearer end; their gradient is 0.

    Before the noise it bounds z, which certificates over a population need.

    Args:
        low: Finite lower end.
        high: Finite upper end, > low.

    >>> Clip(-1.0, 1.0)(torch.tensor([-3.0, 0.5, 2.0])).tolist()
    [-1.0, 0.5, 1.0]
    """

    shown = ("low", "high")

    def __init__(self, low: float, high: float) -> None:
        super().__init__()
        if not -math.inf < low < high < math.inf:
            raise ConfigError(f"clip needs finite low < high, got [{low}, {high}]")
        self.low, self.high = low, high

    def forward(self, z: Tensor, generator: Generator | None = None) -> Tensor:
        """Z inside the bounds; draws nothing."""
        return z.clamp(self.low, self.high)


class LearnedStage(Stage, ABC):
    """Base of stages whose parameters have the shape of the wire.

    `shape` is the shape of one image's smashed data, None before `size_to`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shape: Shape | None = None

    def size_to(self, shape: Shape, device: torch.device | str = "cpu") -> None:
        """Make the parameters in this shape; a stage that has some must have the same shape."""
        if self.shape is None:
            self._make(shape, device)
            self.shape = shape
        if self.shape != shape:
            raise ConfigError(
                f"{type(self).__name__} was made for smashed data of shape {self.shape}, got "
                f"{shape}; build a new channel for another net or image size"
            )

    @abstractmethod
    def _make(self, shape: Shape, device: torch.device | str) -> None:
        """Make the parameters in the shape of the wire."""


def learned_stages(channel: nn.Module) -> Iterator[LearnedStage]:
    """The stages of a channel that have parameters."""
    return (m for m in channel.modules() if isinstance(m, LearnedStage))


def standard_noise(like: Tensor, kind: Noise, generator: Generator | None) -> Tensor:
    """Noise of mean 0 and scale 1: standard normal (variance 1) or Laplace (variance 2)."""
    if kind == "gaussian":
        return normal_like(like, generator)
    # n₁n₂ − n₃n₄ of four standard normals is Laplace; unlike a logarithm it is never infinite.
    a, b, c, d = (normal_like(like, generator) for _ in range(4))
    return a * b - c * d


class LearnedNoise(LearnedStage):
    r"""Noise with a learned scale, and optionally mean, for every value of the wire.

    .. math:: \tilde z = z + m + e^{s} \varepsilon, \qquad
        \varepsilon \sim N(0, 1) \ \text{or}\ \mathrm{Laplace}(0, 1)

    in eval mode too. s and m have the shape of one image's z. s = log `start` + 3 g, where g and m
    are learned and start at 0, so that weight decay pulls towards the start.

    Args:
        start: Scale e^s before training, > 0.
        kind: Distribution of ε, `gaussian` or `laplace`.
        moves: Whether the mean m is learned too; else it is 0.

    >>> noise = LearnedNoise(0.5)
    >>> noise.size_to((2,))
    >>> noise.log_scales().exp().tolist()
    [0.5, 0.5]
    """

    shown = ("start", "kind", "moves")

    gain: nn.Parameter | None
    location: nn.Parameter | None

    def __init__(self, start: float, kind: Noise = "gaussian", *, moves: bool = False) -> None:
        super().__init__()
        Range(0, above=True).check("the initial scale of the learned noise", start)
        if kind not in get_args(Noise):
            raise ConfigError(f"noise must be one of {', '.join(get_args(Noise))}; got '{kind}'")
        self.start, self.kind, self.moves, self.grid = start, kind, moves, False
        self.register_parameter("gain", None)
        self.register_parameter("location", None)

    def _make(self, shape: Shape, device: torch.device | str) -> None:
        self.gain = nn.Parameter(torch.zeros(shape, device=device))
        if self.moves:
            self.location = nn.Parameter(torch.zeros(shape, device=device))

    def log_scales(self) -> Tensor:
        """S of the formula, within ±10, in the shape of the wire."""
        if self.gain is None:
            raise ConfigError("the noise has no scales yet; set the shape of the wire: `size_to`")
        s = math.log(self.start) + RATE * self.gain
        # The clamp is outside the gradient, so that a scale beyond the limits can still return.
        return s + (s.clamp(-LOG_SCALE_LIMIT, LOG_SCALE_LIMIT) - s).detach()

    def forward(self, z: Tensor, generator: Generator | None = None) -> Tensor:
        """Z with fresh noise."""
        self.size_to(tuple(z.shape[1:]), z.device)
        scale = self.log_scales().exp()
        if self.grid:
            moved = z if self.location is None else z.double() + self.location.double()
            return on_grid(moved, scale, self.kind, generator).to(z.dtype)
        sent = z + scale.to(z.dtype) * standard_noise(z, self.kind, generator)
        return sent if self.location is None else sent + self.location.to(z.dtype)


class SparseCoding(LearnedStage):
    r"""Approximates z by a few atoms of a learned dictionary; draws nothing.

    .. math:: z \leftarrow W^\top S_\theta(W z), \qquad
        S_\theta(a) = \mathrm{sign}(a) \max(0, |a| - \theta)

    W (d, d) is trained with the model; this is one step of sparse coding.

    Args:
        threshold: θ ≥ 0.
        start: W at first: `orthogonal`, so that θ = 0 sends z itself, or `rows`, random rows of
            length 1.

    >>> code = SparseCoding(0.0)
    >>> torch.allclose(code(torch.tensor([[3.0, 4.0]])), torch.tensor([[3.0, 4.0]]))
    True
    """

    shown = ("threshold",)

    dictionary: nn.Parameter | None

    def __init__(
        self, threshold: float, start: Literal["orthogonal", "rows"] = "orthogonal"
    ) -> None:
        super().__init__()
        Range(0).check("sparse_threshold", threshold)
        self.threshold, self.start = threshold, start
        self.register_parameter("dictionary", None)

    def _make(self, shape: Shape, device: torch.device | str) -> None:
        floats = torch.Size(shape).numel()
        if floats > MAX_WIRE:
            raise ConfigError(
                "sparse coding stores a square matrix with a row for each number on the wire, so "
                f"the wire may have at most {MAX_WIRE}, got {floats}; cut later, for example "
                "--net resnet20@8 or --net mobilenetv2"
            )
        # Drawn on the CPU, for the same start on every device.
        atoms = torch.empty(floats, floats)
        if self.start == "rows":
            atoms = F.normalize(atoms.normal_(), dim=1)
        else:
            nn.init.orthogonal_(atoms)
        self.dictionary = nn.Parameter(atoms.to(device))

    def code(self, z: Tensor) -> Tensor:
        """S_θ(W z) of z (n, …), shape (n, d), in float32 or better."""
        atoms = self._atoms(z)
        with torch.autocast(z.device.type, enabled=False):
            return F.softshrink(z.flatten(1).to(atoms.dtype) @ atoms.T, self.threshold)

    def forward(self, z: Tensor, generator: Generator | None = None) -> Tensor:
        """Z (n, …) from its code, in z's shape, type and memory layout."""
        code = self.code(z)
        with torch.autocast(z.device.type, enabled=False):
            made = (code @ self._atoms(z)).reshape(z.shape)
        return torch.empty_like(z).copy_(made)

    def _atoms(self, z: Tensor) -> Tensor:
        self.size_to(tuple(z.shape[1:]), z.device)
        assert self.dictionary is not None  # noqa: S101 - size_to made it
        return self.dictionary.to(torch.promote_types(z.dtype, torch.float32))


class Channel(nn.Module):
    """Stages applied in order; without stages the identity.

    Args:
        stages: Modules called with (z, generator).

    >>> Channel([GaussianNoise(3.0), GaussianNoise(4.0)]).noise_std
    5.0
    """

    def __init__(self, stages: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    @property
    def noise_std(self) -> float:
        """Standard deviation of its `GaussianNoise` stages together; 0 without any."""
        variances = [s.std**2 for s in self.stages if isinstance(s, GaussianNoise)]
        return float(torch.tensor(sum(variances), dtype=torch.float64).sqrt())

    def forward(self, z: Tensor, generator: Generator | None = None) -> Tensor:
        """What is sent for smashed data z (n, …)."""
        for stage in self.stages:
            z = stage(z, generator)
        return z


def deployed(channel: nn.Module) -> nn.Module:
    """A copy of a channel as it is deployed: its noise is on a grid.

    >>> sent = deployed(Channel([GaussianNoise(0.5)]))(torch.rand(9), torch.Generator())
    >>> bool((sent * 32 == (sent * 32).round()).all())  # h = 1/32
    True
    """
    found = copy.deepcopy(channel)
    for stage in found.modules():
        if isinstance(stage, GaussianNoise | LearnedNoise):
            stage.grid = True
    return found


def adds_noise(channel: nn.Module) -> bool:
    """Whether a channel adds noise that `deployed` draws on a grid.

    >>> adds_noise(Channel([GaussianNoise(0.5)])), adds_noise(Channel([TopK(0.5)]))
    (True, False)
    """
    noises = (s for s in channel.modules() if isinstance(s, GaussianNoise | LearnedNoise))
    return any(isinstance(s, LearnedNoise) or s.std > 0 for s in noises)


def wire_bits(encoder: nn.Module, channel: nn.Module) -> int:
    """Bits of each number that a deployed client sends: 16 where steps of a grid surely fit, or 32.

    Steps of the grid are integers; without a grid, and where each number has a grid of its own,
    floats are sent.

    >>> wire_bits(nn.Sigmoid(), Channel([GaussianNoise(0.025)])), wire_bits(nn.Sigmoid(), Channel())
    (16, 32)
    """
    every = [m for m in channel.modules() if isinstance(m, Stage)]
    kept = [m for m in every if not isinstance(m, Dropout | TopK)]
    noises = sum(isinstance(m, GaussianNoise | LearnedNoise) for m in every)
    last = kept[-1] if kept else None
    bounds = before_noise(encoder, channel).bounds
    if not isinstance(last, GaussianNoise) or last.std <= 0 or bounds is None or noises > 1:
        return 32
    steps = max(abs(v) for v in bounds) / float(step_of(last.std))
    return 16 if steps <= SPARE * torch.iinfo(torch.int16).max else 32


def insert_before_sigmoid(layers: nn.Module, new: nn.Module) -> nn.Sequential:
    """The layers with a new one before their final sigmoid or tanh, or at the end without one.

    >>> insert_before_sigmoid(nn.Sequential(nn.ReLU(), nn.Sequential(nn.Sigmoid())), nn.Identity())
    Sequential(
      (0): ReLU()
      (1): Sequential(
        (0): Identity()
        (1): Sigmoid()
      )
    )
    """
    plain = list(layers) if type(layers) is nn.Sequential else [layers]
    if plain and type(plain[-1]) in SQUASHED_TO:
        return nn.Sequential(*plain[:-1], new, plain[-1])
    if plain and type(plain[-1]) is nn.Sequential:
        return nn.Sequential(*plain[:-1], insert_before_sigmoid(plain[-1], new))
    return nn.Sequential(*plain, new)


@dataclass(frozen=True, kw_only=True)
class BeforeNoise:
    """A channel up to its first Gaussian noise; later stages can only lose information.

    Args:
        stages: The stages before the noise.
        noise_std: σ of the noise; 0 if nothing is random, None for randomness of another kind. Of
            several noises on grids that of the first: what follows is a function of its result.
        bounds: Range of every value that enters the noise; None if it is not bounded.
        random: Whether a stage before the noise draws.
        grid: Whether the noise is on a grid; then z enters it rounded, see `rounded`.
    """

    stages: Channel
    noise_std: float | None
    bounds: Bounds | None
    random: bool
    grid: bool

    def rounded(self, z: Tensor) -> Tensor:
        """H·rint(z/h) on the grid of the noise, with the gradient of z; z itself without a grid."""
        if not self.grid or not self.noise_std:
            return z
        q, step = nearest_step(z, _on(z, self.noise_std))
        return (q * step).to(z.dtype) + (z - z.detach())


def before_noise(encoder: nn.Module, channel: nn.Module) -> BeforeNoise:
    """What comes before the noise of a client; the output of an unknown stage counts as unbounded.

    >>> found = before_noise(nn.Sigmoid(), Channel([TopK(0.5), GaussianNoise(0.1), Quantise(4)]))
    >>> found.noise_std, found.bounds, len(found.stages.stages)
    (0.1, (0.0, 1.0), 1)
    """
    every = list(channel.stages) if type(channel) is Channel else [channel]
    stds = [s.std if type(s) is GaussianNoise else None for s in every]
    stages = [(s, std) for s, std in zip(every, stds, strict=True) if std != 0]
    start = next((i for i, (_, std) in enumerate(stages) if std), len(stages))
    before = [s for s, _ in stages[:start]]
    found = list(takewhile(lambda stage: stage[1], stages[start:]))
    grid = any(s.grid for s, _ in found if isinstance(s, GaussianNoise))
    noise = [std for _, std in found[: 1 if grid else None]]
    bounds = _output_range(encoder)
    for stage in before:
        bounds = _through(stage, bounds)
    random = any(type(s) not in (Clip, SparseCoding, TopK, Quantise) for s in before)
    return BeforeNoise(
        stages=Channel(before),
        noise_std=None if random and not noise else math.hypot(*(s for s in noise if s)),
        bounds=bounds,
        random=random,
        grid=grid,
    )


def _output_range(module: nn.Module) -> Bounds | None:
    """Range of a module's outputs for any input, as its last layer bounds it; None: unbounded."""
    if type(module) in SQUASHED_TO:
        return SQUASHED_TO[type(module)]
    if type(module) is Clip:
        return module.low, module.high
    if isinstance(module, TappedClient):
        return _output_range(nn.Sequential(module.body[: module.tap], module.projection))
    if is_plain(module):
        empty = [m for m in module if is_plain(m) and not len(m)]
        layers = [m for m in module if type(m) not in _TRANSPARENT and m not in empty]
        return _output_range(layers[-1]) if layers else None
    return None


def _through(stage: nn.Module, bounds: Bounds | None) -> Bounds | None:
    """Range of a stage's outputs for inputs within `bounds`."""
    if type(stage) is Clip:
        return stage.low, stage.high
    if type(stage) is Quantise:
        return 0.0, 1.0
    if type(stage) in (Dropout, TopK) and bounds is not None:
        return min(bounds[0], 0.0), max(bounds[1], 0.0)
    return None
