"""Draws of noise that were sent: the same image is sent with the same draw, also after a restart.

Averaging k noisy copies of one image reduces the noise by √k. A client that sends the same bytes
each time reveals k copies of one draw, which tell no more than one.

A draw is 32 random bytes, its seed; SHAKE-256 makes all random numbers of one image from it. What
is kept for an image is a keyed hash, the seed and how many different draws it had. The stream also
depends on the image itself, so whoever finds key and seeds must still guess the image.
"""

import hashlib
import hmac
import os
import secrets
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from itertools import count
from pathlib import Path
from threading import Lock
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from splitveil.errors import ServerError
from splitveil.io import opened

KEY, TABLE = "key", "draws.sqlite"  # files of a store
SECRET = 32  # bytes of a key, a seed and a digest
REMEMBERED = 16  # images whose number of draws is kept, for each whose draw is kept
BUSY_SECONDS = 30.0  # to wait for another process
_TABLES = (
    "CREATE TABLE IF NOT EXISTS draws (digest BLOB PRIMARY KEY, seed BLOB, drawn INTEGER NOT NULL, "
    "used INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS by_use ON draws (used)",
    "CREATE INDEX IF NOT EXISTS by_use_with_seed ON draws (used) WHERE seed IS NOT NULL",
    "CREATE TABLE IF NOT EXISTS keys (proof BLOB PRIMARY KEY)",
    # Counting rows would take longer than everything else.
    "CREATE TABLE IF NOT EXISTS totals (id INTEGER PRIMARY KEY, clock INTEGER, seeds INTEGER, "
    "images INTEGER)",
    "INSERT OR IGNORE INTO totals VALUES (0, 0, 0, 0)",
)
_DROP_SEEDS = (
    "UPDATE draws SET seed = NULL WHERE digest IN "
    "(SELECT digest FROM draws WHERE seed IS NOT NULL ORDER BY used LIMIT ?)"
)
_DROP_IMAGES = "DELETE FROM draws WHERE digest IN (SELECT digest FROM draws ORDER BY used LIMIT ?)"
Entropy = Callable[[int], bytes]


def endless(secret: bytes) -> Entropy:
    """Random bytes from a secret, without end: call k gives SHAKE-256(secret ‖ k).

    >>> one, same = endless(b"s"), endless(b"s")
    >>> one(4) == same(4), one(4) == same(8)[:4], one(4) == endless(b"s")(4)
    (True, True, False)
    """
    calls = count()
    return lambda size: hashlib.shake_256(secret + next(calls).to_bytes(8, "little")).digest(size)


def default_store(environment: Mapping[str, str] = os.environ) -> Path:
    """Where `splitveil infer` keeps its draws: below the folder for a user's state."""
    home = Path.home()
    name, otherwise = (
        ("LOCALAPPDATA", home / "AppData" / "Local")
        if os.name == "nt"
        else ("XDG_STATE_HOME", home / ".local" / "state")
    )
    return Path(environment.get(name) or otherwise) / "splitveil" / "draws"


class DrawStore:
    """Which draw each image was sent with, in a folder or in memory.

    Several processes may use one folder at a time. An image is told by an HMAC with the store's
    key; neither images nor what is sent of them are kept.

    Args:
        folder: Where the store lies; it is made if it is absent. None: in memory, for this process.
        size: Images whose draw is kept, ≥ 1; those used longest ago are dropped, where the last
            `size` / 2 uses count as one.
        budget: Different draws that one image may be sent with, ≥ 1. They are counted for the last
            `REMEMBERED` · `size` images.

    >>> store, image = DrawStore(), np.zeros((1, 2, 2), np.float32)
    >>> first, again = (store.streams("export", image[None])[0] for _ in range(2))
    >>> first(8) == again(8)
    True
    """

    def __init__(self, folder: Path | None = None, size: int = 10_000, budget: int = 1) -> None:
        for what, number in (("cache", size), ("budget", budget)):
            if number < 1:
                raise ServerError(f"{what} must be at least 1 draw, got {number}")
        self._folder, self._size, self._budget, self._lock = folder, size, budget, Lock()
        self._memory = sqlite3.connect(":memory:", check_same_thread=False)
        finalize(self, self._memory.close)
        self._key = secrets.token_bytes(SECRET)
        if folder is not None:
            with self._table() as table:
                self._key = _shared_key(folder / KEY, table)

    def streams(self, scope: str, images: NDArray[np.float32]) -> list[Entropy]:
        """For each image the random bytes of the draw that it is sent with, old or new.

        Args:
            scope: What the images are encoded with; another encoder gets other draws, because the
                difference of two z with one draw would have no noise.
            images: Images (n, c, h, w).

        Raises:
            ServerError: If an image would need more different draws than the budget; then none of
                the images gets a new one.
        """
        # Adding 0 makes +0 and −0 one number.
        told = [scope.encode() + b"\0" + (image + np.float32(0)).tobytes() for image in images]
        with self._table() as table:
            seeds = self._seeds(table, [self._hmac(b"image", content) for content in told])
        pairs = zip(told, seeds, strict=True)
        return [endless(self._hmac(b"draw", content) + seed) for content, seed in pairs]

    def _seeds(self, table: sqlite3.Connection, digests: Sequence[bytes]) -> list[bytes]:
        """The seed of every image, drawn if there is none; drops those used longest ago."""
        before = table.execute("SELECT clock, seeds, images FROM totals").fetchone()
        clock, seeds, images = before
        found: list[bytes] = []
        for number, digest in enumerate(digests):
            row = table.execute("SELECT seed, drawn, used FROM draws WHERE digest = ?", (digest,))
            known = row.fetchone()
            seed, drawn, used = known or (None, 0, 0)
            if seed is None:
                self._check_budget(number, drawn)
                seed, drawn = secrets.token_bytes(SECRET), drawn + 1
                seeds, images = seeds + 1, images + (known is None)
            elif clock - used < self._size // 2:  # used lately: nothing to write
                found.append(bytes(seed))
                continue
            clock += 1
            values = (digest, seed, drawn, clock)
            table.execute("INSERT OR REPLACE INTO draws VALUES (?, ?, ?, ?)", values)
            found.append(bytes(seed))
        most = self._size * REMEMBERED
        table.execute(_DROP_SEEDS, (max(0, seeds - self._size),))
        table.execute(_DROP_IMAGES, (max(0, images - most),))
        now = (clock, min(seeds, self._size), min(images, most))
        if now != before:
            table.execute("UPDATE totals SET clock = ?, seeds = ?, images = ?", now)
        return found

    def _check_budget(self, number: int, drawn: int) -> None:
        if drawn >= self._budget:
            raise ServerError(
                f"image {number} of this call was sent with {drawn} draw(s) of noise before, which "
                f"are no longer kept, and its budget is {self._budget}: one more would help the "
                "server to average the noise away. Do not send it, keep more draws (cache), or "
                "allow more by name (budget)"
            )

    def _hmac(self, purpose: bytes, content: bytes) -> bytes:
        return hmac.digest(self._key, purpose + b"\0" + content, hashlib.sha256)

    @contextmanager
    def _table(self) -> Iterator[sqlite3.Connection]:
        """The table, locked until the block ends; what the block did is kept wholly or not."""
        with self._lock, _explained(self._folder), self._connection() as table:
            table.isolation_level = None  # transactions begin and end here
            table.execute("PRAGMA secure_delete = ON")  # a dropped seed is overwritten
            table.execute("BEGIN IMMEDIATE")
            try:
                for statement in _TABLES:
                    table.execute(statement)
                yield table
                table.execute("COMMIT")
            except BaseException:
                table.execute("ROLLBACK")
                raise

    def _connection(self) -> AbstractContextManager[sqlite3.Connection]:
        if self._folder is None:
            return nullcontext(self._memory)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / TABLE
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # sqlite would let others read it
        # Not kept open: a connection must not be used on both sides of a fork.
        return closing(sqlite3.connect(path, timeout=BUSY_SECONDS))


@contextmanager
def _explained(folder: Path | None) -> Iterator[None]:
    try:
        yield
    except (OSError, sqlite3.Error) as err:
        reason = getattr(err, "strerror", None) or err
        raise ServerError(
            f"cannot use the store of draws in {folder}: {reason}; choose another folder, or "
            "remove this one, after which every image gets a new draw"
        ) from err


def _shared_key(path: Path, table: sqlite3.Connection) -> bytes:
    """The key of a store, made with it; refuses one that is not its own or not private."""
    proofs = [bytes(row[0]) for row in table.execute("SELECT proof FROM keys")]
    if not proofs and not path.exists():
        _write_private(path, secrets.token_bytes(SECRET))
    key = _read_private(path) if path.exists() else b""
    proof = hmac.digest(key, b"proof", hashlib.sha256)
    if len(key) != SECRET or (proofs and proof not in proofs):
        raise ServerError(
            f"{path} is not the key of {path.with_name(TABLE)}; put the right one back, or remove "
            "both, after which every image gets a new draw"
        )
    table.execute("INSERT OR IGNORE INTO keys VALUES (?)", (proof,))
    return key


def _read_private(path: Path) -> bytes:
    with opened(path) as file:
        if os.name == "posix" and os.fstat(file.fileno()).st_mode & 0o077:
            raise ServerError(
                f"{path} must be a file that only you can read; make it so: chmod 600 {path}"
            )
        return file.read(SECRET + 1)


def _write_private(path: Path, content: bytes) -> None:
    """A file that is complete or absent, for this user only."""
    scratch = path.with_name(f".{path.name}.new")
    scratch.unlink(missing_ok=True)  # of a process that was killed; the table is locked
    with os.fdopen(os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
