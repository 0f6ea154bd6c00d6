"""The server on a real socket: unmodified Triton clients, TLS, restarts, a polite shutdown."""

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serve.made import CLASSES, SHAPE, head, manifest, pictures, write_export

from splitveil.errors import ServerError
from splitveil.serve.admission import Limits
from splitveil.serve.client import Client
from splitveil.serve.kserve import EXTENSIONS
from splitveil.serve.server import Tls, address, listen, load_app, make_app, running
from splitveil.serve.transport import HttpTransport

TOKEN = "0123456789abcdef"  # noqa: S105
NAME = "tiny"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_export(tmp_path_factory.mktemp("server") / "e")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with running(load_app(folder, token=TOKEN, threads=1)) as found:
        yield found


def triton(url: str) -> Any:  # noqa: ANN401 - tritonclient has no types
    http = pytest.importorskip("tritonclient.http")
    return http, http.InferenceServerClient(url.removeprefix("http://"))


def bearer() -> dict[str, str]:
    """Made anew for each call: Triton's client writes its own headers into what it is given."""
    return {"Authorization": f"Bearer {TOKEN}"}


@pytest.mark.parametrize("request_binary", [True, False])
@pytest.mark.parametrize("answer_binary", [True, False, None])
def test_tritons_own_client_gets_the_right_answers(
    url: str, request_binary: bool, answer_binary: bool | None
) -> None:
    http, client = triton(url)
    z = pictures(5)
    given = http.InferInput("z", [5, *SHAPE], "FP32")
    given.set_data_from_numpy(z, binary_data=request_binary)
    wanted = None if answer_binary is None else [
        http.InferRequestedOutput("logits", binary_data=answer_binary)
    ]  # fmt: skip
    answer = client.infer(NAME, [given], outputs=wanted, request_id="abc", headers=bearer())
    np.testing.assert_allclose(answer.as_numpy("logits"), head(z), rtol=1e-5, atol=1e-6)
    assert answer.get_response()["id"] == "abc"
    client.close()


def test_tritons_own_client_reads_health_and_metadata(url: str) -> None:
    _, client = triton(url)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(NAME, headers=bearer())
    assert not client.is_model_ready("other", headers=bearer())
    assert client.get_server_metadata(headers=bearer())["extensions"] == EXTENSIONS
    assert client.get_model_metadata(NAME, headers=bearer())["inputs"][0]["shape"] == [-1, *SHAPE]
    client.close()


def test_tritons_own_client_is_told_the_reason_of_a_refusal(url: str) -> None:
    http, client = triton(url)
    from tritonclient.utils import (  # type: ignore[import-untyped]
        InferenceServerException,
    )

    given = http.InferInput("z", [1, 6], "FP32")
    given.set_data_from_numpy(np.zeros((1, 6), np.float32))
    with pytest.raises(InferenceServerException, match=r"shape must be \[rows, 1, 2, 3\]"):
        client.infer(NAME, [given], headers=bearer())
    with pytest.raises(InferenceServerException, match="a valid bearer token is needed"):
        client.infer(NAME, [given])
    client.close()


@pytest.mark.parametrize("binary", [True, False])
def test_our_client_through_the_socket(folder: Path, url: str, binary: bool) -> None:
    x = pictures(70)
    with Client(folder, url, token=TOKEN, binary=binary, batch=16) as client:
        np.testing.assert_allclose(client.infer(x), head(client.send(x)), rtol=1e-4, atol=1e-5)
    with (
        Client(folder, url, token="wrong" * 4) as client,
        pytest.raises(ServerError, match="refused with 401"),
    ):
        client.infer(x)


def test_our_client_names_the_likeliest_class(folder: Path, url: str) -> None:
    x = pictures(5)
    with Client(folder, url, token=TOKEN) as client:
        found, logits = client.classify(x), client.infer(x)
        assert client.classify(x[:0]) == []
    assert [answer["class"] for answer in found] == logits.argmax(1).tolist()
    assert [answer["name"] for answer in found] == [f"class {k}" for k in logits.argmax(1)]
    odds = np.exp(logits.astype(np.float64))
    shares = (odds / odds.sum(1, keepdims=True)).max(1)
    assert [answer["share"] for answer in found] == pytest.approx(shares.tolist(), rel=1e-5)
    np.testing.assert_allclose([answer["logits"] for answer in found], logits, rtol=1e-5)


def test_a_refused_body_does_not_poison_the_connection(folder: Path, url: str) -> None:
    port = int(url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=5) as raw:
        lines = ("POST /v2/models/tiny/infer HTTP/1.1", "Host: x", "Content-Length: 999999999",
                 f"Authorization: Bearer {TOKEN}", "", "")  # fmt: skip
        raw.sendall("\r\n".join(lines).encode())
        assert b" 413 " in raw.recv(4096).split(b"\r\n")[0]
    with socket.create_connection(("127.0.0.1", port), timeout=5) as raw:
        raw.sendall(b"\x16\x03\x01 not http at all\r\n\r\n")
        assert b" 400 " in raw.recv(4096).split(b"\r\n")[0]
    with Client(folder, url, token=TOKEN) as client:
        assert len(client.infer(pictures(1))) == 1


def test_many_threads_share_batches_and_get_their_own_answers(folder: Path, url: str) -> None:
    client = Client(folder, url, token=TOKEN, threads=1)

    def one(seed: int) -> float:
        x = pictures(3, seed)
        return float(np.abs(client.infer(x) - head(client.send(x))).max())

    with ThreadPoolExecutor(8) as pool:
        assert max(pool.map(one, range(60))) < 1e-4
    client.close()
    with HttpTransport(url) as transport:
        text = transport("GET", "/metrics", b"", bearer()).body.decode()
    assert 'splitveil_requests_total{code="200"}' in text


def test_a_shutdown_answers_what_was_accepted() -> None:
    entered, go = threading.Event(), threading.Event()

    def slow(rows: Any) -> Any:  # noqa: ANN401
        entered.set()
        go.wait(10)
        return head(rows)

    body = json.dumps({"inputs": [{"name": "z", "shape": [1, *SHAPE], "datatype": "FP32",
                                   "data": [1] * 6}]}).encode()  # fmt: skip
    with ThreadPoolExecutor(1) as pool:
        with running(make_app(manifest(), slow, Limits(max_delay=0.0))) as url:
            transport = HttpTransport(url)
            waiting = pool.submit(transport, "POST", "/v2/models/tiny/infer", body, {})
            assert entered.wait(10)
            threading.Timer(0.3, go.set).start()
        logits = json.loads(waiting.result(10).body)["outputs"][0]["data"]
        transport.close()
    assert logits == pytest.approx(head(np.ones((1, *SHAPE), np.float32))[0].tolist(), rel=1e-5)


CODE = """
import sys
from splitveil.serve.server import load_app, serve
app = load_app(sys.argv[1], threads=1)
serve(app, port=int(sys.argv[2]), ready=lambda url: print(url, flush=True))
"""


def start(folder: Path, port: int) -> subprocess.Popen[str]:
    """A server process that listens."""
    found = subprocess.Popen(
        [sys.executable, "-c", CODE, str(folder), str(port)], stdout=subprocess.PIPE, text=True
    )
    assert found.stdout is not None
    assert found.stdout.readline().startswith("http://")
    return found


def free_port() -> int:
    with listen("127.0.0.1", 0) as found:
        return int(found.getsockname()[1])


def test_a_server_killed_under_load_loses_no_request(folder: Path) -> None:
    port = free_port()
    server = start(folder, port)
    client = Client(folder, f"http://127.0.0.1:{port}", patience=60.0, threads=1)
    stop = threading.Event()

    def work(worker: int) -> tuple[int, float]:
        asked, worst = 0, 0.0
        while not stop.is_set():
            x = pictures(2, 1000 * worker + asked)
            worst = max(worst, float(np.abs(client.infer(x) - head(client.send(x))).max()))
            asked += 1
        return asked, worst

    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(work, k) for k in range(4)]
        time.sleep(0.3)
        server.kill()
        server.communicate()
        server = start(folder, port)
        time.sleep(0.3)
        stop.set()
        found = [r.result(60) for r in results]
    client.close()
    server.send_signal(signal.SIGINT)
    server.communicate(timeout=30)
    assert server.returncode == 0
    assert all(asked >= 2 and worst < 1e-4 for asked, worst in found)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    place = tmp_path_factory.mktemp("tls")
    made = Tls(certificate=place / "cert.pem", key=place / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "1", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(made.key), "-out",
         str(made.certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    return made


def test_tls_with_a_trusted_certificate_and_without(folder: Path, tls: Tls) -> None:
    with running(load_app(folder), tls=tls) as url:
        assert url.startswith("https://")
        with Client(folder, url, ca_file=tls.certificate) as trusting:
            assert trusting.infer(pictures(2)).shape == (2, CLASSES)
        with (
            Client(folder, url) as wary,
            pytest.raises(ServerError, match="the server's certificate is not trusted"),
        ):
            wary.infer(pictures(1))


def test_a_key_of_another_certificate_is_rejected(folder: Path, tls: Tls, tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text("no key")
    bad = Tls(certificate=tls.certificate, key=tmp_path / "key.pem")
    with (
        pytest.raises(ServerError, match="cannot use the certificate"),
        running(load_app(folder), tls=bad),
    ):
        pass


def test_a_port_in_use_is_an_error_that_says_so(url: str) -> None:
    with pytest.raises(ServerError, match=r"cannot listen on 127\.0\.0\.1:\d+: Address already"):
        listen("127.0.0.1", int(url.rpartition(":")[2]))


def test_answers_are_sent_at_once() -> None:
    with listen("127.0.0.1", 0) as found:
        assert found.proto == socket.IPPROTO_TCP  # what asyncio asks before it sets TCP_NODELAY
        assert address(found, None).startswith("http://127.0.0.1:")


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 65536), ("127.0.0.1", -1), ("a..b", 0)])
def test_a_port_or_host_that_is_none_is_refused(host: str, port: int) -> None:
    with pytest.raises(ServerError, match=r"cannot listen on .*; choose another --port or --host"):
        listen(host, port)
