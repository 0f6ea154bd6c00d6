"""Thousands of requests, each invalid by construction: always 4xx and a reason."""

import asyncio
import json
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from serve.made import SHAPE, call, head, manifest, pictures, started

from splitveil.serve.admission import Limits
from splitveil.serve.server import make_app
from splitveil.serve.wire import HEADER_LENGTH, TensorSpec, encode_request

Z = TensorSpec(name="z", shape=SHAPE)
INFER = "/v2/models/tiny/infer"
CASES = 2_000
MANY = 10_000  # in the slow tier


@dataclass(frozen=True)
class Case:
    """A body and its header length."""

    body: bytes
    length: str | None


def valid(rng: random.Random, *, binary: bool) -> Case:
    message = encode_request(pictures(rng.randint(1, 3), rng.getrandbits(16)), Z, "logits",
                             binary=binary)  # fmt: skip
    return Case(message.body, message.headers.get(HEADER_LENGTH))


def truncated(rng: random.Random) -> Case:
    case = valid(rng, binary=rng.random() < 0.5)
    return replace(case, body=case.body[: rng.randrange(len(case.body))])


def longer(rng: random.Random) -> Case:
    case = valid(rng, binary=True)
    return replace(case, body=case.body + rng.randbytes(rng.randint(1, 64)))


def oversized(rng: random.Random) -> Case:
    return Case(b" " * (Z.max_body(64) + rng.randint(1, 999)), None)


def random_bytes(rng: random.Random) -> Case:
    size = rng.choice([0, 1, 7, 64, 500])
    return Case(rng.randbytes(size), rng.choice([None, "0", "5", str(size), "-1", "x"]))


def wrong_length(rng: random.Random) -> Case:
    case = valid(rng, binary=True)
    true = int(case.length or 0)
    other = rng.choice([n for n in range(2 * true) if n != true])
    return replace(case, length=rng.choice([str(other), f"+{true}", f"{true}.0", "", "ten"]))


def not_finite(rng: random.Random) -> Case:
    z = pictures(2, rng.getrandbits(16))
    z.ravel()[rng.randrange(z.size)] = rng.choice([np.nan, np.inf, -np.inf])
    message = encode_request(z, Z, "logits", binary=rng.random() < 0.5)
    return Case(message.body, message.headers.get(HEADER_LENGTH))


class Bomb:
    """Unpickling it would raise; nobody does."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return exec, ("raise SystemExit('unpickled')",)


def pickled(rng: random.Random) -> Case:
    content = pickle.dumps(rng.choice([Bomb(), [1] * 99, pictures(1)]), rng.randrange(6))
    assert len(content) != 24  # or they would be six numbers
    tensor = {"name": "z", "shape": [1, *SHAPE], "datatype": "FP32",
              "parameters": {"binary_data_size": len(content)}}  # fmt: skip
    text = json.dumps({"inputs": [tensor]}).encode()
    if rng.random() < 0.5:
        return Case(content, None)
    return Case(text + content, str(len(text)))


def other_type(rng: random.Random) -> Case:
    kind, name = rng.choice([("<f8", "FP64"), ("<f2", "FP16"), ("<i4", "INT32"), ("|u1", "UINT8")])
    raw: NDArray[Any] = pictures(2).astype(kind)
    # Four bytes that are called FP32 are FP32, whatever they were before.
    lies = ["FP32"] if raw.itemsize != 4 else []
    told = rng.choice([name, *lies, "BYTES", "fp32", None, 32])
    size = rng.choice([raw.nbytes, 48])
    tensor = {"name": "z", "shape": [2, *SHAPE], "datatype": told,
              "parameters": {"binary_data_size": size}}  # fmt: skip
    text = json.dumps({"inputs": [tensor]}).encode()
    return Case(text + raw.tobytes(), str(len(text)))


JUNK: list[Any] = [
    None, True, -1, 0, 10**30, 1e300, "", "z" * 300, [], {}, [[]], {"a": []}, [None], ["x"], "NaN",
    [1, 2, 3], {"binary_data_size": -4}, [True] * 6, "\u0000", [1e39] * 6,
]  # fmt: skip


def wrong_json(rng: random.Random) -> Case:
    """A valid JSON request with one required value replaced by junk."""
    tensor: dict[str, Any] = {
        "name": "z", "shape": [1, *SHAPE], "datatype": "FP32", "data": [0.5] * 6
    }  # fmt: skip
    tensor[rng.choice(list(tensor))] = rng.choice(JUNK)
    request: dict[str, Any] = {"inputs": [tensor]}
    if rng.random() < 0.2:
        request = {"inputs": rng.choice(JUNK)}
    return Case(json.dumps(request).encode(), None)


def deep(rng: random.Random) -> Case:
    opened = rng.choice(['{"inputs":', "[", '{"inputs":[{"data":['])
    return Case((opened * rng.randint(50, 600)).encode(), None)


def broken_text(rng: random.Random) -> Case:
    """A valid JSON request with one structural byte overwritten."""
    body = bytearray(valid(rng, binary=False).body)
    places = [i for i, byte in enumerate(body) if byte in b'{}[]:"']
    body[rng.choice(places)] = rng.choice(b"\x00\xff;#")
    return Case(bytes(body), None)


KINDS = (
    truncated, longer, random_bytes, wrong_length, not_finite, pickled, other_type, wrong_json,
    deep, broken_text, truncated, wrong_json,
)  # fmt: skip


def cases(seed: int, count: int) -> Iterator[tuple[str, Case]]:
    rng = random.Random(seed)  # noqa: S311
    for k in range(count):
        make = oversized if k % 500 == 0 else KINDS[k % len(KINDS)]
        yield make.__name__, make(rng)


@pytest.mark.parametrize(
    ("seed", "count"), [(0, CASES), pytest.param(1, MANY, marks=pytest.mark.slow)]
)
def test_broken_requests_get_a_reason_and_never_reach_the_model(seed: int, count: int) -> None:
    ran: list[int] = []

    def watched(rows: NDArray[np.float32]) -> NDArray[np.float32]:
        ran.append(len(rows))
        return head(rows)

    app = make_app(manifest(), watched, Limits(max_delay=0.0))
    found: Counter[tuple[str, int]] = Counter()

    async def scene() -> None:
        async with started(app):
            for name, case in cases(seed, count):
                headers = {} if case.length is None else {HEADER_LENGTH: case.length}
                answer = await call(app, "POST", INFER, case.body, headers)
                assert 400 <= answer.status < 500, (name, case, answer)
                assert len(answer.json["error"]) > 10, (name, case, answer)
                assert answer.json.keys() == {"error"}
                found[name, answer.status] += 1
            assert ran == []
            good = valid(random.Random(1), binary=True)  # noqa: S311
            answer = await call(app, "POST", INFER, good.body, {HEADER_LENGTH: good.length or ""})
            assert answer.status == 200

    asyncio.run(scene())
    assert sum(found.values()) == count
    assert {name for name, _ in found} == {kind.__name__ for kind in (*KINDS, oversized)}
    assert found["oversized", 413] == count // 500
