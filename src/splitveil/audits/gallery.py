"""A few scored images and what each attack made of them, as JSON for the report."""

import base64
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from splitveil.audits.target import Attempt
from splitveil.types import Json, Labelled

SHOWN = 10


def levels(images: Tensor) -> Tensor:
    """Images in [0, 1] as bytes."""
    return images.mul(255).round().to(torch.uint8)


def gallery_rows(labels: Tensor, limit: int = SHOWN) -> Tensor:
    """Positions of the first image of each class, at most `limit`, in class order.

    >>> gallery_rows(torch.tensor([1, 0, 1, 2]), limit=2)
    tensor([1, 0])
    """
    host = labels.tolist()
    first: dict[int, int] = {}
    for position, label in enumerate(host):
        first.setdefault(label, position)
    return torch.tensor([first[k] for k in sorted(first)][:limit], device=labels.device)


def gallery(
    scored: Labelled,
    attempts: Mapping[str, Attempt],
    answers: Tensor,
    classes: Sequence[str],
) -> Json:
    """Originals and reconstructions of one image per class, as base64 of raw uint8.

    An attack that was not scored on all of these images (a small subset) is left out.
    """
    rows = gallery_rows(scored.labels)
    shown = {n: a for n, a in attempts.items() if len(a.pictures) == len(rows)}
    return {
        "image_shape": list(scored.images.shape[1:]),
        "indices": rows.tolist(),
        "labels": scored.labels[rows].tolist(),
        "answers": answers[rows].tolist(),
        "classes": list(classes),
        "original": _pack(levels(scored.images[rows])),
        "reconstructions": {name: _pack(a.pictures) for name, a in shown.items()},
        "mse": {name: a.at(rows, "mse").tolist() for name, a in shown.items()},
    }


def _pack(images: Tensor) -> str:
    return base64.b64encode(images.cpu().contiguous().numpy().tobytes()).decode()
