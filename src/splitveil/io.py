"""Files that are complete or absent, locks, JSON from strangers, and progress."""

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, Protocol, runtime_checkable

from filelock import FileLock, Timeout

from splitveil.errors import RunError

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # of disks that have none


@contextmanager
def as_run_error(path: Path, otherwise: str = "Choose another folder") -> Iterator[None]:
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
    with as_run_error(folder, otherwise):
        whole = Path(os.path.abspath(folder))
        there = next(place for place in (whole, *whole.parents) if os.path.lexists(place))
        with TemporaryDirectory(dir=there, prefix=".splitveil-") as scratch:
            (Path(scratch) / whole.relative_to(there)).mkdir(parents=True, exist_ok=True)


def temporary_path(path: Path, mark: str = "") -> Path:
    """Where a file is written before it is complete."""
    if not path.name or path.is_dir():  # "." has no name
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return path.with_name(f".{path.name}{mark}.tmp")


@contextmanager
def replacing(path: Path, temporary: Path | None = None) -> Iterator[BinaryIO]:
    """A binary file that appears under its name only when it is complete and on disk.

    Args:
        path: The file; its folder must exist.
        temporary: Where it is written meanwhile; by default a place of this process alone, so that
            several processes may write the same file.

    Raises:
        OSError: As the system raises it; `atomic_file` explains it.
    """
    temporary = temporary or temporary_path(path, f".{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A binary file of a run: complete or absent, and an error of the disk says what to do."""
    with as_run_error(path), replacing(path, temporary_path(path)) as file:
        yield file


@contextmanager
def file_lock(path: Path, *, wait: bool) -> Iterator[None]:
    """A lock for this process alone until the block or the process ends: a hidden file beside path.

    On a disk without locks nothing is held.

    Args:
        path: What is locked; its folder must exist.
        wait: Whether to wait while another process has the lock.

    Raises:
        Timeout: If another process has the lock and `wait` is False.
    """
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        # Not at once: its last owner may be removing the file at this moment.
        lock.acquire(timeout=-1 if wait else 0.1)
    except Timeout:
        raise
    except OSError as err:
        if err.errno not in NO_LOCKS:
            raise
    try:
        yield
    finally:
        with suppress(OSError):  # while it is held: those who wait see that it is gone
            os.unlink(lock.lock_file)
        lock.release()


@contextmanager
def folder_lock(folder: Path, busy: str | None = None) -> Iterator[None]:
    """A folder for this process alone, until the block or the process ends.

    `busy` is what to say if another has it; by default, that it is trained. The lock is beside the
    folder, so that the folder may be removed meanwhile.
    """
    with as_run_error(folder):
        own = folder.resolve()  # whatever link leads to it
    with ExitStack() as stack:
        with as_run_error(own.with_name(f".{own.name}.lock")):
            own.parent.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(file_lock(own, wait=False))
            except Timeout as err:
                raise RunError(
                    busy
                    or f"another process is training in {folder}; wait until it has ended, or "
                    "train under another name"
                ) from err
        yield


def file_version(path: Path) -> tuple[int, int] | None:
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


@runtime_checkable
class Progress(Protocol):
    """Told how far a long piece of work has come; the command line draws a bar from it."""

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """`done` of `total` units are finished; `note` is a short text for the bar."""
        ...


def silent(done: int, total: int, note: str = "") -> None:
    """The progress display of somebody who wants none."""
    del done, total, note


@dataclass(frozen=True)
class ProgressPart:
    """One attack's part of the suite's progress bar."""

    whole: Progress
    name: str
    before: float
    effort: float
    total: float

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """`done` of `total` of this attack's own work."""
        here = self.before + self.effort * min(done / max(total, 1), 1.0)
        self.whole(int(1000 * here), int(1000 * self.total), f"{self.name} {note}".rstrip())


Json = dict[str, Any]


def parse(content: str) -> object:
    """The JSON value in a text; raises ValueError for what is none, or is nested without end."""
    try:
        return json.loads(content)
    except RecursionError as err:
        raise ValueError("it is nested too deep") from err


def finite(value: object) -> object:
    """A JSON value with null for every number that JSON does not know.

    >>> finite({"mse": math.nan, "per_class": [0.5, -math.inf]})
    {'mse': None, 'per_class': [0.5, None]}
    """
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def put_all(folder: Path, files: Mapping[Path, bytes]) -> list[Path]:
    """Make a folder and put files in place; returns their paths, in order."""
    with as_run_error(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        put(path, content)
    return list(files)


def put(path: Path, content: bytes) -> None:
    """Put a file in place in one step; its folder must be there."""
    with as_run_error(path), replacing(path) as file:
        file.write(content)
