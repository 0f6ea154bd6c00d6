"""The digits that ship with scikit-learn: 1797 grey images of 8×8, no download."""

import numpy as np

from splitveil.data.dataset import Dataset
from splitveil.data.parts import one_part
from splitveil.data.source import Request

INK_LEVELS = 16


def read(request: Request) -> Dataset:
    """The digits as bytes (1797, 1, 8, 8): ink v in 0..16 becomes round(v · 255 / 16)."""
    del request
    from sklearn.datasets import load_digits

    found = load_digits()
    images = np.rint(found.images[:, None] * (255 / INK_LEVELS)).astype(np.uint8)
    return one_part("digits", (images, found.target), tuple(str(c) for c in found.target_names))
