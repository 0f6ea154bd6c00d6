"""The class memory bank: against deques and loops, its gradient law, and what it is for."""

import math
from contextlib import nullcontext
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import bank as oracle
from oracles.bank import Module, SlowBank, gradients, stored
from oracles.batches import draw
from torch import Tensor
from torch.testing import assert_close

from splitveil.defences.catalogue import DEFENCES
from splitveil.defences.conditional_entropy import GatedAttention, SlotCross
from splitveil.errors import ConfigError, DataError
from splitveil.surrogates import rate
from splitveil.surrogates.base import (
    ClassBank,
    FirstCallCheck,
    class_batch,
    class_moments,
    uniform_weights,
    with_bank,
)
from splitveil.surrogates.gated_attention import GatedAttentionCEM
from splitveil.surrogates.rate import Rate
from splitveil.surrogates.slot_cross import SlotCrossAttentionCEM

CEM: dict[str, Any] = {"kind": GatedAttentionCEM, "reg_strength": 0.5}
SLOTS = {**CEM, "kind": SlotCrossAttentionCEM, "num_slots": 2, "num_heads": 2, "eps": 1e-12}
VARIANTS: dict[str, dict[str, Any]] = {
    "rate": {"kind": Rate, "noise_std": 0.5},
    "rate-full": {"kind": Rate, "noise_std": 0.5, "covariance": "full"},
    "maximise": {**CEM, "penalty": "rate", "attention": "maximise"},
    "uniform": {**CEM, "penalty": "rate", "attention": "uniform"},
    "gated": {**CEM, "form": "gated"},
    "trace": {**CEM, "form": "trace"},
    "slots": {**SLOTS, "penalty": "rate"},
    "slots-gated": SLOTS,
}


def build(name: str, d: int, c: int, bank: int, seed: int = 0) -> Module:
    """In float64; slots in eval mode: fixed noise, no shut-off."""
    arguments = dict(VARIANTS[name])
    kind = arguments.pop("kind")
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        module = kind(d, c, bank=bank, **arguments).double()
        if bank > 0:
            torch.nn.init.uniform_(module.bank.rows)  # what is not held must not matter
    return cast(Module, module.eval() if kind is SlotCrossAttentionCEM else module)


def agree(module: Module, slow: SlowBank, z: Tensor, y: Tensor) -> None:
    """One call against the loops: loss, gradients and log lines."""
    expected = oracle.measure(module, slow, z, y)
    out = module(z, y)
    assert_close(out.loss.detach(), expected.loss, rtol=1e-9, atol=1e-12)
    grads = gradients(module, out.loss, z)
    for name, grad in expected.grads.items():
        up = getattr(module, "attention", "") == "maximise" and name.startswith("pooling")
        assert_close(grads[name], -grad if up else grad, rtol=1e-9, atol=1e-10)
    lines = {"intra_mse": out.intra_mse, **out.diagnostics}
    if bool(expected.loss == 0):  # no class counts: Rate still calls its sample size 1
        expected.lines.pop("effective_sample_size")
    for name, line in expected.lines.items():
        assert_close(lines[name], line, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=8, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    c=st.sampled_from([1, 3, 20]),
    capacity=st.integers(1, 4),
    seed=st.integers(0, 999),
)
def test_equals_deques_and_loops_over_classes(
    name: str, sizes: list[int], c: int, capacity: int, seed: int
) -> None:
    """Classes with 0 and 1 samples, batches of 1, rings that wrap, and eval calls in between."""
    module, slow = build(name, 4, c, capacity, seed), SlowBank(c, capacity)
    for step, n in enumerate(sizes):
        z, y = draw(n, 4, c, seed + step)
        agree(module, slow, z, y)
        if not module.training:
            module.remember(z, y)
        slow.push(z, y)
        assert stored(module.bank) == slow.rows()


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    c=st.integers(1, 4),
    capacity=st.integers(1, 4),
    seed=st.integers(0, 999),
    broken=st.floats(0, 1),
)
def test_a_ring_keeps_the_last_finite_rows_in_order(
    sizes: list[int], c: int, capacity: int, seed: int, broken: float
) -> None:
    bank, slow = ClassBank(c, capacity, 2).double(), SlowBank(c, capacity)
    for step, n in enumerate(sizes):
        z, y = draw(n, 2, c, seed + step)
        g = torch.Generator().manual_seed(seed + step)
        bad = torch.rand(n, generator=g) < broken
        z = torch.where(bad[:, None] & torch.tensor([False, True]), math.inf, z.detach())
        bank.push(z, y)
        slow.push(z, y)
        assert stored(bank) == slow.rows()


def test_one_sample_beside_one_stored_row() -> None:
    """±1 at σ = 1: rate ½ log 2; slope ½·1/(1 + 1)·1 = ¼, doubled because M + N = 2 M."""
    module = Rate(1, 3, noise_std=1.0, bank=4).double()
    module.remember(torch.tensor([[-1.0], [7.0]], dtype=torch.float64), torch.tensor([1, 2]))
    z = torch.tensor([[1.0]], dtype=torch.float64, requires_grad=True)
    out = module(z, torch.tensor([1]))
    assert out.loss.item() == pytest.approx(0.5 * math.log(2))
    assert torch.autograd.grad(out.loss, z)[0].item() == pytest.approx(0.5)
    assert out.intra_mse.item() == 1.0
    assert out.diagnostics["bank_rows"].item() == 1.0


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("copies", [1, 3])
def test_a_bank_of_copies_of_the_batch_changes_nothing(name: str, copies: int) -> None:
    """N = copies·M: same loss, same gradient at z and at every parameter."""
    z, y = draw(12, 4, 3, seed=3)
    y = torch.arange(12) % 3
    bare, banked = build(name, 4, 3, 0).eval(), build(name, 4, 3, 4 * copies).eval()
    for _ in range(copies):
        banked.remember(z, y)
    outs = [module(z, y) for module in (bare, banked)]
    assert_close(outs[0].loss, outs[1].loss, rtol=1e-10, atol=1e-12)
    assert_close(outs[0].intra_mse, outs[1].intra_mse, rtol=1e-10, atol=1e-12)
    assert outs[1].diagnostics["bank_rows"].item() == 4 * copies
    found = [gradients(m, o.loss, z) for m, o in zip((bare, banked), outs, strict=True)]
    assert float(found[0]["z"].abs().max()) > 1e-4
    assert_close(found[0], found[1], rtol=1e-10, atol=1e-10)


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 9), c=st.sampled_from([1, 4, 12]), seed=st.integers(0, 999))
def test_both_forms_of_the_full_rate_agree(n: int, c: int, seed: int) -> None:
    bank = ClassBank(c, 5, 3).double()
    bank.rows.copy_(draw(5, 3, 1, seed)[0].detach())
    bank.push(*(t.detach() for t in draw(11, 3, c, seed + 1)))
    found = []
    for form in (rate.gram_rate, rate.covariance_rate):
        z, y = draw(n, 3, c, seed)
        batch = with_bank(class_batch(z, y, 3, c, FirstCallCheck()), bank, push=False, skips=None)
        weight = uniform_weights(batch.y, batch.count)
        mean = class_moments(batch.z, weight, batch.y, batch.num_classes).mean
        loss = batch.average(form(batch, weight, mean, 0.3))
        found.append((loss, torch.autograd.grad(loss, z)[0]))
    assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("bank", "d", "by_class"), [(2, 9, False), (40, 3, True), (0, 3, False)])
def test_the_form_with_fewer_numbers_is_taken(bank: int, d: int, by_class: bool) -> None:
    """(8 + 2·2)² against 3·9·(9 + 8) numbers, (8 + 2·40)² against 3·3·(3 + 8)."""
    with patch.object(rate, "covariance_rate", wraps=rate.covariance_rate) as form:
        Rate(d, 2, noise_std=0.5, covariance="full", bank=bank)(*draw(8, d, 2, seed=4))
    assert form.called is by_class


def test_law_a_full_rate_from_few_samples_needs_the_bank() -> None:
    """d = 64, 20/j noise units along the j-th of 64 rotated axes, 8 samples of a class a batch."""
    g = torch.Generator().manual_seed(5)
    turn = torch.linalg.qr(torch.randn(64, 64, generator=g, dtype=torch.float64)).Q
    std = 20.0 / torch.arange(1, 65, dtype=torch.float64)
    truth = 0.5 * torch.log1p(std**2).mean().item()
    module = Rate(64, 2, noise_std=1.0, covariance="full", bank=512).double()
    y = torch.arange(16) % 2
    losses = [
        module(torch.randn(16, 64, generator=g, dtype=torch.float64) * std @ turn.T, y).loss.item()
        for _ in range(66)
    ]
    assert losses[0] < 0.5 * truth
    assert losses[-1] == pytest.approx(truth, rel=0.05)
    assert losses[-1] < truth


@pytest.mark.parametrize("bank", [0, 30])
def test_a_full_rate_in_float32_survives_a_strong_signal(bank: int) -> None:
    """Σ/σ² ≈ 1e8 and rank 9 of 16: products and factors in float32 would give −∞ or NaN."""
    z, y = draw(40, 16, 4, seed=6)
    exact = Rate(16, 4, noise_std=0.025, covariance="full", bank=bank)
    coarse = Rate(16, 4, noise_std=0.025, covariance="full", bank=bank)
    for _ in range(2):
        wide = exact(300 * z, y).loss
        narrow = coarse(300 * z.float(), y).loss
    assert narrow.dtype == torch.float32
    assert_close(narrow.double(), wide, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["rate", "maximise", "slots"])
def test_train_stores_eval_only_uses_and_remember_only_stores(name: str) -> None:
    module, z, y = build(name, 4, 2, 3).eval(), *draw(6, 4, 2, seed=7)
    bare = module(z, y).loss
    assert stored(module.bank) == [[], []]
    module.remember(z.view(6, 2, 2, 1).bfloat16(), y)
    held = stored(module.bank)
    assert module(z, y).loss != bare
    assert stored(module.bank) == held != [[], []]
    module.train()(z, y)
    assert stored(module.bank) != held
    with pytest.raises(DataError, match="labels"):
        module.remember(z, y + 2)


@pytest.mark.parametrize("name", VARIANTS)
def test_without_a_bank_remember_does_nothing(name: str) -> None:
    module, z, y = build(name, 4, 3, 0), *draw(8, 4, 3, seed=8)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    module.remember(z, y)
    assert module.bank is None
    assert_close(module.state_dict(), before, rtol=0, atol=0)
    assert not any("bank" in key for key in before)
    assert "bank_rows" not in module(z, y).diagnostics


@pytest.mark.parametrize("name", ["rate-full", "maximise", "gated"])
def test_a_saved_bank_continues_identically(name: str) -> None:
    first, second = build(name, 4, 3, 5), build(name, 4, 3, 5, seed=1)
    for seed in range(3):
        first(*draw(7, 4, 3, seed))
    second.load_state_dict(first.state_dict())
    for seed in range(3, 6):
        z, y = draw(7, 4, 3, seed)
        assert torch.equal(first(z, y).loss, second(z, y).loss)
    assert stored(first.bank) == stored(second.bank)


def test_rows_that_overflow_the_banks_type_are_left_out() -> None:
    module = Rate(1, 1, noise_std=0.5, bank=3)
    assert module.bank is not None
    z = torch.tensor([[1.0], [1e300], [0.1]], dtype=torch.float64)
    module.remember(z, torch.tensor([0, 0, 0]))
    assert module.bank.rows.dtype == torch.float32
    assert stored(module.bank) == [[[1.0], [torch.tensor(0.1).item()]]]
    assert module(z[:1], torch.tensor([0])).loss.dtype == torch.float64
    assert module.double().bank.rows.dtype == torch.float64  # type: ignore[union-attr]
    assert module.bank.held.dtype == module.bank.head.dtype == torch.long


@pytest.mark.parametrize("name", ["rate", "maximise", "slots"])
def test_a_gradient_that_is_not_finite_becomes_zero(name: str) -> None:
    module, z, y = build(name, 4, 3, 2), *draw(8, 4, 3, seed=9)
    (module(z, y).loss * math.inf).backward()
    assert z.grad is not None
    assert float(z.grad.abs().max()) == 0.0
    assert module.skips is not None
    assert int(module.skips) >= 1


@pytest.mark.parametrize("name", VARIANTS)
def test_the_host_reads_nothing_during_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device, which holds no numbers, any read of one raises; there is no autocast."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    module = build(name, 4, 20, 5).train()
    module(*draw(6, 4, 20, seed=0))  # values are looked at on the first call only
    module = module.to("meta")
    z = torch.empty(6, 4, dtype=torch.float64, device="meta", requires_grad=True)
    out = module(z, torch.empty(6, dtype=torch.long, device="meta"))
    assert gradients(module, out.loss, z)["z"].shape == (6, 4)


def test_defences_hand_their_bank_on_and_no_preset_has_one() -> None:
    for kind in (GatedAttention, SlotCross):
        module = kind(summary="x", bank=7).surrogate(4, 3, 0.1)
        assert isinstance(module.bank, ClassBank)
        assert module.bank.rows.shape == (3, 7, 4)
        with pytest.raises(
            ConfigError, match=r"bank must be at least 0, got -1; .*0 means no bank"
        ):
            kind(summary="x", bank=-1).surrogate(4, 3, 0.1)
    for defence in DEFENCES.values():
        assert getattr(defence, "bank", 0) == 0


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("classes", [10, 1000])
@pytest.mark.parametrize("name", ["rate", "rate-full", "maximise"])
def test_on_a_gpu_without_host_sync_it_equals_the_cpu(name: str, classes: int) -> None:
    """128 samples a class would meet on 2 rows: their writes must not race."""
    here, there = (build(name, 64, classes, 2).to(device) for device in ("cpu", "cuda"))
    z, y = draw(1280, 64, classes, seed=10)
    far, labels = z.detach().cuda().requires_grad_(), y.cuda()
    for mode in ("default", "error", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            loss = there(far, labels).loss
            (grad,) = torch.autograd.grad(loss, far)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        slow = here(z, y).loss
        assert_close(loss.cpu(), slow, rtol=1e-9, atol=1e-12)
        assert_close(grad.cpu(), torch.autograd.grad(slow, z)[0], rtol=1e-8, atol=1e-11)
        assert stored(there.bank) == stored(here.bank)
