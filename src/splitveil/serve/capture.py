"""Captures: the bodies of infer calls as they left a client, for an audit of the wire.

A capture is text, one JSON object on each line. The first is ``{"format": "splitveil-capture-1"}``;
each other is one call: ``path``, ``header_length`` (the header Inference-Header-Content-Length,
null for a body that is all JSON) and ``body`` in base64. Other headers, the token among them, are
not kept. Any proxy can write such a file; nothing in it is ever run.
"""

import base64
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from splitveil.serve.faults import ServerError, WireError
from splitveil.serve.transport import Reply, Transport
from splitveil.serve.wire import HEADER_LENGTH

FORMAT = "splitveil-capture-1"


@dataclass(frozen=True)
class Sent:
    """One infer call: its path, its bytes, and the header that says where its JSON ends."""

    path: str
    body: bytes
    header_length: str | None = None

    def to_line(self) -> str:
        """Its line of a capture.

        >>> Sent("/v2/models/m/infer", b"{}").to_line()
        '{"path": "/v2/models/m/infer", "header_length": null, "body": "e30="}'
        """
        length = None if self.header_length is None else int(self.header_length)
        text = base64.b64encode(self.body).decode("ascii")
        return json.dumps({"path": self.path, "header_length": length, "body": text})


class Recorder:
    """A transport that writes every infer call into a new file before it is made."""

    def __init__(self, call: Transport, file: Path) -> None:
        self._call, self._file, self._lock = call, file, threading.Lock()
        try:
            with file.open("x", encoding="ascii") as new:
                new.write(json.dumps({"format": FORMAT}) + "\n")
        except OSError as err:
            raise ServerError(
                f"cannot begin a capture in {file}: {err.strerror}; name a new file in a folder "
                "that exists"
            ) from err

    def __call__(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """Record and pass on; calls without a body, as for metadata, are only passed on."""
        if body:
            line = Sent(path, body, headers.get(HEADER_LENGTH)).to_line()
            with self._lock, self._file.open("a", encoding="ascii") as file:
                file.write(line + "\n")
        return self._call(method, path, body, headers)


def read_capture(file: Path) -> Iterator[Sent]:
    """The calls of a capture, in the order they were made; a line that is none is refused."""
    try:
        with file.open(encoding="ascii") as lines:
            for number, line in enumerate(lines, start=1):
                found = _object(line, f"{file}, line {number}")
                if number == 1:
                    if found.get("format") != FORMAT:
                        raise WireError(
                            f"{file} is no capture: its first line must be "
                            f'{{"format": "{FORMAT}"}}, got {line[:80]!r}'
                        )
                else:
                    yield _sent(found, f"{file}, line {number}")
    except (OSError, UnicodeDecodeError) as err:
        raise WireError(f"cannot read the capture {file}: {err}") from err


def _object(line: str, where: str) -> Mapping[str, object]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as err:
        raise WireError(
            f"{where} is not JSON: {str(err)[:80]}; a capture that was cut off must end after a "
            "whole line"
        ) from err
    if not isinstance(found, dict):
        raise WireError(f"{where} must be a JSON object, got {type(found).__name__}")
    return found


def _sent(found: Mapping[str, object], where: str) -> Sent:
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
    return Sent(path, content, None if length is None else str(length))
