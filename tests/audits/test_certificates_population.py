"""The population's bound: its range is a worst case, and it covers as often as it says."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor
from torch.distributions import MultivariateNormal, kl_divergence

from splitveil.audits.bounds import (
    Covariance,
    Reference,
    capacity,
    central_limit,
    empirical_bernstein,
    fit_reference,
    gaussian_reference,
    population_rate,
    whiten,
)
from splitveil.errors import AuditError

F64 = torch.float64
KINDS: list[Covariance] = ["diagonal", "full"]


def uniform(n: int, d: int, seed: int) -> Tensor:
    return torch.rand(n, d, dtype=F64, generator=Generator().manual_seed(seed))


def made(kind: Covariance = "full", guard: float = 1e-3, seed: int = 0, d: int = 3) -> Reference:
    z, y = uniform(40, d, seed), torch.arange(40) % 3
    noise = torch.linspace(0.01, 0.1, d, dtype=F64)
    return fit_reference(z, y, noise_var=noise, low=0.0, high=1.0, covariance=kind, guard=guard)


@pytest.mark.parametrize("kind", KINDS)
def test_the_divergence_is_that_of_two_gaussians(kind: Covariance) -> None:
    rows, spread = 3 * uniform(5, 3, 1), torch.cov(4 * uniform(9, 3, 2).T)
    cov = spread if kind == "full" else spread.diagonal()
    full = spread if kind == "full" else cov.diag()
    eye, mean = torch.eye(3, dtype=F64), uniform(1, 3, 3)[0]
    far = MultivariateNormal(mean, eye + full)
    oracle = kl_divergence(MultivariateNormal(rows, eye), far)
    torch.testing.assert_close(gaussian_reference(mean, cov).divergence(rows), oracle)


@pytest.mark.parametrize("kind", KINDS)
def test_no_corner_of_the_box_is_worse_than_the_worst(kind: Covariance) -> None:
    reference = made(kind, d=4)
    ends = list(zip(reference.low.tolist(), reference.high.tolist(), strict=True))
    corners = torch.tensor(list(itertools.product(*ends)), dtype=F64)
    for part in [*reference.classes.values(), reference.absent, reference.wide]:
        found, worst = part.divergence(corners).max(), part.worst(reference.low, reference.high)
        assert found <= worst + 1e-9
        if part.precision.ndim == 1:
            assert float(found) == pytest.approx(worst)


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(KINDS),
    guard=st.sampled_from([0.0, 1e-3, 0.5]),
)
def test_no_two_images_of_the_box_lie_farther_apart_than_the_range(
    seed: int, kind: Covariance, guard: float
) -> None:
    reference = made(kind, guard, seed)
    share = torch.cat([uniform(40, 3, seed), uniform(40, 3, seed + 1).round()])  # inside; corners
    middles = torch.stack([g.mean for g in reference.classes.values()])
    rows = torch.cat([reference.low + share * (reference.high - reference.low), middles])
    labels = torch.arange(len(rows)) % 5  # 3 and 4 are not in the fit split
    found = [reference.divergence(rows, labels.roll(i)) for i in range(5)]
    every = torch.cat(found)
    assert every.min() >= 0
    assert every.max() - every.min() <= reference.range + 1e-9


def test_the_range_of_one_dimension_by_hand() -> None:
    # mean 1/2, variance 1/4, noise 1/4: S = 1, so the constant is ½(log 2 − ½) and z adds ≤ ¼
    z = torch.tensor([[0.0], [0.0], [1.0], [1.0]])
    found = fit_reference(z, None, noise_var=0.25, low=0.0, high=1.0, guard=0.0)
    assert found.classes[0].constant == pytest.approx(0.5 * (math.log(2) - 0.5))
    assert found.range == pytest.approx(0.25)
    values = found.divergence(whiten(torch.tensor([[0.0], [0.5]]), 0.25), None)
    assert values.tolist() == pytest.approx([0.5 * math.log(2), 0.5 * math.log(2) - 0.25])


def test_the_wide_part_is_never_worse_than_the_capacity() -> None:
    reference = made()
    noise = torch.linspace(0.01, 0.1, 3, dtype=F64)
    worst = reference.wide.worst(reference.low, reference.high)
    assert worst == pytest.approx(capacity(noise, 0.0, 1.0, 3))


def test_the_value_bounds_the_divergence_from_the_mixture_itself() -> None:
    z = torch.tensor([[0.2], [0.25], [0.3], [0.35], [0.28]])
    reference = fit_reference(z, None, noise_var=0.01, low=0.0, high=1.0, guard=0.2)
    narrow, wide = reference.classes[0], reference.wide
    grid = torch.linspace(-15, 25, 40001, dtype=F64)
    sent = whiten(torch.tensor([[0.0], [0.27], [0.5], [1.0]]), 0.01)

    def density(mean: Tensor, var: Tensor | float) -> Tensor:
        var = torch.as_tensor(var, dtype=F64)
        return torch.exp(-((grid - mean) ** 2) / (2 * var)) / (2 * math.pi * var).sqrt()

    q = 0.8 * density(narrow.mean, 1 / narrow.precision)
    q = q + 0.2 * density(wide.mean, 1 / wide.precision)
    p = density(sent, 1.0)  # (4, grid)
    true = torch.trapezoid(p * (p.clamp_min(1e-300) / q).log(), grid)
    bound = reference.divergence(sent, None)
    assert (true <= bound + 1e-9).all()
    assert (bound - true < math.log(5)).all()


def test_an_outlier_costs_at_most_the_capacity_and_the_guard() -> None:
    z = 0.5 + 0.001 * uniform(100, 4, 0)
    wild = torch.ones(1, 4, dtype=F64)
    for guard, most in ((0.0, math.inf), (1e-3, capacity(1e-4, 0.0, 1.0, 4) - math.log(1e-3))):
        found = fit_reference(z, None, noise_var=1e-4, low=0.0, high=1.0, guard=guard)
        cost = float(found.divergence(whiten(wild, 1e-4), None))
        assert cost <= most + 1e-9
        assert cost > (4000 if guard == 0 else 20)


Draw = Callable[[int, int], Tensor]


def pick(values: list[float], chances: list[float]) -> Draw:
    def draw(n: int, seed: int) -> Tensor:
        generator = Generator().manual_seed(seed)
        which = torch.multinomial(torch.tensor(chances), n, replacement=True, generator=generator)
        return torch.tensor(values, dtype=F64)[which][:, None]

    return draw


SUPPORTS: dict[str, tuple[list[float], list[float]]] = {
    "two ends": ([0.0, 1.0], [0.5, 0.5]),
    "lopsided": ([0.1, 0.9], [0.95, 0.05]),
    "rare outlier": ([0.5, 0.52, 1.0], [0.499, 0.499, 0.002]),
    "even": ([i / 20 for i in range(21)], [1 / 21] * 21),
}
SIMULATIONS, IMAGES, DELTA = 400, 100, 0.05


@pytest.mark.parametrize("guard", [0.0, 1e-3])
@pytest.mark.parametrize("name", SUPPORTS)
def test_the_limit_covers_as_often_as_it_says(name: str, guard: float) -> None:
    support, chances = SUPPORTS[name]
    draw = pick(support, chances)
    fixed = fit_reference(draw(60, 1), None, noise_var=0.01, low=0.0, high=1.0, guard=guard)
    cost = fixed.divergence(whiten(torch.tensor(support, dtype=F64)[:, None], 0.01), None)
    true = float(cost @ torch.tensor(chances, dtype=F64))
    rows = whiten(draw(SIMULATIONS * IMAGES, 2), 0.01)
    values = fixed.divergence(rows, None).view(SIMULATIONS, IMAGES)
    limits = empirical_bernstein(values, fixed.range, DELTA)
    assert float((limits >= true).double().mean()) >= 1 - DELTA
    assert information(support, chances, 0.01) <= true


def information(support: list[float], chances: list[float], noise_var: float) -> float:
    """I(z; z̃) of a discrete z, by quadrature."""
    grid = torch.linspace(-1, 2, 6001, dtype=F64)
    z, w = (torch.tensor(v, dtype=F64)[:, None] for v in (support, chances))
    p = torch.exp(-((grid - z) ** 2) / (2 * noise_var)) / math.sqrt(2 * math.pi * noise_var)
    q = (w * p).sum(0)
    inner = torch.where(p > 0, p * (p.clamp_min(1e-300) / q.clamp_min(1e-300)).log(), 0.0)
    return float((w[:, 0] * torch.trapezoid(inner, grid)).sum())


def test_the_central_limit_does_not_cover_rare_outliers() -> None:
    support, chances = SUPPORTS["rare outlier"]
    draw = pick(support, chances)
    fixed = fit_reference(draw(60, 1), None, noise_var=1e-3, low=0.0, high=1.0)
    cost = fixed.divergence(whiten(torch.tensor(support, dtype=F64)[:, None], 1e-3), None)
    true = float(cost @ torch.tensor(chances, dtype=F64))
    rows = whiten(draw(SIMULATIONS * IMAGES, 2), 1e-3)
    limits = central_limit(fixed.divergence(rows, None).view(SIMULATIONS, IMAGES), DELTA)
    assert float((limits >= true).double().mean()) < 0.5


def test_the_bound_covers_information_between_and_within_classes() -> None:
    support, chances = [0.1, 0.2, 0.7, 0.9], [0.25] * 4
    within = sum(information(support[i : i + 2], [0.5, 0.5], 0.01) for i in (0, 2)) / 2
    tight = 0
    for seed in range(40):
        z = pick(support, chances)(1200, seed)
        y = (z[:, 0] > 0.5).long()
        found = population_rate(
            z[:600], y[:600], z[600:], y[600:], noise_var=0.01, low=0.0, high=1.0
        )
        assert within <= found.value
        assert found.mean <= found.asymptotic < found.value
        tight += found.value < 2 * within
    assert tight == 40


def test_labels_make_the_bound_smaller_where_classes_lie_apart() -> None:
    y = torch.arange(400) % 2
    z = 0.4 * uniform(400, 3, 5) + 0.5 * y[:, None]
    fit, fresh = slice(0, 200), slice(200, 400)
    box: Any = {"noise_var": 0.01, "low": 0.0, "high": 1.0}
    given_class = population_rate(z[fit], y[fit], z[fresh], y[fresh], **box)
    alone = population_rate(z[fit], None, z[fresh], None, **box)
    assert given_class.mean < alone.mean - math.log(2)
    assert (given_class.n, given_class.kind) == (200, "empirical Bernstein")


def test_full_covariance_sees_a_shared_direction() -> None:
    z = uniform(600, 1, 6).expand(-1, 4).contiguous()
    found = {
        kind: population_rate(
            z[:300], None, z[300:], None, noise_var=0.01, low=0.0, high=1.0, covariance=kind
        )
        for kind in KINDS
    }
    assert found["full"].mean < 0.5 * found["diagonal"].mean


def test_a_full_covariance_of_few_images_is_shrunk() -> None:
    z = uniform(300, 40, 7)
    kinds = {
        kind: population_rate(
            z[:60], None, z[60:], None, noise_var=0.05, low=0.0, high=1.0, covariance=kind
        ).mean
        for kind in KINDS
    }
    assert kinds["full"] == pytest.approx(kinds["diagonal"], rel=0.1)


def test_the_bound_is_never_above_the_capacity() -> None:
    z = uniform(4, 2, 8).round()
    found = population_rate(z[:2], None, z[2:], None, noise_var=0.1, low=0.0, high=1.0)
    assert (found.value, found.kind) == (capacity(0.1, 0.0, 1.0, 2), "capacity")


def test_a_class_absent_from_the_fit_split_uses_all_moments() -> None:
    z, y = uniform(200, 2, 9), torch.zeros(200, dtype=torch.int64)
    box: Any = {"noise_var": 0.01, "low": 0.0, "high": 1.0}
    known = population_rate(z[:100], y[:100], z[100:], y[100:], **box)
    other = population_rate(z[:100], y[:100], z[100:], y[100:] + 7, **box)
    assert other.mean == pytest.approx(known.mean)


def test_bounds_are_those_of_the_type_z_was_clipped_in() -> None:
    z = torch.rand(40, 2, generator=Generator().manual_seed(0)).clamp(0.1, 0.7)  # float32
    found = population_rate(z[:20], None, z[20:], None, noise_var=0.1, low=0.1, high=0.7)
    assert found.n == 20


def test_smashed_data_outside_its_bounds_is_refused() -> None:
    z = uniform(20, 2, 0)
    for fit, fresh in ((z, 2 * z), (2 * z, z)):
        with pytest.raises(AuditError, match=r"z is not bounded by \[0, 1\].*add a clip stage"):
            population_rate(fit, None, fresh, None, noise_var=0.1, low=0.0, high=1.0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"delta": 0.0}, "delta must lie in"),
        ({"guard": 1.0}, "guard must lie in"),
        ({"noise_var": 0.0}, "the channel is deterministic"),
        ({"noise_var": None}, "noise of unknown scale"),
        ({"high": math.inf}, "z is not bounded"),
    ],
)
def test_settings_that_would_make_it_false_are_refused(
    changed: dict[str, Any], message: str
) -> None:
    z = uniform(20, 2, 0)
    box: Any = {"noise_var": 0.1, "low": 0.0, "high": 1.0}
    with pytest.raises(AuditError, match=message):
        population_rate(z[:10], None, z[10:], None, **(box | changed))


def test_too_few_images_and_labels_of_one_split_only_are_refused() -> None:
    z, y = uniform(9, 2, 0), torch.arange(9)
    box: Any = {"noise_var": 0.1, "low": 0.0, "high": 1.0}
    with pytest.raises(AuditError, match="at least 2 fresh images, got 1"):
        population_rate(z, None, z[:1], None, **box)
    with pytest.raises(AuditError, match="at least 2 images, got 1"):
        population_rate(z[:1], None, z, None, **box)
    with pytest.raises(AuditError, match="for both splits, or for neither"):
        population_rate(z, y, z, None, **box)
