"""The wire's random numbers: their law, and that nothing but the system's generator makes them."""

import math

import numpy as np

from splitveil.grid import STEPS
from splitveil.serve.noise import noise_steps, uniforms

N = 400_000


def test_uniforms_are_the_middles_of_cells_by_hand() -> None:
    words = [0, 1 << 11, 1 << 63, (1 << 64) - 1]
    content = b"".join(w.to_bytes(8, "little") for w in words)
    found = uniforms(4, lambda n: content)
    assert found.tolist() == [2.0**-54, 3 * 2.0**-54, 0.5 + 2.0**-54, 1 - 2.0**-53]


def test_steps_by_hand() -> None:
    words = [0, 1 << 63, (1 << 64) - 1]
    content = b"".join(w.to_bytes(8, "little") for w in words)
    assert noise_steps(3, "gaussian", lambda n: content).tolist() == [-145, 0, 160]


def test_steps_have_the_moments_and_tails_of_rounded_noise() -> None:
    x = noise_steps(N, "gaussian") / STEPS
    # Standard errors are √(Var/N); six of them fail once in 10⁹ runs.
    assert abs(x.mean()) < 6 / math.sqrt(N)
    assert abs((x**2).mean() - 1 - 1 / (12 * STEPS**2)) < 6 * math.sqrt(2 / N)
    assert abs((x**3).mean()) < 6 * math.sqrt(15 / N)
    assert abs((x**4).mean() - 3) < 6 * math.sqrt(96 / N) + 1e-3
    for steps, share in ((16, math.erfc(16.5 / 16 / math.sqrt(2))), (32, 0.0422)):
        got = (np.abs(x * STEPS) > steps).mean()
        assert abs(got - share) < 6 * math.sqrt(share * (1 - share) / N) + 1e-4


def test_steps_are_independent_of_each_other() -> None:
    x = noise_steps(N, "gaussian").astype(np.float64)
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
        drawn.append(noise_steps(64, "gaussian"))
    assert not np.array_equal(drawn[0], drawn[1])
