"""The IDX format of the MNIST family: a big-endian header, then bytes."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from splitveil.errors import DataError

UBYTE = 0x08
# 60,000 images of 28×28 need 47 MB; a gzip file that grows further is no such dataset.
MAX_BYTES = 64 << 20


def parse_idx(raw: bytes, ndim: int, name: str) -> np.ndarray:
    """The array of `ndim` axes in an IDX file of unsigned bytes; every header field is checked.

    >>> parse_idx(bytes([0, 0, 8, 1, 0, 0, 0, 2, 5, 9]), 1, "labels").tolist()
    [5, 9]
    """
    magic, header = struct.pack(">HBB", 0, UBYTE, ndim), 4 + 4 * ndim
    if raw[:4] != magic:
        raise DataError(f"{name} begins with {raw[:4].hex()}, expected {magic.hex()} (IDX, ubyte)")
    if len(raw) < header:
        raise DataError(f"{name} ends inside its header: {len(raw)} of {header} bytes")
    shape = struct.unpack(f">{ndim}I", raw[4:header])
    if len(raw) - header != math.prod(shape):
        raise DataError(
            f"{name} announces {shape} = {math.prod(shape)} bytes but holds {len(raw) - header}; "
            "delete it and fetch it again"
        )
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)


def read_bytes(path: Path) -> bytes:
    """Bytes of a file, unpacked if its name ends in .gz."""
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path) as packed:
            raw = packed.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as err:
        raise DataError(
            f"{path} is truncated or no gzip file ({err}); delete it and fetch it again"
        ) from err
    if len(raw) > MAX_BYTES:
        raise DataError(f"{path} unpacks to more than {MAX_BYTES} bytes; it is not this dataset")
    return raw
