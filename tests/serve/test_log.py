"""The log: stamped, bounded, and without a word of a stranger."""

import json
import logging
import re
from pathlib import Path

import pytest
from serve.made import call, head, manifest, pictures
from serve.test_app import FAST, INFER, Z, play
from starlette.types import ASGIApp

from splitveil.errors import ServerError
from splitveil.serve.log import MAX_BYTES, RareLines, server_log
from splitveil.serve.server import make_app
from splitveil.serve.wire import encode_request

SECRET = "s3cr3t-0f-a-stranger"  # noqa: S105


def record(line: int, text: str = "text") -> logging.LogRecord:
    return logging.LogRecord("x", logging.INFO, "file.py", line, text, None, None)


def test_a_line_that_repeats_is_counted_instead() -> None:
    now = [0.0]
    rare = RareLines(most=3, window=10.0, clock=lambda: now[0])
    assert [rare.filter(record(1)) for _ in range(5)] == [True] * 3 + [False] * 2
    assert rare.filter(record(2))
    now[0] = 10.0
    late = record(1)
    assert rare.filter(late)
    assert late.getMessage() == "text (2 more such lines left out before)"
    now[0] = 20.0
    quiet = record(1)
    assert rare.filter(quiet)
    assert quiet.getMessage() == "text"


def test_a_file_and_its_predecessor_stay_small(tmp_path: Path) -> None:
    file = tmp_path / "log"
    with server_log(file):
        for number in range(30_000):
            # As many places in the code as lines, so that none is left out.
            logging.getLogger("splitveil.x").handle(
                logging.LogRecord("splitveil.x", 40, f"f{number}", 1, "x" * 100, None, None)
            )
    files = sorted(tmp_path.iterdir())
    assert [f.name for f in files] == ["log", "log.1"]
    assert sum(f.stat().st_size for f in files) < MAX_BYTES


def test_what_was_set_before_is_set_again(tmp_path: Path) -> None:
    logger = logging.getLogger("splitveil")
    before = (logger.handlers[:], logger.level, logger.propagate)
    with server_log(tmp_path / "log"):
        assert logger.handlers != before[0]
    assert (logger.handlers, logger.level, logger.propagate) == before
    with pytest.raises(ServerError, match=r"cannot write the log to .*choose another --log-file"):
        server_log(tmp_path / "no" / "log").__enter__()


@pytest.mark.parametrize("access", [True, False])
def test_the_access_log_has_a_time_and_nothing_that_was_sent(tmp_path: Path, access: bool) -> None:
    message = encode_request(pictures(1), Z, "logits")

    async def scene(app: ASGIApp) -> None:
        await call(app, "POST", INFER, message.body, message.headers)
        await call(app, "GET", f"/v2/models/{SECRET}", b"", {"x-secret": SECRET})
        await call(app, SECRET, f"/{SECRET}/infer?{SECRET}")
        tensor = {"name": SECRET, "shape": [1], "datatype": SECRET, "data": [SECRET]}
        await call(app, "POST", INFER, json.dumps({"id": SECRET, "inputs": [tensor]}).encode())
        await call(app, "GET", "/v2/health/ready")

    with server_log(tmp_path / "log", access=access):
        play(scene, make_app(manifest(), head, FAST))
    text = (tmp_path / "log").read_text()
    assert SECRET not in text
    found = re.findall(
        r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ INFO test (.*) \d+\.\d ms$", text, re.MULTILINE
    )
    wanted = ["POST infer 200", "GET model 404", "? other 404", "POST infer 400", "GET ready 200"]
    assert found == (wanted if access else [])


def test_a_failing_model_is_logged_with_its_reason(tmp_path: Path) -> None:
    message = encode_request(pictures(1), Z, "logits")

    def broken(rows: object) -> None:
        raise RuntimeError("out of luck")

    async def scene(app: ASGIApp) -> None:
        for _ in range(50):
            answer = await call(app, "POST", INFER, message.body, message.headers)
            assert answer.status == 500

    with server_log(tmp_path / "log"):
        play(scene, make_app(manifest(), broken, FAST))  # type: ignore[arg-type]
    text = (tmp_path / "log").read_text()
    assert text.count("ERROR a request failed: RuntimeError") == 20
    assert "RuntimeError: out of luck" in text
