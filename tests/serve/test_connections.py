"""Idle, slow and greedy strangers: what they may keep, and that nobody else notices them."""

import http.client
import json
import re
import resource
import select
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serve.made import SHAPE, head, manifest, pictures, write_export
from serve.test_server import free_port, start, tls

from splitveil.errors import ConfigError, ServerError
from splitveil.serve.admission import Limits
from splitveil.serve.client import Client
from splitveil.serve.connections import ConnectionLimits
from splitveil.serve.log import server_log
from splitveil.serve.manifest import CLIENT, FILE, read_manifest, sha256
from splitveil.serve.server import Tls, load_app, make_app, running
from splitveil.serve.transport import HttpTransport, RetryingTransport
from splitveil.serve.wire import TensorSpec, encode_request

__all__ = ["tls"]  # a fixture
INFER = "/v2/models/tiny/infer"
SILENT = 1_100
READERS = 40
BIG = 8 << 20  # bytes: more than the system keeps between two sockets


def request(rows: int = 1, *, path: str = INFER, host: str = "x") -> bytes:
    message = encode_request(pictures(rows), TensorSpec(name="z", shape=SHAPE), "logits")
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(message.body)}"]
    lines += [f"{k}: {v}" for k, v in message.headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + message.body


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def connect(url: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port_of(url)), timeout=10)


def read_answer(raw: socket.socket) -> tuple[int, bytes]:
    """Status and body of one answer; 0 when the other side closed before it."""
    answer = http.client.HTTPResponse(raw)
    try:
        answer.begin()
    except http.client.RemoteDisconnected:
        return 0, b""
    return answer.status, answer.read()


def closed(raw: socket.socket) -> bool:
    """Whether the other side closes within some seconds, whatever it says before."""
    raw.settimeout(5)
    try:
        while raw.recv(65536):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


@contextmanager
def descriptors(needed: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"needs {needed} descriptors, the system gives {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def tiny(limits: Limits | None = None, **connections: Any) -> Iterator[str]:  # noqa: ANN401
    app = make_app(manifest(), head, limits or Limits(max_delay=0.0))
    with running(app, connections=ConnectionLimits(**connections)) as url:
        yield url


def test_1100_silent_connections_stop_nobody(tmp_path: Path) -> None:
    folder = write_export(tmp_path / "e")
    with descriptors(3 * SILENT), running(load_app(folder, threads=1)) as url, ExitStack() as open_:
        for _ in range(SILENT):
            open_.enter_context(connect(url))
        with Client(folder, url, patience=5.0) as client:
            assert len(client.infer(pictures(3))) == 3
        with HttpTransport(url) as call:
            assert call("GET", "/", b"", {}).status == 200


def test_a_full_server_closes_who_keeps_it_waiting_longest() -> None:
    with tiny(total=3, per_address=3) as url:
        first, second, third = (connect(url) for _ in range(3))
        first.sendall(request())
        assert read_answer(first)[0] == 200  # has been answered: it goes after the silent ones
        fourth = connect(url)
        assert closed(second)
        second.close()
        for raw in (first, third, fourth):
            raw.sendall(request())
            assert read_answer(raw)[0] == 200
            raw.close()


def test_who_waits_for_an_answer_is_not_closed_for_another() -> None:
    entered, go = threading.Event(), threading.Event()

    def slow(rows: Any) -> Any:  # noqa: ANN401
        entered.set()
        go.wait(10)
        return head(rows)

    app = make_app(manifest(), slow, Limits(max_delay=0.0))
    one = ConnectionLimits(total=9, per_address=1)
    with running(app, connections=one) as url, connect(url) as busy:
        busy.sendall(request())
        assert entered.wait(10)
        with connect(url) as refused:
            status, body = read_answer(refused)
        assert status == 503
        assert json.loads(body)["error"] == "too many connections; try again later"
        go.set()
        assert read_answer(busy)[0] == 200
        busy.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b'splitveil_connections_ended_total{reason="full"} 1.0' in read_answer(busy)[1]


def test_headers_have_a_time_and_a_size() -> None:
    with tiny(header_seconds=0.3, header_bytes=1000) as url:
        with connect(url) as silent:
            assert closed(silent)
        with connect(url) as slow:
            slow.sendall(b"GET /v2 HTTP/1.1\r\nHost: x\r\nX-Slow:")
            status, body = read_answer(slow)
            assert (status, b"did not arrive within 0.3 s" in body) == (408, True)
            assert closed(slow)
        for large in (
            b"GET /v2 HTTP/1.1\r\nX: " + b"x" * 1500,
            b"GET /" + b"x" * 1500,
            b"GET /v2 HTTP/1.1\r\n" + b"X: 1234567\r\n" * 100 + b"\r\n",
            b"GET /v2 HTTP/1.1\r\nX: " + b"x" * 1500 + b"\r\n\r\n",
        ):
            with connect(url) as raw:
                raw.sendall(large)
                status, body = read_answer(raw)
                assert (status, json.loads(body)["error"]) == (431, "the headers are too large")


def test_a_byte_now_and_then_does_not_make_time_longer() -> None:
    with tiny(header_seconds=0.4) as url, connect(url) as raw:
        began = time.monotonic()
        raw.sendall(b"GET /v2 HTTP/1.1\r\n")
        while time.monotonic() - began < 5 and not select.select([raw], [], [], 0.05)[0]:
            raw.sendall(b"a")
        assert read_answer(raw)[0] == 408


def test_an_idle_connection_is_closed_and_the_client_does_not_mind(tmp_path: Path) -> None:
    folder = write_export(tmp_path / "e")
    app = load_app(folder, threads=1)
    with running(app, connections=ConnectionLimits(idle_seconds=0.2)) as url:
        with connect(url) as raw:
            raw.sendall(b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n")
            assert read_answer(raw)[0] == 200
            assert closed(raw)
        with Client(folder, url) as client:
            client.infer(pictures(1))
            time.sleep(0.6)
            assert len(client.infer(pictures(1, seed=1))) == 1


def test_a_body_that_nobody_reads_has_a_time_too() -> None:
    token = "0123456789abcdef"  # noqa: S105
    app = make_app(manifest(), head, None, token)
    with running(app, connections=ConnectionLimits(body_seconds=0.3)) as url, connect(url) as raw:
        raw.sendall(request()[:-1])
        assert read_answer(raw)[0] == 401
        assert closed(raw)


def big_export(folder: Path) -> Path:
    """An export whose client's half is large."""
    write_export(folder)
    (folder / CLIENT).write_bytes(bytes(BIG))
    found = read_manifest(folder)
    made = replace(found, files={**found.files, CLIENT: sha256(bytes(BIG))})
    (folder / FILE).write_text(made.to_json(), encoding="utf-8")
    return folder


def test_readers_who_never_read_keep_nobody_from_the_page(tmp_path: Path) -> None:
    app = load_app(big_export(tmp_path / "e"))
    ask = f"GET /export/{CLIENT} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    limits = ConnectionLimits(send_seconds=1.0)
    with running(app, connections=limits) as url, ExitStack() as open_:
        readers = [open_.enter_context(connect(url)) for _ in range(READERS)]
        for raw in readers:
            raw.sendall(ask)
        time.sleep(0.2)
        with HttpTransport(url) as call:
            assert call("GET", "/", b"", {}).status == 200
            assert len(call("GET", f"/export/{CLIENT}", b"", {}).body) == BIG
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and not all(broken(raw) for raw in readers):
            time.sleep(0.1)
        assert all(broken(raw) for raw in readers)  # the server has given up on them


def broken(raw: socket.socket) -> bool:
    """Whether the other side reset the connection; reads nothing."""
    poll = select.poll()
    poll.register(raw, select.POLLERR | select.POLLHUP | select.POLLRDHUP)
    return bool(poll.poll(0))


def test_what_a_limit_ends_is_counted_and_logged_without_what_it_sent(tmp_path: Path) -> None:
    secret = b"s3cr3t"
    limits: dict[str, Any] = {
        "total": 4, "per_address": 4, "header_seconds": 0.4, "idle_seconds": 0.3,
        "header_bytes": 1000,
    }  # fmt: skip
    with server_log(tmp_path / "log"), tiny(**limits) as url, ExitStack() as open_:
        for _ in range(50):  # malformed
            with connect(url) as raw:
                raw.sendall(secret + b"\r\n\r\n")
                assert read_answer(raw)[0] == 400
        with connect(url) as raw:  # large headers
            raw.sendall(b"GET /v2 HTTP/1.1\r\nX: " + secret * 200)
            assert read_answer(raw)[0] == 431
        with connect(url) as idle:
            idle.sendall(b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n")
            assert read_answer(idle)[0] == 200
            assert closed(idle)
        silent = [open_.enter_context(connect(url)) for _ in range(5)]  # displaced, then headers
        assert all(closed(raw) for raw in silent)
        with HttpTransport(url) as call:
            text = call("GET", "/metrics", b"", {}).body.decode()
        found = re.findall(r'splitveil_connections_ended_total\{reason="(.*)"\} (\d+)\.0', text)
    wanted = {"malformed": 50, "large headers": 1, "idle": 1, "displaced": 1, "headers": 4}
    assert {reason: int(count) for reason, count in found} == wanted
    told = (tmp_path / "log").read_text()
    assert secret.decode() not in told
    assert told.count("WARNING ended a connection of 127.0.0.1: it was not HTTP/1.1") == 20


def test_http_to_a_tls_port_is_told_so_at_once(tmp_path: Path, tls: Tls) -> None:
    folder = write_export(tmp_path / "e")
    limits = ConnectionLimits(header_seconds=0.5)
    with running(load_app(folder, threads=1), tls=tls, connections=limits) as url:
        plain = url.replace("https", "http")
        began = time.monotonic()
        with (
            Client(folder, plain) as client,
            pytest.raises(ServerError, match="this port speaks TLS; use an https:// address"),
        ):
            client.infer(pictures(1))
        with connect(url) as silent:
            assert closed(silent)
        context = ssl.create_default_context(cafile=tls.certificate)
        with context.wrap_socket(connect(url), server_hostname="localhost") as quiet:
            assert closed(quiet)
        assert time.monotonic() - began < 30
        with Client(folder, url, ca_file=tls.certificate) as client:
            assert len(client.infer(pictures(2))) == 2


def test_a_server_that_answers_http_with_a_tls_alert_is_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            raw, _ = listening.accept()
            with raw:
                raw.recv(1000)
                raw.sendall(b"\x15\x03\x01\x00\x02\x02\x46")

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with HttpTransport(url) as once, pytest.raises(ServerError, match="speaks TLS; use an htt"):
            RetryingTransport(once=once, patience=20.0)("GET", "/v2", b"", {})
        thread.join()


@pytest.mark.parametrize(
    "bad", [{"total": 0}, {"per_address": 0}, {"header_bytes": 100}, {"idle_seconds": 0.0},
            {"send_seconds": float("nan")}],
)  # fmt: skip
def test_limits_that_would_let_nobody_in_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(bad))} must be ≥"):
        ConnectionLimits(**bad)


def keep_sending(port: int, begun: threading.Barrier, told: list[str]) -> None:
    """Requests over one connection, the next when the last is answered, until it is closed."""
    asked, wanted = request(), head(pictures(1)).astype("<f4").tobytes()
    with socket.create_connection(("127.0.0.1", port), timeout=20) as raw:
        raw.sendall(asked)
        assert read_answer(raw)[0] == 200
        begun.wait()
        while True:
            try:
                raw.sendall(asked)
            except (BrokenPipeError, ConnectionResetError):
                told.append("closed before a request")  # after an answer that was the last
                return
            answer = http.client.HTTPResponse(raw)
            try:
                answer.begin()
                body = answer.read()
            except http.client.RemoteDisconnected:
                told.append("closed without an answer")
                return
            except (OSError, http.client.HTTPException) as err:
                told.append(f"broken: {err!r}")
                return
            good = np.allclose(np.frombuffer(body[-16:], "<f4"), np.frombuffer(wanted, "<f4"))
            if answer.status != 200 or not good:
                told.append(f"wrong: {answer.status}")
                return
            if answer.will_close:
                told.append("answered, then closed")
                return


@pytest.mark.parametrize("senders", [1, 24])
def test_sigterm_under_load_answers_or_closes_cleanly(tmp_path: Path, senders: int) -> None:
    port = free_port()
    server = start(write_export(tmp_path / "e"), port)
    told: list[str] = []
    begun = threading.Barrier(senders + 1)
    threads = [
        threading.Thread(target=keep_sending, args=(port, begun, told)) for _ in range(senders)
    ]
    for thread in threads:
        thread.start()
    begun.wait(30)
    time.sleep(0.3)
    server.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join(30)
    server.communicate(timeout=30)
    assert told == ["answered, then closed"] * senders


def test_an_idle_sender_is_told_goodbye(tmp_path: Path) -> None:
    port = free_port()
    server = start(write_export(tmp_path / "e"), port)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as raw:
        raw.sendall(request())
        assert read_answer(raw)[0] == 200
        server.send_signal(signal.SIGTERM)
        assert raw.recv(1) == b""  # an end, no reset
    server.communicate(timeout=30)
