"""The baselines that every attack must beat: mean image, class mean, nearest known image.

The first two never look at z̃. The third shows what known images and a distance on the wire tell.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from splitveil.attacks.base import QUERIES, Count, need_aux, sent_aux, units_of
from splitveil.errors import AuditError, check_ranges
from splitveil.io import Progress, silent
from splitveil.threat import Access, BlackBox, Labelled, Observation, Reconstructor

MAX_DISTANCES = 2**24  # 64 MB of float32
FEW = 64  # known rows that are compared one by one
TRIED = 16  # candidates more than neighbours
ROUNDING = 4e-6  # of a product of float32 rows, relative to their squared lengths and to √d
BY_DIFFERENCES = "donot_use_mm_for_euclid_dist"


def class_means(aux: Labelled, num_classes: int) -> Tensor:
    """Mean aux image of each class (classes, c, h, w); the mean of all for an absent class."""
    count = torch.zeros(num_classes, device=aux.images.device)
    count.scatter_add_(0, aux.labels, torch.ones_like(aux.labels, dtype=count.dtype))
    total = torch.zeros(num_classes, *aux.images.shape[1:], device=aux.images.device)
    total.index_add_(0, aux.labels, aux.images)
    shape = (-1, *[1] * (aux.images.ndim - 1))
    means = total / count.clamp_min(1).view(shape)
    return torch.where((count > 0).view(shape), means, aux.images.mean(0))


@dataclass(frozen=True)
class MeanImage:
    """Answers the mean aux image, whatever was sent.

    Args:
        access: Sees nothing.
        min_aux: Fewest aux images, ≥ 1.
        effort: Its share of the progress bar, > 0.

    >>> MeanImage().access
    <Access.NONE: 'none'>
    """

    access: Access = Access.NONE
    min_aux: int = 1
    effort: float = 1.0

    def fit(
        self, victim: BlackBox, aux: Labelled, generator: Generator, progress: Progress = silent
    ) -> Reconstructor:
        """Take the mean of aux; the victim is never asked."""
        del victim, generator
        need_aux("mean", aux, self.min_aux)
        mean = aux.images.mean(0).clamp(0, 1)
        progress(1, 1)

        def reconstruct(seen: Observation) -> Tensor:
            return mean.expand(len(seen.answer), *mean.shape)

        return reconstruct


@dataclass(frozen=True)
class ClassMean:
    """Answers the mean aux image of the class the server predicts: what the answer alone gives.

    Args:
        access: Sees the server's answer alone.
        min_aux: Fewest aux images, ≥ 1.
        effort: Its share of the progress bar, > 0.

    >>> ClassMean().access
    <Access.LABEL: 'label'>
    """

    access: Access = Access.LABEL
    min_aux: int = 1
    effort: float = 1.0

    def fit(
        self, victim: BlackBox, aux: Labelled, generator: Generator, progress: Progress = silent
    ) -> Reconstructor:
        """Keep aux; the victim is never asked."""
        del victim, generator
        need_aux("class-mean", aux, self.min_aux)
        progress(1, 1)

        def reconstruct(seen: Observation) -> Tensor:
            top = int(torch.maximum(seen.answer.max(), aux.labels.max())) + 1
            return class_means(aux, top)[seen.answer].clamp(0, 1)

        return reconstruct


def nearest_indices(
    z: Tensor, known: Tensor, neighbours: int, max_distances: int = MAX_DISTANCES
) -> Tensor:
    """Rows of `known` that are nearest to each row of z, by Euclidean distance.

    Args:
        z: Rows (n, d).
        known: Rows (m, d); of equally near ones the first counts.
        neighbours: How many to find.
        max_distances: Distances that are held in memory at a time.

    Returns:
        Row numbers (n, neighbours), nearest first.

    >>> nearest_indices(torch.tensor([[1.0]]), torch.tensor([[9.0], [2.0], [0.0]]), 2)
    tensor([[1, 2]])
    """
    m, d = known.shape
    if m <= FEW:
        return _nearest_by_differences(z, known, neighbours, max_distances)
    tried, found = min(neighbours + TRIED, m), []
    lengths = known.square().sum(1)
    for part in torch.split(z, max(1, min(QUERIES, max_distances // max(m, tried * d)))):
        # Matrix products find candidates fast; the differences of these decide, so that neither
        # rounding nor ties depend on the size of the part.
        rough = torch.addmm(lengths, part, known.T, alpha=-2)
        values, near = rough.topk(tried, largest=False)
        near = near.sort(1).values
        apart = torch.cdist(part[:, None], known[near], compute_mode=BY_DIFFERENCES)[:, 0]
        order = apart.sort(dim=1, stable=True).indices[:, :neighbours]
        picks = near.gather(1, order)
        own = part.square().sum(1)
        last = apart.gather(1, order[:, -1:])[:, 0].square() - own
        slack = ROUNDING * d**0.5 * (own + lengths.max())
        unsure = ~(values[:, -1] > last + slack) & (tried < m)
        if bool(unsure.any()):
            picks[unsure] = _nearest_by_differences(part[unsure], known, neighbours, max_distances)
        found.append(picks)
    return torch.cat(found)


def _nearest_by_differences(
    z: Tensor, known: Tensor, neighbours: int, max_distances: int
) -> Tensor:
    """`nearest_indices` from the differences to all rows."""
    found = []
    for part in torch.split(z, max(1, min(QUERIES, max_distances // len(known)))):
        distances = torch.cdist(part, known, compute_mode=BY_DIFFERENCES)
        picks = []
        for _ in range(neighbours):
            picks.append(distances.argmin(1, keepdim=True))
            distances.scatter_(1, picks[-1], torch.inf)
        found.append(torch.cat(picks, 1))
    return torch.cat(found)


@dataclass(frozen=True, kw_only=True)
class Nearest:
    """Answers the mean of the aux images whose smashed data is nearest.

    Args:
        access: Sees what is sent, and can send the aux images.
        neighbours: How many aux images are averaged, ≥ 1.
        min_aux: Fewest aux images, ≥ 1; at least `neighbours` are needed.
        effort: Its share of the progress bar, > 0.

    >>> Nearest(neighbours=3).access
    <Access.BLACK_BOX: 'black-box'>
    """

    access: Access = Access.BLACK_BOX
    neighbours: Count = 1
    min_aux: int = 1
    effort: float = 2.0
    keeps_aux: ClassVar[bool] = True  # of an aux image the nearest is that image itself

    def __post_init__(self) -> None:
        check_ranges(self)

    def fit(
        self, victim: BlackBox, aux: Labelled, generator: Generator, progress: Progress = silent
    ) -> Reconstructor:
        """Send every aux image once and keep what was sent."""
        need_aux("nearest", aux, max(self.min_aux, self.neighbours))
        sent, images = sent_aux(victim, aux, generator, progress), aux.images.to(victim.device)
        if not bool(sent.isfinite().all()):
            raise AuditError(
                "the victim sent NaN or infinity for some aux images; train it with a lower lr"
            )
        units = units_of(sent)
        known = units(sent)

        def reconstruct(seen: Observation) -> Tensor:
            picked = nearest_indices(units(seen.z.flatten(1)), known, self.neighbours)
            return torch.cat([images[p].mean(1) for p in torch.split(picked, QUERIES)])

        return reconstruct
