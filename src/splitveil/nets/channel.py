"""Channel stages: everything that happens to smashed data on the client before the wire.

A stage is a module called with (z, generator). It acts the same in training, in deployment and
under attack; `Channel` chains stages. A new stage is one class here.

A learned stage has parameters in the shape of the wire, which a defence does not know when it names
its stages: `split.sized` gives them to a model's stages once the net is cut. A stage that is called
before takes its shape from what it is given.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from splitveil.errors import ConfigError, Range
from splitveil.rng import normal_like

Shape = tuple[int, ...]
Bounds = tuple[float, float]
Noise = Literal["gaussian", "laplace"]

MAX_BITS = 16  # float32 still tells all levels apart
LOG_SCALE_LIMIT = 10.0  # keeps exp and its gradient finite
RATE = 3.0  # of learned scales: SGD's steps fit for weights would leave them where they start
MAX_WIRE = 4096  # a dictionary has wire² numbers
SQUASHED_TO: Mapping[type[nn.Module], Bounds] = {nn.Sigmoid: (0.0, 1.0), nn.Tanh: (-1.0, 1.0)}
_TRANSPARENT = (nn.Identity, nn.Flatten, nn.Unflatten)


class GaussianNoise(nn.Module):
    """Adds independent Gaussian noise of standard deviation `std`: z̃ = z + σ·n.

    Also in eval mode: the noise is the defence, not a training trick.
    """

    def __init__(self, std: float) -> None:
        super().__init__()
        Range(0).check("noise_std", std)
        self.std = std

    def forward(self, z: Tensor, generator: Generator | None = None) -> Tensor:
        """Z with fresh noise from `generator` (None: torch's global stream)."""
        return z + self.std * normal_like(z, generator)

    def extra_repr(self) -> str:
        """The one number."""
        return f"std={self.std}"


def _without(z: Tensor, mask: Tensor) -> Tensor:
    """Z with zeros where the mask is true."""
    return z.clone().masked_fill_(mask, 0.0)  # out of place it would lose z's memory layout


class Dropout(nn.Module):
    """Zeroes each value with probability `p`, by a fresh mask per call; the rest is not rescaled.

    Also in eval mode, and without the factor 1/(1 − p) of `nn.Dropout`, as published. The gradient
    is 1 where a value is sent and 0 where it is not.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        Range(0, 1, below=True, hint="0 drops nothing").check("dropout", p)
        self.p = p

    def forward(self, z: Tensor, generator: Generator | None = None) -> Tensor:
        """Z with zeros drawn from `generator` (None: torch's global stream)."""
        where = z.device if generator is None else generator.device
        # float32 whatever z is: in bfloat16 the share would come in steps of 1/256.
        drawn = torch.rand(z.shape, dtype=torch.float32, device=where, generator=generator)
        return _without(z, (drawn < self.p).to(z.device))

    def extra_repr(self) -> str:
        """The one number."""
        return f"p={self.p}"


class TopK(nn.Module):
    """Zeroes the share `prune` of each image's values, those of smallest magnitude.

    Of d values round(prune · d) go; of equal ones the first go first. The published code prunes
    the smallest values, signs counted, of the whole flattened batch, so that what is sent of one
    image depends on its neighbours; here it does not. The gradient is 1 where a value is sent and
    0 where it is not.

    >>> TopK(0.5)(torch.tensor([[0.1, -0.9, 0.3, 0.2]])).tolist() == [
    ...     torch.tensor([0.0, -0.9, 0.3, 0.0]).tolist()
    ... ]
    True
    """

    def __init__(self, prune: float) -> None:
        super().__init__()
        Range(0, 1, below=True, hint="0 prunes nothing").check("prune", prune)
        self.prune = prune

    def forward(self, z: Tensor, generator: Generator | None = None) -> Tensor:
        """Z (n, …) with round(prune · d) zeros more in every image; draws nothing."""
        del generator
        size = z.detach().flatten(1).abs()  # (n, d)
        smallest = size.argsort(dim=1, stable=True)[:, : round(self.prune * size.shape[1])]
        pruned = torch.zeros_like(size, dtype=torch.bool).scatter(1, smallest, value=True)
        return _without(z, pruned.reshape(z.shape))

    def extra_repr(self) -> str:
        """The one number."""
        return f"prune={self.prune}"


class Quantise(nn.Module):
    """Rounds to the nearest of 2^bits equally spaced levels from 0 to 1, both included.

    .. math:: q(z) = round(s · clip(z, 0, 1)) / s,  s = 2^{bits} − 1

    [0, 1] is the range of the encoder's sigmoid; what lies outside, after noise say, is clipped.
    The gradient is straight through: 1 in [0, 1], 0 outside.

    >>> Quantise(2)(torch.tensor([-0.3, 0.2, 0.6, 0.9])).mul(3).round().tolist()
    [0.0, 1.0, 2.0, 3.0]
    """

    def __init__(self, bits: int) -> None:
        super().__init__()
        Range(1, MAX_BITS).check("bits", bits)
        self.bits = bits

    def forward(self, z: Tensor, generator: Generator | None = None) -> Tensor:
        """The nearest levels of z; draws nothing."""
        del generator
        steps = (1 << self.bits) - 1
        clipped = z.clamp(0, 1)
        # Never in half precision, whose products would round to a neighbouring level.
        wide = clipped.detach().to(torch.promote_types(z.dtype, torch.float32))
        # By a tensor: a GPU would multiply by the reciprocal of a number, one bit beside the CPU.
        whole = torch.full((), float(steps), dtype=wide.dtype, device=wide.device)
        level = ((wide * whole).round() / whole).to(z.dtype)
        return level + (clipped - clipped.detach())  # exactly 0, with the gradient of the clip

    def extra_repr(self) -> str:
        """The one number."""
        return f"bits={self.bits}"


class Clip(nn.Module):
    """Moves values outside [low, high] to the nearer end; the gradient there is 0.

    Before the noise it bounds z, which a certificate over a population needs.

    >>> Clip(-1.0, 1.0)(torch.tensor([-3.0, 0.5, 2.0])).tolist()
    [-1.0, 0.5, 1.0]
    """

    def __init__(self, low: float, high: float) -> None:
        super().__init__()
        if not -math.inf < low < high < math.inf:
            raise ConfigError(f"clip needs finite low < high, got [{low}, {high}]")
        self.low, self.high = low, high

    def forward(self, z: Tensor, generator: Generator | None = None) -> Tensor:
        """Z inside the bounds; draws nothing."""
        del generator
        return z.clamp(self.low, self.high)

    def extra_repr(self) -> str:
        """The two numbers."""
        return f"low={self.low}, high={self.high}"


class LearnedStage(nn.Module, ABC):
    """Base of stages whose parameters have the wire's shape.

    `shape` is that of one image's smashed data; None before `size_to`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shape: Shape | None = None

    def size_to(self, shape: Shape, device: torch.device | str = "cpu") -> None:
        """Make the parameters; a stage that has them must have them in this shape."""
        if self.shape is None:
            self._make(shape, device)
            self.shape = shape
        if self.shape != shape:
            raise ConfigError(
                f"{type(self).__name__} was made for smashed data of shape {self.shape}, got "
                f"{shape}; build the defence's channel anew for another net or image size"
            )

    @abstractmethod
    def _make(self, shape: Shape, device: torch.device | str) -> None:
        """Give the parameters the wire's shape."""


def learned_stages(channel: nn.Module) -> Iterator[LearnedStage]:
    """The stages of a channel that have parameters."""
    return (m for m in channel.modules() if isinstance(m, LearnedStage))


def standard_noise(like: Tensor, kind: Noise, generator: Generator | None) -> Tensor:
    """Noise of mean 0 and scale 1: standard normal (variance 1) or Laplace (variance 2).

    The determinant n₁n₂ − n₃n₄ of four standard normals is Laplace: no logarithm, no infinity.
    """
    if kind == "gaussian":
        return normal_like(like, generator)
    a, b, c, d = (normal_like(like, generator) for _ in range(4))
    return a * b - c * d


class LearnedNoise(LearnedStage):
    r"""Noise whose scale, and on request location, is learned for every value of the wire.

    .. math:: \tilde z = z + m + e^{s} \varepsilon, \qquad
        \varepsilon \sim N(0, 1) \ \text{or}\ \mathrm{Laplace}(0, 1)

    s and m have the shape of one image's z. s is log `start` + 3 g; g and m are learned and start
    at 0, so that weight decay pulls towards the start. Also in eval mode.
    """

    gain: nn.Parameter | None
    location: nn.Parameter | None

    def __init__(self, start: float, kind: Noise = "gaussian", *, moves: bool = False) -> None:
        super().__init__()
        Range(0, above=True).check("the noise's first scale", start)
        if kind not in ("gaussian", "laplace"):
            raise ConfigError(f"the noise must be one of gaussian, laplace; got '{kind}'")
        self.start, self.kind, self.moves = start, kind, moves
        self.register_parameter("gain", None)
        self.register_parameter("location", None)

    def _make(self, shape: Shape, device: torch.device | str) -> None:
        self.gain = nn.Parameter(torch.zeros(shape, device=device))
        if self.moves:
            self.location = nn.Parameter(torch.zeros(shape, device=device))

    def log_scales(self) -> Tensor:
        """S of the formula, within ±10, in the wire's shape.

        Beyond the limits the gradient still passes: a scale that overshot finds its way back.
        """
        if self.gain is None:
            raise ConfigError("the noise has no scales yet; give it the wire's shape by `size_to`")
        s = math.log(self.start) + RATE * self.gain
        return s + (s.clamp(-LOG_SCALE_LIMIT, LOG_SCALE_LIMIT) - s).detach()

    def forward(self, z: Tensor, generator: Generator | None = None) -> Tensor:
        """Z with fresh noise from `generator` (None: torch's global stream)."""
        self.size_to(tuple(z.shape[1:]), z.device)
        noise = standard_noise(z, self.kind, generator)
        sent = z + self.log_scales().exp().to(z.dtype) * noise
        return sent if self.location is None else sent + self.location.to(z.dtype)

    def extra_repr(self) -> str:
        """What it was made with."""
        return f"start={self.start}, kind={self.kind}, moves={self.moves}"


class SparseCoding(LearnedStage):
    r"""Sends what few atoms of a learned dictionary say of z; draws nothing.

    .. math:: z \leftarrow W^\top S_\theta(W z), \qquad
        S_\theta(a) = \mathrm{sign}(a) \max(0, |a| - \theta)

    W (d, d) is trained with the model. It starts orthogonal, so that θ = 0 would send z itself, or
    with random rows of length 1. One step of sparse coding.
    """

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
                f"sparse coding holds wire² numbers, and the wire has {floats}; the most is "
                f"{MAX_WIRE}: cut later, for example --net resnet20@8 or --net mobilenetv2"
            )
        # Drawn on the CPU: the same start on any device.
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
        del generator
        code = self.code(z)
        with torch.autocast(z.device.type, enabled=False):
            made = (code @ self._atoms(z)).reshape(z.shape)
        return torch.empty_like(z).copy_(made)

    def _atoms(self, z: Tensor) -> Tensor:
        self.size_to(tuple(z.shape[1:]), z.device)
        assert self.dictionary is not None  # noqa: S101 - size_to made it
        return self.dictionary.to(torch.promote_types(z.dtype, torch.float32))

    def extra_repr(self) -> str:
        """The one number."""
        return f"threshold={self.threshold}"


class Channel(nn.Module):
    """Stages in order; with none it is the identity."""

    def __init__(self, stages: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    @property
    def noise_std(self) -> float:
        """Standard deviation of the Gaussian noise it adds in all; 0 without noise."""
        variances = [s.std**2 for s in self.stages if isinstance(s, GaussianNoise)]
        return float(torch.tensor(sum(variances), dtype=torch.float64).sqrt())

    def forward(self, z: Tensor, generator: Generator | None = None) -> Tensor:
        """What is sent for smashed data z."""
        for stage in self.stages:
            z = stage(z, generator)
        return z


def insert_before_sigmoid(layers: nn.Module, new: nn.Module) -> nn.Sequential:
    """The layers with a new one before the sigmoid or tanh that ends them, or else behind them.

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
    """A channel up to its first Gaussian noise; what follows can only lose information.

    `noise_std` is 0 if nothing random is sent, and None if the randomness is of another kind than
    Gaussian noise. `bounds` hold for every z that enters the noise, or are None; `random` says
    whether a stage before the noise draws.
    """

    stages: Channel
    noise_std: float | None
    bounds: Bounds | None
    random: bool


def before_noise(encoder: nn.Module, channel: nn.Module) -> BeforeNoise:
    """What stands before the noise of a client; a stage it does not know counts as unbounded.

    >>> found = before_noise(nn.Sigmoid(), Channel([TopK(0.5), GaussianNoise(0.1), Quantise(4)]))
    >>> found.noise_std, found.bounds, len(found.stages.stages)
    (0.1, (0.0, 1.0), 1)
    """
    every = list(channel.stages) if type(channel) is Channel else [channel]
    stds = [s.std if type(s) is GaussianNoise else None for s in every]
    stages = [(s, std) for s, std in zip(every, stds, strict=True) if std != 0]
    start = next((i for i, (_, std) in enumerate(stages) if std), len(stages))
    before = [s for s, _ in stages[:start]]
    noise = [std for _, std in takewhile(lambda stage: stage[1], stages[start:])]
    bounds = _output_range(encoder)
    for stage in before:
        bounds = _through(stage, bounds)
    random = any(type(s) not in (Clip, SparseCoding, TopK, Quantise) for s in before)
    return BeforeNoise(
        stages=Channel(before),
        noise_std=None if random and not noise else math.hypot(*(s for s in noise if s)),
        bounds=bounds,
        random=random,
    )


def _output_range(module: nn.Module) -> Bounds | None:
    """Where a module's outputs lie whatever the input, as far as its last layer says."""
    if type(module) in SQUASHED_TO:
        return SQUASHED_TO[type(module)]
    if type(module) is Clip:
        return module.low, module.high
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        layers = [m for m in module if type(m) not in _TRANSPARENT]
        return _output_range(layers[-1]) if layers else None
    return None


def _through(stage: nn.Module, bounds: Bounds | None) -> Bounds | None:
    """The bounds of what a stage makes of values inside `bounds`."""
    if type(stage) is Clip:
        return stage.low, stage.high
    if type(stage) is Quantise:
        return 0.0, 1.0
    if type(stage) in (Dropout, TopK) and bounds is not None:
        return min(bounds[0], 0.0), max(bounds[1], 0.0)
    return None
