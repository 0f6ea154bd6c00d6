"""Clients small enough to know by heart."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from splitveil.nets.channel import Channel, GaussianNoise
from splitveil.threat import Labelled, Victim

MakeAux = Callable[..., Labelled]


@pytest.fixture
def make_aux() -> MakeAux:
    """Random images with labels 0, 1, 2, 0, 1, …"""

    def make(n: int, shape: tuple[int, int, int] = (1, 4, 4), seed: int = 0) -> Labelled:
        images = torch.rand(n, *shape, generator=torch.Generator().manual_seed(seed))
        return Labelled(images, torch.arange(n) % 3)

    return make


class Mixing(nn.Module):
    """An invertible linear map of the pixels and an offset."""

    mix: Tensor

    def __init__(self, pixels: int) -> None:
        super().__init__()
        square = torch.randn(pixels, pixels, generator=torch.Generator().manual_seed(1))
        self.register_buffer("mix", torch.linalg.qr(square).Q)

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.mix + 0.25


@pytest.fixture
def linear_victim() -> Victim:
    """Sends an orthogonal mix of 16 pixels, without noise."""
    return Victim(Mixing(16), Channel())


@pytest.fixture
def noisy_victim() -> Victim:
    """Sends the image itself and a lot of noise."""
    return Victim(nn.Identity(), Channel([GaussianNoise(1.0)]))


class Constant(nn.Module):
    """A collapsed encoder: sends ones whatever the image."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ones(len(x), 5)


@pytest.fixture
def dead_victim() -> Victim:
    return Victim(Constant(), Channel())
