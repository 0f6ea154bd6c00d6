"""The application without sockets: routes, refusals, the token, back-pressure, counters."""

import asyncio
import hmac
import json
import re
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from serve.made import SHAPE, Answer, Rows, call, head, manifest, pictures, started
from starlette.types import ASGIApp

from splitveil.errors import ConfigError
from splitveil.serve.admission import Limits
from splitveil.serve.kserve import EXTENSIONS
from splitveil.serve.server import make_app
from splitveil.serve.wire import HEADER_LENGTH, TensorSpec, decode_answer, encode_request

Z = TensorSpec(name="z", shape=SHAPE)
LOGITS = TensorSpec(name="logits", shape=(4,))
INFER = "/v2/models/tiny/infer"
TOKEN = "correct horse battery".replace(" ", "-")
FAST = Limits(max_delay=0.0)


def play(scene: Callable[[ASGIApp], Coroutine[Any, Any, None]], app: ASGIApp) -> None:
    async def whole() -> None:
        async with started(app):
            await scene(app)

    asyncio.run(whole())


def ask(*requests: tuple[Any, ...], app: ASGIApp | None = None) -> list[Answer]:
    """The answers to some requests, one after the other."""
    found = []

    async def scene(ready: ASGIApp) -> None:
        for request in requests:
            found.append(await call(ready, *request))

    play(scene, make_app(manifest(), head, FAST) if app is None else app)
    return found


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("path", [INFER, "/v2/models/tiny/versions/1/infer"])
def test_infer_answers_what_the_head_computes(binary: bool, path: str) -> None:
    z = pictures(3)
    message = encode_request(z, Z, "logits", binary=binary)
    (answer,) = ask(("POST", path, message.body, message.headers))
    assert answer.status == 200
    assert (HEADER_LENGTH.lower() in answer.headers) is binary
    found = decode_answer(answer.body, answer.headers.get(HEADER_LENGTH.lower()), LOGITS, 3)
    np.testing.assert_allclose(found, head(z), rtol=1e-6)


def test_the_id_comes_back() -> None:
    tensor = {"name": "z", "shape": [1, *SHAPE], "datatype": "FP32", "data": [0] * 6}
    body = json.dumps({"id": "seven", "inputs": [tensor]}).encode()
    (answer,) = ask(("POST", INFER, body))
    assert answer.json == {
        "model_name": "tiny", "model_version": "1", "id": "seven",
        "outputs": [{"name": "logits", "shape": [1, 4], "datatype": "FP32", "data": [0.0] * 4}],
    }  # fmt: skip


def test_metadata_and_health_of_the_protocol() -> None:
    about, live, ready, model, model_ready = ask(
        *(("GET", p) for p in ("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/tiny",
                               "/v2/models/tiny/ready"))
    )  # fmt: skip
    assert {a.status for a in (about, live, ready, model, model_ready)} == {200}
    assert about.json["name"] == "splitveil"
    assert about.json["extensions"] == EXTENSIONS
    assert model.json == {
        "name": "tiny", "versions": ["1"], "platform": "onnxruntime_onnx",
        "inputs": [{"name": "z", "datatype": "FP32", "shape": [-1, 1, 2, 3]}],
        "outputs": [{"name": "logits", "datatype": "FP32", "shape": [-1, 4]}],
        "parameters": {"export": manifest().identity},
    }  # fmt: skip


def test_before_startup_it_lives_but_is_not_ready() -> None:
    app = make_app(manifest(), head)

    async def scene() -> None:
        assert (await call(app, "GET", "/v2/health/live")).status == 200
        for path in ("/v2/health/ready", "/v2/models/tiny/ready"):
            answer = await call(app, "GET", path)
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")

    asyncio.run(scene())


class Deadly(BaseException):
    """Ends the task that runs the model."""


def test_a_server_whose_model_has_stopped_is_not_ready_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def deadly(rows: Rows) -> Rows:
        raise Deadly

    message = encode_request(pictures(1), Z, "logits")
    good = ("POST", INFER, message.body, message.headers)
    ready = [("GET", path) for path in ("/v2/health/ready", "/v2/models/tiny/ready")]
    app = make_app(manifest(), deadly, FAST)
    before, first, *after, live, index = ask(
        ready[0], good, good, *ready, ("GET", "/v2/health/live"),
        ("POST", "/v2/repository/index"), app=app,
    )  # fmt: skip
    assert (before.status, first.status) == (200, 503)
    assert "the model has stopped" in first.json["error"]
    assert [a.status for a in after] == [503] * 3
    assert live.status == 200
    assert index.json[0]["state"] == "UNAVAILABLE"
    assert "the task that runs the model has ended" in caplog.text


def test_a_server_whose_model_hangs_is_not_ready() -> None:
    slow = Slow()
    message = encode_request(pictures(1), Z, "logits")

    async def scene(app: ASGIApp) -> None:
        answer = await call(app, "POST", INFER, message.body, message.headers)
        assert answer.status == 504
        assert (await call(app, "GET", "/v2/health/ready")).status == 503
        slow.go.set()
        await asyncio.sleep(0.2)
        assert (await call(app, "GET", "/v2/health/ready")).status == 200

    play(scene, make_app(manifest(), slow, Limits(answer_seconds=0.05, max_delay=0.0)))


def test_a_model_that_answers_other_rows_fails_aloud() -> None:
    message = encode_request(pictures(2), Z, "logits")
    app = make_app(manifest(), lambda rows: head(rows)[:1], FAST)
    bad, ready = ask(
        ("POST", INFER, message.body, message.headers), ("GET", "/v2/health/ready"), app=app
    )
    assert (bad.status, ready.status) == (500, 200)


def test_no_path_is_redirected_to_the_host_that_a_request_names() -> None:
    evil = {"host": "evil.example"}
    paths = ("/v2/", "/v2//", "/v2/models/tiny/", f"{INFER}/", "/page", "/page/", "/openapi.json/")
    for answer in ask(*(("GET", path, b"", evil) for path in paths)):
        assert answer.status == 404
        assert "location" not in answer.headers


def test_a_slow_body_gives_way_to_a_new_one() -> None:
    async def scene(app: ASGIApp) -> None:
        got: list[list[Any]] = [[] for _ in range(3)]

        async def stalled() -> dict[str, Any]:
            await asyncio.sleep(60)
            return {}

        async def slow(sent: list[Any]) -> None:
            async def send(message: Any) -> None:  # noqa: ANN401
                sent.append(message)

            scope = {"type": "http", "method": "POST", "path": INFER, "headers": []}
            await app(scope, stalled, send)

        tasks = [asyncio.ensure_future(slow(sent)) for sent in got]
        await asyncio.sleep(0.1)
        message = encode_request(pictures(1), Z, "logits")
        answer = await call(app, "POST", INFER, message.body, message.headers)
        assert answer.status == 200
        await asyncio.sleep(0.05)
        assert [[m["status"] for m in sent[:1]] for sent in got] == [[408], [408], []]
        for task in tasks:
            task.cancel()

    play(scene, make_app(manifest(), head, Limits(max_in_flight=2, max_delay=0.0)))


OTHERS = [
    ("GET", "/v2/models/other", 404, "the only model is 'tiny', version 1"),
    ("GET", "/v2/models/tiny/versions/2", 404, "the only model is 'tiny', version 1"),
    ("POST", "/v2/models/other/infer", 404, "the only model is 'tiny'"),
    ("GET", INFER, 405, "Method Not Allowed"),
    ("DELETE", "/v2", 405, "Method Not Allowed"),
    ("GET", "/etc/passwd", 404, "Not Found"),
]


@pytest.mark.parametrize(("method", "path", "status", "reason"), OTHERS)
def test_other_paths_are_refused_with_a_reason(
    method: str, path: str, status: int, reason: str
) -> None:
    (answer,) = ask((method, path))
    assert answer.status == status
    assert reason in answer.json["error"]


def test_a_body_over_the_limit_is_rejected_early() -> None:
    limit = Z.max_body(64)
    told, lied, gzip = ask(
        ("POST", INFER, b"", {"content-length": str(limit + 1)}),
        ("POST", INFER, b"x" * (limit + 1), {"content-length": "10"}),
        ("POST", INFER, b"", {"content-encoding": "gzip"}),
    )
    assert told.status == lied.status == 413
    assert f"the limit is {limit}" in told.json["error"]
    assert (gzip.status, "compressed" in gzip.json["error"]) == (415, True)


def test_a_body_that_does_not_arrive_is_not_waited_for() -> None:
    app = make_app(manifest(), head, Limits(read_seconds=0.05))
    got: list[Any] = []

    async def stalled() -> dict[str, Any]:
        await asyncio.sleep(60)
        return {}

    async def send(message: Any) -> None:  # noqa: ANN401
        got.append(message)

    async def scene(ready: ASGIApp) -> None:
        scope = {
            "type": "http", "method": "POST", "path": INFER, "headers": [], "query_string": b"",
            "root_path": "",
        }  # fmt: skip
        await ready(scope, stalled, send)

    play(scene, app)
    assert got[0]["status"] == 408


def test_numbers_that_overflow_in_the_head_get_no_answer() -> None:
    z = np.full((1, *SHAPE), 3e38, np.float32)
    message = encode_request(z, Z, "logits")

    def overflowing(rows: Rows) -> Rows:
        with np.errstate(over="ignore", invalid="ignore"):
            return head(rows)

    app = make_app(manifest(), overflowing, FAST)
    (answer,) = ask(("POST", INFER, message.body, message.headers), app=app)
    assert answer.status == 422
    assert "is not finite" in answer.json["error"]


def test_without_the_token_only_the_probes_answer() -> None:
    app = make_app(manifest(), head, FAST, TOKEN)
    right, also = ({"authorization": f"{word} {TOKEN}"} for word in ("Bearer", "bearer"))
    wrong = [
        {}, {"authorization": TOKEN}, {"authorization": f"Bearer {TOKEN}x"},
        {"authorization": f"basic {TOKEN}"}, {"authorization": "Bearer "},
        {"authorization": "\xff"},
    ]  # fmt: skip
    paths = ("/v2", "/v2/models/tiny", "/metrics", "/nowhere", INFER)
    refused = ask(*(("GET", p, b"", h) for p in paths for h in wrong), app=app)
    assert {a.status for a in refused} == {401}
    assert {a.headers["www-authenticate"] for a in refused} == {"Bearer"}
    message = encode_request(pictures(1), Z, "logits")
    allowed = ask(
        ("GET", "/v2", b"", right),
        ("GET", "/v2", b"", also),
        ("POST", INFER, message.body, {**message.headers, **right}),
        ("GET", "/v2/health/live"),
        ("GET", "/v2/health/ready"),
        app=app,
    )
    assert [a.status for a in allowed] == [200] * 5


def test_tokens_are_compared_as_digests_of_one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    true = hmac.compare_digest

    def spy(a: bytes, b: bytes) -> bool:
        seen.append((len(a), len(b)))
        return true(a, b)

    monkeypatch.setattr(hmac, "compare_digest", spy)
    app = make_app(manifest(), head, FAST, TOKEN)
    ask(*(("GET", "/v2", b"", {"authorization": "x" * n}) for n in (0, 1, 5000)), app=app)
    assert seen == [(32, 32)] * 3


@pytest.mark.parametrize("token", ["", "short", "x" * 15, "spaces " * 4, "é" * 20])
def test_a_token_that_is_weak_or_fits_no_header_is_refused(token: str) -> None:
    with pytest.raises(ConfigError, match="a token must be at least 16 printable ASCII"):
        make_app(manifest(), head, FAST, token)


class Slow:
    """A head that waits for a signal."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def __call__(self, rows: Rows) -> Rows:
        self.go.wait(10)
        return head(rows)


def test_overload_gets_429_and_what_is_accepted_an_answer() -> None:
    slow = Slow()
    limits = Limits(max_batch=4, max_waiting=8, max_in_flight=6, max_delay=0.0)
    message = encode_request(pictures(4), Z, "logits")

    async def scene(app: ASGIApp) -> None:
        tasks = []
        for _ in range(4):  # four rows run, eight wait, four are too many
            tasks.append(
                asyncio.ensure_future(call(app, "POST", INFER, message.body, message.headers))
            )
            await asyncio.sleep(0.02)
        junk = await call(app, "POST", INFER, b"junk")
        assert junk.status == 429  # no body is read while the queue is full
        shed = [t.result() for t in tasks if t.done()]
        assert [a.status for a in shed] == [429]
        assert shed[0].headers["retry-after"] == "1"
        tasks += [asyncio.ensure_future(call(app, "GET", "/v2")) for _ in range(2)]
        await asyncio.sleep(0.05)
        slow.go.set()
        answers = await asyncio.gather(*tasks)
        assert sorted(a.status for a in answers) == [200] * 5 + [429]

    play(scene, make_app(manifest(), slow, limits))


def test_too_many_requests_are_rejected_unread() -> None:
    slow = Slow()
    message = encode_request(pictures(1), Z, "logits")

    async def scene(app: ASGIApp) -> None:
        first = asyncio.ensure_future(call(app, "POST", INFER, message.body, message.headers))
        await asyncio.sleep(0.05)
        second = await call(app, "POST", INFER, message.body, message.headers)
        assert (second.status, second.headers["retry-after"]) == (503, "1")
        assert "too many requests at once" in second.json["error"]
        assert (await call(app, "GET", "/v2/health/live")).status == 200
        slow.go.set()
        assert (await first).status == 200

    play(scene, make_app(manifest(), slow, Limits(max_in_flight=1)))


def test_an_answer_that_takes_too_long_is_given_up() -> None:
    slow = Slow()
    message = encode_request(pictures(1), Z, "logits")

    async def scene(app: ASGIApp) -> None:
        answer = await call(app, "POST", INFER, message.body, message.headers)
        assert (answer.status, answer.headers["retry-after"]) == (504, "1")
        slow.go.set()

    play(scene, make_app(manifest(), slow, Limits(answer_seconds=0.05, max_delay=0.0)))


def test_the_counters_count() -> None:
    message = encode_request(pictures(3), Z, "logits")
    good = ("POST", INFER, message.body, message.headers)
    text = ask(good, good, ("POST", INFER, b"junk"), ("GET", "/metrics"))[-1].body.decode()
    lines = set(text.splitlines())
    assert lines >= {
        'splitveil_requests_total{code="200"} 2.0',
        'splitveil_requests_total{code="400"} 1.0',
        'splitveil_refused_total{reason="WireError"} 1.0',
        'splitveil_batch_rows_bucket{le="2.0"} 0.0',
        'splitveil_batch_rows_bucket{le="4.0"} 2.0',
        "splitveil_batch_rows_sum 6.0",
        "splitveil_infer_seconds_count 2.0",
        "splitveil_rows_waiting 0.0",
        "splitveil_requests_in_flight 1.0",
    }


def test_the_names_of_the_counters_stay_what_dashboards_ask_for() -> None:
    message = encode_request(pictures(3), Z, "logits")
    good = ("POST", INFER, message.body, message.headers)
    answer = ask(good, ("POST", INFER, b"junk"), ("GET", "/metrics"))[-1]
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = answer.body.decode().splitlines()
    histograms = ("infer_seconds", "batch_rows", "batch_seconds")
    assert [line.removeprefix("# TYPE splitveil_") for line in lines if "# TYPE" in line] == [
        "requests_total counter",
        "refused_total counter",
        "connections_ended_total counter",
        *(f"{name} histogram" for name in histograms),
        "rows_waiting gauge",
        "requests_in_flight gauge",
    ]
    assert {re.split("[{ ]", line)[0] for line in lines if not line.startswith("#")} == {
        f"splitveil_{name}"
        for name in (
            "requests_total", "refused_total", "rows_waiting", "requests_in_flight",
            *(f"{h}_{part}" for h in histograms for part in ("bucket", "sum", "count")),
        )
    }  # fmt: skip


def test_two_servers_in_one_process_count_for_themselves() -> None:
    busy, idle = (make_app(manifest(), head, FAST) for _ in range(2))
    ask(("GET", "/v2"), ("GET", "/v2"), app=busy)
    (text,) = ask(("GET", "/metrics"), app=idle)
    assert b"splitveil_requests_total{" not in text.body
    (text,) = ask(("GET", "/metrics"), app=busy)
    assert b'splitveil_requests_total{code="200"} 2.0' in text.body


@pytest.mark.parametrize(
    "bad",
    [{"max_batch": 0}, {"max_waiting": 63}, {"max_in_flight": 0}, {"max_delay": -0.1},
     {"max_delay": 40.0}, {"read_seconds": 0.0}],
)  # fmt: skip
def test_limits_that_make_no_sense_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"max_waiting at least max_batch|max_delay must be"):
        Limits(**bad)
