"""Random numbers for the wire.

Noise comes from the operating system's cryptographic generator. It has no seed, so nobody who sees
a request can predict or repeat it. A client takes its bytes from a `DrawStore`, whose seeds come
from there, so that an image is sent with the same draw again.
"""

import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

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
