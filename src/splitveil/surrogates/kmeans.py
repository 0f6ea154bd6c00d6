"""K-means in all classes at once: seeding, Lloyd's steps, statistics, a sample fair to classes.

Segment operations: no Python loop over classes, no host sync on an accelerator. Symbols: n samples,
d features, c classes, k clusters per class; `valid` marks the clusters in use, because a class with
fewer than k distinct samples has fewer clusters.
"""

from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from splitveil.surrogates.base import Kinds, Rows, class_count, segment_sum

CHUNK_NUMBERS = 2**22  # numbers in a temporary; 16 MiB in float32

# Shapes, in the symbols above.
Centroids = Float[Tensor, "c k d"]
Valid = Bool[Tensor, "c k"]


def square_distances(z: Rows, y: Kinds, centroids: Centroids) -> Float[Tensor, "n k"]:
    """‖z_i − μ_ck‖² (n, k) to the centroids of the sample's own class."""
    # In chunks: all differences at once would take n·k·d numbers.
    rows = max(1, CHUNK_NUMBERS // centroids[0].numel())
    parts = zip(torch.split(z, rows), torch.split(y, rows), strict=True)
    return torch.cat([(a[:, None] - centroids[b]).square().sum(2) for a, b in parts])


@torch.no_grad()
def assign(z: Rows, y: Kinds, centroids: Centroids, valid: Valid) -> Kinds:
    """Index (n,) of the nearest valid centroid of the sample's class; 0 if the class has none.

    >>> centroids = torch.tensor([[[0.0], [1.0]], [[5.0], [9.0]]])
    >>> z, y = torch.tensor([[0.9], [6.0]]), torch.tensor([0, 1])
    >>> assign(z, y, centroids, torch.ones(2, 2, dtype=torch.bool))
    tensor([1, 0])
    """
    far = square_distances(z, y, centroids).masked_fill_(~valid[y], torch.inf)
    return far.argmin(1)


@torch.no_grad()
def lloyd_step(z: Rows, y: Kinds, centroids: Centroids, valid: Valid) -> tuple[Centroids, Kinds]:
    """New centroids (c, k, d) and the assignment (n,) whose means they are; empty ones stay."""
    classes, clusters = valid.shape
    nearest = assign(z, y, centroids, valid)
    cell = y * clusters + nearest
    count = class_count(cell, classes * clusters, z)[:, None]
    mean = segment_sum(z, cell, classes * clusters) / count.clamp_min(1)  # (c·k, d)
    moved = torch.where(count > 0, mean, centroids.flatten(0, 1))
    return moved.view_as(centroids), nearest


@torch.no_grad()
def lloyd(
    z: Rows, y: Kinds, centroids: Centroids, valid: Valid, max_iterations: int = 50
) -> Centroids:
    """Lloyd's algorithm from the given centroids; clusters keep their numbers.

    A class whose assignment repeats is frozen by a mask, because reading "all have converged" from
    an accelerator would stall it. On the CPU the loop then ends.
    """
    last = torch.full_like(y, -1)
    for _ in range(max_iterations):
        moved, nearest = lloyd_step(z, y, centroids, valid)
        moving = z.new_zeros(len(valid)).index_add_(0, y, (nearest != last).to(z)) > 0
        if z.device.type == "cpu" and not bool(moving.any()):
            break
        centroids = torch.where(moving[:, None, None], moved, centroids)
        last = nearest
    return centroids


@torch.no_grad()
def plus_plus(
    z: Rows, y: Kinds, num_classes: int, k: int, generator: Generator | None = None
) -> tuple[Centroids, Valid]:
    r"""K-means++ seeds (Arthur and Vassilvitskii 2007) of all classes: centroids (c, k, d), valid.

    .. math:: P(\text{next seed} = i) \propto D_i^2, \quad
        D_i = \text{distance to the nearest seed of the own class}

    The code published with CEM draws in proportion to D itself. A sample that equals a seed is
    never drawn; when no other is left, the class's remaining clusters are not valid.
    """
    # The smallest E_i/D_i² of a class, with E_i ~ Exp(1), is a draw with P ∝ D²: one pass draws
    # for all classes. The logarithm avoids dividing by D = 0.
    near, rows = z.new_ones(len(z)), torch.arange(len(z), device=z.device)
    seeds, valid = [], []
    where = z.device if generator is None else generator.device
    for pick in range(k):
        wait = torch.empty(len(z), device=where, dtype=z.dtype).exponential_(generator=generator)
        score = near.log() - wait.to(z.device).clamp_min(torch.finfo(z.dtype).tiny).log()
        top = z.new_full((num_classes,), -torch.inf).scatter_reduce(0, y, score, "amax")
        drawn = (score == top[y]) & (near > 0)
        first = torch.where(drawn, rows, len(z))
        index = y.new_full((num_classes,), len(z)).scatter_reduce(0, y, first, "amin")
        found = index < len(z)
        seed = torch.where(found[:, None], z[index.clamp_max(len(z) - 1)], 0.0)  # (c, d)
        far = square_distances(z, y, seed[:, None])[:, 0]
        near = far if pick == 0 else torch.minimum(near, torch.where(found[y], far, near))
        seeds.append(seed)
        valid.append(found)
    return torch.stack(seeds, 1), torch.stack(valid, 1)


def cell_covariance(centred: Rows, member: Float[Tensor, "j n"]) -> Float[Tensor, "j d d"]:
    """Σ_i member_ji x_i x_iᵀ for j clusters; needs j·n·d numbers besides the result.

    In float64, which neither autocast nor TF32 touches.
    """
    wide = centred.double()
    return (rearrange(member[:, :, None] * wide, "j n d -> j d n") @ wide).to(centred)


@dataclass(frozen=True)
class ClusterSums:
    """Sums about the centroids; those of two batches add up to those of their union."""

    count: Int[Tensor, "c k"]
    square: Float[Tensor, "c k d"]
    outer: Float[Tensor, "c k d d"] | None

    def __add__(self, other: "ClusterSums") -> "ClusterSums":
        pair = None if self.outer is None or other.outer is None else self.outer + other.outer
        return ClusterSums(self.count + other.count, self.square + other.square, pair)

    def statistics(self) -> "ClusterStatistics":
        """The sums divided by the counts; 0 for an empty cluster."""
        size = self.count.clamp_min(1)[..., None].to(self.square)  # (c, k, 1)
        total = self.count.sum(1)
        weight = self.count / total.clamp_min(1)[:, None].to(self.square)
        diagonal = self.square / size
        full = None if self.outer is None else self.outer / size[..., None]
        return ClusterStatistics(self.count, total, weight, diagonal.mean(2), diagonal, full)


@dataclass(frozen=True)
class ClusterStatistics:
    """What a refit stores: n_ck, N_c, w_ck = n_ck/N_c, V_ck and covariances.

    V_ck is the mean over samples and dimensions. Variances are about the centroid, which is the
    mean once k-means has converged.
    """

    count: Int[Tensor, "c k"]
    class_count: Int[Tensor, " c"]
    weight: Float[Tensor, "c k"]
    variance: Float[Tensor, "c k"]
    diagonal: Float[Tensor, "c k d"]
    full: Float[Tensor, "c k d d"] | None


@torch.no_grad()
def cluster_sums(
    z: Rows, y: Kinds, centroids: Centroids, valid: Valid, *, full: bool = False
) -> ClusterSums:
    """Counts, sums of squares and, if `full`, outer products of the samples about their centroids.

    Samples of a class without valid clusters are left out.
    """
    classes, clusters, width = shape = centroids.shape
    cells = classes * clusters
    cell = y * clusters + assign(z, y, centroids, valid)
    count = y.new_zeros(cells).index_add_(0, cell, torch.ones_like(cell))
    square = z.new_zeros(cells, width)
    outer = z.new_zeros(cells, width, width) if full else None
    rows = max(1, CHUNK_NUMBERS // (cells * width if full else width))
    for a, j in zip(torch.split(z, rows), torch.split(cell, rows), strict=True):
        centred = a - centroids.flatten(0, 1)[j]
        square.index_add_(0, j, centred.square())
        if outer is not None:
            member = torch.arange(cells, device=j.device)[:, None] == j
            outer += cell_covariance(centred, member.to(z))
    return ClusterSums(
        torch.where(valid, count.view(classes, clusters), 0),
        torch.where(valid[..., None], square.view(shape), 0.0),
        None if outer is None else outer.view(*shape, width),
    )


def fair_quota(seen: Int[Tensor, " c"], capacity: int) -> Int[Tensor, ""]:
    """Largest q with Σ_c min(N_c, q) ≤ capacity: q samples of each class fit, or all it has.

    >>> fair_quota(torch.tensor([1, 10, 10]), 9)
    tensor(4)
    """
    size = seen.sort().values
    before = size.cumsum(0) - size
    rest = torch.arange(len(size), 0, -1, device=size.device)  # classes with at least this size
    share = (capacity - before).div(rest, rounding_mode="floor")
    return torch.minimum(share.amax(), size[-1])


def drawn_rows(
    y: Kinds, num_classes: int, capacity: int, generator: Generator
) -> Bool[Tensor, " n"]:
    """Mask (n,) of at most `capacity` drawn samples, the same number from each class.

    A class with fewer samples keeps all of them.
    """
    count = torch.bincount(y, minlength=num_classes)
    shuffled = torch.randperm(len(y), generator=generator, device=generator.device).to(y.device)
    order = shuffled[y[shuffled].argsort(stable=True)]  # by class, in random order within it
    start = count.cumsum(0) - count
    rank = torch.arange(len(y), device=y.device) - start[y[order]]
    keep = torch.empty_like(y, dtype=torch.bool)
    keep[order] = rank < fair_quota(count, capacity)
    return keep
