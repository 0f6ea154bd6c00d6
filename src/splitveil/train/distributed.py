"""Several processes, one batch: what a rank takes and what it shares."""

from typing import cast

from lightning_fabric import Fabric
from torch import Tensor


def own_rows(rows: Tensor, fabric: Fabric) -> Tensor:
    """This rank's share of a batch's rows: every world_size-th one; all ranks get equally many."""
    world = fabric.world_size
    return rows[: len(rows) // world * world][fabric.global_rank :: world]


def global_batch(z: Tensor, y: Tensor, fabric: Fabric) -> tuple[Tensor, Tensor]:
    """Features and labels of all ranks, with gradients flowing back to their owners.

    Class statistics then are those of the whole batch on every rank. The gather's backward sums
    over ranks and DDP's averaging divides by their number, so nothing needs rescaling.
    """
    if fabric.world_size == 1:
        return z, y
    everywhere = cast(Tensor, fabric.all_gather(z, sync_grads=True))
    return everywhere.flatten(0, 1), gathered(y, fabric)


def gathered(data: Tensor, fabric: Fabric) -> Tensor:
    """Images or labels of all ranks."""
    if fabric.world_size == 1:
        return data
    return cast(Tensor, fabric.all_gather(data)).flatten(0, 1)
