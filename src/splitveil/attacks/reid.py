"""Re-identification: which of N known images was sent?"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Generator, Tensor

from splitveil.attacks.base import QUERIES
from splitveil.errors import AuditError, Range, check_ranges
from splitveil.io import Progress, silent
from splitveil.threat import Access, BlackBox

_TIE = 1e-10  # distances closer than this, relative to the squared lengths, are equal


def ranks(guess: Tensor, gallery: Tensor, truth: Tensor, generator: Generator) -> Tensor:
    """Place (n,) of the true image among all, nearest first; 1 means it was found.

    `guess` (n, d) is compared with `gallery` (m, d) by Euclidean distance; row i of the guesses
    belongs to row truth[i]. Equally near images share their places by lot, so that a guess that
    says nothing finds one in m. Blocks of 1,000 × 1,000 distances in float64 are held at a time.

    >>> gallery = torch.tensor([[0.0], [1.0], [5.0]])
    >>> ranks(torch.tensor([[0.9], [4.0]]), gallery, torch.tensor([0, 2]), torch.Generator())
    tensor([2, 1])
    """
    if guess.shape[1:] != gallery.shape[1:] or len(truth) != len(guess):
        raise AuditError(
            f"each guess needs its true row and as many features as the gallery, got guesses "
            f"{tuple(guess.shape)}, gallery {tuple(gallery.shape)}, {len(truth)} true rows"
        )
    if not bool(guess.isfinite().all() & gallery.isfinite().all()):
        raise AuditError("re-identification needs finite values, got NaN or infinity")
    # Far from the origin, differences of squares lose their digits.
    middle = gallery.mean(0, dtype=torch.float64)
    places = []
    for part, own in zip(torch.split(guess, QUERIES), torch.split(truth, QUERIES), strict=True):
        g = part.double() - middle
        mine = (g - (gallery[own].double() - middle)).square().sum(1, keepdim=True)  # (q, 1)
        nearer = torch.zeros(len(g), dtype=torch.long, device=g.device)
        equal = torch.zeros_like(nearer)
        for block in torch.split(gallery, QUERIES):
            k = block.double() - middle
            squares = g.square().sum(1, keepdim=True) + k.square().sum(1)  # (q, b)
            apart = squares - 2.0 * g @ k.T - mine
            near = _TIE * (squares + mine)
            nearer += (apart < -near).sum(1)
            equal += (apart.abs() <= near).sum(1)
        lot = torch.rand(len(g), generator=generator, device=generator.device).to(g.device)
        places.append(1 + nearer + (lot * equal).long().clamp_max((equal - 1).clamp_min(0)))
    return torch.cat(places)


def centred(images: Tensor, middle: Tensor) -> Tensor:
    """Images (n, …) less the mean image, each of length 1: nearest is then best correlated.

    A reconstruction that shrinks towards the mean keeps its direction.

    >>> centred(torch.tensor([[[3.0, 4.0]], [[0.0, 0.0]]]), torch.zeros(1, 2)).tolist()
    [[0.6000000238418579, 0.800000011920929], [0.0, 0.0]]
    """
    flat = (images - middle).flatten(1)
    length: Tensor = flat.norm(dim=1, keepdim=True)
    return flat / length.clamp_min(1e-12)


@dataclass(frozen=True)
class KnownImages:
    """What an attacker holds of N images: the mean (N, d) of several sendings of each.

    `noise` and `spread` (d,) are the variances within the sendings of one image and over images.
    """

    mean: Tensor
    noise: Tensor
    spread: Tensor


@dataclass(frozen=True, kw_only=True)
class ReId:
    """Sends every image of the gallery `draws` times and looks for the nearest to what was seen.

    Distances are plain, or each feature is divided by the channel's noise or by its spread over
    images; what identifies aux images best counts. `limit` is the largest gallery. Two draws are
    the least: the channel's noise is what differs between two sendings.
    """

    access: Access = Access.BLACK_BOX
    draws: Annotated[int, Range(2)] = (
        32  # the noise that is left in the gallery is 1/32 of the channel's
    )
    limit: int | None = None
    tried: int = 500  # aux images the scaling is picked on

    def __post_init__(self) -> None:
        check_ranges(self)

    def send(
        self, victim: BlackBox, images: Tensor, generator: Generator, progress: Progress = silent
    ) -> KnownImages:
        """Send all images, `draws` times."""
        parts, within = [], []
        for x in torch.split(images, QUERIES):
            send, rows = victim.sender(x), torch.arange(len(x), device=victim.device)
            first = send(rows, generator).flatten(1).float()
            total, squares = torch.zeros_like(first), torch.zeros_like(first)
            for _ in range(self.draws - 1):  # about the first one: sums of squares stay small
                moved = send(rows, generator).flatten(1).float() - first
                total, squares = total + moved, squares + moved.square()
            parts.append(first + total / self.draws)
            within.append((squares - total.square() / self.draws).sum(0) / (self.draws - 1))
            progress(sum(map(len, parts)), len(images), "queries")
        mean = torch.cat(parts)
        noise = torch.stack(within).sum(0) / len(images)
        return KnownImages(mean, noise, mean.var(0, correction=0))

    def pick(self, victim: BlackBox, aux: Tensor, generator: Generator) -> tuple[str, Tensor]:
        """Name and factors (d,) of the scaling under which aux images are found best."""
        images = aux[:: max(1, len(aux) // self.tried)][: self.tried]  # of all classes
        gallery = self.send(victim, images, generator)
        seen = torch.cat(
            [victim.send(x, generator).flatten(1).float() for x in torch.split(images, QUERIES)]
        )
        every = torch.arange(len(images), device=seen.device)
        choices = scalings(gallery)
        found = [
            ranks(seen * scale, gallery.mean * scale, every, generator).double().reciprocal()
            for scale in choices.values()
        ]
        best = int(torch.stack(found).mean(1).argmax())
        name = list(choices)[best]
        return name, choices[name]


def scalings(gallery: KnownImages) -> Mapping[str, Tensor]:
    r"""Factors (d,) for each feature: 1, or one over the root of its noise, or of its spread.

    .. math:: s_j = (v_j + 10^{-3}\,\bar v)^{-1/2}

    v̄ is the mean spread, so that a feature without noise does not outweigh all others.
    """
    least = 1e-3 * gallery.spread.mean().clamp_min(1e-20)
    return {
        "plain": torch.ones_like(gallery.spread),
        "noise": (gallery.noise + least).rsqrt(),
        "spread": (gallery.spread + least).rsqrt(),
    }
