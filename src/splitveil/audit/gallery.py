"""A few scored images and what each attack made of them, as JSON for the report."""

import base64
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from splitveil.audit.suite import Attempt, Case
from splitveil.types import Json


def _pack(images: Tensor) -> str:
    levels = images.mul(255).round().to(torch.uint8).cpu().contiguous()
    return base64.b64encode(levels.numpy().tobytes()).decode()


def one_per_class(labels: Tensor, limit: int) -> Tensor:
    """Positions of the first image of each class, at most `limit`, in class order.

    >>> one_per_class(torch.tensor([1, 0, 1, 2]), limit=2)
    tensor([1, 0])
    """
    host = labels.tolist()
    first = {label: host.index(label) for label in sorted(set(host))}
    return torch.tensor(list(first.values())[:limit])


def gallery(
    case: Case,
    attempts: Mapping[str, Attempt],
    answers: Tensor,
    classes: Sequence[str],
    limit: int = 10,
) -> Json:
    """Originals and reconstructions of one image per class, as base64 of raw uint8."""
    rows = one_per_class(case.scored.labels, limit).to(case.scored.images.device)
    return {
        "image_shape": list(case.scored.images.shape[1:]),
        "indices": rows.tolist(),
        "labels": case.scored.labels[rows].tolist(),
        "answers": answers[rows].tolist(),
        "classes": list(classes),
        "original": _pack(case.scored.images[rows]),
        "reconstructions": {name: _pack(a.guess[rows]) for name, a in attempts.items()},
        "mse": {name: a.mse[rows].tolist() for name, a in attempts.items()},
    }
