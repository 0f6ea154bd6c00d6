from math import floor

import numpy as np
from sklearn.datasets import load_digits

from splitveil.data.catalogue import load


def test_counts_are_known() -> None:
    data = load("digits")
    assert data.images.shape == (1797, 1, 8, 8)
    assert (len(data.pool), len(data.test)) == (1438, 359)
    assert data.classes == tuple("0123456789")
    assert data.labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    share = data.labels.bincount() * 0.2
    assert (data.labels[data.test].bincount() - share).abs().max() <= 1
    assert (data.flip, data.crop_pad, data.ordered_test90) == (False, 0, False)


def test_ink_becomes_bytes_without_loss() -> None:
    data, ink = load("digits"), load_digits().images
    back = np.rint(data.images[:, 0].numpy() * (16 / 255))
    assert np.array_equal(back, ink)
    assert sorted(set(data.images.flatten().tolist())) == [
        floor(v * 255 / 16 + 0.5) for v in range(17)
    ]


def test_the_parts_never_change() -> None:
    first, again = load("digits"), load("digits")
    assert first.test.tolist() == again.test.tolist()
    assert first.test[:5].tolist() == [8, 17, 23, 25, 28]
