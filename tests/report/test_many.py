"""A report from fifty runs: every run has its row, and the page stays small enough to mail."""

import json

import numpy as np
import pytest
from made_runs import STRENGTH, encode, make_metrics, make_record, write_run

from splitveil.report.deck import render_deck
from splitveil.report.page import MANY_ROWS, ReportContent, read_runs, render

from .markup import Page

RUNS, LOGGED, LIMIT = 50, 24, 15_000_000  # bytes
NAMES = ("nearest", "linear", "decoder", "decoder-large", "rmle", "gan")


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> ReportContent:
    """Fifty runs on 32×32 noise, which no PNG can press, attacked by six."""
    place, rng = tmp_path_factory.mktemp("many"), np.random.default_rng(0)
    shape = (2, 3, 32, 32)
    original = encode(rng.random(shape))
    paths = []
    for at in range(RUNS):
        defence = list(STRENGTH)[at % 3]
        record = make_record(defence, seed=at)
        record["accuracy"] -= 1e-4 * at
        record["attacks"] = {n: {"mse": 0.01 + 0.001 * i} for i, n in enumerate(NAMES)}
        gallery = {
            "image_shape": list(shape[1:]),
            "indices": list(range(2)),
            "labels": list(range(2)),
            "answers": list(range(2)),
            "original": original,
            "reconstructions": {name: encode(rng.random(shape)) for name in NAMES},
        }
        log = make_metrics(defence, 3) if at < LOGGED else None
        folder = write_run(place / f"run{at}", record, log, None)
        (folder / "gallery.json").write_text(json.dumps(gallery))
        paths.append(folder)
    return read_runs(paths)


@pytest.fixture(scope="module")
def page(content: ReportContent) -> str:
    return render(content)


def test_page_and_deck_stay_small_enough_to_mail(content: ReportContent, page: str) -> None:
    assert 1_000_000 < len(page.encode()) < LIMIT
    assert len(render_deck(content)) < LIMIT / 2


def test_every_run_has_its_row_and_the_best_stand_first(page: str) -> None:
    read = Page(page)
    names = {row[0] for row in read.rows if len(row) == 14}
    assert names == {"Run", *(f"run{at}" for at in range(RUNS))}
    shown = [attributes for _, attributes in read.tags if attributes.get("role") == "rowheader"]
    assert 1 <= len(shown) <= MANY_ROWS
    assert f"the summary lists all {RUNS}" in read.flat


def test_what_found_no_room_is_counted(page: str) -> None:
    read = Page(page)
    strips = sum("strip" in str(a.get("class")).split() for _, a in read.tags)
    strongest = sum("best-attack" in str(a.get("class")).split() for _, a in read.tags)
    assert strongest == RUNS
    assert f"sliders of {RUNS * len(NAMES) - strips} attacks are left out" in read.flat


def test_curves_of_many_runs_share_pictures_by_defence(content: ReportContent) -> None:
    curves = sorted(picture.stem for picture in content.pictures.curves)
    stems = [f"curves-{defence}" for defence in STRENGTH]  # eight runs each, seven to a picture
    assert curves == sorted([*stems, *(f"{stem}-again1" for stem in stems)])
