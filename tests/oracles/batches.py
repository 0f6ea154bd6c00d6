"""Random batches from a generator of their own."""

import torch
from torch import Tensor


def draw(n: int, d: int, c: int, seed: int) -> tuple[Tensor, Tensor]:
    """Features (n, d) in float64 that want a gradient, and labels (n,) of c classes."""
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, d, generator=g, dtype=torch.float64, requires_grad=True)
    return z, torch.randint(c, (n,), generator=g)
