"""The decoding attack's budget is what its profile says, and its randomness what it is given."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from splitveil.attacks import PROFILES, Decoder
from splitveil.errors import AuditError
from splitveil.types import BlackBox, Labelled, Observation, Victim

MakeAux = Callable[..., Labelled]
TINY = Decoder(width=4, blocks=1, epochs=1, batch_size=8)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def spy_on(victim: Victim) -> tuple[BlackBox, list[tuple[Tensor, Tensor]]]:
    """The victim's black box, and what was asked and answered, as it happens."""
    heard: list[tuple[Tensor, Tensor]] = []

    def send(x: Tensor, stream: torch.Generator | None = None) -> Tensor:
        z = victim.send(x, stream)
        heard.append((x.clone(), z.clone()))
        return z

    return BlackBox(send, victim.device), heard


def test_one_cycle_rises_for_three_tenths_and_falls_to_a_hundredth() -> None:
    attack = Decoder(lr=2.0)
    assert attack._lr_at(0.0) == pytest.approx(0.08)
    assert attack._lr_at(0.15) == pytest.approx(1.04)
    assert attack._lr_at(0.3) == pytest.approx(2.0)
    assert attack._lr_at(0.65) == pytest.approx(1.01)
    assert attack._lr_at(1.0) == pytest.approx(0.02)


def test_cosine_falls_from_the_start_to_a_hundredth() -> None:
    attack = Decoder(lr=2.0, schedule="cosine")
    assert attack._lr_at(0.0) == pytest.approx(2.0)
    assert attack._lr_at(0.5) == pytest.approx(1.01)
    assert attack._lr_at(1.0) == pytest.approx(0.02)


@pytest.mark.parametrize("schedule", ["one-cycle", "cosine"])
def test_the_rate_has_one_peak_and_no_jump(schedule: str) -> None:
    attack = Decoder(lr=1.0, schedule="cosine" if schedule == "cosine" else "one-cycle")
    rates = torch.tensor([attack._lr_at(i / 1000) for i in range(1001)])
    steps = rates.diff()
    assert float(steps.abs().max()) < 0.01
    assert int((steps.sign().diff() != 0).sum()) <= (1 if schedule == "one-cycle" else 0)
    assert float(rates.max()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "budget",  # aux images, epochs, min_steps, and the steps of 8 images that come of them
    [(24, 2, 0, 6), (29, 2, 0, 6), (24, 1, 7, 7), (5, 3, 0, 3), (24, 3, 7, 9)],
)
def test_the_budget_is_epochs_or_the_least_number_of_steps(
    budget: tuple[int, int, int, int], make_aux: MakeAux, noisy_victim: Victim
) -> None:
    n, epochs, min_steps, steps = budget
    box, heard = spy_on(noisy_victim)
    attack = Decoder(width=4, blocks=1, epochs=epochs, min_steps=min_steps, batch_size=8)
    attack.fit(box, make_aux(n), generator())
    assert [len(x) for x, _ in heard] == [1] + [min(8, n)] * steps  # one query for the shape


def test_an_epoch_shows_every_image_once_in_a_new_order_with_new_noise(
    make_aux: MakeAux, noisy_victim: Victim
) -> None:
    aux = make_aux(24)
    box, heard = spy_on(noisy_victim)
    Decoder(width=4, blocks=1, epochs=2, batch_size=8).fit(box, aux, generator())
    first = torch.cat([x for x, _ in heard[1:4]])
    second = torch.cat([x for x, _ in heard[4:7]])
    ranks = [x[:, 0, 0, 0].argsort() for x in (first, second)]
    expected = aux.images[aux.images[:, 0, 0, 0].argsort()]
    assert torch.equal(first[ranks[0]], expected)
    assert torch.equal(second[ranks[1]], expected)
    assert not torch.equal(first, second)
    noise = [
        torch.cat([z - x for x, z in heard[start : start + 3]])[rank]
        for start, rank in zip((1, 4), ranks, strict=True)
    ]
    assert float((noise[0] - noise[1]).abs().min()) > 0


def test_another_seed_is_another_attack(make_aux: MakeAux, noisy_victim: Victim) -> None:
    aux = make_aux(16)
    z = noisy_victim.send(aux.images, generator())
    one, other = (
        TINY.fit(noisy_victim.black_box(), aux, generator(seed))(Observation(z, aux.labels))
        for seed in (0, 1)
    )
    assert not torch.equal(one, other)


def test_a_flat_wire_is_attacked_too(make_aux: MakeAux, linear_victim: Victim) -> None:
    aux = make_aux(16)
    z = linear_victim.send(aux.images)
    guess = TINY.fit(linear_victim.black_box(), aux, generator())(Observation(z, aux.labels))
    assert guess.shape == aux.images.shape


def test_reconstruction_does_not_depend_on_how_many_are_asked_for(
    make_aux: MakeAux, noisy_victim: Victim
) -> None:
    aux, many = make_aux(16), make_aux(1001, seed=1)
    z = noisy_victim.send(many.images, generator())
    reconstruct = TINY.fit(noisy_victim.black_box(), aux, generator())
    all_of_them = reconstruct(Observation(z, many.labels))
    last = reconstruct(Observation(z[-1:], many.labels[-1:]))
    torch.testing.assert_close(all_of_them[-1:], last, rtol=0, atol=1e-6)


@pytest.mark.parametrize("n", [0, 1])
def test_fewer_than_two_images_are_too_few(n: int, make_aux: MakeAux, noisy_victim: Victim) -> None:
    with pytest.raises(AuditError, match=f"decoder attack needs at least 2 aux images, got {n}"):
        TINY.fit(noisy_victim.black_box(), make_aux(n), generator())


def test_two_images_are_enough(make_aux: MakeAux, noisy_victim: Victim) -> None:
    aux = make_aux(2)
    z = noisy_victim.send(aux.images, generator())
    guess = TINY.fit(noisy_victim.black_box(), aux, generator())(Observation(z, aux.labels))
    assert guess.shape == (2, 1, 4, 4)


def test_the_published_setting_is_the_papers() -> None:
    paper = PROFILES["paper"]["decoder"]
    assert isinstance(paper, Decoder)
    assert (paper.width, paper.blocks) == (64, 8)
    assert (paper.epochs, paper.batch_size, paper.lr) == (50, 256, 1e-3)
    assert paper.schedule == "cosine"
