"""Labels never cover a marker or each other while there is room."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.strategies import integers, lists, tuples

from splitveil.report.canvas import place_labels, push_apart, shared_areas

FRAME = np.array([500.0, 400.0, 1000.0, 800.0])  # centre and size
NO_BARS = np.empty((0, 4))
Cells = tuple[int, int, int, int]


@pytest.mark.parametrize("seed", range(5))
def test_fourteen_crowded_points_get_labels_that_touch_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    anchors = rng.uniform((350, 300), (650, 500), (14, 2))
    bars = np.array([[500.0, 400.0, 200.0, 4.0]])
    boxes = place_labels(anchors, np.full((14, 2), (90.0, 20.0)), FRAME, bars)
    assert np.allclose(shared_areas(boxes, boxes), np.diag([90.0 * 20.0] * 14))
    markers = np.hstack([anchors, np.full((14, 2), 16.0)])
    assert shared_areas(boxes, np.vstack([markers, bars])).max() < 1e-6
    assert np.allclose(shared_areas(boxes, FRAME[None]), 90.0 * 20.0)


@settings(max_examples=50, deadline=None)
@given(*[tuples(*[integers(0, 20)] * 2, *[integers(1, 9)] * 2)] * 2)
def test_shared_areas_are_those_of_counted_cells(one: Cells, other: Cells) -> None:
    x, y = np.meshgrid(np.arange(-10, 60), np.arange(-10, 60))  # half units
    held = [
        (x >= 2 * left - w) & (x < 2 * left + w) & (y >= 2 * low - h) & (y < 2 * low + h)
        for left, low, w, h in (one, other)
    ]
    cells = int((held[0] & held[1]).sum()) / 4
    areas = shared_areas(np.array([one], dtype=float), np.array([other], dtype=float))
    assert areas.tolist() == [[cells]]


def test_a_point_at_the_right_edge_is_named_on_its_left() -> None:
    (box,) = place_labels(np.array([[990.0, 400.0]]), np.array([[90.0, 20.0]]), FRAME, NO_BARS)
    assert box[0] < 990 - 45


@settings(max_examples=50, deadline=None)
@given(lists(integers(0, 500), min_size=1, max_size=8))
def test_texts_are_pushed_up_only_and_keep_their_order(heights: list[int]) -> None:
    rising = sorted(float(height) for height in heights)
    moved = push_apart(rising, gap=20.0)
    assert all(b - a >= 20 - 1e-6 for a, b in pairwise(moved))
    assert all(new >= old for old, new in zip(rising, moved, strict=True))
    if all(b - a >= 20 for a, b in pairwise(rising)):
        assert moved == rising
