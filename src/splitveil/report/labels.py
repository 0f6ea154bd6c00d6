"""Where to put texts so that none covers another: plain geometry in pixels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MARKER_PX = 16.0
RADII = (13, 17, 22, 34, 50, 70, 95, 125, 160, 200)  # px from marker edge to text
NOTHING_PX2 = 1e-9  # rounding, not an overlap
ANGLES = (0, 180, 90, 270, 45, 135, 315, 225, 22, 158, 338, 202)  # degrees, best first


@dataclass(frozen=True, kw_only=True)
class Box:
    """An upright rectangle given by its centre and size, px."""

    x: float
    y: float
    width: float
    height: float

    def overlap(self, other: "Box") -> float:
        """Area shared with another box, px².

        >>> box = Box(x=0.0, y=0.0, width=4.0, height=2.0)
        >>> box.overlap(Box(x=3.0, y=0.0, width=4.0, height=2.0))
        2.0
        """
        wide = (self.width + other.width) / 2 - abs(self.x - other.x)
        high = (self.height + other.height) / 2 - abs(self.y - other.y)
        inner_wide = min(wide, self.width, other.width)
        inner_high = min(high, self.height, other.height)
        return float(max(inner_wide, 0) * max(inner_high, 0))

    def outside(self, frame: "Box") -> float:
        """Area of this box that lies beyond a frame, px²."""
        return self.width * self.height - self.overlap(frame)


def place(
    anchors: Sequence[tuple[float, float]], sizes: Sequence[tuple[float, float]], frame: Box
) -> list[Box]:
    """A box for each text near its anchor, inside the frame, off all markers and other texts.

    Greedy: nearest free place first. Where nothing is free the least covered place is taken.
    """
    taken = [Box(x=x, y=y, width=MARKER_PX, height=MARKER_PX) for x, y in anchors]
    boxes: list[Box] = []
    for anchor, size in zip(anchors, sizes, strict=True):
        best = _best(_candidates(anchor, size), taken, frame)
        boxes.append(best)
        taken.append(best)
    return boxes


def _best(candidates: Sequence[Box], taken: Sequence[Box], frame: Box) -> Box:
    """The first candidate that covers nothing, else the one that covers least."""
    boxes = _sides(candidates)
    inside = _shared(boxes, _sides([frame]))[:, 0]
    covered = boxes[:, 2] * boxes[:, 3] - inside + _shared(boxes, _sides(taken)).sum(1)
    free = covered <= NOTHING_PX2
    return candidates[int(free.argmax() if free.any() else covered.round(6).argmin())]


def _sides(boxes: Sequence[Box]) -> NDArray[np.float64]:
    """Centres and sizes as one array (n, 4)."""
    return np.array([(box.x, box.y, box.width, box.height) for box in boxes])


def _shared(some: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.float64]:
    """Areas shared by every pair of boxes (n, m), px²; `Box.overlap` for many."""
    a, b = some[:, None], others[None]
    reach = (a[..., 2:] + b[..., 2:]) / 2 - np.abs(a[..., :2] - b[..., :2])  # (n, m, 2)
    inner = np.minimum(np.minimum(reach, a[..., 2:]), b[..., 2:]).clip(min=0)
    shared: NDArray[np.float64] = inner[..., 0] * inner[..., 1]
    return shared


def _candidates(anchor: tuple[float, float], size: tuple[float, float]) -> list[Box]:
    """Boxes around an anchor, near ones first."""
    return [
        Box(
            x=anchor[0] + math.cos(turn) * (size[0] / 2 + radius),
            y=anchor[1] + math.sin(turn) * (size[1] / 2 + radius),
            width=size[0],
            height=size[1],
        )
        for radius in RADII
        for turn in (math.radians(angle) for angle in ANGLES)
    ]


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Rising heights moved as little as needed to stand at least `gap` apart.

    >>> spread([10.0, 12.0, 50.0], gap=6.0)
    [8.0, 14.0, 50.0]
    """
    groups: list[list[float]] = []  # each: the heights of texts that touch
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and _bottom(groups[-1], gap) - _top(groups[-2], gap) < gap:
            last = groups.pop()
            groups[-1] += last
    return [_bottom(group, gap) + gap * i for group in groups for i in range(len(group))]


def _bottom(group: Sequence[float], gap: float) -> float:
    """Height of the lowest of touching texts, centred on what they belong to."""
    return sum(group) / len(group) - gap * (len(group) - 1) / 2


def _top(group: Sequence[float], gap: float) -> float:
    """Height of the highest of touching texts."""
    return _bottom(group, gap) + gap * (len(group) - 1)
