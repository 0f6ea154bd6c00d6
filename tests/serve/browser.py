"""A small driver of headless Chromium: the DevTools protocol over its pipe, without a library."""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
READ, WRITE = 3, 4  # where Chromium expects the pipe
PATIENCE = 30.0


def chromium() -> str:
    for name in ("/usr/bin/chromium", "chromium", "google-chrome"):
        if found := shutil.which(name):
            return found
    if os.environ.get("CI") == "true":
        pytest.fail("no Chromium found; CI must have one")
    pytest.skip("no Chromium found; install `chromium` to run this test")


class Browser:
    """One page of a browser; `events` are what it told without being asked."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._buffer, self._last = write, read, b"", 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + PATIENCE
        while (told := self._next(until)).get("id") != self._last:
            self.events.append(told)
        assert "error" not in told, (method, told["error"])
        found: dict[str, Any] = told["result"]
        return found

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser is silent"
            part = os.read(self._read, 1 << 20)
            assert part, "the browser has gone"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found

    def visit(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=width < 600)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def value(self, expression: str) -> Any:  # noqa: ANN401 - JSON
        """What an expression is in the page; a promise is waited for."""
        told = self.call("Runtime.evaluate", expression=expression, awaitPromise=True,
                         returnByValue=True)  # fmt: skip
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

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

    def screenshot(self, path: Path) -> None:
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[str]:
        """Errors of the console so far."""
        self.value("0")  # what was told before this was asked has arrived
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in (
                "error", "assert",
            ):  # fmt: skip
                found.append(str([a.get("value", a) for a in params["args"]]))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(f"{params['entry']['text']} {params['entry'].get('url')}")
        return found


@contextmanager
def opened(profile: Path) -> Iterator[Browser]:
    """A browser with a fresh profile, ended with the block."""
    program = chromium()
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    # Out of the way of the two numbers that the child's ends must get.
    child = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (to_read, from_write)]
    for fd in (to_read, from_write):
        os.close(fd)
    quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
    pipe = [(os.POSIX_SPAWN_DUP2, child[0], READ), (os.POSIX_SPAWN_DUP2, child[1], WRITE)]
    words = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = os.posix_spawn(program, words, os.environ, file_actions=[*quiet, *pipe])
    for fd in child:
        os.close(fd)
    try:
        yield Browser(to_write, from_read)
    finally:
        os.close(to_write)
        os.close(from_read)
        os.kill(process, signal.SIGTERM)
        os.waitpid(process, 0)
