"""Bounds for listed images against exact information, hand-made numbers and invariants."""

import math

import pytest
import torch
from audits.made import gallery_rate
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from splitveil.audits.bounds import Covariance, capacity, gallery_spectrum
from splitveil.errors import AuditError

HALF_LOG_2 = 0.5 * math.log(2)
KINDS: list[Covariance] = ["diagonal", "full"]


def points(n: int, d: int, seed: int) -> Tensor:
    return torch.randn(n, d, dtype=torch.float64, generator=Generator().manual_seed(seed))


def information(z: Tensor, std: float, seed: int = 0, draws: int = 4000) -> tuple[float, float]:
    """I(x; z + σn) for x uniform over the rows, by Monte Carlo; and its standard error."""
    generator = Generator().manual_seed(seed)
    noise = torch.randn(draws, *z.shape, dtype=z.dtype, generator=generator)
    sent = z + std * noise  # (draws, n, d)
    gap = (sent[:, :, None] - z).square().sum(-1)  # (draws, n, n)
    own = gap.diagonal(dim1=1, dim2=2)
    log_ratio = math.log(len(z)) - torch.logsumexp((own[..., None] - gap) / (2 * std**2), -1)
    found = log_ratio.mean(1)
    return float(found.mean()), float(found.std()) / math.sqrt(draws)


def test_two_images_one_sigma_from_their_mean_give_half_log_two() -> None:
    z = torch.tensor([[-1.0], [1.0]])
    assert gallery_rate(z, 1.0) == pytest.approx(HALF_LOG_2)
    assert gallery_rate(2 * z, 4.0) == pytest.approx(HALF_LOG_2)
    assert gallery_rate(z, 1.0, repeats=3) == pytest.approx(math.log(2))


def test_full_covariance_counts_a_repeated_direction_once() -> None:
    z = torch.tensor([[-1.0, -1.0], [1.0, 1.0]])
    assert gallery_rate(z, 1.0) == pytest.approx(math.log(2))
    assert gallery_rate(z, 1.0, covariance="full") == pytest.approx(0.5 * math.log(3))


def test_noise_of_each_dimension_is_its_own() -> None:
    z = torch.tensor([[-1.0, -1.0], [1.0, 1.0]])
    found = gallery_rate(z, torch.tensor([1.0, 1 / 3]))  # ratios 1 and 3
    assert found == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(4))


def test_classes_are_weighed_by_their_images() -> None:
    z = torch.tensor([[-1.0], [1.0], [5.0], [9.0], [7.0], [7.0]])
    y = torch.tensor([3, 3, 0, 0, 0, 0])
    spectrum = gallery_spectrum(z, 1.0, y)
    assert spectrum.count.tolist() == [4, 2]
    assert spectrum.rates().tolist() == pytest.approx([0.5 * math.log(3), HALF_LOG_2])
    assert spectrum.rate() == pytest.approx((4 * 0.5 * math.log(3) + 2 * HALF_LOG_2) / 6)
    assert spectrum.label_entropy == pytest.approx(math.log(3) - 2 / 3 * math.log(2))


def test_one_image_tells_nothing() -> None:
    assert gallery_rate(torch.tensor([[3.0, 4.0]]), 0.1, covariance="full") == 0.0


@pytest.mark.parametrize("covariance", KINDS)
@pytest.mark.parametrize("std", [0.3, 1.0, 3.0])
@pytest.mark.parametrize(("n", "d"), [(2, 1), (5, 2), (8, 3)])
def test_the_true_information_of_a_small_gallery_stays_below(
    n: int, d: int, std: float, covariance: Covariance
) -> None:
    z = points(n, d, seed=n)
    true, error = information(z, std)
    assert true - 3 * error <= gallery_rate(z, std**2, covariance=covariance)


def test_under_strong_noise_the_bound_is_the_information() -> None:
    z = points(6, 2, seed=3)
    true, error = information(z, 8.0, draws=40000)
    bound = gallery_rate(z, 64.0, covariance="full")
    assert bound == pytest.approx(true, abs=4 * error)
    assert bound > 8 * error  # so that the line above can fail


def test_given_the_class_the_true_information_stays_below() -> None:
    z, y = points(9, 2, seed=4), torch.arange(9) % 3
    parts = [information(z[y == c], 0.7) for c in range(3)]
    true, error = (sum(p[i] for p in parts) / 3 for i in range(2))
    bound = gallery_rate(z, 0.49, y, "full")
    assert true - 3 * error <= bound
    whole, off = information(z, 0.7)
    assert whole - 3 * off <= bound + gallery_spectrum(z, 0.49, y).label_entropy


@pytest.mark.parametrize(("n", "d"), [(4, 9), (9, 4)])
def test_the_full_rate_is_the_log_determinant(n: int, d: int) -> None:
    z, noise = points(n, d, seed=5), torch.rand(d, dtype=torch.float64) + 0.1
    cov = torch.cov(z.T, correction=0)
    direct = 0.5 * torch.logdet(torch.eye(d, dtype=torch.float64) + cov / noise[:, None])
    assert gallery_rate(z, noise, covariance="full") == pytest.approx(float(direct))


shapes = given(n=st.integers(1, 8), d=st.integers(1, 6), seed=st.integers(0, 2**31))


@settings(deadline=None, max_examples=40)
@shapes
def test_rates_are_ordered_and_blind_to_the_order_of_images(n: int, d: int, seed: int) -> None:
    z, y = points(n, d, seed), torch.arange(n) % 3
    order = torch.randperm(n, generator=Generator().manual_seed(seed))
    for labels in (None, y):
        diagonal, full = (gallery_rate(z, 0.1, labels, kind) for kind in KINDS)
        assert -1e-12 <= full <= diagonal + 1e-9
        mixed = None if labels is None else labels[order]
        assert gallery_rate(z[order], 0.1, mixed, "full") == pytest.approx(full, abs=1e-9)
    conditional = gallery_spectrum(z, 0.1, y, "full")
    assert conditional.rate() <= gallery_rate(z, 0.1, covariance="full") + 1e-9


@settings(deadline=None, max_examples=40)
@shapes
def test_more_sendings_tell_more_and_more_noise_less(n: int, d: int, seed: int) -> None:
    z = points(n, d, seed)
    for kind in KINDS:
        rates = [gallery_rate(z, 0.1, covariance=kind, repeats=k) for k in (1, 2, 5)]
        assert rates == sorted(rates)
        assert rates[2] <= 5 * rates[0] + 1e-9
        assert gallery_rate(z, 0.02, covariance=kind) == pytest.approx(rates[2])
        assert gallery_rate(z, 0.3, covariance=kind) <= rates[0]
        assert gallery_rate(3 * z + 1, 0.9, covariance=kind) == pytest.approx(rates[0], abs=1e-9)


def test_only_the_corners_of_the_box_reach_the_capacity() -> None:
    noise = torch.tensor([0.5, 2.0], dtype=torch.float64)
    corners = torch.tensor([[0.0, 3.0], [3.0, 0.0], [0.0, 0.0], [3.0, 3.0]])
    most = capacity(noise, 0.0, 3.0, 2)
    assert most == pytest.approx(0.5 * (math.log(1 + 2.25 / 0.5) + math.log(1 + 2.25 / 2)))
    assert gallery_rate(corners, noise, covariance="full") == pytest.approx(most)
    inside = 3 * torch.rand(50, 2, generator=Generator().manual_seed(0))
    assert gallery_rate(inside, noise) < most


@pytest.mark.parametrize(
    ("noise_var", "reason"),
    [
        (0.0, "the channel is deterministic"),
        (torch.tensor([1.0, 0.0]), "the channel is deterministic"),
        (None, "noise of unknown scale"),
        (-1.0, "finite and > 0"),
        (math.nan, "finite and > 0"),
        (math.inf, "finite and > 0"),
    ],
)
def test_noise_that_is_none_is_refused(noise_var: float | Tensor | None, reason: str) -> None:
    with pytest.raises(AuditError, match=f"no certificate: .*{reason}"):
        gallery_rate(torch.zeros(3, 2), noise_var)
    with pytest.raises(AuditError, match=f"no certificate: .*{reason}"):
        capacity(noise_var, 0.0, 1.0, 2)


@pytest.mark.parametrize("bad", [torch.full((3, 2), math.nan), torch.zeros(0, 2)])
def test_smashed_data_that_is_not_there_is_refused(bad: Tensor) -> None:
    with pytest.raises(AuditError, match="z must be finite and of at least one image"):
        gallery_rate(bad, 1.0)


@pytest.mark.parametrize(("low", "high"), [(1.0, 0.0), (0.0, math.inf), (math.nan, 1.0)])
def test_a_box_that_is_none_is_refused(low: float, high: float) -> None:
    with pytest.raises(AuditError, match=r"z is not bounded, .* add a clip stage"):
        capacity(1.0, low, high, 2)


def test_less_than_one_sending_is_refused() -> None:
    with pytest.raises(AuditError, match="repeats must be at least 1, got 0"):
        gallery_rate(torch.zeros(3, 2), 1.0, repeats=0)
