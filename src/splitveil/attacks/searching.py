"""What white-box searches have in common: checks, and a part of aux to measure on."""

import math
from collections.abc import Mapping

import torch
from torch import Generator

from splitveil.errors import AuditError, ConfigError
from splitveil.types import Access, Attack, BlackBox, Labelled, WhiteBox

REFERENCE = 3 * 32 * 32  # values of the images for which `limit` and `chunk` are told
LEAST = 8


def count_for(count: int, values: int) -> int:
    """How many images of `values` numbers cost about as much as `count` of 3×32×32; at least 8.

    >>> count_for(64, 64), count_for(64, 3072), count_for(64, 3 * 96 * 96), count_for(4, 9999)
    (3072, 64, 8, 4)
    """
    return max(min(count, LEAST), count * REFERENCE // values)


def check_search(attack: object, start: Attack, least: Mapping[str, int]) -> None:
    """Refuse a search whose numbers are below `least`, or whose start needs repeats."""
    for name, low in least.items():
        value = getattr(attack, name)
        if not low <= value < math.inf:
            raise ConfigError(f"{name} must be finite and at least {low}, got {value}")
    if start.access == Access.REPEATS:
        raise ConfigError("start must work from one sending per image, got one with repeats")


def opened(victim: BlackBox, name: str) -> WhiteBox:
    """The victim, if it is the white-box view that attack `name` needs."""
    if not isinstance(victim, WhiteBox):
        kind = type(victim).__name__
        raise AuditError(f"{name} needs a white-box view, got {kind}; use victim.white_box()")
    return victim


def held_out(
    aux: Labelled, least: int, name: str, generator: Generator
) -> tuple[Labelled, Labelled]:
    """A random tenth of aux to measure on, and the rest to fit on."""
    if (n := len(aux)) < least:
        raise AuditError(f"the {name} attack needs at least {least} aux images, got {n}")
    order = torch.randperm(n, generator=generator, device=generator.device)
    held, used = torch.tensor_split(order.to(aux.images.device), [n // 10])
    return (
        Labelled(aux.images[held], aux.labels[held]),
        Labelled(aux.images[used], aux.labels[used]),
    )
