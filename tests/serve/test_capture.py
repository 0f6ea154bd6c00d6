"""Captures: what a client sends is what the file holds, and nothing else in it is believed."""

import base64
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from serve.made import NOISY, SHAPE, head, pictures, write_export

from splitveil.errors import ServerError, WireError
from splitveil.serve.client import Client
from splitveil.serve.manifest import LOGITS, WIRE
from splitveil.serve.manifest import Manifest as _Manifest
from splitveil.serve.transport import (
    CAPTURE_FORMAT,
    CapturedCall,
    RecordingTransport,
    Reply,
    read_capture,
)
from splitveil.serve.wire import HEADER_LENGTH, TensorSpec, decode_request, encode_answer

SPEC = TensorSpec(name=WIRE, shape=SHAPE)
FIRST = json.dumps({"format": CAPTURE_FORMAT})
TOKEN = "0123456789abcdef"  # noqa: S105
GOOD = CapturedCall("/v2/models/tiny/infer", b"{}").to_line()


class Server:
    """Answers as the tiny server; keeps the bodies it was sent, and may fail the first time."""

    def __init__(self, manifest: _Manifest, *, busy: int = 0) -> None:
        self.bodies: list[bytes] = []
        self.manifest, self.busy = manifest, busy

    def __call__(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        del path
        if method == "GET":
            told = {"inputs": [{"name": WIRE, "datatype": "FP32", "shape": [-1, *SHAPE]}]}
            return Reply(200, json.dumps(told).encode())
        self.bodies.append(body)
        if self.busy:
            self.busy -= 1
            return Reply(503, b"")
        rows = decode_request(body, headers.get(HEADER_LENGTH), SPEC, LOGITS, 99).rows
        spec = TensorSpec(name=LOGITS, shape=(4,))
        answer = encode_answer(head(rows), spec, "tiny", None, binary=False)
        return Reply(200, answer.body)


@pytest.mark.parametrize("binary", [True, False])
def test_a_capture_holds_the_bytes_that_the_server_got(tmp_path: Path, *, binary: bool) -> None:
    folder = write_export(tmp_path / "export", NOISY)
    file, images = tmp_path / "sent.jsonl", pictures(5)
    server = Server(_Manifest(name="x", image_shape=SHAPE, wire_shape=SHAPE, num_classes=4))
    client = Client(folder, server, token=TOKEN, batch=2, binary=binary, capture=file)
    client.infer(images)
    calls = list(read_capture(file))
    assert [call.body for call in calls] == server.bodies
    assert [call.path for call in calls] == ["/v2/models/tiny/infer"] * 3
    rows = [decode_request(c.body, c.header_length, SPEC, LOGITS, 2).rows for c in calls]
    assert np.array_equal(np.concatenate(rows), client.send(images))  # from the cache
    assert TOKEN not in file.read_text()


def test_a_capture_keeps_a_repeated_call_once(tmp_path: Path) -> None:
    folder, file = write_export(tmp_path / "export"), tmp_path / "sent.jsonl"
    server = Server(_Manifest(name="x", image_shape=SHAPE, wire_shape=SHAPE, num_classes=4), busy=2)
    Client(folder, server, capture=file).infer(pictures(1))
    assert server.bodies == [next(read_capture(file)).body] * 3
    assert len(file.read_text().splitlines()) == 2


def test_a_file_that_exists_is_never_written_over(tmp_path: Path) -> None:
    file = tmp_path / "sent.jsonl"
    file.write_text("precious")
    with pytest.raises(ServerError, match=r"cannot write a capture to .*File exists; give a new"):
        RecordingTransport(lambda *_: Reply(200, b""), file)
    assert file.read_text() == "precious"
    with pytest.raises(ServerError, match="in an existing folder"):
        RecordingTransport(lambda *_: Reply(200, b""), tmp_path / "none" / "sent.jsonl")


def test_a_call_is_written_before_it_is_made(tmp_path: Path) -> None:
    file = tmp_path / "sent.jsonl"

    def fails(method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        raise OSError(method, path, body, headers)

    recorder = RecordingTransport(fails, file)
    with pytest.raises(OSError, match="POST"):
        recorder("POST", "/p", b"body", {})
    assert list(read_capture(file)) == [CapturedCall("/p", b"body")]


def line(**parts: object) -> str:
    return json.dumps({"path": "/p", "header_length": None, "body": "e30="} | parts)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD, "is not a capture: its first line must be"),
        ("[]", "line 1 must be a JSON object, got list"),
        ("\x80PNG", "cannot read the capture"),
        (f"{FIRST}\n{GOOD[:-9]}", "line 2 is not JSON: .*remove its last line"),
        (f"{FIRST}\n{line(path=3)}", "line 2 must have a path"),
        (f"{FIRST}\n{line(body=None)}", "line 2 must have a path, a body"),
        (f"{FIRST}\n{line(header_length=-1)}", "a whole number or null"),
        (f"{FIRST}\n{line(header_length=True)}", "a whole number or null"),
        (f"{FIRST}\n{GOOD}\n{line(body='e30=*')}", "line 3: the body is not base64"),
    ],
)
def test_what_is_no_capture_is_refused_with_its_line(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "sent.jsonl"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(WireError, match=said):
        list(read_capture(file))
    with pytest.raises(WireError, match="cannot read the capture"):
        list(read_capture(tmp_path / "none"))


def test_a_line_reads_back_as_the_call_it_was() -> None:
    sent = CapturedCall("/v2/models/m/infer", bytes(range(256)), "17")
    found = json.loads(sent.to_line())
    assert base64.b64decode(found["body"]) == sent.body
    assert found["header_length"] == 17
