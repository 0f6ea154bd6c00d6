"""Slow, obvious slots: loops over classes, slots and heads, written from the formulas."""

import math

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from splitveil.surrogates.gates import Bounded
from splitveil.surrogates.slot_cross import SlotCrossAttentionCEM
from splitveil.surrogates.slots import SlotAttention


def layernorm(x: Tensor) -> Tensor:
    """Over the features of one vector."""
    centred = x - x.mean()
    return centred / torch.sqrt(centred.square().mean() + 1e-5)


def ends(bound: Bounded) -> tuple[float, float]:
    """The smallest and the largest value that a bounded scalar can reach."""
    if bound.reach is None:
        return bound.start / 2, bound.start * 2
    return bound.start - bound.reach, bound.start + bound.reach


def gru(module: SlotAttention, u: Tensor, h: Tensor) -> Tensor:
    d = len(h)
    i, g = module.gru_update(u), module.gru_state(h)
    reset = torch.sigmoid(i[:d] + g[:d])
    keep = torch.sigmoid(i[d : 2 * d] + g[d : 2 * d])
    new = torch.tanh(i[2 * d :] + reset * g[2 * d :])
    return (1 - keep) * new + keep * h


def slots_of_class(module: SlotAttention, x: Tensor, noise: Tensor) -> list[Tensor]:
    """Slots of the samples x (m, d) of one class."""
    d = x.shape[1]
    slots = [module.mean + torch.exp(module.log_std) * e for e in noise]
    keys = [module.key(layernorm(row)) for row in x]
    values = [module.value(layernorm(row)) for row in x]
    for _ in range(module.num_iterations):
        queries = [module.query(layernorm(s)) / math.sqrt(d) for s in slots]
        shares = [
            torch.softmax(torch.stack([k @ q for q in queries]) / d**0.25, 0) for k in keys
        ]  # one (s,) per sample
        moved = []
        for k, slot in enumerate(slots):
            u = torch.stack([a[k] * v for a, v in zip(shares, values, strict=True)]).sum(0)
            if module.aggregate == "mean":
                u = u / (torch.stack([a[k] for a in shares]).sum() + module.eps)
            h = gru(module, u, slot)
            moved.append(h + module.leave(F.relu(module.enter(layernorm(h)))))
        slots = moved
    return slots


def cross(module: SlotCrossAttentionCEM, x: Tensor, slots: list[Tensor]) -> Tensor:
    """x̃ of one sample."""
    block = module.cross
    q, kv = layernorm(x), [layernorm(s) for s in slots]
    size = len(x) // block.num_heads
    heads = []
    for h in range(block.num_heads):
        part = slice(h * size, (h + 1) * size)
        logits = torch.stack([q[part] @ s[part] for s in kv]) / math.sqrt(size)
        alpha = torch.softmax(logits, 0)
        heads.append(torch.stack([a * s[part] for a, s in zip(alpha, kv, strict=True)]).sum(0))
    x = x + torch.tanh(block.attention_gate) * block.out(torch.cat(heads))
    wide: Tensor = block.leave(F.gelu(block.enter(layernorm(x))))
    return x + torch.tanh(block.ffn_gate) * wide


def scalar(module: SlotCrossAttentionCEM, name: str) -> Tensor:
    bounds = module.scalars.bounds
    t = 2 * torch.sigmoid(module.scalars.free[list(bounds).index(name)]) - 1
    bound = bounds[name]
    return bound.start * 2**t if bound.reach is None else bound.start + bound.reach * t


def responsibilities(
    module: SlotCrossAttentionCEM, x: list[Tensor], slots: list[Tensor]
) -> list[Tensor]:
    s = module.num_slots
    if module.attention == "uniform":
        return [torch.full((s,), 1 / s, dtype=x[0].dtype) for _ in x]
    beta = scalar(module, "assign_temp")
    cosines = [torch.stack([row @ k / (row.norm() * k.norm()) for k in slots]) for row in x]
    return [torch.softmax(beta * c, 0) for c in cosines]


def class_loss(module: SlotCrossAttentionCEM, x: list[Tensor], r: list[Tensor], p: float) -> Tensor:
    """g_c L̂_c, or L_c of the rate, of one class from what is measured and who answers for it."""
    m, eps, gamma = len(x), module.eps, module.gamma
    shares, terms = [], []
    for k in range(module.num_slots):
        w = torch.stack([row[k] for row in r]).sum()
        mu = torch.stack([a[k] * v for a, v in zip(r, x, strict=True)]).sum(0) / w
        var = torch.stack([a[k] * (v - mu) ** 2 for a, v in zip(r, x, strict=True)]).sum(0) / w
        shares.append(w / m)
        if module.dimension_gate is None:
            terms.append(0.5 * torch.log(1 + var / module.noise_std**2).sum())
            continue
        log_var = torch.log(torch.clamp(var, min=eps) + gamma)
        hidden = F.relu(module.dimension_gate.enter(layernorm(log_var)))
        soft = torch.sigmoid(module.dimension_gate.leave(hidden))
        snr = var / (mu**2 + eps) - scalar(module, "snr_thresh")
        hard = torch.sigmoid(scalar(module, "snr_sharp") * snr)
        beta = scalar(module, "softplus_beta")
        excess = log_var - math.log(module.tau + gamma) - scalar(module, "margin_m")
        terms.append((soft * hard * torch.log(1 + torch.exp(beta * excess)) / beta).sum())
    d = len(x[0])
    if module.dimension_gate is None:
        entropy = -torch.stack([s * torch.log(s) for s in shares]).sum()
        within = torch.stack([s * t for s, t in zip(shares, terms, strict=True)]).sum()
        return (entropy + within) / d
    heavy = [s ** scalar(module, "slot_power") for s in shares]
    total = torch.stack(heavy).sum()
    inner = torch.stack([h / total * t for h, t in zip(heavy, terms, strict=True)]).sum() / d
    outer = torch.sigmoid(scalar(module, "class_gate_a") * (p - scalar(module, "class_gate_b")))
    return outer * inner


def cem(module: SlotCrossAttentionCEM, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """(rob_loss, intra_mse) of `SlotCrossAttentionCEM` in eval mode, class by class."""
    rob, intra = z.sum() * 0, z.sum() * 0
    for c in range(module.num_classes):
        members = z[y == c]
        if len(members) < 2:
            continue
        p = len(members) / len(z)
        fed = torch.stack([layernorm(row) for row in members])
        if module.project is not None:
            fed = module.project(fed)
        slots = slots_of_class(module.slots, fed, module.slots.eval_noise)
        enriched = [cross(module, row, slots) for row in fed]
        asked = enriched if module.assign_from == "enhanced" else list(fed)
        r = responsibilities(module, asked, slots)
        x = list(members) if module.statistic == "raw" else enriched
        rob = rob + p * class_loss(module, x, r, p)
        stacked = torch.stack(x)
        intra = intra + p * ((stacked - stacked.mean(0)) ** 2).mean()
    return rob, intra.detach()


def own_slots(y: Tensor, num_classes: int, num_slots: int) -> Tensor:
    """Which of all k = c·s slots belong to a sample's class, (n, k)."""
    classes = torch.arange(num_classes).repeat_interleave(num_slots)
    return y[:, None] == classes


def contest(
    key: Tensor, value: Tensor, query: Tensor, own: Tensor, *, aggregate: str, eps: float
) -> Tensor:
    """`collect` after `compete` as matrix products: slots of other classes have logit −∞."""
    logits = (key @ query.T) / key.shape[1] ** 0.25
    share = torch.softmax(logits.masked_fill(~own, -torch.inf), 1)
    total = share.T @ value
    return total if aggregate == "sum" else total / (share.sum(0)[:, None] + eps)


def attend_all(query: Tensor, slots: Tensor, own: Tensor, num_heads: int) -> Tensor:
    """`attend` as matrix products over the k slots of all classes, of which `own` count."""
    q, kv = (rearrange(v, "n (h e) -> h n e", h=num_heads) for v in (query, slots))
    logits = (q @ kv.mT) / math.sqrt(q.shape[2])
    read = torch.softmax(logits.masked_fill(~own, -torch.inf), 2) @ kv
    return rearrange(read, "h n e -> n (h e)")
