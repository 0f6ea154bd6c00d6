"""Noise on a grid: its tables are what they say, and rounding it is rounding exact noise."""

import math

import mpmath as mp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from splitveil.grid import REACH, STEPS, cell_ends, nearest, rounded, step_of
from splitveil.rng import rounded_like

HALF = {"gaussian": 160, "laplace": 640}


def share_below(kind: str, x: mp.mpf) -> mp.mpf:
    if kind == "gaussian":
        return mp.erfc(-x / mp.sqrt(2)) / 2
    return mp.exp(x) / 2 if x < 0 else 1 - mp.exp(-x) / 2


@pytest.mark.parametrize("kind", HALF)
def test_every_constant_is_the_law_to_sixty_digits(kind: str) -> None:
    m = HALF[kind]
    with mp.workdps(60):
        found = [
            int(mp.floor(2**64 * share_below(kind, (mp.mpf(j - m) + mp.mpf(1) / 2) / STEPS)))
            for j in range(2 * m)
        ]
    assert cell_ends(kind).tolist() == found
    assert found == sorted(found)


@pytest.mark.parametrize(("kind", "most"), [("gaussian", 1.8e-17), ("laplace", 4e-17)])
def test_the_samplers_law_is_rounded_noise_up_to_its_stated_total_variation(
    kind: str, most: float
) -> None:
    m = HALF[kind]
    with mp.workdps(60):
        ends = [mp.mpf(0), *(mp.mpf(int(t)) / 2**64 for t in cell_ends(kind)), mp.mpf(1)]
        half = mp.mpf(1) / 2
        apart = 2 * share_below(kind, (mp.mpf(-m) - half) / STEPS)  # what the table never gives
        for j in range(2 * m + 1):
            low, high = ((mp.mpf(j - m) + side * half) / STEPS for side in (-1, 1))
            exact = share_below(kind, high) - share_below(kind, low)
            apart += abs(ends[j + 1] - ends[j] - exact)
        assert float(apart / 2) <= most


def test_words_become_integers_by_hand() -> None:
    ends = cell_ends("gaussian")
    words = [0, int(ends[159]) - 1, int(ends[159]), int(ends[160]) - 1, int(ends[160]), 2**64 - 1]
    found = rounded(np.array(words, np.uint64), "gaussian")
    assert found.tolist() == [-int((ends > 0).sum() - 160), -1, 0, 0, 1, 160]


@pytest.mark.parametrize(("kind", "variance"), [("gaussian", 1.0), ("laplace", 2.0)])
def test_drawn_noise_has_the_moments_of_rounded_noise(kind: str, variance: float) -> None:
    words = np.random.default_rng(0).integers(0, 2**64, 400_000, np.uint64)
    e = rounded(words, kind) / STEPS
    assert abs(e.mean()) < 5 * math.sqrt(variance / len(e))
    # The rounding adds h²/12, that is σ²/3072 for a Gaussian.
    assert e.var() == pytest.approx(variance + 1 / (12 * STEPS**2), rel=0.02)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e3), st.integers(0, 2**64 - 1))
def test_rounding_then_noise_is_noise_then_rounding(z: float, scale: float, word: int) -> None:
    """Q + rint(G) = rint(q + G): what is sent is a function of h·q + exact noise."""
    (q,) = nearest(np.array([z]), step_of(scale))
    (k,) = rounded(np.array([word], np.uint64), "gaussian")
    for inside in (-0.49, 0.0, 0.49):  # any exact noise that is rounded to k
        assert round(int(q) + (int(k) + inside)) == q + k
    assert abs(q) <= REACH


@pytest.mark.parametrize("kind", HALF)
def test_torch_looks_up_what_numpy_searches_at_the_end_of_every_cell(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = cell_ends(kind)
    drawn = np.random.default_rng(0).integers(0, 2**64, 10_000, np.uint64)
    buckets = np.arange(1 << 16, dtype=np.uint64) << np.uint64(48)
    words = np.concatenate([ends, ends - 1, ends + 1, drawn, buckets, buckets - 1])
    halves = np.stack([words >> np.uint64(32), words & np.uint64(2**32 - 1)]).astype(np.int64)
    monkeypatch.setattr(torch, "randint", lambda *_, **__: torch.from_numpy(halves))
    found = rounded_like(torch.empty(len(words)), kind, torch.Generator())
    assert np.array_equal(found.numpy(), rounded(words, kind))


def test_steps_are_exact_sixteenths_and_halves_go_to_even() -> None:
    assert [float(step_of(s)) * 16 for s in (0.5, 0.1)] == [0.5, float(np.float32(0.1))]
    z = np.array([0.5, 1.5, -0.5, 2.4])
    assert nearest(z, step_of(16.0)).tolist() == [0, 2, 0, 2]
