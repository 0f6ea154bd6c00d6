"""`SlotCrossAttentionCEM` made ready for a test: open, in float64, off its defaults."""

from typing import Any

import torch
from torch import Tensor

from splitveil.surrogates.slot_cross import SlotCrossAttentionCEM

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
