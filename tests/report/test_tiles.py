"""Worst, median and best: which images are shown, and how many fit."""

import base64
import io
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from made_runs import MakeRun, make_gallery
from PIL import Image

from splitveil.record.files import RunFiles
from splitveil.report.figures import LARGEST, image_errors, picks, strips


@given(errors=st.lists(st.floats(0, 1), min_size=3, max_size=12))
def test_ranks_are_the_extremes_and_the_lower_median(errors: list[float]) -> None:
    chosen = dict(picks(errors))
    assert list(chosen) == ["worst", "median", "best"]
    assert errors[chosen["worst"]] == min(errors)
    assert errors[chosen["best"]] == max(errors)
    assert errors[chosen["median"]] == sorted(errors)[(len(errors) - 1) // 2]
    assert len(set(chosen.values())) == 3


def test_a_tile_holds_the_pixels_of_its_image(three: list[RunFiles]) -> None:
    gallery = three[0].gallery
    assert gallery is not None
    (strip,) = [s for s in strips([three[0]])[0] if s.attack == "decoder"]
    assert strip.strongest
    assert strip.mse == "0.00052"
    worst = strip.tiles[0]
    at = gallery.indices.index(worst.index)
    assert gallery.mse["decoder"][at] == min(gallery.mse["decoder"])
    for address, pixels in (
        (worst.original, gallery.original[at]),
        (worst.made, gallery.reconstructions["decoder"][at]),
    ):
        with Image.open(io.BytesIO(base64.b64decode(address.split(",")[1]))) as image:
            assert np.array_equal(np.asarray(image), pixels[0])


def test_colours_and_large_images_are_encoded(make_run: MakeRun) -> None:
    gallery = make_gallery("veil", (3, LARGEST + 40, LARGEST + 80), n=2)
    (first, *_), _ = strips([make_run("big", gallery=gallery)])
    data = base64.b64decode(first.tiles[0].made.split(",")[1])
    with Image.open(io.BytesIO(data)) as image:
        assert image.mode == "RGB"
        assert max(image.size) == LARGEST
    assert [tile.rank for tile in first.tiles] == ["worst", "best"]


def test_errors_that_were_not_saved_come_from_the_levels(three: list[RunFiles]) -> None:
    gallery = three[1].gallery
    assert gallery is not None
    bare = replace(gallery, mse={"decoder": (float("nan"),) * 8})
    known = gallery.mse["decoder"]
    assert np.allclose(image_errors(bare, "decoder"), known, atol=2e-3)
    assert image_errors(gallery, "decoder") == list(known)


def test_room_goes_to_the_strongest_attacks_first(three: list[RunFiles]) -> None:
    every, none_left = strips(three)
    assert (len(every), none_left) == (6, 0)
    room = sum(strip.size for strip in every if strip.strongest)
    some, left = strips(three, budget=room)
    assert [(s.run, s.attack) for s in some] == [(run.name, "decoder") for run in three]
    assert left == 3
    assert strips(three, budget=0) == ([], 6)
