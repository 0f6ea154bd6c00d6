"""Gated cross-attention: each sample consults the slots of its own class (Flamingo's block)."""

import math

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from splitveil.errors import ConfigError
from splitveil.surrogates.gates import Held, plain_layernorm
from splitveil.surrogates.slots import own_slots

GATE_START = 0.1


def attend(
    query: Float[Tensor, "n d"], slots: Float[Tensor, "n s d"], num_heads: int
) -> Float[Tensor, "n d"]:
    r"""Multi-head attention of each sample over its own s slots, which are keys and values.

    .. math:: h = \mathrm{softmax}(q K^\top / \sqrt{d_h})\, V, \qquad K = V = S

    Heads split the features; there are no projections but W_o, as in seed 001 eq. 8–10.
    """
    q = rearrange(query, "n (h e) -> n h e", h=num_heads)
    kv = rearrange(slots, "n s (h e) -> n s h e", h=num_heads)
    logits = einsum(q, kv, "n h e, n s h e -> n h s") / math.sqrt(q.shape[2])
    read = einsum(torch.softmax(logits, 2), kv, "n h s, n s h e -> n h e")
    return rearrange(read, "n h e -> n (h e)")


def attend_all(
    query: Float[Tensor, "n d"],
    slots: Float[Tensor, "k d"],
    own: Bool[Tensor, "n k"],
    num_heads: int,
) -> Float[Tensor, "n d"]:
    """`attend` as matrix products over the k slots of all classes, of which `own` count.

    Nothing of size n·s·d is gathered; see `contest`.
    """
    q = rearrange(query, "n (h e) -> h n e", h=num_heads)
    kv = rearrange(slots, "k (h e) -> h k e", h=num_heads)
    logits = (q @ kv.mT) / math.sqrt(q.shape[2])
    read = torch.softmax(logits.masked_fill(~own, -torch.inf), 2) @ kv
    return rearrange(read, "h n e -> n (h e)")


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
        self,
        x: Float[Tensor, "n d"],
        slots: Float[Tensor, "c s d"],
        y: Int[Tensor, " n"],
        sign: float = 1.0,
        skips: Tensor | None = None,
    ) -> Float[Tensor, "n d"]:
        """x̃ of samples x with labels y; `sign` = −1 lets the parameters ascend."""
        normed = F.layer_norm(slots, slots.shape[2:])
        if x.is_cuda:
            own = own_slots(y, *slots.shape[:2])
            read = attend_all(plain_layernorm(x), normed.flatten(0, 1), own, self.num_heads)
        else:
            read = attend(plain_layernorm(x), normed.index_select(0, y), self.num_heads)
        held = Held(self, sign, skips)
        x = x + torch.tanh(held["attention_gate"]) * held.linear("out", read)
        hidden = F.gelu(held.linear("enter", plain_layernorm(x)))
        return x + torch.tanh(held["ffn_gate"]) * held.linear("leave", hidden)
