"""Files that are whole or absent, and locks: what others see, and what is said when it fails."""

import errno
import os
from pathlib import Path

import pytest
from filelock import FileLock

from splitveil.errors import RunError
from splitveil.io import atomic_file, file_lock, folder_lock, replacing


def test_a_file_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"older")

    def interrupted() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"older"
    with replacing(path) as file:
        file.write(b"whole")
        file.flush()
        assert path.read_bytes() == b"older"
    assert path.read_bytes() == b"whole"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("code", "step"),
    [
        (errno.ENOSPC, "Free some space or choose another folder"),
        (errno.EROFS, "Choose another folder"),
        (errno.EACCES, "Choose another folder"),
    ],
)
def test_a_full_or_read_only_disk_says_what_to_do(code: int, step: str, tmp_path: Path) -> None:
    with (
        pytest.raises(RunError, match=rf"cannot write {tmp_path}/x: .*still there\. {step}"),
        atomic_file(tmp_path / "x"),
    ):
        raise OSError(code, os.strerror(code))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EROFS, errno.EACCES])
def test_a_disk_without_locks_is_used_without_them(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(lock: FileLock, timeout: float = -1) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(FileLock, "acquire", refuse)
    if code in (errno.ENOLCK, errno.EOPNOTSUPP):
        with folder_lock(tmp_path / "run"), folder_lock(tmp_path / "run"):
            pass
        return
    with (
        pytest.raises(RunError, match=rf"cannot write {tmp_path}/\.run\.lock: .*Choose another"),
        folder_lock(tmp_path / "run"),
    ):
        pass


def test_an_error_inside_the_lock_is_raised_unchanged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), folder_lock(tmp_path / "run"):
        (tmp_path / "absent").read_bytes()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    (tmp_path / ".x.lock").touch()
    with file_lock(tmp_path / "x", wait=True):
        assert (tmp_path / ".x.lock").exists()
    assert list(tmp_path.iterdir()) == []
