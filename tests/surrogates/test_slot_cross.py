"""`SlotCrossAttentionCEM` against loops over classes and slots, its gates and guards."""

import itertools
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import slots as oracle
from oracles import surrogates as plain
from oracles.batches import draw
from oracles.slot_cases import OPEN, build, gradients
from torch.testing import assert_close

from splitveil.errors import ConfigError, DataError
from splitveil.surrogates.slot_cross import SlotCrossAttentionCEM

VARIANTS: list[dict[str, Any]] = [
    {"attention": attention, "penalty": penalty, "statistic": statistic, "slot_dim": slot_dim}
    for attention, penalty, statistic, slot_dim in itertools.product(
        ("minimise", "uniform"), (None, "rate"), ("layernorm", "raw"), (None, 4)
    )
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@settings(max_examples=7, deadline=None)
@given(
    n=st.integers(1, 8),
    c=st.integers(1, 4),
    d=st.sampled_from([2, 6]),
    s=st.sampled_from([1, 3]),
    seed=st.integers(0, 999),
)
def test_equals_the_loops_over_classes_and_slots(  # noqa: PLR0917
    variant: dict[str, Any], n: int, c: int, d: int, s: int, seed: int
) -> None:
    """Values and gradients at z and every parameter; class counts include 0 and 1 samples."""
    cem = build(d, c, seed, num_slots=s, **variant)
    z, y = draw(n, d, c, seed)
    out = cem(z, y)
    slow_loss, slow_intra = oracle.cem(cem, z, y)
    assert_close(out.loss, slow_loss, rtol=1e-9, atol=1e-12)
    assert_close(out.intra_mse, slow_intra, rtol=1e-9, atol=1e-12)
    fast, slow = gradients(out.loss, cem, z), gradients(slow_loss, cem, z)
    assert_close(fast, slow, rtol=1e-9, atol=1e-11)


def test_gamma_enters_both_logarithms() -> None:
    cem = build(4, 2, gamma=0.01)
    z, y = draw(8, 4, 2, seed=1)
    assert_close(cem(z, y).loss, oracle.cem(cem, z, y)[0], rtol=1e-9, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), variant=st.sampled_from(VARIANTS))
def test_order_of_samples_and_names_of_classes_do_not_matter(
    seed: int, variant: dict[str, Any]
) -> None:
    cem = build(4, 3, seed, **variant)
    z, y = draw(10, 4, 3, seed)
    g = torch.Generator().manual_seed(seed)
    order, names = torch.randperm(10, generator=g), torch.randperm(3, generator=g)
    assert_close(cem(z, y).loss, cem(z[order], names[y[order]]).loss, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_gradcheck(variant: dict[str, Any]) -> None:
    cem = build(4, 2, **variant)
    z, y = draw(6, 4, 2, seed=1)
    assert torch.autograd.gradcheck(lambda t: cem(t, y).loss, (z,))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_stress_ladder_value_and_gradients_are_finite(variant: dict[str, Any]) -> None:
    cem = build(8, 3, **variant).float().train()
    z, y = draw(12, 8, 3, seed=2)
    for power in range(-12, 13, 3):
        scaled = (z.detach().float() * 10.0**power).requires_grad_()
        out = cem(scaled, y)
        grads = gradients(out.loss, cem, scaled)
        assert math.isfinite(out.loss.item()), power
        assert all(bool(torch.isfinite(g).all()) for g in grads.values()), power
    assert int(cem.skips) == 0


def test_maximise_flips_attention_parameters_only() -> None:
    """Same value, same gradient at z, at the gate MLP and at the scalars."""
    z, y = draw(12, 6, 3, seed=5)
    down, up = (build(6, 3, attention=a, slot_dim=4) for a in ("minimise", "maximise"))
    losses = [cem(z, y).loss for cem in (down, up)]
    assert_close(losses[0], losses[1])
    before, after = gradients(losses[0], down, z), gradients(losses[1], up, z)
    flipped = set()
    for name, grad in before.items():
        assert float(grad.abs().max()) > 0, name
        sign = -1 if name.split(".")[0] in ("slots", "cross", "project") else 1
        assert_close(after[name], sign * grad, rtol=1e-9, atol=1e-13)
        flipped |= {name.split(".")[0]} if sign < 0 else set()
    assert flipped == {"slots", "cross", "project"}


def test_eval_repeats_and_train_draws_anew() -> None:
    z, y = draw(12, 4, 3, seed=6)
    cem = build(4, 3, penalty="rate")
    assert torch.equal(cem(z, y).loss, cem(z, y).loss)
    cem.train()
    assert not torch.equal(cem(z, y).loss, cem(z, y).loss)
    torch.manual_seed(3)
    first = cem(z, y).loss
    torch.manual_seed(3)
    assert torch.equal(first, cem(z, y).loss)
    cem.noise_generator = torch.Generator().manual_seed(4)
    first = cem(z, y).loss
    cem.noise_generator.manual_seed(4)
    assert torch.equal(first, cem(z, y).loss)


def test_one_sample_per_class_gives_zero_and_keeps_the_graph() -> None:
    for penalty in (None, "rate"):
        cem = build(4, 5, penalty=penalty)
        z, _ = draw(5, 4, 5, seed=3)
        out = cem(z, torch.arange(5))
        out.loss.backward()
        assert out.loss.item() == 0.0
        assert z.grad is not None
        assert float(z.grad.abs().max()) == 0.0
        assert int(cem.skips) == 0


def test_share_is_over_all_samples_also_when_classes_are_skipped() -> None:
    cem = build(4, 3, penalty="rate")
    z, _ = draw(4, 4, 3, seed=4)
    both = cem(z, torch.tensor([0, 0, 1, 2])).loss
    assert_close(both, cem(z[:2], torch.tensor([0, 0])).loss / 2)


COMMON = {
    "effective_sample_size",
    "true_rate",
    "surrogate_to_true",
    "slot_mass_min",
    "slot_mass_max",
    "slot_entropy",
    "shut",
}


def test_diagnostics_of_uniform_slots() -> None:
    z, y = draw(30, 4, 3, seed=7)
    out = build(4, 3, attention="uniform", penalty="rate")(z, y)
    got = {name: value.item() for name, value in out.diagnostics.items() if value.ndim == 0}
    assert set(got) == COMMON
    assert got["effective_sample_size"] == pytest.approx(1.0)
    assert got["slot_mass_min"] == pytest.approx(1 / 3)
    assert got["slot_mass_max"] == pytest.approx(1 / 3)
    assert got["slot_entropy"] == pytest.approx(math.log(3))
    assert got["true_rate"] == pytest.approx(plain.rate(z, y, 3, 0.5).item())
    ratio = 1 + math.log(3) / 4 / got["true_rate"]  # H(π)/d on top of the rate itself
    assert got["surrogate_to_true"] == pytest.approx(ratio)
    assert got["shut"] == 0.0


def test_effective_sample_size_follows_the_responsibilities() -> None:
    cem = build(4, 1, assign_temp=3.0)
    z, y = draw(9, 4, 1, seed=8)
    fed = torch.stack([oracle.layernorm(row) for row in z])
    slots = oracle.slots_of_class(cem.slots, fed, cem.slots.eval_noise)
    resp = oracle.responsibilities(cem, [oracle.cross(cem, row, slots) for row in fed], slots)
    expected = 0.0
    for k in range(3):
        r = [row[k].item() for row in resp]
        alpha = [v / sum(r) for v in r]
        expected += sum(r) / 9 / (9 * sum(a * a for a in alpha))
    got = cem(z, y).diagnostics
    assert got["effective_sample_size"].item() == pytest.approx(expected)
    assert expected < 0.999


def test_diagnostics_are_detached_and_feature_maps_are_flattened() -> None:
    cem = build(8, 3)
    z, y = draw(12, 8, 3, seed=9)
    out = cem(z.view(12, 2, 2, 2), y)
    assert_close(out.loss, cem(z, y).loss)
    assert not any(v.requires_grad for v in (*out.diagnostics.values(), out.intra_mse))
    assert set(out.diagnostics) == COMMON | {"attention_weights", "soft_gate", "hard_gate"}
    assert_close(out.diagnostics["attention_weights"].sum(1), torch.ones(12).double())


def test_half_precision_features_are_measured_in_float32() -> None:
    cem = build(8, 3).float()
    z, y = draw(12, 8, 3, seed=10)
    with torch.autocast("cpu", torch.bfloat16):
        out = cem(z.detach().bfloat16(), y)
    assert out.loss.dtype == torch.float32
    assert_close(out.loss, cem(z.detach().bfloat16().float(), y).loss)


@pytest.mark.parametrize("penalty", [None, "rate"])
def test_the_host_reads_nothing_during_a_step(
    penalty: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the meta device, which holds no numbers, any read of one raises; there is no autocast."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    cem = build(4, 3, penalty=penalty).train()
    cem(*draw(6, 4, 3, seed=0))  # values are looked at on the first call only
    cem = cem.to("meta")
    z = torch.empty(6, 4, dtype=torch.float64, device="meta", requires_grad=True)
    out = cem(z, torch.empty(6, dtype=torch.long, device="meta"))
    assert gradients(out.loss, cem, z)["z"].shape == (6, 4)
    with pytest.raises(RuntimeError, match="meta"):
        cem.shutoff.report()


def test_shut_module_gives_zero_with_the_graph_kept_then_opens() -> None:
    """Counted in train mode only; eval mode always measures."""
    cem = build(4, 3, **{**OPEN, "early_shut_steps": 1})
    z, y = draw(12, 4, 3, seed=11)
    measured = cem(z, y)
    assert measured.loss.item() > 0
    assert (cem.shutoff.calls.item(), measured.diagnostics["shut"].item()) == (0, 0.0)
    cem.train()
    shut = cem(z, y)
    shut.loss.backward()
    assert (shut.loss.item(), shut.diagnostics["shut"].item()) == (0.0, 1.0)
    assert z.grad is not None
    assert float(z.grad.abs().max()) == 0.0
    cem(z[:1], y[:1])
    assert cem.shutoff.calls.item() == 1
    opened = cem(z, y)
    assert opened.loss.item() > 0
    assert (cem.shutoff.calls.item(), opened.diagnostics["shut"].item()) == (2, 0.0)
    assert {"shutoff.calls", "shutoff.ema_soft", "shutoff.ema_hard"} < set(cem.state_dict())


def test_scalars_of_the_module_stay_bounded_under_ascent() -> None:
    """The trivial way down, closing the class gate and raising the margin, ends at the bounds."""
    cem = build(4, 2, attention="uniform", statistic="raw")
    z, y = draw(8, 4, 2, seed=12)
    z = z.detach()
    optimiser = torch.optim.SGD([cem.scalars.free], lr=30.0)
    for _ in range(60):
        optimiser.zero_grad()
        cem(z, y).loss.backward()
        optimiser.step()
    values = cem.scalars()
    for name, bound in cem.scalars.bounds.items():
        low, high = oracle.ends(bound)
        assert low <= values[name].item() <= high
    assert values["margin_m"].item() > 0.5
    assert values["class_gate_b"].item() > 0.07
    assert cem(z, y).loss.item() > 0.01


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"attention": "up"}, "attention must be one of"),
        ({"statistic": "rank"}, "statistic must be one of"),
        ({"penalty": "gain"}, "penalty must be one of"),
        ({"penalty": "rate", "noise_std": 0.0}, "needs channel noise"),
        ({"noise_std": -1.0}, "noise_std must be"),
        ({"var_threshold": 0.0}, "threshold"),
        ({"eps": 0.0}, "eps must be"),
        ({"num_slots": 0}, "num_slots must be at least 1"),
        ({"num_iterations": 0}, "num_iterations must be at least 1"),
        ({"num_heads": 3}, "divide the slots' width 4"),
        ({"slot_dim": 6}, "divide the slots' width 6"),
        ({"slot_dim": 0}, "slot_dim must be at least 1"),
        ({"softplus_beta": math.nan}, "softplus_beta must be"),
        ({"margin_m": math.inf}, "margin_m must be"),
        ({"early_shut_steps": -1}, "early_shut_steps must be"),
        ({"early_hard_thresh": 1.5}, "early_hard_thresh must be in"),
    ],
)
@pytest.mark.usefixtures("as_users_run")
def test_bad_arguments_are_refused(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SlotCrossAttentionCEM(4, 3, **kwargs)


@pytest.mark.usefixtures("as_users_run")
def test_bad_batches_are_refused() -> None:
    with pytest.raises(DataError, match=r"0\.\.2 .* got 0\.\.3"):
        SlotCrossAttentionCEM(4, 3)(torch.zeros(2, 4), torch.tensor([0, 3]))
