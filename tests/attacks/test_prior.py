"""Search in a generative prior: what it minimises, from where it starts, and what it refuses."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from attacks.made import Formula, Guess, dropped, generator, planted
from torch import Tensor, nn

from splitveil.attacks import prior
from splitveil.attacks.baseline import ClassMean, MeanImage
from splitveil.attacks.decoder import Decoder
from splitveil.attacks.k_query import KQuery
from splitveil.attacks.linear import Linear
from splitveil.attacks.prior import FactorModel, Prior, sharpened
from splitveil.attacks.rmle import Rmle
from splitveil.errors import AuditError, ConfigError
from splitveil.nets.channel import Channel, GaussianNoise
from splitveil.threat import Access, Attack, Labelled, Observation, Victim

MakeAux = Callable[..., Labelled]
FAST = Prior(start=MeanImage(), factors=8, steps=40, refine=20, chunk=8, calibrate=False)
COUNTS = {"factors": 0, "net_steps": -1, "steps": 0, "refine": -1, "draws": 0, "restarts": -1}
OTHERS = {"chunk": 0, "limit": 0, "min_aux": 10, "lr": math.nan}


def bottleneck(noise: float = 0.02) -> Victim:
    """Ten numbers of 64 pixels, squashed."""
    mix = torch.randn(64, 10, generator=generator(4))
    encoder = Formula(lambda x: torch.tanh((x.flatten(1) - 0.5) @ mix))
    return Victim(encoder, Channel([GaussianNoise(noise)]))


def observed(victim: Victim, x: Labelled) -> Observation:
    return Observation(victim.send(x.images, generator(5)), x.labels)


def attacked(victim: Victim, attack: Attack, aux: Labelled, x: Labelled) -> Tensor:
    box = victim.white_box() if attack.access is Access.WHITE_BOX else victim.black_box()
    return attack.fit(box, aux, generator())(observed(victim, x))


def error(guess: Tensor, x: Labelled) -> float:
    return float((guess - x.images).square().mean())


def test_the_prior_beats_a_decoder_fitted_on_sixty_images() -> None:
    victim, aux, x = bottleneck(), planted(60, seed=1), planted(16, seed=2)
    decoder = Decoder(width=16, blocks=1, epochs=1, min_steps=60, batch_size=32, lr=8e-3)
    search = Rmle(start=Linear(), steps=60, chunk=16)
    rivals = [error(attacked(victim, a, aux, x), x) for a in (decoder, Linear(), search)]
    attack = Prior(start=Linear(), factors=8, steps=60, refine=20, chunk=16)
    assert error(attacked(victim, attack, aux, x), x) < 0.6 * min(rivals)


def test_restarts_are_judged_by_the_objective() -> None:
    # z = s² of images 0.5 + 0.1·s·pattern: ±s look alike, and aux has s around 0.5
    pattern = torch.tensor([1.0, -1.0]).repeat(8).view(1, 1, 4, 4)
    victim = Victim(
        Formula(lambda x: 100 * ((x - 0.5) * pattern).flatten(1).mean(1, True) ** 2), Channel()
    )

    def images(strength: Tensor) -> Labelled:
        flat = (0.5 + 0.1 * strength.view(-1, 1, 1, 1) * pattern).clamp(0, 1)
        return Labelled(flat, torch.zeros(len(strength), dtype=torch.long))

    aux = images(0.5 + torch.randn(60, generator=generator(1)))
    below, above = (images(sign * torch.linspace(0.8, 1.2, 6)) for sign in (-1, 1))
    lower = Guess(lambda z: images(-z.sqrt()).images)
    upper = Guess(lambda z: images(z.sqrt()).images)
    for truth in (below, above):
        for start in (lower, upper):
            guess = attacked(victim, replace(FAST, start=start, factors=1, steps=200), aux, truth)
            assert error(guess, above) < 1e-3
            assert error(guess, below) > 0.02


@pytest.mark.parametrize("kill", [Tensor.detach, torch.round], ids=["detached", "rounded"])
def test_without_a_gradient_the_best_start_is_the_answer(
    kill: Callable[[Tensor], Tensor],
) -> None:
    victim, aux, x = (
        Victim(Formula(lambda x: kill(50 * x)), Channel()),
        planted(40, seed=1),
        planted(5, seed=2),
    )
    guess = attacked(victim, replace(FAST, start=Guess(lambda z: z / 50), steps=3), aux, x)
    assert error(guess, x) < 0.3 * error(attacked(victim, ClassMean(), aux, x), x)


BROKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "ones": lambda x: torch.ones(len(x), 5),
    "zero": lambda x: 0 * x.flatten(1),
    "sqrt": lambda x: (x - 0.5).clamp_min(0).sqrt(),  # its slope is infinite, then NaN
}


@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("name", BROKEN)
def test_broken_encoders_leave_sound_images(name: str, noise: float, make_aux: MakeAux) -> None:
    victim = Victim(Formula(BROKEN[name]), Channel([GaussianNoise(noise)]))
    guess = attacked(victim, replace(FAST, steps=3, calibrate=True), make_aux(11), make_aux(5))
    assert guess.shape == (5, 1, 4, 4)
    assert 0 <= float(guess.min()) <= float(guess.max()) <= 1


def test_a_channel_that_drops_at_random_is_attacked_all_the_same() -> None:
    victim = Victim(bottleneck().encoder, Channel([Formula(dropped)]))
    aux, x = planted(60, seed=1), planted(16, seed=2)
    floor = error(attacked(victim, MeanImage(), aux, x), x)
    assert error(attacked(victim, replace(FAST, chunk=16), aux, x), x) < 0.6 * floor


def test_a_class_without_aux_images_gets_the_mean_of_all() -> None:
    victim, aux, x = bottleneck(), planted(40, seed=1), planted(4, seed=2)
    reconstruct = FAST.fit(victim.white_box(), aux, generator())
    strange = Observation(observed(victim, x).z, torch.full((4,), 77))
    floor = error(attacked(victim, MeanImage(), aux, x), x)
    assert error(reconstruct(strange), x) < 0.8 * floor


def test_it_is_the_same_twice_and_leaves_no_trace() -> None:
    victim = Victim(bottleneck().encoder, Channel([GaussianNoise(0.1), Formula(dropped)]))
    box, aux = victim.white_box(), planted(30, seed=1)
    seen, attack = observed(victim, planted(5, seed=2)), replace(FAST, steps=10, net_steps=3)
    kept = [t.clone() for t in (aux.images, aux.labels, seen.z, seen.answer)]
    state = torch.get_rng_state()
    one, other = (attack.fit(box, aux, generator())(seen) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one, other)
    assert not torch.equal(attack.fit(box, aux, generator(1))(seen), one)
    assert (one.dtype, one.requires_grad) == (torch.float32, False)
    for before, now in zip(kept, (aux.images, aux.labels, seen.z, seen.answer), strict=True):
        assert torch.equal(before, now)


def test_scored_images_do_not_reach_the_victim_or_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models: list[FactorModel] = []

    def spied(*args: object, **options: object) -> FactorModel:
        models.append(sharpened(*args, **options))  # type: ignore[arg-type]
        return models[-1]

    monkeypatch.setattr(prior, "sharpened", spied)
    victim, queries = bottleneck(), list[int]()

    def send(x: Tensor, stream: torch.Generator | None = None) -> Tensor:
        queries.append(len(x))
        return victim.send(x, stream)

    box = replace(victim.white_box(), send=send, prepare=None)
    attack = replace(FAST, net_steps=3, steps=5)
    reconstruct = attack.fit(box, planted(30, seed=1), generator())
    (model,) = models
    assert isinstance(model.net, nn.Module)
    kept = copy.deepcopy((model.means, model.basis, model.net.state_dict()))
    asked = len(queries)
    reconstruct(observed(victim, planted(9, seed=2)))
    assert len(queries) == asked > 0
    assert torch.equal(model.means, kept[0])
    assert torch.equal(model.basis, kept[1])
    assert all(torch.equal(kept[2][k], t) for k, t in model.net.state_dict().items())
    assert not model.net.training
    assert not any(p.requires_grad for p in model.net.parameters())


def test_an_image_does_not_depend_on_those_beside_it() -> None:
    victim = bottleneck()
    reconstruct = replace(FAST, calibrate=True).fit(victim.white_box(), planted(30, 1), generator())
    seen = observed(victim, planted(19, seed=2))  # two chunks and a part of one
    guess = reconstruct(seen)
    some = reconstruct(Observation(seen.z[9:12], seen.answer[9:12]))
    torch.testing.assert_close(some, guess[9:12], rtol=0, atol=1e-5)


def test_a_black_box_is_not_enough() -> None:
    with pytest.raises(AuditError, match="needs a white-box view, got BlackBox"):
        FAST.fit(bottleneck().black_box(), planted(20, seed=1), generator())


@pytest.mark.parametrize("n", [0, 10])
def test_ten_images_are_too_few(n: int) -> None:
    with pytest.raises(AuditError, match=f"prior attack needs at least 11 aux images, got {n}"):
        FAST.fit(bottleneck().white_box(), planted(n, seed=1), generator())


@pytest.mark.parametrize(("name", "wrong"), [*COUNTS.items(), *OTHERS.items()])
def test_budgets_out_of_range_are_refused(name: str, wrong: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be .*, got {wrong}"):
        replace(FAST, **{name: wrong})  # type: ignore[arg-type]


def test_a_start_that_needs_repeats_is_refused() -> None:
    with pytest.raises(ConfigError, match="one sending per image"):
        Prior(start=KQuery())
