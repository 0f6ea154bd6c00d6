"""What a visitor does with the server's page: looks, draws, types, chooses a file."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chromium import PATIENCE, Page, started


class Browser(Page):
    """A page of a server."""

    def visit(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        self.size(width, height, mobile=width < 600)
        self.scheme(dark=dark)

    def wait(self, expression: str) -> None:
        until = time.monotonic() + PATIENCE
        while not self.value(expression):
            assert time.monotonic() < until, (expression, self.value("document.body.innerText"))
            time.sleep(0.02)

    def choose(self, selector: str, file: Path) -> None:
        """Give a file to an input, as a user does."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(file)])

    def mouse(self, kind: str, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1)

    def key(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **text)

    def complaints(self) -> list[str]:
        """Errors of the console so far."""
        return self.troubles(("error",))


@contextmanager
def opened(profile: Path) -> Iterator[Browser]:
    """A browser with a fresh profile, ended with the block."""
    with started(profile) as pipe:
        yield Browser(*pipe)
