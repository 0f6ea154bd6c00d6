"""What is finished: one line of JSON for each trial, on disk before the next one is started.

Lines are only ever appended. A last line without its end was being written when the process was
killed; it is dropped, and its trial counts as not finished. A trial that failed may be tried again:
then its last line counts.
"""

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from splitveil.errors import RunError
from splitveil.sweep.trial import Task
from splitveil.train.files import explain_os_error
from splitveil.types import Json

FILE = "journal.jsonl"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A finished trial: `found` is what was measured and `error` None, or the other way round."""

    defence: str
    number: int
    settings: Mapping[str, Any]
    seed: int
    seconds: float
    run: str | None = None
    found: Json | None = None
    images: Json = field(default_factory=dict)
    error: str | None = None

    @property
    def task(self) -> Task:
        """The trial that it was."""
        return Task(
            defence=self.defence, number=self.number, settings=self.settings, seed=self.seed
        )


def read_lines(data: bytes, path: Path) -> tuple[list[Entry], int]:
    """The entries of a journal, and how many of its bytes are whole lines."""
    whole = data.rfind(b"\n") + 1
    entries: dict[str, Entry] = {}
    for number, line in enumerate(data[:whole].splitlines(), start=1):
        try:
            entry = Entry(**json.loads(line))
            key = entry.task.key
        except (ValueError, TypeError) as err:
            raise RunError(
                f"{path}, line {number} is not a finished trial: {err}; remove that line, and its "
                "trial will be run again"
            ) from err
        before = entries.pop(key, None)
        if before is not None and before.error is None:
            raise RunError(
                f"{path}, line {number}: trial {key} stands there twice; remove one of its lines"
            )
        entries[key] = entry
    return list(entries.values()), whole


class Journal:
    """The open journal of a sweep's folder; one process at a time can have it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        with explain_os_error(self.path):
            new = not self.path.exists()
            self._file: BinaryIO = self.path.open("ab")
            if new:
                _sync_folder(folder)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as err:
            self._file.close()
            raise RunError(
                f"another process is working on the sweep in {folder}; wait for it, or end it"
            ) from err
        try:
            self.entries, whole = read_lines(self.path.read_bytes(), self.path)
        except RunError:
            self._file.close()
            raise
        self._file.truncate(whole)

    def append(self, entry: Entry) -> None:
        """Add a finished trial; when this returns it is on disk."""
        line = json.dumps(asdict(entry), allow_nan=False).encode() + b"\n"
        with explain_os_error(self.path):
            self._file.write(line)
            self._file.flush()
            os.fsync(self._file.fileno())
        key = entry.task.key
        self.entries = [*(e for e in self.entries if e.task.key != key), entry]

    @property
    def failed(self) -> list[Entry]:
        """The trials whose last line is an error."""
        return [entry for entry in self.entries if entry.error is not None]

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _sync_folder(folder: Path) -> None:
    """A new file's name is on disk only when its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
