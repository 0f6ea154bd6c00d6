"""A split classifier in NumPy, to be audited as it is: nothing here comes from SplitVeil.

Run it with `python foreign_encoder.py` to write its images to `digits.npz`; then, in its folder,

    splitveil audit-encoder foreign_encoder:send --data npz:digits.npz
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

Array = NDArray[np.floating]
NOISE = 0.05
TRAINED_ON = 1400


def data() -> tuple[Array, NDArray[np.integer]]:
    """All digits (n, 1, 8, 8) with ink from 0 to 1, and their classes (n,)."""
    digits = load_digits()
    return digits.images[:, None] / 16, digits.target


def encode(x: Array) -> Array:
    """Ink of each of the 16 squares of 2×2 pixels: (n, 1, 8, 8) → (n, 16)."""
    squares: Array = x.reshape(len(x), 4, 2, 4, 2).mean(axis=(2, 4))
    return squares.reshape(len(x), 16)


def send(x: Array) -> Array:
    """What leaves the client: the features and fresh noise."""
    z = encode(x)
    return z + NOISE * np.random.standard_normal(z.shape)


def answer(z: Array) -> Array:
    """The server: scores (n, 10) of the classes."""
    return with_squares(z) @ weights()


@cache
def weights() -> Array:
    """The server's classifier (153, 10), fitted by least squares."""
    x, y = data()
    z = with_squares(encode(x[:TRAINED_ON]))
    penalty = 1e-3 * len(z) * np.eye(z.shape[1])
    fitted: Array = np.linalg.solve(z.T @ z + penalty, z.T @ np.eye(10)[y[:TRAINED_ON]])
    return fitted


def with_squares(z: Array) -> Array:
    """A constant, the features, and their products in pairs: (n, 16) → (n, 153)."""
    z = np.concatenate([np.ones((len(z), 1)), z], axis=1)
    rows, columns = np.triu_indices(z.shape[1])
    return z[:, rows] * z[:, columns]


def main(path: str = "digits.npz") -> None:
    """Write the images that the classifier was trained on, and those it never saw."""
    x, y = data()
    np.savez(
        path,
        x_train=x[:TRAINED_ON],
        y_train=y[:TRAINED_ON],
        x_test=x[TRAINED_ON:],
        y_test=y[TRAINED_ON:],
    )


if __name__ == "__main__":
    main()
