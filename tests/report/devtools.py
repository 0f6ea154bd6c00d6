"""A headless Chromium spoken to over a pipe: the DevTools protocol, without any library."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

Json = dict[str, Any]
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
PATIENCE = 30.0  # seconds


def find_browser() -> str:
    for name in ("/usr/bin/chromium", "chromium", "google-chrome"):
        found = shutil.which(name)
        if found:
            return found
    if os.environ.get("CI") == "true":
        pytest.fail("no Chromium found; CI must have one")
    pytest.skip("no Chromium found; install `chromium` to run this test")


class Tab:
    """One page; `troubles` are console errors, exceptions, refused loads and requests it made."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._buffer, self._last, self._session = b"", 0, ""
        self.troubles: list[str] = []
        self.requests: list[str] = []
        self.events: list[Json] = []

    def call(self, method: str, **params: Any) -> Json:  # noqa: ANN401 - any JSON value
        self._last += 1
        message: Json = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])

    def _receive(self) -> Json:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            if left < 0 or not select.select([self._read], [], [], left)[0]:
                raise TimeoutError("the browser does not answer")
            self._buffer += os.read(self._read, 1 << 16)
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: Json = json.loads(line)
        self._note(message)
        return message

    def _note(self, message: Json) -> None:
        method, params = message.get("method"), message.get("params", {})
        self.events.append(message)
        if method == "Runtime.exceptionThrown":
            self.troubles.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.troubles.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.troubles.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for room in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{room}.enable")

    def open(self, page: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a file in a window of this size, and forget what earlier pages did."""
        self.size(width, height)
        self.scheme(dark=dark)
        self.events.clear()
        self.troubles.clear()
        self.requests.clear()
        self.call("Page.navigate", url=page.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self._receive()

    def size(self, width: int, height: int = 900) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip

    def scheme(self, *, dark: bool) -> None:
        value = "dark" if dark else "light"
        features = [{"name": "prefers-color-scheme", "value": value}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def scripts(self, *, allowed: bool) -> None:
        self.call("Emulation.setScriptExecutionDisabled", value=not allowed)

    def run(self, code: str) -> Any:  # noqa: ANN401 - any JSON value
        """The value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=code, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of an element."""
        x, y = self.run(
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
    program = find_browser()
    there_read, here_write = os.pipe()
    here_read, there_write = os.pipe()
    # Chromium reads from descriptor 3 and writes to 4.
    command = f'exec "$0" "$@" 3<&{there_read} 4>&{there_write}'
    words = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        ["bash", "-c", command, *words],
        pass_fds=(there_read, there_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(there_read)
    os.close(there_write)
    tab = Tab(here_write, here_read)
    try:
        tab.attach()
        yield tab
    finally:
        os.close(here_write)  # the browser ends with its pipe
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(here_read)
