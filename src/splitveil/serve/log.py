"""The server's log: lines with time stamps, few enough that strangers cannot fill a disk.

A line that repeats is left out beyond `MOST` per `WINDOW` seconds, and counted. A log file is
rotated, so that both files together stay under `MAX_BYTES`. No line holds anything that a stranger
wrote.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path

from splitveil.errors import ServerError

MAX_BYTES = 1_000_000
MOST, WINDOW = 20, 10.0  # lines from one place in the code, seconds
FORMAT, TIME = "%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%SZ"
ACCESS = "splitveil.access"
LEVELS = {
    "splitveil": logging.INFO,
    ACCESS: logging.INFO,
    "uvicorn": logging.WARNING,
    "asyncio": logging.WARNING,
}
TRACEBACK = 4_000  # characters


class RareLines(logging.Filter):
    """Lets `most` lines per `window` seconds pass from each place in the code; counts the others.

    The first line of a new window says how many were left out. Places are lines of our code and of
    libraries, so that they are few, whatever is logged.
    """

    def __init__(
        self,
        most: int = MOST,
        window: float = WINDOW,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._most, self._window, self._clock = most, window, clock
        self._seen: dict[tuple[str, int], tuple[float, int]] = {}  # since when, how many

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is written."""
        place, now = (record.pathname, record.lineno), self._clock()
        since, count = self._seen.get(place, (now, 0))
        left_out = 0
        if now - since >= self._window:
            since, count, left_out = now, 0, max(0, count - self._most)
        self._seen[place] = since, count + 1
        if left_out:
            record.msg = f"{record.getMessage()} ({left_out} more such lines left out before)"
            record.args = None
        return count < self._most


class OneLine(logging.Formatter):
    """Time in UTC, level, message; a traceback is indented and not longer than `TRACEBACK`."""

    @staticmethod
    def converter(seconds: float | None = None) -> time.struct_time:
        """UTC."""
        return time.gmtime(seconds)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """The line, without control characters."""
        text = super().formatMessage(record)
        return "".join(c if c.isprintable() else " " for c in text)

    def formatException(self, ei: object) -> str:  # noqa: N802
        """The last part of a traceback."""
        text = super().formatException(ei)  # type: ignore[arg-type]
        return "  " + text[-TRACEBACK:].replace("\n", "\n  ")


@contextmanager
def server_log(file: Path | None = None, *, access: bool = False) -> Iterator[None]:
    """While the block runs, write the log to stderr, or to a file and its predecessor `FILE.1`.

    Args:
        file: Where to; None: stderr.
        access: Whether every answer gets a line: address, method, which call, status, time.
    """
    try:
        handler: logging.Handler = (
            logging.StreamHandler(sys.stderr)
            if file is None
            else RotatingFileHandler(file, maxBytes=MAX_BYTES // 2 - 2 * TRACEBACK, backupCount=1)
        )
    except OSError as err:
        raise ServerError(
            f"cannot write the log to {file}: {err.strerror}; choose another --log-file"
        ) from err
    handler.setFormatter(OneLine(FORMAT, TIME))
    handler.addFilter(RareLines())
    loggers = {logging.getLogger(name): level for name, level in LEVELS.items()}
    before = {each: (each.handlers[:], each.level, each.propagate) for each in loggers}
    for logger, level in loggers.items():
        logger.handlers[:], logger.propagate = [handler], False
        logger.setLevel(level)
    if not access:
        logging.getLogger(ACCESS).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, (handlers, level, propagate) in before.items():
            logger.handlers[:], logger.propagate = handlers, propagate
            logger.setLevel(level)
        handler.close()
