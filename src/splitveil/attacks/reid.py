"""The re-identification attack: which of N known images was sent?"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Generator, Tensor

from splitveil.attacks.base import QUERIES
from splitveil.errors import AuditError, Range, check_ranges
from splitveil.threat import Access, BlackBox

_TIE = 1e-10  # distances closer than this, relative to the squared lengths, are equal


def ranks(guess: Tensor, gallery: Tensor, truth: Tensor, generator: Generator) -> Tensor:
    """Rank of the true image in the gallery by Euclidean distance; 1 means it was found.

    Equally near images are ordered by lot, so that a guess which says nothing finds one in m.

    Args:
        guess: Guesses (n, d), finite.
        gallery: All images (m, d), finite.
        truth: Row in the gallery that each guess belongs to (n,).
        generator: Draws the lots.

    Returns:
        Ranks (n,) from 1 to m.

    >>> gallery = torch.tensor([[0.0], [1.0], [5.0]])
    >>> ranks(torch.tensor([[0.9], [4.0]]), gallery, torch.tensor([0, 2]), torch.Generator())
    tensor([2, 1])
    """
    if not bool(guess.isfinite().all() & gallery.isfinite().all()):
        raise AuditError("re-identification needs finite values, got NaN or infinity; leave it out")
    # Differences of squares lose their digits far from the origin.
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


def unit_directions(images: Tensor, middle: Tensor) -> Tensor:
    """Images (n, …) less the mean image, scaled to length 1: the nearest is the best correlated.

    A reconstruction that shrinks towards the mean keeps its direction, and so its rank.

    >>> unit_directions(torch.tensor([[[3.0, 4.0]], [[0.0, 0.0]]]), torch.zeros(1, 2)).tolist()
    [[0.6000000238418579, 0.800000011920929], [0.0, 0.0]]
    """
    flat = (images - middle).flatten(1)
    length: Tensor = flat.norm(dim=1, keepdim=True)
    return flat / length.clamp_min(1e-12)


@dataclass(frozen=True)
class KnownImages:
    """What an attacker keeps of N images after sending each several times.

    Args:
        mean: Mean over the sendings (N, d).
        noise: Variance over the sendings of one image (d,).
        spread: Variance over the images (d,).
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
    draws: Annotated[int, Range(2)] = 32  # leaves 1/32 of the channel's noise in the gallery
    limit: int | None = None
    tried: int = 500  # aux images the scaling is picked on

    def __post_init__(self) -> None:
        check_ranges(self)

    def send(self, victim: BlackBox, images: Tensor, generator: Generator) -> KnownImages:
        """Send all images `draws` times."""
        parts, within = [], []
        for x in torch.split(images, QUERIES):
            send, rows = victim.sender(x), torch.arange(len(x), device=victim.device)
            first = send(rows, generator).flatten(1).float()
            total, squares = torch.zeros_like(first), torch.zeros_like(first)
            for _ in range(self.draws - 1):  # around the first sending: sums of squares stay small
                moved = send(rows, generator).flatten(1).float() - first
                total, squares = total + moved, squares + moved.square()
            parts.append(first + total / self.draws)
            within.append((squares - total.square() / self.draws).sum(0) / (self.draws - 1))
        mean = torch.cat(parts)
        noise = torch.stack(within).sum(0) / len(images)
        return KnownImages(mean, noise, mean.var(0, correction=0))

    def pick(self, victim: BlackBox, aux: Tensor, generator: Generator) -> tuple[str, Tensor]:
        """Name and factors (d,) of the scaling under which aux images are found best."""
        images = aux[:: max(1, len(aux) // self.tried)][
            : self.tried
        ]  # evenly spread: of all classes
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
