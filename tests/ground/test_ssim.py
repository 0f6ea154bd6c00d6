"""One SSIM for losses and metrics: its three borders against independent libraries."""

from collections.abc import Callable

import pytest
import torch
from skimage.metrics import structural_similarity
from torch import Tensor
from torchmetrics.functional.image import structural_similarity_index_measure

import splitveil as sv
from splitveil.functional import ssim

Images = Callable[[torch.dtype], tuple[Tensor, Tensor]]


def noise(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, other = torch.rand(2, 6, 3, 16, 13, generator=torch.Generator().manual_seed(0), dtype=dtype)
    return x, 0.7 * x + 0.3 * other


def digits(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    images = sv.data.load("digits").images[:12].to(dtype) / 255
    x = torch.nn.functional.interpolate(images, size=(16, 16), mode="bilinear")
    return x[:6], (x[:6] + x[6:]) / 2


@pytest.mark.parametrize("images", [noise, digits])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_reflected_borders_equal_torchmetrics(
    images: Images, dtype: torch.dtype, near: float
) -> None:
    x, guess = images(dtype)
    expected = structural_similarity_index_measure(guess, x, data_range=1.0, reduction="none")
    assert isinstance(expected, Tensor)
    torch.testing.assert_close(ssim(guess, x, per_image=True), expected, rtol=0, atol=near)


@pytest.mark.parametrize("images", [noise, digits])
def test_whole_windows_equal_scikit_image(images: Images) -> None:
    x, guess = images(torch.float64)
    expected = [
        structural_similarity(  # type: ignore[no-untyped-call]
            a.numpy(), b.numpy(), channel_axis=0, data_range=1, gaussian_weights=True, sigma=1.5,
            use_sample_covariance=False,
        )
        for a, b in zip(x, guess, strict=True)
    ]  # fmt: skip
    found = ssim(guess, x, "none", per_image=True)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=1e-12)


def test_equal_flat_images_score_one_in_float32() -> None:
    """Variances of flat images are rounding; torchmetrics is 9e-4 off here."""
    flat = torch.full((1, 3, 32, 32), 0.7)
    assert float(ssim(flat, flat)) == pytest.approx(1, abs=1e-6)
