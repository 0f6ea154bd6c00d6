"""What a reader does with a page: opens the file, clicks, presses keys, prints."""

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chromium import Page, started


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
