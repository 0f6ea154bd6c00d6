"""`KMeansCEM` made ready for a test: its variants, features, and a fitted module."""

from collections.abc import Callable, Iterable
from typing import Any

from oracles.batches import draw
from torch import Generator, Tensor

from splitveil.surrogates.kmeans_cem import KMeansCEM

VARIANTS: list[dict[str, Any]] = [
    {"form": "hinge"},
    {"form": "hinge", "gamma": 0.0, "var_threshold": 2.0},
    {"form": "hinge", "log_entropy": False},
    {"form": "logdet"},
    {"form": "logdet", "covariance": "full"},
]


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def features(n: int, d: int, c: int, seed: int) -> tuple[Tensor, Tensor]:
    z, y = draw(n, d, c, seed)
    return z.detach(), y


def build(
    d: int,
    c: int,
    n: int = 60,
    seed: int = 0,
    **kwargs: Any,  # noqa: ANN401
) -> KMeansCEM:
    cem = KMeansCEM(d, c, **({"clusters": 3, "noise_std": 0.5} | kwargs)).double()
    cem.refit(*features(n, d, c, seed + 5000), seeded(seed))
    return cem


def in_batches(z: Tensor, y: Tensor, size: int) -> Callable[[], Iterable[tuple[Tensor, Tensor]]]:
    return lambda: ((z[i : i + size], y[i : i + size]) for i in range(0, len(z), size))
