"""Three synthetic runs with digits-like pictures, one with RGB pictures, and their report."""

from pathlib import Path

import pytest
from made_runs import (
    STRENGTH,
    MakeRun,
    make_gallery,
    make_metrics,
    make_record,
    rich_record,
    write_run,
)

from splitveil.record.files import RunFiles, read_run
from splitveil.report.page import ReportContent, write_report


@pytest.fixture(scope="session")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[RunFiles]:
    """Undefended, gated attention and veil, on the same digits-like images."""
    runs = tmp_path_factory.mktemp("runs")
    return [
        read_run(write_run(runs / d, make_record(d), make_metrics(d), make_gallery(d)))
        for d in STRENGTH
    ]


@pytest.fixture(scope="session")
def written(three: list[RunFiles], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The report on `three`, written into a folder that was not there."""
    return write_report(
        ReportContent(runs=three), tmp_path_factory.mktemp("report") / "new" / "out"
    )


@pytest.fixture(scope="session")
def html(written: list[Path]) -> str:
    """The text of the written page."""
    return written[0].read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def rich(tmp_path_factory: pytest.TempPathFactory) -> list[RunFiles]:
    """Undefended and veil, with everything an audit can say."""
    runs = tmp_path_factory.mktemp("rich")
    return [
        read_run(write_run(runs / d, rich_record(d), make_metrics(d, 6), make_gallery(d)))
        for d in ("none", "veil")
    ]


@pytest.fixture
def rgb(make_run: MakeRun) -> RunFiles:
    """A run on 3×32×32 images, other images than `three`."""
    return make_run("photos", "veil", gallery=make_gallery("veil", (3, 32, 32), first=40, n=6))
