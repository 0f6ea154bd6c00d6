"""Cases, attempts and attacks made by hand."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Generator, Tensor, nn

from splitveil.audits.bounds import Covariance, gallery_spectrum
from splitveil.audits.target import Attempt, Target
from splitveil.io import Progress, silent
from splitveil.nets.channel import Channel, GaussianNoise
from splitveil.threat import Access, BlackBox, FittedAttack, Labelled, Observation, Victim

SHAPE = (1, 8, 8)


def attacks_alone(patch: pytest.MonkeyPatch) -> None:
    """Audits of runs and encoders without leaks and certificates, for tests of all the rest."""
    patch.setattr("splitveil.audits.pipeline.leaks_beyond_pixels", lambda *_: {})
    patch.setattr("splitveil.audits.certificates.certify", lambda *_, **__: {})


def labelled(n: int, seed: int) -> Labelled:
    """Random images with labels 0, 1, 2, 0, 1, …"""
    images = torch.rand(n, *SHAPE, generator=Generator().manual_seed(seed))
    return Labelled(images, torch.arange(n) % 3)


class BrightestQuarter(nn.Module):
    """A server that answers which quarter of the features sums up highest."""

    def forward(self, z: Tensor) -> Tensor:
        return z.reshape(len(z), 4, -1).sum(2)


def a_target(
    encoder: nn.Module | None = None,
    *,
    scored: Labelled | None = None,
    aux: Labelled | None = None,
    noise_std: float = 0.01,
    channel: nn.Module | None = None,
    head: nn.Module | None = None,
    identity: str = "",
    seed: int = 0,
) -> Target:
    """A client that sends the image and a little noise; 30 aux images, 12 scored ones."""
    noise = Channel([GaussianNoise(noise_std)]) if channel is None else channel
    return Target(
        victim=Victim(nn.Identity() if encoder is None else encoder, noise),
        head=BrightestQuarter() if head is None else head,
        classes=("a", "b", "c", "d"),
        aux=labelled(30, 0) if aux is None else aux,
        scored=labelled(12, 1) if scored is None else scored,
        identity=identity,
        seed=seed,
    )


def an_attempt(
    mse: Sequence[float],
    psnr: Sequence[float] | None = None,
    ssim: Sequence[float] | None = None,
    ssim_zeropad: Sequence[float] | None = None,
    *,
    access: str = "black-box",
    rows: Sequence[int] | None = None,
    scored: int | None = None,
    right: Sequence[bool] | None = None,
    images: Tensor | None = None,
    repeats: int = 1,
    curve: tuple[float, ...] = (),
    aux_mse: float | None = None,
) -> Attempt:
    """An attempt whose per-image numbers are given; what is not given is plain."""
    n = len(mse)
    return Attempt(
        access=access,
        rows=torch.tensor(list(range(n) if rows is None else rows)),
        scored=n if scored is None else scored,
        mse=torch.tensor(mse),
        psnr=torch.tensor([10.0] * n if psnr is None else psnr),
        ssim=None if ssim is None else torch.tensor(ssim),
        ssim_zeropad=torch.tensor([0.5] * n if ssim_zeropad is None else ssim_zeropad),
        ssim_valid=None,
        right=torch.tensor([False] * n if right is None else right),
        images=torch.zeros(n, 1, 2, 2, dtype=torch.uint8) if images is None else images,
        repeats=repeats,
        curve=curve,
        aux_mse=aux_mse,
    )


@dataclass(frozen=True)
class Spy:
    """Answers grey images, and writes down everything it is given."""

    access: Access = Access.BLACK_BOX
    limit: int | None = None
    repeats: int = 1
    boxes: list[BlackBox] = field(default_factory=list, repr=False)
    auxes: list[Labelled] = field(default_factory=list, repr=False)
    seen: list[Observation] = field(default_factory=list, repr=False)
    drawn: list[Tensor] = field(default_factory=list, repr=False)
    heard: list[object] = field(default_factory=list, repr=False)

    def fit(
        self, victim: BlackBox, aux: Labelled, generator: Generator, progress: Progress = silent
    ) -> FittedAttack:
        self.boxes.append(victim)
        self.auxes.append(aux)
        self.drawn.append(torch.rand(4, generator=generator))
        self.heard.extend((generator, progress))

        def reconstruct(seen: Observation) -> Tensor:
            self.seen.append(seen)
            return torch.full((len(seen.answer), *aux.images.shape[1:]), 0.5)

        return FittedAttack(reconstruct)


@dataclass(frozen=True)
class Returns:
    """Returns what it is told to, whatever it was asked."""

    images: Tensor
    access: Access = Access.NONE

    def fit(
        self, victim: BlackBox, aux: Labelled, generator: Generator, progress: Progress = silent
    ) -> FittedAttack:
        del victim, aux, generator, progress
        return FittedAttack(lambda seen: self.images)


@dataclass(frozen=True)
class Counting:
    """Counts how often it is fitted; fails when told to."""

    version = "1"  # of an attack from outside the package, which is then stored
    budget: int = 1
    access: Access = Access.BLACK_BOX
    limit: int | None = None
    fits: list[int] = field(default_factory=list, repr=False)
    failing: list[bool] = field(default_factory=list, repr=False)

    def fit(
        self, victim: BlackBox, aux: Labelled, generator: Generator, progress: Progress = silent
    ) -> FittedAttack:
        del victim, aux, progress
        if self.failing:
            raise KeyboardInterrupt
        self.fits.append(self.budget)
        level = torch.rand(1, generator=generator)

        def reconstruct(seen: Observation) -> Tensor:
            return level.expand(len(seen.z), 1, 8, 8)

        return FittedAttack(reconstruct, (0.5, 0.25))


def gallery_rate(
    z: Tensor,
    noise_var: float | Tensor | None,
    labels: Tensor | None = None,
    covariance: Covariance = "diagonal",
    repeats: int = 1,
) -> float:
    """The bound in nats for a list of images, in one call."""
    return gallery_spectrum(z, noise_var, labels, covariance).rate(repeats)
