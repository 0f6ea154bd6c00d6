"""The nearest known image: what a gallery and a distance on the wire already give away."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from splitveil.attacks.units import units_of
from splitveil.errors import AuditError, ConfigError
from splitveil.types import Access, BlackBox, Fitted, Labelled, Observation, Progress, silent

QUERIES = 1000  # images per query
MAX_DISTANCES = 2**24  # 64 MB of float32


def nearest_indices(
    z: Tensor, known: Tensor, neighbours: int, max_distances: int = MAX_DISTANCES
) -> Tensor:
    """Rows of `known` (m, d) nearest to each row of z (n, d), nearest first: (n, neighbours).

    Euclidean; of rows equally near the first counts. At most `max_distances` distances are held
    at a time.

    >>> nearest_indices(torch.tensor([[1.0]]), torch.tensor([[9.0], [2.0], [0.0]]), 2)
    tensor([[1, 2]])
    """
    rows = max(1, min(QUERIES, max_distances // len(known)))
    found = []
    for part in torch.split(z, rows):
        # Matrix products would be faster and round: ties would hang on the size of the part.
        distances = torch.cdist(part, known, compute_mode="donot_use_mm_for_euclid_dist")
        picks = []
        for _ in range(neighbours):
            picks.append(distances.argmin(1, keepdim=True))
            distances.scatter_(1, picks[-1], torch.inf)
        found.append(torch.cat(picks, 1))
    return torch.cat(found)


@dataclass(frozen=True, kw_only=True)
class Nearest:
    """Answers the mean of the `neighbours` aux images whose smashed data is nearest."""

    access: Access = Access.BLACK_BOX
    neighbours: int = 1
    min_aux: int = 1
    effort: float = 2.0

    def __post_init__(self) -> None:
        if self.neighbours < 1:
            raise ConfigError(f"neighbours must be at least 1, got {self.neighbours}")

    def fit(
        self, victim: BlackBox, aux: Labelled, generator: Generator, progress: Progress = silent
    ) -> Fitted:
        """Query every aux image once."""
        least = max(self.min_aux, self.neighbours)
        if len(aux) < least:
            raise AuditError(
                f"the nearest attack needs at least {least} aux image(s), got {len(aux)}"
            )
        send, rows = victim.sender(aux.images), torch.arange(len(aux), device=aux.images.device)
        parts = []
        for some in torch.split(rows, QUERIES):
            parts.append(send(some, generator).flatten(1))
            progress(sum(map(len, parts)), len(aux), "queries")
        sent, images = torch.cat(parts), aux.images.to(victim.device)
        if not bool(sent.isfinite().all()):
            raise AuditError("the victim sent values that are not finite for some aux images")
        units = units_of(sent)
        known = units(sent)

        def reconstruct(seen: Observation) -> Tensor:
            picked = nearest_indices(units(seen.z.flatten(1)), known, self.neighbours)
            return torch.cat([images[p].mean(1) for p in torch.split(picked, QUERIES)])

        return Fitted(reconstruct)
