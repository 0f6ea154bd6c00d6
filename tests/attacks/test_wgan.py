"""The GAN stage: what critic and generator minimise, how often, and from where they start."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from splitveil.attacks import wgan
from splitveil.attacks.decoder import Decoder
from splitveil.attacks.wgan import Critic, Wgan, critic_loss, generator_loss, gradient_penalty
from splitveil.errors import AuditError, ConfigError
from splitveil.threat import Labelled, Observation, Victim

MakeAux = Callable[..., Labelled]
START = Decoder(width=8, blocks=1, epochs=1, min_steps=10, batch_size=16, lr=1e-2)
FAST = Wgan(start=START, width=4, epochs=0, min_steps=25, batch_size=16)
COUNTS = {"width": 0, "epochs": -1, "min_steps": -1, "batch_size": 1, "n_critic": 0, "min_aux": 1}
RATES = {"critic_lr": -1.0, "generator_lr": math.nan, "penalty": math.inf, "pixel_weight": -1.0}


def generator(seed: int = 9) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def observed(victim: Victim, x: Tensor) -> Observation:
    return Observation(victim.send(x, generator(5)), torch.zeros(len(x), dtype=torch.long))


class Straight(nn.Module):
    """D(x) = w·x."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.weight


class Bowl(nn.Module):
    """D(x) = ‖x‖²/2: its slope is x."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().flatten(1).sum(1) / 2


def test_the_penalty_of_a_linear_critic_by_hand() -> None:
    critic = Straight(torch.tensor([3.0, 4.0]))
    real, fake = torch.rand(2, 5, 1, 1, 2, generator=generator())
    value = gradient_penalty(critic, real, fake, torch.rand(5, generator=generator(1)))
    assert value.tolist() == pytest.approx((5 - 1) ** 2)
    value.backward()  # type: ignore[no-untyped-call]
    assert critic.weight.grad is not None
    # d(‖w‖ − 1)²/dw = 2(‖w‖ − 1)·w/‖w‖
    assert critic.weight.grad.tolist() == pytest.approx([8 * 0.6, 8 * 0.8])


def test_the_penalty_is_taken_between_real_and_drawn_images() -> None:
    real, fake = torch.full((2, 1, 1, 1), 3.0), torch.full((2, 1, 1, 1), 1.0)
    value = gradient_penalty(Bowl(), real, fake, torch.tensor([1.0, 0.5]))
    assert value.tolist() == pytest.approx(((3 - 1) ** 2 + (2 - 1) ** 2) / 2)


def test_a_flat_critic_is_penalised_and_has_a_gradient() -> None:
    critic, x = Straight(torch.zeros(2)), torch.rand(3, 1, 1, 2, generator=generator())
    value = gradient_penalty(critic, x, x, torch.zeros(3))
    assert value.tolist() == pytest.approx(1.0, abs=1e-5)
    value.backward()  # type: ignore[no-untyped-call]
    assert critic.weight.grad is not None
    assert bool(torch.isfinite(critic.weight.grad).all())


def test_gradient_of_the_penalty_through_the_real_critic() -> None:
    torch.manual_seed(0)
    critic = Critic((1, 8, 8), width=2).double()
    real, fake = torch.rand(2, 3, 1, 8, 8, generator=generator(), dtype=torch.float64)
    share = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    gradient_penalty(critic, real, fake, share).backward()  # type: ignore[no-untyped-call]
    for name, weight in critic.named_parameters():
        if weight.grad is None or "weight" not in name:
            continue  # a bias does not move a slope, but through the kinks of LeakyReLU
        way, kept = torch.zeros_like(weight), weight.detach().clone()
        way.view(-1)[1 % way.numel()] = 1e-6
        ends = []
        for sign in (1, -1):
            weight.data.copy_(kept + sign * way)
            ends.append(float(gradient_penalty(critic, real, fake, share).detach()))
        weight.data.copy_(kept)
        slope = float(weight.grad.view(-1)[1 % way.numel()])
        assert slope == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-3, abs=1e-7)


def test_losses_of_critic_and_generator_oppose_each_other() -> None:
    real, fake = torch.tensor([2.0, 4.0]), torch.tensor([1.0, 0.0])
    assert float(critic_loss(real, fake)) == -2.5
    assert float(critic_loss(fake, real)) == 2.5
    x = torch.zeros(2, 1, 1, 2)
    assert float(generator_loss(fake, x + 0.1, x, 1500.0)) == pytest.approx(15 - 0.5)
    assert float(generator_loss(real, x, x, 1500.0)) == -3.0


def test_the_published_critic_has_about_a_million_parameters() -> None:
    critic = Critic((3, 32, 32))
    layers = (3 * 25 + 1) * 64, (64 * 25 + 1) * 128, (128 * 25 + 1) * 256, 256 * 16 + 1
    assert sum(p.numel() for p in critic.parameters()) == sum(layers) + 2 * (128 + 256)
    strides = [m.stride[0] for m in critic.modules() if isinstance(m, nn.Conv2d)]
    assert strides == [2, 2, 2, 1]


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 2, 9), (1, 8, 8), (3, 28, 28), (3, 48, 48)])
def test_a_critic_scores_images_of_any_size_one_by_one(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    critic, x = Critic(shape, width=2), torch.rand(3, *shape, generator=generator())
    scores = critic(x)
    assert scores.shape == (3,)
    torch.testing.assert_close(critic(x[1:2]), scores[1:2])


def test_without_a_contest_it_is_the_decoder_to_the_bit(
    make_aux: MakeAux, noisy_victim: Victim
) -> None:
    aux, seen = make_aux(20), observed(noisy_victim, make_aux(4, seed=1).images)
    box = noisy_victim.black_box()
    decoded = START.fit(box, aux, generator())
    drawn = replace(FAST, min_steps=0).fit(box, aux, generator())
    assert torch.equal(drawn(seen), decoded(seen))
    assert drawn.curve == decoded.curve
    assert not torch.equal(FAST.fit(box, aux, generator())(seen), decoded(seen))


def test_the_generator_learns_every_tenth_step_from_fresh_noise(
    make_aux: MakeAux, noisy_victim: Victim, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def noted(name: str) -> None:
        inner = getattr(wgan, name)

        def spy(*args: object) -> Tensor:
            calls.append(name)
            found: Tensor = inner(*args)
            return found

        monkeypatch.setattr(wgan, name, spy)

    noted("critic_loss")
    noted("generator_loss")
    sent: list[Tensor] = []

    def send(x: Tensor, stream: torch.Generator | None = None) -> Tensor:
        sent.append(noisy_victim.send(x, stream))
        return sent[-1]

    box = replace(noisy_victim.black_box(), send=send, prepare=None)
    fitted = FAST.fit(box, make_aux(16), generator())
    assert calls == (10 * ["critic_loss"] + ["generator_loss"]) * 2 + 5 * ["critic_loss"]
    assert len(sent) == 1 + 1 + 10 + 25 + 2  # shape, units, decoder, critic, generator
    assert len({float(z.sum()) for z in sent}) == len(sent)
    fitted(observed(noisy_victim, make_aux(3, seed=1).images))
    assert len(sent) == 39


def test_the_weight_of_the_pixels_holds_the_image(make_aux: MakeAux, linear_victim: Victim) -> None:
    aux, x = make_aux(64), make_aux(16, seed=1).images
    errors = []
    for weight in (1500.0, 0.0):
        attack = replace(FAST, min_steps=15, n_critic=1, pixel_weight=weight, generator_lr=1e-2)
        guess = attack.fit(linear_victim.black_box(), aux, generator())(observed(linear_victim, x))
        errors.append(float((guess - x).square().mean()))
    assert errors[0] < 0.8 * errors[1]


def test_one_image_is_too_few(make_aux: MakeAux, linear_victim: Victim) -> None:
    with pytest.raises(AuditError, match="gan attack needs at least 2 aux images, got 1"):
        FAST.fit(linear_victim.black_box(), make_aux(1), generator())


@pytest.mark.parametrize(("name", "wrong"), [*COUNTS.items(), *RATES.items()])
def test_budgets_out_of_range_are_refused(name: str, wrong: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be .*, got {wrong}"):
        replace(FAST, **{name: wrong})  # type: ignore[arg-type]


def test_a_start_with_another_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match="start must have loss 'mse', as published, got 'ssim'"):
        Wgan(start=Decoder(loss="ssim"))


def test_it_tells_its_size_and_its_losses() -> None:
    assert Wgan().summary == "Decoder N8C64, then WGAN-GP and 1500·MSE, fresh noise."
