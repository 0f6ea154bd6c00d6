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

    The rounding of Σ, of precision ε, moves no eigenvalue of Σ/σ² by more than 4ε‖Σ‖/σ². Where that
    is below ½ it cannot undo positivity; what exceeds ½ is added to the diagonal.
    """
    scaled = cov.double() / noise_std**2
    moved = 4 * torch.finfo(cov.dtype).eps * scaled.detach().flatten(1).norm(dim=1)  # (j,)
    ridge = 1.0 + (moved - 0.5).clamp_min(0)
    eye = torch.eye(cov.shape[1], dtype=scaled.dtype, device=scaled.device)
    factor = torch.linalg.cholesky_ex(scaled + ridge[:, None, None] * eye).L
    return torch.log(factor.diagonal(dim1=1, dim2=2)).sum(1).to(cov)
