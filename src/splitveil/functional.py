"""How much two sets of samples depend on each other: statistics with gradients.

Both are computed in float32 or better whatever the caller's autocast, without a host sync.
"""

from typing import Any, cast

import torch
from torch import Tensor


def wide(z: Tensor) -> Tensor:
    """Samples (n, …) as rows (n, d) in float32 or better."""
    return z.flatten(1).to(torch.promote_types(z.dtype, torch.float32))


class _Distances(torch.autograd.Function):
    """Differences forward, one matrix product backward: torch's own would hold n²·d numbers."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's context object has no public type
        rows: Tensor,
    ) -> Tensor:
        found = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
        ctx.save_for_backward(rows, found)
        return found

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 - autograd's context object has no public type
        grad: Tensor,
    ) -> Tensor:
        rows, found = ctx.saved_tensors
        apart = found > 0
        pull = torch.where(apart, (grad + grad.mT) / torch.where(apart, found, 1.0), 0.0)
        with torch.autocast(rows.device.type, enabled=False):
            moved = rows - rows.mean(0)  # only differences count, and these are small numbers
            away: Tensor = pull.sum(1, keepdim=True) * moved - pull @ moved
        return away


def distances(rows: Tensor) -> Tensor:
    r"""Euclidean distances (n, n) of rows (n, d); the gradient at distance 0 is 0.

    .. math:: D_{ij} = \|z_i - z_j\|, \qquad
        \frac{\partial L}{\partial z_i} = \sum_j (G_{ij} + G_{ji}) \frac{z_i - z_j}{D_{ij}}

    Never through a product of rows: of nearly equal ones it would leave rounding alone.

    >>> distances(torch.tensor([[0.0, 0.0], [3.0, 4.0]]))[0].tolist()
    [0.0, 5.0]
    """
    return cast(Tensor, _Distances.apply(rows))  # type: ignore[no-untyped-call]


def centred(matrix: Tensor) -> Tensor:
    """A symmetric matrix (n, n) with means of rows and columns taken out: H M H, H = I − 11ᵀ/n."""
    return matrix - matrix.mean(0) - matrix.mean(1, keepdim=True) + matrix.mean()


def _normal_size(rows: Tensor) -> Tensor:
    """Rows about their mean, scaled to a root mean square of 1; equal rows become 0.

    The scale is a constant to the gradient, which is exact for what does not depend on scale.
    """
    moved = rows - rows.mean(0)
    size = moved.detach().abs().amax().clamp_min(torch.finfo(rows.dtype).tiny)
    moved = moved / size  # first: squares of the raw values could vanish or overflow
    root = moved.detach().square().mean().sqrt()
    return moved / root.clamp_min(torch.finfo(rows.dtype).eps)


def distance_correlation(x: Tensor, z: Tensor) -> Tensor:
    r"""Distance correlation of samples x (n, …) and z (n, …), in [0, 1]; 0 where one is constant.

    .. math:: \mathrm{dCor}^2 = \frac{\langle A, B \rangle}{\|A\|\,\|B\|}, \qquad
        A = H\,(\|x_i - x_j\|)_{ij}\,H, \quad B = H\,(\|z_i - z_j\|)_{ij}\,H

    The biased (V-statistic) estimate of Székely, Rizzo and Bakirov (2007): of independent samples
    it is above 0 by O(n^{-1/2}). It does not change when x or z is scaled or shifted.

    >>> x = torch.tensor([[0.0], [1.0], [2.0]])
    >>> round(float(distance_correlation(x, x.square())), 4)  # dCor² = 720/√(360 · 1656)
    0.9657
    """
    with torch.autocast(z.device.type, enabled=False):
        a, b = (centred(distances(_normal_size(wide(v)))) for v in (x, z))
        limit = torch.finfo(b.dtype).eps
        norms = [m.square().sum() for m in (a, b)]
        real = (norms[0] > limit) & (norms[1] > limit)
        safe = [torch.where(real, v, torch.ones_like(v)) for v in norms]
        squared = (a * b).sum() / (safe[0].sqrt() * safe[1].sqrt())
        real = real & (squared > limit)
        root = torch.where(real, squared, torch.ones_like(squared)).sqrt()
        return torch.where(real, root, torch.zeros_like(root))


def gaussian_kernel(z: Tensor, bandwidth: float) -> Tensor:
    r"""Kernel matrix (n, n) of samples z (n, …), a float32 one at least.

    .. math:: K_{ij} = \exp(-\|z_i - z_j\|^2 / (2 h^2 d))

    d, the number of features, keeps the bandwidth h apart from the size of the wire.

    >>> gaussian_kernel(torch.tensor([[0.0, 0.0], [2.0, 0.0]]), 1.0)[0, 1]  # 1/e
    tensor(0.3679)
    """
    with torch.autocast(z.device.type, enabled=False):
        rows = wide(z)
        return torch.exp(-distances(rows).square() / (2 * bandwidth**2 * rows.shape[1]))


def label_kernel(y: Tensor, like: Tensor) -> Tensor:
    """Linear kernel (n, n) of one-hot labels y (n,): 1 for two samples of a class, else 0.

    >>> label_kernel(torch.tensor([0, 1, 0]), torch.zeros(()))[0]
    tensor([1., 0., 1.])
    """
    return (y[:, None] == y[None, :]).to(like.dtype)


def hsic(k: Tensor, m: Tensor) -> Tensor:
    r"""Hilbert-Schmidt independence criterion of two kernel matrices (n, n), biased estimate.

    .. math:: \mathrm{HSIC} = \frac{\mathrm{tr}(K H M H)}{(n - 1)^2}

    >>> round(float(hsic(torch.eye(3), torch.eye(3))), 6)  # tr H / 4
    0.5
    """
    with torch.autocast(k.device.type, enabled=False):
        return (centred(k) * m).sum() / max(len(k) - 1, 1) ** 2


def normalised_hsic(k: Tensor, m: Tensor, ridge: float = 1e-5) -> Tensor:
    r"""HSIC of two kernel matrices (n, n) after whitening each, from 0 to below n − 1.

    .. math:: \mathrm{nHSIC} = \mathrm{tr}(\tilde K \tilde M), \qquad
        \tilde K = HKH\,(HKH + \varepsilon n I)^{-1}

    Counts the shared directions, whatever the kernels' scales; factored in float64, as HKH has
    eigenvalues far below float32's resolution.

    >>> round(float(normalised_hsic(torch.eye(4), torch.eye(4), ridge=0.25)), 6)  # 3 · (1/2)²
    0.75
    """
    with torch.autocast(k.device.type, enabled=False):
        whitened = []
        for kernel in (k, m):
            inner = centred(kernel.double())
            eye = torch.eye(len(inner), dtype=inner.dtype, device=inner.device)
            factor = torch.linalg.cholesky_ex(inner + ridge * len(inner) * eye).L
            half = torch.linalg.solve_triangular(factor, inner, upper=False)
            whitened.append(torch.linalg.solve_triangular(factor.mT, half, upper=True))
        found: Tensor = (whitened[0] * whitened[1].mT).sum().to(k.dtype)
        return found
