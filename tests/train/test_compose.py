"""One backward pass equals the reference documents' two, and a broken penalty harms nothing."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from splitveil.errors import ConfigError
from splitveil.surrogates.base import Surrogate, SurrogateOutput
from splitveil.surrogates.gated_attention import GatedAttentionCEM
from splitveil.surrogates.rate import Rate
from splitveil.train.step import NonFiniteCounter, Weights, penalty


def compose_losses(
    task: Tensor,
    z: Tensor,
    y: Tensor,
    surrogate: Surrogate,
    *,
    weights: Weights,
    guard: NonFiniteCounter,
) -> tuple[Tensor, SurrogateOutput]:
    rob, out = penalty(z, y, surrogate, weights=weights, guard=guard)
    return task + rob, out


def parts() -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4), nn.Sigmoid()).double()
    head = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    return encoder, head, torch.randn(24, 6, dtype=torch.float64), torch.randint(3, (24,))


def gradients(*modules: nn.Module) -> list[Tensor]:
    return [
        torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for m in modules
        for p in m.parameters()
    ]


def two_pass(
    encoder: nn.Module,
    head: nn.Module,
    cem: nn.Module,
    batch: tuple[Tensor, Tensor],
    *,
    lambd: float,
    w_lr: float,
    scale: float,
) -> list[Tensor]:
    """The documents' way: rob first, keep its gradients, zero, task, add them back scaled."""
    x, y = batch
    modules = (encoder, head, cem)
    z = encoder(x)
    (scale * cem(z, y).loss).backward(retain_graph=True)
    saved_encoder, saved_attention = gradients(encoder), gradients(cem)
    for m in modules:
        m.zero_grad()
    F.cross_entropy(head(z), y).backward()  # type: ignore[no-untyped-call]
    for p, g in zip(encoder.parameters(), saved_encoder, strict=True):
        assert p.grad is not None
        p.grad += lambd * w_lr * g
    for p, g in zip(cem.parameters(), saved_attention, strict=True):
        p.grad = g
    return gradients(*modules)


@pytest.mark.parametrize("attention", ["minimise", "maximise", "uniform"])
@pytest.mark.parametrize("form", ["gated", "hinge", "trace", "rate"])
def test_one_backward_equals_two(attention: str, form: str) -> None:
    encoder, head, x, y = parts()
    kwargs = {"penalty": "rate"} if form == "rate" else {"form": form}
    cem = GatedAttentionCEM(4, 3, attention=attention, **kwargs).double()  # type: ignore[arg-type]
    lambd, w_lr, scale = 16.0, 0.02, 0.1
    twins = (copy.deepcopy(encoder), copy.deepcopy(head), copy.deepcopy(cem))
    slow = two_pass(*twins, (x, y), lambd=lambd, w_lr=w_lr, scale=scale)

    z = encoder(x)
    task = F.cross_entropy(head(z), y)
    weights = Weights(encoder=lambd * w_lr, scale=scale)
    loss, _ = compose_losses(task, z, y, cem, weights=weights, guard=NonFiniteCounter.on("cpu"))
    loss.backward()  # type: ignore[no-untyped-call]
    for fast, reference in zip(gradients(encoder, head, cem), slow, strict=True):
        assert_close(fast, reference, rtol=0, atol=1e-10)


def test_the_path_through_the_attention_reaches_the_encoder() -> None:
    """With detached weights the encoder's gradient would be another one."""
    encoder, _, x, y = parts()
    cem = GatedAttentionCEM(4, 3, penalty="rate").double()
    with torch.no_grad():
        for p in cem.pooling.parameters():
            p.mul_(5)
    z = encoder(x)
    whole = torch.autograd.grad(cem(z, y).loss, z, retain_graph=True)[0]
    alone = torch.autograd.grad(Rate(4, 3, noise_std=0.025)(z, y).loss, z)[0]
    assert float((whole - alone).abs().max()) > 1e-3 * float(whole.abs().max())


class Broken(nn.Module):
    """A surrogate whose value or gradient is not finite, as told."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, z: Tensor, y: Tensor) -> SurrogateOutput:
        del y
        zero = z.sum() * 0
        loss = {
            "nan": zero + math.nan,
            "inf": zero + math.inf,
            "nan gradient": torch.sqrt(zero),
            "log of zero": torch.log(zero.abs()),
            "a bare nan": torch.tensor(math.nan),
            "nothing to say": torch.tensor(0.0),
        }[self.kind]
        return SurrogateOutput(loss=loss, intra_mse=zero.detach(), diagnostics={})


@pytest.mark.parametrize(
    "kind", ["nan", "inf", "nan gradient", "log of zero", "a bare nan", "nothing to say"]
)
def test_a_broken_penalty_leaves_the_task_gradient_exactly(kind: str) -> None:
    encoder, head, x, y = parts()
    twin, twin_head = copy.deepcopy(encoder), copy.deepcopy(head)
    F.cross_entropy(twin_head(twin(x)), y).backward()  # type: ignore[no-untyped-call]

    guard = NonFiniteCounter.on("cpu")
    z = encoder(x)
    task = F.cross_entropy(head(z), y)
    weights = Weights(encoder=1.0, scale=1.0)
    loss, _ = compose_losses(task, z, y, Broken(kind), weights=weights, guard=guard)
    loss.backward()  # type: ignore[no-untyped-call]
    for a, b in zip(gradients(encoder, head), gradients(twin, twin_head), strict=True):
        assert torch.equal(a, b)
    assert (int(guard.loss) + int(guard.gradient) >= 1) == (kind != "nothing to say")
    assert math.isfinite(loss.item())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda z: z.var(), "a surrogate must return a SurrogateOutput, got Tensor; write"),
        (lambda z: said_of(z, loss=z.var(0)), r"must be one number, got shape \(4,\); take its"),
        (lambda z: said_of(z, loss=z.detach().var()), "loss must have a gradient, got one without"),
        (lambda z: said_of(z, loss=1.0), "a surrogate's loss must be a tensor, got float"),
        (
            lambda z: said_of(z, diagnostics={"note": 1.0}),
            "a surrogate's note must be a tensor, got float",
        ),
    ],
)
def test_a_wrong_output_of_a_surrogate_is_refused(
    given: Callable[[Tensor], SurrogateOutput], said: str
) -> None:
    encoder, _, x, y = parts()
    z, weights = encoder(x), Weights(encoder=1.0, scale=1.0)
    with pytest.raises(ConfigError, match=said):
        compose_losses(
            z.sum(), z, y, lambda z, _: given(z), weights=weights, guard=NonFiniteCounter.on("cpu")
        )


def said_of(z: Tensor, **wrong: object) -> SurrogateOutput:
    """An output with one thing wrong, past the types that are checked in tests alone."""
    spread = z.detach().var()
    out = SurrogateOutput(loss=spread, intra_mse=spread, diagnostics={})
    for name, value in wrong.items():
        object.__setattr__(out, name, value)
    return out
