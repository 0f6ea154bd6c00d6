"""axe-core, in a real browser, finds no serious fault on the pages that readers meet."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import read_axe
from report.devtools import Tab, chromium
from serve.browser import Browser, opened
from serve.web import need_runtime, send, served, visit
from short_runs import config

import splitveil as sv
from splitveil.insight.explanation import explain_run
from splitveil.report.page import read_runs, write_report
from splitveil.report.words import Lang
from splitveil.runs import export_run

pytestmark = [pytest.mark.slow, pytest.mark.browser]

VIEWS = {"light": (1280, False), "dark": (1280, True), "phone": (390, False)}
OPEN_ALL = "document.querySelectorAll('details').forEach((d) => { d.open = true; })"


@pytest.fixture(scope="module")
def axe() -> str:
    return read_axe()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, axe: str) -> list[sv.Run]:
    """Undefended and veil on digits, both audited."""
    folder = tmp_path_factory.mktemp("runs")
    made = [sv.fit(config(folder, defence, name=defence)) for defence in ("none", "veil")]
    for run in made:
        sv.audit(run, profile="smoke")
    return made


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with opened(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def exported(runs: list[sv.Run], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of veil, with its attacker."""
    folder = tmp_path_factory.mktemp("exported") / "export"
    export_run(runs[1], folder, attacker=True)
    return folder


def faults(tab: Tab, file: Path, axe: str) -> list[str]:
    """Serious faults of a file as it opens and unfolded, in every view."""
    found = []
    for view, (width, dark) in VIEWS.items():
        tab.open(file, width=width, dark=dark)
        found += [f"{view}: {fault}" for fault in tab.faults(axe)]
        tab.value(OPEN_ALL)
        found += [f"{view}, unfolded: {fault}" for fault in tab.faults(axe)]
    return found


def test_axe_finds_the_fault_of_a_page_that_has_one(tab: Tab, axe: str, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text("<!doctype html><html lang=en><title>t</title><main><img src=x></main></html>")
    assert "alternative text" in " ".join(faults(tab, file, axe))


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_report_has_no_serious_fault(
    tab: Tab, runs: list[sv.Run], axe: str, tmp_path: Path, lang: str
) -> None:
    file, *_ = write_report(read_runs([run.path for run in runs], lang=lang), tmp_path)
    assert faults(tab, file, axe) == []


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_explanation_has_no_serious_fault(
    tab: Tab, runs: list[sv.Run], axe: str, tmp_path: Path, lang: Lang
) -> None:
    (file, *_), _ = explain_run(runs[1].path, tmp_path, lang)
    assert faults(tab, file, axe) == []


def test_the_served_page_has_no_serious_fault(browser: Browser, exported: Path, axe: str) -> None:
    need_runtime()
    found = []
    for view, (width, dark) in VIEWS.items():
        browser.resize(width, 900, dark=dark)
        with served(exported) as (url, _):
            visit(browser, url)
            found += [f"{view}: {fault}" for fault in browser.faults(axe)]
            browser.value("document.getElementById('invert').click()")
            send(browser)
            browser.value(OPEN_ALL)
            found += [f"{view}, answered: {fault}" for fault in browser.faults(axe)]
        with served(exported, token="0123456789abcdef") as (url, _):  # noqa: S106
            browser.visit(url)
            browser.wait("document.getElementById('token-form')?.hidden === false")
            found += [f"{view}, token: {fault}" for fault in browser.faults(axe)]
    assert found == []
