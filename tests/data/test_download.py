import hashlib
import socket
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from splitveil.data.download import CHUNK_BYTES, fetch
from splitveil.errors import ConfigError, DataError

BODY = bytes(range(256)) * (CHUNK_BYTES // 256) + b"tail"
MD5 = hashlib.md5(BODY, usedforsecurity=False).hexdigest()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        del format, args


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server with one file, `body`."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "body").write_bytes(BODY)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_bytes_arrive_and_progress_is_told(site: str, tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []

    def progress(done: int, total: int, note: str = "") -> None:
        told.append((done, total, note))

    target = tmp_path / "new" / "body.bin"
    assert fetch(f"{site}/body", target, MD5, progress) == target
    assert target.read_bytes() == BODY
    assert list(target.parent.iterdir()) == [target]
    assert told[-1] == (len(BODY), len(BODY), "body.bin")
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)


def test_a_wrong_checksum_leaves_nothing(site: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"came with MD5 {MD5}, expected {'0' * 32}"):
        fetch(f"{site}/body", tmp_path / "x", "0" * 32)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_checksum_leaves_an_older_file_alone(site: str, tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.write_bytes(b"older")
    with pytest.raises(DataError, match="expected"):
        fetch(f"{site}/body", target, "0" * 32)
    assert target.read_bytes() == b"older"


def test_a_missing_page_says_where_to_put_the_file(site: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{site}/none: .*404.*put it at {tmp_path}/x"):
        fetch(f"{site}/none", tmp_path / "x", MD5)
    assert list(tmp_path.iterdir()) == []


def test_a_refused_connection_says_where_to_put_the_file(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(DataError, match=f"cannot download .*refused.*put it at {tmp_path}/x"):
        fetch(f"http://127.0.0.1:{port}/body", tmp_path / "x", MD5)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_nothing(site: str, tmp_path: Path) -> None:
    def press_ctrl_c(done: int, total: int, note: str = "") -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(f"{site}/body", tmp_path / "x", MD5, press_ctrl_c)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_a_data_error(site: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot download"):
        fetch(f"{site}/body", tmp_path / "file" / "x", MD5)


def test_a_failed_download_removes_the_folders_it_made_and_no_other(
    site: str, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for url, md5 in ((f"{site}/none", MD5), (f"{site}/body", "0" * 32)):
        with pytest.raises(DataError):
            fetch(url, empty / "data" / "deep" / "x", md5)
        assert list(empty.iterdir()) == []


def test_a_folder_that_another_has_filled_meanwhile_stays(site: str, tmp_path: Path) -> None:
    def fill(done: int, total: int, note: str = "") -> None:
        (tmp_path / "data" / "other").touch()

    with pytest.raises(DataError, match="expected"):
        fetch(f"{site}/body", tmp_path / "data" / "deep" / "x", "0" * 32, fill)
    assert list((tmp_path / "data").iterdir()) == [tmp_path / "data" / "other"]


def test_other_schemes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only http and https"):
        fetch(f"file://{tmp_path}/secret", tmp_path / "x", MD5)
