"""The server's connections: how many there may be, and how long a stranger may keep one waiting.

All of it happens before a token is asked for. When there is no room for another connection, the one
that has kept the server waiting longest is closed: a silent stranger, an idle browser, a slow
sender, somebody who does not read. A connection whose request the server works on is never closed
for another.
"""

import asyncio
import errno
import json
import logging
import socket
import ssl
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from ipaddress import ip_network
from itertools import chain
from typing import Any, cast

import uvicorn
from uvicorn.config import STARTUP_FAILURE
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from splitveil.errors import ConfigError

LOG = logging.getLogger(__name__)
SPARE_FILES = 128  # descriptors for everything but connections
AT_ONCE = 16  # connections accepted before others are served
TLS_GREETING = 0x16  # first byte of a TLS handshake
LINGER = 0.25  # seconds in which a request may arrive that was sent before the server stopped
FULL_PAUSE = 0.05  # seconds, when the system has no descriptor left
HEADERS, IDLE, BODY, ANSWER, SEND = "headers", "idle", "body", "answer", "send"
FULL, DISPLACED, LARGE, MALFORMED, PLAIN = (
    "full",
    "displaced",
    "large headers",
    "malformed",
    "plain",
)
ENDINGS = {  # why a connection was refused or closed; the words are for the log
    FULL: "there was no room",
    DISPLACED: "another one needed its place",
    HEADERS: "its headers or its TLS handshake were late",
    IDLE: "no further request came",
    BODY: "its body was late",
    SEND: "it did not read its answer",
    LARGE: "its headers were too large",
    MALFORMED: "it was not HTTP/1.1",
    PLAIN: "it spoke no TLS",
}
RESET = struct.pack("ii", 1, 0)  # SO_LINGER of no time: the other side gets a reset
USES_TLS = "this port speaks TLS; use an https:// address"


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """How many connections there may be, and how long each may keep the server waiting.

    Args:
        total: Connections at once, ≥ 1.
        per_address: Connections of one address at once, ≥ 1; behind a proxy, give `total`.
        header_bytes: Bytes of a request's line and headers, ≥ 256; beyond, 431.
        header_seconds: Seconds for TLS and for the headers, from the first byte, > 0.
        idle_seconds: Seconds between two requests, > 0.
        body_seconds: Seconds in which the rest of a body may arrive that nobody reads, > 0.
        send_seconds: Seconds without progress while an answer is sent, > 0.

    >>> ConnectionLimits().total
    1024
    """

    total: int = 1024
    per_address: int = 256
    header_bytes: int = 16_384
    header_seconds: float = 10.0
    idle_seconds: float = 30.0
    body_seconds: float = 15.0
    send_seconds: float = 10.0

    def __post_init__(self) -> None:
        least = {"total": 1, "per_address": 1, "header_bytes": 256}
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            if not value >= least.get(name, 0.01):
                raise ConfigError(f"{name} must be ≥ {least.get(name, 0.01)}, got {value}")

    def seconds(self, waits_for: str) -> float:
        """How long the server waits for headers, the next request, a body or a reader."""
        return {
            HEADERS: self.header_seconds,
            IDLE: self.idle_seconds,
            BODY: self.body_seconds,
            SEND: self.send_seconds,
        }.get(waits_for, float("inf"))


class Connection(HttpToolsProtocol):
    """One connection, which knows what the server waits for and since when."""

    def __init__(self, room: "Room", address: str, **uvicorns: Any) -> None:  # noqa: ANN401
        super().__init__(**uvicorns)
        self.room, self.address = room, address
        self.since = time.monotonic()
        self.greeting: asyncio.Task[None] | None = None  # until there is a transport
        self.answered = 0
        self._begun = False  # whether bytes of the next request have arrived
        self._head = self._parsed = 0  # bytes of its headers, as they came and as they were read
        self._leaving = self._closing = False
        self.ended = False  # whether it was told why the server ends it

    @property
    def waits_for(self) -> str:
        """What keeps it open: the client's headers, next request, body or reading; or an answer."""
        if self.transport is None:
            return HEADERS
        if self.transport.is_closing() or self.flow.write_paused:
            return SEND
        if self.cycle is None or (self.cycle.response_complete and not self.cycle.more_body):
            return HEADERS if self._begun or not self.answered else IDLE
        return BODY if self.cycle.more_body else ANSWER

    def _now(self) -> None:
        self.since = time.monotonic()
        self.room.touch(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count it from now on."""
        super().connection_made(cast(asyncio.Transport, transport))
        self._now()
        if self.room.stopping:
            self.shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        """Make room."""
        super().connection_lost(exc)
        self.room.leave(self)

    def data_received(self, data: bytes) -> None:
        """Feed the parser; refuse headers that are too large."""
        if self.transport.is_closing() or self._closing:
            return
        if not self._begun and self.waits_for in (IDLE, HEADERS):
            self._begun, self._head = True, 0
            self._now()
        if self._begun:
            self._head += len(data)
        super().data_received(data)
        if self._begun and self._head > self.room.limits.header_bytes:
            self.refuse(431, "the headers are too large", LARGE)

    def on_message_begin(self) -> None:
        """A request begins, maybe behind another in the same piece."""
        super().on_message_begin()
        self._parsed = 0

    def on_url(self, url: bytes) -> None:
        """Part of the request's line."""
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        super().on_header(name, value)
        self._count(len(name) + len(value) + 4)

    def _count(self, size: int) -> None:
        self._parsed += size
        if self._parsed > self.room.limits.header_bytes:
            self.refuse(431, "the headers are too large", LARGE)
            raise ValueError("headers too large")  # ends the parser's work on this piece

    def on_headers_complete(self) -> None:
        """The request goes to the application."""
        super().on_headers_complete()
        self._begun = False
        self._now()
        if self._leaving and self.cycle is not None:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        """The body is there."""
        super().on_message_complete()
        if self.cycle is not None:
            self.cycle.more_body = False
        self._now()

    def on_response_complete(self) -> None:
        """The answer is on its way."""
        self.answered += 1
        self._now()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client does not read as fast as the server writes."""
        super().pause_writing()
        self._now()

    def resume_writing(self) -> None:
        """It has read."""
        super().resume_writing()
        self._now()

    def send_400_response(self, msg: str) -> None:
        """What the parser refuses."""
        self.refuse(400, "this is not HTTP/1.1", MALFORMED)

    def refuse(self, status: int, reason: str, ending: str) -> None:
        """Answer for the application, if it has not begun to, and close."""
        if self.transport.is_closing():
            return
        self.room.end(self, ending)
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(plain_answer(status, reason))
        self.transport.close()

    def late(self) -> None:
        """The server has waited long enough."""
        waits_for = self.waits_for
        if waits_for == HEADERS and self._begun and self.transport is not None:
            limit = self.room.limits.header_seconds
            self.refuse(408, f"the headers did not arrive within {limit:g} s", HEADERS)
            return
        self.room.end(self, waits_for)
        if waits_for == IDLE:
            self.transport.close()
        else:
            self.abort()

    def abort(self) -> None:
        """Close it whatever the client does; the system forgets what was not read."""
        if self.greeting is not None:
            self.greeting.cancel()
        if self.transport is None:
            self.room.leave(self)
        else:
            self.transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, RESET
            )
            self.transport.abort()

    def closing_since(self) -> None:
        """The time for the last bytes of a closed connection starts once."""
        if self.transport is not None and self.transport.is_closing() and not self._closing:
            self._closing = True
            self._now()

    def shutdown(self) -> None:
        """The server stops: the next answer is the last; without a request, close now."""
        self._leaving = True
        busy = self.cycle is not None and not self.cycle.response_complete
        if busy:
            self.cycle.keep_alive = False
        else:
            self.loop.call_later(LINGER, self._say_goodbye)

    def _say_goodbye(self) -> None:
        """Close the writing half first, so that what is still on its way resets nothing."""
        if self.transport.is_closing() or self.waits_for not in (IDLE, HEADERS):
            return
        if self.transport.can_write_eof():
            self._closing = True  # what arrives now is not read as a request
            self.transport.write_eof()
            self.loop.call_later(LINGER, self.transport.close)
        else:
            self.transport.close()


class Room:
    """All connections, and which one is closed when there is no room for another."""

    def __init__(self, limits: ConnectionLimits, count: Callable[[str], None]) -> None:
        self.limits, self.total, self._count = limits, usable(limits.total), count
        # Those never answered, and the others; who was heard of longest ago comes first.
        self.strangers: dict[Connection, None] = {}
        self.known: dict[Connection, None] = {}
        self.stopping = False
        self._by_address: dict[str, int] = {}

    def enter(self, guest: Connection) -> bool:
        """Accept a connection, closing another one if it is full; False: there is no room."""
        address = guest.address
        if self._by_address.get(address, 0) >= self.limits.per_address:
            if not self.make_room(address):
                return False
        elif len(self.strangers) + len(self.known) >= self.total and not self.make_room():
            return False
        self.strangers[guest] = None
        self._by_address[address] = self._by_address.get(address, 0) + 1
        return True

    def make_room(self, address: str | None = None) -> bool:
        """Close the connection that has waited longest, those never answered first."""
        for guest in chain(self.strangers, self.known):
            if address in (None, guest.address) and guest.waits_for != ANSWER:
                self.end(guest, DISPLACED)
                self.leave(guest)
                guest.abort()
                return True
        return False

    def end(self, guest: Connection, ending: str) -> None:
        """Count why a connection is refused or closed, once, and write it to the log.

        Nothing that it sent is written. The end of an idle connection is only counted.
        """
        if guest.ended:
            return
        guest.ended = True
        self._count(ending)
        level = logging.DEBUG if ending == IDLE else logging.WARNING
        LOG.log(level, "ended a connection of %s: %s", guest.address, ENDINGS[ending])

    def touch(self, guest: Connection) -> None:
        """A connection received or sent something."""
        here = self.strangers if guest in self.strangers else self.known
        if guest in here:
            del here[guest]
            (self.known if guest.answered else self.strangers)[guest] = None

    def leave(self, guest: Connection) -> None:
        """Forget a connection."""
        here = self.strangers if guest in self.strangers else self.known
        if guest in here:
            del here[guest]
            left = self._by_address.pop(guest.address) - 1
            if left:
                self._by_address[guest.address] = left

    def sweep(self) -> None:
        """Close what has kept the server waiting for too long."""
        now = time.monotonic()
        for guest in [*self.strangers, *self.known]:
            guest.closing_since()
            if now - guest.since > self.limits.seconds(guest.waits_for):
                guest.late()


class Doorkeeper:
    """Accepts connections on one socket until it is closed, as `asyncio.Server` does."""

    def __init__(self, listening: socket.socket, server: "BoundedServer") -> None:
        self._socket, self._server = listening, server
        listening.setblocking(False)
        self._task = asyncio.create_task(self._accept())
        self._greetings: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """Accept nothing more."""
        self._task.cancel()

    async def stop(self) -> None:
        """Accept what connected before now, then close the socket."""
        self.close()
        await asyncio.wait([self._task])
        with suppress(OSError):
            while True:
                self._let_in(*self._socket.accept())
        self._socket.close()

    async def wait_closed(self) -> None:
        """When every connection has been handed over."""
        if self._greetings:
            await asyncio.wait(self._greetings)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        count = 0
        while True:
            try:
                self._let_in(*await loop.sock_accept(self._socket))
            except OSError as err:
                if err.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    LOG.warning("cannot accept a connection: %s", err.strerror)
                    self._server.room.make_room()
                    await asyncio.sleep(FULL_PAUSE)
            count += 1
            if count % AT_ONCE == 0:
                await asyncio.sleep(0)

    def _let_in(self, found: socket.socket, address: Any) -> None:  # noqa: ANN401
        found.setblocking(False)
        guest = self._server.connection(neighbourhood(str(address[0])))
        if not self._server.room.enter(guest):
            self._server.room.end(guest, FULL)
            if self._server.config.ssl is None:
                with suppress(OSError):
                    found.send(plain_answer(503, "too many connections; try again later"))
            found.close()
            return
        guest.greeting = task = asyncio.create_task(self._greet(guest, found))
        self._greetings.add(task)

        def greeted(task: asyncio.Task[None]) -> None:
            self._greetings.discard(task)
            if guest.transport is None:  # cancelled, maybe before it began
                found.close()

        task.add_done_callback(greeted)

    async def _greet(self, guest: Connection, found: socket.socket) -> None:
        """Hand a connection to the protocol, after the TLS handshake if there is one."""
        loop, context = asyncio.get_running_loop(), self._server.config.ssl
        limit = self._server.room.limits.header_seconds
        try:
            if context is not None and not await speaks_tls(found, limit):
                self._server.room.end(guest, PLAIN)
                found.send(plain_answer(400, USES_TLS))
                found.close()
                self._server.room.leave(guest)
                return
            await loop.connect_accepted_socket(
                lambda: guest,
                found,
                ssl=context,
                ssl_handshake_timeout=None if context is None else limit,
                ssl_shutdown_timeout=None if context is None else LINGER,
            )
        except (OSError, ssl.SSLError, asyncio.CancelledError):
            self._server.room.leave(guest)
        finally:
            guest.greeting = None


class BoundedServer(uvicorn.Server):
    """Uvicorn with limits on connections, which loses no request when it stops."""

    def __init__(
        self, config: uvicorn.Config, limits: ConnectionLimits, count: Callable[[str], None]
    ) -> None:
        super().__init__(config)
        self.room = Room(limits, count)
        self._doors: list[Doorkeeper] = []

    def connection(self, address: str) -> Connection:
        """A connection that is about to be made."""
        return Connection(
            self.room,
            address,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As in Uvicorn, with the accept loop and the limits of this module."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            raise SystemExit(STARTUP_FAILURE)
        self._doors = [Doorkeeper(listening, self) for listening in sockets or []]
        self.servers = cast(Any, self._doors)
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second."""
        self.room.sweep()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer every connection, also those not accepted yet; then stop as Uvicorn does."""
        self.room.stopping = True
        for door in self._doors:
            await door.stop()
        sweeping = asyncio.create_task(self._sweep_on())
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                for door in self._doors:
                    await door.wait_closed()
            await super().shutdown([])
        finally:
            sweeping.cancel()

    async def _sweep_on(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            self.room.sweep()


def neighbourhood(address: str) -> str:
    """What counts as one address: of IPv6 the first 64 bits, because one household has the rest.

    >>> neighbourhood("127.0.0.1"), neighbourhood("2001:db8:1:2:3:4:5:6")
    ('127.0.0.1', '2001:db8:1:2::/64')
    """
    if ":" not in address:
        return address
    return str(ip_network((address.partition("%")[0], 64), strict=False))


def plain_answer(status: int, reason: str) -> bytes:
    """A whole answer of the server itself, after which it closes the connection."""
    body = json.dumps({"error": reason}).encode()
    lines = (
        STATUS_LINE[status],
        b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body),
        b"connection: close\r\n\r\n",
        body,
    )
    return b"".join(lines)


async def speaks_tls(found: socket.socket, seconds: float) -> bool:
    """Whether a connection begins with a TLS handshake; its first byte stays unread."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(found, ready.cancel)  # called once: the reader is removed below
    try:
        async with asyncio.timeout(seconds):
            await asyncio.wait([ready])
    finally:
        loop.remove_reader(found)
    first = found.recv(1, socket.MSG_PEEK)
    return not first or first[0] == TLS_GREETING


def usable(total: int) -> int:
    """Connections that the system has descriptors for; raises the process' own limit if it may."""
    try:
        import resource
    except ImportError:  # a system without such a limit
        return total
    needed = total + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
        soft = max(soft, allowed)
    most = total if soft == resource.RLIM_INFINITY else soft - SPARE_FILES
    if most < total:
        LOG.warning(
            "this process may open %d files, so it accepts at most %d connections",
            soft,
            max(1, most),
        )
    return max(1, min(total, most))
