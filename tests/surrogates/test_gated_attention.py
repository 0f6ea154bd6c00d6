"""`GatedAttentionCEM` against the per-class loop, and its invariants."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import surrogates as oracle
from oracles.batches import draw
from torch.testing import assert_close

from splitveil.errors import ConfigError, DataError
from splitveil.surrogates.gated_attention import GatedAttentionCEM, GatedAttentionPooling

VARIANTS: list[dict[str, Any]] = [
    {"form": form, "attention": attention, "statistic": statistic}
    for form, attention, statistic in itertools.product(
        ("gated", "hinge", "trace"), ("minimise", "uniform"), ("raw", "layernorm")
    )
]
VARIANTS += [
    {"penalty": "rate", "attention": "minimise"},
    {"penalty": "rate", "attention": "uniform"},
    {"form": "hinge", "gamma": 0.01},
    {
        "form": "gated",
        "gamma": 0.01,
        "softplus_beta": 2.0,
        "margin_m": 0.3,
        "attention_norm": False,
    },
]


def build(d: int, c: int, seed: int = 0, **kwargs: Any) -> GatedAttentionCEM:  # noqa: ANN401
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return GatedAttentionCEM(d, c, reg_strength=0.5, **kwargs).double()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(1, 12),
    c=st.sampled_from([1, 2, 3, 6, 30]),
    d=st.integers(2, 5),
    seed=st.integers(0, 999),
)
def test_equals_the_loop_over_classes(
    variant: dict[str, Any], n: int, c: int, d: int, seed: int
) -> None:
    """Values and gradients, for class counts that include 0 and 1 samples."""
    cem = build(d, c, seed, **variant)
    z, y = draw(n, d, c, seed)
    out = cem(z, y)
    slow_loss, slow_intra = oracle.cem(cem, z, y)
    assert_close(out.loss, slow_loss, rtol=1e-9, atol=1e-12)
    assert_close(out.intra_mse, slow_intra, rtol=1e-9, atol=1e-12)
    leaves = [z, *cem.parameters()]
    fast = torch.autograd.grad(out.loss, leaves, allow_unused=True)
    slow = torch.autograd.grad(slow_loss, leaves, allow_unused=True)
    for a, b, leaf in zip(fast, slow, leaves, strict=True):
        zero = torch.zeros_like(leaf)
        assert_close(zero if a is None else a, zero if b is None else b, rtol=1e-8, atol=1e-11)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), variant=st.sampled_from(VARIANTS))
def test_order_of_samples_does_not_matter(seed: int, variant: dict[str, Any]) -> None:
    cem = build(4, 3, seed, **variant)
    z, y = draw(10, 4, 3, seed)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(seed))
    assert_close(cem(z, y).loss, cem(z[order], y[order]).loss, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_gradcheck(variant: dict[str, Any]) -> None:
    """Finite differences agree; τ is far below the variances, away from the hinge's corner."""
    cem = build(3, 2, **variant, var_threshold=1e-4)
    z, y = draw(7, 3, 2, seed=1)
    assert torch.autograd.gradcheck(lambda t: cem(t, y).loss, (z,))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("power", range(-12, 13, 3))
def test_stress_ladder_value_and_gradient_are_finite(variant: dict[str, Any], power: int) -> None:
    cem = build(8, 3, **variant).float()
    z, y = draw(12, 8, 3, seed=2)
    scaled = (z.detach().float() * 10.0**power).requires_grad_()
    out = cem(scaled, y)
    out.loss.backward()
    assert math.isfinite(out.loss.item())
    assert scaled.grad is not None
    assert bool(torch.isfinite(scaled.grad).all())
    assert int(cem.skips) == 0


def test_one_sample_per_class_gives_zero_and_keeps_the_graph() -> None:
    cem = build(4, 5)
    z, _ = draw(5, 4, 5, seed=3)
    out = cem(z, torch.arange(5))
    out.loss.backward()
    assert out.loss.item() == 0.0
    assert z.grad is not None
    assert float(z.grad.abs().max()) == 0.0


def test_share_is_over_all_samples_also_when_classes_are_skipped() -> None:
    """Two of four samples form a class: the loss is half of that class's penalty."""
    cem = build(4, 3, form="hinge", attention="uniform", statistic="raw")
    z, _ = draw(4, 4, 3, seed=4)
    both = cem(z, torch.tensor([0, 0, 1, 2])).loss
    alone = cem(z[:2], torch.tensor([0, 0])).loss
    assert_close(both, alone / 2)


def test_maximise_flips_the_attention_only() -> None:
    """Same value, same gradient at z, opposite gradient at V, U, w."""
    z, y = draw(12, 5, 3, seed=5)
    down = build(5, 3, penalty="rate", attention="minimise")
    up = build(5, 3, penalty="rate", attention="maximise")
    grads = []
    for cem in (down, up):
        out = cem(z, y)
        names = [n for n, _ in cem.named_parameters()]
        grads.append((out.loss, torch.autograd.grad(out.loss, [z, *cem.parameters()]), names))
    assert_close(grads[0][0], grads[1][0])
    assert_close(grads[0][1][0], grads[1][1][0])
    for name, a, b in zip(grads[0][2], grads[0][1][1:], grads[1][1][1:], strict=True):
        # A constant added to every score cancels in the softmax: its gradient is 0 either way.
        assert name == "pooling.score.bias" or float(a.abs().max()) > 0
        assert_close(a, -b, rtol=1e-9, atol=1e-12)


def test_maximise_leaves_the_gate_mlp_descending() -> None:
    z, y = draw(12, 5, 3, seed=6)
    down, up = build(5, 3, attention="minimise"), build(5, 3, attention="maximise")
    for cem in (down, up):
        cem(z, y).loss.backward()
    for (name, a), (_, b) in zip(down.named_parameters(), up.named_parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        sign = -1 if name.startswith("pooling") else 1
        assert_close(a.grad, sign * b.grad, rtol=1e-9, atol=1e-12)


def test_effective_sample_size_of_uniform_weights_is_one() -> None:
    z, y = draw(30, 4, 3, seed=7)
    assert build(4, 3, attention="uniform")(z, y).diagnostics["effective_sample_size"] == 1.0


def test_a_collapsed_attention_has_a_sample_size_of_one() -> None:
    cem = build(2, 1, hidden_dim=1, attention_norm=False)
    with torch.no_grad():
        for p in cem.pooling.parameters():
            p.zero_()
        cem.pooling.value.weight[0, 0] = 50.0
        cem.pooling.score.weight.fill_(1000.0)
    z = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [-1.0, 1.0], [-1.0, 2.0]], dtype=torch.float64)
    ess = cem(z, torch.zeros(4, dtype=torch.long)).diagnostics["effective_sample_size"]
    assert ess.item() == pytest.approx(0.25)


def test_true_rate_is_of_raw_z_and_nan_without_noise() -> None:
    z, y = draw(12, 4, 3, seed=8)
    loud = GatedAttentionCEM(4, 3, noise_std=0.0).double()(z, y)
    assert math.isnan(loud.diagnostics["true_rate"].item())
    cem = build(4, 3)
    assert_close(cem(z, y).diagnostics["true_rate"], oracle.rate(z, y, 3, 0.5).detach())


def test_diagnostics_are_detached_and_feature_maps_are_flattened() -> None:
    cem = build(8, 3)
    z, y = draw(12, 8, 3, seed=9)
    out = cem(z.view(12, 2, 2, 2), y)
    assert_close(out.loss, cem(z, y).loss)
    assert not any(v.requires_grad for v in (*out.diagnostics.values(), out.intra_mse))
    names = "attention_weights effective_sample_size true_rate surrogate_to_true"
    assert {*names.split(), "soft_gate", "hard_gate"} == set(out.diagnostics)
    assert_close(out.diagnostics["attention_weights"].sum().item(), float(len(set(y.tolist()))))


def test_half_precision_features_are_measured_in_float32() -> None:
    cem = build(8, 3).float()
    z, y = draw(12, 8, 3, seed=10)
    with torch.autocast("cpu", torch.bfloat16):
        out = cem(z.detach().bfloat16(), y)
    assert out.loss.dtype == torch.float32


def test_slot_power_has_no_effect_with_a_single_pool() -> None:
    z, y = draw(12, 4, 3, seed=11)
    assert build(4, 3, slot_power=1.0)(z, y).loss == build(4, 3, slot_power=3.0)(z, y).loss


def test_hidden_width_follows_the_features() -> None:
    for d, hidden in ((8, 64), (512, 128), (4096, 512)):
        assert GatedAttentionPooling(d).value.out_features == hidden
    assert GatedAttentionPooling(8, 3, bias=False).score.bias is None


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"form": "cubic"}, "form must be one of"),
        ({"attention": "up"}, "attention must be one of"),
        ({"statistic": "rank"}, "statistic must be one of"),
        ({"penalty": "gain"}, "penalty must be one of"),
        ({"penalty": "rate", "noise_std": 0.0}, "needs channel noise"),
        ({"noise_std": -1.0}, "noise_std must be"),
        ({"var_threshold": 0.0}, "threshold"),
        ({"eps": 0.0}, "eps must be"),
        ({"softplus_beta": math.nan}, "softplus_beta must be"),
    ],
)
@pytest.mark.usefixtures("as_users_run")
def test_bad_arguments_are_refused(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        GatedAttentionCEM(4, 3, **kwargs)


@pytest.mark.usefixtures("as_users_run")
def test_bad_batches_are_refused() -> None:
    cem = GatedAttentionCEM(4, 3)
    z = torch.zeros(2, 4)
    with pytest.raises(DataError, match=r"0\.\.2 .* got 0\.\.3"):
        cem(z, torch.tensor([0, 3]))
    with pytest.raises(DataError, match="integers"):
        cem(z, torch.tensor([0.0, 1.0]))
    with pytest.raises(ConfigError, match="4 features"):
        cem(torch.zeros(2, 5), torch.tensor([0, 1]))
