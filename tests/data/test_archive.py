import hashlib
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import Popen
from threading import Barrier, Thread
from time import sleep

import pytest

from splitveil.data import archive
from splitveil.data.archive import CHUNK_BYTES, fetch
from splitveil.errors import ConfigError, DataError

BODY = bytes(range(256)) * (CHUNK_BYTES // 256) + b"tail"
SHA256 = hashlib.sha256(BODY).hexdigest()


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


def test_bytes_arrive_and_progress_is_reported(site: str, tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []

    def progress(done: int, total: int, note: str = "") -> None:
        told.append((done, total, note))

    target = tmp_path / "new" / "body.bin"
    assert fetch(f"{site}/body", target, SHA256, progress) == target
    assert target.read_bytes() == BODY
    assert list(target.parent.iterdir()) == [target]
    assert told[-1] == (len(BODY), len(BODY), "body.bin")
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)


def test_two_first_downloads_at_once_both_succeed(site: str, tmp_path: Path) -> None:
    asked: list[str] = []
    target, both = tmp_path / "data" / "x", Barrier(2)

    def read(name: str) -> bytes:
        def progress(done: int, total: int, note: str = "") -> None:
            del done, total, note
            asked.append(name)
            sleep(0.05)  # the other one asks while this one downloads

        both.wait()
        return fetch(f"{site}/body", target, SHA256, progress).read_bytes()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(read, ("one", "two"))) == [BODY, BODY]
    assert len(set(asked)) == 1  # the other one waited and took what was there
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.slow
def test_two_processes_that_download_at_once_both_succeed(site: str, tmp_path: Path) -> None:
    words = f"fetch({site + '/body'!r}, Path({str(tmp_path / 'x')!r}), {SHA256!r})"
    code = f"from pathlib import Path; from splitveil.data.archive import fetch; {words}"
    running = [Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [process.wait(timeout=120) for process in running] == [0, 0]
    assert (tmp_path / "x").read_bytes() == BODY
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_no_module_needs_locks_that_only_unix_has() -> None:
    for folder in ("data", "train"):
        for path in (Path(archive.__file__).parents[1] / folder).glob("*.py"):
            assert "fcntl" not in path.read_text(), path


def test_a_wrong_checksum_leaves_nothing(site: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"has SHA-256 {SHA256}, expected {'0' * 64}"):
        fetch(f"{site}/body", tmp_path / "x", "0" * 64)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_checksum_leaves_an_older_file_alone(site: str, tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.write_bytes(b"older")
    with pytest.raises(DataError, match="expected"):
        fetch(f"{site}/body", target, "0" * 64)
    assert target.read_bytes() == b"older"


def test_a_missing_page_says_where_to_put_the_file(site: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{site}/none: .*404.*put it at {tmp_path}/x"):
        fetch(f"{site}/none", tmp_path / "x", SHA256)
    assert list(tmp_path.iterdir()) == []


def test_a_refused_connection_says_where_to_put_the_file(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(DataError, match=f"cannot download .*refused.*put it at {tmp_path}/x"):
        fetch(f"http://127.0.0.1:{port}/body", tmp_path / "x", SHA256)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_nothing(site: str, tmp_path: Path) -> None:
    def press_ctrl_c(done: int, total: int, note: str = "") -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(f"{site}/body", tmp_path / "x", SHA256, press_ctrl_c)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_a_data_error(site: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot download"):
        fetch(f"{site}/body", tmp_path / "file" / "x", SHA256)


def test_a_failed_download_removes_only_folders_it_made(site: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for url, sha256 in ((f"{site}/none", SHA256), (f"{site}/body", "0" * 64)):
        with pytest.raises(DataError):
            fetch(url, empty / "data" / "deep" / "x", sha256)
        assert list(empty.iterdir()) == []


def test_a_folder_that_another_process_filled_stays(site: str, tmp_path: Path) -> None:
    def fill(done: int, total: int, note: str = "") -> None:
        (tmp_path / "data" / "other").touch()

    with pytest.raises(DataError, match="expected"):
        fetch(f"{site}/body", tmp_path / "data" / "deep" / "x", "0" * 64, fill)
    assert list((tmp_path / "data").iterdir()) == [tmp_path / "data" / "other"]


def test_other_schemes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only http and https"):
        fetch(f"file://{tmp_path}/secret", tmp_path / "x", SHA256)
