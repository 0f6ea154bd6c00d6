"""A slow, obvious bank: one deque per class, and the penalties of batch and deque together."""

from collections import deque
from dataclasses import dataclass

import torch
from oracles import slots, surrogates
from torch import Tensor

from splitveil.surrogates.base import ClassBank
from splitveil.surrogates.gated_attention import GatedAttentionCEM
from splitveil.surrogates.rate import Rate
from splitveil.surrogates.slot_cross import SlotCrossAttentionCEM

Module = Rate | GatedAttentionCEM | SlotCrossAttentionCEM


class SlowBank:
    """The last `capacity` finite samples of each class, oldest first."""

    def __init__(self, num_classes: int, capacity: int) -> None:
        self.kept: list[deque[Tensor]] = [deque(maxlen=capacity) for _ in range(num_classes)]

    def push(self, z: Tensor, y: Tensor) -> None:
        for row, label in zip(z.detach(), y.tolist(), strict=True):
            if bool(torch.isfinite(row).all()):
                self.kept[label].append(row.clone())

    def rows(self) -> list[list[list[float]]]:
        return [[row.tolist() for row in kept] for kept in self.kept]


def stored(bank: ClassBank | None) -> list[list[list[float]]]:
    """Rows of each class of a real bank, oldest first."""
    assert bank is not None
    found = []
    for rows, held, head in zip(bank.rows, bank.held.tolist(), bank.head.tolist(), strict=True):
        turned = rows.roll(-head, 0) if held == len(rows) else rows[:held]
        found.append(turned.tolist())
    return found


@dataclass(frozen=True)
class OneClass:
    """Penalty R_c of batch ∪ bank, the log line of its batch samples, and its sample size."""

    penalty: Tensor
    intra: Tensor
    sample_size: Tensor


def _full(members: Tensor, sigma: float) -> Tensor:
    centred = members - members.mean(0)
    cov = centred.T @ centred / len(members)
    eye = torch.eye(len(cov), dtype=cov.dtype)
    return 0.5 * torch.logdet(eye + cov / sigma**2) / len(cov)


def _slots(module: SlotCrossAttentionCEM, members: Tensor, m: int, p: float) -> OneClass:
    fed = torch.stack([slots.layernorm(row) for row in members])
    if module.project is not None:
        fed = module.project(fed)
    found = slots.slots_of_class(module.slots, fed, module.slots.eval_noise)
    enriched = [slots.cross(module, row, found) for row in fed]
    resp = slots.responsibilities(module, enriched, found)
    x = list(members) if module.statistic == "raw" else enriched
    stacked, r = torch.stack(x), torch.stack(resp)
    intra = ((stacked[:m] - stacked.mean(0)) ** 2).mean()
    mass = r.sum(0)
    size = (mass / len(x) * mass**2 / (len(x) * (r**2).sum(0))).sum()
    return OneClass(slots.class_loss(module, x, resp, p), intra, size)


def one_class(module: Module, members: Tensor, m: int, p: float) -> OneClass:
    """The first m members are the batch's."""
    if isinstance(module, SlotCrossAttentionCEM):
        return _slots(module, members, m, p)
    n = len(members)
    alpha = torch.full((n,), 1 / n, dtype=members.dtype)
    if isinstance(module, Rate):
        intra = ((members[:m] - members.mean(0)) ** 2).mean()
        diagonal = surrogates.rate_of_class(members, alpha, module.noise_std)
        full = module.covariance == "full"
        penalty = _full(members, module.noise_std) if full else diagonal
        return OneClass(penalty, intra, torch.ones_like(intra))
    fed = surrogates.layernorm(members) if module.attention_norm else members
    x = surrogates.layernorm(members) if module.statistic == "layernorm" else members
    if module.attention != "uniform":
        alpha = surrogates.pooling(module, fed)
    mu = (alpha[:, None] * x).sum(0)
    var = (alpha[:, None] * (x - mu) ** 2).sum(0)
    penalty = surrogates._penalty(module, mu, var, p)
    return OneClass(penalty, ((x[:m] - mu) ** 2).mean(), 1 / (n * (alpha**2).sum()))


def gradients(module: Module, loss: Tensor, z: Tensor) -> dict[str, Tensor]:
    """By name; what a variant does not use has gradient 0."""
    leaves = {"z": z, **dict(module.named_parameters())}
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if g is None else g
        for (name, leaf), g in zip(leaves.items(), found, strict=True)
    }


@dataclass(frozen=True)
class Measured:
    """Loss, gradients by name (z and every parameter) and detached log lines."""

    loss: Tensor
    grads: dict[str, Tensor]
    lines: dict[str, Tensor]


def measure(module: Module, bank: SlowBank, z: Tensor, y: Tensor) -> Measured:
    """Class by class: p_c from the batch, statistics from both, gradient of z times (M + N)/M."""
    loss = z.sum() * 0
    true, intra = torch.zeros_like(loss), torch.zeros_like(loss)
    gain = torch.ones(len(z), 1, dtype=z.dtype)
    sizes, rows = [], []
    for c, kept in enumerate(bank.kept):
        own = z[y == c]
        m, total = len(own), len(own) + len(kept)
        if m == 0 or total < 2:
            continue
        members, p = torch.cat([own, *(row[None] for row in kept)]), m / len(z)
        found = one_class(module, members, m, p)
        loss = loss + p * found.penalty
        uniform = torch.full((total,), 1 / total, dtype=z.dtype)
        true = true + p * surrogates.rate_of_class(members, uniform, module.noise_std)
        intra = intra + p * found.intra
        gain[y == c] = total / m
        sizes.append(found.sample_size)
        rows.append(float(len(kept)))
    grads = gradients(module, loss, z)
    grads["z"] = grads["z"] * gain
    zero = torch.zeros((), dtype=z.dtype)
    lines = {
        "intra_mse": intra.detach(),
        "true_rate": true.detach(),
        "bank_rows": torch.tensor(sum(rows) / max(len(rows), 1), dtype=z.dtype),
        "effective_sample_size": torch.stack(sizes).mean().detach() if sizes else zero,
    }
    return Measured(loss.detach(), grads, lines)
