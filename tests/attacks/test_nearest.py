"""The nearest known image, against brute force."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from splitveil.attacks.baseline import Nearest, nearest_indices
from splitveil.errors import AuditError, ConfigError
from splitveil.nets.channel import Channel
from splitveil.threat import BlackBox, Labelled, Observation, Victim

MakeAux = Callable[..., Labelled]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def attacked(victim: Victim, aux: Labelled, attack: Nearest, x: Tensor) -> Tensor:
    z = victim.send(x, generator(5))
    answers = torch.zeros(len(x), dtype=torch.long)
    return attack.fit(victim.black_box(), aux, generator(3))(Observation(z, answers))


def test_an_image_the_attacker_has_is_found_exactly(
    make_aux: MakeAux, linear_victim: Victim
) -> None:
    aux = make_aux(1203)  # more than one batch of queries
    chosen = torch.tensor([1202, 7, 7, 0, 1000])
    guess = attacked(linear_victim, aux, Nearest(), aux.images[chosen])
    assert torch.equal(guess, aux.images[chosen])


def test_an_orthogonal_client_keeps_the_nearest_image(
    make_aux: MakeAux, linear_victim: Victim
) -> None:
    aux, fresh = make_aux(200), make_aux(40, seed=1).images
    apart = fresh.flatten(1)[:, None] - aux.images.flatten(1)  # a rotation keeps distances
    expected = aux.images[apart.square().sum(2).argmin(1)]
    assert torch.equal(attacked(linear_victim, aux, Nearest(), fresh), expected)


def test_every_aux_image_is_asked_for_once(make_aux: MakeAux, linear_victim: Victim) -> None:
    heard: list[Tensor] = []

    def send(x: Tensor, stream: torch.Generator | None = None) -> Tensor:
        heard.append(x)
        return linear_victim.send(x, stream)

    aux = make_aux(2100)
    Nearest().fit(BlackBox(send, linear_victim.device), aux, generator())
    assert [len(x) for x in heard] == [1000, 1000, 100]
    assert torch.equal(torch.cat(heard), aux.images)


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(0, 9),
    m=st.integers(1, 30),
    d=st.integers(1, 4),
    room=st.integers(1, 40),
    values=st.integers(2, 5),  # few values: many ties
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_chunks_find_what_brute_force_finds(
    *, n: int, m: int, d: int, room: int, values: int, seed: int, data: st.DataObject
) -> None:
    stream = generator(seed)
    z = torch.randint(values, (n, d), generator=stream).float()
    known = torch.randint(values, (m, d), generator=stream).float()
    neighbours = data.draw(st.integers(1, m))
    squares = ((z.numpy()[:, None] - known.numpy()) ** 2).sum(2)
    expected = np.argsort(squares, axis=1, kind="stable")[:, :neighbours]
    found = nearest_indices(z, known, neighbours, room)
    np.testing.assert_array_equal(found.numpy(), expected)


@settings(deadline=None, max_examples=30)
@given(
    m=st.integers(65, 200),
    d=st.integers(1, 40),
    neighbours=st.integers(1, 3),
    twins=st.integers(0, 40),
    far=st.sampled_from([0.0, 1e3]),  # far from the origin products lose their digits
    seed=st.integers(0, 2**31),
)
def test_candidates_by_products_lose_none_of_the_nearest(
    *, m: int, d: int, neighbours: int, twins: int, far: float, seed: int
) -> None:
    stream = generator(seed)
    known = torch.randn(m, d, generator=stream) + far
    known[:twins] = known[0].clone()  # more equal rows than candidates
    z = torch.cat([known[:3], torch.randn(5, d, generator=stream) + far])
    apart = torch.cdist(z, known, compute_mode="donot_use_mm_for_euclid_dist")
    expected = apart.sort(dim=1, stable=True).indices[:, :neighbours]
    assert torch.equal(nearest_indices(z, known, neighbours, 500), expected)


def test_no_more_distances_are_held_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = torch.cdist

    def cdist(a: Tensor, b: Tensor, **options: str) -> Tensor:
        distances = real(a, b, compute_mode=options["compute_mode"])
        sizes.append(distances.numel())
        return distances

    monkeypatch.setattr(torch, "cdist", cdist)
    nearest_indices(torch.zeros(50, 2), torch.zeros(30, 2), 1, 100)
    assert max(sizes) <= 100
    assert sum(sizes) == 50 * 30


def test_of_equally_near_images_the_first_is_answered(
    make_aux: MakeAux, dead_victim: Victim
) -> None:
    aux = make_aux(40)
    guess = attacked(dead_victim, aux, Nearest(), make_aux(3, seed=1).images)
    assert torch.equal(guess, aux.images[:1].expand(3, -1, -1, -1))


def test_several_neighbours_are_averaged() -> None:
    levels = torch.tensor([0.0, 0.25, 0.5, 1.0])
    aux = Labelled(levels.view(4, 1, 1, 1), torch.zeros(4, dtype=torch.long))
    victim = Victim(nn.Identity(), Channel())
    x = torch.tensor([0.2, 0.9]).view(2, 1, 1, 1)
    guess = attacked(victim, aux, Nearest(neighbours=2), x)
    assert guess.flatten().tolist() == [0.125, 0.75]
    guess = attacked(victim, aux, Nearest(neighbours=4), x)
    assert guess.flatten().tolist() == [0.4375, 0.4375]


def test_progress_reaches_the_number_of_images(make_aux: MakeAux, linear_victim: Victim) -> None:
    said: list[tuple[int, int]] = []

    def listen(done: int, total: int, note: str = "") -> None:
        said.append((done, total))

    Nearest().fit(linear_victim.black_box(), make_aux(2100), generator(), listen)
    assert said == [(1000, 2100), (2000, 2100), (2100, 2100)]


@pytest.mark.parametrize(("neighbours", "n"), [(1, 0), (5, 4)])
def test_fewer_images_than_neighbours_are_too_few(
    neighbours: int, n: int, make_aux: MakeAux, linear_victim: Victim
) -> None:
    attack = Nearest(neighbours=neighbours)
    with pytest.raises(AuditError, match=rf"at least {neighbours} aux images?, got {n}"):
        attack.fit(linear_victim.black_box(), make_aux(n), generator())


def test_one_image_is_enough(make_aux: MakeAux, linear_victim: Victim) -> None:
    aux = make_aux(1)
    guess = attacked(linear_victim, aux, Nearest(), make_aux(3, seed=1).images)
    assert torch.equal(guess, aux.images.expand(3, -1, -1, -1))


def test_no_neighbours_are_refused() -> None:
    with pytest.raises(ConfigError, match="neighbours must be at least 1, got 0"):
        Nearest(neighbours=0)


class NanWhenBright(nn.Module):
    """Sends NaN for images whose first pixel is bright."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x[:, :1, :1, :1] > 0.5, torch.nan, x)


def test_a_client_that_sends_nan_for_aux_is_refused(make_aux: MakeAux) -> None:
    victim = Victim(NanWhenBright(), Channel())
    with pytest.raises(AuditError, match="NaN or infinity for some aux images"):
        Nearest().fit(victim.black_box(), make_aux(20), generator())
