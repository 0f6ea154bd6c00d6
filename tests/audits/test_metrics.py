"""Every metric against an independent reference, on noise and on real images."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from skimage import metrics as skimage_metrics
from sklearn.datasets import load_digits
from torch import Tensor
from torchmetrics.image import StructuralSimilarityIndexMeasure

from splitveil.audits import metrics
from splitveil.errors import AuditError

Pair = tuple[Tensor, Tensor]
TOLERANCE = 1e-4


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise() -> Pair:
    x = torch.rand(4, 3, 24, 20, generator=generator(0))
    return x, torch.rand(x.shape, generator=generator(1))


def digits() -> Pair:
    """Handwritten digits at 32×32, and the same under noise."""
    raw = torch.tensor(load_digits().images[:4] / 16, dtype=torch.float32)[:, None]
    x = torch.nn.functional.interpolate(raw, 32, mode="bilinear", align_corners=False)
    return x, (x + 0.2 * torch.randn(x.shape, generator=generator())).clamp(0, 1)


def gradients() -> Pair:
    """Smooth ramps in three channels, and the same with less contrast."""
    line = torch.linspace(0, 1, 32)
    ramp = torch.stack([line.expand(32, 32), line[:, None].expand(32, 32), line.outer(line)])
    return ramp[None], (0.6 * ramp[None] + 0.2)


def odd_sizes() -> Pair:
    x = torch.rand(2, 1, 11, 17, generator=generator(2))
    return x, (x + 0.1).clamp(0, 1)


# scikit-image ships annotations on some functions only.
skimage: Any = skimage_metrics

PAIRS: dict[str, Callable[[], Pair]] = {
    "noise": noise,
    "digits": digits,
    "gradients": gradients,
    "odd_sizes": odd_sizes,
}


@pytest.fixture(params=sorted(PAIRS))
def pair(request: pytest.FixtureRequest) -> Pair:
    return PAIRS[request.param]()


def slow_ssim(x: np.ndarray, guess: np.ndarray, mode: str) -> float:
    """One channel, one window at a time, straight from Wang et al. (2004), eq. 13."""
    offsets = np.arange(-5, 6)
    window = np.exp(-(offsets[:, None] ** 2 + offsets[None] ** 2) / (2 * 1.5**2))
    window /= window.sum()
    pad = {"constant": np.pad(x, 5), "reflect": np.pad(x, 5, mode="reflect")}[mode]
    pad_guess = {"constant": np.pad(guess, 5), "reflect": np.pad(guess, 5, mode="reflect")}[mode]
    values = []
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            a, b = pad[i : i + 11, j : j + 11], pad_guess[i : i + 11, j : j + 11]
            mean_a, mean_b = (window * a).sum(), (window * b).sum()
            var_a = (window * (a - mean_a) ** 2).sum()
            var_b = (window * (b - mean_b) ** 2).sum()
            cov = (window * (a - mean_a) * (b - mean_b)).sum()
            top = (2 * mean_a * mean_b + 0.01**2) * (2 * cov + 0.03**2)
            values.append(top / ((mean_a**2 + mean_b**2 + 0.01**2) * (var_a + var_b + 0.03**2)))
    return float(np.mean(values))


def slow_per_image(x: Tensor, guess: Tensor, mode: str) -> list[float]:
    a, b = x.double().numpy(), guess.double().numpy()
    channels = range(a.shape[1])
    return [
        float(np.mean([slow_ssim(a[i, c], b[i, c], mode) for c in channels])) for i in range(len(a))
    ]


def test_mse_is_numpys(pair: Pair) -> None:
    x, guess = (t.double().numpy() for t in pair)
    expected = ((x - guess) ** 2).reshape(len(x), -1).mean(1)
    np.testing.assert_allclose(metrics.mse(*pair).numpy(), expected, rtol=1e-5)


def test_psnr_is_scikit_images(pair: Pair) -> None:
    x, guess = (t.double().numpy() for t in pair)
    expected = [
        skimage.peak_signal_noise_ratio(a, b, data_range=1) for a, b in zip(x, guess, strict=True)
    ]
    np.testing.assert_allclose(metrics.psnr(*pair).numpy(), expected, atol=TOLERANCE)


def test_ssim_is_torchmetrics(pair: Pair) -> None:
    x, guess = pair
    reference = StructuralSimilarityIndexMeasure(data_range=1.0, reduction="none")
    value = metrics.ssim(x, guess)
    assert value is not None
    expected = reference(guess, x).reshape(len(x))  # torchmetrics squeezes a batch of one
    torch.testing.assert_close(value, expected, rtol=0, atol=TOLERANCE)


def test_ssim_is_the_slow_loop_over_reflected_borders() -> None:
    x, guess = PAIRS["odd_sizes"]()
    value = metrics.ssim(x, guess)
    assert value is not None
    np.testing.assert_allclose(value.numpy(), slow_per_image(x, guess, "reflect"), atol=TOLERANCE)


def test_ssim_valid_is_scikit_images(pair: Pair) -> None:
    x, guess = pair
    expected = [
        skimage.structural_similarity(
            a.numpy(), b.numpy(), channel_axis=0, data_range=1, gaussian_weights=True, sigma=1.5,
            use_sample_covariance=False,
        )
        for a, b in zip(x.double(), guess.double(), strict=True)
    ]  # fmt: skip
    value = metrics.ssim_valid(x, guess)
    assert value is not None
    np.testing.assert_allclose(value.numpy(), expected, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["noise", "odd_sizes", "digits"])
def test_ssim_zeropad_is_the_slow_loop_over_zero_borders(name: str) -> None:
    x, guess = (t[:2] for t in PAIRS[name]())
    expected = slow_per_image(x, guess, "constant")
    np.testing.assert_allclose(metrics.ssim_zeropad(x, guess).numpy(), expected, atol=TOLERANCE)


def test_the_three_conventions_disagree_on_the_same_images() -> None:
    x, guess = digits()
    valid, reflected = metrics.ssim_valid(x, guess), metrics.ssim(x, guess)
    assert valid is not None
    assert reflected is not None
    means = [float(v.mean()) for v in (valid, reflected, metrics.ssim_zeropad(x, guess))]
    gaps = [abs(a - b) for a, b in zip(means, means[1:] + means[:1], strict=True)]
    assert min(gaps) > 10 * TOLERANCE


@pytest.mark.parametrize(
    ("side", "reflected", "whole"),
    [(5, False, False), (6, True, False), (8, True, False), (10, True, False), (11, True, True)],
)
def test_small_images_lack_the_metrics_that_need_room(
    side: int, reflected: bool, whole: bool
) -> None:
    x = torch.rand(2, 1, side, 30, generator=generator())
    guess = torch.rand(2, 1, side, 30, generator=generator(1))
    for images, guesses in ((x, guess), (x.mT.contiguous(), guess.mT.contiguous())):
        assert (metrics.ssim(images, guesses) is not None) is reflected
        assert (metrics.ssim_valid(images, guesses) is not None) is whole
        assert bool(metrics.ssim_zeropad(images, guesses).isfinite().all())


def test_digits_at_8_pixels_have_an_ssim_but_no_ssim_valid() -> None:
    x = torch.tensor(load_digits().images[:2] / 16, dtype=torch.float32)[:, None]
    guess = torch.full_like(x, 0.5)
    value = metrics.ssim(x, guess)
    assert value is not None
    np.testing.assert_allclose(value.numpy(), slow_per_image(x, guess, "reflect"), atol=TOLERANCE)
    assert metrics.ssim_valid(x, guess) is None


def test_a_perfect_copy_scores_0_100_and_1() -> None:
    x, _ = digits()
    assert metrics.mse(x, x).tolist() == [0.0] * 4
    assert metrics.psnr(x, x).tolist() == [100.0] * 4
    for value in (metrics.ssim(x, x), metrics.ssim_valid(x, x), metrics.ssim_zeropad(x, x)):
        assert value is not None
        torch.testing.assert_close(value, torch.ones(4), rtol=0, atol=1e-6)


def test_black_against_white_is_as_wrong_as_can_be() -> None:
    x, guess = torch.zeros(1, 1, 12, 12), torch.ones(1, 1, 12, 12)
    assert float(metrics.mse(x, guess)) == 1.0
    assert float(metrics.psnr(x, guess)) == 0.0
    value = metrics.ssim(x, guess)  # flat images: only the luminance term is left, C1/(1 + C1)
    assert value is not None
    assert float(value) == pytest.approx(1e-4 / (1 + 1e-4), rel=1e-3)


METRICS: dict[str, Callable[[Tensor, Tensor], Tensor | None]] = {
    "mse": metrics.mse,
    "psnr": metrics.psnr,
    "ssim": metrics.ssim,
    "ssim_zeropad": metrics.ssim_zeropad,
    "ssim_valid": metrics.ssim_valid,
}


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize(
    ("scale", "shift"), [(255.0, 0.0), (2.0, -1.0), (math.nan, 0.0)], ids=["255", "-1..1", "nan"]
)
def test_images_in_another_range_are_refused_on_either_side(
    name: str, scale: float, shift: float
) -> None:
    x, guess = digits()
    with pytest.raises(AuditError, match=r"images given to a metric must lie in \[0, 1\]"):
        METRICS[name](x * scale + shift, guess)
    with pytest.raises(AuditError, match=r"reconstructions given to a metric must lie in"):
        METRICS[name](x, guess * scale + shift)


@pytest.mark.parametrize("name", METRICS)
def test_a_score_does_not_depend_on_its_neighbours(name: str) -> None:
    x, guess = digits()
    together, alone = METRICS[name](x, guess), METRICS[name](x[2:3], guess[2:3])
    assert together is not None
    assert alone is not None
    torch.testing.assert_close(together[2:3], alone, rtol=1e-5, atol=1e-6)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**31), n=st.integers(1, 3), side=st.integers(6, 14))
def test_metrics_are_symmetric_and_bounded(seed: int, n: int, side: int) -> None:
    x, guess = torch.rand(2, n, 1, side, side, generator=generator(seed))
    for name, metric in METRICS.items():
        forth, back = metric(x, guess), metric(guess, x)
        if forth is None or back is None:
            assert (name, forth, back) == ("ssim_valid", None, None)
            continue
        torch.testing.assert_close(forth, back, rtol=1e-4, atol=1e-5)
        low, high = {"mse": (0, 1), "psnr": (0, 100)}.get(name, (-1, 1))
        assert low <= float(forth.min())
        assert float(forth.max()) <= high
