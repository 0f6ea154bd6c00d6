"""Files a run writes: each is complete or absent, whatever happens in between."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from splitveil.errors import RunError
from splitveil.types import Json

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@contextmanager
def explain_os_error(path: Path) -> Iterator[None]:
    """Turn a full disk or a folder without write permission into an error that says what to do."""
    try:
        yield
    except OSError as err:
        full = err.errno in (errno.ENOSPC, errno.EDQUOT)
        raise RunError(
            f"cannot write {path}: {err.strerror or err}; nothing was lost: what was complete "
            f"before is still there. {'Free some space or choose' if full else 'Choose'} another "
            "folder"
        ) from err


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A binary file that appears under its name only when it is complete and on disk."""
    with explain_os_error(path):
        if not path.name:  # "." or ""
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """A folder for this process alone, until the block or the process ends.

    The lock is a hidden file beside the folder, so that the folder may be removed meanwhile. Where
    the system or the disk knows no such locks, nothing is held.
    """
    if fcntl is None:
        yield
        return
    lock = folder.with_name(f".{folder.name}.lock")
    with explain_os_error(lock):
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = _locked(lock)
    if file is None:
        raise RunError(
            f"another process is training in {folder}; wait until it has ended, or train under "
            "another name"
        )
    try:
        yield
    finally:
        with suppress(OSError):
            lock.unlink()
        file.close()


def _locked(lock: Path) -> BinaryIO | None:
    """The file, locked; None if another process has it."""
    while True:
        file = lock.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        except OSError:  # a disk without locks
            return file
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), lock.stat()):
                return file
        file.close()  # its last owner removed it between the two calls


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_file(path) as file:
        file.write(text.encode())


class MetricsLog:
    """`metrics.jsonl`, one JSON object a line, and the TensorBoard events made from it.

    The events are a function of the lines: after a rewind they are written anew.
    """

    def __init__(self, folder: Path, offset: int = 0) -> None:
        """Open for appending after `offset` bytes; what follows them is dropped."""
        from torch.utils.tensorboard import SummaryWriter

        self._path = folder / "metrics.jsonl"
        with explain_os_error(self._path):
            for stale in folder.glob("events.out.tfevents.*"):
                stale.unlink()
            self._file = self._path.open("ab")
            self._file.truncate(offset)
            self._file.seek(offset)
            self._events = SummaryWriter(str(folder))
        for line in self._path.read_bytes().splitlines():
            self._show(json.loads(line))

    @property
    def offset(self) -> int:
        """Bytes written so far."""
        return self._file.tell()

    def append(self, line: Json) -> None:
        """Add one line, on disk at once."""
        with explain_os_error(self._path):
            self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            self._file.flush()
        self._show(line)

    def _show(self, line: Json) -> None:
        for key, value in line.items():
            if isinstance(value, int | float) and key not in ("step", "epoch"):
                name = f"{line['kind']}/{key}"
                self._events.add_scalar(name, value, line["step"])

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        with explain_os_error(self._path):
            self._file.close()
            self._events.close()
