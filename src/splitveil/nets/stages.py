"""Channel stages with parameters: they are trained with the model and act in deployment too.

Their parameters have the shape of the wire, which a defence does not know when it names its
stages: `sized` gives them to a model's stages once the net is cut. A stage that is called before
takes its shape from what it is given.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from splitveil.errors import ConfigError
from splitveil.nets.channel import Channel
from splitveil.nets.split import SplitModel
from splitveil.rng import normal_like

Shape = tuple[int, ...]
Noise = Literal["gaussian", "laplace"]

LOG_SCALE_LIMIT = 10.0  # keeps exp and its gradient finite
RATE = 3.0  # of learned scales: SGD's steps fit for weights would leave them where they start
SQUASHED_TO: Mapping[type[nn.Module], tuple[float, float]] = {
    nn.Sigmoid: (0.0, 1.0),
    nn.Tanh: (-1.0, 1.0),
}
MAX_WIRE = 4096  # a dictionary has wire² numbers


class LearnedStage(nn.Module, ABC):
    """Base of stages whose parameters have the wire's shape."""

    @property
    @abstractmethod
    def shape(self) -> Shape | None:
        """Shape of one image's smashed data; None before `size_to`."""

    def size_to(self, shape: Shape, device: torch.device | str = "cpu") -> None:
        """Make the parameters; a stage that has them must have them in this shape."""
        if self.shape is None:
            self._make(shape, device)
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


def sized(model: SplitModel, image_shape: Shape) -> SplitModel:
    """The same model, its stages with parameters for images (c, h, w); the net is not touched."""
    for stage in learned_stages(model.channel):
        where = next(model.encoder.parameters(), torch.zeros(())).device
        stage.size_to(model.wire_shape(image_shape), where)
    return model


@torch.no_grad()
def with_channel(model: SplitModel, channel: object, image_shape: Shape) -> SplitModel:
    """The same model, `sized`, with this channel; refuses one that does not keep z's shape."""
    if not isinstance(channel, Channel):
        raise ConfigError(
            f"a defence's channel must be a Channel, got {type(channel).__name__}; "
            "return Channel([stage, …]), without stages if nothing happens before the wire"
        )
    model.channel = channel
    z = torch.zeros(2, *sized(model, image_shape).wire_shape(image_shape))
    try:
        sent = copy.deepcopy(channel)(z, torch.Generator())  # a copy: a stage may count its calls
    except (RuntimeError, TypeError, ValueError) as err:
        raise ConfigError(
            f"smashed data of shape {tuple(z.shape)} does not pass the channel: {err}; a stage is "
            "called with (z, generator)"
        ) from err
    if not isinstance(sent, Tensor) or sent.shape != z.shape:
        got = f"shape {tuple(sent.shape)}" if isinstance(sent, Tensor) else type(sent).__name__
        raise ConfigError(
            f"a channel must keep the shape of smashed data, {tuple(z.shape)}, got {got}; "
            "make a layer that changes it part of the client: the defence's `encoder`"
        )
    return model


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
        if not 0 < start < float("inf"):
            raise ConfigError(f"the noise's scale must start at a finite number > 0, got {start}")
        if kind not in ("gaussian", "laplace"):
            raise ConfigError(f"the noise must be one of gaussian, laplace; got '{kind}'")
        self.start, self.kind, self.moves = start, kind, moves
        self.register_parameter("gain", None)
        self.register_parameter("location", None)

    @property
    def shape(self) -> Shape | None:
        """Shape of the scales."""
        return None if self.gain is None else tuple(self.gain.shape)

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
        if not 0 <= threshold < float("inf"):
            raise ConfigError(f"sparse_threshold must be a finite number ≥ 0, got {threshold}")
        self.threshold, self.start = threshold, start
        self._shape: Shape | None = None
        self.register_parameter("dictionary", None)

    @property
    def shape(self) -> Shape | None:
        """Shape of what it codes."""
        return self._shape

    def _make(self, shape: Shape, device: torch.device | str) -> None:
        floats = torch.Size(shape).numel()
        if floats > MAX_WIRE:
            raise ConfigError(
                f"sparse coding holds wire² numbers, and the wire has {floats}; the most is "
                f"{MAX_WIRE}: cut later, for example --net resnet20@8 or --net mobilenetv2"
            )
        self._shape = shape
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


def before_squashing(layers: nn.Module, new: nn.Module) -> nn.Sequential:
    """The layers with a new one before the sigmoid or tanh that ends them, or else behind them.

    >>> before_squashing(nn.Sequential(nn.ReLU(), nn.Sequential(nn.Sigmoid())), nn.Identity())
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
        return nn.Sequential(*plain[:-1], before_squashing(plain[-1], new))
    return nn.Sequential(*plain, new)
