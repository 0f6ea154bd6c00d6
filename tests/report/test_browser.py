"""The page in a real browser: what a reader sees, hears and can do."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from splitveil.record.files import RunFiles
from splitveil.report.page import ReportContent, write_report

from .devtools import CONTRAST, WIDER, Tab, chromium

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def folders(rich: list[RunFiles], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The report in both languages, with a folder left out."""
    place = tmp_path_factory.mktemp("report")
    skipped = [('runs/<b>"x"', "no run folder")]
    for lang in ("en", "zh"):
        content = ReportContent(runs=rich, lang=lang, skipped=skipped)
        write_report(content, place / lang)
    return {lang: place / lang for lang in ("en", "zh")}


@pytest.fixture(params=["en", "zh"])
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


def pixels(shot: bytes) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(shot)) as image:
        return np.asarray(image.convert("RGB"))


def theme(tab: Tab) -> Any:  # noqa: ANN401
    return tab.value("getComputedStyle(document.body).backgroundColor")


def test_it_opens_from_disk_without_errors_or_requests(tab: Tab, folder: Path) -> None:
    tab.open(folder / "report.html")
    assert tab.value("document.images.length") > 5
    broken = "[...document.images].filter((i) => i.src && !i.naturalWidth).length"
    assert tab.value(broken) == 0
    assert tab.complaints() == []
    assert [url[:5] for url in tab.requests if not url.startswith("data:")] == ["file:"]


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_window(tab: Tab, folder: Path, width: int) -> None:
    tab.open(folder / "report.html", width=width)
    assert tab.value("document.documentElement.scrollWidth") <= width
    assert tab.value(WIDER) == []


@pytest.mark.parametrize("dark", [False, True])
def test_every_text_stands_out_from_its_paper(
    tab: Tab, folders: dict[str, Path], dark: bool
) -> None:
    tab.open(folders["en"] / "report.html", dark=dark)
    tab.value("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    seen, bad = tab.value(CONTRAST)
    assert seen > 60
    assert bad == []


def test_the_theme_switches_and_is_remembered(tab: Tab, folders: dict[str, Path]) -> None:
    page = folders["en"] / "report.html"
    tab.open(page)
    tab.value("localStorage.clear()")
    tab.open(page)
    light = theme(tab)
    tab.scheme(dark=True)
    dark = theme(tab)
    assert light != dark
    tab.click("#theme")
    assert theme(tab) == light
    tab.click("#theme")
    tab.scheme(dark=False)
    assert theme(tab) == dark
    tab.open(page)
    assert theme(tab) == dark
    assert tab.value("document.getElementById('theme').getAttribute('aria-pressed')") == "true"
    tab.value("localStorage.clear()")


def test_the_slider_lays_the_original_over_the_reconstruction(
    tab: Tab, folders: dict[str, Path]
) -> None:
    tab.open(folders["en"] / "report.html")
    tab.value("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    tab.value("document.querySelector('.tile').scrollIntoView({block: 'center'})")

    def shown() -> NDArray[np.int64]:
        left, top, right, bottom = tab.value(
            "(() => { const r = document.querySelector('.pair').getBoundingClientRect();"
            " return [r.x, r.y, r.right, r.bottom].map(Math.round); })()"
        )
        view = pixels(tab.screenshot())[top + 2 : bottom - 2, left + 4 : right - 4]
        return view.astype(np.int64)

    def push(key: str, code: int) -> NDArray[np.int64]:
        tab.value("document.querySelector('.tile input').focus()")
        tab.press(key, code)
        return shown()

    made, original = push("Home", 36), push("End", 35)
    assert np.abs(made - original).mean() > 1
    tab.click(".tile input")
    assert tab.value("document.querySelector('.tile input').value") == "50"
    half, middle = shown(), made.shape[1] // 2
    assert (half[:, : middle - 4] == original[:, : middle - 4]).all()
    assert (half[:, middle + 4 :] == made[:, middle + 4 :]).all()


FRONT = """(() => [...document.querySelectorAll('.verdict, .front tr, .look img, .legend')].map(
  (e) => { const r = e.getBoundingClientRect(); return [r.width, r.bottom, e.className]; }))()"""


@pytest.mark.parametrize("dark", [False, True])
def test_the_first_screen_is_the_sentence_and_the_table(tab: Tab, folder: Path, dark: bool) -> None:
    tab.open(folder / "report.html", dark=dark)
    shown = tab.value(FRONT)
    assert len(shown) == 1 + 3 + 3 * 6 + 1
    assert max(bottom for _, bottom, _ in shown) <= 900
    images = tab.value(
        "[...document.querySelectorAll('.look img')].map((i) => [i.width, i.height])"
    )
    assert all(min(size) >= 72 for size in images)
    assert tab.value("document.querySelectorAll('details[open]').length") == 0


def test_a_focused_picture_is_enlarged_beside_its_original(
    tab: Tab, folders: dict[str, Path]
) -> None:
    tab.open(folders["en"] / "report.html")
    assert tab.value("getComputedStyle(document.getElementById('lens')).display") == "none"
    tab.value(
        "document.querySelectorAll('.front tbody tr')[1].cells[3].querySelector('button').focus()"
    )
    widths = (
        "[...document.querySelectorAll('#lens img')].map((i) => i.getBoundingClientRect().width)"
    )
    assert min(tab.value(widths)) > 200
    there = "document.querySelectorAll('.front {} tr')[{}].cells[3].querySelector('img').src"
    same = "document.querySelectorAll('#lens img')[{}].src === "
    assert tab.value(same.format(0) + there.format("thead", 0))
    assert tab.value(same.format(1) + there.format("tbody", 1))
    tab.press("Escape", 27)
    assert tab.value("document.getElementById('lens').hidden")


def test_without_a_script_everything_is_there(tab: Tab, folders: dict[str, Path]) -> None:
    tab.scripts(allowed=False)
    try:
        tab.open(folders["en"] / "report.html")
        tab.value("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        hidden = "[...document.images].filter((i) => !i.getBoundingClientRect().width).length"
        assert tab.value(hidden) == 0
        assert tab.value("getComputedStyle(document.getElementById('theme')).display") == "none"
        sides = (
            "[...document.querySelector('.pair').children].map((i) => i.getBoundingClientRect().x)"
        )
        made, original = tab.value(sides)
        assert original < made  # side by side
    finally:
        tab.scripts(allowed=True)


def test_a_foreign_script_cannot_run(tab: Tab, folders: dict[str, Path], tmp_path: Path) -> None:
    html = (folders["en"] / "report.html").read_text(encoding="utf-8")
    page = tmp_path / "tampered.html"
    page.write_text(html.replace("</main>", "<script>window.hacked = 1</script></main>"))
    tab.open(page)
    assert tab.value("window.hacked") is None
    assert any("Content Security Policy" in trouble for trouble in tab.complaints())


def test_the_printed_page_is_light_and_opens_its_passports(
    tab: Tab, folders: dict[str, Path]
) -> None:
    tab.open(folders["en"] / "report.html", dark=True)
    tab.call("Emulation.setEmulatedMedia", media="print")
    try:
        assert theme(tab) == "rgb(255, 255, 255)"
        assert tab.value(CONTRAST)[1] == []
        tab.size(688, 900)  # A4 less its margins
        tab.value("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        assert tab.value(WIDER) == []
        assert tab.value("document.documentElement.scrollHeight") < 12_000
    finally:
        tab.call("Emulation.setEmulatedMedia", media="")
    tab.open(folders["en"] / "report.html")
    tab.value("dispatchEvent(new Event('beforeprint'))")
    assert tab.value("document.querySelectorAll('details:not([open])').length") == 0
    tab.value("dispatchEvent(new Event('afterprint'))")
    assert tab.value("document.querySelectorAll('.passport[open]').length") == 0
