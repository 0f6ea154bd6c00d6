"""The client's side of HTTP, with the standard library alone: calls with retries, and captures.

A capture keeps the bodies of infer calls as a client sent them, for `audit-wire`. It is a text file
with one JSON object per line. The first is ``{"format": "splitveil-capture-1"}``; each other is one
call: ``path``, ``header_length`` (the header Inference-Header-Content-Length, null for a body that
is all JSON) and ``body`` in base64. Other headers, such as the token, are not kept. Any proxy can
write such a file; nothing in it is ever executed.
"""

import base64
import http.client
import json
import os
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from urllib.parse import urlsplit

from splitveil.errors import ServerError, UnreachableError, WireError
from splitveil.io import MAX_BYTES, check_file, opened, parse_json, printable
from splitveil.serve.wire import HEADER_LENGTH

TRY_AGAIN = frozenset({429, 502, 503, 504})  # busy, restarting or slow: a later call may succeed
TLS_ALERT = "\x15\x03"  # how a server that speaks TLS answers HTTP
NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")
MOST_BYTES = 1 << 26  # of an answer: more than any logits, little enough for a device's memory
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # seconds, at most
CAPTURE_FORMAT = "splitveil-capture-1"


@dataclass(frozen=True)
class Reply:
    """An answer; header names are in lower case."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


# One HTTP call: method, path, body, headers; raises OSError or HTTPException without an answer.
Transport = Callable[[str, str, bytes, Mapping[str, str]], Reply]


class HttpTransport:
    """HTTP calls over connections that stay open; threads may share it. Follows no redirect."""

    def __init__(self, url: str, *, timeout: float = 10.0, ca_file: Path | None = None) -> None:
        self._host, self._port, self._base, secure = _parts(url)
        self._timeout = timeout
        try:
            if secure and ca_file is not None:
                check_file(ca_file)
            self._context = ssl.create_default_context(cafile=ca_file) if secure else None
        except OSError as err:  # ssl.SSLError is one
            raise ServerError(
                f"cannot use the certificates in {ca_file}: {err}; give a PEM file"
            ) from err
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()

    def __call__(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """Send and wait; a connection that failed is closed."""
        with self._lock:
            connection = self._idle.pop() if self._idle else self._new()
        try:
            connection.request(method, self._base + path, body or None, dict(headers))
            answer = connection.getresponse()
            # read() without an amount raises if the body ends too early, so that the call repeats.
            told = answer.length
            short = told is not None and told <= MOST_BYTES
            content = answer.read() if short else answer.read(MOST_BYTES + 1)
            if len(content) > MOST_BYTES:
                raise ServerError(f"the answer exceeds {MOST_BYTES} bytes; is this the server?")
        except BaseException:
            connection.close()
            self.close()  # the idle connections lead to the same server
            raise
        with self._lock:
            self._idle.append(connection)
        return Reply(answer.status, content, {k.lower(): v for k, v in answer.getheaders()})

    def _new(self) -> http.client.HTTPConnection:
        host, port, timeout = self._host, self._port, self._timeout
        if self._context is None:
            return http.client.HTTPConnection(host, port, timeout=timeout)
        return http.client.HTTPSConnection(host, port, timeout=timeout, context=self._context)

    def close(self) -> None:
        """Close the idle connections; a later call opens a new one."""
        with self._lock:
            while self._idle:
                self._idle.pop().close()

    def __enter__(self) -> "HttpTransport":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _parts(url: str) -> tuple[str, int | None, str, bool]:
    """Host, port, path prefix, and whether to use TLS."""
    wrong = f"a server's address looks like http://host:8000, got {url!r}"
    try:
        parts = urlsplit(url)
        port = parts.port
        host = (parts.hostname or "").encode("idna").decode("ascii")
    except ValueError as err:
        raise ServerError(wrong) from err
    known = parts.scheme in ("http", "https")
    if not (known and host and header_safe(parts.path)) or parts.query:
        raise ServerError(wrong)
    if parts.username is not None:
        raise ServerError("a server's address must not contain a password; give a token instead")
    return host, port, parts.path.rstrip("/"), parts.scheme == "https"


def header_safe(text: str) -> bool:
    """Whether a text can be part of a request line or a header: ASCII without spaces."""
    return text.isascii() and text.isprintable() and " " not in text


def safe_text(text: str) -> str:
    r"""A stranger's text, shortened, without control characters.

    >>> safe_text("no\x1b[2J such model")
    'no [2J such model'
    """
    return printable(text[:200]).replace("\n", " ")


def pause(attempt: int, jitter: float, asked: float = 0.0) -> float:
    """Seconds before attempt + 1: what the server asked for, plus a time that doubles each attempt.

    `jitter` in [0, 1) spreads clients that failed together over the upper half of the pause.

    >>> [pause(attempt, 0.0) for attempt in (0, 1, 2, 30)]
    [0.025, 0.05, 0.1, 1.0]
    >>> pause(0, 0.5, asked=10.0)
    10.0375
    """
    return asked + min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(attempt, 30)) * (1 + jitter) / 2


def _asked(reply: Reply) -> float:
    """The server's Retry-After in seconds; a date or nonsense counts as 0."""
    value = reply.headers.get("retry-after", "")
    return float(value) if value.isascii() and value.isdigit() and len(value) < 6 else 0.0  # noqa: PLR2004


def _check_tls(err: Exception) -> None:
    """Raise `ServerError` for a TLS error that another attempt would not fix."""
    if isinstance(err, http.client.BadStatusLine) and str(err).startswith(TLS_ALERT):
        raise ServerError("the server speaks TLS; use an https:// address") from err
    if isinstance(err, ssl.SSLCertVerificationError):
        raise ServerError(
            f"the server's certificate is not trusted: {err.verify_message}; give the file of its "
            "authority with --ca"
        ) from err
    if isinstance(err, ssl.SSLError) and getattr(err, "reason", None) in NO_TLS:
        raise ServerError(
            f"the server does not speak TLS ({err.reason}); use an http:// address, or start it "
            "with a certificate"
        ) from err


@dataclass(frozen=True, kw_only=True)
class RetryingTransport:
    """A transport that retries while the server is busy or away.

    It repeats the same bytes, so that a lost answer costs no second draw of noise.

    Args:
        once: The transport for one attempt.
        patience: Seconds to keep trying.
        waiting: Called before each pause with the problem and the seconds spent so far.
    """

    once: Transport
    patience: float = 60.0
    waiting: Callable[[str, float], None] = lambda problem, seconds: None
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def __call__(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """The first answer that is not "try again"; raises `UnreachableError` when time is up."""
        began = self.clock()
        attempt = 0
        while True:
            asked = 0.0
            try:
                reply = self.once(method, path, body, headers)
                if reply.status not in TRY_AGAIN:
                    return reply
                problem, asked = f"answered {reply.status}", _asked(reply)
            except (OSError, http.client.HTTPException) as err:
                _check_tls(err)
                problem = f"{type(err).__name__}: {safe_text(str(err))}"
            wait = pause(attempt, secrets.randbelow(1000) / 1000, asked)
            spent = self.clock() - began
            if spent + wait > self.patience:
                raise UnreachableError(
                    f"no answer after {attempt + 1} attempts in {self.patience:g} s; the last: "
                    f"{problem}. Is the server running, and is the address right?"
                )
            self.waiting(problem, spent)
            self.sleep(wait)
            attempt += 1


@dataclass(frozen=True)
class CapturedCall:
    """One infer call: its path, its body, and the header with the length of its JSON."""

    path: str
    body: bytes
    header_length: str | None = None

    def to_line(self) -> str:
        """The call as a line of a capture.

        >>> CapturedCall("/v2/models/m/infer", b"{}").to_line()
        '{"path": "/v2/models/m/infer", "header_length": null, "body": "e30="}'
        """
        length = None if self.header_length is None else int(self.header_length)
        text = base64.b64encode(self.body).decode("ascii")
        return json.dumps({"path": self.path, "header_length": length, "body": text})


class RecordingTransport:
    """A transport that writes every infer call to a new file before sending it."""

    def __init__(self, call: Transport, file: Path) -> None:
        self._call, self._file, self._lock = call, file, threading.Lock()
        try:
            with file.open("x", encoding="ascii") as new:
                new.write(json.dumps({"format": CAPTURE_FORMAT}) + "\n")
        except OSError as err:
            raise ServerError(
                f"cannot write a capture to {file}: {err.strerror}; give a new file in an existing "
                "folder"
            ) from err

    def __call__(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """Record and send; calls without a body, such as for metadata, are not recorded."""
        if body:
            line = CapturedCall(path, body, headers.get(HEADER_LENGTH)).to_line()
            with self._lock:
                self._keep(line.encode() + b"\n")
        return self._call(method, path, body, headers)

    def _keep(self, line: bytes) -> None:
        """Append a line, or leave the capture as it was and raise `ServerError`."""
        before = self._file.stat().st_size
        try:
            with self._file.open("ab") as file:
                file.write(line)
        except OSError as err:
            with suppress(OSError):
                os.truncate(self._file, before)
            raise ServerError(
                f"cannot write the capture {self._file}: {err.strerror}; the call was not sent. "
                "Free some space and send again into a new capture"
            ) from err


def read_capture(file: Path) -> Iterator[CapturedCall]:
    """The calls of a capture, in order; a malformed line raises `WireError`."""
    try:
        with opened(file) as raw, TextIOWrapper(raw, encoding="ascii") as lines:
            for number, line in enumerate(iter(lambda: lines.readline(MAX_BYTES), ""), start=1):
                where = f"{file}, line {number}"
                if len(line) == MAX_BYTES:
                    raise WireError(f"{where} is longer than the limit of {MAX_BYTES} characters")
                found = _object(line, where)
                if number > 1:
                    yield _sent(found, where)
                elif found.get("format") != CAPTURE_FORMAT:
                    raise WireError(
                        f"{file} is not a capture: its first line must be "
                        f'{{"format": "{CAPTURE_FORMAT}"}}, got {line[:80]!r}'
                    )
    except (OSError, UnicodeDecodeError) as err:
        raise WireError(f"cannot read the capture {file}: {err}") from err


def _object(line: str, where: str) -> Mapping[str, object]:
    try:
        found = parse_json(line)
    except ValueError as err:
        raise WireError(
            f"{where} is not JSON: {str(err)[:80]}; if the capture was cut off, remove its last "
            "line"
        ) from err
    if not isinstance(found, dict):
        raise WireError(f"{where} must be a JSON object, got {type(found).__name__}")
    return found


def _sent(found: Mapping[str, object], where: str) -> CapturedCall:
    path, length, body = (found.get(key) for key in ("path", "header_length", "body"))
    whole = length is None or (type(length) is int and length >= 0)
    if not (isinstance(path, str) and isinstance(body, str) and whole):
        raise WireError(
            f"{where} must have a path, a body in base64, and header_length, a whole number or null"
        )
    try:
        content = base64.b64decode(body, validate=True)
    except ValueError as err:
        raise WireError(f"{where}: the body is not base64: {err}") from err
    return CapturedCall(path, content, None if length is None else str(length))
