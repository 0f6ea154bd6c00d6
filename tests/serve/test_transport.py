"""Trying again: how long, how often, and when not."""

import http.client
import socket
import ssl
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send

from splitveil.errors import ServerError
from splitveil.serve import transport
from splitveil.serve.server import running
from splitveil.serve.transport import HttpTransport, Reply, RetryingTransport, _parts, pause


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now, self.slept = 0.0, list[float]()

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def __call__(self) -> float:
        return self.now


class Script:
    """A server that answers as written, then 200."""

    def __init__(self, *events: Reply | Exception) -> None:
        self.events, self.bodies = list(events), list[bytes]()

    def __call__(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        self.bodies.append(body)
        event = self.events.pop(0) if self.events else Reply(200, b"done")
        if isinstance(event, Exception):
            raise event
        return event


def ask(script: Script, clock: Clock, patience: float = 60.0) -> Reply:
    persistent = RetryingTransport(once=script, patience=patience, sleep=clock.sleep, clock=clock)
    return persistent("POST", "/infer", b"bytes", {})


BUSY = [Reply(s, b"") for s in (429, 502, 503, 504)]
AWAY = [
    ConnectionRefusedError(), ConnectionResetError(), BrokenPipeError(), TimeoutError(),
    http.client.RemoteDisconnected("x"), http.client.BadStatusLine("x"),
    http.client.IncompleteRead(b""),
]  # fmt: skip


@pytest.mark.parametrize("event", [*BUSY, *AWAY], ids=repr)
def test_a_busy_server_is_asked_again_with_the_same_bytes(
    event: Reply | Exception,
) -> None:
    script, clock = Script(event, event, event), Clock()
    assert ask(script, clock).body == b"done"
    assert script.bodies == [b"bytes"] * 4
    assert len(clock.slept) == 3


@pytest.mark.parametrize("status", [200, 400, 401, 404, 413, 422, 500])
def test_other_answers_are_final(status: int) -> None:
    script, clock = Script(Reply(status, b"final")), Clock()
    assert ask(script, clock) == Reply(status, b"final")
    assert clock.slept == []


def test_pauses_double_up_to_a_limit_and_are_spread() -> None:
    script, clock = Script(*[ConnectionRefusedError()] * 12), Clock()
    ask(script, clock)
    full = [min(2.0, 0.05 * 2**k) for k in range(12)]
    assert all(f / 2 <= s < f for f, s in zip(full, clock.slept, strict=True))
    assert len({s / f for f, s in zip(full, clock.slept, strict=True)}) > 1


def test_a_servers_pause_is_bounded_by_the_patience() -> None:
    assert pause(0, 0.0, 1.0) == 1.025
    patient = Clock()
    ask(Script(Reply(503, b"", {"retry-after": "10"})), patient)
    assert patient.slept[0] >= 10
    with pytest.raises(ServerError, match="answered 503"):
        ask(Script(Reply(503, b"", {"retry-after": "9999"})), Clock())
    replies = [Reply(503, b"", {"retry-after": v}) for v in ("1", "Wed, 21 Oct 2026", "-5", "²")]
    clock = Clock()
    ask(Script(*replies), clock)
    assert clock.slept[0] >= 1
    assert all(s < 1 for s in clock.slept[1:])


def test_a_server_that_speaks_no_tls_is_not_asked_again() -> None:
    plain = ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number")
    plain.reason = "WRONG_VERSION_NUMBER"
    clock = Clock()
    with pytest.raises(ServerError, match=r"does not speak TLS .* http://"):
        ask(Script(plain), clock)
    assert clock.slept == []
    assert ask(Script(ssl.SSLError(1, "the connection broke")), clock).status == 200


def test_patience_ends_with_an_error_that_names_the_last_problem() -> None:
    script, clock = Script(*[ConnectionRefusedError(111, "refused")] * 99), Clock()
    with pytest.raises(ServerError, match=r"no answer after \d+ attempts in 5 s; .*refused"):
        ask(script, clock, patience=5.0)
    assert 3 < clock.now <= 5


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "ftp://x",
        "http://",
        "",
        "http://h/?q=1",
        "http://h:x",
        "http://a..b:1",
        "http://h/a b",
        "http://h/\x7f",
    ],
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ServerError, match=r"looks like http://host:8000"):
        HttpTransport(url)


def test_certificates_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("none")
    for file in ("ca.pem", "absent.pem"):
        with pytest.raises(ServerError, match="cannot use the certificates in"):
            HttpTransport("https://localhost:1", ca_file=tmp_path / file)


def test_closing_an_unused_transport_is_harmless() -> None:
    HttpTransport("http://localhost:1").close()


def test_a_password_in_the_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(ServerError, match="must not contain a password; give a token") as caught:
        HttpTransport("http://me:secret@h:1")
    assert "secret" not in str(caught.value)


def test_addresses_of_other_alphabets_and_of_ip_6_are_taken() -> None:
    assert _parts("http://bücher.example/x/") == ("xn--bcher-kva.example", None, "/x", False)
    assert _parts("https://[::1]:8000") == ("::1", 8000, "", True)


def test_whoever_waits_is_told_why_and_for_how_long() -> None:
    told: list[tuple[str, float]] = []
    clock = Clock()
    script = Script(ConnectionRefusedError(111, "re\x1b[2Jfused"), Reply(503, b""))
    RetryingTransport(
        once=script, sleep=clock.sleep, clock=clock, waiting=lambda *words: told.append(words)
    )("GET", "/", b"", {})
    assert told == [
        ("ConnectionRefusedError: [Errno 111] re [2Jfused", 0.0),
        ("answered 503", clock.slept[0]),
    ]


def test_an_answer_without_end_is_not_read_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for word in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{word}.complete"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(1001)})

    monkeypatch.setattr(transport, "MOST_BYTES", 1000)
    with running(endless) as url, HttpTransport(url) as once:
        with pytest.raises(ServerError, match="the answer exceeds 1000 bytes"):
            once("GET", "/", b"", {})
        monkeypatch.setattr(transport, "MOST_BYTES", 1001)
        assert len(once("GET", "/", b"", {}).body) == 1001


@pytest.mark.parametrize("body", [b"", b"part"])
def test_an_answer_that_ends_too_early_is_none(body: bytes) -> None:
    def answer_in_part(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n" + body)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = threading.Thread(target=answer_in_part, args=(listening,))
        server.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with HttpTransport(url) as once, pytest.raises(http.client.IncompleteRead):
            once("GET", "/", b"", {})
        server.join()
