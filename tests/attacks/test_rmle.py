"""White-box search: what it minimises, from where it starts, and what it refuses."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from attacks.made import Formula, Guess, dropped, generator
from torch import Tensor, nn

from splitveil.attacks.baseline import MeanImage
from splitveil.attacks.decoder import Decoder
from splitveil.attacks.k_query import KQuery
from splitveil.attacks.linear import Linear
from splitveil.attacks.rmle import ChannelFacts, Energy, Rmle, measure_channel
from splitveil.errors import AuditError, ConfigError
from splitveil.nets.channel import Channel, GaussianNoise
from splitveil.threat import Access, Attack, Labelled, Observation, Victim

MakeAux = Callable[..., Labelled]
FAST = Rmle(start=MeanImage(), steps=100, chunk=8)
COUNTS = {"steps": 0, "draws": 0, "chunk": 0, "limit": 0, "min_aux": 10, "restarts": -1}
WEIGHTS = {"lr": -0.1, "tv": math.inf, "prior": math.nan}


def conv(inputs: int, outputs: int) -> nn.Conv2d:
    layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    nn.init.normal_(layer.weight, std=0.5, generator=generator())
    return layer


def halves(z: Tensor, *_: torch.Generator) -> Tensor:
    return (2 * z).round() / 2


def observed(victim: Victim, x: Tensor) -> Observation:
    return Observation(victim.send(x, generator(5)), torch.zeros(len(x), dtype=torch.long))


def attacked(victim: Victim, attack: Attack, aux: Labelled, x: Tensor) -> Tensor:
    box = victim.white_box() if attack.access is Access.WHITE_BOX else victim.black_box()
    return attack.fit(box, aux, generator())(observed(victim, x))


def error(guess: Tensor, x: Tensor) -> float:
    return float((guess - x).square().mean())


def test_energy_of_one_image_by_hand() -> None:
    facts = ChannelFacts(torch.tensor(2.0), torch.tensor(0.499), torch.full((1, 1, 2), 0.5), 1)
    energy = Energy(nn.Identity(), Channel(), facts, torch.tensor(0.25), tv=3.0, prior=2.0)
    x, x0 = torch.tensor([[[[0.0, 1.0]]]]), torch.tensor([[[[0.5, 1.0]]]])
    z_sent = torch.tensor([[[[1.5, 1.5]]]])
    # misfit ((0.5 − 1.5)² + 0)/2/2 = 0.25; TV 1; pull (0.25/0.25 + 0)/2; weight 0.499 + 0.001
    value = energy(x, z_sent, x0, generator())
    assert value.tolist() == pytest.approx([0.25 + 0.5 * (3 * 1 + 2 * 0.5)])


def test_the_gradient_goes_straight_through_a_rounding_channel() -> None:
    facts = ChannelFacts(torch.tensor(1.0), torch.tensor(0.0), None, 1)
    energy = Energy(nn.Identity(), Formula(halves), facts, torch.ones(()), tv=0.0, prior=0.0)
    x = torch.tensor([[[[0.1, 0.6]]]], requires_grad=True)
    value = energy(x, torch.tensor([[[[1.0, 0.5]]]]), torch.zeros(1, 1, 1, 2), generator())
    value.sum().backward()  # type: ignore[no-untyped-call]
    assert value.tolist() == pytest.approx([0.5])  # 0.1 is sent as 0, 0.6 as 0.5
    assert x.grad is not None
    assert x.grad.flatten().tolist() == pytest.approx([-1.0, 0.0])  # 2·(sent − z̃)/2


def test_channel_facts_are_measured(make_aux: MakeAux) -> None:
    x = make_aux(500).images

    def facts(*stages: nn.Module) -> ChannelFacts:
        box = Victim(nn.Identity(), Channel(stages)).white_box()
        return measure_channel(box, x, generator(), draws=7)

    for stages, offset in (((), 0.0), ((Formula(lambda z, _: z + 2),), 2.0)):
        plain = facts(*stages)
        assert plain.offset is not None
        torch.testing.assert_close(plain.offset, torch.full((1, 4, 4), offset))
        assert (float(plain.noise), plain.draws) == (0.0, 1)
        assert float(plain.scale) == pytest.approx(1 / 12, rel=0.05)

    noisy = facts(GaussianNoise(0.5))
    assert noisy.offset is not None
    assert 0 < float(noisy.offset.abs().max()) < 4.5 * 0.5 / 64  # 64² sendings
    assert float(noisy.scale) == pytest.approx(1 / 12 + 1 / 4, rel=0.05)
    assert float(noisy.noise) == pytest.approx(3 / 4, rel=0.05)

    rounded = facts(Formula(halves))
    assert (rounded.offset, float(rounded.noise), rounded.draws) == (None, 0.0, 1)
    dropping = facts(Formula(dropped))  # variance of 2bx given x: x², of mean 1/3; of 2bx: 5/12
    assert (dropping.offset, dropping.draws) == (None, 7)
    assert float(dropping.noise) == pytest.approx(4 / 5, rel=0.05)


def test_it_beats_a_decoder_fitted_on_twelve_images(
    make_aux: MakeAux, linear_victim: Victim
) -> None:
    aux, x = make_aux(12), make_aux(8, seed=1).images
    assert error(attacked(linear_victim, Linear(), aux, x), x) > 0.02
    guess = attacked(linear_victim, FAST, aux, x)
    assert error(guess, x) < 1e-5
    assert float((guess - x).abs().max()) < 0.02


def test_it_beats_a_decoder_starved_of_images(make_aux: MakeAux) -> None:
    victim = Victim(nn.Sequential(conv(1, 4), nn.Tanh(), conv(4, 2)), Channel())
    decoder = Decoder(width=16, blocks=1, epochs=2, min_steps=60, batch_size=64)
    aux, x = make_aux(64, (1, 8, 8)), make_aux(8, (1, 8, 8), seed=1).images
    starts = [error(attacked(victim, start, aux, x), x) for start in (decoder, Linear())]
    guess = attacked(victim, Rmle(start=decoder, steps=100, chunk=8), aux, x)
    assert error(guess, x) < 0.05 * min(starts)


def test_a_rounding_channel_is_attacked_all_the_same(
    make_aux: MakeAux, linear_victim: Victim
) -> None:
    victim = Victim(linear_victim.encoder, Channel([Formula(lambda z, _: (8 * z).round() / 8)]))
    aux, x = make_aux(12), make_aux(20, seed=1).images
    left = error(attacked(victim, Linear(), aux, x), x)
    # of rounding to eighths alone 1/768 = 0.0013 would be left
    assert error(attacked(victim, FAST, aux, x), x) < min(0.003, 0.1 * left)


def test_a_dropping_channel_is_searched_with_several_draws(
    make_aux: MakeAux, linear_victim: Victim
) -> None:
    calls = []

    def counted(z: Tensor, stream: torch.Generator) -> Tensor:
        calls.append(len(z))
        return dropped(z, stream)

    victim = Victim(linear_victim.encoder, Channel([Formula(counted)]))
    aux, x = make_aux(40), make_aux(8, seed=1).images
    starts = [error(attacked(victim, start, aux, x), x) for start in (MeanImage(), Linear())]
    reconstruct = FAST.fit(victim.white_box(), aux, generator())
    seen = observed(victim, x)
    calls.clear()
    guess = reconstruct(seen)
    rows = 4 * 8  # starts of one chunk: mean image (twice), linear, one random image
    assert calls.count(rows) == FAST.draws * FAST.steps
    assert error(guess, x) < min(starts)
    assert torch.equal(reconstruct(seen), guess)


def test_noise_is_not_taken_for_the_image(make_aux: MakeAux) -> None:
    victim = Victim(nn.Identity(), Channel([GaussianNoise(0.3)]))
    aux, x = make_aux(200), make_aux(24, seed=1).images

    def left(weight: float, *, calibrate: bool) -> float:
        attack = replace(FAST, steps=60, chunk=24, tv=weight, prior=weight, calibrate=calibrate)
        return error(attacked(victim, attack, aux, x), x)

    bare = left(0.0, calibrate=False)
    assert left(1.0, calibrate=False) < 0.8 * bare
    assert left(0.0, calibrate=True) < 0.85 * bare
    assert left(1.0, calibrate=True) < 1.02 * error(attacked(victim, Linear(), aux, x), x)


def test_restarts_are_judged_by_the_energy_not_by_the_true_error(make_aux: MakeAux) -> None:
    # f folds the pixels about 0.5; the guess 0.5 + z fits to the bit, and is far from the truth
    victim = Victim(Formula(lambda x: (x - 0.5).abs()), Channel())
    aux, x = make_aux(20), make_aux(10, seed=1).images
    attack = Rmle(start=Guess(lambda z: 0.5 + z), steps=1, lr=0.0, chunk=8, calibrate=False)
    guess = attacked(victim, attack, aux, x)
    assert torch.equal(guess, 0.5 + (x - 0.5).abs())
    assert error(guess, x) > 1.5 * error(attacked(victim, MeanImage(), aux, x), x)


@pytest.mark.parametrize("kill", [Tensor.detach, torch.round], ids=["detached", "rounded"])
def test_without_a_gradient_the_best_start_is_the_answer(
    kill: Callable[[Tensor], Tensor], make_aux: MakeAux
) -> None:
    # a start that fits to the bit, beside others that do not
    victim = Victim(Formula(lambda x: kill(4 * x)), Channel())
    aux, x = make_aux(12), make_aux(5, seed=1).images
    attack = Rmle(start=Guess(lambda z: z / 4), steps=5, tv=0.0, chunk=8)
    assert torch.equal(attacked(victim, attack, aux, x), victim.send(x) / 4)


BROKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "ones": lambda x: torch.ones(len(x), 5),
    "zero": lambda x: 0 * x.flatten(1),
    "sqrt": lambda x: (x - 0.5).clamp_min(0).sqrt(),  # its slope is infinite, then NaN
}


@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("name", BROKEN)
def test_broken_encoders_leave_sound_images(name: str, noise: float, make_aux: MakeAux) -> None:
    victim = Victim(Formula(BROKEN[name]), Channel([GaussianNoise(noise)]))
    guess = attacked(victim, Rmle(start=MeanImage(), steps=5), make_aux(11), make_aux(5).images)
    assert guess.shape == (5, 1, 4, 4)
    assert 0 <= float(guess.min()) <= float(guess.max()) <= 1


def test_it_is_the_same_twice_and_leaves_no_trace(make_aux: MakeAux) -> None:
    victim = Victim(conv(1, 2), Channel([GaussianNoise(0.1), Formula(dropped)]))
    box, aux = victim.white_box(), make_aux(20)
    seen = observed(victim, make_aux(5, seed=1).images)
    kept = [t.clone() for t in (aux.images, aux.labels, seen.z, seen.answer)]
    weights = copy.deepcopy(box.encoder.state_dict())
    state = torch.get_rng_state()
    attack = replace(FAST, steps=20)
    one, other = (attack.fit(box, aux, generator())(seen) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one, other)
    assert not torch.equal(attack.fit(box, aux, generator(1))(seen), one)
    assert (one.dtype, one.requires_grad) == (torch.float32, False)
    for before, now in zip(kept, (aux.images, aux.labels, seen.z, seen.answer), strict=True):
        assert torch.equal(before, now)
    assert all(torch.equal(weights[k], v) for k, v in box.encoder.state_dict().items())
    assert all(p.grad is None and not p.requires_grad for p in box.encoder.parameters())


def test_an_image_does_not_depend_on_those_beside_it(make_aux: MakeAux) -> None:
    victim = Victim(conv(1, 3), Channel([GaussianNoise(0.05)]))
    reconstruct = replace(FAST, steps=40).fit(victim.white_box(), make_aux(20), generator())
    seen = observed(victim, make_aux(19, seed=1).images)  # two chunks and a part of one
    guess = reconstruct(seen)
    back = reconstruct(Observation(seen.z.flip(0), seen.answer))
    some = reconstruct(Observation(seen.z[9:12], seen.answer[9:12]))
    torch.testing.assert_close(back.flip(0), guess, rtol=0, atol=1e-6)
    torch.testing.assert_close(some, guess[9:12], rtol=0, atol=1e-6)
    with torch.no_grad():
        assert torch.equal(reconstruct(seen), guess)


def test_it_says_how_far_it_is(make_aux: MakeAux, linear_victim: Victim) -> None:
    shares: list[float] = []

    def told(done: int, total: int, note: str = "") -> None:
        assert note
        shares.append(done / total)

    start = Decoder(width=4, blocks=1, epochs=1, min_steps=100, batch_size=8)
    attack = Rmle(start=start, steps=2, chunk=8)
    fitted = attack.fit(linear_victim.white_box(), make_aux(20), generator(), told)
    fitted(observed(linear_victim, make_aux(20, seed=1).images))
    assert shares == sorted(shares)
    assert shares[-4:] == [0.5, 0.5, 0.7, 0.9]


def test_a_black_box_is_not_enough(make_aux: MakeAux, linear_victim: Victim) -> None:
    with pytest.raises(AuditError, match="needs a white-box view, got BlackBox"):
        FAST.fit(linear_victim.black_box(), make_aux(20), generator())


@pytest.mark.parametrize("n", [0, 10])
def test_ten_images_are_too_few(n: int, make_aux: MakeAux, linear_victim: Victim) -> None:
    with pytest.raises(AuditError, match=f"rmle attack needs at least 11 aux images, got {n}"):
        FAST.fit(linear_victim.white_box(), make_aux(n), generator())


@pytest.mark.parametrize(("name", "wrong"), [*COUNTS.items(), *WEIGHTS.items()])
def test_budgets_out_of_range_are_refused(name: str, wrong: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be .*, got {wrong}"):
        replace(FAST, **{name: wrong})  # type: ignore[arg-type]


def test_a_start_that_needs_repeats_is_refused() -> None:
    with pytest.raises(ConfigError, match="one sending per image"):
        Rmle(start=KQuery())
