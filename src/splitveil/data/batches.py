"""The order in which an epoch sees the images."""

import torch
from jaxtyping import Int64
from torch import Tensor

from splitveil.rng import stream


def epoch_order(
    n: int, epoch: int, seed: int, device: torch.device | str = "cpu"
) -> Int64[Tensor, " n"]:
    """A permutation (n,) that depends on seed and epoch only, so a resumed run repeats it.

    Drawn on the CPU, then moved: the same order on any device.

    >>> epoch_order(5, epoch=0, seed=0).sort().values.tolist()
    [0, 1, 2, 3, 4]
    """
    return torch.randperm(n, generator=stream(seed, f"order/{epoch}")).to(device)
