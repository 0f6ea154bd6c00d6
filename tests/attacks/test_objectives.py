"""What decoders minimise, against torchmetrics, slow loops and numbers by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchmetrics.functional.image import structural_similarity_index_measure

from splitveil.attacks.base import Budget
from splitveil.attacks.decoder import (
    Decoder,
    FeatureClassifier,
    anchored_ssim_loss,
    fit_features,
    perceptual_distance,
    perceptual_loss,
    ssim_loss,
)
from splitveil.functional import window_matrix
from splitveil.io import silent
from splitveil.nets.channel import Channel, GaussianNoise
from splitveil.rng import stream
from splitveil.threat import Labelled, Observation, Victim

CPU = torch.device("cpu")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pair(shape: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random images, and something like them."""
    x, other = torch.rand(2, *shape, generator=generator(seed))
    return x, 0.7 * x + 0.3 * other


@pytest.mark.parametrize(
    "shape", [(4, 3, 24, 20), (3, 1, 8, 8), (2, 1, 6, 30), (2, 3, 11, 7), (1, 3, 32, 32)], ids=str
)
def test_ssim_is_torchmetrics_from_six_pixels_on(shape: tuple[int, ...]) -> None:
    x, guess = pair(shape)
    expected = structural_similarity_index_measure(guess, x, data_range=1.0)
    assert isinstance(expected, Tensor)
    assert float(ssim_loss(guess, x)) == pytest.approx(1 - float(expected), abs=1e-5)


def slow_zero_padded(x: np.ndarray, guess: np.ndarray) -> float:
    """One channel, one window at a time, straight from Wang et al. (2004), eq. 13."""
    offsets = np.arange(-5, 6)
    window = np.exp(-(offsets[:, None] ** 2 + offsets[None] ** 2) / (2 * 1.5**2))
    window /= window.sum()
    x, guess = np.pad(x, 5), np.pad(guess, 5)
    values = []
    for i in range(x.shape[0] - 10):
        for j in range(x.shape[1] - 10):
            a, b = x[i : i + 11, j : j + 11], guess[i : i + 11, j : j + 11]
            mean_a, mean_b = (window * a).sum(), (window * b).sum()
            var_a, var_b = (window * a**2).sum() - mean_a**2, (window * b**2).sum() - mean_b**2
            cov = (window * a * b).sum() - mean_a * mean_b
            top = (2 * mean_a * mean_b + 0.01**2) * (2 * cov + 0.03**2)
            values.append(top / ((mean_a**2 + mean_b**2 + 0.01**2) * (var_a + var_b + 0.03**2)))
    return float(np.mean(values))


@pytest.mark.parametrize("side", [(4, 4), (5, 30), (30, 5), (1, 1), (2, 3)], ids=str)
def test_ssim_of_smaller_images_has_a_border_of_zeros(side: tuple[int, int]) -> None:
    x, guess = (t.double() for t in pair((2, 2, *side)))
    pairs = zip(x.flatten(0, 1).numpy(), guess.flatten(0, 1).numpy(), strict=True)
    expected = np.mean([slow_zero_padded(a, b) for a, b in pairs])
    assert float(ssim_loss(guess, x)) == pytest.approx(1 - expected, abs=1e-10)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**31), high=st.integers(1, 12), wide=st.integers(1, 12))
def test_ssim_loss_is_symmetric_and_between_0_and_2(seed: int, high: int, wide: int) -> None:
    x, guess = torch.rand(2, 2, 1, high, wide, generator=generator(seed), dtype=torch.float64)
    loss = float(ssim_loss(guess, x))
    assert 0 <= loss <= 2
    assert loss == pytest.approx(float(ssim_loss(x, guess)), abs=1e-12)
    assert float(ssim_loss(x, x)) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("side", [4, 7])
def test_the_gradient_of_ssim_is_its_slope(side: int) -> None:
    x, guess = (t.double() for t in pair((1, 2, side, side)))
    assert torch.autograd.gradcheck(lambda g: ssim_loss(g, x), guess.requires_grad_())


def test_a_reflected_window_loses_nothing_and_a_cut_one_half() -> None:
    like = torch.zeros(1, dtype=torch.float64)
    whole = window_matrix(9, like, reflect=True)
    torch.testing.assert_close(whole.sum(1), torch.ones(9, dtype=torch.float64))
    cut = window_matrix(40, like, reflect=False)
    centre = float(cut[20, 20])
    assert float(cut[0].sum()) == pytest.approx((1 + centre) / 2)
    assert float(cut[20].sum()) == pytest.approx(1)
    assert float(cut[20, 21] / centre) == pytest.approx(math.exp(-1 / 4.5))


def test_the_anchor_is_a_tenth_of_the_mse() -> None:
    x = 0.4 + 0.4 * torch.rand(4, 3, 16, 16, generator=generator(), dtype=torch.float64)
    shifted = x + 0.2
    alone = float(ssim_loss(shifted, x))
    assert alone < 0.05  # a fifth of the range is all but lost on SSIM
    assert float(anchored_ssim_loss(shifted, x)) == pytest.approx(alone + 0.1 * 0.2**2)


class Given(FeatureClassifier):
    """Features made of the pixels: two channels, then twice those with a silent third."""

    def maps(self, x: Tensor) -> list[Tensor]:
        return [x, torch.cat([2 * x, torch.zeros_like(x[:, :1])], 1)]


def test_perceptual_distance_of_two_vectors_by_hand() -> None:
    x = torch.tensor([3.0, 4.0]).view(1, 2, 1, 1)  # (.6, .8) at length 1
    guess = torch.tensor([8.0, 6.0]).view(1, 2, 1, 1)  # (.8, .6)
    distance = perceptual_distance(Given(2, 1), guess, x)
    assert float(distance) == pytest.approx(0.08, abs=1e-6)  # .2² + .2² in both layers
    loss = perceptual_loss(Given(2, 1))(guess, x)
    assert float(loss) == pytest.approx((25 + 4) / 2 + 0.1 * 0.08, rel=1e-6)


def test_zero_features_have_distance_0_and_a_finite_gradient() -> None:
    guess = torch.zeros(1, 2, 3, 3, requires_grad=True)
    distance = perceptual_distance(Given(2, 1), guess, torch.zeros(1, 2, 3, 3))
    distance.backward()  # type: ignore[no-untyped-call]
    assert float(distance.detach()) == 0
    assert guess.grad is not None
    assert bool(guess.grad.isfinite().all())


def stripes(n: int, seed: int) -> Labelled:
    """Two waves across 8×8 pixels: the class is the direction; phase and contrast are free."""
    draw = generator(seed)
    labels = torch.randint(4, (n,), generator=draw)
    phase, contrast = torch.rand(2, n, 1, 1, generator=draw)
    angle, line = (labels * math.pi / 4)[:, None, None], torch.linspace(0, 1, 8)
    wave = torch.cos(angle) * line[:, None] + torch.sin(angle) * line
    images = 0.5 + (0.15 + 0.35 * contrast) * torch.sin(2 * math.pi * (2 * wave + phase))
    return Labelled(images[:, None].clamp(0, 1), labels)


@pytest.fixture(scope="module")
def aux() -> Labelled:
    return stripes(512, seed=1)


@pytest.fixture(scope="module")
def features(aux: Labelled) -> FeatureClassifier:
    budget = Budget(epochs=0, min_steps=40, batch_size=32)
    return fit_features(aux, stream(0, "features"), budget, CPU, silent)


def test_features_tell_the_classes_apart_and_are_frozen(features: FeatureClassifier) -> None:
    fresh = stripes(200, seed=2)
    right = features(fresh.images).argmax(1) == fresh.labels
    assert float(right.float().mean()) > 0.9
    assert not any(m.training for m in features.modules())
    assert not any(p.requires_grad for p in features.parameters())
    assert [tuple(f.shape) for f in features.maps(fresh.images[:5])] == [
        (5, 32, 8, 8), (5, 64, 4, 4), (5, 128, 2, 2)
    ]  # fmt: skip


def test_features_depend_on_aux_and_seed_alone(aux: Labelled) -> None:
    def weights(aux: Labelled, seed: int) -> Tensor:
        budget = Budget(epochs=0, min_steps=3, batch_size=32)
        net = fit_features(aux, generator(seed), budget, CPU, silent)
        return torch.cat([t.flatten().float() for t in net.state_dict().values()])

    state = torch.get_rng_state()
    one = weights(aux, 0)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)  # whoever else draws from the global stream must not matter
    assert torch.equal(weights(aux, 0), one)
    assert not torch.equal(weights(aux, 1), one)
    swapped = Labelled(aux.images, aux.labels.flip(0))
    assert not torch.equal(weights(swapped, 0), one)


def test_features_are_not_touched_by_the_decoders_steps(features: FeatureClassifier) -> None:
    held = {key: value.clone() for key, value in features.state_dict().items()}
    guess = torch.rand(4, 1, 8, 8, generator=generator()).requires_grad_()
    loss = perceptual_loss(features)(guess, torch.rand(4, 1, 8, 8, generator=generator(1)))
    loss.backward()  # type: ignore[no-untyped-call]
    assert guess.grad is not None
    assert float(guess.grad.abs().max()) > 0
    assert all(p.grad is None for p in features.parameters())
    assert all(torch.equal(held[key], value) for key, value in features.state_dict().items())


BASE = Decoder(width=12, blocks=1, epochs=1, min_steps=60, batch_size=32, lr=1e-2, feature_steps=40)


def attacked(attack: Decoder, aux: Labelled, x: Tensor, noise_std: float) -> Tensor:
    """Reconstructions of x from itself under noise."""
    victim = Victim(nn.Identity(), Channel([GaussianNoise(noise_std)]))
    seen = Observation(victim.send(x, generator(3)), torch.zeros(len(x), dtype=torch.long))
    return attack.fit(victim.black_box(), aux, generator(0))(seen)


def test_each_decoder_is_best_at_its_own_loss(
    aux: Labelled,
) -> None:
    x = stripes(256, seed=2).images
    plain, structural = (
        attacked(replace(BASE, loss=loss), aux, x, 1.0) for loss in ("mse", "ssim")
    )
    assert float(ssim_loss(structural, x)) < float(ssim_loss(plain, x)) - 0.03
    assert float((plain - x).square().mean()) < 0.95 * float((structural - x).square().mean())


def test_the_perceptual_decoder_comes_nearer_in_features(
    aux: Labelled, features: FeatureClassifier
) -> None:
    x = stripes(256, seed=2).images
    plain, near = (
        float(perceptual_distance(features, attacked(replace(BASE, loss=loss), aux, x, 0.1), x))
        for loss in ("mse", "perceptual")
    )
    assert near < 0.97 * plain
