"""What a cluster's variance costs: the published hinge, and the log-determinant of the paper."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

LINEAR_OFFSET = 0.001  # of the published variant without the logarithm


def hinge_penalty(
    var: Float[Tensor, " j"], threshold: float, gamma: float, *, log_entropy: bool = True
) -> Float[Tensor, " j"]:
    r"""ReLU(log(v + γ) − log(t + γ)) of each cluster, or v + .001 without `log_entropy`.

    >>> hinge_penalty(torch.tensor([0.0, 0.09]), 0.0, 0.01)  # log ten
    tensor([0.0000, 2.3026])
    """
    if not log_entropy:
        return var + LINEAR_OFFSET
    floor = threshold + gamma  # the clamp is the ReLU, without log(0) behind a zero gradient
    return torch.log((var + gamma).clamp_min(floor)) - math.log(floor)


def full_logdet(cov: Float[Tensor, "j d d"], noise_std: float) -> Float[Tensor, " j"]:
    r"""½ log|Σ_j + σ²I|/|σ²I|, nats, through Cholesky in float64.

    Adds 4ε·tr Σ/σ² to the diagonal, ε the precision of Σ: its rounding could undo positivity.
    """
    scaled = cov.double() / noise_std**2
    diagonal = scaled.detach().diagonal(dim1=1, dim2=2)  # (j, d)
    jitter = 4 * torch.finfo(cov.dtype).eps * diagonal.sum(1)
    ridge = torch.diag_embed((1.0 + jitter)[:, None].expand_as(diagonal))
    factor = torch.linalg.cholesky_ex(scaled + ridge).L
    return torch.log(factor.diagonal(dim1=1, dim2=2)).sum(1).to(cov)
