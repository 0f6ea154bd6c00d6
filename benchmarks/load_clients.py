"""Clients for load tests on this machine: senders that cost little, and strangers of every kind.

python benchmarks/load_clients.py URL PATH PAGE SECONDS starts the strangers: some connect and say
nothing, some send their headers or their body a byte at a time, some ask for a file and never read
it, some send nonsense. Their number and their time are bounded, and they visit 127.0.0.1 only.
"""

import asyncio
import os
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urlsplit

import numpy as np

from splitveil.serve.wire import Message

LOOPBACK = "127.0.0.1"
MOST_SECONDS = 900.0
SILENT, SLOW_HEADERS, SLOW_BODIES, NEVER_READING = 300, 60, 60, 40
NONSENSE_PER_SECOND = 40
COME_BACK = 2.0  # seconds after a stranger's connection was closed
NUMBERS = {
    "silent": SILENT,
    "slow headers": SLOW_HEADERS,
    "slow bodies": SLOW_BODIES,
    "never reading": NEVER_READING,
    "nonsense per second": NONSENSE_PER_SECOND,
}
OK = 200


@dataclass
class Tally:
    """What came back: seconds of every answer with logits, how often each status or fault."""

    seconds: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Tally") -> None:
        """Count another's answers too."""
        self.seconds += other.seconds
        self.statuses += other.statuses

    def spread(self) -> dict[str, float]:
        """Median and 99th percentile in milliseconds, and of how many."""
        p50, p99 = (
            round(1000 * float(np.percentile(self.seconds or [0.0], q)), 2) for q in (50, 99)
        )
        return {"p50_ms": p50, "p99_ms": p99, "requests": len(self.seconds)}


def place(url: str) -> tuple[str, int]:
    """Host and port of a server on this machine; refuses any other."""
    parts = urlsplit(url)
    if parts.hostname != LOOPBACK or parts.port is None:
        raise SystemExit(f"load tests visit {LOOPBACK} only, got {url}")
    return parts.hostname, parts.port


def http_request(path: str, message: Message) -> bytes:
    """The bytes of an infer call."""
    lines = [f"POST {path} HTTP/1.1", "Host: load", f"Content-Length: {len(message.body)}"]
    lines += [f"{name}: {value}" for name, value in message.headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("ascii") + message.body


class Sender(asyncio.Protocol):
    """Sends the same request again and again; with a rate, at fixed times, else when answered."""

    def __init__(self, request: bytes, until: float, tally: Tally, rate: float | None) -> None:
        self._request, self._until, self._tally, self._rate = request, until, tally, rate
        self._received = b""
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self._loop.create_future()
        self._due = self._began = time.perf_counter()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - of a TCP connection
        self._transport = transport
        self._send()

    def _send(self) -> None:
        if time.perf_counter() > self._until:
            self._transport.close()
            return
        # An answer that is late makes the next one late too: its time counts from when it was due.
        self._began = self._due if self._rate is not None else time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count an answer when it is whole, and send the next."""
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self._received[:end].lower()
        at = head.index(b"\r\ncontent-length:") + len(b"\r\ncontent-length:")
        size = end + 4 + int(head[at:].split(b"\r\n", 1)[0])
        if len(self._received) < size:
            return
        status = int(head[9:12])
        self._received = self._received[size:]
        now = time.perf_counter()
        self._tally.statuses[str(status)] += 1
        if status == OK:
            self._tally.seconds.append(now - self._began)
        if self._rate is None:
            self._send()
            return
        self._due = max(self._due + 1 / self._rate, now - 1)
        self._loop.call_later(max(0.0, self._due - now), self._send)

    def connection_lost(self, exc: Exception | None) -> None:
        """The end, or a fault when it came early."""
        if time.perf_counter() < self._until:
            self._tally.statuses[type(exc).__name__ if exc else "closed"] += 1
        if not self.done.done():
            self.done.set_result(None)


def _given(sender: Sender) -> Sender:
    return sender


async def _flood(url: str, request: bytes, seconds: float, rates: list[float | None]) -> Tally:
    loop, tally = asyncio.get_running_loop(), Tally()
    until = time.perf_counter() + min(seconds, MOST_SECONDS)
    senders = []
    for rate in rates:
        sender = Sender(request, until, tally, rate)
        await loop.create_connection(partial(_given, sender), *place(url))
        senders.append(sender)
        if rate is not None:
            await asyncio.sleep(1 / rate / len(rates))  # not all at the same moment
    await asyncio.gather(*(sender.done for sender in senders))
    return tally


def flood(url: str, request: bytes, seconds: float, rates: list[float | None]) -> Tally:
    """One sender per rate in requests/s; None sends the next when the last is answered."""
    return asyncio.run(_flood(url, request, seconds, rates))


async def _stranger(url: str, until: float, first: bytes, drip: bytes, *, read: bool) -> None:
    """Connect, say `first`, then `drip` now and then; again when closed."""
    await asyncio.sleep(COME_BACK * random.random())  # noqa: S311 - no secret
    while time.perf_counter() < until:
        try:
            reader, writer = await asyncio.open_connection(*place(url), limit=1024)
            if not read:
                writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(first)
            while time.perf_counter() < until and not writer.is_closing():
                writer.write(drip)
                try:
                    async with asyncio.timeout(1.0):
                        if read and not await reader.read(1024):
                            break
                        await asyncio.sleep(0 if read else 1.0)
                except TimeoutError:
                    continue
            writer.close()
        except OSError:
            pass
        await asyncio.sleep(COME_BACK)


async def _nonsense(url: str, until: float) -> None:
    """Malformed requests, each over its own connection."""
    draw = random.Random(0)  # noqa: S311 - no secret
    while time.perf_counter() < until:
        junk = draw.choice(
            (
                draw.randbytes(200),
                b"GET / HTTP/9.9\r\n\r\n",
                b"GET /v2/models/x/infer HTTP/1.1\r\nX: " + b"y" * 40_000 + b"\r\n\r\n",
                b"POST /v2/repository/index HTTP/1.1\r\nContent-Length: 5\r\n\r\n{{{{{",
                b"POST /v2/x HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
                b"\x16\x03\x01\x02\x00\x01",
            )
        )
        try:
            _, writer = await asyncio.open_connection(*place(url))
            writer.write(junk)
            await asyncio.sleep(0.01)
            writer.close()
        except OSError:
            pass
        await asyncio.sleep(1 / NONSENSE_PER_SECOND)


async def _strangers(url: str, path: str, page: str, seconds: float) -> None:
    until = time.perf_counter() + min(seconds, MOST_SECONDS)
    post = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 2000\r\n\r\n".encode("ascii")
    get = f"GET {page} HTTP/1.1\r\nHost: x\r\n\r\n".encode("ascii") * 20
    kinds = (
        (SILENT, b"", b"", True),
        (SLOW_HEADERS, b"GET /v2 HTTP/1.1\r\nX: ", b"x", True),
        (SLOW_BODIES, post, b"x", True),
        (NEVER_READING, get, b"", False),
    )
    visits = [
        _stranger(url, until, first, drip, read=read)
        for count, first, drip, read in kinds
        for _ in range(count)
    ]
    await asyncio.gather(_nonsense(url, until), *visits)


def main() -> None:
    """Be the strangers."""
    url, path, page, seconds = sys.argv[1:]
    place(url)
    os.nice(19)  # strangers use processors of their own
    asyncio.run(_strangers(url, path, page, float(seconds)))


if __name__ == "__main__":
    main()
