"""How alike two images look: SSIM, as a loss and as a metric of each image."""

import torch
from torch import Tensor
from torch.nn import functional as F

SSIM_RADIUS = 5
_SIGMA, _C1, _C2 = 1.5, 0.01**2, 0.03**2


def window_matrix(size: int, like: Tensor, *, reflect: bool) -> Tensor:
    """SSIM's Gaussian along one side as a matrix (size, size) that knows its border.

    A blur as two matrix products costs less than an 11×11 convolution, and is not rounded to
    TF32 as convolutions on a GPU are, which would drown the variances.
    """
    offsets = torch.arange(-SSIM_RADIUS, SSIM_RADIUS + 1, device=like.device)
    weights = torch.exp(-offsets.to(like.dtype).square() / (2 * _SIGMA**2))
    places = torch.arange(size, device=like.device)
    source = places[:, None] + offsets  # (size, 11)
    if reflect:
        source = (size - 1) - ((size - 1) - source.abs()).abs()
    hits = (source[..., None] == places).to(like.dtype)  # (size, 11, size); outside: none
    return (hits * (weights / weights.sum())[:, None]).sum(1)


def ssim_map(mean_x: Tensor, mean_g: Tensor, xx: Tensor, gg: Tensor, xg: Tensor) -> Tensor:
    r"""Structural similarity at each place, from blurred images x, g and blurred products.

    .. math:: \frac{(2\mu_x\mu_g + C_1)(2\sigma_{xg} + C_2)}
                   {(\mu_x^2 + \mu_g^2 + C_1)(\sigma_x^2 + \sigma_g^2 + C_2)}
    """
    var_x, var_g, covariance = xx - mean_x**2, gg - mean_g**2, xg - mean_x * mean_g
    luminance = (2 * mean_x * mean_g + _C1) / (mean_x**2 + mean_g**2 + _C1)
    contrast = (2 * covariance + _C2) / (var_x + var_g + _C2)
    return luminance * contrast


def ssim(guess: Tensor, x: Tensor) -> Tensor:
    """Structural similarity (`ssim_map`), mean over images (n, c, h, w) in [0, 1]; a loss.

    11×11 Gaussian window of σ 1.5, borders reflected as in torchmetrics; images under 6 pixels
    cannot be reflected that far and get a border of zeros.

    >>> flat = torch.full((1, 1, 8, 8), 0.5)
    >>> round(float(ssim(torch.zeros_like(flat), flat)), 4)
    0.0004
    """
    reflect = min(x.shape[2:]) > SSIM_RADIUS
    rows = window_matrix(x.shape[2], x, reflect=reflect)
    columns = window_matrix(x.shape[3], x, reflect=reflect)
    stacked = torch.stack((x, guess, x * x, guess * guess, x * guess))
    blurred = (stacked @ columns.T).mT @ rows.T  # turned, which a mean over places does not feel
    return ssim_map(*blurred).mean()


def ssim_per_image(x: Tensor, guess: Tensor, padding: int) -> Tensor:
    """Structural similarity (n,) of images (n, c, h, w) with a border of `padding` zeros.

    The window of `ssim` by a convolution; padding 0 takes whole windows alone.
    """
    offsets = torch.arange(-SSIM_RADIUS, SSIM_RADIUS + 1, dtype=x.dtype, device=x.device)
    line = torch.exp(-offsets.square() / (2 * _SIGMA**2))
    window = torch.outer(line, line) / line.sum().square()  # (11, 11), sums to 1
    channels = x.shape[1]
    kernel = window.expand(channels, 1, *window.shape)
    pictures = (x, guess, x * x, guess * guess, x * guess)
    blurred = (F.conv2d(image, kernel, padding=padding, groups=channels) for image in pictures)
    return ssim_map(*blurred).flatten(1).mean(1)
