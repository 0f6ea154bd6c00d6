"""Files of a published dataset: read from a folder, from their archive, or downloaded.

Archives are read in memory and never unpacked. A download appears in the data folder only when it
is complete and its checksum is right.
"""

import gzip
import hashlib
import tarfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from lzma import LZMAError
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit
from urllib.request import urlopen
from zipfile import BadZipFile

from splitveil.data.dataset import ReadRequest
from splitveil.errors import ConfigError, DataError
from splitveil.io import Progress, file_lock, file_version, opened, read_bytes, replacing, silent

TIMEOUT_SECONDS = 30.0
CHUNK_BYTES = 1 << 20
MAX_UNPACKED = 64 << 20  # Fashion-MNIST needs 47 MB; a larger gzip file is something else
# What Python raises for archives that are cut, forged, encrypted, pickled or oddly compressed.
ARCHIVE_ERRORS = (tarfile.TarError, BadZipFile, zlib.error, LZMAError)
UNREADABLE = (OSError, EOFError, ValueError, RuntimeError, MemoryError, *ARCHIVE_ERRORS)

Blobs = dict[str, bytes]


@dataclass(frozen=True, kw_only=True)
class Archive:
    """A published archive, and the files in it that are read.

    Attributes:
        url: Where it is published. In the data folder it has the same file name.
        sha256: Of the published archive. Downloads are checked by it. An archive that the user put
            there is not, because it may have been packed again.
        folder: The folder that it unpacks to.
        files: The files that must be there, with their SHA-256, or None if none is known.
        optional: Files that may be absent.
        signs: Files that show that the data folder itself is the unpacked folder; by default any of
            `files`.
        max_bytes: Larger files in the archive are refused before they are read.
    """

    url: str
    sha256: str
    folder: str
    files: Mapping[str, str | None]
    optional: Collection[str] = ()
    signs: Collection[str] = ()
    max_bytes: int

    @property
    def name(self) -> str:
        """File name of the archive in the data folder."""
        return self.url.rpartition("/")[2]

    @property
    def again(self) -> str:
        """The advice for a wrong archive."""
        return f"fetch the archive again from {self.url}"

    def find(self, request: ReadRequest) -> Path:
        """The unpacked folder, the data folder, or the archive, downloaded if nothing is there."""
        root = request.root
        for folder, signs in ((root / self.folder, self.files), (root, self.signs or self.files)):
            if any((folder / name).exists() for name in signs):
                return folder
        archive = root / self.name
        if not archive.exists():
            fetch(self.url, archive, self.sha256, request.progress)
        return archive

    def read(self, request: ReadRequest) -> tuple[Blobs, Path]:
        """The checked bytes of the files by name, and the folder or archive they come from."""
        origin = self.find(request)
        if origin.is_dir():
            paths = (origin / name for name in (*self.files, *self.optional))
            blobs = {p.name: self._whole(p) for p in paths if p.is_file()}
        else:
            blobs = self._members(origin)
        if missing := [name for name in self.files if name not in blobs]:
            raise DataError(f"{origin} lacks {', '.join(missing)}; {self.again}")
        for name, expected in self.files.items():
            if expected is not None and (got := sha256_of(blobs[name])) != expected:
                raise self.wrong(name, origin, f"SHA-256 {got}, expected {expected}")
        return blobs, origin

    def _whole(self, path: Path) -> bytes:
        """The bytes of a file of the unpacked folder."""
        try:
            return read_bytes(path, self.max_bytes)
        except OSError as err:
            raise DataError(f"cannot read {path}: {err}; {self.again}") from err

    def wrong(self, name: str, origin: Path, what: str) -> DataError:
        """The error for a file with wrong content, described by `what`."""
        culprit = origin / name if origin.is_dir() else origin
        return DataError(
            f"{name} in {origin} has {what}; delete {culprit} and fetch it again from {self.url}"
        )

    def _members(self, archive: Path) -> Blobs:
        """The files in a gzipped tar archive.

        Links and members with other names are ignored. A leading "./" is accepted: tar writes it
        when a folder is packed as ./folder.
        """
        wanted = {f"{self.folder}/{name}": name for name in (*self.files, *self.optional)}
        blobs: Blobs = {}
        with (
            damage_explained(archive, "gzipped tar archive"),
            opened(archive) as file,
            tarfile.open(fileobj=file, mode="r:gz") as tar,
        ):
            for member in tar:
                name = wanted.get(member.name.removeprefix("./"))
                if name is None or not member.isfile():
                    continue
                if member.size > self.max_bytes:
                    raise DataError(
                        f"{name} in {archive} has {member.size} bytes, the official one at most "
                        f"{self.max_bytes}; delete the archive and fetch it again"
                    )
                stream = tar.extractfile(member)
                blobs[name] = stream.read() if stream else b""
        return blobs


@contextmanager
def damage_explained(path: Path, kind: str, again: str = "fetch it again") -> Iterator[None]:
    """Turn what Python raises for a damaged archive into an error that says what to do."""
    try:
        yield
    except UNREADABLE as err:
        raise DataError(
            f"{path} is truncated or not a {kind} ({err}); delete it and {again}"
        ) from err


def file_bytes(path: Path) -> bytes:
    """Bytes of a file, decompressed if its name ends in .gz."""
    if path.suffix != ".gz":
        return read_bytes(path, MAX_UNPACKED)
    with (
        damage_explained(path, "gzip file"),
        opened(path, MAX_UNPACKED) as file,
        gzip.open(file) as packed,
    ):
        raw = packed.read(MAX_UNPACKED + 1)
    if len(raw) > MAX_UNPACKED:
        raise DataError(f"{path} unpacks to more than {MAX_UNPACKED} bytes; it is not this dataset")
    return raw


def sha256_of(raw: bytes) -> str:
    """SHA-256 of some bytes."""
    return hashlib.sha256(raw).hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file that may be larger than memory."""
    try:
        with opened(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as err:
        raise DataError(f"cannot read {path}: {err}") from err


def fetch(url: str, target: Path, sha256: str, progress: Progress = silent) -> Path:
    """Download `url` to `target` and check its SHA-256; after an error nothing is left.

    If two processes want the same file, one downloads it and the other waits for it.

    >>> fetch("ftp://host/x", Path("x"), "")
    Traceback (most recent call last):
    splitveil.errors.ConfigError: only http and https addresses can be downloaded, got 'ftp://host/x'
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise ConfigError(f"only http and https addresses can be downloaded, got '{url}'")
    folders = [f for f in (target.parent, *target.parent.parents) if not f.exists()]
    before = file_version(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(target, wait=True):
            if file_version(target) == before:  # else another process has just downloaded it
                with replacing(target) as out:
                    _copy(url, out, target, sha256, progress)
    except (OSError, HTTPException) as err:
        raise DataError(
            f"cannot download {url}: {err}; fetch it by hand and put it at {target}"
        ) from err
    finally:
        # Folders created here are removed again; rmdir leaves those alone that hold a file.
        for folder in folders:
            with suppress(OSError):
                folder.rmdir()
    return target


def _copy(url: str, out: BinaryIO, target: Path, sha256: str, progress: Progress) -> None:
    """Stream the body of `url` into `out`; raise DataError if its SHA-256 is wrong."""
    digest = hashlib.sha256()
    done = 0
    with urlopen(url, timeout=TIMEOUT_SECONDS) as response:  # noqa: S310 - `fetch` checks the scheme
        total = int(response.headers.get("Content-Length") or 0)
        while chunk := response.read(CHUNK_BYTES):
            out.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            progress(done, max(done, total), target.name)
    if (got := digest.hexdigest()) != sha256:
        raise DataError(
            f"{url} has SHA-256 {got}, expected {sha256}; try again later, "
            f"or fetch it by hand and put it at {target}"
        )
