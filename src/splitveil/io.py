r"""Files: bounded reading of what strangers wrote, atomic writing, locks, JSON, and progress.

Whoever reads a file that somebody else may have written reads it here. A file is a regular file of
limited size, never a FIFO or a device, which could keep a reader waiting for ever. JSON and TOML
are nested `MAX_DEPTH` deep at most and say each key once. What is shown of them has no control
characters.

The device's client imports this module, so it needs the standard library only; `filelock` is
imported when something is locked.
"""

import errno
import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, NoReturn, Protocol, runtime_checkable

from splitveil.errors import RunError

Json = dict[str, Any]
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # from disks without locks
MAX_DEPTH = 64  # of JSON and TOML; what this package writes has less than 10
MAX_BYTES = 1 << 28  # 256 MiB: of a gallery, the largest text that is read at once
MAX_SETTINGS = 1 << 18  # characters of TOML
# A dotted key of more parts than that: tomllib's time and memory grow with the square of their
# number. The lookbehind keeps the search linear in long words.
_LONG_KEY = re.compile(
    rf"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{MAX_DEPTH}}}"""
)


@contextmanager
def opened(path: Path, most: int = 1 << 62) -> Iterator[BufferedReader]:
    """A regular file of at most `most` bytes, open for reading.

    Raises:
        OSError: As the system raises it, also for anything that is no regular file or too large.
    """
    with open(path, "rb", opener=_without_waiting) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
        if found.st_size > most:
            raise too_large(path, most)
        yield file


def check_file(path: Path) -> None:
    """Raise OSError for anything that is no regular file, before a library opens it itself."""
    with opened(path, MAX_BYTES):
        pass


def _without_waiting(path: str, flags: int) -> int:
    # Opening a FIFO would wait for somebody to write to it.
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def too_large(path: Path, most: int) -> OSError:
    """The error for a file above a bound."""
    return OSError(errno.EFBIG, f"it is larger than the limit of {most} bytes", str(path))


def read_bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    """The content of a regular file; an OSError if it has more than `most` bytes."""
    with opened(path, most) as file:
        content = file.read(most + 1)
    if len(content) > most:  # it grew meanwhile, or lies on a disk that does not tell sizes
        raise too_large(path, most)
    return content


def read_text(path: Path, most: int = MAX_BYTES) -> str:
    """The text of a regular file; UnicodeDecodeError, a ValueError, if it is not UTF-8."""
    return read_bytes(path, most).decode("utf-8")


def parse_json(
    content: str | bytes, *, lenient: bool = False, twice: list[str] | None = None
) -> Any:  # noqa: ANN401 - any JSON value
    """The JSON value in a text.

    Args:
        content: The text, or its bytes in UTF-8.
        lenient: Whether NaN, infinity and numbers beyond the range of floats count as null, as in
            records and logs, where they mean "not measured". Else they are refused.
        twice: Collects the keys that an object has twice; None refuses them. Two readers of such
            an object may see two values.

    Raises:
        ValueError: If it is no JSON, is nested too deep, or holds what is refused.

    >>> parse_json('{"mse": NaN}', lenient=True)
    {'mse': None}
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            repeated = [name for name in found if names.count(name) > 1]
            if twice is None:
                raise ValueError(f"the key {repeated[0]!r:.80} is given twice")
            twice.extend(repeated)
        return found

    text = content.decode("utf-8") if isinstance(content, bytes) else content
    try:
        found = json.loads(
            text,
            object_pairs_hook=unique,
            parse_constant=_nothing if lenient else _no_constant,
            parse_float=_finite_or_none if lenient else None,
        )
    except RecursionError as err:
        raise ValueError("it is nested too deep") from err
    check_nesting(found, finite=not lenient)
    return found


def _nothing(word: str) -> None:
    del word


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def _finite_or_none(digits: str) -> float | None:
    value = float(digits)
    return value if math.isfinite(value) else None


def check_nesting(value: object, *, finite: bool = False) -> None:
    """Raise ValueError if lists and tables are nested too deep, or a number is not `finite`."""
    level = [value]
    for _ in range(MAX_DEPTH + 2):  # the first is the value itself, the last is empty
        if not level:
            return
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            elif finite and isinstance(item, int | float) and not _is_float(item):
                raise ValueError("every number must be finite, got one beyond the range of floats")
        level = below
    raise ValueError(f"it is nested too deep, more than {MAX_DEPTH} levels")


def _is_float(number: int | float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer
        return False


def parse_toml(content: str) -> dict[str, Any]:
    """The table in a TOML text; ValueError if it is no TOML, too long, or nested too deep."""
    if len(content) > MAX_SETTINGS:
        raise ValueError(f"it has more than {MAX_SETTINGS} characters")
    if _LONG_KEY.search(content):
        raise ValueError(f"it is nested too deep, a key has more than {MAX_DEPTH} parts")
    try:
        found = tomllib.loads(content)
    except RecursionError as err:
        raise ValueError("it is nested too deep") from err
    check_nesting(found)
    return found


def printable(text: str) -> str:
    r"""A text whose control characters are spaces; ends of lines stay.

    A terminal obeys them: they move its cursor, change its title or hide what was printed.

    >>> printable("no\x1b[2J such\nmodel")
    'no [2J such\nmodel'
    """
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)


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


def file_version(path: Path) -> tuple[int, int] | None:
    """Inode and time of the last change, which differ once a file is rewritten; None if absent."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


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


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_file(path) as file:
        file.write(text.encode())


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


@contextmanager
def file_lock(path: Path, *, wait: bool) -> Iterator[None]:
    """Lock `path` for this process until the block or the process ends, by a hidden file.

    A disk without locks is used without one.

    Args:
        path: What is locked; its folder must exist.
        wait: Whether to wait while another process holds the lock.

    Raises:
        TimeoutError: If another process holds the lock and `wait` is False.
    """
    from filelock import FileLock

    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        # Not 0: the last owner may be removing the file at this moment.
        lock.acquire(timeout=-1 if wait else 0.1)
    except OSError as err:
        if isinstance(err, TimeoutError) or err.errno not in NO_LOCKS:
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
            except TimeoutError as err:
                raise RunError(
                    busy
                    or f"another process is training in {folder}; wait until it ends, or train "
                    "under another name"
                ) from err
        yield


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
