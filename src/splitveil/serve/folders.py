"""The folder of an export: complete or absent, and never replaced unasked."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from splitveil.serve.faults import ExportError
from splitveil.serve.manifest import FILE, sha256


def hashes(place: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder, by relative path."""
    files = sorted(p for p in place.rglob("*") if p.is_file())
    return {p.relative_to(place).as_posix(): sha256(p.read_bytes()) for p in files}


def check_target(folder: Path, *, overwrite: bool) -> None:
    """Refuse to replace what was not asked to be replaced, or is no export."""
    if not (folder.exists() or folder.is_symlink()):
        return
    if not overwrite:
        raise ExportError(f"{folder} exists already; choose another --out or give --overwrite")
    if not (folder / FILE).is_file():
        raise ExportError(
            f"{folder} is no export (it has no {FILE}) and will not be overwritten; choose another "
            "--out or remove it yourself"
        )


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """A new folder to fill, which takes the place of `folder` when the block succeeds.

    A link stays, and what it points to is replaced.
    """
    folder = folder.resolve() if folder.is_symlink() else folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as err:
        raise ExportError(f"cannot write {folder}: {err.strerror}; choose another --out") from err
    fresh, old = scratch / "new", scratch / "old"
    try:
        fresh.mkdir()
        yield fresh
        if folder.exists():
            os.rename(folder, old)
        os.rename(fresh, folder)
    except OSError as err:
        if old.exists() and not folder.exists():
            os.rename(old, folder)
        raise ExportError(f"cannot write {folder}: {err.strerror or err}; free some space") from err
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
