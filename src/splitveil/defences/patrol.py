"""PATROL: the decoder of `arl` as adversary, and a client that is pruned late in the run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from splitveil.defences.arl import DecodingAdversary
from splitveil.defences.base import NoiseOnly, NonNegative, Positive, Shape, TrainedBeside
from splitveil.errors import Range
from splitveil.nets.split import SplitModel

MEMORY = 0.9  # share of the running importance that each step keeps


def filter_importance(weight: Tensor, gradient: Tensor) -> Tensor:
    r"""First-order change of the loss if a filter were zeroed, one value per filter.

    .. math:: I_f = \Big| \sum_{w \in f} w\, \partial L / \partial w \Big|

    `weight` and `gradient` are (filters, …).

    >>> filter_importance(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -1.0]])).tolist()
    [1.0]
    """
    return (weight * gradient).flatten(1).sum(1).abs()


def kept_filters(importance: Tensor, share: float) -> Tensor:
    """Mask (f,): 0 for the ⌊share · f⌋ least important filters, else 1; no host sync.

    >>> kept_filters(torch.tensor([0.3, 0.1, 0.2]), 0.34).tolist()
    [1.0, 0.0, 1.0]
    """
    least = importance.argsort(stable=True)[: int(share * len(importance))]
    return torch.ones_like(importance).index_fill(0, least, 0.0)


class PruningAdversary(nn.Module):
    """`arl`'s decoder, and filters of the client that become zero late in the run.

    Until the share `prune_at` of the run is done, `after_step` keeps a running importance of each
    convolution's filters. From then on it sets the share `prune` of each layer's filters, rounded
    down, to zero after every step.
    """

    def __init__(
        self,
        adversary: DecodingAdversary,
        layers: Sequence[nn.Conv2d],
        *,
        prune: float,
        prune_at: float,
    ) -> None:
        super().__init__()
        self.adversary, self.lr = adversary, adversary.lr
        self.prune, self.prune_at = prune, prune_at
        self._layers = tuple(layers)  # a tuple, so that their parameters stay the model's alone
        self._kept: list[Tensor] = []
        for index, layer in enumerate(self._layers):
            self.register_buffer(f"importance{index}", torch.zeros(layer.out_channels))

    def own_loss(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The decoder's own loss."""
        return self.adversary.own_loss(z, x, y)

    def penalty(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """L_enc, as in `arl`."""
        return self.adversary.penalty(z, x, y)

    @torch.no_grad()
    def after_step(self, done: float) -> None:
        """Update the importances, or prune; `done` is the finished share of the run. No sync."""
        if done < self.prune_at:
            for layer, importance in zip(self._layers, self.importances(), strict=True):
                if layer.weight.grad is not None:
                    seen = filter_importance(layer.weight, layer.weight.grad)
                    importance.lerp_(seen.to(importance.dtype), 1 - MEMORY)
            return
        # The importances no longer change, so a resumed run prunes the same filters.
        self._kept = self._kept or [kept_filters(v, self.prune) for v in self.importances()]
        for layer, kept in zip(self._layers, self._kept, strict=True):
            layer.weight.mul_(kept[:, None, None, None])
            if layer.bias is not None:
                layer.bias.mul_(kept)

    def importances(self) -> list[Tensor]:
        """Running importance of each layer's filters."""
        return [self.get_buffer(f"importance{index}") for index in range(len(self._layers))]


@dataclass(frozen=True, kw_only=True)
class Patrol(NoiseOnly):
    """Noise on the wire, a decoder as adversary and a pruned client: after PATROL (WACV 2024).

    Args:
        patrol_strength: α ≥ 0 of the adversary; 0 switches pruning off too: training with noise
            alone.
        patrol_threshold: SSIM in [−1, 1] that costs nothing.
        patrol_lr: Adam's rate for the decoder, > 0.
        patrol_prune: Share of each convolution's filters to remove, in [0, 1): those whose removal
            changes the loss least.
        patrol_prune_at: Share of the run, in (0, 1], after which they are removed.
    """

    patrol_strength: NonNegative = 0.3
    patrol_threshold: Annotated[float, Range(-1, 1)] = 0.5
    patrol_lr: Positive = 1e-3
    patrol_prune: Annotated[float, Range(0, 1, below=True)] = 0.05
    patrol_prune_at: Annotated[float, Range(0, 1, above=True)] = 0.75

    def companion(self, model: SplitModel, image_shape: Shape, num_classes: int) -> TrainedBeside:
        """Decoder and pruner; none at strength 0."""
        if self.patrol_strength == 0:
            return None
        adversary = DecodingAdversary(
            model.wire_shape(image_shape),
            image_shape,
            strength=self.patrol_strength,
            threshold=self.patrol_threshold,
            lr=self.patrol_lr,
        )
        layers = [m for m in model.encoder.modules() if isinstance(m, nn.Conv2d)]
        return PruningAdversary(
            adversary, layers, prune=self.patrol_prune, prune_at=self.patrol_prune_at
        )
