"""The wire's random numbers: their law, and that nothing but the system's generator makes them."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitveil.serve.noise import normals, uniforms

N = 400_000


def test_uniforms_are_the_middles_of_cells_by_hand() -> None:
    words = [0, 1 << 11, 1 << 63, (1 << 64) - 1]
    content = b"".join(w.to_bytes(8, "little") for w in words)
    found = uniforms(4, lambda n: content)
    assert found.tolist() == [2.0**-54, 3 * 2.0**-54, 0.5 + 2.0**-54, 1 - 2.0**-53]


def test_normals_by_hand() -> None:
    u, v = (1 << 62), (1 << 61)  # a quarter and an eighth
    content = b"".join(w.to_bytes(8, "little") for w in (u, v))
    radius = math.sqrt(-2 * math.log(0.25))
    expected = [radius * math.cos(math.pi / 4), radius * math.sin(math.pi / 4)]
    assert normals(2, lambda n: content) == pytest.approx(expected, abs=1e-12)


@given(st.integers(0, 9), st.sampled_from([b"\x00", b"\xff", b"\x80"]))
def test_no_byte_pattern_gives_an_infinite_normal(n: int, byte: bytes) -> None:
    found = normals(n, lambda size: byte * size)
    assert found.shape == (n,)
    assert np.isfinite(found).all()
    assert np.abs(found).max(initial=0) <= math.sqrt(2 * 54 * math.log(2))


def test_normals_have_the_moments_and_tails_of_a_standard_normal() -> None:
    x = normals(N)
    # Standard errors are √(Var/N); six of them fail once in 10⁹ runs.
    assert abs(x.mean()) < 6 / math.sqrt(N)
    assert abs((x**2).mean() - 1) < 6 * math.sqrt(2 / N)
    assert abs((x**3).mean()) < 6 * math.sqrt(15 / N)
    assert abs((x**4).mean() - 3) < 6 * math.sqrt(96 / N)
    for bound, share in ((1, 0.3173105), (2, 0.0455003), (3, 0.0026998)):
        got = (np.abs(x) > bound).mean()
        assert abs(got - share) < 6 * math.sqrt(share * (1 - share) / N)


def test_normals_are_independent_of_each_other() -> None:
    x = normals(N)
    half = N // 2
    pairs = [(x[:-1], x[1:]), (x[:-2], x[2:]), (x[:half], x[half:]), (x[:half] ** 2, x[half:] ** 2)]
    for a, b in pairs:
        assert abs(np.corrcoef(a, b)[0, 1]) < 6 / math.sqrt(len(a))


def test_draws_do_not_follow_numpys_or_pythons_seeds() -> None:
    import random

    drawn = []
    for _ in range(2):
        np.random.seed(0)
        random.seed(0)
        drawn.append(normals(8))
    assert not np.array_equal(drawn[0], drawn[1])
