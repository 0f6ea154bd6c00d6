"""Draws that were sent before: the same image gets the same bytes again.

Whoever sees k noisy copies of one image can average the noise away, by √k. A client that sends the
same bytes each time gives k copies of one draw, which tell no more than one.
"""

import hashlib
import hmac
import secrets
from collections import OrderedDict
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from splitveil.serve.faults import ServerError

Rows = NDArray[np.float32]


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
