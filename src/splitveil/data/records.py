"""The CIFAR binary format: where its files lie, and records of label bytes and 32×32 pixels."""

import tarfile
import zlib
from collections.abc import Collection
from pathlib import Path

import numpy as np
from einops import rearrange

from splitveil.data.parts import Arrays
from splitveil.errors import DataError

PIXELS = 3 * 32 * 32

Blobs = dict[str, bytes]


def from_folder(folder: Path, names: Collection[str]) -> Blobs:
    """The bytes of the known files of an unpacked folder; absent ones are left out."""
    found = (folder / name for name in names)
    return {path.name: path.read_bytes() for path in found if path.is_file()}


def from_archive(archive: Path, inside: str, names: Collection[str], max_bytes: int) -> Blobs:
    """The bytes of the members `inside`/name, read in memory; nothing is unpacked.

    Links and members under any other name are passed over, but for a leading "./", which tar
    writes when a folder is packed as ./folder; one over `max_bytes` is refused.
    """
    wanted = {f"{inside}/{name}": name for name in names}
    blobs: Blobs = {}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                name = wanted.get(member.name.removeprefix("./"))
                if name is None or not member.isfile():
                    continue
                if member.size > max_bytes:
                    raise DataError(
                        f"{name} in {archive} has {member.size} bytes, the official one at most "
                        f"{max_bytes}; delete the archive and fetch it again"
                    )
                stream = tar.extractfile(member)
                blobs[name] = stream.read() if stream else b""
    except (OSError, EOFError, tarfile.TarError, zlib.error) as err:
        raise DataError(
            f"{archive} is truncated or no gzipped tar archive ({err}); "
            "delete it and fetch it again"
        ) from err
    return blobs


def records(raw: bytes, label_bytes: int, what: str) -> Arrays:
    """Images (n, 3, 32, 32) and labels (n,) of n records; of several label bytes the last counts.

    >>> images, labels = records(bytes([4, 7]) + bytes(3072), 2, "train.bin")
    >>> images.shape, labels.tolist()
    ((1, 3, 32, 32), [7])
    """
    size = label_bytes + PIXELS
    if len(raw) % size:
        raise DataError(f"{what} records have {size} bytes, got {len(raw)} in all")
    table = np.frombuffer(raw, np.uint8).reshape(-1, size)
    images = rearrange(table[:, label_bytes:], "n (c h w) -> n c h w", c=3, h=32)
    return images, table[:, label_bytes - 1]
