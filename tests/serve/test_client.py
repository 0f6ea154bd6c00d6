"""The client: fresh noise for a new image, the same bytes for an old one, and clear refusals."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serve.made import CLASSES, SHAPE, encode, head, manifest, pictures, write_export

from splitveil.errors import ExportError, ServerError
from splitveil.serve.client import Client, check_images
from splitveil.serve.manifest import CLIENT, FILE, read_manifest
from splitveil.serve.transport import Reply
from splitveil.serve.wire import HEADER_LENGTH, TensorSpec, decode_request, encode_answer

Z = TensorSpec(name="z", shape=SHAPE)
LOGITS = TensorSpec(name="logits", shape=(CLASSES,))


class Server:
    """The other half without a network; remembers everything it was sent."""

    def __init__(self, folder: Path, **metadata: Any) -> None:  # noqa: ANN401
        tensor = {"name": "z", "datatype": "FP32", "shape": [-1, *SHAPE]}
        identity = read_manifest(folder).identity
        self.metadata = {"inputs": [tensor], "parameters": {"export": identity}} | metadata
        self.bodies, self.rows, self.headers = list[bytes](), list[Any](), list[Any]()

    def __call__(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        self.headers.append(dict(headers))
        if method == "GET":
            assert path == "/v2/models/tiny"
            return Reply(200, json.dumps(self.metadata).encode())
        assert path == "/v2/models/tiny/infer"
        request = decode_request(body, headers.get(HEADER_LENGTH), Z, "logits", 32)
        self.bodies.append(body)
        self.rows.append(request.rows)
        answer = encode_answer(
            head(request.rows), LOGITS, "tiny", None, binary=request.binary_answer
        )
        return Reply(200, answer.body, {k.lower(): v for k, v in answer.headers.items()})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_export(tmp_path / "e")


@pytest.mark.parametrize("binary", [True, False])
def test_answers_are_those_of_the_server_for_what_was_sent(folder: Path, binary: bool) -> None:
    server = Server(folder)
    client = Client(folder, server, binary=binary, batch=4)
    x = pictures(10)
    logits = client.infer(x)
    assert [len(r) for r in server.rows] == [4, 4, 2]
    sent = np.concatenate(server.rows)
    assert np.array_equal(sent, client.send(x))
    np.testing.assert_allclose(logits, head(sent), rtol=1e-5, atol=1e-5)


def test_what_is_sent_has_the_stated_noise(folder: Path) -> None:
    x = pictures(5000)
    drawn = Client(folder, Server(folder), cache=1).send(x) - encode(x)
    assert abs(drawn.std() / 0.5 - 1) < 6 / math.sqrt(2 * drawn.size)
    assert abs(drawn.mean()) < 6 * 0.5 / math.sqrt(drawn.size)


def test_averaging_repeated_requests_gains_nothing(folder: Path) -> None:
    server = Server(folder)
    client = Client(folder, server)
    x = pictures(3)
    for _ in range(50):
        client.infer(x)
    assert len(set(server.bodies)) == 1
    error = np.mean(server.rows, axis=0) - encode(x)
    one = server.rows[0] - encode(x)
    np.testing.assert_allclose(error, one, atol=1e-5)


def test_averaging_fresh_draws_would_gain_root_k(folder: Path) -> None:
    x = pictures(3)
    draws = [Client(folder, Server(folder)).send(x) - encode(x) for _ in range(50)]
    assert np.std(np.mean(draws, axis=0)) < 0.5 / math.sqrt(50) * 2
    assert np.std(draws) > 0.4  # of all 900 numbers: those of one draw are too few to tell


def test_an_image_keeps_its_draw_in_another_batch_order_and_type(folder: Path) -> None:
    client = Client(folder, Server(folder))
    x = np.random.default_rng(0).integers(0, 256, (4, *SHAPE)).astype(np.uint8)
    first = client.send(x)
    floats = (x / np.float32(255)).astype(np.float64)
    again = client.send(np.concatenate([floats[2:3], pictures(2, seed=5), floats[2:3], floats[:1]]))
    assert np.array_equal(again[[0, 3, 4]], first[[2, 2, 0]])


def test_the_same_image_twice_in_one_batch_is_drawn_once(folder: Path) -> None:
    x = pictures(1)
    a, b = Client(folder, Server(folder)).send(np.concatenate([x, x]))
    assert np.array_equal(a, b)


def test_two_clients_and_two_images_never_share_a_draw(folder: Path) -> None:
    x = pictures(1)
    nearly = np.nextafter(x, np.float32(2))
    first, second = (Client(folder, Server(folder)) for _ in range(2))
    draws = [first.send(x) - encode(x), second.send(x) - encode(x), first.send(nearly) - encode(x)]
    assert all(np.abs(draws[i] - draws[j]).max() > 0.01 for i, j in ((0, 1), (0, 2), (1, 2)))


def test_threads_that_send_one_image_together_send_one_draw(folder: Path) -> None:
    client = Client(folder, Server(folder))
    x = pictures(64)
    with ThreadPoolExecutor(8) as pool:
        sent = list(pool.map(lambda _: client.send(x), range(32)))
    assert all(np.array_equal(s, sent[0]) for s in sent)


def test_a_child_process_does_not_repeat_its_parents_noise(folder: Path) -> None:
    client = Client(folder, Server(folder), threads=1)
    x = pictures(1)
    client.send(pictures(1, seed=9))
    code = (
        "import sys, numpy as np\nfrom splitveil.serve import Client\n"
        "x = np.frombuffer(sys.stdin.buffer.read(), np.float32).reshape(1, 1, 2, 3)\n"
        "sys.stdout.buffer.write(Client(sys.argv[1], 'http://localhost:1').send(x).tobytes())"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code, str(folder)],
            input=x.tobytes(),
            capture_output=True,
            check=True,
            timeout=60,
            env=os.environ | {"PYTHONHASHSEED": "0"},
        ).stdout
        for _ in range(2)
    ]
    assert len({*runs, client.send(x).tobytes()}) == 3


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((2, 1, 2, 4), np.float32), r"images must be \(n, 1, 2, 3\), got \(2, 1, 2, 4\)"),
        (np.zeros(SHAPE, np.float32), "images must be"),
        (np.zeros((1, *SHAPE), np.int64), "must be uint8 or floats in .0, 1., got int64"),
        (np.full((1, *SHAPE), 255.0), "must lie in .0, 1., got values from 255 to 255"),
        (np.full((1, *SHAPE), np.nan), "must lie in .0, 1., got values from nan"),
        (np.full((1, *SHAPE), -0.1), "must lie in .0, 1."),
    ],
)
def test_images_that_the_encoder_was_not_made_for_are_refused(
    images: Any,  # noqa: ANN401
    message: str,
) -> None:
    with pytest.raises(ServerError, match=message):
        check_images(images, SHAPE)


def test_no_images_give_no_logits(folder: Path) -> None:
    client = Client(folder, Server(folder))
    assert client.infer(pictures(0)).shape == (0, CLASSES)
    assert client.send(pictures(0)).shape == (0, *SHAPE)


def test_a_server_of_another_export_gets_nothing(folder: Path) -> None:
    other = {"name": "z", "datatype": "FP32", "shape": [-1, 9]}
    for server in (
        Server(folder, parameters={"export": manifest().identity}),
        Server(folder, inputs=[other]),
    ):
        with pytest.raises(ServerError, match="the server has a half of another export"):
            Client(folder, server).infer(pictures(1))
        assert server.bodies == []
    triton = Server(folder, parameters={})  # which tells no identity
    assert Client(folder, triton).infer(pictures(1)).shape == (1, CLASSES)


def test_the_token_goes_with_every_call(folder: Path) -> None:
    server = Server(folder)
    Client(folder, server, token="s" * 16).infer(pictures(1))
    assert [h["Authorization"] for h in server.headers] == [f"Bearer {'s' * 16}"] * 2


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply(401, b'{"error": "who are you"}'), "refused with 401: who are you; give the server"),
        (Reply(404, b"<html>"), "refused with 404: no reason given; is 'tiny' the model"),
        (Reply(200, b"[]"), "cannot read the server's model description"),
    ],
)
def test_refusals_reach_the_user_in_the_servers_words(
    folder: Path, reply: Reply, message: str
) -> None:
    with pytest.raises(ServerError, match=message):
        Client(folder, lambda *_: reply).infer(pictures(1))


def test_a_changed_network_or_manifest_is_refused(folder: Path) -> None:
    data = json.loads((folder / FILE).read_text())
    (folder / FILE).write_text(json.dumps(data | {"stages": []}))
    with pytest.raises(ExportError, match="contradicts itself"):
        Client(folder, "http://localhost:1")
    (folder / FILE).write_text(json.dumps(data))
    (folder / CLIENT).write_bytes(b"\x08" + (folder / CLIENT).read_bytes())
    with pytest.raises(ExportError, match="is not the file that was exported"):
        Client(folder, "http://localhost:1")


@pytest.mark.parametrize("status", [200, 400])
def test_nonsense_without_end_is_refused_as_any_other(folder: Path, status: int) -> None:
    with pytest.raises(ServerError, match=r"model description|refused with 400: no reason"):
        Client(folder, lambda *_: Reply(status, b"[" * 200_000)).meet()


def test_a_servers_words_cannot_command_the_terminal(folder: Path) -> None:
    body = json.dumps({"error": "no\x1b[2J\r\n\x07"}).encode()
    with pytest.raises(ServerError) as caught:
        Client(folder, lambda *_: Reply(400, body)).meet()
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("token", ["", "two words", "a\nb", "ä"])
def test_a_token_that_no_header_can_hold_is_refused(folder: Path, token: str) -> None:
    with pytest.raises(ServerError, match="a token must be printable ASCII"):
        Client(folder, Server(folder), token=token)
