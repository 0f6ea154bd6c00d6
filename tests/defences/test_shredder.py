"""Shredder: noise with a learned place and scale, rewarded for being loud, deployed as trained."""

from pathlib import Path

import pytest
import torch
from defences.made import trained

from splitveil.config.resolve import build_defence, make_config
from splitveil.defences.base import Companion
from splitveil.defences.catalogue import DEFENCES, find_defence
from splitveil.defences.shredder import LoudnessReward, Shredder
from splitveil.errors import ConfigError
from splitveil.nets.channel import RATE, LearnedNoise
from splitveil.runs import load_run

Y = torch.zeros(6, dtype=torch.long)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def amplifier(reward: float = 0.5) -> tuple[LoudnessReward, LearnedNoise]:
    noise = LearnedNoise(0.5, "laplace", moves=True)
    noise.size_to((4,))
    return LoudnessReward(noise, reward), noise


def test_the_reward_by_hand() -> None:
    found, noise = amplifier()
    z = torch.rand(6, 4, generator=generator())
    assert noise.gain is not None
    assert found.penalty(z, z, Y).item() == pytest.approx(-0.5 * -0.6931471805599453, rel=1e-6)
    with torch.no_grad():
        noise.gain.copy_(torch.tensor([0.0, 1.0, 2.0, 3.0]) / RATE)
    assert found.penalty(z, z, Y).item() == pytest.approx(-0.5 * (1.5 - 0.6931471805599453))


def test_the_noise_is_paid_and_nobody_else() -> None:
    found, noise = amplifier()
    assert isinstance(found, Companion)
    assert list(found.parameters()) == []
    z = torch.rand(6, 4, generator=generator()).requires_grad_()
    assert found.own_loss(z, z, Y).item() == 0
    found.penalty(z, z, Y).backward()  # type: ignore[no-untyped-call]
    assert z.grad is None
    assert noise.gain is not None
    assert noise.gain.grad is not None
    torch.testing.assert_close(noise.gain.grad, torch.full((4,), -0.5 * RATE / 4))


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_it_is_finite_at_every_scale(scale: float) -> None:
    found, noise = amplifier()
    z = (scale * torch.rand(6, 4, generator=generator())).requires_grad_()
    (noise(z, generator()).sum() + found.penalty(z, z, Y)).backward()
    for tensor in (z, *noise.parameters()):
        assert tensor.grad is not None
        assert bool(tensor.grad.isfinite().all())


@pytest.mark.parametrize(("kind", "variance"), [("laplace", 0.02), ("gaussian", 0.01)])
def test_its_channel_is_the_chosen_noise_in_either_mode(kind: str, variance: float) -> None:
    channel = DEFENCES["shredder"].with_settings({"shredder_noise": kind}).channel(0.0)
    z = torch.rand(500, 80, generator=generator())
    sent = channel.eval()(z, generator(1))
    assert torch.equal(sent, channel.train()(z, generator(1)))
    assert float((sent - z).detach().var()) == pytest.approx(variance, rel=0.05)


def test_it_stacks_with_a_penalty_but_not_with_learned_noise() -> None:
    stages = find_defence("shredder+veil").channel(0.05).stages
    assert [type(s).__name__ for s in stages] == ["GaussianNoise", "LearnedNoise"]
    with pytest.raises(ConfigError, match="'shredder' and 'vib' each learn the noise"):
        find_defence("shredder+vib")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("shredder_reward", -0.1, "a finite number ≥ 0, got -0.1"),
        ("shredder_reward", float("nan"), "a finite number ≥ 0, got nan"),
        ("shredder_start", 0.0, "a finite number > 0, got 0.0"),
        ("shredder_noise", "pink", "one of laplace, gaussian"),
    ],
)
def test_settings_out_of_range_are_refused(key: str, value: float | str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} must be {said}"):
        build_defence(make_config({"defence": "shredder", key: value}))


def test_a_run_makes_the_noise_louder_and_loads_it_again(tmp_path: Path) -> None:
    on = trained(tmp_path, "on", "shredder", held_out=0.0, shredder_reward=2.0)
    assert RATE * float(on["channel.stages.0.gain"].mean()) > 0.1
    assert float(on["channel.stages.0.location"].abs().sum()) > 0
    back = load_run(tmp_path / "on").model.state_dict()
    assert all(torch.equal(back[k], v) for k, v in on.items())
    assert Shredder(summary="").shredder_noise == "laplace"
