"""Tests of the noise on a wire: exact where they say so, and blind to nothing they name."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Generator, Tensor

from splitveil.audits.noise_tests import (
    ALPHA,
    closest,
    follows,
    gaussian_tests,
    louder,
    offset,
    quieter,
    shape,
    simulated_tests,
    slope,
    std_limits,
)
from splitveil.errors import AuditError
from splitveil.io import Json

N, D, STD = 120, 24, 0.05


def normals(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(*sizes, generator=Generator().manual_seed(seed), dtype=torch.float64)


def smashed(seed: int = 0) -> Tensor:
    return torch.rand(N, D, generator=Generator().manual_seed(100 + seed), dtype=torch.float64)


def heard(noise: Tensor, *, again: Tensor | None = None, seed: int = 0) -> Json:
    """What is said of z and this noise, in float32 as on a wire."""
    z = smashed(seed)
    other = None if again is None else (z[: len(again)] + again).float()
    return gaussian_tests((z + noise).float(), z.float(), STD, torch.arange(N), other)


def test_the_size_of_four_residuals_is_judged_by_chi_square() -> None:
    e = torch.tensor([[1.0, -1.0], [2.0, 0.0]], dtype=torch.float64)  # Σe² = 6, four numbers
    assert quieter(e).seen == pytest.approx(math.sqrt(1.5))
    assert quieter(e).p == pytest.approx(1 - 4 * math.exp(-3))  # P(χ²₄ ≤ x) = 1 − (1 + x/2)e^(−x/2)
    assert louder(e).p == pytest.approx(4 * math.exp(-3))


def test_offset_and_slope_are_standard_normals_by_hand() -> None:
    e = torch.tensor([[1.0, 1.0], [2.0, 0.0]], dtype=torch.float64)
    assert offset(e).seen == 1.0
    assert offset(e).p == pytest.approx(2 * stats.norm.sf(2.0))  # mean 1 times √4
    z = torch.tensor([[0.0, 0.0], [2.0, 2.0]], dtype=torch.float64)  # z − z̄ = −1, −1, 1, 1
    assert slope(e, z).seen == 0.0  # −1 − 1 + 2 + 0
    assert slope(z - 1, z).p == pytest.approx(2 * stats.norm.sf(2.0))  # 4/√4
    assert slope(e, torch.ones(2, 2, dtype=torch.float64)).p == 1.0


def test_pairs_of_residuals_correlate_by_hand() -> None:
    one = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    assert follows(one, one).p == pytest.approx(2 * stats.norm.sf(5.0))  # 25/5
    assert follows(one, torch.tensor([[4.0, -3.0]], dtype=torch.float64)).p == 1.0
    assert follows(torch.zeros(1, 2, dtype=torch.float64), one).p == 1.0


def test_the_shape_agrees_with_scipys_kolmogorov_smirnov() -> None:
    e = normals(50, 40)
    scaled = (e / e.square().mean().sqrt()).flatten().numpy()
    said = stats.ks_1samp(scaled, stats.norm.cdf, method="asymp")
    assert shape(e).seen == pytest.approx(said.statistic)
    assert shape(e).p == pytest.approx(said.pvalue, rel=1e-6)


@pytest.mark.parametrize("rows", [7, 600])
def test_the_closest_pair_is_found_wherever_it_stands(rows: int) -> None:
    e = normals(rows, 5)
    pairs = [(i, j) for i in range(rows) for j in range(i)] if rows < 10 else [(3, 599)]
    for i, j in pairs:
        near = e.clone()
        near[i] = near[j] + 1e-4
        found = closest(near)
        assert found.seen == pytest.approx(1e-4)
        assert found.p < 1e-12
    assert closest(e).p > ALPHA
    distances = (e[:, None] - e[None]).square().sum(2).add(torch.eye(rows) * 1e9).sqrt()
    assert closest(e).seen == pytest.approx(float(distances.min()) / math.sqrt(5))


def test_a_draw_shared_by_late_images_is_found() -> None:
    clean, e = normals(3000, 8, seed=3).float(), normals(3000, 8, seed=4).float()
    ids = torch.arange(3000)
    assert gaussian_tests(clean + 0.05 * e, clean, 0.05, ids)["failed"] == []
    e[2900] = e[2500]
    assert gaussian_tests(clean + 0.05 * e, clean, 0.05, ids)["failed"] == ["repeats"]


def test_limits_of_the_deviation_are_those_of_chi_square() -> None:
    low, high = std_limits(1000, 1e-3)
    assert 1000 * low**2 == pytest.approx(stats.chi2.ppf(5e-4, 1000))
    assert 1000 * high**2 == pytest.approx(stats.chi2.ppf(1 - 5e-4, 1000))


def test_sound_noise_raises_nothing_and_its_p_values_are_uniform() -> None:
    found = [heard(STD * normals(N, D, seed=s), seed=s)["tests"] for s in range(150)]
    assert not [1 for tests in found for t in tests.values() if t["p"] < ALPHA / len(found) / 8]
    for name in ("quieter", "offset", "slope", "next image", "next number"):
        said = stats.kstest([tests[name]["p"] for tests in found], "uniform")
        assert said.pvalue > 1e-4, name


def ar(rho: float, noise: Tensor, dim: int) -> Tensor:
    """Noise of deviation 1 that goes on along an axis."""
    parts = list(noise.unbind(dim))
    for i in range(1, len(parts)):
        parts[i] = rho * parts[i - 1] + math.sqrt(1 - rho**2) * parts[i]
    return torch.stack(parts, dim)


FAULTS = {
    "off": (0 * normals(N, D), "quieter"),
    "three quarters": (0.75 * STD * normals(N, D), "quieter"),
    "too much": (1.3 * STD * normals(N, D), "louder"),
    "shifted": (STD * (normals(N, D) + 0.2), "offset"),
    "other weights": (STD * normals(N, D) + 0.05 * smashed(), "slope"),
    "uniform": (STD * math.sqrt(12) * (smashed(1) - 0.5), "shape"),
    "one draw for all": (STD * normals(1, D).expand(N, D), "repeats"),
    "seeded for every call": (STD * normals(8, D).repeat(N // 8, 1), "repeats"),
    "goes on in the row": (STD * ar(0.4, normals(N, D), 1), "next number"),
    "shared by two numbers": (STD * normals(N, D)[:, [*range(D - 1), 2]], "other number"),
    "goes on in the next image": (STD * ar(0.4, normals(N, D), 0), "next image"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_noise_is_found_by_its_test(fault: str) -> None:
    noise, test = FAULTS[fault]
    assert test in heard(noise)["failed"]


def test_two_starts_of_a_seeded_client_are_found_out_of_step() -> None:
    noise = STD * normals(N, D)
    assert heard(noise, again=noise[:30])["failed"] == ["starts"]
    assert heard(noise, again=noise[40:70])["failed"] == ["starts"]
    assert heard(noise, again=STD * normals(30, D, seed=5))["failed"] == []


def test_a_draw_that_is_sent_again_for_the_same_image_is_legal() -> None:
    z, noise = smashed(), STD * normals(N, D)
    rows = torch.arange(N) % (N // 2)  # every image twice, by the same draw
    sent = (z + noise)[rows].float()
    found = gaussian_tests(sent, z[rows].float(), STD, rows)
    assert (found["failed"], found["images"], found["rows"]) == ([], N // 2, N)
    strangers = gaussian_tests(sent, z[rows].float(), STD, torch.arange(N))
    assert strangers["failed"] == ["repeats"]


def test_each_number_may_have_noise_of_its_own_size() -> None:
    std = torch.linspace(0.01, 0.1, D, dtype=torch.float64)
    z = smashed()
    sent = (z + std * normals(N, D)).float()
    assert gaussian_tests(sent, z.float(), std, torch.arange(N))["failed"] == []
    flat = float(std.square().mean().sqrt())
    assert "shape" in gaussian_tests(sent, z.float(), flat, torch.arange(N))["failed"]
    with pytest.raises(AuditError, match="finite number > 0, got 0"):
        gaussian_tests(sent, z.float(), 0.0, torch.arange(N))


def dropped(seed: int) -> Tensor:
    """Z with two fifths of its numbers zeroed."""
    return smashed() * (normals(N, D, seed=seed) > -0.2533)


def test_any_random_channel_can_be_heard_by_its_own_draws() -> None:
    draws = torch.stack([dropped(s) for s in range(1, 33)])
    fresh, z = dropped(50), smashed()
    assert simulated_tests(fresh, z, draws, dropped(51)[:40])["failed"] == []
    assert simulated_tests(fresh, z, draws, fresh[:40])["failed"] == ["starts"]
    assert simulated_tests(z, z, draws)["failed"] == ["nearer"]
    assert simulated_tests(0 * z, z, draws)["failed"] == ["farther"]


def test_false_alarms_of_any_channel_are_rare() -> None:
    draws = torch.stack([dropped(s) for s in range(1, 33)])
    p = [
        simulated_tests(dropped(s), smashed(), draws)["tests"]["nearer"]["p"]
        for s in range(60, 160)
    ]
    assert min(p) > 1e-3 / 100
    assert 0.2 < np.mean(p) < 0.8
