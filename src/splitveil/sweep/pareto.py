r"""The trade-off of many trials: which are not beaten, and how much of the square they cover.

A point is (accuracy, leakage), accuracy up, leakage down. Leakage is 1 where the attacker has the
image and 0 where it knows no more than the answer; below 0 there is nothing left to win, so it
counts as 0.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Point = tuple[float, float]
Array = NDArray[np.float64]


def undominated(points: Sequence[Point]) -> list[bool]:
    """For each point whether no other is at least as high in both numbers and higher in one.

    >>> undominated([(0.9, 0.01), (0.8, 0.02), (0.8, 0.015)])
    [True, True, False]
    """
    return [
        not any(a >= mine and b >= other and (a, b) != (mine, other) for a, b in points)
        for mine, other in points
    ]


def front(points: Sequence[Point]) -> list[bool]:
    """For each point whether no other is as accurate and as private, and better in one of them.

    >>> front([(0.9, 0.5), (0.8, 0.2), (0.8, 0.3), (0.9, 0.5)])
    [True, True, False, True]
    """
    return undominated([(accuracy, -max(leakage, 0.0)) for accuracy, leakage in points])


def hypervolume(accuracy: Array, leakage: Array, chance: float) -> float:
    r"""Share of the square that some point covers, from (chance, leakage 1) to (1, leakage 0).

    .. math:: \frac{1}{1 - p}\left|\bigcup_i [p, a_i] \times [\max(\ell_i, 0), 1]\right|

    1 is every answer right and nothing leaked, 0 is guessing or handing over the image.

    >>> round(hypervolume(np.array([1.0, 0.55]), np.array([0.5, 0.0]), 0.1), 6)
    0.75
    """
    gain = np.clip((accuracy - chance) / (1 - chance), 0.0, 1.0)
    private = 1.0 - np.clip(leakage, 0.0, 1.0)
    order = np.argsort(-gain, kind="stable")
    right, height = gain[order], np.maximum.accumulate(private[order])
    return float(np.sum(right * np.diff(height, prepend=0.0)))


def most_private(points: Sequence[Point], least: float) -> int | None:
    """The place of the least leaking point of at least this accuracy; ties go to the accurate.

    >>> most_private([(0.9, 0.5), (0.8, 0.2), (0.7, 0.1)], least=0.8)
    1
    """
    good = [i for i, (accuracy, _) in enumerate(points) if accuracy >= least]
    return min(good, key=lambda i: (max(points[i][1], 0.0), -points[i][0]), default=None)
