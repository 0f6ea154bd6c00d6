"""Functions with a gradient: `scale_gradient`, SSIM, distance correlation, HSIC.

Measures of dependence are computed in float32 or better whatever the caller's autocast, without a
host sync.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from splitveil.cuda import tensor_cores


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


def all_finite(x: Tensor) -> Tensor:
    """Whether every entry is finite, as a 0-d tensor on x's device; one pass over x.

    NaN and infinity survive a sum, and finite float32 numbers cannot overflow one in float64.

    >>> all_finite(torch.tensor([3e38, 3e38])), all_finite(torch.tensor([torch.inf, -torch.inf]))
    (tensor(True), tensor(False))
    """
    return torch.isfinite(x.sum(dtype=torch.float64))


class _ScaleGradient(torch.autograd.Function):
    """Identity forward; backward multiplies by `factor`, or gives 0 where it is not finite."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's context object has no public type
        x: Tensor,
        factor: float | Tensor,
        skips: Tensor | None,
    ) -> Tensor:
        ctx.factor, ctx.skips = factor, skips
        return x.view_as(x)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 - autograd's context object has no public type
        grad: Tensor,
    ) -> tuple[Tensor, None, None]:
        scaled = grad * ctx.factor
        finite = all_finite(scaled)
        if ctx.skips is not None:
            ctx.skips.add_(~finite)  # stays on the device; read at the logging cadence
        return torch.where(finite, scaled, 0.0), None, None


def scale_gradient(x: Tensor, factor: float | Tensor, skips: Tensor | None = None) -> Tensor:
    r"""Identity in the forward pass; the gradient is multiplied by `factor` on its way back.

    .. math:: y = x, \qquad \partial L/\partial x = k\, \partial L/\partial y

    With k = λ·w_lr in front of a surrogate, one backward pass of ``L_CE + scale·rob`` gives the
    encoder ``∇L_CE + k·scale·∇rob``; with k = −1 in front of a weight, that weight ascends.
    A gradient that is not finite everywhere becomes exactly 0, and `skips` (a 0-d integer tensor)
    counts one: a broken penalty never harms the task's own gradient.

    >>> x = torch.tensor(2.0, requires_grad=True)
    >>> (scale_gradient(x, 0.5) ** 2).backward()
    >>> x.grad
    tensor(2.)
    """
    return cast(Tensor, _ScaleGradient.apply(x, factor, skips))  # type: ignore[no-untyped-call]


class _GuardTogether(torch.autograd.Function):
    """Identity of many tensors; backward looks at all their gradients in one go."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's context object has no public type
        factor: float,
        skips: Tensor | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.factor, ctx.skips = factor, skips
        ctx.set_materialize_grads(False)
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 - autograd's context object has no public type
        *grads: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        known = [g for g in grads if g is not None]
        if not known:
            return None, None, *grads
        flat = torch.cat([g.flatten() for g in known]) * ctx.factor
        finite = all_finite(flat)
        if ctx.skips is not None:
            ctx.skips.add_(~finite)
        kept = torch.where(finite, flat, 0.0)
        parts = iter(torch.split(kept, [g.numel() for g in known]))
        return None, None, *[None if g is None else next(parts).view_as(g) for g in grads]


def guard_together(
    tensors: Sequence[Tensor], factor: float, skips: Tensor | None = None
) -> tuple[Tensor, ...]:
    """`scale_gradient` of many tensors with one guard: if one gradient is not finite, all are 0.

    `skips` then counts one. On a GPU this takes a few kernels in all instead of a few for each.

    >>> a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    >>> x, y = guard_together([a, b], -1.0)
    >>> (x.sum() + 2 * y.sum()).backward()
    >>> a.grad.tolist(), b.grad.tolist()
    ([-1.0, -1.0], [-2.0, -2.0])
    """
    guarded = _GuardTogether.apply(factor, skips, *tensors)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, ...], guarded)


SSIM_RADIUS = 5
_SIGMA, _C1, _C2 = 1.5, 0.01**2, 0.03**2


def window_matrix(size: int, like: Tensor, *, reflect: bool) -> Tensor:
    """SSIM's Gaussian along one side as a matrix (size, size) that knows its border.

    A blur as two matrix products costs less than an 11×11 convolution, and is not rounded to
    TF32 as convolutions on a GPU are, which would drown the variances.
    """
    offsets = torch.arange(-SSIM_RADIUS, SSIM_RADIUS + 1, device=like.device)
    weights = torch.exp(-offsets.to(like.dtype).square() / (2 * _SIGMA**2))
    places = torch.arange(size, device=like.device)
    source = places[:, None] + offsets  # (size, 11)
    if reflect:
        source = (size - 1) - ((size - 1) - source.abs()).abs()
    hits = (source[..., None] == places).to(like.dtype)  # (size, 11, size); outside: none
    return (hits * (weights / weights.sum())[:, None]).sum(1)


def ssim_map(mean_x: Tensor, mean_g: Tensor, xx: Tensor, gg: Tensor, xg: Tensor) -> Tensor:
    r"""Structural similarity at each place, from blurred images x, g and blurred products.

    .. math:: \frac{(2\mu_x\mu_g + C_1)(2\sigma_{xg} + C_2)}
                   {(\mu_x^2 + \mu_g^2 + C_1)(\sigma_x^2 + \sigma_g^2 + C_2)}
    """
    var_x, var_g, covariance = xx - mean_x**2, gg - mean_g**2, xg - mean_x * mean_g
    luminance = (2 * mean_x * mean_g + _C1) / (mean_x**2 + mean_g**2 + _C1)
    contrast = (2 * covariance + _C2) / (var_x + var_g + _C2)
    return luminance * contrast


def ssim(guess: Tensor, x: Tensor) -> Tensor:
    """Structural similarity (`ssim_map`), mean over images (n, c, h, w) in [0, 1]; a loss.

    11×11 Gaussian window of σ 1.5, borders reflected as in torchmetrics; images under 6 pixels
    cannot be reflected that far and get a border of zeros.

    >>> flat = torch.full((1, 1, 8, 8), 0.5)
    >>> round(float(ssim(torch.zeros_like(flat), flat)), 4)
    0.0004
    """
    reflect = min(x.shape[2:]) > SSIM_RADIUS
    rows = window_matrix(x.shape[2], x, reflect=reflect)
    columns = window_matrix(x.shape[3], x, reflect=reflect)
    stacked = torch.stack((x, guess, x * x, guess * guess, x * guess))
    blurred = (stacked @ columns.T).mT @ rows.T  # turned, which a mean over places does not feel
    return ssim_map(*blurred).mean()


def ssim_per_image(x: Tensor, guess: Tensor, padding: int) -> Tensor:
    """Structural similarity (n,) of images (n, c, h, w) with a border of `padding` zeros.

    The window of `ssim` by a convolution; padding 0 takes whole windows alone.
    """
    offsets = torch.arange(-SSIM_RADIUS, SSIM_RADIUS + 1, dtype=x.dtype, device=x.device)
    line = torch.exp(-offsets.square() / (2 * _SIGMA**2))
    window = torch.outer(line, line) / line.sum().square()  # (11, 11), sums to 1
    channels = x.shape[1]
    kernel = window.expand(channels, 1, *window.shape)
    pictures = (x, guess, x * x, guess * guess, x * guess)
    blurred = (F.conv2d(image, kernel, padding=padding, groups=channels) for image in pictures)
    return ssim_map(*blurred).flatten(1).mean(1)


class _FastLinear(torch.autograd.Function):
    """A linear map whose products run on a GPU's tensor cores, in both directions."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's context object has no public type
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        with tensor_cores():
            return F.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401 - autograd's context object has no public type
        grad: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        with tensor_cores():
            return grad @ weight, grad.T @ x, grad.sum(0) if ctx.biased else None


class GuardedParameters(dict[str, Tensor]):
    """The parameters of a module by name, behind one guard, as a surrogate uses them.

    They receive `sign` times their gradient, or 0 if any of it is not finite. The sign flips at
    the parameters and nowhere else: with −1 they ascend the loss while the gradient towards the
    inputs is untouched.
    """

    def __init__(self, module: nn.Module, sign: float = 1.0, skips: Tensor | None = None) -> None:
        names, parameters = zip(*module.named_parameters(), strict=True)
        super().__init__(zip(names, guard_together(parameters, sign, skips), strict=True))

    def linear(self, name: str, x: Float[Tensor, "n i"]) -> Float[Tensor, "n o"]:
        """The module's linear layer `name` applied to x.

        On a GPU products are rounded to TF32, which attention can bear; statistics of z never come
        through here.
        """
        weight, bias = self[f"{name}.weight"], self.get(f"{name}.bias")
        make = _FastLinear.apply if x.is_cuda else F.linear
        made: Tensor = make(x, weight, bias)
        return made


def plain_layernorm(x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """LayerNorm over features, without affine parameters."""
    return F.layer_norm(x, x.shape[1:])
