"""Photograph the pages as readers meet them: light, dark, on a phone, in Chinese.

For each group of runs the report of all of them, for each run given by `--explain` the page that
`splitveil explain` writes, and every address given by `--url`, such as that of `splitveil serve`.
With `--axe` the accessibility checker axe-core, which `make web` fetches, looks at each page, and
the exit code is 1 if it finds a serious fault. `--picture` also writes the table of the first
report; README shows it of the demo's own run.

Example: `python scripts/screenshots.py --runs runs/demo/* --explain runs/demo/veil --out shots`
"""

import argparse
import base64
import io
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from splitveil.insight.explanation import explain_run
from splitveil.report.page import read_runs, write_report
from splitveil.report.words import LANGS

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from chromium import AXE
from report.devtools import Tab, chromium

# A served page is shown when its network is loaded, a file at once.
SHOWN = """new Promise((done) => { const look = () => document.body.dataset.runtime !== "here"
  || document.body.dataset.state === "ready" ? done(true) : setTimeout(look, 50); look(); })"""
VIEWS = {  # width, height, dark, phone
    "light": (1280, 900, False, False),
    "dark": (1280, 900, True, False),
    "phone": (390, 844, False, True),
}


def pages(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, str]]:
    """Name and address of each page; those of runs are written into a folder."""
    for at, runs in enumerate(args.runs):
        for lang in LANGS:
            target = folder / f"report{at}-{lang}"
            write_report(read_runs(runs, lang=lang), target)
            yield target.name, (target / "report.html").as_uri()
    for run in args.explain:
        for lang in LANGS:
            (page, *_), _ = explain_run(run, folder / f"explain-{run.name}-{lang}", lang)
            yield f"explain-{run.name}-{lang}", page.resolve().as_uri()
    for at, url in enumerate(args.url):
        yield f"url{at}", url


def photograph(tab: Tab, url: str, view: tuple[int, int, bool, bool]) -> tuple[bytes, bytes]:
    """The first screen and the whole page, as PNG."""
    width, height, dark, phone = view
    tab.size(width, height, mobile=phone)
    tab.scheme(dark=dark)
    tab.events.clear()
    tab.call("Page.navigate", url=url)
    tab.expect("Page.loadEventFired")
    tab.value(SHOWN)
    first = tab.screenshot()
    tab.value("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    tall = int(tab.value("document.documentElement.scrollHeight"))
    clip = {"x": 0, "y": 0, "width": width, "height": min(tall, 9000), "scale": 1}
    found = tab.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
    return first, base64.b64decode(found["data"])


def table_of(tab: Tab, url: str) -> bytes:
    """The table of a report's first screen in light colours, as PNG with few colours."""
    photograph(tab, url, VIEWS["light"])
    box = tab.value("(({x, y, width, height}) => ({x, y, width, height}))"
                    "(document.querySelector('.front').getBoundingClientRect())")  # fmt: skip
    clip = {**box, "scale": 1}
    found = tab.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
    with Image.open(io.BytesIO(base64.b64decode(found["data"]))) as image:
        small = image.convert("RGB").quantize(128, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    small.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def main() -> None:
    """Write the pictures, and say what axe-core found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, nargs="+", action="append", default=[])
    parser.add_argument("--explain", type=Path, action="append", default=[])
    parser.add_argument("--url", action="append", default=[])
    parser.add_argument("--axe", action="store_true", help="Look for faults of accessibility.")
    parser.add_argument("--picture", type=Path, help="Write the table of the first report.")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    axe = AXE.read_text(encoding="utf-8") if args.axe else None
    serious = 0
    with tempfile.TemporaryDirectory() as place, chromium(Path(place) / "profile") as tab:
        for name, url in pages(args, Path(place)):
            for view, how in VIEWS.items():
                for part, png in zip(("first", "whole"), photograph(tab, url, how), strict=True):
                    (args.out / f"{name}-{view}-{part}.png").write_bytes(png)
                for fault in tab.faults(axe) if axe is not None else []:
                    serious += 1
                    print(f"{name} {view}: {fault}")
            print(f"{name}: {args.out}/{name}-*.png")
            if args.picture is not None and name == "report0-en":
                args.picture.write_bytes(table_of(tab, url))
    sys.exit(1 if serious else 0)


if __name__ == "__main__":
    main()
