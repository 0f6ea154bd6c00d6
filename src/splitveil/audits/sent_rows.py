"""Which images the rows of a capture are of, where a client sends only some, and whether it may."""

import copy
import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from splitveil.audits.noise_tests import ALPHA, Clean, expected
from splitveil.errors import AuditError
from splitveil.io import Json
from splitveil.nets.channel import deployed
from splitveil.threat import CHUNK

NEAR = 1e-4  # of sureness: nearer to the threshold ONNX and torch may decide otherwise
SILENT = 1e-3  # of z's size: the distance that counts where there is no noise
Costs = Float[Tensor, "m n"]


@dataclass(frozen=True, kw_only=True)
class SentRows:
    """The images of a capture's rows.

    Args:
        rows: For each row of the capture the place of its image among the n (m,), rising.
        allowed: How many of the images the exit rule sends.
        beyond: How many rows are surely of other images, or too many.
        images: How many images there are.
    """

    rows: Int64[Tensor, " m"]
    allowed: int
    beyond: int
    images: int

    def to_json(self) -> Json:
        """The part `rule` of what a record says of a capture."""
        return {
            "images": self.images, "allowed": self.allowed, "sent": len(self.rows),
            "not_allowed": self.beyond,
        }  # fmt: skip


@torch.no_grad()
def find_sent(
    encoder: Clean, channel: nn.Module, sent: Tensor, x: Tensor, *, asked: Tensor, allowed: Tensor
) -> SentRows:
    """Find the images of captured rows, which a client sent in the images' order.

    Args:
        encoder: From images to clean z.
        channel: What follows it on the client.
        sent: The captured rows (m, …).
        x: The images (n, c, h, w), which were classified in this order.
        asked: Which of them the exit rule sends, bool (n,).
        allowed: The same, and those so near to the threshold that rounding may decide, bool (n,).
    """
    m, n = len(sent), len(x)
    asked, allowed = asked.cpu(), allowed.cpu()
    if m > n:
        raise AuditError(
            f"the capture holds {m} rows for {n} images; it must hold each image once at most, in "
            "order: the run's scored ones, or those that --sent names"
        )
    cost = log_densities(encoder, channel, sent, x).neg()
    # A row counts as another image's only if that is surely likelier than each allowed one: under
    # a sound client the ratio of two densities exceeds c with a chance of at most 1/c.
    here = cost.masked_fill(~allowed, math.inf).amin(1)
    there = cost.masked_fill(allowed, math.inf).amin(1)
    surely = int((here - there > math.log(m * n / ALPHA)).sum())
    if m == n:
        rows = torch.arange(n)
    elif m == int(asked.sum()) and not surely:
        rows = asked.nonzero().flatten()
    else:
        rows = in_order(cost)
    beyond = max(surely, m - int(allowed.sum()), 0)
    return SentRows(rows=rows, allowed=int(asked.sum()), beyond=beyond, images=n)


def log_densities(encoder: Clean, channel: nn.Module, sent: Tensor, x: Tensor) -> Costs:
    """Log-density of each row (m,) under each image (n,), up to a constant.

    It is exact for Gaussian noise. For other channels it only ranks the images.
    """
    x = x.cpu()
    if isinstance(encoder, nn.Module):
        encoder = copy.deepcopy(encoder).cpu().eval()
    z = torch.cat([encoder(part) for part in torch.split(x, CHUNK)])
    mean, std = expected(deployed(channel).cpu().eval(), z)
    known = mean.flatten(1).double()
    size = SILENT * float(known.square().mean().sqrt()) + 1e-300
    scale = torch.as_tensor(1.0 if std is None else std, dtype=torch.float64)
    scale = scale.flatten().clamp_min(size)
    rows = sent.cpu().flatten(1).double()
    return -0.5 * torch.cdist(rows / scale, known / scale).square()


def in_order(cost: Costs) -> Int64[Tensor, " m"]:
    """The rising places (m,) of least total cost: rows and images keep their order.

    >>> in_order(torch.tensor([[1.0, 0.0, 5.0], [0.0, 9.0, 2.0]])).tolist()
    [1, 2]
    """
    m, n = cost.shape
    steps = cost.cpu().numpy()
    best = np.zeros(n + 1)  # cheapest way to place the rows so far among the first j images
    came = np.zeros((m, n), np.int32)  # where the cheapest place of row i among the first j + 1 is
    for i in range(m):
        ends = best[:-1] + steps[i]
        least = np.minimum.accumulate(ends)
        came[i] = np.maximum.accumulate(np.where(ends <= least, np.arange(n), 0))
        best = np.concatenate([[np.inf], least])
    places, j = np.zeros(m, np.int64), n
    for i in reversed(range(m)):
        j = int(came[i, j - 1])
        places[i] = j
    return torch.from_numpy(places)


def near_threshold(sure: Tensor, thresholds: Tensor) -> Bool[Tensor, " n"]:
    """Images so near to their threshold (n,) that rounding may decide whether they are sent."""
    return (sure - thresholds).abs() < NEAR
