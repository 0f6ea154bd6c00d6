"""The variational bottleneck: its KL, who pays it, and noise that is learned and deployed."""

import math
from pathlib import Path

import pytest
import torch
from defences.made import trained
from torch.distributions import Normal, kl_divergence

from splitveil.config.resolve import build_defence, make_config
from splitveil.defences.base import Companion
from splitveil.defences.catalogue import DEFENCES, find_defence
from splitveil.defences.vib import (
    BottleneckPenalty,
    VariationalBottleneck,
    channel_noise,
    normal_divergence,
)
from splitveil.errors import ConfigError
from splitveil.nets.catalogue import NETS
from splitveil.nets.channel import RATE, Channel, LearnedNoise
from splitveil.nets.split import SplitModel, cut
from splitveil.runs import load_run

IMAGE = (1, 8, 8)
Y = torch.zeros(6, dtype=torch.long)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def model(channel: Channel) -> SplitModel:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return cut(NETS["small"].build(IMAGE, 10), NETS["small"].cut_at, channel)


def price(beta: float = 0.1) -> tuple[BottleneckPenalty, LearnedNoise]:
    noise = LearnedNoise(0.5)
    noise.size_to((4,))
    return BottleneckPenalty(noise, beta), noise


def test_the_divergence_by_hand() -> None:
    z, s = torch.tensor([[1.0, 0.0], [3.0, 0.0]], dtype=torch.float64), torch.tensor([0.0, 1.0])
    other = math.exp(2) - 1 - 2  # of the second value, where z is 0
    by_hand = 0.5 * ((1 + 9) / 2 + other)
    assert normal_divergence(z, s.double()).item() == pytest.approx(by_hand, rel=1e-12)


def test_the_divergence_is_that_of_torch() -> None:
    z = torch.randn(7, 3, 2, generator=generator(), dtype=torch.float64)
    s = torch.randn(3, 2, generator=generator(1), dtype=torch.float64)
    prior = Normal(torch.zeros(7, 3, 2).double(), 1.0)
    slow = kl_divergence(Normal(z, s.exp().expand_as(z)), prior).sum((1, 2)).mean()
    torch.testing.assert_close(normal_divergence(z, s), slow)


def test_it_is_nothing_where_what_is_sent_is_the_prior() -> None:
    assert normal_divergence(torch.zeros(5, 8), torch.zeros(8)).item() == 0


def test_encoder_and_noise_pay_and_the_price_learns_nothing() -> None:
    found, noise = price()
    assert isinstance(found, Companion)
    assert list(found.parameters()) == []
    assert found.state_dict() == {}
    z = torch.rand(6, 4, generator=generator()).requires_grad_()
    assert found.own_loss(z, z, Y).item() == 0
    found.penalty(z, z, Y).backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    torch.testing.assert_close(z.grad, 0.1 * z.detach() / 6)
    assert noise.gain is not None
    assert noise.gain.grad is not None
    torch.testing.assert_close(noise.gain.grad, torch.full((4,), 0.1 * RATE * (0.25 - 1)))


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1.0, 1e3, 1e12])
def test_values_and_gradients_are_finite_at_every_scale(scale: float) -> None:
    found, _ = price()
    z = (scale * torch.rand(6, 4, generator=generator())).requires_grad_()
    paid = found.penalty(z, z, Y)
    paid.backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    assert bool(paid.isfinite() & z.grad.isfinite().all())


def test_its_channel_is_the_learned_noise_in_either_mode() -> None:
    channel = DEFENCES["vib"].channel(0.3)
    z = torch.rand(400, 8, generator=generator())
    sent = channel.eval()(z, generator(1))
    assert torch.equal(sent, channel.train()(z, generator(1)))
    assert float((sent - z).detach().std()) == pytest.approx(0.1, rel=0.1)
    assert channel.noise_std == 0  # the run's Gaussian noise is another one


def test_in_a_stack_the_runs_noise_stands_first() -> None:
    stages = find_defence("vib+noise").channel(0.05).stages
    assert [type(s).__name__ for s in stages] == ["GaussianNoise", "LearnedNoise"]


def test_its_companion_holds_the_models_own_noise() -> None:
    defence = VariationalBottleneck(summary="")
    made = model(defence.channel(0.0))
    companion = defence.companion(made, IMAGE, 10)
    assert isinstance(companion, BottleneckPenalty)
    noise = channel_noise(made)
    assert noise.shape == made.wire_shape(IMAGE)
    before = companion.penalty(torch.zeros(2, 64), Y, Y).item()
    with torch.no_grad():
        for parameter in made.channel.parameters():
            parameter.add_(1.0)
    assert companion.penalty(torch.zeros(2, 64), Y, Y).item() != before


def test_a_model_without_its_channel_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="has no learned noise; build it with the defence's `channel`"
    ):
        VariationalBottleneck(summary="").companion(model(Channel()), IMAGE, 10)


@pytest.mark.parametrize(
    ("key", "value"), [("vib_beta", -0.1), ("vib_beta", float("nan")), ("vib_start", 0.0)]
)
def test_settings_out_of_range_are_refused(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{key} must be a finite number .*, got {value}"):
        build_defence(make_config({"defence": "vib", key: value}))


def test_a_run_learns_the_noise_and_loads_it_again(tmp_path: Path) -> None:
    on = trained(tmp_path, "on", "vib", vib_beta=0.1)
    learned = on["channel.stages.0.gain"]
    assert float(learned.min()) > 0  # towards the prior's 1, from .1
    back = load_run(tmp_path / "on")
    assert torch.equal(back.model.state_dict()["channel.stages.0.gain"], learned)
    x = torch.rand(3, *IMAGE, generator=generator())
    assert not torch.equal(back.victim.send(x, generator()), back.victim.send(x, generator(1)))
