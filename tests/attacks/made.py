"""Clients, attacks and images that white-box searches are tried on."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from splitveil.threat import Access, BlackBox, FittedAttack, Labelled


def generator(seed: int = 9) -> torch.Generator:  # not an image's seed: noise must be independent
    return torch.Generator().manual_seed(seed)


class Formula(nn.Module):
    """An encoder of (x), or a stage of a channel of (z, generator), given by a function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor | torch.Generator) -> Tensor:
        return self.function(*args)


def dropped(z: Tensor, stream: torch.Generator) -> Tensor:
    return 2 * z * (torch.rand(z.shape, generator=stream) < 0.5)


@dataclass(frozen=True)
class Guess:
    """An attack that answers with a function of z."""

    function: Callable[[Tensor], Tensor]
    access: Access = Access.BLACK_BOX

    def fit(self, victim: BlackBox, *_: object) -> FittedAttack:
        del victim
        return FittedAttack(lambda seen: self.function(seen.z))


def planted(n: int, seed: int) -> Labelled:
    """Images of three classes, each a plane of six dimensions among 8×8 pixels, hardly blurred."""
    stream = generator(0)
    means = 0.3 + 0.4 * torch.rand(3, 64, generator=stream)
    basis = 0.06 * torch.randn(64, 6, generator=stream)
    stream = generator(seed)
    labels = torch.randint(3, (n,), generator=stream)
    flat = means[labels] + torch.randn(n, 6, generator=stream) @ basis.T
    flat += 0.01 * torch.randn(n, 64, generator=stream)
    return Labelled(flat.clamp(0, 1).view(n, 1, 8, 8), labels)
