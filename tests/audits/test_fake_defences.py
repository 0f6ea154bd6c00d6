"""Three fake defences that must not pass an audit, and an honest client that must."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Generator, Tensor, nn

from splitveil.attacks.baseline import MeanImage
from splitveil.attacks.decoder import Decoder
from splitveil.attacks.linear import Linear
from splitveil.audits.flags import raise_flags
from splitveil.audits.suite import run_attacks, strongest
from splitveil.audits.target import Attempt, Target
from splitveil.io import Progress, silent
from splitveil.nets.channel import Channel, GaussianNoise
from splitveil.rng import normal_like
from splitveil.threat import Access, Attack, BlackBox, FittedAttack, Labelled, Observation, Victim


def pictures(n: int, seed: int) -> Labelled:
    """Waves on 8×8 pixels; the class is the direction."""
    stream = Generator().manual_seed(seed)
    labels = torch.randint(4, (n,), generator=stream)
    phase, contrast = torch.rand(2, n, 1, 1, generator=stream)
    angle = (labels * math.pi / 4)[:, None, None]
    line = torch.linspace(0, 1, 8)
    wave = torch.cos(angle) * line[:, None] + torch.sin(angle) * line
    images = 0.5 + 0.5 * contrast * torch.sin(2 * math.pi * (wave + 0.35 * phase))
    return Labelled(images[:, None].clamp(0, 1), labels)


AUX, SCORED = pictures(300, 1), pictures(60, 2)


@dataclass(frozen=True)
class Averages:
    """The smallest k-query attack: ridge regression on the mean of k sendings."""

    access: Access = Access.REPEATS
    repeats: int = 8

    def fit(
        self, victim: BlackBox, aux: Labelled, generator: Generator, progress: Progress = silent
    ) -> FittedAttack:
        linear = Linear().fit(victim, aux, generator, progress)

        def reconstruct(seen: Observation) -> Tensor:
            assert seen.draws is not None
            return linear(Observation(seen.draws.mean(0), seen.answer))

        return FittedAttack(reconstruct)


ATTACKS: Mapping[str, Attack] = {
    "mean": MeanImage(),
    "linear": Linear(),
    "decoder": Decoder(width=8, blocks=1, epochs=1, min_steps=40, batch_size=32, lr=1e-2),
    "k-query": Averages(),
}


def conv() -> nn.Module:
    layer = nn.Conv2d(1, 4, 3, stride=2, padding=1, bias=False)
    nn.init.normal_(layer.weight, std=0.5, generator=Generator().manual_seed(0))
    return nn.Sequential(layer, nn.BatchNorm2d(4), nn.ReLU())


class Rounds(nn.Module):
    """Leaves no gradient, and hardly hides anything."""

    def forward(self, z: Tensor) -> Tensor:
        return (16 * z).round() / 16


class Detaches(nn.Module):
    """Hides nothing but the gradient."""

    def forward(self, z: Tensor) -> Tensor:
        return z.detach()


class Rotates(nn.Module):
    """A secret orthogonal map of the pixels."""

    turn: Tensor

    def __init__(self) -> None:
        super().__init__()
        square = torch.randn(64, 64, generator=Generator().manual_seed(3))
        self.register_buffer("turn", torch.linalg.qr(square).Q)

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1) @ self.turn).view_as(x)


class NoisyInTraining(nn.Module):
    """Gaussian noise that is switched off in deployment."""

    def forward(self, z: Tensor, generator: Generator | None = None) -> Tensor:
        return z + normal_like(z, generator) if self.training else z


FAKES: Mapping[str, tuple[nn.Module, nn.Module, str]] = {
    "rounding": (nn.Sequential(conv(), Rounds()), Channel(), "gradients masked"),
    "detaching": (nn.Sequential(conv(), Detaches()), Channel(), "gradients masked"),
    "rotation": (Rotates(), Channel(), "linearly invertible"),
    "noise of the channel": (conv(), NoisyInTraining(), "noise only in training"),
    "dropout of the encoder": (
        nn.Sequential(conv(), nn.Dropout(0.5)), Channel(), "noise only in training",
    ),
}  # fmt: skip
FAKE_FLAGS = {flag for _, _, flag in FAKES.values()}


class Server(nn.Module):
    """Which quarter of the features is largest."""

    def forward(self, z: Tensor) -> Tensor:
        return z.reshape(len(z), 4, -1).sum(2)


def audited(
    encoder: nn.Module, channel: nn.Module, without: str = ""
) -> tuple[set[str], dict[str, Attempt]]:
    target = Target(
        victim=Victim(encoder, channel), head=Server(), classes="abcd", aux=AUX, scored=SCORED
    )
    chosen = {name: attack for name, attack in ATTACKS.items() if name != without}
    attempts = run_attacks(target, chosen)
    flags = raise_flags(target, attempts, certificates={}, leaks={}, wire={})
    return {flag.name for flag in flags}, attempts


@pytest.mark.parametrize("kind", FAKES)
def test_a_fake_defence_is_flagged_and_broken(kind: str) -> None:
    encoder, channel, flag = FAKES[kind]
    flags, attempts = audited(encoder, channel)
    assert flag in flags
    assert not flags & (FAKE_FLAGS - {flag, "linearly invertible"})
    assert strongest(attempts)["mse"] < 0.05 * attempts["mean"].scores().mse


def test_an_honest_noisy_client_raises_none_of_the_three() -> None:
    flags, attempts = audited(conv(), Channel([GaussianNoise(0.3)]))
    assert not flags & FAKE_FLAGS
    assert "one draw of a random channel" not in flags
    assert attempts["k-query"].scores().mse < attempts["linear"].scores().mse
    assert strongest(attempts)["mse"] > 0.1 * attempts["mean"].scores().mse
    flags, _ = audited(conv(), Channel([GaussianNoise(0.3)]), without="k-query")
    assert "one draw of a random channel" in flags
