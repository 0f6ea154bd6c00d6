"""Slow, obvious versions of the surrogates: a loop over classes, written from the formulas."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from splitveil.surrogates.gated_attention import GatedAttentionCEM


def layernorm(x: Tensor) -> Tensor:
    mean = x.mean(1, keepdim=True)
    var = (x - mean).square().mean(1, keepdim=True)
    return (x - mean) / torch.sqrt(var + 1e-5)


def pooling(module: GatedAttentionCEM, x: Tensor) -> Tensor:
    p = module.pooling
    v = torch.tanh(p.value(x))
    u = torch.sigmoid(p.gate(x))
    return torch.softmax(p.score(v * u)[:, 0], 0)


def rate_of_class(z: Tensor, weight: Tensor, sigma: float) -> Tensor:
    mu = (weight[:, None] * z).sum(0)
    var = (weight[:, None] * (z - mu) ** 2).sum(0)
    return 0.5 * torch.log(1 + var / sigma**2).mean()


def rate(z: Tensor, y: Tensor, num_classes: int, sigma: float) -> Tensor:
    total = z.sum() * 0
    for c in range(num_classes):
        members = z[y == c]
        if len(members) >= 2:
            weight = torch.full((len(members),), 1 / len(members), dtype=z.dtype)
            total = total + len(members) / len(z) * rate_of_class(members, weight, sigma)
    return total


def full_rate(z: Tensor, y: Tensor, num_classes: int, sigma: float) -> Tensor:
    total = z.sum() * 0
    for c in range(num_classes):
        members = z[y == c]
        if len(members) >= 2:
            centred = members - members.mean(0)
            cov = centred.T @ centred / len(members)
            det = torch.logdet(torch.eye(z.shape[1], dtype=z.dtype) + cov / sigma**2)
            total = total + len(members) / len(z) * 0.5 * det / z.shape[1]
    return total


def cem(module: GatedAttentionCEM, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """(rob_loss, intra_mse) of `GatedAttentionCEM`, class by class."""
    rob, intra = z.sum() * 0, z.sum() * 0
    for c in range(module.num_classes):
        members = z[y == c]
        m = len(members)
        if m < 2:
            continue
        p = m / len(z)
        fed = layernorm(members) if module.attention_norm else members
        x = layernorm(members) if module.statistic == "layernorm" else members
        uniform = torch.full((m,), 1 / m, dtype=z.dtype)
        alpha = uniform if module.attention == "uniform" else pooling(module, fed)
        mu = (alpha[:, None] * x).sum(0)
        var = (alpha[:, None] * (x - mu) ** 2).sum(0)
        rob = rob + p * _penalty(module, mu, var, p)
        intra = intra + p * ((x - mu) ** 2).mean()
    return rob, intra.detach()


def _penalty(module: GatedAttentionCEM, mu: Tensor, var: Tensor, p: float) -> Tensor:
    eps, tau, gamma = module.eps, module.tau, module.gamma
    if module.penalty == "rate":
        return 0.5 * torch.log(1 + var / module.noise_std**2).mean()
    if module.form == "trace":
        return torch.clamp(torch.log(var.sum() + eps) - math.log(tau + eps), min=0)
    log_var = torch.log(torch.clamp(var, min=eps) + gamma)
    excess = log_var - math.log(tau + gamma)
    if module.form == "hinge":
        return torch.clamp(excess, min=0).mean()
    assert module.dimension_gate is not None
    normed = layernorm(log_var[None])
    hidden = F.relu(module.dimension_gate.enter(normed))
    soft = torch.sigmoid(module.dimension_gate.leave(hidden))[0]
    hard = torch.sigmoid(module.snr_sharp * (var / (mu**2 + eps) - module.snr_thresh))
    beta = module.softplus_beta
    base = F.softplus(beta * (excess - module.margin_m)) / beta
    outer = 1 / (1 + math.exp(-module.class_gate_a * (p - module.class_gate_b)))
    return outer * (soft * hard * base).mean()
