"""What a decoder may minimise: pixels, structure, or the features of a classifier."""

from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from splitveil.attacks.fitting import Budget, minimise
from splitveil.nets.blocks import conv_bn_relu
from splitveil.rng import seeded_globals
from splitveil.types import Labelled, Progress, silent

Objective = Callable[[Tensor, Tensor], Tensor]

_RADIUS, _SIGMA, _C1, _C2 = 5, 1.5, 0.01**2, 0.03**2
_TINY = 1e-6  # squared length under which a feature vector counts as zero
ANCHOR = 0.1
PERCEPTUAL_WEIGHT = 0.1


def window_matrix(size: int, like: Tensor, *, reflect: bool) -> Tensor:
    """SSIM's Gaussian along one side as a matrix (size, size) that knows its border.

    A blur as two matrix products costs less than an 11×11 convolution, and is not rounded to
    TF32 as convolutions on a GPU are, which would drown the variances.
    """
    offsets = torch.arange(-_RADIUS, _RADIUS + 1, device=like.device)
    weights = torch.exp(-offsets.to(like.dtype).square() / (2 * _SIGMA**2))
    places = torch.arange(size, device=like.device)
    source = places[:, None] + offsets  # (size, 11)
    if reflect:
        source = (size - 1) - ((size - 1) - source.abs()).abs()
    hits = (source[..., None] == places).to(like.dtype)  # (size, 11, size); outside: none
    return (hits * (weights / weights.sum())[:, None]).sum(1)


def ssim_loss(guess: Tensor, x: Tensor) -> Tensor:
    r"""1 − SSIM, mean over images (n, c, h, w); the attacker minimises it.

    .. math:: 1 - \frac{(2\mu_x\mu_g + C_1)(2\sigma_{xg} + C_2)}
                       {(\mu_x^2 + \mu_g^2 + C_1)(\sigma_x^2 + \sigma_g^2 + C_2)}

    11×11 Gaussian window of σ 1.5, borders reflected as in torchmetrics; images under 6 pixels
    cannot be reflected that far and get a border of zeros.

    >>> flat = torch.full((1, 1, 8, 8), 0.5)
    >>> round(float(ssim_loss(torch.zeros_like(flat), flat)), 4)
    0.9996
    """
    reflect = min(x.shape[2:]) > _RADIUS
    rows = window_matrix(x.shape[2], x, reflect=reflect)
    columns = window_matrix(x.shape[3], x, reflect=reflect)
    stacked = torch.stack((x, guess, x * x, guess * guess, x * guess))
    blurred = (stacked @ columns.T).mT @ rows.T  # turned, which a mean over places does not feel
    mean_x, mean_g, xx, gg, xg = blurred
    var_x, var_g, covariance = xx - mean_x**2, gg - mean_g**2, xg - mean_x * mean_g
    luminance = (2 * mean_x * mean_g + _C1) / (mean_x**2 + mean_g**2 + _C1)
    contrast = (2 * covariance + _C2) / (var_x + var_g + _C2)
    loss: Tensor = 1 - (luminance * contrast).mean()
    return loss


def anchored_ssim_loss(guess: Tensor, x: Tensor) -> Tensor:
    """1 − SSIM and a little MSE.

    SSIM compares means by their ratio and weighs them by the structure it found, so it hardly
    feels a shift in colour of a bright or rough place; the anchor holds it.
    """
    return ssim_loss(guess, x) + ANCHOR * F.mse_loss(guess, x)


class Features(nn.Module):
    """A small classifier whose three layers are the features: 32, 64 and 128 channels."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [conv_bn_relu(channels, 32), conv_bn_relu(32, 64, 2), conv_bn_relu(64, 128, 2)]
        )
        self.leave = nn.Linear(128, num_classes)

    def maps(self, x: Tensor) -> list[Tensor]:
        """Feature maps (n, 32, h, w), (n, 64, h/2, w/2), (n, 128, h/4, w/4) of images."""
        found = []
        for layer in self.layers:
            x = layer(x)
            found.append(x)
        return found

    def forward(self, x: Tensor) -> Tensor:
        """Logits (n, classes) of images."""
        logits: Tensor = self.leave(self.maps(x)[-1].mean((2, 3)))
        return logits


def fit_features(
    aux: Labelled,
    generator: Generator,
    *,
    steps: int,
    batch_size: int,
    device: torch.device,
    progress: Progress = silent,
) -> Features:
    """A classifier the attacker fits on aux, frozen in eval mode; the victim plays no part."""
    budget = Budget(epochs=0, min_steps=steps, batch_size=batch_size)
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    on_gpu = device.type == "cuda"
    with seeded_globals(seed, device):
        net = Features(aux.images.shape[1], int(aux.labels.max()) + 1).to(device)
        if on_gpu:
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

        def loss(x: Tensor, labels: Tensor) -> Tensor:
            with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu, cache_enabled=False):
                logits = net(x)
            return F.cross_entropy(logits.float(), labels)

        minimise(loss, net, (aux.images, aux.labels), budget, generator, progress=progress)
    return net.eval().requires_grad_(requires_grad=False)


def perceptual_distance(features: Features, guess: Tensor, x: Tensor) -> Tensor:
    r"""Distance between the features of two batches of images, in the manner of LPIPS.

    .. math:: \frac{1}{L} \sum_l \big\langle \| \hat f_l(g) - \hat f_l(x) \|^2 \big\rangle

    f̂ is the feature vector at one place, of length 1; ⟨⟩ the mean over images and places. In
    [0, 2]: features after ReLU never oppose each other.
    """
    with torch.no_grad():
        targets = [_unit(f) for f in features.maps(x)]
    guesses = [_unit(f) for f in features.maps(guess)]
    layers = [(g - t).square().sum(1).mean() for g, t in zip(guesses, targets, strict=True)]
    return torch.stack(layers).mean()


def _unit(feature: Tensor) -> Tensor:
    """Vectors along the channels scaled to length 1, smoothly to 0 where there is none."""
    return feature * torch.rsqrt(feature.square().sum(1, keepdim=True) + _TINY)


def perceptual_loss(features: Features) -> Objective:
    """MSE and the distance between features."""

    def loss(guess: Tensor, x: Tensor) -> Tensor:
        distance = perceptual_distance(features, guess, x)
        return F.mse_loss(guess, x) + PERCEPTUAL_WEIGHT * distance

    return loss
