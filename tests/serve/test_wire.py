"""The protocol's bytes: golden messages, round trips, and a reason for everything refused."""

import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitveil.errors import WireError
from splitveil.serve.wire import (
    HEADER_LENGTH,
    InferRequest,
    Message,
    TensorSpec,
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
)

Z = TensorSpec(name="z", shape=(2, 3))
LOGITS = TensorSpec(name="logits", shape=(2,))


def rows(n: int, seed: int = 0) -> Any:  # noqa: ANN401
    return np.random.default_rng(seed).standard_normal((n, 2, 3), dtype=np.float32)


def read(message: Message, max_rows: int = 8) -> InferRequest:
    return decode_request(
        message.body, message.headers.get(HEADER_LENGTH), Z, "logits", max_rows
    )  # fmt: skip


def test_a_binary_request_byte_for_byte() -> None:
    z = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    message = encode_request(z, Z, "logits")
    text = (
        b'{"outputs": [{"name": "logits", "parameters": {"binary_data": true}}], "inputs": '
        b'[{"name": "z", "shape": [1, 2, 3], "datatype": "FP32", '
        b'"parameters": {"binary_data_size": 24}}]}'
    )
    assert message.body == text + struct.pack("<6f", 0, 1, 2, 3, 4, 5)
    assert message.headers == {
        "Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(text))
    }  # fmt: skip


def test_a_json_request_holds_the_numbers() -> None:
    z = np.arange(6, dtype=np.float32).reshape(1, 2, 3) * np.float32(0.25)
    message = encode_request(z, Z, "logits", binary=False)
    (tensor,) = json.loads(message.body)["inputs"]
    assert tensor == {
        "name": "z", "shape": [1, 2, 3], "datatype": "FP32",
        "data": [0.0, 0.25, 0.5, 0.75, 1.0, 1.25],
    }  # fmt: skip
    assert HEADER_LENGTH not in message.headers


@given(n=st.integers(1, 8), seed=st.integers(0, 2**31), binary=st.booleans())
def test_requests_and_answers_survive_the_wire_bit_for_bit(n: int, seed: int, binary: bool) -> None:
    z = rows(n, seed)
    request = read(encode_request(z, Z, "logits", binary=binary))
    assert np.array_equal(request.rows, z)
    assert request.rows.dtype == np.float32
    assert request.binary_answer is binary
    logits = z[:, :, 0].copy()
    answer = encode_answer(logits, LOGITS, "m", "7", binary=binary)
    found = decode_answer(answer.body, answer.headers.get(HEADER_LENGTH), LOGITS, n)
    assert np.array_equal(found, logits)


def test_nested_numbers_and_whole_numbers_are_read() -> None:
    body = json.dumps(
        {"inputs": [{"name": "z", "shape": [1, 2, 3], "datatype": "FP32",
                     "data": [[[0, 1, 2], [3, 4, 5.5]]]}]}
    ).encode()  # fmt: skip
    request = read(Message(body, {}))
    assert request.rows.tolist() == [[[0, 1, 2], [3, 4, 5.5]]]
    assert request.binary_answer is False
    assert request.id is None


def changed(**changes: Any) -> dict[str, Any]:  # noqa: ANN401
    """A valid JSON request with the tensor changed; None takes a key away."""
    tensor = {"name": "z", "shape": [1, 2, 3], "datatype": "FP32", "data": [0.5] * 6} | changes
    return {"inputs": [{k: v for k, v in tensor.items() if v is not None}]}


def test_the_request_that_is_changed_below_is_itself_valid() -> None:
    assert read(Message(json.dumps(changed()).encode(), {})).rows.shape == (1, 2, 3)


REFUSED: list[tuple[Any, str]] = [
    ([], "must be a JSON object, got list"),
    ({}, "inputs must be a list of exactly one tensor"),
    ({"inputs": {}}, "inputs must be a list of exactly one"),
    ({"inputs": changed()["inputs"] * 2}, "inputs must be a list of exactly one"),
    (changed(name="x"), "inputs must be 'z', got 'x'"),
    (changed(name=None), "inputs must be 'z', got None"),
    (changed(datatype="FP64"), "datatype must be FP32, got 'FP64'"),
    (changed(datatype="BYTES"), "datatype must be FP32, got 'BYTES'"),
    (changed(shape=[1, 3, 2]), r"shape must be \[rows, 2, 3\], got \[1, 3, 2\]"),
    (changed(shape=[1.0, 2, 3]), "shape must be"),
    (changed(shape=[True, 2, 3]), "shape must be"),
    (changed(shape=[[1], 2, 3]), "shape must be"),
    (changed(shape="1, 2, 3"), "shape must be"),
    (changed(shape=[]), "shape must be"),
    (changed(shape=[0, 2, 3], data=[]), r"rows must be in 1\.\.8, got 0"),
    (changed(shape=[-1, 2, 3]), r"rows must be in 1\.\.8, got -1"),
    (changed(shape=[9, 2, 3], data=[0] * 54), r"rows must be in 1\.\.8, got 9"),
    (changed(data=[0.5] * 5), "needs 6 numbers, got 5"),
    (changed(data=[[[0, 1, 2], [3, 4]]]), r"nested data must have the shape \[1, 2, 3\]"),
    (changed(data=[[[0, 1, 2], 3]]), "nested data must have the shape"),
    (changed(data=[[0, 1, 2], [3, 4, 5]]), "nested data must have the shape"),
    (changed(data=["1"] * 6), "data must hold numbers only"),
    (changed(data=[True] * 6), "data must hold numbers only"),
    (changed(data=[0, 1, 2, 3, 4, [5]]), "data must hold numbers only"),
    (changed(data="AAAA"), "data must be a list of numbers"),
    (changed(data=[10**400] + [0] * 5), "got one beyond the range of floats"),
    (changed(data=[1e39] + [0] * 5), "every number must be finite"),
    (changed(data=None), "is 24 bytes; binary_data_size is None and 0 bytes follow"),
    (changed(parameters={"binary_data_size": 24}), "either data, or parameters"),
    (changed(parameters=7), "parameters must be an object"),
    (changed() | {"id": 7}, "id must be a string"),
    (changed() | {"id": "x" * 129}, "id must be a string of at most 128"),
    (changed() | {"outputs": [{"name": "z"}]}, "the only output is 'logits'"),
    (changed() | {"outputs": ["logits"]}, "outputs must be a list of objects"),
    (changed() | {"outputs": [{"name": "logits"}] * 2}, "the only output is 'logits'"),
    (changed() | {"parameters": {"binary_data_output": 1}}, "must be true or false"),
    (
        changed() | {"outputs": [{"name": "logits", "parameters": {"classification": 3}}]},
        "output parameter 'classification' is not supported",
    ),
]


@pytest.mark.parametrize(("message", "reason"), REFUSED, ids=lambda v: str(v)[:60])
def test_json_that_is_not_a_request_is_refused_with_its_reason(
    message: Any,  # noqa: ANN401
    reason: str,
) -> None:
    with pytest.raises(WireError, match=reason) as caught:
        read(Message(json.dumps(message).encode(), {}))
    assert caught.value.status == 400


NOT_JSON = [b"", b"\x80\x04\x95", b"{", b'{"a": NaN}', b'{"a": Infinity}', b"[" * 100_000, b"\xff"]


@pytest.mark.parametrize("body", NOT_JSON, ids=lambda b: repr(b[:12]))
def test_bytes_that_are_not_json_are_refused(body: bytes) -> None:
    with pytest.raises(WireError, match="the body is not JSON"):
        read(Message(body, {}))


@pytest.mark.parametrize("length", ["", "-1", "1e3", "99999", "٣", " 5", "1" * 40])
def test_a_header_length_that_cannot_be_is_refused(length: str) -> None:
    message = encode_request(rows(1), Z, "logits")
    with pytest.raises(WireError, match=HEADER_LENGTH):
        read(Message(message.body, {HEADER_LENGTH: length}))


@pytest.mark.parametrize("extra", [b"", b"1234", b"123456789"])
def test_bytes_too_many_or_too_few_are_refused(extra: bytes) -> None:
    message = encode_request(rows(1), Z, "logits")
    body = message.body[:-4] if not extra else message.body + extra
    with pytest.raises(WireError, match="is 24 bytes; binary_data_size is 24 and"):
        read(Message(body, message.headers))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_bytes_of_numbers_that_are_not_finite_are_refused(value: float) -> None:
    z = rows(2)
    z[1, 1, 2] = value
    with pytest.raises(WireError, match="got NaN or infinity"):
        read(encode_request(z, Z, "logits"))


def test_an_answer_with_other_rows_than_asked_is_refused() -> None:
    answer = encode_answer(np.zeros((2, 2), np.float32), LOGITS, "m", None, binary=False)
    with pytest.raises(WireError, match="the answer has 2 rows, expected 3"):
        decode_answer(answer.body, None, LOGITS, 3)
    with pytest.raises(WireError, match=r"rows must be in 1\.\.1"):
        decode_answer(answer.body, None, LOGITS, 1)


def test_the_largest_body_leaves_room_for_the_longest_numbers() -> None:
    z = np.full((8, 2, 3), -1.1754943508222875e-38, np.float32)
    assert len(encode_request(z, Z, "logits", binary=False).body) < Z.max_body(8)
