"""Per-image metrics of a reconstruction; images are floats in [0, 1], shape (n, c, h, w).

Names carry their conventions: three SSIMs and two PSNRs are in use in this field and differ by
up to .15 and several dB on the same images.
"""

import functools

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.functional.image import structural_similarity_index_measure

from splitveil.types import check_images

MSE_FLOOR = 1e-10  # PSNR of a perfect copy is infinite; it is reported as 100 dB
LPIPS_SIDE = 32
_RADIUS, _SIGMA, _C1, _C2 = 5, 1.5, 0.01**2, 0.03**2

Images = Float[Tensor, "n c h w"]
PerImage = Float[Tensor, " n"]


def mse(x: Images, guess: Images) -> PerImage:
    """Mean squared error of each image; low favours the attacker.

    >>> mse(torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.5))
    tensor([0.2500])
    """
    _check(x, guess)
    return (x - guess).square().flatten(1).mean(1)


def psnr(x: Images, guess: Images) -> PerImage:
    """Peak signal-to-noise ratio of each image, dB, peak 1; high favours the attacker.

    >>> round(float(psnr(torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.1))), 4)
    20.0
    """
    return -10.0 * torch.log10(mse(x, guess).clamp_min(MSE_FLOOR))


def ssim(x: Images, guess: Images) -> PerImage | None:
    """Structural similarity of each image in torchmetrics' convention (reflected borders).

    None for images under 6 pixels, which cannot be reflected by the window's radius of 5.
    """
    _check(x, guess)
    if min(x.shape[2:]) <= _RADIUS:
        return None
    value = structural_similarity_index_measure(guess, x, data_range=1.0, reduction="none")
    assert isinstance(value, Tensor)  # noqa: S101 - a pair only when the full image is asked for
    return value.reshape(len(x))


def ssim_zeropad(x: Images, guess: Images) -> PerImage:
    """Structural similarity with zero padding: the CEM code's and the seeds' convention."""
    _check(x, guess)
    return _ssim(x, guess, _RADIUS)


def ssim_valid(x: Images, guess: Images) -> PerImage | None:
    """Structural similarity over whole windows only: scikit-image's; None under 11 pixels."""
    _check(x, guess)
    if min(x.shape[2:]) < 2 * _RADIUS + 1:
        return None
    return _ssim(x, guess, 0)


def lpips(x: Images, guess: Images) -> PerImage | None:
    """Learned perceptual distance (AlexNet) of each image; low favours the attacker.

    None unless the package `lpips` with its weights is installed, and under 32 pixels, where its
    network has nothing left to compare. Grey images are shown to it in three equal channels.
    """
    _check(x, guess)
    if min(x.shape[2:]) < LPIPS_SIDE or (net := _lpips_net(x.device)) is None:
        return None
    pair = [image.expand(-1, 3, -1, -1) if image.shape[1] == 1 else image for image in (x, guess)]
    with torch.no_grad():
        value: Tensor = net(pair[0] * 2 - 1, pair[1] * 2 - 1)
    return value.reshape(len(x)).float()


@functools.cache
def _lpips_net(device: torch.device) -> nn.Module | None:
    """The package's network, fetched once; None where it is not installed."""
    try:
        import lpips as package  # type: ignore[import-not-found]
    except ImportError:
        return None
    net: nn.Module = package.LPIPS(net="alex", verbose=False)
    return net.eval().requires_grad_(requires_grad=False).to(device)


def _ssim(x: Tensor, guess: Tensor, padding: int) -> Tensor:
    offsets = torch.arange(-_RADIUS, _RADIUS + 1, dtype=x.dtype, device=x.device)
    line = torch.exp(-offsets.square() / (2 * _SIGMA**2))
    window = torch.outer(line, line) / line.sum().square()  # (11, 11), sums to 1
    channels = x.shape[1]
    kernel = window.expand(channels, 1, *window.shape)

    def blur(image: Tensor) -> Tensor:
        return F.conv2d(image, kernel, padding=padding, groups=channels)

    mean_x, mean_g = blur(x), blur(guess)
    var_x = blur(x * x) - mean_x.square()
    var_g = blur(guess * guess) - mean_g.square()
    covariance = blur(x * guess) - mean_x * mean_g
    luminance = (2 * mean_x * mean_g + _C1) / (mean_x.square() + mean_g.square() + _C1)
    contrast = (2 * covariance + _C2) / (var_x + var_g + _C2)
    return (luminance * contrast).flatten(1).mean(1)


def _check(x: Tensor, guess: Tensor) -> None:
    check_images(x, "images given to a metric")
    check_images(guess, "reconstructions given to a metric")
