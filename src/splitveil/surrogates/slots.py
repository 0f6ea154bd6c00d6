"""Slots: a few learned representatives of each class, their statistics, and attention over them.

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
from splitveil.rng import normal_like, stream
from splitveil.surrogates.base import (
    GuardedParameters,
    Kinds,
    Moments,
    Number,
    Rows,
    at_least_one,
    one_of,
    plain_layernorm,
    positive,
    segment_sum,
)

Aggregate = Literal["mean", "sum"]

GATE_START = 0.1

# Shapes, in the symbols above.
Slots = Float[Tensor, "c s d"]
Shares = Float[Tensor, "n s"]


def compete(key: Rows, query: Slots, y: Kinds) -> Shares:
    r"""Shares (n, s) of a sample among the slots of its class: they compete for it.

    .. math:: A_{nk} = \mathrm{softmax}_k(k_n \cdot q_k / \tau), \qquad \tau = d^{1/4}
    """
    logits = einsum(key, query.index_select(0, y), "n d, n s d -> n s")
    return torch.softmax(logits / key.shape[1] ** 0.25, 1)


def collect(
    value: Rows, share: Shares, y: Kinds, num_classes: int, *, aggregate: Aggregate, eps: float
) -> Slots:
    r"""Update of each slot, u_k = Σ_n A_nk v_n; `mean` divides it by Σ_n A_nk + ε."""
    total = _class_sums(einsum(share, value, "n s, n d -> n s d"), y, num_classes)
    if aggregate == "sum":
        return total
    return total / (segment_sum(share, y, num_classes)[:, :, None] + eps)


class SlotAttention(nn.Module):
    r"""Slots of every class after T rounds of slot attention (Locatello et al. 2020; R1 §3.1).

    .. math::
        u_k = \textstyle\sum_n A_{nk} v_n / (\sum_n A_{nk} + \varepsilon), \qquad
        h = \mathrm{GRU}(u_k, s_k), \qquad s_k \leftarrow h + \mathrm{MLP}(LN(h))

    with k, v = W LN(x), q = W_q LN(s)/√d (no biases), A as in `compete`, an MLP of Linear to 2d,
    ReLU, Linear, and LayerNorms without parameters.

    Slots start at μ + exp(logσ)·noise with learned μ and logσ. The noise is (s, d), the same for
    every class, so renaming classes changes nothing. In eval mode it is the buffer `eval_noise`,
    which is the same in every process, so that results repeat. The backward pass keeps about
    (2T + 1)·n·s·d numbers.

    Args:
        dim: Features of samples and slots, d ≥ 1.
        num_slots: Slots per class, S ≥ 1.
        num_iterations: Rounds T ≥ 1.
        aggregate: `mean` as written above (the authors' code), or `sum` without the division (R1
            eq. 6).
        eps: ε > 0, keeps the division finite for an empty slot.

    >>> attention = SlotAttention(dim=4, num_slots=2)
    >>> x, y = torch.randn(5, 4), torch.tensor([0, 0, 1, 1, 1])
    >>> attention(x, y, num_classes=3, noise=attention.noise()).shape
    torch.Size([3, 2, 4])
    >>> sum(p.numel() for p in attention.parameters())  # 13d² + 11d
    252
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
        """Starting noise (s, d): fixed in eval mode, else drawn from `generator`.

        None means torch's global stream.
        """
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
        """Slots (c, s, d) of each class.

        Args:
            x: Samples (n, d).
            y: Their classes (n,).
            num_classes: c.
            noise: Starting noise (s, d), for example from `noise`.
            sign: 1, or −1 to let the parameters ascend the loss.
            skips: Counts gradients that were not finite and became 0.
        """
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
    r"""Responsibilities (n, s) of the slots of a sample's class, softmax_k(β cos(x_m, s_k))."""
    own = F.normalize(slots, dim=2, eps=eps).index_select(0, y)
    cosine = einsum(F.normalize(x, dim=1, eps=eps), own, "n d, n s d -> n s")
    return torch.softmax(temperature * cosine, 1)


def _runs(x: Tensor, num_slots: int) -> list[slice]:
    """Which slots are measured together: one at a time on a CPU, whose cache is small.

    On a GPU all at once, because there the number of kernels costs.
    """
    size = num_slots if x.is_cuda else 1
    return [slice(k, k + size) for k in range(0, num_slots, size)]


class _SlotMoments(torch.autograd.Function):
    """Two-pass moments, one run of slots at a time, forward and backward."""

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
        # Divide by the mass first: the gradient of a nearly empty slot is as small as its mass.
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
    r"""Responsibility-weighted mean and variance of each slot (c, s, d), in two passes.

    .. math:: \mu_k = \tfrac{1}{w_k} \sum_m r_{mk} x_m, \qquad
        \sigma_k^2 = \tfrac{1}{w_k} \sum_m r_{mk} (x_m - \mu_k)^2, \qquad w_k = \sum_m r_{mk}

    The backward pass needs x, r and the moments alone, nothing of size n·s·d. Working memory is
    about 4·n·q·d + 4·c·s·d numbers in each direction, with q = 1 on a CPU and s on a GPU. An empty
    slot (w_k = 0) has moments 0 and gradient 0.

    Args:
        x: What is measured (n, d).
        resp: Responsibilities r (n, s), ≥ 0.
        y: Class of each sample (n,).
        num_classes: c.

    >>> x, r = torch.tensor([[-1.0], [1.0]]), torch.ones(2, 1)
    >>> slot_moments(x, r, torch.tensor([0, 0]), 1).var
    tensor([[[1.]]])
    """
    moments = _SlotMoments.apply(x, resp, y, num_classes)  # type: ignore[no-untyped-call]
    return Moments(*cast(tuple[Tensor, Tensor], moments))


def attend(query: Rows, slots: Float[Tensor, "n s d"], num_heads: int) -> Rows:
    r"""Multi-head attention of each sample over its s slots, which are both keys and values.

    .. math:: h = \mathrm{softmax}(q K^\top / \sqrt{d_h})\, V, \qquad K = V = S

    Heads split the features. As in R1 eq. 8–10 there is no projection except W_o.
    """
    q = rearrange(query, "n (h e) -> n h e", h=num_heads)
    kv = rearrange(slots, "n s (h e) -> n s h e", h=num_heads)
    logits = einsum(q, kv, "n h e, n s h e -> n h s") / math.sqrt(q.shape[2])
    read = einsum(torch.softmax(logits, 2), kv, "n h s, n s h e -> n h e")
    return rearrange(read, "n h e -> n (h e)")


class GatedCrossAttention(nn.Module):
    r"""Adds to each sample what it reads from the slots of its class (R1 §3.2; Flamingo).

    .. math::
        y = x + \tanh(\alpha_x)\, W_o\, \mathrm{attend}(LN(x), LN(S)), \qquad
        \tilde x = y + \tanh(\alpha_f)\, \mathrm{FFN}(LN(y))

    The learned gates α_x and α_f start at 0.1, so the module starts close to the identity.
    LayerNorms have no parameters, W_o has no bias, FFN is Linear to 4d, GELU, Linear. The slots
    gathered for each sample take n·s·d numbers.

    Args:
        dim: Features of samples and slots, d.
        num_heads: Heads, ≥ 1; must divide `dim`.

    >>> cross = GatedCrossAttention(dim=4, num_heads=2)
    >>> with torch.no_grad():  # closed gates: the identity
    ...     _ = cross.attention_gate.zero_(), cross.ffn_gate.zero_()
    >>> x, slots = torch.randn(3, 4), torch.randn(2, 5, 4)
    >>> torch.equal(cross(x, slots, torch.tensor([0, 1, 1])), x)
    True
    """

    def __init__(self, dim: int, num_heads: int = 4) -> None:
        super().__init__()
        if dim < 1 or num_heads < 1 or dim % num_heads:
            raise ConfigError(
                f"num_heads must be at least 1 and divide the slots' width {dim}, "
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
        """x̃ (n, d) of samples x (n, d) with labels y (n,), given slots (c, s, d).

        `sign` −1 lets the parameters ascend the loss; `skips` counts non-finite gradients.
        """
        # Normalised before they are gathered: c·s rows instead of n·s.
        normed = F.layer_norm(slots, slots.shape[2:])
        read = attend(plain_layernorm(x), normed.index_select(0, y), self.num_heads)
        held = GuardedParameters(self, sign, skips)
        x = x + torch.tanh(held["attention_gate"]) * held.linear("out", read)
        hidden = F.gelu(held.linear("enter", plain_layernorm(x)))
        return x + torch.tanh(held["ffn_gate"]) * held.linear("leave", hidden)
