"""One backward pass for two losses with two destinations."""

from dataclasses import dataclass

import torch
from torch import Tensor

from splitveil.errors import ConfigError
from splitveil.gradient import scale_gradient
from splitveil.train.schedule import Weights
from splitveil.types import Surrogate, SurrogateOutput

LOW_RATIO = 0.5


@dataclass(frozen=True)
class Guard:
    """Counters on the device, read at the logging cadence: a broken penalty is never silent.

    `loss` counts steps whose rob was not finite, `gradient` those whose gradient at z was not,
    `low` the steps in a row in which the surrogate reported less than half of the true rate.
    """

    loss: Tensor
    gradient: Tensor
    low: Tensor

    @classmethod
    def on(cls, device: torch.device | str) -> "Guard":
        """All at zero."""
        zero = torch.zeros((), dtype=torch.long, device=device)
        return cls(zero, zero.clone(), zero.clone())

    def watch(self, ratio: Tensor) -> None:
        """Count another step with a low surrogate-to-true ratio, or start anew."""
        self.low.copy_(torch.where(ratio < LOW_RATIO, self.low + 1, 0))


def penalty(
    z: Tensor, y: Tensor, surrogate: Surrogate, *, weights: Weights, guard: Guard
) -> tuple[Tensor, SurrogateOutput]:
    """scale·rob of smashed data z, whose gradient reaches z `weights.encoder` times as large.

    A rob that is not finite counts as 0, and so does its gradient.
    """
    out = _sound(surrogate(scale_gradient(z, weights.encoder, guard.gradient), y))
    if z.requires_grad and not out.loss.requires_grad and _says_something(out.loss):
        raise ConfigError(
            "a surrogate's loss must have a gradient, got one that the encoder cannot follow; "
            "compute it from z without detach, no_grad or numpy"
        )
    finite = torch.isfinite(out.loss.detach())
    guard.loss.add_(~finite)
    if "surrogate_to_true" in out.diagnostics:
        guard.watch(out.diagnostics["surrogate_to_true"])
    rob = torch.where(finite, out.loss, torch.zeros_like(out.loss))
    return weights.scale * rob, out


def _sound(out: object) -> SurrogateOutput:
    """What a surrogate gave, where it is what one must give."""
    if not isinstance(out, SurrogateOutput):
        raise ConfigError(
            f"a surrogate must give a SurrogateOutput, got {type(out).__name__}; "
            "return SurrogateOutput(loss=…, intra_mse=…, diagnostics={})"
        )
    for name, value in {"loss": out.loss, "intra_mse": out.intra_mse, **out.diagnostics}.items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"a surrogate's {name} must be a tensor, got {type(value).__name__}; "
                "it stays on the device, so call neither float nor item"
            )
    if out.loss.ndim:
        raise ConfigError(
            f"a surrogate's loss must be one number, got shape {tuple(out.loss.shape)}; "
            "take its mean or its sum"
        )
    return out


def _says_something(loss: Tensor) -> bool:
    """Whether a loss without a gradient is more than the 0 of a surrogate that has nothing to say.

    What is not finite is counted as such. A step under capture was asked before, while it was warm.
    """
    if loss.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return bool(torch.isfinite(loss) & (loss != 0))


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

    Where rob or its gradient is not finite, L_CE's survives exactly.
    """
    rob, out = penalty(z, y, surrogate, weights=weights, guard=guard)
    return task_loss + rob, out
