"""Labels never cover a marker or each other while there is room."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.strategies import integers, lists

from splitveil.report.canvas import Box, place_labels, spread

FRAME = Box(x=500.0, y=400.0, width=1000.0, height=800.0)


@pytest.mark.parametrize("seed", range(5))
def test_fourteen_crowded_points_get_labels_that_touch_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    anchors = [(float(x), float(y)) for x, y in rng.uniform((350, 300), (650, 500), (14, 2))]
    boxes = place_labels(anchors, [(90.0, 20.0)] * len(anchors), FRAME)
    assert all(one.overlap(other) < 1e-6 for one, other in combinations(boxes, 2))
    markers = [Box(x=x, y=y, width=16.0, height=16.0) for x, y in anchors]
    assert all(box.overlap(marker) < 1e-6 for box in boxes for marker in markers)
    assert all(box.outside(FRAME) < 1e-6 for box in boxes)


def test_a_point_at_the_right_edge_is_named_on_its_left() -> None:
    (box,) = place_labels([(990.0, 400.0)], [(90.0, 20.0)], FRAME)
    assert box.x < 990 - 45


@settings(max_examples=50, deadline=None)
@given(lists(integers(0, 500), min_size=1, max_size=8))
def test_spread_keeps_order_gap_and_mean(heights: list[int]) -> None:
    rising = sorted(float(height) for height in heights)
    moved = spread(rising, gap=20.0)
    assert all(b - a >= 20 - 1e-6 for a, b in pairwise(moved))
    assert np.mean(moved) == pytest.approx(np.mean(rising))
    if all(b - a >= 20 for a, b in pairwise(rising)):
        assert moved == rising
