"""Random numbers for the wire, and the draws that were sent before.

Noise comes from the operating system's cryptographic generator: nobody who sees a request can
predict or repeat it, there is no seed. `entropy` is an argument only so that the arithmetic can be
tested on known bytes; a client never sets it.

Whoever sees k noisy copies of one image can average the noise away, by √k. A client that sends the
same bytes each time gives k copies of one draw, which tell no more than one.
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
    # The topmost cell's middle would round to 1, where a logarithm below would give a zero normal.
    found: NDArray[np.float64] = np.minimum((words + 0.5) * 2.0**-53, 1 - 2.0**-53)
    return found


def normals(count: int, entropy: Entropy = os.urandom) -> NDArray[np.float64]:
    r"""Independent standard normals (count,) by Box and Muller.

    .. math:: \sqrt{-2 \ln u} \, (\cos 2πv, \sin 2πv)

    The largest magnitude that can come out is √(−2 ln 2⁻⁵⁴) = 8.65.

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

    The key is drawn for each cache and never leaves it, so what is kept says nothing about which
    images were sent to one who can read the table but not the key.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ServerError(f"the cache of draws must hold at least 1 row, got {size}")
        self._size, self._key, self._lock = size, secrets.token_bytes(32), Lock()
        self._kept: OrderedDict[bytes, Rows] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def digest(self, image: Rows) -> bytes:
        """HMAC-SHA-256 of the image's bytes; +0 and −0 are one number."""
        return hmac.digest(self._key, (image + np.float32(0)).tobytes(), hashlib.sha256)

    def get(self, digest: bytes) -> Rows | None:
        """The draw sent before for this image, if it is still kept."""
        with self._lock:
            found = self._kept.get(digest)
            if found is not None:
                self._kept.move_to_end(digest)
            return found

    def keep(self, digest: bytes, drawn: Rows) -> Rows:
        """Keep a draw, unless another thread was first: then that one is to be sent."""
        with self._lock:
            first = self._kept.setdefault(digest, drawn)
            self._kept.move_to_end(digest)
            while len(self._kept) > self._size:
                self._kept.popitem(last=False)
            return first
