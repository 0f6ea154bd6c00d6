"""Errors of identification: bounds against the best matcher there is, and repeated sendings."""

import math

import pytest
import torch
from audits.made import gallery_rate
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom
from torch import Generator, Tensor

from splitveil.audits.bounds import (
    beaten,
    gallery_spectrum,
    identification_error,
    matcher_errors,
    pair_error,
    pairwise_error,
    repeats_until_double,
    same_class_error,
)
from splitveil.errors import AuditError

F64 = torch.float64


def points(n: int, d: int, seed: int) -> Tensor:
    return torch.randn(n, d, dtype=F64, generator=Generator().manual_seed(seed))


def matcher_error(z: Tensor, std: float, repeats: int = 1, draws: int = 200) -> float:
    """How often the nearest listed image is not the right one: optimal for a uniform gallery."""
    generator = Generator().manual_seed(7)
    noise = torch.randn(repeats, draws, *z.shape, dtype=F64, generator=generator).mean(0)
    nearest = torch.cdist(z + std * noise, z).argmin(-1)  # (draws, n)
    return float((nearest != torch.arange(len(z))).double().mean())


def test_fano_by_hand() -> None:
    assert identification_error(0.0, 8) == pytest.approx(2 / 3)
    assert identification_error(math.log(2), 256) == pytest.approx(3 / 4)


@pytest.mark.parametrize("std", [1.0, 1.5, 3.0])
@pytest.mark.parametrize("repeats", [1, 2])
def test_the_best_matcher_errs_at_least_as_often_as_fano_says(std: float, repeats: int) -> None:
    z = points(64, 3, seed=0)
    rate = gallery_rate(z, std**2, covariance="full", repeats=repeats)
    bound = identification_error(rate, 64)
    assert 0 < bound <= matcher_error(z, std, repeats)


def test_the_best_matcher_within_a_class_obeys_fano() -> None:
    z, y = points(80, 2, seed=1), torch.cat([torch.zeros(60), torch.ones(20)]).long()
    z = z + 20 * y[:, None]
    spectrum = gallery_spectrum(z, 2.25, y, "full")
    errors = [matcher_error(z[y == c], 1.5) for c in range(2)]
    assert 0 < same_class_error(spectrum) <= 0.75 * errors[0] + 0.25 * errors[1]


def test_the_same_class_bound_by_hand() -> None:
    z, y = torch.zeros(12, 1), torch.tensor([0] * 8 + [1] * 3 + [2])
    found = same_class_error(gallery_spectrum(z, 1.0, y))  # three shares: 8, 3 and 1 image
    assert found == pytest.approx((8 * 2 / 3 + 3 * (1 - math.log(2) / math.log(3))) / 12)


@pytest.mark.parametrize(("rate", "n"), [(0.0, 2), (math.log(5), 10), (100.0, 10**6)])
def test_a_bound_that_says_nothing_is_refused_as_vacuous(rate: float, n: int) -> None:
    with pytest.raises(AuditError, match=r"^vacuous: "):
        identification_error(rate, n)


def test_no_class_with_enough_images_is_vacuous_too() -> None:
    with pytest.raises(AuditError, match=r"^vacuous: "):
        same_class_error(gallery_spectrum(100 * points(6, 2, 0), 1.0, torch.arange(6) % 2))


@pytest.mark.parametrize(("rate", "n"), [(-0.1, 9), (math.nan, 9), (0.1, 1), (0.1, 0)])
def test_rates_and_galleries_that_are_none_are_refused(rate: float, n: int) -> None:
    with pytest.raises(AuditError, match="at least"):
        identification_error(rate, n)


@pytest.mark.parametrize("repeats", [1, 4])
def test_the_pairwise_error_is_that_of_the_likelihood_ratio_test(repeats: int) -> None:
    std = torch.tensor([0.5, 2.0], dtype=F64)
    one, other = torch.tensor([0.0, 0.0], dtype=F64), torch.tensor([0.4, 2.0], dtype=F64)
    generator = Generator().manual_seed(0)
    noise = torch.randn(40000, repeats, 2, dtype=F64, generator=generator)
    sent = one + std * noise
    gaps = [((sent - z) / std).square().sum((1, 2)) for z in (one, other)]
    measured = float((gaps[1] < gaps[0]).double().mean())
    found = pairwise_error(torch.stack([one, other]), std.square(), repeats)
    assert found.least == found.median == found.most
    assert found.least == pytest.approx(measured, abs=4 * math.sqrt(measured / 40000))


def test_equal_images_are_a_coin() -> None:
    found = pairwise_error(torch.ones(3, 2), 0.01)
    assert (found.least, found.median, found.most) == (0.5, 0.5, 0.5)


def test_a_large_gallery_is_thinned_for_the_median_alone() -> None:
    z = torch.arange(10.0)[:, None]
    found = pairwise_error(z, 1.0, limit=5)  # the median of 0, 2, 4, 6, 8
    assert found.images == 10
    assert found.most == pytest.approx(float(pair_error(torch.tensor(1.0))))
    assert found.median == pytest.approx(float(pair_error(torch.tensor(4.0))))
    assert found.least == pytest.approx(float(pair_error(torch.tensor(9.0))))


def test_an_outlier_of_a_large_gallery_is_the_easiest_pair() -> None:
    z = torch.zeros(2500, 1)
    z[1] = 100.0
    assert pairwise_error(z, 1.0).least == pytest.approx(0.0, abs=1e-12)


def test_one_image_has_no_pair() -> None:
    with pytest.raises(AuditError, match="a pair needs 2 images, got 1"):
        pairwise_error(torch.ones(1, 2), 0.01)


@settings(deadline=None, max_examples=40)
@given(n=st.integers(2, 7), seed=st.integers(0, 2**31), repeats=st.integers(1, 9))
def test_pairs_are_ordered_and_repeats_are_less_noise(n: int, seed: int, repeats: int) -> None:
    z = points(n, 3, seed)
    found, again = pairwise_error(z, 1.0, repeats), pairwise_error(z, 1.0 / repeats)
    assert 0 <= found.least <= found.median <= found.most <= 0.5
    assert found.median == pytest.approx(again.median)
    assert found.median <= pairwise_error(z, 1.0).median


@pytest.mark.parametrize("repeats", [1, 4])
def test_the_matcher_errs_as_often_as_the_nearest_of_all(repeats: int) -> None:
    z = points(1500, 4, seed=2)  # more than a chunk
    made = matcher_errors(z, 0.25, Generator().manual_seed(0), repeats) / 1500
    assert made == pytest.approx(matcher_error(z, 0.5, repeats, draws=2), abs=0.05)
    assert 0.3 < made < 1


def test_the_matcher_knows_the_noise_of_each_dimension() -> None:
    z = torch.cat([torch.arange(20.0)[:, None], 100 * points(20, 1, 0)], 1)
    noise = torch.tensor([1e-4, 1e8])  # the second number says nothing
    assert matcher_errors(z, noise, Generator().manual_seed(0)) == 0
    assert matcher_errors(z, 1e8, Generator().manual_seed(0)) > 10


def test_a_certificate_is_beaten_by_too_few_errors_only() -> None:
    assert beaten(0, 100, 0.1)  # 0.9^100
    assert beaten(3, 100, 0.1)  # 0.0078
    assert not beaten(5, 100, 0.1)  # 0.0576
    assert not beaten(100, 100, 0.1)
    assert not beaten(0, 100, 0.0)


@settings(deadline=None, max_examples=40)
@given(n=st.integers(2, 300), share=st.floats(0.01, 0.99), errors=st.integers(0, 300))
def test_the_chance_is_the_binomials(n: int, share: float, errors: int) -> None:
    found = beaten(min(errors, n), n, share)
    chance = binom.cdf(min(errors, n), n, share)
    if abs(chance - 0.05) > 1e-9:
        assert found == (chance < 0.05 and errors < share * n - 1)


@pytest.mark.parametrize(("ratio", "repeats"), [(1.0, 3), (2.0, 4), (0.5, 3), (98.0, 100)])
def test_one_dimension_doubles_at_two_more_sendings_than_its_ratio(
    ratio: float, repeats: int
) -> None:
    # (1 + s)² = 1 + ks at k = 2 + s; rounded up
    spectrum = gallery_spectrum(math.sqrt(ratio) * torch.tensor([[-1.0], [1.0]], dtype=F64), 1.0)
    assert repeats_until_double(spectrum.rate) == repeats


def test_doubling_beyond_the_limit_is_never() -> None:
    spectrum = gallery_spectrum(torch.tensor([[-40.0], [40.0]], dtype=F64), 1.0)  # k = 1602
    assert repeats_until_double(spectrum.rate, limit=1601) is None
    assert repeats_until_double(spectrum.rate, limit=1602) == 1602


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**31), limit=st.integers(1, 60))
def test_halving_finds_what_trying_every_number_finds(seed: int, limit: int) -> None:
    spectrum = gallery_spectrum(points(5, 2, seed), 0.1)
    found = repeats_until_double(spectrum.rate, limit)
    tried = [k for k in range(1, limit + 1) if spectrum.rate(k) >= 2 * spectrum.rate(1)]
    assert found == (tried[0] if tried else None)


def test_nothing_cannot_be_doubled() -> None:
    with pytest.raises(AuditError, match="the rate of one sending is 0"):
        repeats_until_double(gallery_spectrum(torch.ones(2, 1), 1.0).rate)
