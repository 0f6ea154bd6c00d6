"""Attacks that never look at z: the floor every real attack must beat."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from splitveil.errors import AuditError
from splitveil.types import (
    Access,
    BlackBox,
    Labelled,
    Observation,
    Progress,
    Reconstruct,
    silent,
)


def class_means(aux: Labelled, num_classes: int) -> Tensor:
    """Mean aux image of each class (classes, c, h, w); the overall mean where a class is absent."""
    count = torch.zeros(num_classes, device=aux.images.device)
    count.scatter_add_(0, aux.labels, torch.ones_like(aux.labels, dtype=count.dtype))
    total = torch.zeros(num_classes, *aux.images.shape[1:], device=aux.images.device)
    total.index_add_(0, aux.labels, aux.images)
    shape = (-1, *[1] * (aux.images.ndim - 1))
    means = total / count.clamp_min(1).view(shape)
    return torch.where((count > 0).view(shape), means, aux.images.mean(0))


def _need_images(aux: Labelled, least: int) -> None:
    if len(aux) < least:
        raise AuditError("the attacker needs at least one aux image, got none")


@dataclass(frozen=True)
class MeanImage:
    """Answers the mean aux image, whatever was sent."""

    access: Access = Access.NONE
    min_aux: int = 1
    effort: float = 1.0

    def fit(
        self, victim: BlackBox, aux: Labelled, generator: Generator, progress: Progress = silent
    ) -> Reconstruct:
        """The mean of aux."""
        del victim, generator
        _need_images(aux, self.min_aux)
        mean = aux.images.mean(0).clamp(0, 1)
        progress(1, 1)

        def reconstruct(seen: Observation) -> Tensor:
            return mean.expand(len(seen.answer), *mean.shape)

        return reconstruct


@dataclass(frozen=True)
class ClassMean:
    """Answers the mean aux image of the class the server predicts: what the answer alone gives."""

    access: Access = Access.LABEL
    min_aux: int = 1
    effort: float = 1.0

    def fit(
        self, victim: BlackBox, aux: Labelled, generator: Generator, progress: Progress = silent
    ) -> Reconstruct:
        """The class means of aux."""
        del victim, generator
        _need_images(aux, self.min_aux)
        progress(1, 1)

        def reconstruct(seen: Observation) -> Tensor:
            top = int(torch.maximum(seen.answer.max(), aux.labels.max())) + 1
            return class_means(aux, top)[seen.answer].clamp(0, 1)

        return reconstruct
