"""Random numbers for the wire, and a cache of the draws already sent.

Noise comes from the operating system's cryptographic generator. It has no seed, so nobody who sees
a request can predict or repeat it. `entropy` is an argument only for tests on known bytes; a client
never sets it.

Averaging k noisy copies of one image reduces the noise by √k. A client that sends the same bytes
each time reveals k copies of one draw, which tell no more than one.
"""

import hashlib
import hmac
import os
import secrets
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from splitveil.errors import ServerError
from splitveil.grid import rounded

Rows = NDArray[np.float32]
Entropy = Callable[[int], bytes]
_WORD = 8  # bytes of a 64-bit word
_SPARE_BITS = 11  # a double holds 53 of 64


def uniforms(count: int, entropy: Entropy = os.urandom) -> NDArray[np.float64]:
    r"""Independent uniforms (count,) strictly between 0 and 1, on a grid of 2⁻⁵³.

    >>> uniforms(2, lambda n: bytes(8) + b"\xff" * 8).tolist() == [2.0**-54, 1 - 2.0**-53]
    True
    """
    words = np.frombuffer(entropy(_WORD * count), "<u8") >> np.uint64(_SPARE_BITS)
    # The middle of the top cell would round to 1.
    found: NDArray[np.float64] = np.minimum((words + 0.5) * 2.0**-53, 1 - 2.0**-53)
    return found


def noise_steps(count: int, kind: str, entropy: Entropy = os.urandom) -> NDArray[np.int64]:
    r"""Rounded standard noise (count,) in steps of a sixteenth, see `splitveil.grid`.

    Args:
        count: How many.
        kind: gaussian or laplace.
        entropy: Source of bytes; eight for each number, as a little-endian word.

    >>> noise_steps(2, "gaussian", lambda n: bytes(8) + b"\xff" * 8).tolist()
    [-145, 160]
    """
    return rounded(np.frombuffer(entropy(_WORD * count), "<u8").astype(np.uint64), kind)


class DrawCache:
    """The last `size` rows sent, found by a keyed hash of the image.

    Each cache draws its own key, so that the table without the key does not tell which images were
    sent.

    Args:
        size: Rows to keep, ≥ 1.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ServerError(f"cache must be at least 1 draw, got {size}")
        self._size, self._key, self._lock = size, secrets.token_bytes(32), Lock()
        self._kept: OrderedDict[bytes, Rows] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def digest(self, image: Rows) -> bytes:
        """HMAC-SHA-256 of the image's bytes; +0 and −0 are one number."""
        return hmac.digest(self._key, (image + np.float32(0)).tobytes(), hashlib.sha256)

    def get(self, digest: bytes) -> Rows | None:
        """The draw already sent for this image, if it is still kept."""
        with self._lock:
            found = self._kept.get(digest)
            if found is not None:
                self._kept.move_to_end(digest)
            return found

    def keep(self, digest: bytes, drawn: Rows) -> Rows:
        """Keep a draw and return what to send: an earlier draw of another thread, or this one."""
        with self._lock:
            first = self._kept.setdefault(digest, drawn)
            self._kept.move_to_end(digest)
            while len(self._kept) > self._size:
                self._kept.popitem(last=False)
            return first
