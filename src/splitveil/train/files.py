"""Files a run writes: each is complete or absent, whatever happens in between."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from splitveil.errors import RunError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@contextmanager
def explain_os_error(path: Path, otherwise: str = "Choose another folder") -> Iterator[None]:
    """Turn a full disk or a folder without write permission into an error that says what to do.

    `otherwise` is the step where neither space nor a shorter name would help.
    """
    try:
        yield
    except OSError as err:
        if err.errno in (errno.ENOSPC, errno.EDQUOT):
            step = "Free some space or choose another folder"
        elif err.errno == errno.ENAMETOOLONG:
            step = "Choose a shorter name"
        else:
            step = otherwise
        raise RunError(
            f"cannot write {path}: {err.strerror or err}; what was complete before is still "
            f"there. {step}"
        ) from err


def check_folder(folder: Path, otherwise: str = "Choose another folder") -> None:
    """Refuse a folder that cannot be made or written to, before the work whose results it gets.

    It is tried out beside its place: nothing is left behind.
    """
    with explain_os_error(folder, otherwise):
        whole = Path(os.path.abspath(folder))
        there = next(place for place in (whole, *whole.parents) if os.path.lexists(place))
        with TemporaryDirectory(dir=there, prefix=".splitveil-") as scratch:
            (Path(scratch) / whole.relative_to(there)).mkdir(parents=True, exist_ok=True)


def check_file(path: Path) -> None:
    """Refuse a file that `atomic_file` could not write, before the work whose results it gets."""
    with explain_os_error(path):
        temporary = beside(path)
        temporary.open("wb").close()
        temporary.unlink()


def beside(path: Path) -> Path:
    """Where a file is written before it is complete."""
    if not path.name or path.is_dir():  # "." has no name
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return path.with_name(f".{path.name}.tmp")


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A binary file that appears under its name only when it is complete and on disk."""
    with explain_os_error(path):
        temporary = beside(path)
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def held(folder: Path, busy: str | None = None) -> Iterator[None]:
    """A folder for this process alone, until the block or the process ends.

    `busy` is what to say if another has it; by default, that it is trained. The lock is a hidden
    file beside the folder, so that the folder may be removed meanwhile. Where the system or the
    disk knows no such locks, nothing is held.
    """
    if fcntl is None:
        yield
        return
    with explain_os_error(folder):
        own = folder.resolve()  # whatever link leads to it
    lock = own.with_name(f".{own.name}.lock")
    with explain_os_error(lock):
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = _locked(lock)
    if file is None:
        raise RunError(
            busy
            or f"another process is training in {folder}; wait until it has ended, or train under "
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


def stamp(path: Path) -> tuple[int, int] | None:
    """What changes when a file is written anew; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_file(path) as file:
        file.write(text.encode())
