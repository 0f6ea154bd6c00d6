r"""Files and texts of strangers: read within bounds, shown without control characters.

Whoever reads a file that somebody else may have written reads it here. A file is a regular file of
limited size, never a FIFO or a device, which could keep a reader waiting for ever. JSON and TOML
are nested `MAX_DEPTH` deep at most and say each key once. The device's client imports this module,
so it uses the standard library only.
"""

import errno
import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

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
            parse_float=_finite if lenient else None,
        )
    except RecursionError as err:
        raise ValueError("it is nested too deep") from err
    check_nesting(found, finite=not lenient)
    return found


def _nothing(word: str) -> None:
    del word


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def _finite(digits: str) -> float | None:
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
