"""What holds for every line of `ATTACKS`, under the budgets of `PROFILES`."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from splitveil.attacks import ATTACKS, PROFILES
from splitveil.errors import AuditError
from splitveil.nets import Channel, GaussianNoise
from splitveil.types import Access, Attack, BlackBox, Labelled, Observation, Victim

SMOKE = PROFILES["smoke"]
CLASSES = 4


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


@pytest.fixture(scope="module")
def aux() -> Labelled:
    return pictures(2000, seed=1)


@pytest.fixture(scope="module")
def scored() -> Labelled:
    return pictures(200, seed=2)


@pytest.fixture
def victim() -> Victim:
    """One fixed convolution and hardly any noise: no defence."""
    conv = nn.Conv2d(1, 4, 3, stride=2, padding=1, bias=False)
    nn.init.normal_(conv.weight, std=0.5, generator=generator(0))
    encoder = nn.Sequential(conv, nn.BatchNorm2d(4), nn.Sigmoid())
    return Victim(encoder, Channel([GaussianNoise(0.01)]))


@pytest.fixture(params=sorted(ATTACKS))
def attack(request: pytest.FixtureRequest) -> Attack:
    return SMOKE[request.param]


def observe(victim: Victim, scored: Labelled) -> Observation:
    return Observation(victim.send(scored.images, generator(3)), scored.labels)


def error(guess: Tensor, scored: Labelled) -> float:
    return float((guess - scored.images).square().mean())


def test_it_is_the_same_twice_and_leaves_no_trace(
    attack: Attack, victim: Victim, aux: Labelled, scored: Labelled
) -> None:
    seen, given = observe(victim, scored), copy.deepcopy(aux)
    held, sent = copy.deepcopy(victim.encoder.state_dict()), seen.z.clone()
    state = torch.get_rng_state()

    one = attack.fit(victim.black_box(), aux, generator(0))(seen)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)  # whoever else draws from the global stream must not matter
    other = attack.fit(victim.black_box(), aux, generator(0))(seen)

    assert torch.equal(one, other)
    after = victim.encoder.state_dict()
    assert all(torch.equal(after[key], value) for key, value in held.items())
    assert all(not m.training for m in victim.encoder.modules())
    assert torch.equal(aux.images, given.images)
    assert torch.equal(aux.labels, given.labels)
    assert torch.equal(seen.z, sent)


def test_it_returns_images_one_by_one_and_beats_the_mean_image(
    attack: Attack, victim: Victim, aux: Labelled, scored: Labelled
) -> None:
    seen = observe(victim, scored)
    reconstruct = attack.fit(victim.black_box(), aux, generator(0))
    guess = reconstruct(seen)
    assert guess.shape == scored.images.shape
    assert guess.dtype == scored.images.dtype
    assert not guess.requires_grad
    assert 0 <= float(guess.min()) <= float(guess.max()) <= 1

    floor = error(aux.images.mean(0).expand_as(scored.images), scored)
    if attack.access is Access.NONE:
        assert error(guess, scored) == pytest.approx(floor, rel=1e-6)
    else:
        assert error(guess, scored) < 0.75 * floor

    back = torch.arange(len(scored) - 1, -1, -1)
    turned = reconstruct(Observation(seen.z[back], seen.answer[back]))
    torch.testing.assert_close(turned[back], guess, rtol=0, atol=1e-5)
    some = reconstruct(Observation(seen.z[:3], seen.answer[:3]))
    torch.testing.assert_close(some, guess[:3], rtol=0, atol=1e-5)


def test_it_queries_no_more_than_its_threat_model_allows(
    attack: Attack, victim: Victim, aux: Labelled
) -> None:
    calls: list[int] = []

    def counted(x: Tensor, stream: torch.Generator | None = None) -> Tensor:
        calls.append(len(x))
        return victim.send(x, stream)

    few = Labelled(aux.images[:64], aux.labels[:64])
    attack.fit(BlackBox(counted, victim.device), few, generator(0))
    assert bool(calls) is (attack.access is Access.BLACK_BOX)


def test_an_attacker_without_images_is_refused(
    attack: Attack, victim: Victim, aux: Labelled
) -> None:
    nothing = Labelled(aux.images[:0], aux.labels[:0])
    with pytest.raises(AuditError, match=r"at least .* aux image.*, got"):
        attack.fit(victim.black_box(), nothing, generator(0))


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_a_profile_names_its_attacks_as_the_catalogue_does(profile: str) -> None:
    for name, one in PROFILES[profile].items():
        assert type(one) is ATTACKS[name]
        assert isinstance(one, Attack)
        assert isinstance(one.access, Access)


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_every_profile_holds_the_floor_and_an_attack_that_looks_at_z(profile: str) -> None:
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
