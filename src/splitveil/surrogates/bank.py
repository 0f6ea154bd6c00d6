"""The class memory bank: past smashed data of every class beside the batch's own.

Symbols: n samples, d features, c classes, k rows per class; M_c samples of the batch, N_c of the
bank.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from splitveil.errors import ConfigError
from splitveil.gradient import scale_gradient
from splitveil.surrogates.batch import ClassBatch, FirstCall, class_batch
from splitveil.surrogates.segments import class_count


class ClassBank(nn.Module):
    """The last `capacity` smashed data of each class, as one ring of rows per class.

    `held` says how many rows of a class are valid, `head` where its next one goes; all three are
    buffers, so a checkpoint keeps them. They take c·(k·d·4 + 16) bytes in float32.

    >>> bank = ClassBank(num_classes=2, capacity=2, feature_dim=1)
    >>> bank.push(torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.tensor([0, 1, 0, 0]))
    >>> bank.rows[0, :, 0].tolist(), bank.held.tolist(), bank.head.tolist()
    ([4.0, 3.0], [2, 1], [1, 1])
    """

    rows: Tensor
    held: Tensor
    head: Tensor

    def __init__(self, num_classes: int, capacity: int, feature_dim: int) -> None:
        super().__init__()
        sizes = {"num_classes": num_classes, "capacity": capacity, "feature_dim": feature_dim}
        for name, got in sizes.items():
            if got < 1:
                raise ConfigError(f"a bank's {name} must be at least 1, got {got}")
        self.register_buffer("rows", torch.zeros(num_classes, capacity, feature_dim))
        self.register_buffer("held", torch.zeros(num_classes, dtype=torch.long))
        self.register_buffer("head", torch.zeros(num_classes, dtype=torch.long))

    @torch.no_grad()
    def push(self, z: Float[Tensor, "n d"], y: Int[Tensor, " n"]) -> None:
        """Store the samples in their order, the oldest giving way; what is not finite is left out.

        Shapes and the number of operations depend on n alone and nothing is read by the host.
        Samples that meet at one position all carry the value of the last of them there, and a
        class without finite samples writes back what it held: the scatter has one outcome.
        """
        if len(y) == 0:
            return
        capacity = self.rows.shape[1]
        value = z.to(self.rows.dtype)
        bad = ~torch.isfinite(value).all(1)  # after the cast, which can overflow
        order = torch.argsort(2 * y + bad, stable=True)  # by class, its finite samples first
        kind = y[order]
        count = torch.zeros_like(self.held).scatter_add_(0, y, torch.ones_like(y))
        finite = torch.zeros_like(self.held).scatter_add_(0, y, (~bad).long())
        start = count.cumsum(0) - count  # (c,), where a class begins in `order`
        last = (finite[kind] - 1).clamp_min(0)
        rank = torch.minimum(torch.arange(len(y), device=y.device) - start[kind], last)
        position = (self.head[kind] + rank) % capacity
        winner = rank + (last - rank) // capacity * capacity  # the last one at this position
        source = value[order[start[kind] + winner]]  # (n, d)
        some = finite[kind] > 0
        self.rows[kind, position] = torch.where(some[:, None], source, self.rows[kind, position])
        self.head.copy_((self.head + finite) % capacity)
        self.held.copy_((self.held + finite).clamp_max(capacity))


def make_bank(num_classes: int, capacity: int, feature_dim: int) -> ClassBank | None:
    """A bank of `capacity` rows per class; None for 0."""
    if capacity < 0:
        raise ConfigError(
            f"bank must be a number of rows per class ≥ 0, got {capacity}; 0 means no bank"
        )
    return ClassBank(num_classes, capacity, feature_dim) if capacity else None


def remember(bank: ClassBank | None, z: Tensor, y: Tensor, first: FirstCall) -> None:
    """Put a batch z (n, …), y (n,) into the bank without measuring it."""
    if bank is not None:
        classes, _, width = bank.rows.shape
        batch = class_batch(z.detach(), y, width, classes, first)
        bank.push(batch.z, batch.y)


def join(
    batch: ClassBatch, bank: ClassBank | None, *, push: bool, skips: Tensor | None
) -> ClassBatch:
    r"""Batch ∪ bank: the batch's own rows, then k rows for each of p = min(n, c) classes.

    The classes are all c, or those in the batch, of which there are at most n. A row p + 1 takes
    what the bank does not hold yet and never counts. p_c = M_c/n is the batch's; a class counts
    with M_c ≥ 1 and M_c + N_c ≥ 2. The bank's rows get no gradient, the batch's get

    .. math:: \frac{M_c + N_c}{M_c} \, \partial L / \partial z_i

    or the weight of the penalty would fall with the length of the bank. `push` then stores the
    batch; the rows handed out are copies. Without a bank this is `batch.compact()`.
    """
    if bank is None:
        return batch.compact()
    size, y = len(batch.y), batch.y
    p = min(size, batch.num_classes)
    rows = torch.arange(p, device=y.device)
    chosen = rows
    if p < batch.num_classes:
        present = (batch.count > 0).to(torch.uint8)
        chosen = torch.argsort(present, descending=True, stable=True)[:p]
        y = torch.zeros_like(bank.held).scatter_(0, chosen, rows)[y]
    valid = torch.arange(bank.rows.shape[1], device=y.device) < bank.held[chosen][:, None]
    spare = torch.where(valid, rows[:, None], p).flatten()  # (p·k,)
    count, own = (class_count(v, p + 1, batch.z) for v in (torch.cat([y, spare]), y))
    gain = (count / own.clamp_min(1))[y][:, None]  # (n, 1)
    stored = bank.rows[chosen].to(batch.z.dtype).flatten(0, 1)
    joined = ClassBatch(
        z=torch.cat([scale_gradient(batch.z, gain, skips), stored]),
        y=torch.cat([y, spare]),
        count=count,
        share=own / max(size, 1),
        counted=((own >= 1) & (count >= 2)).to(count.dtype),  # noqa: PLR2004 - one has no spread
        own=size,
    )
    if push:
        bank.push(batch.z.detach(), batch.y)
    return joined
