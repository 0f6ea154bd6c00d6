"""Certificates under an exit rule: one bit more, and the list bound against slow oracles."""

import math

import pytest
import torch
from torch import Generator, Tensor, nn

from splitveil.audits.bounds import matcher_errors
from splitveil.audits.certificates import certified_client, certify
from splitveil.audits.list_bound import least_mean, list_errors
from splitveil.io import Json
from splitveil.nets.channel import Channel, GaussianNoise
from splitveil.rng import normal_like
from splitveil.threat import Labelled

BIT = math.log(2)


def a_list(n: int, d: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Clean z (n, d), images (n, 1, 2, 2) and which are sent (n,), at least one of each kind."""
    draws = Generator().manual_seed(seed)
    z = torch.randn(n, d, generator=draws, dtype=torch.float64)
    asked = torch.rand(n, generator=draws) < 0.5
    asked[0], asked[1] = True, False
    return z, torch.rand(n, 1, 2, 2, generator=draws, dtype=torch.float64), asked


def slow_errors(
    z: Tensor, std: float, images: Tensor, asked: Tensor, generator: Generator
) -> list[float]:
    """The posterior mean written out: a density of (b, z̃) for each image, one by one."""
    noise = normal_like(z[asked], generator)
    sent = iter(z[asked] + std * noise)
    found = []
    for i, b in enumerate(asked.tolist()):
        seen = next(sent) if b else None
        density = []
        for j, other in enumerate(asked.tolist()):
            if other != b:
                density.append(0.0)
            elif seen is None:
                density.append(1.0)
            else:
                density.append(math.exp(-float((seen - z[j]).square().sum()) / (2 * std**2)))
        mean = sum(p * x for p, x in zip(density, images, strict=True)) / sum(density)
        found.append(float((images[i] - mean).square().mean()))
    return found


@pytest.mark.parametrize("std", [0.2, 1.0, 3.0])
def test_the_list_bound_is_the_posterior_mean_of_bit_and_noise(std: float) -> None:
    z, images, asked = a_list(12, 3, seed=1)
    found = list_errors(z, std**2, images, asked, Generator().manual_seed(5))
    expected = slow_errors(z, std, images, asked, Generator().manual_seed(5))
    assert found.losses.tolist() == pytest.approx(expected, rel=1e-9)


def test_an_unsent_image_is_any_of_the_unsent() -> None:
    z, images, asked = a_list(10, 2, seed=2)
    found = list_errors(z, 1.0, images, asked, Generator().manual_seed(0))
    kept = images[~asked]
    own = (kept - kept.mean(0)).square().mean((1, 2, 3))
    torch.testing.assert_close(found.losses[~asked], own)
    assert found.likeliest[~asked].tolist() == pytest.approx([1 / len(kept)] * len(kept))


def test_two_sent_images_have_the_error_of_the_integral() -> None:
    """x = 0 or 1 at z = 0 or 2, unit noise: the least error is E[p (1 − p)] by quadrature."""
    z = torch.tensor([[0.0], [2.0]], dtype=torch.float64)
    images = torch.tensor([0.0, 1.0]).double().view(2, 1, 1, 1)
    grid = torch.linspace(-10, 12, 20001, dtype=torch.float64)
    both = torch.exp(-0.5 * (grid[:, None] - z.T).square()) / math.sqrt(2 * math.pi)
    p = both[:, 1] / both.sum(1)
    exact = float((both.mean(1) * p * (1 - p)).sum() * (grid[1] - grid[0]))
    draws = Generator().manual_seed(0)
    many = [list_errors(z, 1.0, images, None, draws).losses.mean() for _ in range(3000)]
    assert float(torch.stack(many).mean()) == pytest.approx(exact, rel=0.05)


@pytest.mark.parametrize("mean", [0.0, 0.01, 0.3, 1.0])
def test_the_lower_limit_holds_for_coins(mean: float) -> None:
    n, rng = 200, Generator().manual_seed(0)
    means = (torch.rand(4000, n, generator=rng) < mean).double().mean(1).tolist()
    assert sum(least_mean(m, n, 0.05) > mean for m in means) <= 0.05 * 4000
    assert least_mean(mean, n, 0.05) <= mean


def certificates(asked: Tensor | None, std: float = 1.0) -> Json:
    draws = Generator().manual_seed(3)
    images = torch.rand(300, 1, 2, 2, generator=draws)
    parts = [
        Labelled(images[a:b], torch.arange(b - a) % 2) for a, b in ((0, 80), (80, 180), (180, 300))
    ]
    encoder = nn.Sequential(nn.Flatten(), nn.Sigmoid())
    client = certified_client(encoder, Channel([GaussianNoise(std)]), torch.device("cpu"))
    gallery, fit, fresh = parts
    return certify(
        client, gallery, fit, fresh, [fit], num_classes=2, generator=draws, asked=asked
    )  # fmt: skip


def test_every_rate_has_one_bit_more_and_every_error_is_less() -> None:
    asked = torch.arange(80) % 3 == 0
    plain, told = certificates(None, std=2.0), certificates(asked, std=2.0)
    assert set(told) == {*plain, "list"}
    for kind in ("capacity", "gallery", "population"):
        assert told[kind]["nats"] == pytest.approx(plain[kind]["nats"] + BIT)
        assert told[kind]["bit_nats"] == pytest.approx(BIT)
    for kind in ("gallery", "population"):
        more = told[kind]["nats_given_class"] - plain[kind]["nats_given_class"]
        assert more == pytest.approx(BIT)
        at_least = [c[kind]["identification_error"]["at_least"] for c in (plain, told)]
        assert at_least[0] - at_least[1] == pytest.approx(BIT / math.log(80))
    full = [c["gallery"]["full_covariance"]["nats"] for c in (plain, told)]
    assert full[1] - full[0] == pytest.approx(BIT)
    gallery = told["gallery"]
    assert "one may be sent and the other not" in gallery["pairwise_error"]["refused"]
    assert gallery["matcher_error"] >= (80 - int(asked.sum()) - 1) / 80
    assert gallery["beaten"] is False
    listed = told["list"]
    assert 0 < listed["mse_at_least"] < listed["mse"] < listed["variance"]
    assert listed["asymptotic"]["mse_at_least"] > listed["mse_at_least"]


def test_the_true_information_of_bit_and_noise_stays_below() -> None:
    z, _, asked = a_list(6, 2, seed=4)
    draws, std = Generator().manual_seed(0), 0.8
    sent = torch.randn(20_000, *z.shape, generator=draws, dtype=torch.float64) * std + z
    gap = (sent[:, :, None] - z).square().sum(-1) / (2 * std**2)  # (draws, own, other)
    alike = asked[:, None] == asked[None]
    gap = torch.where(asked[:, None], gap, 0.0).masked_fill(~alike, math.inf)
    own = gap.diagonal(dim1=1, dim2=2)
    true = math.log(6) - float(torch.logsumexp(own[..., None] - gap, -1).mean())
    images = Labelled(torch.rand(6, 1, 1, 2), torch.zeros(6).long())
    kept = dict(enumerate(z.float()))
    client = certified_client(nn.Flatten(), Channel([GaussianNoise(std)]), torch.device("cpu"))
    # The client gives the listed z in their order.
    client = type(client)(
        clean=lambda x, _: torch.stack([kept[i] for i in range(len(x))]),
        noise_var=std**2, bounds=None, grid=False,
    )  # fmt: skip
    found = certify(
        client, images, images, images, None, num_classes=1, generator=draws, asked=asked
    )
    assert true <= found["gallery"]["nats"]
    assert "z is not bounded" in found["capacity"]["refused"]
    assert matcher_errors(z, std**2, draws) <= 6


def test_without_noise_nothing_is_certified() -> None:
    asked = torch.arange(80) % 3 == 0
    assert all("deterministic" in c["refused"] for c in certificates(asked, std=0.0).values())
