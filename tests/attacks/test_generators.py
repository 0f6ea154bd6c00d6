"""The generative prior: what it draws, how it is fitted on few images, and what it costs."""

import pytest
import torch
from attacks.made import generator, planted
from torch import Tensor, nn

from splitveil.attacks.prior import FactorModel, Posterior, fit_factors, sharpened, shrinkage
from splitveil.attacks.rmle import ChannelFacts, Energy
from splitveil.nets.channel import Channel
from splitveil.threat import Labelled


def error(guess: Tensor, x: Labelled) -> float:
    return float((guess - x.images).square().mean())


def test_the_model_draws_its_plane_and_finds_the_way_back() -> None:
    model = FactorModel(
        torch.tensor([[0.5, 0.5], [0.2, 0.0]]), torch.tensor([[0.3], [0.4]]), (1, 1, 2)
    )
    v, y = torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1])
    images = model.draw(v, y)
    torch.testing.assert_close(images.flatten(1), torch.tensor([[0.8, 0.9], [0.8, 0.8]]))
    torch.testing.assert_close(model.encode(images, y), v)
    assert float(model.draw(torch.tensor([[9.0]]), y[:1]).max()) == 1
    assert model.known(torch.tensor([0, 1, 7, -1])).tolist() == [0, 1, 1, 1]


def test_the_fitted_model_finds_the_planted_plane_and_classes() -> None:
    aux, x = planted(400, seed=1), planted(50, seed=2)
    model = fit_factors(aux, 6, torch.device("cpu"))
    drawn = model.redraw(x.images, x.labels)
    assert error(drawn, x) < 2 * 0.01**2  # the blur is left
    lengths = model.encode(x.images, x.labels).square().mean()
    assert float(lengths) == pytest.approx(1.0, rel=0.2)
    ones = aux.images[aux.labels == 1].flatten(1)
    total = ones.sum(0) + 10 * aux.images.flatten(1).mean(0)
    torch.testing.assert_close(model.means[1], total / (len(ones) + 10))
    torch.testing.assert_close(model.means[3], aux.images.flatten(1).mean(0))


@pytest.mark.parametrize(("n", "factors", "kept"), [(11, 99, 10), (60, 99, 32), (60, 5, 5)])
def test_factors_are_never_more_than_images_or_half_the_pixels(
    n: int, factors: int, kept: int
) -> None:
    model = fit_factors(planted(n, seed=1), factors, torch.device("cpu"))
    assert model.basis.shape == (64, kept)


def test_few_large_images_have_the_factors_of_their_covariance() -> None:
    few = planted(40, seed=1)  # 64 pixels
    model = fit_factors(few, 8, torch.device("cpu"))
    left = few.images.flatten(1).double() - model.means[few.labels].double()
    covariance = left.T @ left / 40
    rho = float(shrinkage(left, covariance))
    shrunk = (1 - rho) * covariance + rho * covariance.trace() / 64 * torch.eye(64)
    values, vectors = torch.linalg.eigh(shrunk)
    top = (vectors[:, -8:] * values[-8:]) @ vectors[:, -8:].T
    torch.testing.assert_close((model.basis @ model.basis.T).double(), top, rtol=1e-3, atol=1e-6)
    assert float(shrinkage(left, left @ left.T / 40)) == pytest.approx(rho)


def test_images_of_many_pixels_need_no_matrix_of_their_pixels() -> None:
    draw = torch.rand(12, 3, 96, 96, generator=generator())
    model = fit_factors(Labelled(draw, torch.arange(12) % 2), 64, torch.device("cpu"))
    assert model.basis.shape == (3 * 96 * 96, 11)
    assert bool(model.basis.isfinite().all())


def test_images_that_are_all_alike_leave_a_sound_model() -> None:
    same = Labelled(torch.full((12, 1, 4, 4), 0.5), torch.zeros(12, dtype=torch.long))
    model = fit_factors(same, 4, torch.device("cpu"))
    torch.testing.assert_close(model.redraw(same.images, same.labels), same.images)


def test_shrinkage_is_ledoit_wolf_and_fades_with_more_images() -> None:
    rows = torch.randn(30, 5, generator=generator(), dtype=torch.float64)
    rows[:, 0] *= 3
    covariance = rows.T @ rows / 30
    wobble = sum(float((torch.outer(r, r) - covariance).square().sum()) for r in rows) / 30**2
    mean = float(covariance.trace()) / 5
    far = float((covariance - mean * torch.eye(5, dtype=torch.float64)).square().sum())
    assert float(shrinkage(rows, covariance)) == pytest.approx(wobble / far)
    many = rows.repeat(100, 1)
    assert float(shrinkage(many, covariance)) == pytest.approx(wobble / far / 100)


def test_the_network_earns_its_share_on_held_out_images() -> None:
    def stripes(n: int, seed: int) -> Labelled:  # a sharp edge that moves: no plane holds it
        place = 8 * torch.rand(n, 1, 1, 1, generator=generator(seed))
        images = (8 * (torch.arange(8.0) + 0.5 - place)).sigmoid().expand(n, 1, 8, 8)
        return Labelled(images.contiguous(), torch.zeros(n, dtype=torch.long))

    used, held, x = stripes(200, 1), stripes(30, 2), stripes(30, 3)
    model = fit_factors(used, 2, torch.device("cpu"))
    better = sharpened(model, used, held, generator(), steps=60, width=8, blocks=1)
    assert 0 < float(better.blend) <= 1
    left = [error(m.redraw(x.images, x.labels), x) for m in (model, better)]
    assert left[1] < 0.8 * left[0]
    inside = model.draw(0.2 * torch.randn(30, 2, generator=generator()), held.labels)
    useless = sharpened(
        model, used, Labelled(inside, held.labels), generator(), steps=5, width=8, blocks=1
    )
    assert float(useless.blend) < 1e-4  # nothing is missing there


def test_the_objective_of_one_image_by_hand() -> None:
    model = FactorModel(torch.zeros(1, 2) + 0.5, torch.tensor([[0.3], [0.4]]), (1, 1, 2))
    facts = ChannelFacts(torch.tensor(2.0), torch.tensor(0.25), torch.zeros(1, 1, 2), 1)
    energy = Energy(nn.Identity(), Channel(), facts, torch.tensor(0.01), tv=0.0, prior=1.0)
    posterior = Posterior(model, energy, slack=torch.tensor(0.15))
    v, y = torch.tensor([[0.5]]), torch.tensor([0])
    z_sent = torch.tensor([[[[0.65, 0.9]]]])
    # G(v) = (0.65, 0.7): misfit (0 + 0.04)/2/2; ‖v‖² = 0.25 of weight (0.4 + 0.001)/2
    value = posterior(v, y, z_sent, generator())
    assert value.tolist() == pytest.approx([0.01 + 0.2005 * 0.25])
    # x = z̃ fits; pull (0.04/0.01)/2 of weight 0.251; ‖v‖² of weight 0.251/2
    value = posterior.refined(z_sent, v, y, z_sent, generator())
    assert value.tolist() == pytest.approx([0.251 * 2 + 0.1255 * 0.25])
