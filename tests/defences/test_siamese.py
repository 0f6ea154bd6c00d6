"""The Siamese loss: pairs of a batch by hand and by loop, and a weight that is λ."""

import math

import pytest
import torch
from torch import Tensor

from splitveil.config.resolve import build_defence, make_config
from splitveil.defences.catalogue import find_defence
from splitveil.defences.siamese import SiameseEmbedding, contrastive_loss
from splitveil.errors import ConfigError, DataError
from splitveil.surrogates.base import Surrogate

Y = torch.tensor([0, 0, 1, 2, 1, 0, 2, 2])


def features(d: int = 6, scale: float = 1.0) -> Tensor:
    g = torch.Generator().manual_seed(2)
    return scale * torch.rand(8, d, generator=g, dtype=torch.float64)


def slow_loss(z: Tensor, y: Tensor, margin: float) -> float:
    total, pairs = 0.0, 0
    for i in range(len(z)):
        for j in range(len(z)):
            if i != j:
                gap = math.dist(z[i].tolist(), z[j].tolist()) / math.sqrt(z.shape[1])
                total += gap**2 if y[i] == y[j] else max(0.0, margin - gap) ** 2
                pairs += 1
    return total / pairs


def test_three_points_by_hand() -> None:
    z = torch.tensor([[0.0], [0.5], [2.0]], dtype=torch.float64)
    loss = contrastive_loss(z, torch.tensor([0, 0, 1]), 2.0)
    assert loss.item() == pytest.approx((0.25 + 0 + 0.25) / 3)  # margin 2: gaps 2 and 1.5


@pytest.mark.parametrize("margin", [0.1, 0.5, 3.0])
def test_it_is_the_loop_over_pairs(margin: float) -> None:
    z = features()
    assert contrastive_loss(z, Y, margin).item() == pytest.approx(slow_loss(z, Y, margin))


def test_the_margin_does_not_depend_on_the_wires_size() -> None:
    z = features(4)
    wider = z.repeat_interleave(5, dim=1)
    torch.testing.assert_close(contrastive_loss(wider, Y, 0.5), contrastive_loss(z, Y, 0.5))


def test_gradients_are_those_of_finite_differences() -> None:
    z = features().requires_grad_()
    torch.autograd.gradcheck(lambda v: contrastive_loss(v, Y, 0.4), z)


def test_descent_draws_classes_together_and_apart() -> None:
    z = torch.tensor([[0.4, 0.0], [0.6, 0.0], [0.5, 0.2]]).requires_grad_()
    for _ in range(300):
        (gradient,) = torch.autograd.grad(contrastive_loss(z, torch.tensor([0, 0, 1]), 1.0), z)
        z = (z - gradient).detach().requires_grad_()
    together, apart = (z[0] - z[1]).detach().norm(), (z[0] - z[2]).detach().norm()
    assert float(together) < 0.01
    assert float(apart) == pytest.approx(2**0.5, abs=0.02)  # the margin, as a root mean square


def test_as_a_surrogate_it_says_what_every_one_says() -> None:
    made = SiameseEmbedding(24, 3, noise_std=0.1, siamese_margin=0.5)
    assert isinstance(made, Surrogate)
    z = features(24).float().reshape(8, 6, 2, 2).requires_grad_()
    out = made(z, Y)
    assert out.loss.item() == pytest.approx(slow_loss(z.flatten(1), Y, 0.5), rel=1e-5)
    assert float(out.diagnostics["effective_sample_size"]) == 1
    assert float(out.diagnostics["true_rate"]) > 0
    assert not out.intra_mse.requires_grad
    out.loss.backward()
    assert z.grad is not None
    assert float(z.grad.abs().sum()) > 0


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1.0, 1e3, 1e12])
def test_values_and_gradients_are_finite_at_every_scale(scale: float) -> None:
    z = features(6, scale).float().requires_grad_()
    out = SiameseEmbedding(6, 3, noise_std=0.1, siamese_margin=0.5)(z, Y)
    out.loss.backward()
    assert z.grad is not None
    assert bool(out.loss.isfinite() & z.grad.isfinite().all())


def test_equal_samples_of_two_classes_give_no_infinite_gradient() -> None:
    z = torch.zeros(2, 3, requires_grad=True)
    contrastive_loss(z, torch.tensor([0, 1]), 0.5).backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    assert bool(z.grad.isfinite().all())


def test_labels_out_of_range_are_refused() -> None:
    with pytest.raises(DataError, match=r"labels must lie in 0\.\.1"):
        SiameseEmbedding(6, 2, noise_std=0.1, siamese_margin=0.5)(features().float(), Y)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_margin_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=f"siamese_margin must be a finite .* got {value}"):
        build_defence(make_config({"defence": "siamese", "siamese_margin": value}))


def test_it_stacks_with_a_companion_and_not_with_another_penalty() -> None:
    assert find_defence("siamese+arl").surrogate(64, 10, 0.05) is not None
    with pytest.raises(ConfigError, match="'siamese' and 'cem' each have a penalty"):
        find_defence("siamese+cem")
