"""A headless Chromium spoken to over a pipe: the DevTools protocol, without any library."""

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
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
PATIENCE = 30.0  # seconds
AXE = Path(__file__).parents[1] / "web" / "axe.min.js"
SERIOUS = ("serious", "critical")
ASK_AXE = "axe.run(document, {resultTypes: ['violations']}).then((found) => found.violations)"


def find_browser() -> str:
    for name in ("/usr/bin/chromium", "chromium", "google-chrome"):
        if found := shutil.which(name):
            return found
    if os.environ.get("CI") == "true":
        pytest.fail("no Chromium found; CI must have one")
    pytest.skip("no Chromium found; install `chromium` to run this test")


def read_axe() -> str:
    """The accessibility checker axe-core, which `make web` fetches."""
    if not AXE.is_file():
        if os.environ.get("CI") == "true":
            pytest.fail("axe-core is not here; CI must run `make web` first")
        pytest.skip("axe-core is not here; run `make web` for this test")
    return AXE.read_text(encoding="utf-8")


class Page:
    """One page of a browser; `events` are what it told without being asked."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._buffer, self._last = write, read, b"", 0
        self._session: str | None = None
        self.events: list[Json] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Json:  # noqa: ANN401 - JSON
        self._last += 1
        message: Json = {"id": self._last, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + PATIENCE
        while (told := self._next(until)).get("id") != self._last:
            self.events.append(told)
        assert "error" not in told, (method, told["error"])
        found: Json = told["result"]
        return found

    def _next(self, until: float) -> Json:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser is silent"
            part = os.read(self._read, 1 << 20)
            assert part, "the browser has gone"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        found: Json = json.loads(line)
        return found

    def expect(self, method: str) -> None:
        """Wait until the browser has told of an event."""
        until = time.monotonic() + PATIENCE
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._next(until))

    def value(self, expression: str) -> Any:  # noqa: ANN401 - JSON
        """What an expression is in the page; a promise is waited for."""
        told = self.call("Runtime.evaluate", expression=expression, awaitPromise=True,
                         returnByValue=True)  # fmt: skip
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def faults(self, axe: str) -> list[str]:
        """What axe-core calls serious or critical on the page, each with where it is."""
        self.value(axe + "; 0")
        return [
            f"{found['impact']}: {found['help']}: {[node['target'] for node in found['nodes'][:3]]}"
            for found in self.value(ASK_AXE)
            if found["impact"] in SERIOUS
        ]

    def size(self, width: int, height: int, *, mobile: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=mobile)  # fmt: skip

    def scheme(self, *, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def troubles(self, levels: tuple[str, ...]) -> list[str]:
        """Exceptions, and what the console and the log said at these levels, so far."""
        self.value("0")  # what was told before this was asked has arrived
        found = []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and params["type"] in (*levels, "assert"):
                found.append(str([a.get("value", a) for a in params["args"]]))
            elif method == "Log.entryAdded" and params["entry"]["level"] in levels:
                found.append(f"{params['entry']['text']} {params['entry'].get('url')}")
        return found


@contextmanager
def started(profile: Path) -> Iterator[tuple[int, int]]:
    """A browser with a fresh profile: where to write to it, and where to read."""
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
    try:
        yield here_write, here_read
    finally:
        os.close(here_write)  # the browser ends with its pipe
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(here_read)
