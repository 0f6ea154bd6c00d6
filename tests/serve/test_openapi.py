"""The OpenAPI document is true: what it allows is answered, what it does not is refused."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from serve.made import SHAPE, head, manifest

from splitveil.serve.admission import Limits
from splitveil.serve.kserve import document
from splitveil.serve.server import make_app, running
from splitveil.serve.transport import HttpTransport

schemathesis = pytest.importorskip("schemathesis")
jsonschema_rs = pytest.importorskip("jsonschema_rs")

TOKEN = "0123456789abcdef"  # noqa: S105
# Paths of the document of version 0.1.0: clients that were made from it must go on to work.
FIRST_RELEASE = {
    "/v2", "/v2/health/live", "/v2/health/ready", "/metrics", "/v2/models/tiny",
    "/v2/models/tiny/ready", "/v2/models/tiny/infer",
}  # fmt: skip


def described(*, token: bool = False) -> dict[str, Any]:
    return document(manifest(), "1", 64, token=token)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    def quiet(rows: Any) -> Any:  # noqa: ANN401
        with np.errstate(over="ignore", invalid="ignore"):
            return head(rows)

    with running(make_app(manifest(), quiet, Limits(max_delay=0.0))) as found:
        yield found


def test_the_document_is_served_and_names_the_token() -> None:
    app = make_app(manifest(), head, None, TOKEN)
    with running(app) as url, HttpTransport(url) as call:
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        served = json.loads(call("GET", "/openapi.json", b"", bearer).body)
        assert call("GET", "/openapi.json", b"", {}).status == 401
    assert served["security"] == [{"token": []}]
    assert served["paths"] == described(token=True)["paths"]
    assert "security" not in described()


def test_the_document_still_has_every_path_of_the_first_release() -> None:
    assert described()["paths"].keys() >= FIRST_RELEASE


SCHEMA = schemathesis.openapi.from_dict(described())
EXCLUDED = [
    # A schema cannot say that rows × numbers per row must be the length of the data.
    schemathesis.checks.positive_data_acceptance,
    # It rewrites prefixItems into a schema that it then refuses itself; `check_schema` instead.
    schemathesis.checks.response_schema_conformance,
]


def check_schema(path: str, method: str, status: int, body: Any) -> None:  # noqa: ANN401
    """Raise where an answer is not what the document says of its status."""
    told = described()["paths"][path][method.lower()]["responses"].get(str(status), {})
    if media := told.get("content", {}).get("application/json"):
        jsonschema_rs.Draft202012Validator(media["schema"]).validate(body)


def test_a_good_answer_is_what_the_document_says(url: str) -> None:
    path = "/v2/models/tiny/infer"
    tensor = {"name": "z", "shape": [2, *SHAPE], "datatype": "FP32", "data": [0.5] * 12}
    with HttpTransport(url) as call:
        answer = call("POST", path, json.dumps({"inputs": [tensor]}).encode(), {})
    assert answer.status == 200
    found = json.loads(answer.body)
    check_schema(path, "POST", 200, found)
    found["outputs"][0]["shape"] = [2, 5]
    with pytest.raises(jsonschema_rs.ValidationError, match="4 was expected"):
        check_schema(path, "POST", 200, found)


@SCHEMA.parametrize()  # type: ignore[untyped-decorator]
@settings(max_examples=25, deadline=None)
def test_the_server_does_what_its_document_says(case: Any, url: str) -> None:  # noqa: ANN401
    answer = case.call(base_url=url)
    case.validate_response(answer, excluded_checks=EXCLUDED)
    assert answer.status_code < 500, answer.text
    if "json" in answer.headers["content-type"]:
        check_schema(case.path, case.method, answer.status_code, answer.json())
    if answer.status_code != 200:
        assert answer.json()["error"]


def test_the_documents_example_shape_is_the_models() -> None:
    infer = described()["paths"]["/v2/models/tiny/infer"]["post"]
    schema = infer["requestBody"]["content"]["application/json"]["schema"]
    sizes = schema["properties"]["inputs"]["items"]["properties"]["shape"]["prefixItems"]
    assert sizes == [
        {"type": "integer", "minimum": 1, "maximum": 64}, *({"const": n} for n in SHAPE)
    ]  # fmt: skip
