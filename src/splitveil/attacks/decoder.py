"""The decoder attack: a residual network trained on queries to invert the client."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, cast, get_args

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from splitveil.attacks.base import (
    Budget,
    RateSchedule,
    fit_units,
    fresh_weights,
    minimise,
    need_aux,
    progress_part,
)
from splitveil.cuda import (
    Precision,
    channels_last,
    compiled,
    mixed,
    to_device,
    usual_precision,
)
from splitveil.errors import ConfigError, unknown
from splitveil.functional import ssim
from splitveil.io import Progress, silent
from splitveil.nets.blocks import conv_bn_relu
from splitveil.nets.decoder import ResidualDecoder, ShuffleDecoder
from splitveil.rng import stream
from splitveil.threat import Access, Attack, BlackBox, FittedAttack, Labelled, Observation

Loss = Literal["mse", "ssim", "perceptual"]
Network = Literal["residual", "shuffle"]
NETWORKS: Mapping[Network, type[ResidualDecoder | ShuffleDecoder]] = {
    "residual": ResidualDecoder,
    "shuffle": ShuffleDecoder,
}
Objective = Callable[[Tensor, Tensor], Tensor]
_TINY = 1e-6  # squared length under which a feature vector counts as zero
ANCHOR = 0.1
PERCEPTUAL_WEIGHT = 0.1


def ssim_loss(guess: Tensor, x: Tensor) -> Tensor:
    """1 − SSIM, mean over images (n, c, h, w); the attacker minimises it."""
    return 1 - ssim(guess, x)


def anchored_ssim_loss(guess: Tensor, x: Tensor) -> Tensor:
    """1 − SSIM and a little MSE.

    SSIM compares means by their ratio, so it hardly notices a shift in colour where an image is
    bright or has much structure. The MSE prevents such shifts.
    """
    return ssim_loss(guess, x) + ANCHOR * F.mse_loss(guess, x)


class FeatureClassifier(nn.Module):
    """A small classifier; its three layers (32, 64, 128 channels) are the features."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [conv_bn_relu(channels, 32), conv_bn_relu(32, 64, 2), conv_bn_relu(64, 128, 2)]
        )
        self.leave = nn.Linear(128, num_classes)

    def maps(self, x: Tensor) -> list[Tensor]:
        """Feature maps (n, 32, h, w), (n, 64, h/2, w/2), (n, 128, h/4, w/4) of images."""
        found = []
        for layer in self.layers:
            x = layer(x)
            found.append(x)
        return found

    def forward(self, x: Tensor) -> Tensor:
        """Logits (n, classes) of images."""
        logits: Tensor = self.leave(self.maps(x)[-1].mean((2, 3)))
        return logits


def fit_features(
    aux: Labelled,
    generator: Generator,
    budget: Budget,
    device: torch.device,
    progress: Progress,
    *,
    precision: Precision = "float32",
) -> FeatureClassifier:
    """A classifier fitted on aux, frozen in eval mode; the victim is never asked."""
    with fresh_weights(generator, device):
        net = FeatureClassifier(aux.images.shape[1], int(aux.labels.max()) + 1)
        to_device(net, device)

        def loss(x: Tensor, labels: Tensor) -> Tensor:
            with mixed(device, precision):
                logits = net(x)
            return F.cross_entropy(logits.float(), labels)

        minimise(loss, net, (aux.images, aux.labels), budget, generator, progress=progress)
    return net.eval().requires_grad_(requires_grad=False)


def perceptual_distance(features: FeatureClassifier, guess: Tensor, x: Tensor) -> Tensor:
    r"""Distance between the features of two batches of images, in the manner of LPIPS.

    .. math:: \frac{1}{L} \sum_l \big\langle \| \hat f_l(g) - \hat f_l(x) \|^2 \big\rangle

    f̂ is the feature vector at one place, scaled to length 1; ⟨⟩ is the mean over images and
    places. In [0, 2], because features after ReLU have no opposite directions.
    """
    with torch.no_grad():
        targets = [_unit(f) for f in features.maps(x)]
    guesses = [_unit(f) for f in features.maps(guess)]
    layers = [(g - t).square().sum(1).mean() for g, t in zip(guesses, targets, strict=True)]
    return torch.stack(layers).mean()


def _unit(feature: Tensor) -> Tensor:
    """Vectors along the channels scaled to length 1; a vector of zeros stays 0."""
    return feature * torch.rsqrt(feature.square().sum(1, keepdim=True) + _TINY)


def perceptual_loss(features: FeatureClassifier) -> Objective:
    """MSE and a tenth of the distance between features."""

    def loss(guess: Tensor, x: Tensor) -> Tensor:
        distance = perceptual_distance(features, guess, x)
        return F.mse_loss(guess, x) + PERCEPTUAL_WEIGHT * distance

    return loss


def _decode(net: nn.Module, z: Tensor, precision: Precision) -> Tensor:
    """Images in float32."""
    with mixed(z.device, precision):
        images: Tensor = net(channels_last(z))
    return images.float()


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Residual decoder z̃ → x, fitted on aux with fresh channel noise at every step.

    Its budget is fixed by the profile, never by the defence.

    Args:
        access: Sees what is sent, and can send the aux images.
        loss: What it minimises: "mse"; "ssim", 1 − SSIM and a little MSE; "perceptual", MSE and
            the distance between features of a classifier fitted on aux.
        net: "residual" is the published network, N`blocks`C`width`; "shuffle" works at the wire's
            resolution and takes a fraction of the time, S`blocks`C`width`.
        width: Channels of a layer, ≥ 1.
        blocks: Residual blocks, ≥ 0.
        epochs: Passes over aux, ≥ 0.
        min_steps: Least number of steps; a small aux set gets more epochs until it is reached.
        max_steps: Greatest number of steps; a large aux set is not passed so often. None: no limit.
        batch_size: Images per step, ≥ 2.
        lr: Peak learning rate, > 0.
        weight_decay: Decay of the weights, ≥ 0.
        schedule: "one-cycle" is AdamW on a one-cycle schedule; "cosine" is the published setting,
            Adam with L2 decay and a cosine down to a hundredth.
        feature_steps: Steps of the classifier for the perceptual loss, ≥ 0.
        more: Steps, at half the rate, by which a fit for another loss continues that for "mse"; 0
            fits it from nothing. The decoders of one audit share the fit for "mse".
        min_aux: Fewest aux images, ≥ 2.
        effort: Its share of the progress bar, > 0.
        fused: Whether torch compiles the network on a GPU.
        precision: Of the fit and of the answers; None: bf16 on a GPU, float32 on a CPU.

    >>> Decoder(width=32, blocks=2).summary
    'Residual decoder N2C32, mse loss, fresh noise.'
    """

    access: Access = Access.BLACK_BOX
    loss: Loss = "mse"
    net: Network = "residual"
    width: int = 64
    blocks: int = 8
    epochs: int = 16
    min_steps: int = 0
    max_steps: int | None = None
    batch_size: int = 256
    lr: float = 2e-3
    weight_decay: float = 1e-2
    schedule: RateSchedule = "one-cycle"
    feature_steps: int = 1000
    more: int = 0
    min_aux: int = 2  # BatchNorm needs two
    effort: float = 10.0
    fused: bool = False
    precision: Precision | None = None

    def __post_init__(self) -> None:
        if self.loss not in get_args(Loss):
            raise ConfigError(unknown("loss", self.loss, get_args(Loss)))
        if self.more and self.loss == "mse":
            raise ConfigError('`more` continues the fit for "mse", which is this one; leave it out')

    @property
    def summary(self) -> str:
        """One line for a catalogue."""
        kind = "Residual decoder N" if self.net == "residual" else "Pixel-shuffle decoder S"
        return f"{kind}{self.blocks}C{self.width}, {self.loss} loss, fresh noise."

    def build(self, wire_shape: tuple[int, ...], image_shape: tuple[int, ...]) -> nn.Module:
        """The network with fresh weights, from torch's global stream."""
        return NETWORKS[self.net](wire_shape, image_shape, width=self.width, blocks=self.blocks)

    @property
    def budget(self) -> Budget:
        """Steps and learning rate of the fit."""
        usual = Budget.of(self)
        if not self.more:
            return usual
        return replace(usual, epochs=0, min_steps=self.more, lr=usual.lr / 2)

    @property
    def plain(self) -> "Decoder":
        """The decoder of the same size and schedule for the loss "mse", which others continue."""
        return replace(
            self, loss="mse", more=0, feature_steps=Decoder.feature_steps, effort=Decoder.effort
        )

    def fit(
        self, victim: BlackBox, aux: Labelled, generator: Generator, progress: Progress = silent
    ) -> FittedAttack:
        """Train on aux. The last weights are used: nothing is chosen on the scored images."""
        need_aux("decoder", aux, self.min_aux)
        if victim.fits is None or self.loss != "mse":
            return self._fit(victim, aux, generator, progress)

        def make(draws: Generator) -> FittedAttack:
            return self._fit(victim, aux, draws, progress)

        drawn_as = replace(self.plain, precision=None, fused=False)
        return victim.fits.once(repr(self.plain), aux, make, repr(drawn_as))

    def _fit(
        self, victim: BlackBox, aux: Labelled, generator: Generator, progress: Progress
    ) -> FittedAttack:
        device, n = victim.device, len(aux)
        precision = self.precision or usual_precision(device)
        first = self.feature_steps if self.loss == "perceptual" else 0
        total = first + self.budget.steps(n)
        objective = self._objective(
            aux, generator, device, precision,
            progress_part(progress, 0, total, "fitting the features"),
        )  # fmt: skip
        wire = tuple(victim.send(aux.images[:1], generator).shape[1:])
        with fresh_weights(generator, device):
            if self.more:
                reader = copy.deepcopy(cast(nn.Module, self.plain.fit(victim, aux, generator).net))
            else:
                net = self.build(wire, tuple(aux.images.shape[1:]))
                to_device(net, device)
                reader = nn.Sequential(fit_units(victim, aux.images, generator), net)
            send = victim.sender(aux.images)
            fitted = compiled(reader) if self.fused and device.type == "cuda" else reader

            def loss(x: Tensor, rows: Tensor) -> Tensor:
                return objective(_decode(fitted, send(rows, generator), precision), x)

            told = progress_part(progress, first, total, "fitting the decoder")
            data = (aux.images, torch.arange(n, device=aux.images.device))
            curve = minimise(loss, reader, data, self.budget, generator, progress=told)
        reader.eval()

        @torch.no_grad()
        def reconstruct(seen: Observation) -> Tensor:
            images = torch.cat([_decode(reader, z, precision) for z in torch.split(seen.z, 1000)])
            return images.clamp(0, 1)

        return FittedAttack(reconstruct, curve, reader)

    def _objective(
        self,
        aux: Labelled,
        generator: Generator,
        device: torch.device,
        precision: Precision,
        progress: Progress,
    ) -> Objective:
        """The loss of guesses and true images."""
        if self.loss == "ssim":
            return anchored_ssim_loss
        if self.loss == "mse":
            return F.mse_loss
        # A stream of its own: decoders of one seed then differ by their loss alone.
        apart = stream(generator.initial_seed(), "features", generator.device)
        budget = Budget(epochs=0, min_steps=self.feature_steps, batch_size=self.batch_size)
        return perceptual_loss(
            fit_features(aux, apart, budget, device, progress, precision=precision)
        )


# The decoder that other attacks start from or wrap.
SMALL = Decoder(width=32, blocks=2, epochs=4, min_steps=600)


def with_decoders(attack: Attack, **settings: object) -> Attack:
    """The same attack with these settings in every decoder in it.

    >>> with_decoders(Decoder(), fused=True).fused
    True
    """
    if not is_dataclass(attack):
        return attack
    held = {f.name: getattr(attack, f.name) for f in fields(attack)}
    changed: dict[str, Any] = {
        k: with_decoders(v, **settings) for k, v in held.items() if isinstance(v, Decoder)
    }
    changed |= settings if isinstance(attack, Decoder) else {}
    if changed == {key: held[key] for key in changed}:
        return attack
    return cast(Attack, replace(attack, **changed))
