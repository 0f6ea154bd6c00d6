"""Distance correlation and HSIC: hand-derived numbers, loops as oracles, laws, gradients."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from splitveil.functional import (
    centred,
    distance_correlation,
    distances,
    gaussian_kernel,
    label_kernel,
    normalised_hsic,
)

SCALES = [1e-12, 1e-6, 1.0, 1e6, 1e12]


def rows(n: int, d: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=g, dtype=torch.float64)


def slow_centred(values: list[list[float]]) -> list[list[float]]:
    n = len(values)
    row = [sum(r) / n for r in values]
    column = [sum(r[j] for r in values) / n for j in range(n)]
    grand = sum(row) / n
    return [[values[i][j] - row[i] - column[j] + grand for j in range(n)] for i in range(n)]


def slow_distances(x: Tensor) -> list[list[float]]:
    points = x.flatten(1).tolist()
    return [[math.dist(p, q) for q in points] for p in points]


def slow_correlation(x: Tensor, z: Tensor) -> float:
    a, b = (slow_centred(slow_distances(v)) for v in (x, z))

    def inner(p: list[list[float]], q: list[list[float]]) -> float:
        return sum(v * w for one, two in zip(p, q, strict=True) for v, w in zip(one, two))  # noqa: B905

    return math.sqrt(inner(a, b) / math.sqrt(inner(a, a) * inner(b, b)))


def test_distance_correlation_of_three_points_by_hand() -> None:
    x = torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64)
    by_hand = math.sqrt(720 / math.sqrt(360 * 1656))  # over 81 each: ⟨A, B⟩, ‖A‖², ‖B‖²
    assert distance_correlation(x, x.square()).item() == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize(("n", "d", "e"), [(2, 1, 1), (5, 3, 1), (12, 2, 7)])
def test_distance_correlation_equals_slow_loops(n: int, d: int, e: int) -> None:
    x, z = rows(n, d), rows(n, e, 1)
    assert distance_correlation(x, z).item() == pytest.approx(slow_correlation(x, z), rel=1e-9)


@given(n=st.integers(3, 8), scale=st.floats(1e-3, 1e3), shift=st.floats(-9, 9))
@settings(deadline=None, max_examples=10)
def test_scale_shift_and_order_do_not_matter(n: int, scale: float, shift: float) -> None:
    x, z = rows(n, 2, n), rows(n, 3, n + 1)
    found = distance_correlation(x, z)
    assert 0 <= float(found) <= 1 + 1e-12
    torch.testing.assert_close(distance_correlation(x, scale * z + shift), found)
    torch.testing.assert_close(distance_correlation(z, x), found)
    order = torch.arange(n).roll(1)
    torch.testing.assert_close(distance_correlation(x[order], z[order]), found)
    assert float(distance_correlation(x, scale * x)) == pytest.approx(1)


def test_independent_is_near_zero_and_constant_exactly_zero() -> None:
    few, many = (float(distance_correlation(rows(n, 1), rows(n, 1, 1))) for n in (20, 600))
    assert many < 0.15 < few
    flat = torch.full((9, 2), 3.0, requires_grad=True)
    none = distance_correlation(rows(9, 2), flat)
    none.backward()  # type: ignore[no-untyped-call]
    assert none.item() == 0
    assert flat.grad is not None
    assert float(flat.grad.abs().sum()) == 0


def test_it_sees_what_plain_correlation_misses() -> None:
    x = torch.linspace(-1, 1, 41, dtype=torch.float64)[:, None]
    assert abs(float(torch.corrcoef(torch.cat([x, x.square()], 1).T)[0, 1])) < 1e-12
    assert float(distance_correlation(x, x.square())) > 0.4


def test_gradients_equal_finite_differences() -> None:
    x, z = rows(6, 2), rows(6, 3, 1).requires_grad_()
    weight = rows(6, 6, 2)  # not symmetric
    torch.autograd.gradcheck(lambda v: (weight * distances(v)).sum(), z)
    torch.autograd.gradcheck(lambda v: distance_correlation(x, v), z)
    torch.autograd.gradcheck(lambda v: normalised_hsic(gaussian_kernel(v, 0.7), x @ x.T, 0.1), z)


@pytest.mark.parametrize("scale", SCALES)
def test_values_and_gradients_are_finite_at_every_scale(scale: float) -> None:
    x, y = rows(24, 5).float(), torch.arange(24) % 3
    base = rows(24, 6, 1).float()
    measures: list[Callable[[Tensor], Tensor]] = [
        lambda z: distance_correlation(x, z),
        lambda z: normalised_hsic(gaussian_kernel(x, 5.0), gaussian_kernel(z, 5.0)),
        lambda z: normalised_hsic(gaussian_kernel(z, 5.0), label_kernel(y, z)),
    ]
    for measure in measures:
        z = (scale * base).requires_grad_()
        value = measure(z)
        value.backward()  # type: ignore[no-untyped-call]
        assert bool(value.isfinite())
        assert z.grad is not None
        assert bool(z.grad.isfinite().all())
    apart = distance_correlation(x, base)
    torch.testing.assert_close(distance_correlation(x, scale * base), apart, rtol=1e-3, atol=0)


def test_two_equal_samples_have_no_infinite_gradient() -> None:
    z = torch.tensor([[1.0, 2.0], [1.0, 2.0], [0.0, 5.0]], requires_grad=True)
    (distance_correlation(rows(3, 2), z) + gaussian_kernel(z, 1.0).sum()).backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    assert bool(z.grad.isfinite().all())


def test_nearly_equal_rows_keep_their_distance() -> None:
    z = torch.tensor([[1000.0, 0.0], [1000.0, 1e-3]])
    assert distances(z)[0, 1].item() == pytest.approx(1e-3, rel=1e-4)


def test_kernels_by_hand() -> None:
    z = torch.tensor([[0.0, 0.0], [2.0, 0.0]], dtype=torch.float64)
    assert gaussian_kernel(z, 1.0)[0, 1].item() == pytest.approx(math.exp(-4 / (2 * 2)))
    assert gaussian_kernel(z, 5.0)[0, 1].item() == pytest.approx(math.exp(-4 / (2 * 25 * 2)))
    assert label_kernel(torch.tensor([4, 1, 4]), z).tolist() == [[1, 0, 1], [0, 1, 0], [1, 0, 1]]


def test_centred_rows_and_columns_sum_to_zero() -> None:
    found = centred(distances(rows(7, 2)))
    torch.testing.assert_close(found.sum(0), torch.zeros(7, dtype=torch.float64))
    torch.testing.assert_close(found.sum(1), torch.zeros(7, dtype=torch.float64))


def test_normalised_hsic_equals_the_papers_trace() -> None:
    k, m = gaussian_kernel(rows(8, 2), 0.5), gaussian_kernel(rows(8, 3, 1), 2.0)
    white = []
    for kernel in (k, m):
        eye = torch.eye(8, dtype=torch.float64)
        h = eye - 1 / 8
        inner = h @ kernel @ h
        white.append(inner @ torch.linalg.inv(inner + 0.01 * 8 * eye))
    by_hand = float(torch.trace(white[0] @ white[1]))
    assert normalised_hsic(k, m, 0.01).item() == pytest.approx(by_hand, rel=1e-10)
    assert normalised_hsic(3 * k, m, 1e-9).item() == pytest.approx(
        float(normalised_hsic(k, m, 1e-9)), rel=1e-3
    )


def test_normalised_hsic_of_labels_is_classes_minus_one() -> None:
    y = torch.arange(12) % 4
    kernel = label_kernel(y, rows(1, 1))
    assert normalised_hsic(kernel, kernel, 1e-12).item() == pytest.approx(3, rel=1e-6)


def test_autocast_changes_nothing() -> None:
    x, z = rows(16, 4).float(), rows(16, 4, 1).float()
    plain = distance_correlation(x, z), normalised_hsic(x @ x.T, z @ z.T)
    k, m = x @ x.T, z @ z.T
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = distance_correlation(x, z), normalised_hsic(k, m)
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))
