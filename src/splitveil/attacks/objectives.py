"""What a decoder may minimise: pixels, structure, or the features of a classifier."""

from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from splitveil.attacks.fitting import Budget, minimise
from splitveil.nets.blocks import conv_bn_relu
from splitveil.rng import seeded_globals
from splitveil.similarity import ssim
from splitveil.types import Labelled, Progress, silent

Objective = Callable[[Tensor, Tensor], Tensor]

_TINY = 1e-6  # squared length under which a feature vector counts as zero
ANCHOR = 0.1
PERCEPTUAL_WEIGHT = 0.1


def ssim_loss(guess: Tensor, x: Tensor) -> Tensor:
    """1 − SSIM, mean over images (n, c, h, w); the attacker minimises it."""
    return 1 - ssim(guess, x)


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
