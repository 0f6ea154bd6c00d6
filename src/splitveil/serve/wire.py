"""The KServe v2 inference protocol over HTTP: tensors as JSON or as raw bytes after a JSON header.

Noisy features are multiples of a step: sent as the integers, which the server multiplies by it. So
nothing is in a message that the noise does not cover, not even in the last bits of a float.

Messages come from strangers. A message is parsed as JSON and little-endian numbers, checked against
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
from splitveil.io import Json, parse_json

Rows = NDArray[np.float32]
Shape = tuple[int, ...]
FLOATS = "FP32"
CODES: Mapping[str, str] = {FLOATS: "<f4", "INT16": "<i2", "INT32": "<i4"}  # by datatype
HEADER_LENGTH = "Inference-Header-Content-Length"
BINARY_TYPE, JSON_TYPE = "application/octet-stream", "application/json"
JSON_BYTES_PER_FLOAT = 32  # enough for "-1.2345678901234567e-10, "
HEADER_BYTES = 16_384  # enough for the JSON around the numbers
MAX_ID = 128


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A tensor: its name, the shape of one of its rows, and how its numbers are sent.

    Args:
        name: Its name.
        shape: Shape of one row.
        datatype: FP32, or INT16 or INT32 for multiples of a step.
        step: The step h of integers; None for floats.
    """

    name: str
    shape: Shape
    datatype: str = FLOATS
    step: float | None = None

    def to_sent(self, rows: Rows) -> NDArray[Any]:
        """The numbers as they are sent; for integers rows must be multiples of the step."""
        if self.step is None:
            return np.ascontiguousarray(rows, CODES[self.datatype])
        limits, step = np.iinfo(CODES[self.datatype]), np.float32(self.step)
        steps = np.rint(rows / step)
        if not np.array_equal((steps * step).astype(np.float32), rows):
            raise WireError(f"what is sent must be multiples of {self.step}, the grid of the noise")
        sent: NDArray[Any] = np.clip(steps, limits.min, limits.max).astype(CODES[self.datatype])
        return sent

    def from_sent(self, numbers: NDArray[Any]) -> Rows:
        """The rows that were sent as these numbers."""
        rows = numbers.astype(np.float32, copy=False)
        return rows if self.step is None else rows * np.float32(self.step)

    def max_body(self, max_rows: int) -> int:
        """Bytes of the largest message with this number of rows."""
        return HEADER_BYTES + max_rows * math.prod(self.shape) * JSON_BYTES_PER_FLOAT

    def metadata(self) -> Json:
        """The server's description of it; -1 stands for any number of rows."""
        return {"name": self.name, "datatype": self.datatype, "shape": [-1, *self.shape]}


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
    return _encode({"outputs": [wanted]}, "inputs", rows, spec, binary=binary)


def encode_answer(
    rows: Rows, spec: TensorSpec, model: str, request_id: str | None, *, binary: bool
) -> Message:
    """The server's rows as the body of its answer."""
    head = {"model_name": model, "model_version": "1"}
    if request_id is not None:
        head["id"] = request_id
    return _encode(head, "outputs", rows, spec, binary=binary)


def _encode(head: Json, key: str, rows: Rows, spec: TensorSpec, *, binary: bool) -> Message:
    numbers = spec.to_sent(rows)
    tensor: Json = {"name": spec.name, "shape": list(rows.shape), "datatype": spec.datatype}
    if not binary:
        body = json.dumps(head | {key: [tensor | {"data": numbers.ravel().tolist()}]})
        return Message(body.encode(), {"Content-Type": JSON_TYPE})
    raw = numbers.tobytes()
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
    if tensor.get("datatype") != spec.datatype:
        raise WireError(f"datatype must be {spec.datatype}, got {_shown(tensor.get('datatype'))}")
    shape = _shape(tensor.get("shape"), spec, max_rows)
    if raw or "data" not in tensor:
        rows = spec.from_sent(_from_bytes(tensor, raw, shape, spec.datatype))
    else:
        rows = spec.from_sent(_from_json(tensor["data"], shape, spec.datatype))
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


def _from_bytes(tensor: Json, raw: bytes, shape: Shape, datatype: str) -> NDArray[Any]:
    code = np.dtype(CODES[datatype])
    size, expected = _parameters(tensor).get("binary_data_size"), math.prod(shape) * code.itemsize
    if type(size) is not int or not size == len(raw) == expected:
        raise WireError(
            f"a {datatype} tensor of shape {list(shape)} is {expected} bytes; binary_data_size is "
            f"{_shown(size)} and {len(raw)} bytes follow the JSON"
        )
    return np.frombuffer(raw, code).reshape(shape)


def _from_json(data: object, shape: Shape, datatype: str) -> NDArray[Any]:
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
    if not set(map(type, flat)) <= ({int, float} if datatype == FLOATS else {int}):
        what = "numbers" if datatype == FLOATS else "whole numbers"
        raise WireError(f"data must hold {what} only")
    if datatype != FLOATS:
        limits = np.iinfo(CODES[datatype])
        if not all(limits.min <= n <= limits.max for n in flat):
            raise WireError(f"every number must be in {limits.min}..{limits.max}")
        return np.array(flat, CODES[datatype]).reshape(shape)
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
