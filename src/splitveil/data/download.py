"""Fetch one file over http(s): checked, atomic, and nothing half-written left behind."""

import hashlib
import os
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit
from urllib.request import urlopen

from splitveil.errors import ConfigError, DataError
from splitveil.types import Progress, silent

TIMEOUT_SECONDS = 30.0
CHUNK_BYTES = 1 << 20


def fetch(url: str, target: Path, md5: str, progress: Progress = silent) -> Path:
    """Download `url` to `target` if its MD5 is `md5`; otherwise leave no trace and raise.

    The bytes go to `<target>.part` first, which is renamed once the checksum agrees.

    >>> fetch("ftp://host/x", Path("x"), "")
    Traceback (most recent call last):
    splitveil.errors.ConfigError: only http and https addresses are fetched, got 'ftp://host/x'
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise ConfigError(f"only http and https addresses are fetched, got '{url}'")
    part = target.with_name(f"{target.name}.part")
    try:
        folders = [f for f in (target.parent, *target.parent.parents) if not f.exists()]
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as out:
                got = _copy(url, out, target.name, progress)
            if got != md5:
                raise DataError(
                    f"{url} came with MD5 {got}, expected {md5}; try again later, "
                    f"or fetch it by hand and put it at {target}"
                )
            os.replace(part, target)
        finally:
            # After the rename there is no part; after anything else, Ctrl-C included, it must go.
            with suppress(OSError):
                part.unlink()
            # A folder made here goes too, unless it holds something: those rmdir leaves alone.
            for folder in folders:
                with suppress(OSError):
                    folder.rmdir()
    except (OSError, HTTPException) as err:
        raise DataError(
            f"cannot download {url}: {err}; fetch it by hand and put it at {target}"
        ) from err
    return target


def _copy(url: str, out: BinaryIO, note: str, progress: Progress) -> str:
    """Stream the body of `url` into `out`; returns its MD5."""
    digest = hashlib.md5(usedforsecurity=False)
    done = 0
    with urlopen(url, timeout=TIMEOUT_SECONDS) as response:  # noqa: S310 - scheme checked above
        total = int(response.headers.get("Content-Length") or 0)
        while chunk := response.read(CHUNK_BYTES):
            out.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            progress(done, max(done, total), note)
    return digest.hexdigest()
