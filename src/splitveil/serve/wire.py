"""The KServe v2 inference protocol over HTTP: tensors as JSON or as raw bytes after a JSON header.

Messages come from strangers. A message is parsed as JSON and little-endian float32, checked against
what is expected, and rejected with a reason; nothing in it is ever executed.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitveil.errors import WireError
from splitveil.untrusted import parse_json

Rows = NDArray[np.float32]
Shape = tuple[int, ...]
Json = dict[str, Any]
DATATYPE, ITEM_BYTES = "FP32", 4
HEADER_LENGTH = "Inference-Header-Content-Length"
BINARY_TYPE, JSON_TYPE = "application/octet-stream", "application/json"
JSON_BYTES_PER_FLOAT = 32  # enough for "-1.2345678901234567e-10, "
HEADER_BYTES = 16_384  # enough for the JSON around the numbers
MAX_ID = 128


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Name of a tensor, and the shape of one of its rows."""

    name: str
    shape: Shape

    def max_body(self, max_rows: int) -> int:
        """Bytes of the largest message with this number of rows."""
        return HEADER_BYTES + max_rows * math.prod(self.shape) * JSON_BYTES_PER_FLOAT

    def metadata(self) -> Json:
        """The server's description of it; -1 stands for any number of rows."""
        return {"name": self.name, "datatype": DATATYPE, "shape": [-1, *self.shape]}


@dataclass(frozen=True)
class Message:
    """A body and its headers."""

    body: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True)
class InferRequest:
    """A checked request: rows, id, whether to answer in raw bytes, and its other parameters."""

    rows: Rows
    id: str | None
    binary_answer: bool
    parameters: Json = field(default_factory=dict)


def encode_request(rows: Rows, spec: TensorSpec, output: str, *, binary: bool = True) -> Message:
    """Rows (n, …) as the body of an infer call; nothing but the tensor and its description."""
    wanted = {"name": output, "parameters": {"binary_data": binary}}
    return _encode({"outputs": [wanted]}, "inputs", rows, spec.name, binary=binary)


def encode_answer(
    rows: Rows, spec: TensorSpec, model: str, request_id: str | None, *, binary: bool
) -> Message:
    """The server's rows as the body of its answer."""
    head = {"model_name": model, "model_version": "1"}
    if request_id is not None:
        head["id"] = request_id
    return _encode(head, "outputs", rows, spec.name, binary=binary)


def _encode(head: Json, key: str, rows: Rows, name: str, *, binary: bool) -> Message:
    tensor: Json = {"name": name, "shape": list(rows.shape), "datatype": DATATYPE}
    if not binary:
        body = json.dumps(head | {key: [tensor | {"data": rows.ravel().tolist()}]})
        return Message(body.encode(), {"Content-Type": JSON_TYPE})
    raw = np.ascontiguousarray(rows, "<f4").tobytes()
    tensor["parameters"] = {"binary_data_size": len(raw)}
    text = json.dumps(head | {key: [tensor]}).encode()
    return Message(text + raw, {"Content-Type": BINARY_TYPE, HEADER_LENGTH: str(len(text))})


def decode_request(
    body: bytes,
    header_length: str | None,
    spec: TensorSpec,
    output: str,
    max_rows: int,
    *,
    twice: list[str] | None = None,
) -> InferRequest:
    """The rows of an infer call; raises `WireError` for anything else.

    `twice` collects the keys that an object has twice, which are refused without it.
    """
    head, raw = _split(body, header_length, twice)
    rows = _one_tensor(head, "inputs", raw, spec, max_rows)
    request_id = head.get("id")
    if request_id is not None and not (isinstance(request_id, str) and len(request_id) <= MAX_ID):
        raise WireError(f"id must be a string of at most {MAX_ID} characters")
    others = {k: v for k, v in _parameters(head).items() if k != "binary_data_output"}
    return InferRequest(rows, request_id, _wants_binary(head, output), others)


def decode_answer(body: bytes, header_length: str | None, spec: TensorSpec, rows: int) -> Rows:
    """The answer to a request of `rows` rows; raises `WireError` for anything else."""
    head, raw = _split(body, header_length)
    found = _one_tensor(head, "outputs", raw, spec, rows)
    if len(found) != rows:
        raise WireError(f"the answer has {len(found)} rows, expected {rows}")
    return found


def _split(
    body: bytes, header_length: str | None, twice: list[str] | None = None
) -> tuple[Json, bytes]:
    """The JSON at the start of a body, and the bytes after it."""
    size = len(body)
    if header_length is not None:
        if not (header_length.isascii() and header_length.isdigit() and len(header_length) < 16):  # noqa: PLR2004
            raise WireError(f"{HEADER_LENGTH} must be a whole number, got {header_length[:32]!r}")
        size = int(header_length)
        if size > len(body):
            raise WireError(f"{HEADER_LENGTH} is {size}, but the body has {len(body)} bytes")
    try:
        head = parse_json(body[:size], twice=twice)
    except ValueError as err:
        raise WireError(f"the body is not JSON: {str(err)[:80]}") from err
    if not isinstance(head, dict):
        raise WireError(f"the body must be a JSON object, got {type(head).__name__}")
    return head, body[size:]


def _one_tensor(head: Json, key: str, raw: bytes, spec: TensorSpec, max_rows: int) -> Rows:
    tensors = head.get(key)
    if not (isinstance(tensors, list) and len(tensors) == 1 and isinstance(tensors[0], dict)):
        raise WireError(f"{key} must be a list of exactly one tensor, '{spec.name}'")
    tensor: Json = tensors[0]
    if tensor.get("name") != spec.name:
        raise WireError(f"{key} must be '{spec.name}', got {_shown(tensor.get('name'))}")
    if tensor.get("datatype") != DATATYPE:
        raise WireError(f"datatype must be {DATATYPE}, got {_shown(tensor.get('datatype'))}")
    shape = _shape(tensor.get("shape"), spec, max_rows)
    if raw or "data" not in tensor:
        rows = _from_bytes(tensor, raw, shape)
    else:
        rows = _from_json(tensor["data"], shape)
    if "data" in tensor and _parameters(tensor):
        raise WireError("a tensor has either data, or parameters and raw bytes; both were sent")
    if not np.isfinite(rows).all():
        raise WireError("every number must be finite, got NaN or infinity")
    return rows


def _shown(value: object) -> str:
    return repr(value)[:40]


def _shape(sizes: object, spec: TensorSpec, max_rows: int) -> Shape:
    whole = isinstance(sizes, list) and all(type(n) is int for n in sizes)
    if not (whole and isinstance(sizes, list) and tuple(sizes[1:]) == spec.shape):
        wanted = ", ".join(str(n) for n in spec.shape)
        raise WireError(f"shape must be [rows, {wanted}], got {_shown(sizes)}")
    if not 1 <= sizes[0] <= max_rows:
        raise WireError(f"rows must be in 1..{max_rows}, got {_shown(sizes[0])}")
    return tuple(sizes)


def _parameters(tensor: Json) -> Json:
    found = tensor.get("parameters", {})
    if not isinstance(found, dict):
        raise WireError(f"parameters must be an object, got {_shown(found)}")
    return found


def _from_bytes(tensor: Json, raw: bytes, shape: Shape) -> Rows:
    size, expected = _parameters(tensor).get("binary_data_size"), math.prod(shape) * ITEM_BYTES
    if type(size) is not int or not size == len(raw) == expected:
        raise WireError(
            f"a {DATATYPE} tensor of shape {list(shape)} is {expected} bytes; binary_data_size is "
            f"{_shown(size)} and {len(raw)} bytes follow the JSON"
        )
    return np.frombuffer(raw, "<f4").reshape(shape).astype(np.float32, copy=False)


def _from_json(data: object, shape: Shape) -> Rows:
    """Numbers in a flat list, or nested exactly like the shape."""
    if not isinstance(data, list):
        raise WireError(f"data must be a list of numbers, got {_shown(data)}")
    flat: list[Any] = data
    if data and isinstance(data[0], list):
        flat = [data]
        for size in shape:
            if not all(isinstance(part, list) and len(part) == size for part in flat):
                raise WireError(f"nested data must have the shape {list(shape)}")
            flat = list(chain.from_iterable(flat))
    if len(flat) != math.prod(shape):
        raise WireError(f"shape {list(shape)} needs {math.prod(shape)} numbers, got {len(flat)}")
    if not set(map(type, flat)) <= {int, float}:
        raise WireError("data must hold numbers only")
    try:
        with np.errstate(over="ignore"):  # overflow gives infinity, which the caller rejects
            return np.array(flat, np.float32).reshape(shape)
    except OverflowError as err:
        raise WireError("every number must be finite, got one beyond the range of floats") from err


def _wants_binary(head: Json, output: str) -> bool:
    """Whether to answer in raw bytes: the output's own parameter, else the request's."""
    outputs = head.get("outputs", [])
    if not isinstance(outputs, list) or not all(isinstance(o, dict) for o in outputs):
        raise WireError("outputs must be a list of objects")
    if outputs and [o.get("name") for o in outputs] != [output]:
        raise WireError(f"the only output is '{output}'")
    wanted = _parameters(head).get("binary_data_output", False)
    for asked in outputs:
        own = _parameters(asked)
        if unknown := own.keys() - {"binary_data", "binary_data_size"}:
            raise WireError(f"output parameter {_shown(min(unknown))} is not supported")
        wanted = own.get("binary_data", wanted)
    if type(wanted) is not bool:
        raise WireError(f"binary_data must be true or false, got {_shown(wanted)}")
    return wanted
