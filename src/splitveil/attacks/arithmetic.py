"""The arithmetic attack: which of some known images was sent, if not every number can be sent?

Noise that is rounded to floats, scaled and added reaches only some floats from a given z. Of the
listed images, those from whose z the channel cannot reach what was sent are excluded; the nearest
of the others is the answer. Noise on a grid excludes nothing that distance does not.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from splitveil.errors import Range, check_ranges
from splitveil.grid import STEPS, cell_ends
from splitveil.threat import Access

MOST = len(cell_ends("gaussian")) // 2  # steps that noise on a grid can move
PAIRS = 1 << 20  # pairs of a sending and an image that are looked at together

Model = Literal["float32", "grid"]
Reaches = Callable[[Tensor, Tensor, float], Tensor]


def reaches_by_floats(sent: Tensor, z: Tensor, std: float) -> Tensor:
    """Whether z + σ·n in float32 gives what was sent for some float32 n, number by number.

    >>> z = torch.tensor([0.7, 0.7])
    >>> sent = z + 0.5 * torch.tensor([-1.3, -1.3])
    >>> sent[1] = sent[1].nextafter(torch.tensor(1.0))
    >>> reaches_by_floats(sent, z, 0.5).tolist()
    [True, False]
    """
    scale = torch.full((), std, dtype=torch.float32, device=z.device)
    near = ((sent.double() - z.double()) / scale.double()).float()
    tried = (
        near,
        torch.nextafter(near, torch.full_like(near, torch.inf)),
        torch.nextafter(near, torch.full_like(near, -torch.inf)),
    )
    return torch.stack([z + scale * n == sent for n in tried]).any(0)


def reaches_by_grid(sent: Tensor, z: Tensor, std: float) -> Tensor:
    """Whether noise on the grid takes z to what was sent, number by number."""
    step = torch.full((), std, dtype=torch.float32, device=z.device).double() / STEPS
    n = (sent.double() / step).round()
    moved = n - (z.double() / step).round()
    return ((n * step).float() == sent) & (moved.abs() <= MOST)


MODELS: Mapping[Model, Reaches] = {"grid": reaches_by_grid, "float32": reaches_by_floats}


def model_of(sent: Float[Tensor, "n d"], z: Float[Tensor, "n d"], std: float) -> Model | None:
    """The arithmetic that explains every number of the attacker's own sendings; None if none does.

    Args:
        sent: What the client sent for the attacker's images.
        z: Their z before the noise.
        std: Standard deviation σ of the noise.
    """
    fits = (name for name, reaches in MODELS.items() if bool(reaches(sent, z, std).all()))
    return next(fits, None)


def excluded(
    sent: Float[Tensor, "n d"], z: Float[Tensor, "m d"], std: float, model: Model | None
) -> Bool[Tensor, "n m"]:
    """Which listed images (columns) cannot have been sent (rows).

    Args:
        sent: What was sent.
        z: The listed images' z before the noise.
        std: Standard deviation σ of the noise.
        model: The channel's arithmetic; None excludes nothing.
    """
    out = torch.zeros(len(sent), len(z), dtype=torch.bool, device=sent.device)
    if model is None:
        return out
    rows, columns = (~out).nonzero(as_tuple=True)
    for j in range(sent.shape[1]):  # pairs that are excluded need no further look
        some = zip(torch.split(rows, PAIRS), torch.split(columns, PAIRS), strict=True)
        kept = [MODELS[model](sent[r, j], z[c, j], std) for r, c in some]
        possible = torch.cat(kept) if kept else torch.zeros_like(rows, dtype=torch.bool)
        out[rows[~possible], columns[~possible]] = True
        rows, columns = rows[possible], columns[possible]
    return out


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """Names the nearest listed image from whose z the channel can reach what was sent.

    The channel's arithmetic is found on own sendings of `tried` aux images; if none explains them,
    or no listed image is left, distance alone decides. At most `limit` images are sent and listed.
    """

    access: Access = Access.WHITE_BOX
    tried: Annotated[int, Range(1)] = 256
    limit: int | None = 1000

    def __post_init__(self) -> None:
        check_ranges(self)

    def name(
        self,
        sent: Float[Tensor, "n d"],
        z: Float[Tensor, "m d"],
        std: float,
        model: Model | None,
    ) -> tuple[Tensor, Tensor, Bool[Tensor, "n m"]]:
        """The answers (n,) with arithmetic and by distance alone, and what arithmetic excludes."""
        distance = torch.cdist(sent.double(), z.double())
        out = excluded(sent, z, std, model)
        usable = out & ~out.all(1, keepdim=True)
        return distance.masked_fill(usable, torch.inf).argmin(1), distance.argmin(1), out
