"""One backward pass for two losses with two destinations."""

from dataclasses import dataclass

import torch
from torch import Tensor

from splitveil.gradient import scale_gradient
from splitveil.train.schedule import Weights
from splitveil.types import Surrogate, SurrogateOutput


@dataclass(frozen=True)
class Guard:
    """Counters on the device, read at the logging cadence: a broken penalty is never silent.

    `loss` counts steps whose rob was not finite, `gradient` those whose gradient at z was not.
    """

    loss: Tensor
    gradient: Tensor

    @classmethod
    def on(cls, device: torch.device | str) -> "Guard":
        """Both at zero."""
        zero = torch.zeros((), dtype=torch.long, device=device)
        return cls(zero, zero.clone())


def compose_losses(
    task_loss: Tensor,
    z: Tensor,
    y: Tensor,
    surrogate: Surrogate,
    *,
    weights: Weights,
    guard: Guard,
) -> tuple[Tensor, SurrogateOutput]:
    r"""Total loss whose single backward pass sends every gradient where it belongs.

    .. math:: L = L_{CE} + s \cdot \mathrm{rob}(\mathrm{scale\_gradient}(z, k)), \quad
        \nabla_{enc} = \nabla L_{CE} + k s \nabla \mathrm{rob}, \quad
        \nabla_{att} = s \nabla \mathrm{rob}, \quad \nabla_{head} = \nabla L_{CE}

    A rob that is not finite counts as 0, and so does its gradient: L_CE's survives exactly.
    """
    out = surrogate(scale_gradient(z, weights.encoder, guard.gradient), y)
    finite = torch.isfinite(out.loss.detach())
    guard.loss.add_(~finite)
    rob = torch.where(finite, out.loss, torch.zeros_like(out.loss))
    return task_loss + weights.scale * rob, out
