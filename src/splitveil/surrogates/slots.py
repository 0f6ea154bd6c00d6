"""Slots: a few learned representatives of each class, their statistics, attention over them.

Symbols: n samples, d features, c classes, s slots per class; `y` holds the class of each sample.
"""

import math
from typing import Any, Literal, cast

import torch
from einops import einsum, rearrange, repeat
from jaxtyping import Float
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from splitveil.errors import ConfigError
from splitveil.functional import GuardedParameters, plain_layernorm
from splitveil.rng import normal_like, stream
from splitveil.surrogates.base import (
    Kinds,
    Moments,
    Number,
    Rows,
    at_least_one,
    one_of,
    positive,
    segment_sum,
)

Aggregate = Literal["mean", "sum"]

GATE_START = 0.1

# Shapes, in the symbols above.
Slots = Float[Tensor, "c s d"]
Shares = Float[Tensor, "n s"]


def compete(key: Rows, query: Slots, y: Kinds) -> Shares:
    r"""Softmax over the slots of the sample's class.

    .. math:: A_{nk} = \mathrm{softmax}_k(k_n \cdot q_k / \tau), \qquad \tau = d^{1/4}
    """
    logits = einsum(key, query.index_select(0, y), "n d, n s d -> n s")
    return torch.softmax(logits / key.shape[1] ** 0.25, 1)


def collect(
    value: Rows, share: Shares, y: Kinds, num_classes: int, *, aggregate: Aggregate, eps: float
) -> Slots:
    r"""What each slot receives: u_k = Σ_n A_nk v_n, divided by Σ_n A_nk + ε for the mean."""
    total = _class_sums(einsum(share, value, "n s, n d -> n s d"), y, num_classes)
    if aggregate == "sum":
        return total
    return total / (segment_sum(share, y, num_classes)[:, :, None] + eps)


class SlotAttention(nn.Module):
    r"""Slots of every class after T rounds of competition (Locatello et al. 2020; R1 §3.1).

    .. math::
        u_k = \textstyle\sum_n A_{nk} v_n / (\sum_n A_{nk} + \varepsilon), \qquad
        h = \mathrm{GRU}(u_k, s_k), \qquad s_k \leftarrow h + \mathrm{MLP}(LN(h))

    with k, v = W LN(x), q = W_q LN(s)/√d (no biases), an MLP Linear to 2d, ReLU, Linear, and
    LayerNorms without parameters. `aggregate="sum"` leaves the division out, as R1 eq. 6 does.

    Slots start at μ + exp(logσ)·noise. The noise is (s, d) and the same for every class, so the
    classes' names do not matter; in eval mode it is the buffer `eval_noise`, fixed for all time,
    so that results repeat. Backward keeps about (2T + 1)·n·s·d numbers.
    """

    eval_noise: Tensor

    def __init__(
        self,
        dim: int,
        num_slots: int = 8,
        num_iterations: int = 3,
        *,
        aggregate: Aggregate = "mean",
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        one_of("aggregate", aggregate, ("mean", "sum"))
        positive(eps=eps)
        at_least_one(dim=dim, num_slots=num_slots, num_iterations=num_iterations)
        self.num_slots, self.num_iterations = num_slots, num_iterations
        self.aggregate, self.eps = aggregate, eps
        self.mean = nn.Parameter(torch.randn(dim) / math.sqrt(dim))
        self.log_std = nn.Parameter(torch.zeros(dim))
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.query = nn.Linear(dim, dim, bias=False)
        self.gru_update = nn.Linear(dim, 3 * dim)
        self.gru_state = nn.Linear(dim, 3 * dim)
        self.enter = nn.Linear(dim, 2 * dim)
        self.leave = nn.Linear(2 * dim, dim)
        fixed = torch.randn(num_slots, dim, generator=stream(0, "slots.eval"))
        self.register_buffer("eval_noise", fixed)

    def noise(self, generator: Generator | None = None) -> Float[Tensor, "s d"]:
        """Starting noise: fresh in train mode (None: torch's global stream), fixed in eval mode."""
        return normal_like(self.eval_noise, generator) if self.training else self.eval_noise

    def forward(
        self,
        x: Rows,
        y: Kinds,
        num_classes: int,
        *,
        noise: Float[Tensor, "s d"],
        sign: float = 1.0,
        skips: Tensor | None = None,
    ) -> Slots:
        """Slots of each class; `sign` = −1 lets the parameters ascend."""
        held = GuardedParameters(self, sign, skips)
        normed = plain_layernorm(x)
        key, value = held.linear("key", normed), held.linear("value", normed)
        start = held["mean"] + torch.exp(held["log_std"]) * noise  # (s, d)
        slots = repeat(start, "s d -> (c s) d", c=num_classes)
        gru = ("gru_update.weight", "gru_state.weight", "gru_update.bias", "gru_state.bias")
        recurrent = [held[name] for name in gru]
        for _ in range(self.num_iterations):
            q = held.linear("query", plain_layernorm(slots)) / math.sqrt(x.shape[1])
            share = compete(key, rearrange(q, "(c s) d -> c s d", c=num_classes), y)
            update = collect(
                value, share, y, num_classes, aggregate=self.aggregate, eps=self.eps
            ).flatten(0, 1)
            slots = torch.gru_cell(update, slots, *recurrent)
            slots = slots + held.linear(
                "leave", F.relu(held.linear("enter", plain_layernorm(slots)))
            )
        return rearrange(slots, "(c s) d -> c s d", c=num_classes)


def responsibilities(x: Rows, slots: Slots, y: Kinds, temperature: Number, eps: float) -> Shares:
    r"""How far each slot of its class answers for a sample: softmax_k(β cos(x_m, s_k))."""
    own = F.normalize(slots, dim=2, eps=eps).index_select(0, y)
    cosine = einsum(F.normalize(x, dim=1, eps=eps), own, "n d, n s d -> n s")
    return torch.softmax(temperature * cosine, 1)


def _runs(x: Tensor, num_slots: int) -> list[slice]:
    """The slots in the runs they are measured in: one by one on a CPU, whose cache is small.

    A GPU takes all at once: it is the number of kernels that costs there.
    """
    size = num_slots if x.is_cuda else 1
    return [slice(k, k + size) for k in range(0, num_slots, size)]


class _SlotMoments(torch.autograd.Function):
    """Two-pass moments, a run of slots at a time in both directions."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's context object has no public type
        x: Tensor,
        resp: Tensor,
        y: Tensor,
        num_classes: int,
    ) -> tuple[Tensor, Tensor]:
        mass = segment_sum(resp, y, num_classes)  # (c, s)
        tiny = torch.finfo(resp.dtype).tiny
        inverse = torch.where(mass > tiny, 1.0 / mass, 0.0)
        weight = resp * inverse[y]  # (n, s), columns sum to 1 within a class
        means, variances = [], []
        for run in _runs(x, resp.shape[1]):
            part = weight[:, run, None]  # (n, q, 1)
            mean = _class_sums(part * x[:, None], y, num_classes)
            spread = part * (x[:, None] - mean.index_select(0, y)).square()
            means.append(mean)
            variances.append(_class_sums(spread, y, num_classes))
        mean, var = torch.cat(means, 1), torch.cat(variances, 1)
        ctx.save_for_backward(x, resp, y, inverse, mean, var)
        return mean, var

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401 - autograd's context object has no public type
        grad_mean: Tensor,
        grad_var: Tensor,
    ) -> tuple[Tensor, Tensor, None, None]:
        x, resp, y, inverse, mean, var = ctx.saved_tensors
        # Divided by the mass first: a nearly empty slot has a gradient as small as its mass.
        to_mean, to_var = grad_mean * inverse[:, :, None], grad_var * inverse[:, :, None]
        grad_x, grad_resp = torch.zeros_like(x), torch.empty_like(resp)
        for run in _runs(x, resp.shape[1]):
            off = x[:, None] - mean[:, run].index_select(0, y)  # (n, q, d)
            aim, widen = (g[:, run].index_select(0, y) for g in (to_mean, to_var))
            grad_x += (resp[:, run, None] * (aim + 2.0 * widen * off)).sum(1)
            spread = off.square() - var[:, run].index_select(0, y)
            grad_resp[:, run] = (aim * off + widen * spread).sum(2)
        return grad_x, grad_resp, None, None


def _class_sums(x: Tensor, y: Tensor, num_classes: int) -> Tensor:
    """Sums (c, q, d) of x (n, q, d) over the samples of each class."""
    return segment_sum(x.flatten(1), y, num_classes).view(num_classes, *x.shape[1:])


def slot_moments(x: Rows, resp: Shares, y: Kinds, num_classes: int) -> Moments:
    r"""Responsibility-weighted moments of each slot about its own mean; two passes.

    .. math:: \mu_k = \tfrac{1}{w_k} \sum_m r_{mk} x_m, \qquad
        \sigma_k^2 = \tfrac{1}{w_k} \sum_m r_{mk} (x_m - \mu_k)^2, \qquad w_k = \sum_m r_{mk}

    Nothing of size n·s·d is kept: x, r and the moments are what backward needs. Working memory is
    about 4·n·q·d + 4·c·s·d numbers in each direction, q = 1 on a CPU and s on a GPU. An empty slot
    (w_k = 0) has moments 0 and gradient 0.

    >>> x, r = torch.tensor([[-1.0], [1.0]]), torch.ones(2, 1)
    >>> slot_moments(x, r, torch.tensor([0, 0]), 1).var
    tensor([[[1.]]])
    """
    moments = _SlotMoments.apply(x, resp, y, num_classes)  # type: ignore[no-untyped-call]
    return Moments(*cast(tuple[Tensor, Tensor], moments))


def attend(query: Rows, slots: Float[Tensor, "n s d"], num_heads: int) -> Rows:
    r"""Multi-head attention of each sample over its own s slots, which are keys and values.

    .. math:: h = \mathrm{softmax}(q K^\top / \sqrt{d_h})\, V, \qquad K = V = S

    Heads split the features; there are no projections but W_o, as in R1 eq. 8–10.
    """
    q = rearrange(query, "n (h e) -> n h e", h=num_heads)
    kv = rearrange(slots, "n s (h e) -> n s h e", h=num_heads)
    logits = einsum(q, kv, "n h e, n s h e -> n h s") / math.sqrt(q.shape[2])
    read = einsum(torch.softmax(logits, 2), kv, "n h s, n s h e -> n h e")
    return rearrange(read, "n h e -> n (h e)")


class GatedCrossAttention(nn.Module):
    r"""Sample features enriched by what the slots of the sample's class hold.

    .. math::
        y = x + \tanh(\alpha_x)\, W_o\, \mathrm{attend}(LN(x), LN(S)), \qquad
        \tilde x = y + \tanh(\alpha_f)\, \mathrm{FFN}(LN(y))

    α_x and α_f start at 0.1: close to the identity. LayerNorms carry no parameters; W_o has no
    bias; FFN is Linear to 4d, GELU, Linear. The gathered slots take n·s·d numbers.
    """

    def __init__(self, dim: int, num_heads: int = 4) -> None:
        super().__init__()
        if dim < 1 or num_heads < 1 or dim % num_heads:
            raise ConfigError(
                f"num_heads must be at least 1 and divide the width {dim} of the slots, "
                f"got {num_heads}; change num_heads or slot_dim"
            )
        self.num_heads = num_heads
        self.out = nn.Linear(dim, dim, bias=False)
        self.enter = nn.Linear(dim, 4 * dim)
        self.leave = nn.Linear(4 * dim, dim)
        self.attention_gate = nn.Parameter(torch.tensor(GATE_START))
        self.ffn_gate = nn.Parameter(torch.tensor(GATE_START))

    def forward(
        self, x: Rows, slots: Slots, y: Kinds, sign: float = 1.0, skips: Tensor | None = None
    ) -> Rows:
        """x̃ of samples x with labels y; `sign` = −1 lets the parameters ascend."""
        normed = F.layer_norm(slots, slots.shape[2:])
        read = attend(plain_layernorm(x), normed.index_select(0, y), self.num_heads)
        held = GuardedParameters(self, sign, skips)
        x = x + torch.tanh(held["attention_gate"]) * held.linear("out", read)
        hidden = F.gelu(held.linear("enter", plain_layernorm(x)))
        return x + torch.tanh(held["ffn_gate"]) * held.linear("leave", hidden)
