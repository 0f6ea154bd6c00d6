"""Triton's extensions of the KServe protocol, read with Triton's own client."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from serve.made import SHAPE, head, manifest, pictures
from serve.test_app import FAST, INFER, ask

from splitveil.errors import WireError
from splitveil.serve.admission import Limits
from splitveil.serve.kserve import asked_seconds
from splitveil.serve.server import make_app, running

TENSOR = {"name": "z", "shape": [1, *SHAPE], "datatype": "FP32", "data": [0] * 6}


def body(**parameters: Any) -> bytes:  # noqa: ANN401
    return json.dumps({"inputs": [TENSOR], "parameters": parameters}).encode()


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    http = pytest.importorskip("tritonclient.http")
    with running(make_app(manifest(), head, Limits(max_delay=0.0))) as url:
        found = http.InferenceServerClient(url.removeprefix("http://"))
        yield found
        found.close()


def test_tritons_client_reads_the_configuration(client: Any) -> None:  # noqa: ANN401
    found = client.get_model_config("tiny")
    assert (found["name"], found["platform"], found["max_batch_size"]) == (
        "tiny", "onnxruntime_onnx", 64,
    )  # fmt: skip
    assert found["input"] == [{"name": "z", "data_type": "TYPE_FP32", "dims": [1, 2, 3]}]
    assert found["output"] == [{"name": "logits", "data_type": "TYPE_FP32", "dims": [4]}]
    assert client.get_model_config("tiny", "1") == found


def test_tritons_client_reads_the_index_and_cannot_change_it(client: Any) -> None:  # noqa: ANN401
    told = [{"name": "tiny", "version": "1", "state": "READY", "reason": ""}]
    assert client.get_model_repository_index() == told
    failure = pytest.importorskip("tritonclient.utils").InferenceServerException
    for change in (client.load_model, client.unload_model):
        with pytest.raises(failure, match="this server holds one model"):
            change("tiny")


def test_tritons_client_reads_statistics(client: Any) -> None:  # noqa: ANN401
    http = pytest.importorskip("tritonclient.http")
    given = http.InferInput("z", [3, *SHAPE], "FP32")
    given.set_data_from_numpy(pictures(3))
    before = client.get_inference_statistics()["model_stats"][0]
    for _ in range(2):
        client.infer("tiny", [given])
    (found,) = client.get_inference_statistics("tiny")["model_stats"]
    assert (found["name"], found["version"]) == ("tiny", "1")
    assert found["inference_count"] - before["inference_count"] == 6
    assert found["execution_count"] - before["execution_count"] == 2
    assert found["inference_stats"]["success"]["count"] == found["execution_count"]
    assert found["inference_stats"]["success"]["ns"] > found["inference_stats"]["queue"]["ns"] > 0
    batches = {b["batch_size"]: b["compute_infer"]["count"] for b in found["batch_stats"]}
    assert sum(size * count for size, count in batches.items()) == found["inference_count"]
    assert client.get_inference_statistics("tiny", "1")["model_stats"][0]["name"] == "tiny"


def test_failed_answers_are_counted_apart() -> None:
    def broken(rows: Any) -> Any:  # noqa: ANN401
        return np.full((len(rows), 4), np.inf, np.float32)

    bad, told = ask(
        ("POST", INFER, body()), ("GET", "/v2/models/stats"), app=make_app(manifest(), broken, FAST)
    )
    assert bad.status == 422
    stats = told.json["model_stats"][0]["inference_stats"]
    assert (stats["fail"]["count"], stats["success"]["count"]) == (1, 0)


def test_a_request_may_ask_for_a_shorter_time() -> None:
    import time

    def slow(rows: Any) -> Any:  # noqa: ANN401
        time.sleep(0.3)
        return head(rows)

    late, patient = ask(
        ("POST", INFER, body(timeout=20_000)), ("POST", INFER, body(timeout=0)),
        app=make_app(manifest(), slow, FAST),
    )  # fmt: skip
    assert (late.status, patient.status) == (504, 200)


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"priority": 1}, "request parameter 'priority' is not supported; known are"),
        ({"sequence_id": 4, "timeout": 1}, "request parameter 'sequence_id' is not supported"),
        ({"timeout": -1}, "timeout must be whole microseconds ≥ 0, got -1"),
        ({"timeout": True}, "timeout must be whole microseconds"),
        ({"timeout": "1"}, "timeout must be whole microseconds"),
    ],
)
def test_other_parameters_are_answered_with_a_reason(
    parameters: dict[str, Any], reason: str
) -> None:
    (answer,) = ask(("POST", INFER, body(**parameters)))
    assert answer.status == 400
    assert reason in answer.json["error"]


def test_no_request_gets_more_time_than_the_server_gives() -> None:
    assert asked_seconds({"timeout": 10**400}, 30.0) == 30.0
    assert asked_seconds({"timeout": 1}, 30.0) == 1e-6
    with pytest.raises(WireError, match="not supported"):
        asked_seconds({"headers": 1}, 30.0)


@pytest.mark.parametrize("junk", [b"[]", b"{", b'{"ready": 1}', b"7", b"[" * 4000, b" " * 5000])
def test_an_index_is_asked_for_in_json(junk: bytes) -> None:
    (answer,) = ask(("POST", "/v2/repository/index", junk))
    assert answer.status in (400, 413)


def test_the_index_of_another_path_is_none() -> None:
    found = ask(
        ("POST", "/v2/repository/models/tiny/paint"), ("GET", "/v2/models/other/config"),
        ("GET", "/v2/models/other/stats"), ("GET", "/v2/models/tiny/versions/2/config"),
        ("POST", "/v2/repository/index", b'{"ready": true}'),
    )  # fmt: skip
    assert [a.status for a in found] == [404, 404, 404, 404, 200]
