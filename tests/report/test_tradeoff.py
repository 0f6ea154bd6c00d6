"""The trade-off figure: what is drawn where, and that names cover nothing."""

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from made_records import grouped
from numpy.typing import NDArray
from PIL import Image

from paper.tradeoff import OTHER, OURS, PUBLISHED, marks, tradeoff
from splitveil.errors import RunError
from splitveil.report import canvas
from splitveil.report.canvas import MARKER_PX, Floats, place_labels, shared_areas
from splitveil.report.columns import Published
from splitveil.report.figures import Mark


def record(accuracy: float, mse: float, **config: str) -> dict[str, Any]:
    return {
        "accuracy": accuracy,
        "strongest": {"mse": mse},
        "config": {"defence": "cem", "net": "vgg11", "dataset": "cifar10"} | config,
        "audit": {"aux": "train"},
    }


def pixels(png: bytes) -> NDArray[np.int64]:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(np.int64)


def near(png: bytes, colour: tuple[int, int, int]) -> int:
    return int((np.abs(pixels(png) - np.array(colour)).max(-1) < 8).sum())


CROWD = [
    Mark(name=f"row-{i}", accuracy=89.8 + 0.06 * i, mse=0.005, accuracy_sd=0.2) for i in range(6)
] + [Mark(name="alone", accuracy=86.0, mse=0.05, shape="s")]


def test_marks_are_means_with_their_sd_and_published_rows_follow() -> None:
    groups = [
        grouped("veil", ((record(0.88, 0.05, defence="arl+veil", net="thin-resnet"),),)),
        grouped("cem", ((record(0.86, 0.01),), (record(0.88, 0.03),))),
        grouped("cem-test90", ((record(0.86, 0.01) | {"audit": {"aux": "test90"}},),)),
    ]
    published = {
        "cem": Published(0.9, 0.005, "CEM paper, bottleneck", "cifar10"),
        "seed": Published(0.9, 0.005, "R3", "cifar10", aux="test90"),
        "far": Published(0.9, 0.005, "CEM paper, elsewhere", "digits"),
    }
    veil, cem, paper = marks(groups, published)
    assert veil == replace(OURS, name="veil", accuracy=88.0, mse=0.05, shape="s")
    assert (cem.ink, cem.shape) == (OTHER.ink, "o")
    assert (cem.accuracy, cem.mse) == pytest.approx((87.0, 0.02))
    assert cem.accuracy_sd == pytest.approx(2**0.5)
    assert cem.mse_sd == pytest.approx(0.02 / 2**0.5)
    assert paper == replace(PUBLISHED, name="bottleneck", accuracy=90.0, mse=0.005)


def test_measured_marks_are_filled_and_published_ones_hollow() -> None:
    blue, orange = (0, 114, 178), (213, 94, 0)
    points = [
        replace(OURS, name="a", accuracy=88.0, mse=0.05),
        replace(OTHER, name="b", accuracy=90.0, mse=0.01),
    ]
    both, first = tradeoff(points, 0.0574), tradeoff(points[:1], 0.0574)
    assert near(both, orange) > near(first, orange) + 100
    hollow = [replace(PUBLISHED, name="c", accuracy=90.0, mse=0.01)]
    assert near(both, blue) > near(tradeoff(hollow, 0.0574), blue) + 100


def test_the_picture_depends_on_its_marks_alone() -> None:
    again = [*CROWD[:-1], Mark(name="alone", accuracy=86.0, mse=0.048, shape="s")]
    assert tradeoff(CROWD, 0.0574) == tradeoff(CROWD, 0.0574)
    assert tradeoff(CROWD, 0.0574) != tradeoff(again, 0.0574)


def test_names_cover_neither_marks_nor_bars_nor_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Floats, Floats, Floats, Floats]] = []

    def watched(anchors: Floats, sizes: Floats, frame: Floats, bars: Floats) -> Floats:
        boxes = place_labels(anchors, sizes, frame, bars)
        seen.append((anchors, frame, bars, boxes))
        return boxes

    monkeypatch.setattr(canvas, "place_labels", watched)
    tradeoff(CROWD, 0.0574)
    ((anchors, frame, bars, boxes),) = seen
    areas = boxes[:, 2:].prod(1)
    assert np.allclose(shared_areas(boxes, frame[None])[:, 0], areas)
    assert np.allclose(shared_areas(boxes, boxes), np.diag(areas))
    markers = np.hstack([anchors, np.full_like(anchors, MARKER_PX)])
    assert shared_areas(boxes, np.vstack([markers, bars])).max() < 1e-6


def test_bars_are_kept_free_as_far_as_they_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Floats] = []

    def watched(anchors: Floats, sizes: Floats, frame: Floats, bars: Floats) -> Floats:
        seen.append(bars)
        return place_labels(anchors, sizes, frame, bars)

    monkeypatch.setattr(canvas, "place_labels", watched)
    wide = Mark(name="a", accuracy=80.0, mse=0.03, accuracy_sd=5.0)
    tradeoff([wide, Mark(name="b", accuracy=90.0, mse=0.05, accuracy_sd=1e-9)], 0.0574)
    ((long, short, *upright),) = seen
    assert long[2] > 10 * MARKER_PX
    assert long[3] == MARKER_PX
    assert short[2] == MARKER_PX  # the mark hides it
    assert [bar[3] for bar in upright] == [MARKER_PX] * 2  # no sd of the MSE


def test_an_empty_figure_is_refused() -> None:
    with pytest.raises(RunError, match="audit a run first"):
        tradeoff([], 0.0574)
