"""Per-image metrics of reconstructions.

Images are floats in [0, 1], shape (n, c, h, w). Names carry their conventions: three SSIMs and two
PSNRs are in use in this field and differ by up to .15 and several dB on the same images.
"""

import functools
from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from splitveil import functional
from splitveil.functional import SSIM_RADIUS, Padding
from splitveil.threat import CHUNK, check_images, chunk_for

MSE_FLOOR = 1e-10  # a perfect copy has an infinite PSNR; it is reported as 100 dB
LPIPS_SIDE = 32
Images = Float[Tensor, "n c h w"]
ImageErrors = Float[Tensor, " n"]


def mse(x: Images, guess: Images) -> ImageErrors:
    """Mean squared error of each image; low favours the attacker.

    >>> mse(torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.5))
    tensor([0.2500])
    """
    _check_pair(x, guess)
    return (x - guess).square().flatten(1).mean(1)


def psnr(x: Images, guess: Images) -> ImageErrors:
    """Peak signal-to-noise ratio of each image, dB, peak 1; high favours the attacker.

    >>> round(float(psnr(torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.1))), 4)
    20.0
    """
    return -10.0 * torch.log10(mse(x, guess).clamp_min(MSE_FLOOR))


def ssim(x: Images, guess: Images) -> ImageErrors | None:
    """Structural similarity of each image in torchmetrics' convention (reflected borders).

    None for images under 6 pixels, which cannot be reflected by the window's radius of 5.
    """
    _check_pair(x, guess)
    if min(x.shape[2:]) <= SSIM_RADIUS:
        return None
    return _ssim(x, guess, "reflect")


def ssim_zeropad(x: Images, guess: Images) -> ImageErrors:
    """Structural similarity with zero padding: CEM's and the reference documents' way."""
    _check_pair(x, guess)
    return _ssim(x, guess, "zeros")


def ssim_valid(x: Images, guess: Images) -> ImageErrors | None:
    """Structural similarity over whole windows only: scikit-image's; None under 11 pixels."""
    _check_pair(x, guess)
    if min(x.shape[2:]) < 2 * SSIM_RADIUS + 1:
        return None
    return _ssim(x, guess, "none")


def _ssim(x: Images, guess: Images, padding: Padding) -> ImageErrors:
    """`functional.ssim` of each image, some at a time: it holds a dozen copies of what it gets."""
    pairs = zip(torch.split(x, CHUNK), torch.split(guess, CHUNK), strict=True)
    return torch.cat([functional.ssim(g, part, padding, per_image=True) for part, g in pairs])


def lpips(x: Images, guess: Images) -> ImageErrors | None:
    """Learned perceptual distance (AlexNet) of each image; low favours the attacker.

    None without the package `lpips` and its weights, and under 32 pixels, which are too few for
    its network. A grey image enters it as three equal channels.
    """
    _check_pair(x, guess)
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


PER_IMAGE: Mapping[str, Callable[[Images, Images], ImageErrors | None]] = {
    "mse": mse,
    "psnr": psnr,
    "ssim": ssim,
    "ssim_zeropad": ssim_zeropad,
    "ssim_valid": ssim_valid,
    "lpips": lpips,
}


def measured(x: Images, guess: Images) -> dict[str, ImageErrors | None]:
    """Every metric of each image, computed for a part of the images at a time to save memory."""
    chunk = chunk_for(x)
    pairs = list(zip(torch.split(x, chunk), torch.split(guess, chunk), strict=True))
    found: dict[str, ImageErrors | None] = {}
    for name, metric in PER_IMAGE.items():
        parts = [value for pair in pairs if (value := metric(*pair)) is not None]
        found[name] = torch.cat(parts) if parts else None
    return found


def _check_pair(x: Tensor, guess: Tensor) -> None:
    check_images(x, "images given to a metric")
    check_images(guess, "reconstructions given to a metric")
