"""Pictures: they decode, have the size their content asks for, and depend on the data alone."""

import base64
import io
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from made_runs import MakeRun, make_gallery, make_metrics, make_record
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray
from PIL import Image

from splitveil.errors import RunError
from splitveil.record.files import RunFiles
from splitveil.record.schema import Record
from splitveil.report.canvas import CEILING, DPI, PALETTE, Drawing, chinese_font, references, shown
from splitveil.report.columns import Published
from splitveil.report.curves import draw_curves, training_curves
from splitveil.report.figures import (
    TILE,
    attack_bars,
    comparable_rows,
    draw_grid,
    left_out,
    scatter,
)


def pixels(drawn: bytes | Drawing) -> NDArray[np.uint8]:
    png = drawn.png if isinstance(drawn, Drawing) else drawn
    with Image.open(io.BytesIO(png)) as image:
        assert image.format == "PNG"
        assert "Software" not in image.info
        return np.asarray(image.convert("RGB"))


def size(drawn: Drawing) -> tuple[int, int]:
    """Width and height in pixels, without drawing them."""
    width, height = drawn._figure.get_size_inches() * DPI
    return round(width), round(height)


def has_colour(picture: NDArray[np.uint8], ink: str) -> bool:
    rgb = [int(ink[i : i + 2], 16) for i in (1, 3, 5)]
    return bool((picture == rgb).all(-1).any())


def tile_centres(drawn: Drawing) -> list[tuple[int, int]]:
    """Pixels in the middle of the tiles, in the order they are drawn: rows from the top."""
    edges = [image.get_extent() for image in drawn._figure.axes[0].images]  # inches
    return [(round((y + b) / 2 * DPI), round((x + r) / 2 * DPI)) for x, r, b, y in edges]


def flat_gallery(levels: dict[str, list[int]], indices: list[int]) -> RunFiles:
    """A run whose images are one grey each, so that a pixel tells which image it is."""
    from pathlib import Path

    from splitveil.record.files import Gallery

    def images(greys: list[int]) -> NDArray[np.uint8]:
        return np.repeat(np.array(greys, dtype=np.uint8), 64).reshape(-1, 1, 8, 8)

    n = len(indices)
    gallery = Gallery(
        indices=tuple(indices),
        labels=(0,) * n,
        answers=(0,) * n,
        label_names=("zero",) * n,
        answer_names=("zero",) * n,
        original=images([10 * i for i in indices]),
        reconstructions={name: images(greys) for name, greys in levels.items()},
        mse={},
    )
    return RunFiles(
        name="flat",
        path=Path("flat"),
        record=Record.from_dict(make_record("veil")),
        gallery=gallery,
    )


def test_every_tile_of_the_grid_stands_in_its_column() -> None:
    one = flat_gallery({"linear": [40, 50, 60], "decoder": [70, 80, 90]}, [1, 2, 3])
    two = flat_gallery({"decoder": [140, 150, 160]}, [1, 2, 3])
    drawn = draw_grid([one, replace(two, name="other")])
    picture, centres = pixels(drawn), tile_centres(drawn)
    rows = [centres[at : at + 3] for at in range(0, len(centres), 3)]
    seen = [[int(picture[centre][0]) for centre in row] for row in rows]
    assert seen == [[10, 20, 30], [40, 50, 60], [70, 80, 90], [140, 150, 160]]
    assert all([x for _, x in row] == [x for _, x in rows[0]] for row in rows)
    assert sorted(y for y, _ in centres) == [y for y, _ in centres]
    assert has_colour(picture, CEILING)  # frame of the strongest attack


def test_runs_on_other_images_get_a_grid_of_their_own() -> None:
    one = flat_gallery({"decoder": [70, 80]}, [1, 2])
    other = flat_gallery({"decoder": [70, 80]}, [3, 4])
    shared, apart = size(draw_grid([one, one])), size(draw_grid([one, other]))
    assert apart[1] - shared[1] > TILE * DPI


def test_the_grid_shows_ten_columns_at_most(make_run: MakeRun) -> None:
    widths = [
        size(draw_grid([make_run(f"n{n}", gallery=make_gallery("veil", n=n))]))[0]
        for n in (9, 10, 14)
    ]
    assert widths[0] < widths[1] == widths[2]


def test_rgb_images_keep_their_colours(rgb: RunFiles) -> None:
    assert rgb.gallery is not None
    drawn = draw_grid([rgb])
    picture = pixels(drawn)
    y, x = tile_centres(drawn)[0]
    tile = picture[y - 40 : y + 40, x - 40 : x + 40].reshape(-1, 3).astype(int)
    assert (tile.max(1) - tile.min(1)).max() > 50


def test_a_grid_too_tall_names_who_is_left_out() -> None:
    flat = flat_gallery({"decoder": [70]}, [1])
    many = [replace(flat, name=f"r{i}") for i in range(14)]
    assert left_out(many) == ["r12", "r13"]
    assert size(draw_grid(many))[1] < 2**16


def test_scatter_draws_a_point_per_run_and_the_ceiling(three: list[RunFiles]) -> None:
    picture = pixels(scatter(three))
    assert picture.shape == (720, 1260, 3)
    assert all(has_colour(picture, ink) for ink in (*PALETTE[:3], CEILING))


def test_references_that_print_alike_are_one_line(make_run: MakeRun) -> None:
    records = [make_record("veil") | {"ceiling": {"mse": v}} for v in (0.0493, 0.049301, 0.06)]
    runs = [make_run(f"r{i}", record=record, gallery=None) for i, record in enumerate(records)]
    assert [round(value, 3) for value in references(runs, "ceiling")] == [0.049, 0.06]


def test_bars_grow_wider_with_attacks_and_taller_with_runs(three: list[RunFiles]) -> None:
    width, height = size(attack_bars(three[2:]))
    assert size(attack_bars(three[2:] * 8))[1] > 1.8 * height
    record = make_record("veil")
    record["attacks"] |= {f"decoder-perceptual-{i}": {"mse": 0.04} for i in range(8)}
    assert size(attack_bars([replace(three[2], record=Record.from_dict(record))]))[0] > width


def test_curves_without_data_are_not_drawn(make_run: MakeRun) -> None:
    def third_panel(run: RunFiles) -> NDArray[np.uint8]:
        return pixels(training_curves([run]))[:, 850:1200]

    assert has_colour(third_panel(make_run("veil", "veil")), PALETTE[0])
    assert not has_colour(third_panel(make_run("none", "none")), PALETTE[0])


def test_curves_of_several_runs_have_a_legend(three: list[RunFiles]) -> None:
    together = training_curves(three)
    assert size(training_curves(three[2:])) == (1650, 390)
    assert size(together)[1] > 390
    assert all(has_colour(pixels(together), ink) for ink in PALETTE[:3])


def test_any_name_can_be_drawn(make_run: MakeRun) -> None:
    names = ["_hidden", "a$b$c", "$\\frac{$", "名前\n", "x" * 200]
    run = make_run("x", metrics=make_metrics("veil", 2))
    runs = [replace(run, name=name) for name in names]
    for draw in (scatter, attack_bars, training_curves):
        assert pixels(draw(runs)).std() > 0
    assert [shown(name) for name in names[:3]] == ["_hidden", "a$b$c", "$\\frac{$"]
    assert shown(names[3]) == ("名前" if chinese_font() else "??")
    assert len(shown(names[4])) == 26


def test_equal_numbers_and_a_perfect_score_can_be_drawn(make_run: MakeRun) -> None:
    record = make_record("veil") | {"accuracy": 1.0, "ceiling": {"mse": 0.0}, "floor": None}
    record["strongest"]["mse"] = 0.0
    run = make_run("x", record=record, metrics=make_metrics("veil", 1))
    for draw in (scatter, attack_bars, training_curves):
        assert pixels(draw([run])).std() > 0


def test_with_nothing_to_draw_the_error_says_what_to_do(make_run: MakeRun) -> None:
    bare = make_run("x", record={}, gallery=None)
    for draw in (draw_grid, scatter, attack_bars):
        with pytest.raises(RunError, match="audit a run"):
            draw([bare])


@pytest.mark.parametrize("draw", [scatter, attack_bars, training_curves, draw_grid])
def test_every_figure_is_the_same_each_time_as_png_and_svg(
    three: list[RunFiles], draw: Callable[[Sequence[RunFiles]], Drawing]
) -> None:
    first, again = draw(three[2:]), draw(three[2:])
    assert (first.png, first.svg) == (again.png, again.svg)
    root = ElementTree.fromstring(first.svg)  # noqa: S314 - our own
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert b"<dc:date>" not in first.svg
    width, height = (float(str(root.get(side)).removesuffix("pt")) for side in ("width", "height"))
    rows, columns, _ = pixels(first).shape
    assert columns / rows == pytest.approx(width / height, abs=0.01)


def test_an_svg_of_the_grid_keeps_the_pixels_of_each_image(three: list[RunFiles]) -> None:
    assert three[0].gallery is not None
    blobs = re.findall(rb"base64,([^\"]+)", draw_grid(three[:1]).svg)
    assert len(blobs) == 8 * (1 + 2)  # images, rows
    with Image.open(io.BytesIO(base64.b64decode(blobs[0]))) as image:
        seen = np.asarray(image.convert("L"))
    assert any(
        np.array_equal(turned, three[0].gallery.original[0, 0]) for turned in (seen, seen[::-1])
    )


def test_published_rows_are_hollow_and_of_the_same_attacker(three: list[RunFiles]) -> None:
    rows = {
        "near": Published(accuracy=0.97, mse=0.02, source="A", dataset="digits"),
        "far": Published(accuracy=0.5, mse=0.9, source="B", dataset="digits", aux="held-out"),
    }
    assert list(comparable_rows(three, rows)) == ["near"]
    with_marks, without = scatter(three, rows), scatter(three)
    assert with_marks.svg != without.svg
    only_far = {"far": rows["far"]}
    assert scatter(three, only_far).svg == without.svg


def test_warm_up_and_shut_off_leave_marks_on_the_curves(make_run: MakeRun) -> None:
    def marks(name: str, **logged: list[float]) -> list[tuple[str | None, float, float]]:
        lines = [json.loads(line) for line in make_metrics("veil", 8).splitlines()]
        epochs = [line for line in lines if line["kind"] == "epoch"]
        for at, line in enumerate(epochs):
            line |= {key: values[at] for key, values in logged.items()}
        run = make_run(name, metrics="\n".join(map(json.dumps, epochs)))
        axes = Figure().subplots()
        draw_curves(axes, "", 1.0, [("rob_loss", "", "-")], [run], named=True)
        spans = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
        return [(s.get_hatch(), s.get_x(), s.get_x() + s.get_width()) for s in spans]

    assert marks("plain", weight=[1.0] * 8) == []
    assert marks("warm", weight=[0.0] * 3 + [1.0] * 5) == [(None, 0.5, 3.5)]
    shut = [1.0] * 3 + [0.0] * 5
    assert marks("shut", weight=[1.0] * 8, shut=shut) == [("///", 0.5, 3.5)]
