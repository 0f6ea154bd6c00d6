"""Decoded images beside the archive they come from, so that they are decoded once.

The file is written under another name and renamed when complete: it is there whole or not at all.
It says which archive it was made from, by MD5; one made from another archive is made anew.
"""

import hashlib
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from splitveil.errors import DataError

SOURCE = "source_md5"
CHUNK_BYTES = 1 << 20

Arrays = dict[str, np.ndarray]


def decoded_once(archive: Path, target: Path, decode: Callable[[], Arrays]) -> Arrays:
    """What `decode` makes of `archive`, from `target` where an earlier call has stored it.

    In a folder that cannot be written, or on a full disk, nothing is stored.
    """
    md5 = file_md5(archive)
    if (found := stored(target, md5)) is not None:
        return found
    arrays = decode()
    store(target, arrays, md5)
    return arrays


def file_md5(path: Path) -> str:
    """MD5 of a file, read in pieces."""
    digest = hashlib.md5(usedforsecurity=False)
    try:
        with path.open("rb") as stream:
            while chunk := stream.read(CHUNK_BYTES):
                digest.update(chunk)
    except OSError as err:
        raise DataError(f"cannot read {path}: {err}") from err
    return digest.hexdigest()


def stored(target: Path, md5: str) -> Arrays | None:
    """The arrays in `target`; None where it is absent or was made from another archive."""
    if not target.exists():
        return None
    try:
        with target.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            if str(archive[SOURCE]) != md5:
                return None
            return {key: archive[key] for key in archive.files if key != SOURCE}
    except (OSError, EOFError, ValueError, KeyError, BadZipFile, zlib.error) as err:
        raise DataError(
            f"{target}, which holds decoded images, is damaged ({err}); delete it, "
            "it will be made again"
        ) from err


def store(target: Path, arrays: Mapping[str, np.ndarray], md5: str) -> None:
    """Write the arrays to `target`, whole or not at all."""
    part = target.with_name(f"{target.name}.{os.getpid()}.part")  # two runs may write at once
    contents: dict[str, Any] = {SOURCE: np.array(md5), **arrays}
    try:
        try:
            with part.open("wb") as stream:
                np.savez(stream, **contents)
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
    except OSError:
        return
