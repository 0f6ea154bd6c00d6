"""`SlotCrossAttentionCEM` against loops over classes and slots, its laws, and its shut-off."""

import itertools
import logging
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
from torch import Tensor
from torch.testing import assert_close

from splitveil.errors import ConfigError, DataError
from splitveil.surrogates.rate import Rate
from splitveil.surrogates.shutoff import EarlyShutoff
from splitveil.surrogates.slot_cross import SlotCrossAttentionCEM, slot_rate, slot_weights
from splitveil.surrogates.slots import slot_moments

VARIANTS: list[dict[str, Any]] = [
    {"attention": attention, "penalty": penalty, "statistic": statistic, "slot_dim": slot_dim}
    for attention, penalty, statistic, slot_dim in itertools.product(
        ("minimise", "uniform"), (None, "rate"), ("layernorm", "raw"), (None, 4)
    )
]
OPEN: dict[str, Any] = {
    "early_shut_steps": 0,
    "early_hard_thresh": 1.0,
    "early_gate_thresh": 1.0,
}


def build(d: int, c: int, seed: int = 0, **kwargs: Any) -> SlotCrossAttentionCEM:  # noqa: ANN401
    """In float64 and eval mode, with scalars off their defaults so that their slope is tested."""
    arguments = {"num_slots": 3, "num_heads": 2, "reg_strength": 0.5, **OPEN, **kwargs}
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        cem = SlotCrossAttentionCEM(d, c, **arguments).double().eval()
        torch.nn.init.normal_(cem.scalars.free, std=0.3)
    return cem


def gradients(loss: Tensor, cem: SlotCrossAttentionCEM, z: Tensor) -> dict[str, Tensor]:
    """By name; what a variant does not use has gradient 0."""
    leaves = {"z": z, **dict(cem.named_parameters())}
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if g is None else g
        for (name, leaf), g in zip(leaves.items(), grads, strict=True)
    }


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


def test_maximise_flips_slots_projection_and_cross_attention_only() -> None:
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


@settings(max_examples=15, deadline=None)
@given(n=st.integers(1, 10), c=st.integers(1, 4), seed=st.integers(0, 999))
def test_law_2_one_slot_is_the_rate_and_uniform_slots_add_log_s(n: int, c: int, seed: int) -> None:
    z, y = draw(n, 4, c, seed)
    rate = Rate(4, c, noise_std=0.5)(z, y).loss
    one = build(4, c, seed, penalty="rate", num_slots=1)
    assert_close(one(z, y).loss, rate, rtol=1e-10, atol=1e-12)
    three = build(4, c, seed, penalty="rate", attention="uniform")
    kept = sum(m for m in torch.bincount(y).tolist() if m > 1) / n
    assert_close(three(z, y).loss, rate + kept * math.log(3) / 4, rtol=1e-10, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(n=st.integers(2, 12), s=st.integers(1, 5), seed=st.integers(0, 999), sharp=st.booleans())
def test_law_2_slot_rate_lies_between_the_information_and_rate_plus_entropy(
    n: int, s: int, seed: int, sharp: bool
) -> None:
    """n points far apart against σ carry log n nats; no assignment may report less.

    Jensen gives the other side: within the slots the rate is at most that of the class.
    """
    z = torch.arange(n, dtype=torch.float64)[:, None]
    y = torch.zeros(n, dtype=torch.long)
    logits = draw(n, s, 1, seed)[0].detach()
    resp = torch.softmax(1e6 * logits if sharp else logits, 1)
    share = resp.mean(0, keepdim=True)
    var = slot_moments(z, resp, y, 1).var
    got = slot_rate(share, var, 1e-4)
    weight = torch.full((n,), 1 / n, dtype=torch.float64)
    entropy = -torch.special.xlogy(share, share).sum()
    assert got.item() >= math.log(n) - 1e-9
    assert got.item() <= (plain.rate_of_class(z, weight, 1e-4) + entropy).item() + 1e-9


def test_law_2_dropping_the_entropy_would_break_the_bound() -> None:
    """As many slots as samples: the variances vanish and only H(π) = log M is left."""
    z = torch.arange(6, dtype=torch.float64)[:, None]
    var = slot_moments(z, torch.eye(6, dtype=torch.float64), torch.zeros(6).long(), 1).var
    share = torch.full((1, 6), 1 / 6, dtype=torch.float64)
    assert float(var.max()) == 0.0
    assert slot_rate(share, var, 1e-4).item() == pytest.approx(math.log(6))


def test_slot_weights_are_powers_of_the_share() -> None:
    share = torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.0, 0.0]], dtype=torch.float64)
    weights = slot_weights(share, torch.tensor(2.0, dtype=torch.float64))
    assert_close(weights[0], torch.tensor([4.0, 1.0, 1.0], dtype=torch.float64) / 6)
    assert bool(torch.isfinite(weights).all())


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


def run(gate: EarlyShutoff, hard: float, soft: float, calls: int = 1) -> list[float]:
    """Loss 1.0 through the gate, `calls` times."""
    return [
        gate(torch.ones(()), torch.tensor(soft), torch.tensor(hard), torch.tensor(True))[0].item()
        for _ in range(calls)
    ]


def test_shutoff_golden_sequence_and_its_lines(caplog: pytest.LogCaptureFixture) -> None:
    """Two early calls; open; EMA(hard) .4→.46→.514 > .5; back under; EMA(soft) past .6; back."""
    caplog.set_level(logging.INFO, "splitveil")
    gate = EarlyShutoff(2, 0.5, 0.6)
    assert run(gate, 0.4, 0.5, 3) == [0.0, 0.0, 1.0]
    assert run(gate, 1.0, 0.5, 2) == [1.0, 0.0]
    assert run(gate, 0.0, 0.5) == [1.0]
    assert run(gate, 0.0, 1.0, 3) == [1.0, 1.0, 0.0]
    assert run(gate, 0.0, 0.0) == [1.0]
    assert gate.calls.item() == 10
    assert gate.ema_soft.item() == pytest.approx(0.9 * (1 - 0.5 * 0.9**3))
    heads = [r.getMessage().split(",")[0] for r in caplog.records]
    assert heads == [
        "[CEM-GATE] call 1: SHUTOFF by early_shut_steps (hard gate mean 0.4000",
        "[CEM-GATE] call 3: OK (hard gate mean 0.4000",
        "[CEM-GATE] call 5: SHUTOFF by early_hard_thresh (hard gate mean 0.5140",
        "[CEM-GATE] call 6: OK (hard gate mean 0.4626",
        "[CEM-GATE] call 9: SHUTOFF by early_gate_thresh (hard gate mean 0.3372",
        "[CEM-GATE] call 10: OK (hard gate mean 0.3035",
    ]
    assert "soft 0.6355, limit 0.6" in caplog.records[4].getMessage()
    levels = [r.levelno for r in caplog.records]
    assert [i for i, level in enumerate(levels) if level == logging.WARNING] == [2, 4]


def test_shutoff_writes_every_200th_call(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "splitveil")
    run(EarlyShutoff(0, 0.5, 0.6), 0.1, 0.1, 401)
    calls = [r.getMessage().split(":")[0] for r in caplog.records]
    assert calls == [f"[CEM-GATE] call {n}" for n in (1, 200, 400)]


def test_shutoff_keeps_unread_lines_and_says_what_it_lost(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an accelerator, where `report` is the loop's business: 70 lines, room for 64."""
    caplog.set_level(logging.INFO, "splitveil")
    gate = EarlyShutoff(0, 0.5, 0.6)
    with monkeypatch.context() as patch:
        patch.setattr(gate, "report", lambda: None)
        for i in range(70):
            gate.ema_hard.fill_(float(i % 2))
            run(gate, float(i % 2), 0.1)
    assert caplog.records == []
    gate.report()
    gate.report()
    messages = [r.getMessage() for r in caplog.records]
    assert len(messages) == 65
    assert messages[0] == "[CEM-GATE] 6 earlier lines were overwritten unread"
    assert messages[1].startswith("[CEM-GATE] call 7: OK")
    assert messages[-1].startswith("[CEM-GATE] call 70: SHUTOFF by early_hard_thresh")


def test_shutoff_state_survives_a_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    old, new = EarlyShutoff(2, 0.5, 0.6), EarlyShutoff(2, 0.5, 0.6)
    run(old, 0.4, 0.5, 3)
    new.load_state_dict(old.state_dict())
    caplog.set_level(logging.INFO, "splitveil")
    assert run(new, 0.4, 0.5) == [1.0]
    assert new.calls.item() == 4
    assert caplog.records == []


def test_shutoff_ignores_calls_that_measure_nothing() -> None:
    gate = EarlyShutoff(0, 0.5, 0.6)
    one, nan = torch.ones(()), torch.tensor(math.nan)
    gate(one, one, one, torch.tensor(False))
    gate(one, nan, one, torch.tensor(True))
    assert (gate.calls.item(), gate.ema_soft.item(), gate.ema_hard.item()) == (0, 0.0, 0.0)
    assert run(gate, 0.1, 0.1) == [1.0]


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
        assert bound.lower <= values[name].item() <= bound.upper
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
        ({"num_heads": 3}, "divide the width 4"),
        ({"slot_dim": 6}, "divide the width 6"),
        ({"slot_dim": 0}, "slot_dim must be at least 1"),
        ({"softplus_beta": math.nan}, "softplus_beta must be"),
        ({"margin_m": math.inf}, "margin_m must be"),
        ({"early_shut_steps": -1}, "early_shut_steps must be"),
        ({"early_hard_thresh": 1.5}, "early_hard_thresh must lie in"),
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
