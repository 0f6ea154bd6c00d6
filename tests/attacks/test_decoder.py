"""The decoding attack's budget is what its profile says, and its randomness what it is given."""

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from splitveil.attacks.base import Budget, RateSchedule, minimise
from splitveil.attacks.decoder import Decoder, Loss
from splitveil.attacks.profiles import PROFILES
from splitveil.errors import AuditError, ConfigError
from splitveil.nets.channel import Channel, GaussianNoise
from splitveil.nets.decoder import ResidualDecoder
from splitveil.threat import (
    BlackBox,
    FittedAttack,
    Labelled,
    Observation,
    SharedFits,
    Victim,
)

MakeAux = Callable[..., Labelled]
LOSSES: tuple[Loss, ...] = get_args(Loss)
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


def rates(lr: float, schedule: RateSchedule) -> Budget:
    return Budget(epochs=1, batch_size=1, lr=lr, schedule=schedule)


def test_one_cycle_rises_over_30_percent_and_falls_to_1_percent() -> None:
    budget = rates(2.0, "one-cycle")
    assert budget.rate_at(0.0) == pytest.approx(0.08)
    assert budget.rate_at(0.15) == pytest.approx(1.04)
    assert budget.rate_at(0.3) == pytest.approx(2.0)
    assert budget.rate_at(0.65) == pytest.approx(1.01)
    assert budget.rate_at(1.0) == pytest.approx(0.02)


def test_cosine_falls_from_the_start_to_a_hundredth() -> None:
    budget = rates(2.0, "cosine")
    assert budget.rate_at(0.0) == pytest.approx(2.0)
    assert budget.rate_at(0.5) == pytest.approx(1.01)
    assert budget.rate_at(1.0) == pytest.approx(0.02)


@pytest.mark.parametrize(("schedule", "peaks"), [("one-cycle", 1), ("cosine", 0)])
def test_the_rate_has_one_peak_and_no_jump(schedule: RateSchedule, peaks: int) -> None:
    budget = rates(1.0, schedule)
    rate = torch.tensor([budget.rate_at(i / 1000) for i in range(1001)])
    steps = rate.diff()
    assert float(steps.abs().max()) < 0.01
    assert int((steps.sign().diff() != 0).sum()) <= peaks
    assert float(rate.max()) == pytest.approx(1.0)


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
    # One query for the shape, one for the units.
    assert [len(x) for x, _ in heard] == [1, n] + [min(8, n)] * steps


def test_an_epoch_shows_every_image_once_with_new_noise(
    make_aux: MakeAux, noisy_victim: Victim
) -> None:
    aux = make_aux(24)
    box, heard = spy_on(noisy_victim)
    Decoder(width=4, blocks=1, epochs=2, batch_size=8).fit(box, aux, generator())
    first = torch.cat([x for x, _ in heard[2:5]])
    second = torch.cat([x for x, _ in heard[5:8]])
    ranks = [x[:, 0, 0, 0].argsort() for x in (first, second)]
    expected = aux.images[aux.images[:, 0, 0, 0].argsort()]
    assert torch.equal(first[ranks[0]], expected)
    assert torch.equal(second[ranks[1]], expected)
    assert not torch.equal(first, second)
    noise = [
        torch.cat([z - x for x, z in heard[start : start + 3]])[rank]
        for start, rank in zip((2, 5), ranks, strict=True)
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


def test_a_reconstruction_does_not_depend_on_the_others(
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


class Level(nn.Module):
    """One number."""

    def __init__(self, level: float) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.tensor(level))


def test_the_curve_has_the_mean_loss_of_each_epoch() -> None:
    net, data = Level(0.0), torch.tensor([1.0, 2.0, 3.0, 4.0])
    shown: list[float] = []

    def loss(x: Tensor) -> Tensor:
        shown.append(float(x.mean()))
        return (x - net.level).square().mean()

    budget = Budget(epochs=2, min_steps=5, batch_size=2, lr=0.0)
    curve = minimise(loss, net, (data,), budget, generator())
    whole = (1 + 4 + 9 + 16) / 4  # nothing moves: both epochs see the same four numbers
    assert len(shown) == 5
    stream = generator()
    order = [torch.randperm(4, generator=stream) for _ in range(3)][-1]
    rest = float(data[order[:2]].square().mean())
    assert curve == pytest.approx([whole, (2 * whole + rest) / 3])


def test_fitting_one_number_finds_the_mean() -> None:
    net, data = Level(0.0), torch.tensor([1.0, 2.0, 3.0, 4.0])
    budget = Budget(epochs=300, batch_size=4, lr=0.1, weight_decay=0.0)
    curve = minimise(lambda x: (x - net.level).square().mean(), net, (data,), budget, generator())
    assert float(net.level.detach()) == pytest.approx(2.5, abs=1e-3)
    assert curve[0] == pytest.approx(7.5)
    assert curve[-1] == pytest.approx(1.25, abs=1e-5)
    assert net.level.grad is None


@pytest.mark.parametrize("loss", LOSSES)
def test_the_curve_has_a_number_for_each_epoch_and_falls(
    loss: Loss, make_aux: MakeAux, noisy_victim: Victim
) -> None:
    attack = replace(TINY, loss=loss, epochs=10, min_steps=31, lr=2e-2, feature_steps=2)
    fitted = attack.fit(noisy_victim.black_box(), make_aux(24), generator())
    assert isinstance(fitted, FittedAttack)
    assert len(fitted.curve) == 10  # of three steps each, the last with one more
    assert fitted.curve[-1] < 0.9 * fitted.curve[0]


@pytest.mark.parametrize("loss", LOSSES)
def test_progress_grows_to_its_total_in_few_words(
    loss: Loss, make_aux: MakeAux, noisy_victim: Victim
) -> None:
    said: list[tuple[int, int]] = []

    def listen(done: int, total: int, note: str = "") -> None:
        said.append((done, total))

    attack = replace(TINY, loss=loss, min_steps=120, feature_steps=60)
    attack.fit(noisy_victim.black_box(), make_aux(16, (1, 2, 2)), generator(), listen)
    first = [50, 60] if loss == "perceptual" else []
    start = 60 if first else 0
    assert [done for done, _ in said] == [*first, start + 50, start + 100, start + 120]
    assert {total for _, total in said} == {start + 120}


def test_decoders_of_one_seed_ask_the_same_whatever_their_loss(
    make_aux: MakeAux, noisy_victim: Victim
) -> None:
    asked = []
    for loss in LOSSES:
        box, heard = spy_on(noisy_victim)
        replace(TINY, loss=loss, feature_steps=2).fit(box, make_aux(16), generator())
        asked.append(torch.cat([t for pair in heard for t in pair]))
    assert torch.equal(asked[0], asked[1])
    assert torch.equal(asked[0], asked[2])


@pytest.mark.usefixtures("as_users_run")
def test_an_unknown_loss_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="unknown loss 'sim'; did you mean 'ssim'"):
        Decoder(loss="sim")  # type: ignore[arg-type]


def schedule_of(profile: str, name: str) -> Decoder:
    """The base's; half of it for the smallest and the perceptual one under `standard`."""
    base = PROFILES[profile]["decoder"]
    assert isinstance(base, Decoder)
    if profile == "standard" and name in ("decoder-small", "decoder-perceptual"):
        return replace(base, epochs=base.epochs // 2, min_steps=base.min_steps // 2)
    return base


@pytest.mark.parametrize("profile", ["standard", "paper"])
def test_the_ladder_has_three_sizes_on_one_schedule(profile: str) -> None:
    ladder = {"decoder-small": 106_227, "decoder": 711_539, "decoder-large": 4_006_515}
    for name, parameters in ladder.items():
        rung = PROFILES[profile][name]
        assert isinstance(rung, Decoder)
        net = ResidualDecoder((8, 8, 8), (3, 32, 32), width=rung.width, blocks=rung.blocks)
        assert sum(p.numel() for p in net.parameters()) == parameters
        assert replace(rung, width=64, blocks=8, effort=10.0) == schedule_of(profile, name)


@pytest.mark.parametrize("profile", ["quick", "standard", "paper"])
def test_other_losses_keep_net_and_schedule_of_the_base(profile: str) -> None:
    for loss in ("ssim", "perceptual"):
        other = PROFILES[profile][f"decoder-{loss}"]
        assert isinstance(other, Decoder)
        assert other.loss == loss
        assert other.plain == schedule_of(profile, f"decoder-{loss}")


def shared_view(victim: Victim) -> BlackBox:
    """The black box of a target whose decoders share their fits."""
    return replace(victim.black_box(), fits=SharedFits(0, victim.device))


def test_a_fit_that_continues_another_does_not_depend_on_who_comes_first(
    make_aux: MakeAux, linear_victim: Victim
) -> None:
    aux, x = make_aux(40), make_aux(8, seed=1).images
    seen = Observation(linear_victim.send(x), torch.zeros(8, dtype=torch.long))
    plain, more = TINY, replace(TINY, loss="ssim", more=3)
    found = []
    for order in ((plain, more), (more, plain)):
        box = shared_view(linear_victim)
        guesses = {d.loss: d.fit(box, aux, generator(5)) for d in order}
        found.append({loss: fitted(seen) for loss, fitted in guesses.items()})
    assert all(torch.equal(found[0][loss], found[1][loss]) for loss in ("mse", "ssim"))
    assert not torch.equal(found[0]["mse"], found[0]["ssim"])


def test_it_takes_its_own_steps_at_half_the_rate(make_aux: MakeAux, linear_victim: Victim) -> None:
    more = replace(TINY, loss="ssim", more=3)
    assert (more.budget.steps(1000), more.budget.lr) == (3, TINY.lr / 2)
    assert len(more.fit(shared_view(linear_victim), make_aux(8), generator()).curve) == 3
    with pytest.raises(ConfigError, match="`more` continues the fit"):
        replace(TINY, more=3)


def test_other_images_are_another_fit(make_aux: MakeAux, linear_victim: Victim) -> None:
    box = shared_view(linear_victim)
    one, two = (TINY.fit(box, make_aux(16, seed=seed), generator()) for seed in (0, 1))
    assert one.net is not two.net


def test_the_published_setting_is_the_papers() -> None:
    paper = PROFILES["paper"]["decoder"]
    assert isinstance(paper, Decoder)
    assert paper.loss == "mse"
    assert (paper.width, paper.blocks) == (64, 8)
    assert (paper.epochs, paper.batch_size, paper.lr) == (50, 256, 1e-3)
    assert paper.schedule == "cosine"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("host", [False, True], ids=["generator on the GPU", "on the host"])
def test_on_a_gpu_every_loss_falls_through_replayed_steps(
    loss: Loss, host: bool, make_aux: MakeAux
) -> None:
    aux, wire = make_aux(64), Victim(nn.Conv2d(1, 4, 1).cuda(), Channel([GaussianNoise(0.1)]))
    cuda = Labelled(aux.images.cuda(), aux.labels.cuda())
    draw = torch.Generator("cpu" if host else "cuda").manual_seed(0)
    attack = replace(TINY, loss=loss, epochs=40, lr=2e-2, feature_steps=20)
    fitted = attack.fit(wire.black_box(), cuda, draw)
    assert len(fitted.curve) == 40
    assert fitted.curve[-1] < 0.7 * fitted.curve[0]
    guess = fitted(Observation(wire.send(cuda.images, draw), cuda.labels))
    assert (guess.shape, guess.device.type) == (aux.images.shape, "cuda")
