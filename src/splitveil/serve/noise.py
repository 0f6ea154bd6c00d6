"""Random numbers for the wire.

Noise comes from the operating system's cryptographic generator. It has no seed, so nobody who sees
a request can predict or repeat it. A client takes its bytes from a `DrawStore`, whose seeds come
from there, so that an image is sent with the same draw again.
"""

import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

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
