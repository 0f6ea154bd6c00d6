"""Atomic files, locks, JSON without NaN, and progress."""

import errno
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

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # from disks without locks


@contextmanager
def as_run_error(path: Path, otherwise: str = "Choose another folder") -> Iterator[None]:
    """Turn an OSError of the disk into a RunError that says what to do.

    Args:
        path: The file or folder that is written.
        otherwise: The advice if neither free space nor a shorter name would help.
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
            f"cannot write {path}: {err.strerror or err}; files that were complete are still "
            f"there. {step}"
        ) from err


def check_folder(folder: Path, otherwise: str = "Choose another folder") -> None:
    """Raise RunError if a folder cannot be created or written, before hours of work are spent.

    It creates the same folders inside a temporary one next to the place, and removes them again.
    """
    with as_run_error(folder, otherwise):
        whole = Path(os.path.abspath(folder))
        there = next(place for place in (whole, *whole.parents) if os.path.lexists(place))
        with TemporaryDirectory(dir=there, prefix=".splitveil-") as scratch:
            (Path(scratch) / whole.relative_to(there)).mkdir(parents=True, exist_ok=True)


def temporary_path(path: Path, mark: str = "") -> Path:
    """The hidden place where a file is written until it is complete."""
    if not path.name or path.is_dir():  # the path "." has an empty name
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return path.with_name(f".{path.name}{mark}.tmp")


@contextmanager
def replacing(path: Path, temporary: Path | None = None) -> Iterator[BinaryIO]:
    """A binary file that appears under its name only when it is complete and on disk.

    Args:
        path: The file; its folder must exist.
        temporary: Where it is written until then. The default has the process id in its name, so
            that several processes may write the same file.

    Raises:
        OSError: As the system raises it; `atomic_file` explains it to the user.
    """
    temporary = temporary or temporary_path(path, f".{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # else a power cut could leave the new name without content
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A binary file of a run, complete or absent; an error of the disk says what to do.

    Its temporary name is always the same, so that the next attempt replaces what a killed process
    left.
    """
    with as_run_error(path), replacing(path, temporary_path(path)) as file:
        yield file


@contextmanager
def file_lock(path: Path, *, wait: bool) -> Iterator[None]:
    """Lock `path` for this process until the block or the process ends, by a hidden file.

    A disk without locks is used without one.

    Args:
        path: What is locked; its folder must exist.
        wait: Whether to wait while another process holds the lock.

    Raises:
        Timeout: If another process holds the lock and `wait` is False.
    """
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        # Not 0: the last owner may be removing the file at this moment.
        lock.acquire(timeout=-1 if wait else 0.1)
    except OSError as err:
        if isinstance(err, Timeout) or err.errno not in NO_LOCKS:
            raise
    try:
        yield
    finally:
        # Removed before it is released: whoever waits notices and locks a new file.
        with suppress(OSError):
            os.unlink(lock.lock_file)
        lock.release()


@contextmanager
def folder_lock(folder: Path, busy: str | None = None) -> Iterator[None]:
    """Lock a folder for this process until the block or the process ends.

    The lock lies next to the folder, so that the folder itself may be removed inside the block.

    Args:
        folder: The folder; it need not exist.
        busy: The message if another process holds it; the default says that it is training.

    Raises:
        RunError: If another process holds it, or the place cannot be written.
    """
    with as_run_error(folder):
        own = folder.resolve()  # one lock, whichever link leads to the folder
    with ExitStack() as stack:
        with as_run_error(own.with_name(f".{own.name}.lock")):
            own.parent.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(file_lock(own, wait=False))
            except Timeout as err:
                raise RunError(
                    busy
                    or f"another process is training in {folder}; wait until it ends, or train "
                    "under another name"
                ) from err
        yield


def file_version(path: Path) -> tuple[int, int] | None:
    """Inode and time of the last change, which differ once a file is rewritten; None if absent."""
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
    """Called during long work; the command line draws a progress bar from it."""

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Report that `done` of `total` units are finished; `note` is a short text for the bar."""
        ...


def silent(done: int, total: int, note: str = "") -> None:
    """A `Progress` that shows nothing."""
    del done, total, note


@dataclass(frozen=True)
class ProgressPart:
    """The share of one attack in the progress bar of all.

    Args:
        whole: The bar of all attacks.
        name: The attack, shown before each note.
        before: Effort of the attacks that are finished.
        effort: Effort of this attack.
        total: Effort of all attacks, in the same unit.
    """

    whole: Progress
    name: str
    before: float
    effort: float
    total: float

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Report that `done` of `total` units of this attack are finished."""
        here = self.before + self.effort * min(done / max(total, 1), 1.0)
        self.whole(int(1000 * here), int(1000 * self.total), f"{self.name} {note}".rstrip())


Json = dict[str, Any]


def finite(value: object) -> object:
    """A JSON value with null in place of NaN and infinity, which JSON does not know.

    >>> finite({"mse": math.nan, "per_class": [0.5, -math.inf]})
    {'mse': None, 'per_class': [0.5, None]}
    """
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def put_all(folder: Path, files: Mapping[Path, bytes]) -> list[Path]:
    """Create a folder and write files, each atomically; returns their paths in order."""
    with as_run_error(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        put(path, content)
    return list(files)


def put(path: Path, content: bytes) -> None:
    """Write a file atomically; its folder must exist, and other processes may write it too."""
    with as_run_error(path), replacing(path) as file:
        file.write(content)
