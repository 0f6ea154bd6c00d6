"""Ridge regression, against the normal equations and scikit-learn."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Ridge
from torch import Tensor

from splitveil.attacks.linear import Linear, ridge
from splitveil.errors import AuditError
from splitveil.threat import Labelled, Observation, Victim

MakeAux = Callable[..., Labelled]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def problem(n: int, d: int, p: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features of very different scales, and targets that partly depend on them."""
    stream = generator(seed)
    scales = torch.logspace(-1, 1, d, dtype=torch.float64)
    x = 3 + scales * torch.randn(n, d, dtype=torch.float64, generator=stream)
    truth = torch.randn(d, p, dtype=torch.float64, generator=stream)
    return x, x @ truth + torch.randn(n, p, dtype=torch.float64, generator=stream)


@pytest.mark.parametrize(("n", "d"), [(200, 6), (30, 6), (12, 40)])
def test_ridge_is_scikit_learns(n: int, d: int) -> None:
    x, y = problem(n, d, 3)
    penalties = (1e-6, 1e-2, 1.0)
    mean_variance = float(x.var(0, unbiased=False).mean())
    for penalty, (weight, bias) in zip(penalties, ridge(x, y, penalties), strict=True):
        oracle = Ridge(alpha=penalty * mean_variance * n, solver="svd").fit(x.numpy(), y.numpy())
        np.testing.assert_allclose(weight.numpy(), oracle.coef_.T, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(bias.numpy(), oracle.intercept_, rtol=1e-5, atol=1e-6)


@settings(deadline=None, max_examples=40)
@given(
    n=st.integers(2, 30),
    d=st.integers(1, 8),
    p=st.integers(1, 4),
    penalty=st.floats(1e-4, 10),
    seed=st.integers(0, 2**31),
)
def test_ridge_solves_the_normal_equations(
    n: int, d: int, p: int, penalty: float, seed: int
) -> None:
    x, y = problem(n, d, p, seed)
    weight, bias = ridge(x, y, (penalty,))[0]
    xc, yc = x - x.mean(0), y - y.mean(0)
    shrink = penalty * xc.square().mean() * torch.eye(d, dtype=torch.float64)
    left = (xc.T @ xc / n + shrink) @ weight
    torch.testing.assert_close(left, xc.T @ yc / n, rtol=1e-8, atol=1e-8)
    # the plane passes through the point of means
    torch.testing.assert_close(x.mean(0) @ weight + bias, y.mean(0), rtol=1e-9, atol=1e-9)


def test_ridge_inverts_an_exactly_linear_map() -> None:
    images = torch.rand(200, 16, dtype=torch.float64, generator=generator())
    mix = torch.randn(16, 20, dtype=torch.float64, generator=generator(1))
    weight, bias = ridge(images @ mix + 5, images, (1e-12,))[0]
    fresh = torch.rand(50, 16, dtype=torch.float64, generator=generator(2))
    assert float(((fresh @ mix + 5) @ weight + bias - fresh).abs().max()) < 1e-6


def test_a_heavy_penalty_answers_the_mean() -> None:
    x, y = problem(50, 4, 3)
    weight, bias = ridge(x, y, (1e12,))[0]
    assert float(weight.abs().max()) < 1e-9
    torch.testing.assert_close(bias, y.mean(0), rtol=0, atol=1e-6)


def test_solutions_are_double_even_from_half_precision() -> None:
    x, y = problem(50, 4, 3)
    weight, bias = ridge(x.half(), y.float(), (1e-3,))[0]
    assert (weight.dtype, bias.dtype) == (torch.float64, torch.float64)


def attacked(victim: Victim, aux: Labelled, attack: Linear, x: Tensor) -> Tensor:
    z = victim.send(x, generator(5))
    answers = torch.zeros(len(x), dtype=torch.long)
    return attack.fit(victim.black_box(), aux, generator(3))(Observation(z, answers))


def test_the_attack_inverts_a_linear_client(make_aux: MakeAux, linear_victim: Victim) -> None:
    fresh = make_aux(40, seed=1).images
    guess = attacked(linear_victim, make_aux(200), Linear(), fresh)
    assert float((guess - fresh).abs().max()) < 1e-4


def test_the_attack_is_the_ridge_solution_on_all_of_aux(
    make_aux: MakeAux, linear_victim: Victim
) -> None:
    aux, fresh = make_aux(1203), make_aux(40, seed=1).images  # more than one batch of queries
    z = linear_victim.send(aux.images)
    weight, bias = ridge(z, aux.images.flatten(1), (0.1,))[0]
    expected = linear_victim.send(fresh).double() @ weight + bias
    guess = attacked(linear_victim, aux, Linear(penalties=(0.1,)), fresh)
    torch.testing.assert_close(guess.flatten(1).double(), expected.clamp(0, 1), rtol=0, atol=1e-5)


def test_noise_is_met_with_a_heavier_penalty(make_aux: MakeAux, noisy_victim: Victim) -> None:
    fresh, aux = make_aux(200, seed=1).images, make_aux(60)
    errors = {
        penalties: float(
            (attacked(noisy_victim, aux, Linear(penalties=penalties), fresh) - fresh)
            .square()
            .mean()
        )
        for penalties in ((1e-6,), (1.0,), (1e-6, 1.0))
    }
    assert errors[(1.0,)] < errors[(1e-6,)]
    assert errors[(1e-6, 1.0)] == errors[(1.0,)]


@pytest.mark.parametrize("n", [0, 1, 9])
def test_fewer_than_ten_images_are_too_few(
    n: int, make_aux: MakeAux, linear_victim: Victim
) -> None:
    with pytest.raises(AuditError, match=f"linear attack needs at least 10 aux images, got {n}"):
        Linear().fit(linear_victim.black_box(), make_aux(n), generator())


def test_ten_images_are_enough(make_aux: MakeAux, linear_victim: Victim) -> None:
    fresh = make_aux(4, seed=1).images
    assert attacked(linear_victim, make_aux(10), Linear(), fresh).shape == fresh.shape


@pytest.fixture(params=[False, True], ids=["denormals", "flushed"])
def denormals(request: pytest.FixtureRequest) -> Iterator[None]:
    """Training flushes denormal numbers to zero, for the rest of the process."""
    tiny = torch.tensor([1e-310], dtype=torch.float64)
    flushed = float((tiny * 1.0).sum()) == 0
    torch.set_flush_denormal(request.param)
    yield
    torch.set_flush_denormal(flushed)


@pytest.mark.usefixtures("denormals")
def test_a_constant_client_gives_away_only_the_mean(make_aux: MakeAux, dead_victim: Victim) -> None:
    aux = make_aux(40)
    guess = attacked(dead_victim, aux, Linear(), make_aux(3, seed=1).images)
    torch.testing.assert_close(guess, aux.images.mean(0).expand(3, -1, -1, -1))
