"""Fisher information of smashed data: a diagnostic beside the certificates, never one of them."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from splitveil.audits.rates import NoiseVar, noise_variance
from splitveil.errors import AuditError

Clean = Callable[[Tensor, Generator | None], Tensor]

PROBES = 32


def dfil(
    clean: Clean,
    x: Float[Tensor, "n c h w"],
    noise_var: NoiseVar | None,
    *,
    generator: Generator,
    probes: int | None = PROBES,
) -> Float[Tensor, " n"]:
    r"""Fisher information of z̃ about each image, per pixel: a diagnostic, never a certificate.

    .. math:: \mathrm{tr}(J^\top D^{-1} J) / d_x = E_v \Vert J^\top D^{-1/2} v \Vert^2 / d_x

    It bounds unbiased attacks only, and every attack worth its name is biased. Exact with
    `probes=None`, one backward pass for each number of z; else Hutchinson's estimate with that
    many random signs v.
    """
    with torch.enable_grad():
        x = x.detach().clone().requires_grad_()
        z = clean(x, generator).flatten(1)
        if not z.requires_grad:
            raise AuditError("no gradient reaches the image: the encoder's Jacobian is hidden")
        scaled = z / noise_variance(noise_var, z.shape[1], z.device).sqrt().to(z.dtype)
        total = torch.zeros(len(x), dtype=torch.float64, device=z.device)
        for i in range(z.shape[1] if probes is None else probes):
            if probes is None:
                seed = torch.zeros_like(z)
                seed[:, i] = 1.0
            else:
                where = generator.device
                coin = torch.randint(2, z.shape, generator=generator, device=where)
                seed = (2 * coin - 1).to(z)
            (slope,) = torch.autograd.grad(scaled, x, seed, retain_graph=True)
            total += slope.flatten(1).double().square().sum(1).to(z.device)
    return total / x[0].numel() / (probes or 1)
