"""Re-identification: places against brute force, ties by lot, open and silent clients."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from splitveil.attacks.reid import KnownImages, ReId, ranks, scalings, unit_directions
from splitveil.errors import AuditError, ConfigError
from splitveil.nets.channel import Channel, GaussianNoise
from splitveil.threat import Labelled, Victim

MakeAux = Callable[..., Labelled]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def places(victim: Victim, x: Tensor, seed: int = 0) -> Tensor:
    """Where each image stands when what was sent of it is looked for."""
    box, stream = victim.black_box(), generator(seed)
    gallery = ReId().send(box, x, stream)
    seen = box.send(x, stream).flatten(1)
    return ranks(seen, gallery.mean, torch.arange(len(x)), stream)


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(1, 8),
    m=st.integers(1, 12),
    d=st.integers(1, 4),
    values=st.integers(2, 5),  # few values: many ties
    seed=st.integers(0, 2**31),
)
def test_ranks_are_those_of_brute_force_with_ties_by_lot(
    n: int, m: int, d: int, values: int, seed: int
) -> None:
    stream = generator(seed)
    guess = torch.randint(values, (n, d), generator=stream).float()
    gallery = torch.randint(values, (m, d), generator=stream).float()
    truth = torch.randint(m, (n,), generator=stream)
    found = ranks(guess, gallery, truth, stream)
    for i in range(n):
        distances = ((guess[i] - gallery) ** 2).sum(1)
        mine = distances[truth[i]]
        first = 1 + int((distances < mine).sum())
        assert first <= int(found[i]) < first + int((distances == mine).sum())


def test_blocks_make_no_difference() -> None:
    gallery = torch.rand(2300, 3, generator=generator())
    guess = gallery[:1100] + 0.05 * torch.randn(1100, 3, generator=generator(1))
    distances = torch.cdist(guess.double(), gallery.double())
    expected = 1 + (distances < distances.diagonal()[:, None]).sum(1)
    found = ranks(guess, gallery, torch.arange(1100), generator())
    assert torch.equal(found, expected)
    assert 1 < float(expected.double().mean()) < 1000


def test_a_dead_client_is_at_chance_and_not_at_either_end(
    make_aux: MakeAux, dead_victim: Victim
) -> None:
    found = places(dead_victim, make_aux(400).images)
    assert int((found == 1).sum()) <= 6  # Poisson(1)
    assert float(found.double().mean()) == pytest.approx(200.5, abs=18)  # 3 sd of the mean
    assert len(set(found.tolist())) > 150


def test_an_offset_far_from_zero_costs_no_place(make_aux: MakeAux) -> None:
    z = make_aux(50).images.flatten(1).double() + 1e6
    found = ranks(z, z, torch.arange(50), generator())
    assert found.tolist() == [1] * 50


def test_identity_client_identifies_all_and_pure_noise_none(make_aux: MakeAux) -> None:
    x = make_aux(400).images
    clear = places(Victim(nn.Identity(), Channel([GaussianNoise(0.01)])), x)
    assert clear.tolist() == [1] * 400
    noisy = places(Victim(nn.Identity(), Channel([GaussianNoise(1000.0)])), x)
    assert int((noisy == 1).sum()) <= 6
    assert float(noisy.double().mean()) == pytest.approx(200.5, abs=18)


class Loud(nn.Module):
    """One feature of noise far above the others follows the image."""

    def forward(self, z: Tensor, generator: torch.Generator | None = None) -> Tensor:
        noise = 50.0 * torch.randn(len(z), 1, generator=generator)
        return torch.cat([z.flatten(1), noise], 1)


def test_a_loud_feature_of_noise_is_weighed_down(make_aux: MakeAux) -> None:
    x, aux = make_aux(300).images, make_aux(200, seed=1).images
    victim = Victim(nn.Identity(), Loud())
    assert int((places(victim, x) == 1).sum()) < 100
    attack, box, stream = ReId(), victim.black_box(), generator(2)
    name, scale = attack.pick(box, aux, stream)
    assert name in ("noise", "spread")
    gallery = attack.send(box, x, stream).mean * scale
    found = ranks(box.send(x, stream) * scale, gallery, torch.arange(300), stream)
    assert int((found == 1).sum()) > 290


def test_many_sendings_identify_as_well_as_the_encoder_itself(
    make_aux: MakeAux,
) -> None:
    x = make_aux(400).images
    victim = Victim(nn.Identity(), Channel([GaussianNoise(0.3)]))
    box, stream = victim.black_box(), generator(2)
    seen, own = box.send(x, stream).flatten(1), torch.arange(400)
    best = int((ranks(seen, x.flatten(1), own, stream) == 1).sum())
    shares = []
    for draws in (2, ReId().draws):
        gallery = ReId(draws=draws).send(box, x, stream).mean
        shares.append(int((ranks(seen, gallery, own, stream) == 1).sum()) / best)
    assert shares[0] < 0.8
    assert shares[1] > 0.9


def test_noise_and_spread_are_the_variances_within_and_between() -> None:
    x = torch.rand(3000, 1, 1, 2, generator=generator())
    victim = Victim(nn.Identity(), Channel([GaussianNoise(0.5)]))
    gallery = ReId(draws=3).send(victim.black_box(), x, generator(1))
    assert gallery.noise.tolist() == pytest.approx([0.25, 0.25], rel=0.06)
    assert gallery.spread.tolist() == pytest.approx([1 / 12 + 0.25 / 3] * 2, rel=0.08)
    assert float((gallery.mean - x.flatten(1)).std()) == pytest.approx(0.5 / 3**0.5, rel=0.04)


def test_scalings_by_hand() -> None:
    made = scalings(
        KnownImages(torch.zeros(1, 2), torch.tensor([4.0, 0.0]), torch.tensor([1.0, 3.0]))
    )
    least = 1e-3 * 2.0
    assert made["plain"].tolist() == [1.0, 1.0]
    assert made["noise"].tolist() == pytest.approx([(4 + least) ** -0.5, least**-0.5])
    assert made["spread"].tolist() == pytest.approx([(1 + least) ** -0.5, (3 + least) ** -0.5])


def test_correlation_identifies_shrunken_reconstructions(
    make_aux: MakeAux,
) -> None:
    x = make_aux(300).images
    middle = x.mean(0)
    shrunk = middle + 0.05 * (x - middle)
    truth = torch.arange(300)
    by_distance = ranks(shrunk.flatten(1), x.flatten(1), truth, generator())
    by_angle = ranks(
        unit_directions(shrunk, middle), unit_directions(x, middle), truth, generator()
    )
    assert int((by_angle == 1).sum()) == 300
    assert int((by_distance == 1).sum()) < 150


def test_one_seed_gives_one_answer(make_aux: MakeAux) -> None:
    victim = Victim(nn.Identity(), Channel([GaussianNoise(0.3)]))
    x = make_aux(50).images
    assert torch.equal(places(victim, x, 3), places(victim, x, 3))
    assert not torch.equal(places(victim, x, 3), places(victim, x, 4))


def test_nan_and_too_few_draws_are_refused() -> None:
    one = torch.zeros(1, 2)
    with pytest.raises(AuditError, match="got NaN or infinity"):
        ranks(torch.full((1, 2), torch.nan), one, torch.tensor([0]), generator())
    with pytest.raises(ConfigError, match="draws must be at least 2, got 1"):
        ReId(draws=1)
