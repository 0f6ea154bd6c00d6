"""What a reader does with a page: opens the file, clicks, presses keys, prints."""

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chromium import Page, started

# Every visible text with too little contrast to its paper, and how many texts there are.
CONTRAST = """(() => {
  const rgba = (text) => {
    const v = text.match(/[\\d.]+/g).map(Number);
    return v.length > 3 ? v : [...v, 1];
  };
  const over = (a, b) => a.slice(0, 3).map((v, i) => v * a[3] + b[i] * (1 - a[3]));
  const linear = (v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = (c) => {
    const [r, g, b] = c.map((v) => linear(v / 255));
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const paper = (e) => {
    const found = [];
    for (; e; e = e.parentElement) {
      found.push(rgba(getComputedStyle(e).backgroundColor));
      if (found.at(-1)[3] === 1) break;
    }
    return found.reverse().reduce((under, c) => over(c, under), [255, 255, 255]);
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const bad = [];
  let seen = 0;
  while (walker.nextNode()) {
    const node = walker.currentNode, e = node.parentElement, text = node.data.trim();
    if (!text || ["SCRIPT", "STYLE"].includes(e.tagName) || !e.checkVisibility()) continue;
    const below = paper(e), ink = over(rgba(getComputedStyle(e).color), below);
    const [a, b] = [light(ink), light(below)].sort((x, y) => y - x);
    const ratio = (a + .05) / (b + .05);
    seen += 1;
    if (ratio < 4.5) bad.push([text.slice(0, 30), ratio]);
  }
  return [seen, bad];
})()"""
# Everything that is wider than the window.
WIDER = """[...document.querySelectorAll("body *")].filter((e) => {
  for (let p = e.parentElement; p; p = p.parentElement) {
    if (["auto", "hidden"].includes(getComputedStyle(p).overflowX)) return false;
  }
  return e.getBoundingClientRect().right > innerWidth + 1;
}).map((e) => e.className || e.tagName)"""


class Tab(Page):
    """A tab that opens files."""

    def open(self, page: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a file in a window of this size, and forget what earlier pages did."""
        self.size(width, height)
        self.scheme(dark=dark)
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri())
        self.expect("Page.loadEventFired")

    @property
    def requests(self) -> list[str]:
        """Addresses the page asked for."""
        told = [e for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in told]

    def complaints(self) -> list[str]:
        return self.troubles(("error", "warning"))

    def scripts(self, *, allowed: bool) -> None:
        self.call("Emulation.setScriptExecutionDisabled", value=not allowed)

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of an element."""
        x, y = self.value(
            f"(() => {{ const e = document.querySelector({selector!r}); "
            "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect(); "
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code
            )

    def screenshot(self, *, whole: bool = False) -> bytes:
        found = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        return base64.b64decode(found["data"])

    def pdf(self) -> bytes:
        found = self.call("Page.printToPDF", preferCSSPageSize=True, printBackground=True)
        return base64.b64decode(found["data"])


@contextmanager
def chromium(profile: Path) -> Iterator[Tab]:
    """A browser with one empty tab."""
    with started(profile) as pipe:
        yield Tab(*pipe)
