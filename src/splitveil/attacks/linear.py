"""The linear attack, ridge regression z̃ → x: instant, and strong on weak encoders."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from splitveil.attacks.base import need_aux, progress_part, sent_aux, tenth, units_of
from splitveil.io import Progress, silent
from splitveil.threat import Access, BlackBox, Labelled, Observation, Reconstructor


def ridge(
    features: Tensor, targets: Tensor, penalties: Sequence[float]
) -> list[tuple[Tensor, Tensor]]:
    r"""Ridge solutions of targets ≈ features·W + b, in float64.

    .. math:: W = (X^\top X / n + \lambda \bar v I)^{-1} X^\top Y / n

    X and Y are centred; v̄ is the mean variance of a feature, so that a penalty λ is relative to the
    scale of the data.

    Args:
        features: Rows (n, d).
        targets: Rows (n, p).
        penalties: Values of λ.

    Returns:
        W (d, p) and b (p,) for each penalty.
    """
    x, y = features.double(), targets.double()
    x_mean, y_mean = x.mean(0), y.mean(0)
    x, y = x - x_mean, y - y_mean
    n, d = x.shape
    # One eigendecomposition serves all penalties: of XᵀX, or of the smaller XXᵀ where there are
    # fewer images than features, because W = Xᵀ(XXᵀ/n + λv̄I)⁻¹Y/n as well.
    values, vectors = torch.linalg.eigh((x.T @ x if n >= d else x @ x.T) / n)
    rotated = vectors.T @ ((x.T @ y if n >= d else y) / n)  # (d or n, p)
    scale = (values.sum() / d).clamp_min(1e-30)  # for constant features any scale will do
    solutions = []
    for penalty in penalties:
        weight = vectors @ (rotated / (values.clamp_min(0) + penalty * scale)[:, None])
        weight = weight if n >= d else x.T @ weight
        solutions.append((weight, y_mean - x_mean @ weight))
    return solutions


@dataclass(frozen=True, kw_only=True)
class Linear:
    """Closed-form ridge regression z̃ → x; the penalty is picked on a tenth of aux.

    Args:
        access: Sees what is sent, and can send the aux images.
        penalties: Values of λ ≥ 0 to choose from, relative to the mean variance of z̃.
        min_aux: Fewest aux images, ≥ 10.
        effort: Its share of the progress bar, > 0.

    >>> len(Linear().penalties)
    6
    """

    access: Access = Access.BLACK_BOX
    penalties: tuple[float, ...] = (1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
    min_aux: int = 10  # a tenth must hold an image
    effort: float = 2.0

    def fit(
        self, victim: BlackBox, aux: Labelled, generator: Generator, progress: Progress = silent
    ) -> Reconstructor:
        """Solve on nine tenths of aux, pick the penalty on the rest, solve on all."""
        need_aux("linear", aux, self.min_aux)
        total = len(aux) + 2  # two solutions follow the queries
        sent = sent_aux(victim, aux, generator, progress_part(progress, 0, total, "queries"))
        units = units_of(sent)
        z = units(sent)
        pixels = aux.images.flatten(1).to(z.device)
        held, used = tenth(len(z), generator, z.device)
        errors = [
            (z[held].double() @ w + b - pixels[held]).square().mean()
            for w, b in ridge(z[used], pixels[used], self.penalties)
        ]
        best = self.penalties[int(torch.stack(errors).argmin())]
        progress(total - 1, total, "penalty picked")
        weight, bias = (t.float() for t in ridge(z, pixels, (best,))[0])
        progress(total, total, "solved")
        shape = aux.images.shape[1:]

        def reconstruct(seen: Observation) -> Tensor:
            flat: Tensor = units(seen.z.flatten(1)) @ weight + bias
            return flat.clamp(0, 1).view(len(flat), *shape)

        return reconstruct
