"""What holds for every line of `ATTACKS`, under the budgets of `PROFILES`."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor, nn

from splitveil.attacks.catalogue import ATTACKS
from splitveil.attacks.profiles import PROFILES
from splitveil.errors import AuditError
from splitveil.nets.channel import Channel, GaussianNoise
from splitveil.threat import Access, Attack, BlackBox, Labelled, Observation, Reconstructor, Victim

SMOKE = PROFILES["smoke"]
CLASSES = 4
LOOKS_AT_Z = (Access.BLACK_BOX, Access.REPEATS, Access.WHITE_BOX)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(n: int, seed: int) -> Labelled:
    """Waves on 8×8 pixels: the class is the direction; phase and contrast are the image's own."""
    stream = generator(seed)
    labels = torch.randint(CLASSES, (n,), generator=stream)
    phase, contrast = torch.rand(2, n, 1, 1, generator=stream)
    angle = (labels * math.pi / CLASSES)[:, None, None]
    line = torch.linspace(0, 1, 8)
    wave = torch.cos(angle) * line[:, None] + torch.sin(angle) * line
    images = 0.5 + 0.5 * contrast * torch.sin(2 * math.pi * (wave + 0.35 * phase))
    return Labelled(images[:, None].clamp(0, 1), labels)


AUX = pictures(800, seed=1)
FLOOR = AUX.images.mean(0)


def a_victim() -> Victim:
    """One fixed convolution and hardly any noise: no defence."""
    conv = nn.Conv2d(1, 4, 3, stride=2, padding=1, bias=False)
    nn.init.normal_(conv.weight, std=0.5, generator=generator(0))
    encoder = nn.Sequential(conv, nn.BatchNorm2d(4), nn.Sigmoid())
    return Victim(encoder, Channel([GaussianNoise(0.01)]))


def view(victim: Victim, attack: Attack) -> BlackBox:
    """The victim as the attack's threat model meets it."""
    return victim.white_box() if attack.access is Access.WHITE_BOX else victim.black_box()


def observe(victim: Victim, attack: Attack, scored: Labelled) -> Observation:
    """What the server holds, with repeats for an attack that asks for them."""
    stream = generator(3)
    repeats = int(getattr(attack, "repeats", 1))
    draws = torch.stack([victim.send(scored.images, stream) for _ in range(repeats)])
    wanted = attack.access is Access.REPEATS
    return Observation(draws[0].clone(), scored.labels, draws if wanted else None)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One attack, fitted once and asked once, and everything that was noticed meanwhile."""

    attack: Attack
    victim: Victim
    aux: Labelled
    scored: Labelled
    seen: Observation
    reconstruct: Reconstructor
    guess: Tensor
    untouched: bool
    queries: list[int] = field(default_factory=list)
    heard: list[tuple[int, int]] = field(default_factory=list)


@pytest.fixture(scope="module", params=sorted(ATTACKS))
def trial(request: pytest.FixtureRequest) -> Trial:
    attack, victim, aux = SMOKE[request.param], a_victim(), copy.deepcopy(AUX)
    scored = pictures(24 if attack.access is Access.WHITE_BOX else 200, seed=2)
    seen = observe(victim, attack, scored)
    box, queries, heard = view(victim, attack), list[int](), list[tuple[int, int]]()

    def counted(x: Tensor, stream: torch.Generator | None = None) -> Tensor:
        queries.append(len(x))
        return victim.send(x, stream)

    def listen(done: int, total: int, note: str = "") -> None:
        assert isinstance(note, str)
        heard.append((done, total))

    given, held = copy.deepcopy(seen), copy.deepcopy(victim.encoder.state_dict())
    state = torch.get_rng_state()
    reconstruct = attack.fit(replace(box, send=counted, prepare=None), aux, generator(0), listen)
    guess = reconstruct(seen)
    untouched = (
        torch.equal(torch.get_rng_state(), state)
        and torch.equal(aux.images, AUX.images)
        and torch.equal(aux.labels, AUX.labels)
        and torch.equal(seen.z, given.z)
        and torch.equal(seen.answer, given.answer)
        and (given.draws is None or torch.equal(seen.draws, given.draws))  # type: ignore[arg-type]
        and all(torch.equal(victim.encoder.state_dict()[k], v) for k, v in held.items())
        and not victim.encoder.training
    )
    return Trial(
        attack=attack,
        victim=victim,
        aux=aux,
        scored=scored,
        seen=seen,
        reconstruct=reconstruct,
        guess=guess,
        untouched=untouched,
        queries=queries,
        heard=heard,
    )


def error(guess: Tensor, scored: Labelled) -> float:
    return float((guess - scored.images).square().mean())


def test_it_leaves_no_trace(trial: Trial) -> None:
    assert trial.untouched


def test_it_repeats_exactly_also_without_progress(trial: Trial) -> None:
    torch.rand(1)  # whoever else draws from the global stream must not matter
    attack = copy.deepcopy(trial.attack)
    again = attack.fit(view(trial.victim, attack), trial.aux, generator(0))(trial.seen)
    assert torch.equal(again, trial.guess)


def test_it_returns_images_and_beats_the_mean_image(trial: Trial) -> None:
    guess, scored = trial.guess, trial.scored
    assert guess.shape == scored.images.shape
    assert guess.dtype == scored.images.dtype
    assert not guess.requires_grad
    assert 0 <= float(guess.min()) <= float(guess.max()) <= 1
    floor = error(FLOOR.expand_as(scored.images), scored)
    if trial.attack.access is Access.NONE:
        assert error(guess, scored) == pytest.approx(floor, rel=1e-6)
    else:
        assert error(guess, scored) < 0.75 * floor


def test_it_works_image_by_image(trial: Trial) -> None:
    """A search that descends on many images at once may round them differently."""
    if trial.attack.access is Access.WHITE_BOX:
        pytest.skip("a white-box search is promised to repeat, not to be blind to its batch")
    seen, n = trial.seen, len(trial.scored)

    def at(rows: Tensor) -> Observation:
        draws = None if seen.draws is None else seen.draws[:, rows]
        return Observation(seen.z[rows], seen.answer[rows], draws)

    back = torch.arange(n - 1, -1, -1)
    turned = trial.reconstruct(at(back))
    torch.testing.assert_close(turned[back], trial.guess, rtol=0, atol=1e-5)
    some = trial.reconstruct(at(torch.arange(3)))
    torch.testing.assert_close(some, trial.guess[:3], rtol=0, atol=1e-5)


def test_it_queries_no_more_than_its_threat_model_allows(trial: Trial) -> None:
    assert bool(trial.queries) is (trial.attack.access in LOOKS_AT_Z)


def test_its_progress_never_falls_and_never_passes_its_end(trial: Trial) -> None:
    shares = [done / total for done, total in trial.heard]
    assert shares == sorted(shares)
    assert shares[0] >= 0
    assert 0 < shares[-1] <= 1


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_an_attacker_without_images_is_refused(name: str) -> None:
    attack, nothing = SMOKE[name], Labelled(AUX.images[:0], AUX.labels[:0])
    with pytest.raises(AuditError, match=r"at least .* aux image.*, got"):
        attack.fit(view(a_victim(), attack), nothing, generator(0))


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_the_least_aux_it_asks_for_is_enough(name: str) -> None:
    attack, victim = SMOKE[name], a_victim()
    least = int(getattr(attack, "min_aux", 1))
    few, scored = Labelled(AUX.images[:least], AUX.labels[:least]), pictures(2, seed=2)
    guess = attack.fit(view(victim, attack), few, generator(0))(observe(victim, attack, scored))
    assert bool(torch.isfinite(guess).all())


def test_a_white_box_attack_refuses_a_black_box() -> None:
    for attack in SMOKE.values():
        if attack.access is Access.WHITE_BOX:
            with pytest.raises(AuditError, match="white-box"):
                attack.fit(a_victim().black_box(), AUX, generator(0))


def test_needs_of_attacks_are_in_range() -> None:
    for profile in PROFILES.values():
        for attack in profile.values():
            limit = getattr(attack, "limit", None)
            assert limit is None or limit >= 1
            assert int(getattr(attack, "min_aux", 1)) >= 1
            assert float(getattr(attack, "effort", 1.0)) > 0
            assert (int(getattr(attack, "repeats", 1)) > 1) is (attack.access is Access.REPEATS)


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_a_profile_names_its_attacks_as_the_catalogue_does(profile: str) -> None:
    for name, one in PROFILES[profile].items():
        assert type(one) is ATTACKS[name]
        assert isinstance(one, Attack)
        assert isinstance(one.access, Access)


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_every_profile_has_the_floors_and_a_black_box_attack(profile: str) -> None:
    levels = {one.access for one in PROFILES[profile].values()}
    assert {Access.NONE, Access.LABEL, Access.BLACK_BOX} <= levels


def test_the_smoke_profile_covers_the_catalogue() -> None:
    assert SMOKE.keys() == ATTACKS.keys()


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_an_attack_is_a_frozen_value_with_a_one_line_story(name: str) -> None:
    build: Callable[[], Attack] = ATTACKS[name]
    one, other = build(), build()
    assert one == other
    assert hash(one) == hash(other)
    assert (ATTACKS[name].__doc__ or "").splitlines()[0].endswith(".")
    with pytest.raises(AttributeError):
        one.access = Access.NONE  # type: ignore[misc]
