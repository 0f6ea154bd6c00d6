"""Cases and attempts made by hand."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from splitveil.audit import Attempt, Case
from splitveil.nets import Channel, GaussianNoise
from splitveil.types import Labelled, Victim

MakeCase = Callable[..., Case]
MakeAttempt = Callable[..., Attempt]


def labelled(n: int, seed: int) -> Labelled:
    images = torch.rand(n, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    return Labelled(images, torch.arange(n) % 3)


class BrightestQuarter(nn.Module):
    """A server that answers which quarter of the features sums up highest."""

    def forward(self, z: Tensor) -> Tensor:
        return z.reshape(len(z), 4, -1).sum(2)


@pytest.fixture
def make_case() -> MakeCase:
    """A client that sends the image and a little noise; 30 aux images, 12 scored ones."""

    def make(
        encoder: nn.Module | None = None,
        scored: Labelled | None = None,
        aux: Labelled | None = None,
        noise_std: float = 0.01,
    ) -> Case:
        channel = Channel([GaussianNoise(noise_std)])
        return Case(
            victim=Victim(nn.Identity() if encoder is None else encoder, channel),
            head=BrightestQuarter(),
            num_classes=4,
            aux=labelled(30, 0) if aux is None else aux,
            scored=labelled(12, 1) if scored is None else scored,
        )

    return make


@pytest.fixture
def make_attempt() -> MakeAttempt:
    """An attempt whose per-image numbers are given; what is not given is plain."""

    def make(
        mse: Sequence[float],
        psnr: Sequence[float] | None = None,
        ssim: Sequence[float] | None = None,
        ssim_zeropad: Sequence[float] | None = None,
        guess: Tensor | None = None,
    ) -> Attempt:
        n = len(mse)
        return Attempt(
            guess=torch.zeros(n, 1, 2, 2) if guess is None else guess,
            mse=torch.tensor(mse),
            psnr=torch.tensor([10.0] * n if psnr is None else psnr),
            ssim=None if ssim is None else torch.tensor(ssim),
            ssim_zeropad=torch.tensor([0.5] * n if ssim_zeropad is None else ssim_zeropad),
            ssim_valid=None,
            access="black-box",
            seconds=0.0,
        )

    return make
