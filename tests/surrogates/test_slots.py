"""Slots, cross-attention and bounded scalars by themselves."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import slots as oracle
from oracles.batches import draw
from torch.testing import assert_close

from splitveil.errors import ConfigError
from splitveil.surrogates.gates import Bounded, BoundedScalars
from splitveil.surrogates.slots import (
    Aggregate,
    GatedCrossAttention,
    SlotAttention,
    attend,
    collect,
    compete,
    slot_moments,
)


def slot_attention(d: int, s: int, seed: int, aggregate: Aggregate = "mean") -> SlotAttention:
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return SlotAttention(d, s, aggregate=aggregate).double().eval()


@pytest.mark.parametrize("aggregate", ["mean", "sum"])
@settings(max_examples=8, deadline=None)
@given(n=st.integers(1, 8), d=st.integers(1, 4), s=st.sampled_from([1, 3]), seed=st.integers(0, 99))
def test_slots_equal_the_loop_over_classes(
    aggregate: Aggregate, n: int, d: int, s: int, seed: int
) -> None:
    module = slot_attention(d, s, seed, aggregate)
    x, y = draw(n, d, 4, seed)
    fast = module(x, y, 4, noise=module.noise())
    for c in sorted(set(y.tolist())):
        slow = oracle.slots_of_class(module, x[y == c], module.eval_noise)
        assert_close(fast[c], torch.stack(slow), rtol=1e-9, atol=1e-11)


def test_slots_compete_at_temperature_d_to_a_quarter() -> None:
    """d = 16, so τ = 2: a logit of 2·log 3 against 0 gives shares ¾ and ¼."""
    key = torch.zeros(1, 16, dtype=torch.float64)
    key[0, 0] = 1.0
    query = torch.zeros(1, 2, 16, dtype=torch.float64)
    query[0, 0, 0] = 2 * math.log(3)
    share = compete(key, query, torch.tensor([0]))
    assert_close(share, torch.tensor([[0.75, 0.25]], dtype=torch.float64))


def test_other_classes_do_not_change_the_slots() -> None:
    module = slot_attention(4, 3, seed=1)
    x, _ = draw(6, 4, 1, seed=1)
    low = module(x, torch.zeros(6, dtype=torch.long), 1, noise=module.noise())[0]
    high = module(x, torch.full((6,), 4), 5, noise=module.noise())[4]
    assert_close(low, high)


def test_noise_is_fixed_in_eval_and_fresh_in_train() -> None:
    module = SlotAttention(4, 3)
    module.eval()
    assert torch.equal(module.noise(), module.noise())
    assert torch.equal(module.noise(), SlotAttention(4, 3).eval_noise)
    module.train()
    assert not torch.equal(module.noise(), module.noise())
    one, two = (module.noise(torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(one, two)
    torch.manual_seed(6)
    first = module.noise()
    torch.manual_seed(6)
    assert torch.equal(first, module.noise())


def test_slots_start_at_mean_plus_std_times_noise() -> None:
    """With the update gate held at 1 and the MLP at 0 a round leaves the slots where they are."""
    module = slot_attention(3, 2, seed=2)
    with torch.no_grad():
        module.log_std.copy_(torch.tensor([0.0, 1.0, -1.0]))
        module.gru_update.bias[3:6] = 1e3
        module.leave.weight.zero_()
        module.leave.bias.zero_()
    x, y = draw(4, 3, 1, seed=2)
    slots = module(x, y, 1, noise=module.noise())[0]
    std = torch.tensor([1.0, math.e, 1 / math.e], dtype=torch.float64)
    assert_close(slots, module.mean + std * module.eval_noise)


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 8), s=st.integers(1, 4), seed=st.integers(0, 999))
def test_slot_moments_equal_the_plain_formula(n: int, s: int, seed: int) -> None:
    x, y = draw(n, 3, 3, seed)
    raw, _ = draw(n, s, 1, seed + 1)
    resp = raw.exp()  # need not sum to 1
    fast = slot_moments(x, resp, y, 3)
    probe, _ = draw(2 * 3 * s, 3, 1, seed + 2)
    weights = probe.detach().view(2, 3, s, 3)
    mean, var = (torch.zeros(3, s, 3, dtype=torch.float64) for _ in range(2))
    for c in sorted(set(y.tolist())):
        for k in range(s):
            r = resp[y == c][:, k, None]
            mean[c, k] = (r * x[y == c]).sum(0) / r.sum()
            var[c, k] = (r * (x[y == c] - mean[c, k].clone()) ** 2).sum(0) / r.sum()
    assert_close(fast.mean, mean, rtol=1e-10, atol=1e-12)
    assert_close(fast.var, var, rtol=1e-10, atol=1e-12)
    a = torch.autograd.grad(
        (weights[0] * fast.mean + weights[1] * fast.var).sum(), [x, raw], retain_graph=True
    )
    b = torch.autograd.grad((weights[0] * mean + weights[1] * var).sum(), [x, raw])
    for left, right in zip(a, b, strict=True):
        assert_close(left, right, rtol=1e-9, atol=1e-11)


def test_an_empty_slot_has_moments_and_gradient_zero() -> None:
    x, y = draw(4, 2, 1, seed=3)
    resp = torch.tensor([[1.0, 0.0]] * 4, dtype=torch.float64, requires_grad=True)
    moments = slot_moments(x, resp, y, 1)
    (grad,) = torch.autograd.grad(moments.mean.sum() + moments.var.sum(), resp)
    for moment in (moments.mean, moments.var):
        assert float(moment.detach()[0, 1].abs().max()) == 0.0
        assert float(moment.detach()[0, 0].abs().max()) > 0.0
    assert float(grad[:, 1].abs().max()) == 0.0


def test_variance_is_two_pass() -> None:
    """A spread of 1 around 10⁴ survives float32; E[x²] − μ² would lose it."""
    x = torch.tensor([[9999.0], [10001.0]])
    var = slot_moments(x, torch.full((2, 2), 0.5), torch.tensor([0, 0]), 1).var
    assert_close(var, torch.ones(1, 2, 1))


def test_cross_attention_with_closed_gates_is_the_identity() -> None:
    block = GatedCrossAttention(4, 2).double()
    with torch.no_grad():
        block.attention_gate.zero_()
        block.ffn_gate.zero_()
    x, y = draw(5, 4, 2, seed=4)
    slots = draw(6, 4, 1, seed=5)[0].view(2, 3, 4)
    assert torch.equal(block(x, slots, y), x)


def test_cross_attention_reads_the_slots_of_the_own_class_only() -> None:
    block = GatedCrossAttention(4, 2).double()
    x, _ = draw(2, 4, 2, seed=4)
    y = torch.tensor([0, 1])
    slots = draw(6, 4, 1, seed=5)[0].view(2, 3, 4)
    (grad,) = torch.autograd.grad(block(x, slots, y)[0].square().sum(), slots)
    assert float(grad[0].abs().max()) > 0
    assert float(grad[1].abs().max()) == 0


def test_sign_minus_one_flips_parameters_and_not_x() -> None:
    module, block = slot_attention(4, 3, seed=6), GatedCrossAttention(4, 2).double()
    x, y = draw(6, 4, 2, seed=6)
    leaves = [x, *module.parameters(), *block.parameters()]
    down, up = (
        torch.autograd.grad(
            block(x, module(x, y, 2, noise=module.noise(), sign=sign), y, sign).square().sum(),
            leaves,
        )
        for sign in (1.0, -1.0)
    )
    assert_close(down[0], up[0])
    for a, b in zip(down[1:], up[1:], strict=True):
        assert float(a.abs().max()) > 0
        assert_close(a, -b)


def test_a_broken_gradient_is_dropped_everywhere_and_counted() -> None:
    module = slot_attention(4, 3, seed=7)
    skips = torch.zeros((), dtype=torch.long)
    x, y = draw(6, 4, 2, seed=7)
    (module(x, y, 2, noise=module.noise(), skips=skips).sum() * math.inf).backward()
    grads = [p.grad for p in module.parameters()]
    assert all(g is not None and float(g.abs().max()) == 0.0 for g in grads)
    assert int(skips) == 1


BOUNDS = {"gain": Bounded(12.0), "power": Bounded(0.3), "edge": Bounded(0.05, 0.5)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scalars_start_exactly_at_their_defaults(dtype: torch.dtype) -> None:
    values = BoundedScalars(**BOUNDS).to(dtype)()
    for name, bound in BOUNDS.items():
        assert values[name] == torch.tensor(bound.start, dtype=dtype)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_scalars_stay_inside_their_bounds_after_a_thousand_steps(sign: float) -> None:
    """Pushed by a constant force with a huge step, each ends near its bound and never past it."""
    scalars = BoundedScalars(**BOUNDS).double()
    optimiser = torch.optim.SGD(scalars.parameters(), lr=100.0)
    for _ in range(1000):
        optimiser.zero_grad()
        (-sign * sum(scalars().values(), torch.zeros(()))).backward()
        optimiser.step()
    for name, value in scalars().items():
        low, high = oracle.ends(BOUNDS[name])
        assert low <= value.item() <= high
        assert value.item() == pytest.approx(high if sign > 0 else low, rel=0.01, abs=0.01)


def test_scalars_drop_a_broken_gradient() -> None:
    scalars, skips = BoundedScalars(**BOUNDS), torch.zeros((), dtype=torch.long)
    (scalars(skips)["gain"] * math.nan).backward()
    assert scalars.free.grad is not None
    assert float(scalars.free.grad.abs().max()) == 0.0
    assert int(skips) == 1


@pytest.mark.usefixtures("as_users_run")
def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_slots must be at least 1, got 0"):
        SlotAttention(4, 0)
    with pytest.raises(ConfigError, match="num_iterations must be at least 1"):
        SlotAttention(4, 2, 0)
    with pytest.raises(ConfigError, match="aggregate must be one of mean, sum"):
        SlotAttention(4, 2, aggregate="max")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="divide the slots' width 6"):
        GatedCrossAttention(6, 4)
    with pytest.raises(ConfigError, match="gain must be a finite number > 0"):
        BoundedScalars(gain=Bounded(0.0))
    with pytest.raises(ConfigError, match="edge must be a finite number"):
        BoundedScalars(edge=Bounded(math.nan, 0.5))


@given(
    num_classes=st.integers(1, 5),
    num_slots=st.integers(1, 4),
    n=st.integers(1, 12),
    aggregate=st.sampled_from(["mean", "sum"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_products_over_own_slots_equal_those_over_all(
    num_classes: int, num_slots: int, n: int, aggregate: Aggregate, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(num_classes, (n,), generator=g)
    key, value, query, slots = (
        torch.randn(*shape, 8, generator=g, dtype=torch.float64).requires_grad_()
        for shape in ((n,), (n,), (num_classes, num_slots), (num_classes, num_slots))
    )
    own = oracle.own_slots(y, num_classes, num_slots)
    gathered = collect(value, compete(key, query, y), y, num_classes, aggregate=aggregate, eps=1e-6)
    whole = oracle.contest(key, value, query.flatten(0, 1), own, aggregate=aggregate, eps=1e-6)
    read = attend(key, slots[y], 2)
    all_read = oracle.attend_all(key, slots.flatten(0, 1), own, 2)
    assert_close(whole, gathered.flatten(0, 1), rtol=0, atol=1e-12)
    assert_close(all_read, read, rtol=0, atol=1e-12)
    inputs = (key, value, query, slots)
    first = torch.autograd.grad(gathered.square().sum() + read.pow(3).sum(), inputs)
    second = torch.autograd.grad(whole.square().sum() + all_read.pow(3).sum(), inputs)
    for a, b in zip(first, second, strict=True):
        assert_close(a, b, rtol=0, atol=1e-10)
