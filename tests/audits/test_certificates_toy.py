"""Where the truth is known: bound ≤ least error ≤ every attack. And what a channel's front is.

x ~ N(½, s²I), z = aQ(x − ½) with Q orthogonal, noise σ²: the least mean squared error is
s²/(1 + a²s²/σ²), and a rate of I nats allows no error below s² exp(−2I/d).
"""

import math

import pytest
import torch
from torch import Generator, Tensor, nn

from splitveil.attacks.linear import Linear, ridge
from splitveil.audits.bounds import population_rate
from splitveil.audits.certificates import CertifiedClient, certify
from splitveil.errors import ConfigError
from splitveil.nets.channel import (
    Channel,
    Clip,
    Dropout,
    GaussianNoise,
    Quantise,
    TopK,
    before_noise,
)
from splitveil.threat import Labelled, Observation, Victim

DIMS, SPREAD, GAIN = 16, 0.08, 2.0


class Rotation(nn.Module):
    """z = aQ(x − ½)."""

    turn: Tensor

    def __init__(self) -> None:
        super().__init__()
        square = torch.randn(DIMS, DIMS, generator=Generator().manual_seed(1))
        self.register_buffer("turn", torch.linalg.qr(square).Q)

    def forward(self, x: Tensor) -> Tensor:
        return GAIN * (x.flatten(1) - 0.5) @ self.turn


def gaussian_images(n: int, seed: int) -> Labelled:
    x = 0.5 + SPREAD * torch.randn(n, 1, 4, 4, generator=Generator().manual_seed(seed))
    return Labelled(x.clamp(0, 1), torch.zeros(n, dtype=torch.int64))


def mse_bound(rate_nats: float) -> float:
    """Distortion-rate function of x, per pixel."""
    return SPREAD**2 * math.exp(-2 * rate_nats / DIMS)


@pytest.mark.parametrize("ratio", [0.3, 1.0, 4.0])
def test_bound_least_error_and_attacks_stand_in_this_order(ratio: float) -> None:
    std = GAIN * SPREAD / math.sqrt(ratio)
    least = SPREAD**2 / (1 + ratio)
    box = GAIN * 6 * SPREAD
    encoder = nn.Sequential(Rotation(), Clip(-box, box))
    victim = Victim(encoder, Channel([GaussianNoise(std)]))
    front = before_noise(victim.encoder, Channel([GaussianNoise(std)]))
    assert front.bounds == (-box, box)
    fit, fresh, scored = (
        gaussian_images(n, seed) for n, seed in ((4000, 0), (30000, 1), (9000, 2))
    )

    found = population_rate(
        encoder(fit.images), None, encoder(fresh.images), None,
        noise_var=std**2, low=-box, high=box,
    )  # fmt: skip
    bound = mse_bound(found.value)
    assert 0.95 * least <= bound <= least

    wire = [
        victim.send(d.images, Generator().manual_seed(9 + i)) for i, d in enumerate((fit, scored))
    ]
    (weight, bias), *_ = ridge(wire[0], fit.images.flatten(1), (1e-3,))
    guess = wire[1].double() @ weight + bias
    attack = Linear().fit(victim.black_box(), fit, Generator().manual_seed(3))
    made = attack(Observation(wire[1], scored.labels)).flatten(1)
    for image in (guess, made):
        errors = (image - scored.images.flatten(1)).square().mean(1)
        limit = float(errors.mean() + 3 * errors.std() / math.sqrt(len(errors)))
        assert bound <= least <= limit
        assert limit < 1.1 * least  # these attacks are nearly as good as can be


class Sneak(nn.Identity):
    """Called an identity, and none."""

    def forward(self, x: Tensor) -> Tensor:
        return 30 * x


def test_only_a_true_identity_is_looked_through() -> None:
    noise = Channel([GaussianNoise(0.1)])
    for last, bounds in ((nn.Identity(), (0.0, 1.0)), (Sneak(), None)):
        assert before_noise(nn.Sequential(nn.Sigmoid(), last), noise).bounds == bounds


def test_a_run_is_certified_through_its_channel() -> None:
    channel = Channel([Clip(-1.0, 1.0), GaussianNoise(0.3), TopK(0.5)])
    encoder = nn.Sequential(Rotation())
    victim, front = Victim(encoder, channel), before_noise(encoder, channel)
    assert front.noise_std is not None
    client = CertifiedClient(
        clean=lambda x, g: front.stages(victim.encoder(x), g),
        noise_var=front.noise_std**2,
        bounds=front.bounds,
        random=front.random,
    )
    fit, fresh = gaussian_images(200, 0), gaussian_images(200, 1)
    found = certify(
        client, fresh, fit, fresh, [fit], num_classes=1, generator=Generator().manual_seed(0)
    )
    exact = 8 * math.log(1 + (GAIN * SPREAD / 0.3) ** 2)
    assert found["gallery"]["nats"] == pytest.approx(exact, rel=0.05)
    assert found["population"]["nats"] >= exact


def test_clip_moves_values_to_its_ends_without_a_gradient() -> None:
    z = torch.tensor([-2.0, 0.25, 3.0], requires_grad=True)
    sent = Clip(-1.0, 0.5)(z)
    sent.sum().backward()
    assert sent.tolist() == [-1.0, 0.25, 0.5]
    assert z.grad is not None
    assert z.grad.tolist() == [0.0, 1.0, 0.0]
    assert repr(Clip(-1.0, 0.5)) == "Clip(low=-1.0, high=0.5)"


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.0), (0.0, math.inf), (math.nan, 1.0)])
def test_a_clip_without_an_inside_is_refused(low: float, high: float) -> None:
    with pytest.raises(ConfigError, match="clip needs finite low < high"):
        Clip(low, high)


NOISE = GaussianNoise(0.3)
FRONTS = [
    ([NOISE, Quantise(4)], 0.3, (0.0, 1.0), False, 0),
    ([NOISE, GaussianNoise(0.4), Quantise(4), NOISE], 0.5, (0.0, 1.0), False, 0),
    ([GaussianNoise(0.0), Clip(0.2, 0.7), TopK(0.1), NOISE], 0.3, (0.0, 0.7), False, 2),
    ([Clip(-3.0, -1.0), Dropout(0.5), NOISE], 0.3, (-3.0, 0.0), True, 2),
    ([Quantise(3), NOISE, Dropout(0.5)], 0.3, (0.0, 1.0), False, 1),
    ([TopK(0.5), Quantise(3)], 0.0, (0.0, 1.0), False, 2),
    ([], 0.0, (0.0, 1.0), False, 0),
    ([Dropout(0.5)], None, (0.0, 1.0), True, 1),
    ([nn.Tanh(), NOISE], 0.3, None, True, 1),
]


@pytest.mark.parametrize(("stages", "std", "bounds", "random", "before"), FRONTS)
def test_the_front_of_a_channel(
    stages: list[nn.Module],
    std: float | None,
    bounds: tuple[float, float] | None,
    random: bool,
    before: int,
) -> None:
    front = before_noise(
        nn.Sequential(nn.Linear(2, 2), nn.Sigmoid(), nn.Flatten()), Channel(stages)
    )
    assert front.noise_std == (None if std is None else pytest.approx(std))
    assert (front.bounds, front.random, len(front.stages.stages)) == (bounds, random, before)


class Loud(GaussianNoise):
    """A kind of noise that nobody here knows."""


@pytest.mark.parametrize("channel", [Channel([Loud(0.3)]), Loud(0.3), nn.Identity()])
def test_a_channel_nobody_knows_has_noise_of_unknown_scale(channel: nn.Module) -> None:
    front = before_noise(nn.Sigmoid(), channel)
    assert (front.noise_std, front.bounds, front.random) == (None, None, True)


@pytest.mark.parametrize("encoder", [nn.Linear(2, 2), nn.Sequential(nn.Sigmoid(), nn.Linear(2, 2))])
def test_an_encoder_without_a_bounded_last_layer_is_unbounded(encoder: nn.Module) -> None:
    assert before_noise(encoder, Channel([NOISE])).bounds is None
    assert before_noise(encoder, Channel([Clip(0.0, 1.0), NOISE])).bounds == (0.0, 1.0)
