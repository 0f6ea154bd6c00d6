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
    # The middle of the top cell would round to 1, whose logarithm makes a normal of exactly 0.
    found: NDArray[np.float64] = np.minimum((words + 0.5) * 2.0**-53, 1 - 2.0**-53)
    return found


def normals(count: int, entropy: Entropy = os.urandom) -> NDArray[np.float64]:
    r"""Independent standard normals (count,) by Box and Muller.

    .. math:: \sqrt{-2 \ln u} \, (\cos 2πv, \sin 2πv)

    The largest possible magnitude is √(−2 ln 2⁻⁵⁴) = 8.65.

    >>> middle = (1 << 63).to_bytes(8, "little")  # u = v = 1/2
    >>> normals(1, lambda n: middle * 2).round(4).tolist()  # −√(2 ln 2)
    [-1.1774]
    """
    pairs = (count + 1) // 2
    u, v = uniforms(2 * pairs, entropy).reshape(2, pairs)
    radius, angle = np.sqrt(-2 * np.log(u)), 2 * np.pi * v
    both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return both[:count]


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
