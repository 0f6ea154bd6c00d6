"""Functions with a gradient: `scale_gradient`, SSIM, distance correlation, HSIC.

The measures of dependence switch autocast off and compute in float32 or float64. None of the
functions here makes the host wait for the device.
"""

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor

Context = Any  # autograd's context object: torch has no type for it that may carry attributes
Padding = Literal["reflect", "zeros", "none"]
SSIM_RADIUS = 5  # the window has 11×11 pixels
_SIGMA, _C1, _C2 = 1.5, 0.01**2, 0.03**2


def wide(z: Tensor) -> Tensor:
    """Samples (n, …) as rows (n, d) in float32 or better."""
    return z.flatten(1).to(torch.promote_types(z.dtype, torch.float32))


class _Distances(torch.autograd.Function):
    """`distances`, with a backward pass that needs (n, n) numbers where torch needs (n, n, d)."""

    @staticmethod
    def forward(ctx: Context, rows: Tensor) -> Tensor:
        found = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
        ctx.save_for_backward(rows, found)
        return found

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        rows, found = ctx.saved_tensors
        apart = found > 0
        pull = torch.where(apart, (grad + grad.mT) / torch.where(apart, found, 1.0), 0.0)
        with torch.autocast(rows.device.type, enabled=False):
            # Only differences of rows count. Without their mean they are smaller and round less.
            moved = rows - rows.mean(0)
            away: Tensor = pull.sum(1, keepdim=True) * moved - pull @ moved
        return away


def distances(rows: Tensor) -> Tensor:
    r"""Euclidean distances (n, n) of rows (n, d); the gradient at distance 0 is 0.

    .. math:: D_{ij} = \|z_i - z_j\|, \qquad
        \frac{\partial L}{\partial z_i} = \sum_j (G_{ij} + G_{ji}) \frac{z_i - z_j}{D_{ij}}

    They are computed from differences. The faster form ‖a‖² + ‖b‖² − 2ab would lose the distance of
    nearly equal rows to rounding.

    >>> distances(torch.tensor([[0.0, 0.0], [3.0, 4.0]]))[0].tolist()
    [0.0, 5.0]
    """
    return cast(Tensor, _Distances.apply(rows))  # type: ignore[no-untyped-call]


def centred(matrix: Tensor) -> Tensor:
    """H M H with H = I − 11ᵀ/n: a symmetric matrix (n, n) whose rows and columns have mean 0."""
    return matrix - matrix.mean(0) - matrix.mean(1, keepdim=True) + matrix.mean()


def _normal_size(rows: Tensor) -> Tensor:
    """Rows minus their mean, scaled to a root mean square of 1; equal rows become 0.

    The scale is detached: the gradient stays exact because the caller does not depend on scale.
    """
    moved = rows - rows.mean(0)
    size = moved.detach().abs().amax().clamp_min(torch.finfo(rows.dtype).tiny)
    moved = moved / size  # before squaring: squares of the raw values could underflow or overflow
    root = moved.detach().square().mean().sqrt()
    return moved / root.clamp_min(torch.finfo(rows.dtype).eps)


def distance_correlation(x: Tensor, z: Tensor) -> Tensor:
    r"""Distance correlation of samples x (n, …) and z (n, …), in [0, 1].

    .. math:: \mathrm{dCor}^2 = \frac{\langle A, B \rangle}{\|A\|\,\|B\|}, \qquad
        A = H\,(\|x_i - x_j\|)_{ij}\,H, \quad B = H\,(\|z_i - z_j\|)_{ij}\,H

    This is the biased (V-statistic) estimate of Székely, Rizzo and Bakirov (2007): for independent
    samples it exceeds 0 by O(n^{-1/2}). Scaling or shifting x or z does not change it. It is 0,
    with gradient 0, where x or z is constant.

    >>> x = torch.tensor([[0.0], [1.0], [2.0]])
    >>> round(float(distance_correlation(x, x.square())), 4)  # dCor² = 720/√(360 · 1656)
    0.9657
    """
    with torch.autocast(z.device.type, enabled=False):
        a, b = (centred(distances(_normal_size(wide(v)))) for v in (x, z))
        limit = torch.finfo(b.dtype).eps
        norms = [m.square().sum() for m in (a, b)]
        # Both branches of `where` get a gradient, so the square roots never see a 0.
        real = (norms[0] > limit) & (norms[1] > limit)
        safe = [torch.where(real, v, torch.ones_like(v)) for v in norms]
        squared = (a * b).sum() / (safe[0].sqrt() * safe[1].sqrt())
        real = real & (squared > limit)
        root = torch.where(real, squared, torch.ones_like(squared)).sqrt()
        return torch.where(real, root, torch.zeros_like(root))


def gaussian_kernel(z: Tensor, bandwidth: float) -> Tensor:
    r"""Gaussian kernel matrix (n, n) of samples z (n, …), in float32 or float64.

    .. math:: K_{ij} = \exp(-\|z_i - z_j\|^2 / (2 h^2 d))

    Dividing by d, the number of features, lets one bandwidth h serve every width of z.

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


def normalised_hsic(k: Tensor, m: Tensor, ridge: float = 1e-5) -> Tensor:
    r"""Normalised Hilbert-Schmidt independence criterion of two kernel matrices (n, n).

    .. math:: \mathrm{nHSIC} = \mathrm{tr}(\tilde K \tilde M), \qquad
        \tilde K = HKH\,(HKH + \varepsilon n I)^{-1}

    It counts the directions that both kernels share, whatever their scales: from 0 to below n − 1.
    ε is `ridge`. It factors in float64, because HKH has eigenvalues far below the resolution of
    float32.

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


def all_finite(x: Tensor) -> Tensor:
    """Whether every entry is finite, as a 0-d tensor on the device of x.

    One sum answers it: NaN and infinity survive a sum, and float32 numbers cannot overflow float64.

    >>> all_finite(torch.tensor([3e38, 3e38])), all_finite(torch.tensor([torch.inf, -torch.inf]))
    (tensor(True), tensor(False))
    """
    return torch.isfinite(x.sum(dtype=torch.float64))


class _Guarded(torch.autograd.Function):
    """Identity forward; backward multiplies by `factor`, or gives 0 if anything is not finite."""

    @staticmethod
    def forward(
        ctx: Context, factor: float | Tensor, skips: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.factor, ctx.skips = factor, skips
        ctx.set_materialize_grads(False)
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        known = [g for g in grads if g is not None]
        if not known:
            return None, None, *grads
        # One tensor keeps its memory layout; several share one check, a few kernels in all.
        joined = known[0] if len(known) == 1 else torch.cat([g.flatten() for g in known])
        scaled = joined * ctx.factor
        finite = all_finite(scaled)
        if ctx.skips is not None:
            ctx.skips.add_(~finite)  # stays on the device; read when the step is logged
        kept = torch.where(finite, scaled, 0.0)
        sizes = [g.numel() for g in known]
        parts = iter([kept] if len(known) == 1 else torch.split(kept, sizes))
        return None, None, *[None if g is None else next(parts).view_as(g) for g in grads]


def scale_gradient(x: Tensor, factor: float | Tensor, skips: Tensor | None = None) -> Tensor:
    r"""Identity in the forward pass; the backward pass multiplies the gradient by `factor`.

    .. math:: y = x, \qquad \partial L/\partial x = k\, \partial L/\partial y

    With k = λ·w_lr in front of a surrogate, one backward pass of ``L_CE + scale·rob`` gives the
    encoder ``∇L_CE + k·scale·∇rob``. With k = −1 in front of a weight, that weight ascends.

    Args:
        x: Any floating-point tensor, for example the smashed data (n, …).
        factor: k, any finite number; a 0-d tensor where it changes between replays of a CUDA graph;
            or a tensor that broadcasts to x, for a factor of each row.
        skips: A 0-d integer tensor on the device of x, or None. It counts the backward passes whose
            gradient was not finite.

    Returns:
        A view of x. Its gradient becomes exactly 0 if any entry of it is not finite, so that a
        broken penalty never harms the gradient of the task.

    >>> x = torch.tensor(2.0, requires_grad=True)
    >>> (scale_gradient(x, 0.5) ** 2).backward()
    >>> x.grad
    tensor(2.)
    """
    return guard_together([x], factor, skips)[0]


def guard_together(
    tensors: Sequence[Tensor], factor: float | Tensor, skips: Tensor | None = None
) -> tuple[Tensor, ...]:
    """`scale_gradient` of many tensors with one check: if one gradient is not finite, all are 0.

    `skips` then counts one.

    >>> a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    >>> x, y = guard_together([a, b], -1.0)
    >>> (x.sum() + 2 * y.sum()).backward()
    >>> a.grad.tolist(), b.grad.tolist()
    ([-1.0, -1.0], [-2.0, -2.0])
    """
    guarded = _Guarded.apply(factor, skips, *tensors)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, ...], guarded)


def window_matrix(size: int, like: Tensor, *, reflect: bool) -> Tensor:
    """SSIM's Gaussian blur along one side, as a matrix (size, size) that includes the border.

    Two matrix products cost less than an 11×11 convolution. They also avoid the TF32 rounding of
    convolutions on a GPU, which is larger than the variances of smooth images.
    """
    offsets = torch.arange(-SSIM_RADIUS, SSIM_RADIUS + 1, device=like.device)
    weights = torch.exp(-offsets.to(like.dtype).square() / (2 * _SIGMA**2))
    places = torch.arange(size, device=like.device)
    source = places[:, None] + offsets  # (size, 11)
    if reflect:
        source = (size - 1) - ((size - 1) - source.abs()).abs()
    hits = (source[..., None] == places).to(like.dtype)  # (size, 11, size); outside: none
    return (hits * (weights / weights.sum())[:, None]).sum(1)


def ssim(
    guess: Float[Tensor, "n c h w"],
    x: Float[Tensor, "n c h w"],
    padding: Padding = "reflect",
    *,
    per_image: bool = False,
) -> Tensor:
    r"""Structural similarity of images in [0, 1], with an 11×11 Gaussian window of σ 1.5.

    .. math:: \frac{(2\mu_x\mu_g + C_1)(2\sigma_{xg} + C_2)}
                   {(\mu_x^2 + \mu_g^2 + C_1)(\sigma_x^2 + \sigma_g^2 + C_2)}

    Args:
        guess: Reconstructions (n, c, h, w).
        x: Images (n, c, h, w).
        padding: The border: "reflect" as in torchmetrics, "zeros" as in CEM's code, or "none", the
            whole windows only, as in scikit-image. Images under 6 pixels cannot be reflected by the
            window's radius of 5; they get zeros. "none" needs 11 pixels.
        per_image: Whether to give one number for each image instead of their mean.

    Returns:
        The mean over all places, 0-d or (n,), at most 1; 1 for equal images.

    >>> flat = torch.full((1, 1, 8, 8), 0.5)
    >>> round(float(ssim(torch.zeros_like(flat), flat)), 4)
    0.0004
    """
    height, width = x.shape[2:]
    reflect = padding == "reflect" and min(height, width) > SSIM_RADIUS
    inner = slice(SSIM_RADIUS, -SSIM_RADIUS) if padding == "none" else slice(None)
    rows = window_matrix(height, x, reflect=reflect)[inner]
    columns = window_matrix(width, x, reflect=reflect)[inner]
    stacked = torch.stack((x, guess, x * x, guess * guess, x * guess))
    # The result is transposed, which a mean over places does not notice.
    mean_x, mean_g, xx, gg, xg = (stacked @ columns.T).mT @ rows.T
    var_x, var_g, covariance = xx - mean_x**2, gg - mean_g**2, xg - mean_x * mean_g
    luminance = (2 * mean_x * mean_g + _C1) / (mean_x**2 + mean_g**2 + _C1)
    contrast = (2 * covariance + _C2) / (var_x + var_g + _C2)
    similarity: Tensor = luminance * contrast
    return similarity.flatten(1).mean(1) if per_image else similarity.mean()
