"""`KMeansCEM` against the loop over classes and clusters, its numbers and its guards."""

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import kmeans as oracle
from oracles import surrogates as plain
from oracles.batches import draw
from oracles.kmeans_cases import VARIANTS, build, features, in_batches, seeded
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal
from torch.testing import assert_close

from splitveil.errors import ConfigError, DataError
from splitveil.surrogates.kmeans_cem import KMeansCEM, full_logdet

SEEDS = st.integers(0, 999)


def entropy(cov: Tensor) -> Tensor:
    """Of zero-mean Gaussians with variances (c, k, d) or covariances (…, d, d)."""
    if cov.ndim == 3:
        each = Normal(0.0, cov.sqrt()).entropy().sum(2)  # type: ignore[no-untyped-call]
    else:
        each = MultivariateNormal(cov[..., 0] * 0, cov).entropy()  # type: ignore[no-untyped-call]
    return torch.as_tensor(each)


def slow(cem: KMeansCEM, z: Tensor, y: Tensor) -> Tensor:
    return (oracle.hinge if cem.form == "hinge" else oracle.logdet)(cem, z, y)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@settings(max_examples=30, deadline=None)
@given(
    fit=st.integers(1, 30),
    n=st.integers(1, 12),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4)),
    seed=SEEDS,
)
def test_equals_the_loop_over_classes_and_clusters(
    variant: dict[str, Any], fit: int, n: int, shape: tuple[int, int, int], seed: int
) -> None:
    """Classes with 0 or 1 samples, absent from fit or batch; the second fit can empty clusters."""
    c, k, d = shape
    cem = build(d, c, fit, seed, clusters=k, **variant)
    if seed % 2:
        z, y = features(fit, d, c, seed + 7000)
        cem.refit(5 * z + 2, y)
    z, y = draw(n, d, c, seed)
    fast, oracle_loss = cem(z, y).loss, slow(cem, z, y)
    assert_close(fast, oracle_loss, rtol=1e-9, atol=1e-11)
    grads = [torch.autograd.grad(loss, z)[0] for loss in (fast, oracle_loss)]
    assert_close(grads[0], grads[1], rtol=1e-9, atol=1e-11)


def test_golden_number_by_hand() -> None:
    """Class 0 at {0, 2}: centroid 1, V = 1, w = 1, N_c = 2. Class 1 at {5}: V = 0.

    The batch has one sample of each: a = min(10·1/2, .99) = .99 and vb = 4 for z = 3, so
    ṽ = .99·4 + .01·1 = 3.97; class 1 has ṽ = 0 and its hinge is closed; the mean is over two.
    """
    cem = KMeansCEM(1, 3, clusters=1, noise_std=1.0, var_threshold=0.5, gamma=0.25).double()
    fit = torch.tensor([[0.0], [2.0], [5.0]], dtype=torch.float64)
    cem.refit(fit, torch.tensor([0, 0, 1]), seeded())
    z = torch.tensor([[3.0], [5.0]], dtype=torch.float64)
    loss = cem(z, torch.tensor([0, 1])).loss
    assert loss.item() == pytest.approx(0.5 * math.log((3.97 + 0.25) / 0.75), rel=1e-12)


def test_the_mixing_follows_ten_times_the_share_of_the_cluster() -> None:
    """200 stored samples with V = 1 and one of the batch at distance 3: a = 10/200."""
    cem = KMeansCEM(1, 1, clusters=1, log_entropy=False).double()
    fit = torch.tensor([[-1.0], [1.0]], dtype=torch.float64).repeat(100, 1)
    cem.refit(fit, torch.zeros(200, dtype=torch.long), seeded())
    loss = cem(torch.tensor([[3.0]], dtype=torch.float64), torch.tensor([0])).loss
    assert loss.item() == pytest.approx(0.05 * 9 + 0.95 * 1 + 0.001)


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_logdet_is_a_difference_of_gaussian_entropies(covariance: Any) -> None:  # noqa: ANN401
    """On an empty batch: Σ_j π_j (−log π_j + H(N(0, Σ_j + σ²I)) − H(N(0, σ²I)))."""
    cem = build(3, 2, 80, form="logdet", covariance=covariance)
    z, y = features(0, 3, 2, 0)
    pi = (cem.class_counts.double() / 80)[:, None] * cem.weights
    assert cem.covariances is not None
    noise = 0.25 * torch.eye(3, dtype=torch.float64)
    own = entropy(cem.covariances + (noise.diagonal() if covariance == "diagonal" else noise))
    expected = (pi * (own - entropy(noise) - pi.log())).sum()
    assert float(pi.sum()) == pytest.approx(1.0)
    assert_close(cem(z, y).loss, expected, rtol=1e-9, atol=1e-11)


def test_full_logdet_is_never_above_the_diagonal() -> None:
    z, y = draw(20, 4, 3, 1)
    full = build(4, 3, form="logdet", covariance="full")(z, y).loss
    assert full.item() < build(4, 3, form="logdet")(z, y).loss.item()


def test_a_low_rank_covariance_is_factored_in_float32() -> None:
    x = torch.randn(3, 40, generator=seeded()) * 1e3
    cov = (x.T @ x / 3)[None].requires_grad_()
    found = full_logdet(cov, 0.025)
    (grad,) = torch.autograd.grad(found.sum(), cov)
    exact = 0.5 * torch.logdet(torch.eye(3).double() + (x.double() @ x.double().T) / 3 / 0.025**2)
    assert math.isfinite(found.item())
    assert found.item() >= exact.item()
    assert bool(torch.isfinite(grad).all())


def test_the_full_form_in_single_precision_is_that_in_double() -> None:
    z, y = features(500, 128, 5, 0)
    made = [KMeansCEM(128, 5, form="logdet", covariance="full").to(t) for t in (z, z.float())]
    for cem, x in zip(made, (z, z.float()), strict=True):
        cem.refit(x, y, seeded())
    exact, single = (cem(z[:64].to(cem.centroids), y[:64]).loss.item() for cem in made)
    assert single == pytest.approx(exact, rel=1e-4)


@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, variant=st.sampled_from(VARIANTS))
def test_order_of_samples_does_not_matter(seed: int, variant: dict[str, Any]) -> None:
    cem = build(3, 3, seed=seed, **variant)
    z, y = draw(12, 3, 3, seed)
    order = torch.randperm(12, generator=seeded(seed))
    assert_close(cem(z, y).loss, cem(z[order], y[order]).loss, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_gradcheck(variant: dict[str, Any]) -> None:
    """Far from the corner of the hinge and from the borders between clusters."""
    cem = build(3, 2, 40, **variant)
    z, y = draw(7, 3, 2, seed=1)
    assert torch.autograd.gradcheck(lambda t: cem(t, y).loss, (z,))
    assert float(torch.autograd.grad(cem(z, y).loss, z)[0].abs().max()) > 1e-4


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("fit_power", [None, 0])
@pytest.mark.parametrize("power", range(-12, 13, 3))
def test_stress_ladder(variant: dict[str, Any], fit_power: int | None, power: int) -> None:
    """Features fitted at the same scale, or at 1 and then grown or shrunk."""
    cem = KMeansCEM(8, 3, clusters=2, **variant)
    z, y = features(40, 8, 3, 2)
    cem.refit(z.float() * 10.0 ** (power if fit_power is None else fit_power), y, seeded())
    scaled = (z[:12].float() * 10.0**power).requires_grad_()
    loss = cem(scaled, y[:12]).loss
    loss.backward()
    assert math.isfinite(loss.item())
    assert scaled.grad is not None
    assert bool(torch.isfinite(scaled.grad).all())
    assert int(cem.skips) == 0


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("size", [1.0, 1e30, math.inf])
def test_before_the_first_refit_the_loss_is_zero(variant: dict[str, Any], size: float) -> None:
    z = torch.full((4, 3), size, requires_grad=True)
    cem = KMeansCEM(3, 2, **variant)
    loss = cem(z, torch.tensor([0, 1, 1, 0])).loss
    loss.backward()
    assert loss.item() == 0.0
    assert z.grad is not None
    assert float(z.grad.abs().max()) == 0.0
    assert int(cem.skips) == 0


def test_a_gradient_that_is_not_finite_is_dropped_and_counted() -> None:
    cem = KMeansCEM(2, 1, clusters=1, log_entropy=False)
    cem.refit(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([0, 0]))
    z = torch.full((2, 2), 1e30, requires_grad=True)
    (cem(z, torch.tensor([0, 0])).loss * 1e30).backward()
    assert int(cem.skips) == 1
    assert z.grad is not None
    assert float(z.grad.abs().max()) == 0.0


def test_diagnostics_and_intra_mse() -> None:
    cem, z, y = build(8, 3), *draw(12, 8, 3, seed=9)
    out = cem(z.view(12, 2, 2, 2), y)
    assert_close(out.loss, cem(z, y).loss)
    assert set(out.diagnostics) == {
        "attention_weights", "effective_sample_size", "true_rate", "surrogate_to_true",
        "cluster_mass_min", "cluster_mass_max",
    }  # fmt: skip
    assert out.diagnostics["attention_weights"].shape == (12,)
    assert not any(v.requires_grad for v in (*out.diagnostics.values(), out.intra_mse))
    assert out.diagnostics["effective_sample_size"].item() == 1.0
    assert_close(out.diagnostics["true_rate"], plain.rate(z, y, 3, 0.5).detach())
    assert out.diagnostics["cluster_mass_min"] == cem.weights[cem.weights > 0].min()
    assert out.diagnostics["cluster_mass_max"] == cem.weights.max()
    many = [z[y == c].detach() for c in range(3) if int((y == c).sum()) >= 2]
    spread = sum(len(x) / 12 * float((x - x.mean(0)).square().mean()) for x in many)
    assert out.intra_mse.item() == pytest.approx(spread)


def test_surrogate_to_true_is_the_share_within_clusters() -> None:
    z = torch.tensor([[-1.2], [-0.8], [0.8], [1.2]]).double()
    y = torch.zeros(4, dtype=torch.long)
    cem = KMeansCEM(1, 1, clusters=2, noise_std=1.0).double()
    cem.refit(z, y, seeded())
    within, whole = 0.5 * math.log(1 + 0.2**2), 0.5 * math.log(1 + 1.04)
    ratio = cem(z, y).diagnostics["surrogate_to_true"].item()
    assert ratio == pytest.approx(within / whole)
    assert math.isnan(KMeansCEM(1, 1, noise_std=1.0)(z, y).diagnostics["surrogate_to_true"].item())


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_half_precision_features_are_measured_in_float32(variant: dict[str, Any]) -> None:
    cem = KMeansCEM(8, 3, **variant)
    z, y = features(60, 8, 3, 10)
    half = z.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        cem.refit(half, y, seeded())
        loss = cem(half, y).loss
    plainly = KMeansCEM(8, 3, **variant)
    plainly.refit(half.float(), y, seeded())
    assert loss.dtype == torch.float32
    assert loss.item() == plainly(half.float(), y).loss.item()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_step_asks_the_device_for_no_value(
    variant: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors without data refuse every question of the host; they know no autocast."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    z = torch.empty(6, 3, device="meta", requires_grad=True)
    cem = KMeansCEM(3, 4, **variant).to("meta")
    out = cem(z, torch.empty(6, dtype=torch.long, device="meta"))
    out.loss.backward()
    assert z.grad is not None
    assert z.grad.shape == (6, 3)


def test_refit_leaves_no_graph_and_the_module_has_no_parameters() -> None:
    cem = KMeansCEM(3, 2).double()
    cem.refit(*draw(20, 3, 2, 0))
    assert list(cem.parameters()) == []
    assert not any(b.requires_grad for b in cem.buffers())


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"clusters": 0}, "clusters must be at least 1, got 0"),
        ({"form": "cubic"}, "form must be one of hinge, logdet"),
        ({"covariance": "none"}, "covariance must be one of"),
        ({"form": "logdet", "noise_std": 0.0}, "needs channel noise"),
        ({"noise_std": math.nan}, "noise_std must be"),
        ({"gamma": -1.0}, "gamma must be"),
        ({"gamma": 0.0, "var_threshold": 0.0}, "threshold"),
    ],
)
@pytest.mark.usefixtures("as_users_run")
def test_bad_arguments_are_refused(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        KMeansCEM(4, 3, **kwargs)


@pytest.mark.usefixtures("as_users_run")
def test_bad_features_are_refused_and_change_nothing() -> None:
    cem, z, y = KMeansCEM(4, 3), torch.randn(6, 4, generator=seeded()), torch.arange(6) % 3
    with pytest.raises(DataError, match=r"0\.\.2 .* got 0\.\.3"):
        cem.refit(z, torch.tensor([0, 1, 2, 3, 0, 1]))
    with pytest.raises(ConfigError, match="4 features"):
        cem.refit(z[:, :3], y)
    with pytest.raises(DataError, match="NaN or infinity in 1 of 6 samples"):
        cem.refit(z.masked_fill(torch.arange(24).view(6, 4) == 5, math.nan), y)
    with pytest.raises(DataError, match="got none"):
        cem.refit(z[:0], y[:0])
    with pytest.raises(DataError, match="got none"):
        cem.refit_stream(lambda: [], seeded())
    with pytest.raises(ConfigError, match="one sample of each of 3 classes, 48 bytes, got 47"):
        cem.refit_stream(in_batches(z, y, 2), seeded(), 47)
    once = iter([(z, y)])
    with pytest.raises(DataError, match="second pass"):
        cem.refit_stream(lambda: once, seeded(), 3 * 16)
    for name, value in cem.state_dict().items():
        assert torch.equal(value, KMeansCEM(4, 3).state_dict()[name]), name
    with pytest.raises(ConfigError, match="4 features"):
        cem(z[:, :3], y)
