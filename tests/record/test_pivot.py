"""Coverage by simulation; the closed form against the bootstrap that it stands for."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitveil.record.statistics import bend, limits, p_value, pivot, unbend

REPLICATIONS = 4000
IMAGES = 100
# Shares of the variance of the mean that come from seeds, images and their interaction.
REGIMES = {
    "seeds": (0.95, 0.04, 0.01),
    "images": (0.02, 0.95, 0.03),
    "mixed": (0.4, 0.5, 0.1),
    "interaction": (0.1, 0.1, 0.8),
}


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape)


def skewed(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Log-normal with mean 0 and variance 1; its skewness is 2.9."""
    sigma = 0.75
    raw = rng.lognormal(-(sigma**2) / 2, sigma, shape)
    return (raw - 1) / math.sqrt(math.expm1(sigma**2))


Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def tables(seed: int, seeds: int, shares: tuple[float, float, float], draw: Draw) -> np.ndarray:
    """Replications of a table (seeds, images) with mean 0, whose mean has variance 1."""
    rng = np.random.default_rng(seed)
    of_seeds, of_images, of_both = (math.sqrt(share) for share in shares)
    return (
        of_seeds * math.sqrt(seeds) * normal(rng, (REPLICATIONS, seeds, 1))
        + of_images * math.sqrt(IMAGES) * draw(rng, (REPLICATIONS, 1, IMAGES))
        + of_both * math.sqrt(seeds * IMAGES) * draw(rng, (REPLICATIONS, seeds, IMAGES))
    )


def table(seed: int, seeds: int = 3, images: int = 7) -> np.ndarray:
    rng = np.random.default_rng(seed)
    parts = [(seeds, 1), (1, images), (seeds, images)]
    return np.asarray(sum(rng.exponential(size=size) for size in parts))


@pytest.mark.parametrize("draw", [normal, skewed])
@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("regime", REGIMES)
def test_a_95_per_cent_interval_covers_in_93_to_97_per_cent(
    regime: str, seeds: int, draw: Draw
) -> None:
    low, high = limits(pivot(tables(1, seeds, REGIMES[regime], draw)), 0.95)
    assert 0.93 <= np.mean((low <= 0) & (high >= 0)) <= 0.97


@pytest.mark.parametrize("regime", ["images", "mixed", "interaction"])
def test_with_skewed_images_the_misses_fall_on_both_sides(regime: str) -> None:
    low, high = limits(pivot(tables(1, 3, REGIMES[regime], skewed)), 0.95)
    assert 0.015 <= np.mean(low > 0) <= 0.04
    assert 0.015 <= np.mean(high < 0) <= 0.04


@pytest.mark.parametrize(("regime", "at_most"), [("seeds", 0.4), ("mixed", 0.9)])
@pytest.mark.parametrize("seeds", [3, 5])
def test_a_bootstrap_over_images_alone_covers_far_less(
    regime: str, seeds: int, at_most: float
) -> None:
    per_image = tables(1, seeds, REGIMES[regime], normal).mean(1)  # (replications, images)
    rng = np.random.default_rng(2)
    counts = rng.multinomial(IMAGES, np.full(IMAGES, 1 / IMAGES), 500)
    low, high = np.quantile(counts @ per_image.T / IMAGES, [0.025, 0.975], axis=0)
    assert np.mean((low <= 0) & (high >= 0)) < at_most


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize(("others", "paired"), [(3, True), (3, False), (5, False)])
def test_equal_conditions_are_told_apart_in_3_to_7_per_cent(
    regime: str, others: int, paired: bool
) -> None:
    a, b = tables(1, 3, REGIMES[regime], skewed), tables(2, others, REGIMES[regime], skewed)
    low, high = limits(pivot(a - b) if paired else pivot(a, b), 0.95)
    assert 0.03 <= np.mean((low > 0) | (high < 0)) <= 0.07


@pytest.mark.parametrize(
    ("spread", "least", "most"),
    [(1.0, 0.2, 0.7), (3.0, 0.8, 1.3), (10.0, 2.0, 5.0)],  # alike, unlike, very unlike
)
def test_over_three_seeds_a_small_p_value_is_approximate(
    spread: float, least: float, most: float
) -> None:
    """How often p < 0.0014, which 36 comparisons ask for, beside how often it should be."""
    rng = np.random.default_rng(5)
    scales = np.array([1.0, spread])[:, None, None, None]
    a, b = np.broadcast_to(scales * rng.standard_normal((2, 200_000, 3, 1)), (2, 200_000, 3, 2))
    low, high = limits(pivot(a, b), 1 - 0.0014)  # equal columns: seeds alone
    assert least < np.mean((low > 0) | (high < 0)) / 0.0014 < most


def test_the_standard_error_is_the_bootstraps_without_its_bias() -> None:
    y = table(3, seeds=4, images=9)
    rng = np.random.default_rng(4)
    draws, (s, n) = 40_000, y.shape
    rows = rng.multinomial(s, np.full(s, 1 / s), draws) / s
    columns = rng.multinomial(n, np.full(n, 1 / n), draws) / n
    of_seeds = np.var(rows @ y.mean(1))
    of_images = np.var(columns @ y.mean(0))
    of_both = np.var(np.einsum("ds,si,di->d", rows, y, columns)) - of_seeds - of_images
    expected = of_seeds * s / (s - 1) + of_images * n / (n - 1)
    expected -= of_both * s * n / ((s - 1) * (n - 1))
    assert pivot(y[None]).se.item() ** 2 == pytest.approx(expected, rel=0.05)


@given(t=st.floats(-30, 30), skewness=st.floats(-1, 1))
def test_unbend_undoes_bend(t: float, skewness: float) -> None:
    back = unbend(bend(np.array([t]), np.array([skewness])), np.array([skewness]))
    assert back.item() == pytest.approx(t, rel=1e-4, abs=1e-4)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**31), seeds=st.integers(1, 4), others=st.integers(1, 4))
def test_at_the_level_of_the_p_value_the_interval_touches_zero(
    seed: int, seeds: int, others: int
) -> None:
    given_pivot = pivot(table(seed, seeds)[None], table(seed + 1, others)[None])
    p = p_value(given_pivot).item()
    low, high = limits(given_pivot, 1 - p)
    assert min(abs(low.item()), abs(high.item())) == pytest.approx(0, abs=1e-6)
    low, high = limits(given_pivot, 1 - 0.99 * p)
    assert low.item() < 0 < high.item()
