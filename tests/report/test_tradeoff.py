"""The trade-off figure: what is drawn where, and that names cover nothing."""

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from paper.tradeoff import OTHER, OURS, PUBLISHED, marks, tradeoff
from splitveil.errors import RunError
from splitveil.report import figures as module
from splitveil.report.canvas import MARKER_PX, Box, board, place_labels
from splitveil.report.columns import Published
from splitveil.report.figures import Mark

from .made import grouped


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
        "seed": Published(0.9, 0.005, "seed 003", "cifar10", aux="test90"),
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


def test_the_same_marks_give_the_same_bytes_and_a_moved_one_others() -> None:
    again = [*CROWD[:-1], Mark(name="alone", accuracy=86.0, mse=0.048, shape="s")]
    assert tradeoff(CROWD, 0.0574) == tradeoff(CROWD, 0.0574)
    assert tradeoff(CROWD, 0.0574) != tradeoff(again, 0.0574)


def test_names_cover_neither_marks_nor_bars_nor_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Sequence[tuple[float, float]], list[Box], Box]] = []
    real = place_labels

    def watched(
        anchors: Sequence[tuple[float, float]],
        sizes: Sequence[tuple[float, float]],
        frame: Box,
    ) -> list[Box]:
        boxes = real(anchors, sizes, frame)
        seen.append((anchors, boxes[: len(CROWD)], frame))
        return boxes

    monkeypatch.setattr(module, "place", watched)
    tradeoff(CROWD, 0.0574)
    ((anchors, boxes, frame),) = seen
    assert len(anchors) > len(CROWD)  # the bars, too
    side = MARKER_PX
    for at, box in enumerate(boxes):
        assert box.outside(frame) < 1e-6
        assert all(box.overlap(other) < 1e-6 for other in boxes[:at])
        taken = [Box(x=x, y=y, width=side, height=side) for x, y in anchors]
        assert sum(box.overlap(tile) for tile in taken) < 1e-6


def test_bars_are_tiled_as_far_as_they_reach() -> None:
    with board(4.0, 4.0) as figure:
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_xlim(0, 600)  # 4 in at 150 dpi: a unit is a pixel
        axes.set_ylim(0, 600)
        mark = Mark(name="a", accuracy=300.0, mse=300.0, accuracy_sd=30.0, mse_sd=7.0)
        tiles = module._bar_tiles(axes, mark)
    assert sorted(round(x) for x, _ in tiles) == [268, 284, 316, 332]
    assert {round(y) for _, y in tiles} == {300}


def test_an_empty_figure_is_refused() -> None:
    with pytest.raises(RunError, match="audit a run first"):
        tradeoff([], 0.0574)
