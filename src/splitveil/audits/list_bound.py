r"""The least mean squared error of any attacker on a list of images.

x is uniform over N listed images, and the density p(z̃ | x_i) of what is sent is known for each:

.. math:: p(i \mid \tilde z) \propto p(\tilde z \mid x_i), \qquad
    \hat x(\tilde z) = \sum_i p(i \mid \tilde z)\, x_i

Over index and noise no answer has a smaller mean error than this posterior mean. Where only some
images are sent, one that is not sent is any of those that are not, all equally likely.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from splitveil.audits.bounds import NoiseVar, whiten
from splitveil.errors import AuditError
from splitveil.rng import normal_like

CHUNK = 500
VACUOUS = 0.01  # of the list's variance: an error below it excludes nothing worth excluding
ONE_SIDED = 1.645  # standard deviations, 95 %
_STEPS = 60  # of a bisection in [0, 1]


@dataclass(frozen=True, kw_only=True)
class ListErrors:
    """What the posterior mean misses, image by image.

    Args:
        losses: Mean squared error per pixel of each image (n,), for one draw of the noise.
        likeliest: Largest posterior weight (n,); its mean is the best share of right guesses.
        variance: Error of the list's mean image: what is missed without z̃.
    """

    losses: Float[Tensor, " n"]
    likeliest: Float[Tensor, " n"]
    variance: float


def list_errors(
    z: Float[Tensor, "n d"],
    noise_var: NoiseVar | None,
    images: Float[Tensor, "n c h w"],
    asked: Bool[Tensor, " n"] | None,
    generator: Generator,
) -> ListErrors:
    """Send each image of a list once, and answer with the posterior mean.

    Args:
        z: Clean z of the listed images.
        noise_var: Variance of the Gaussian noise that follows, for all of z or one per number.
        images: The images, in [0, 1].
        asked: Which of them are sent; None: all.
        generator: Draws the noise.
    """
    rows = whiten(z, noise_var)
    x = images.flatten(1).double().to(rows.device)
    if float(x.min()) < 0 or float(x.max()) > 1:
        raise AuditError("no certificate: the listed images must lie in [0, 1]")
    sent = torch.ones_like(rows[:, 0], dtype=torch.bool) if asked is None else asked.to(rows.device)
    losses, likeliest = rows.new_zeros(len(rows)), rows.new_zeros(len(rows))
    if not bool(sent.all()):
        kept = x[~sent]
        losses[~sent] = (kept - kept.mean(0)).square().mean(1)
        likeliest[~sent] = 1 / len(kept)
    known, truth = rows[sent], x[sent]
    seen = known + normal_like(known, generator)
    found = []
    for part, own in zip(torch.split(seen, CHUNK), torch.split(truth, CHUNK), strict=True):
        # Exact weights in double precision: any rounding of them would only raise the error.
        weights = torch.softmax(-0.5 * torch.cdist(part, known).square(), 1)
        found.append(((own - weights @ truth).square().mean(1), weights.amax(1)))
    if found:
        losses[sent], likeliest[sent] = (torch.cat(each) for each in zip(*found, strict=True))
    variance = float((x - x.mean(0)).square().mean())
    return ListErrors(losses=losses, likeliest=likeliest, variance=variance)


def least_mean(mean: float, n: int, delta: float) -> float:
    r"""Lower 1 − δ limit of the mean of n independent values in [0, 1], from their observed mean.

    .. math:: \min \{\mu \le \bar v : \mathrm{kl}(\bar v \,\|\, \mu) \le \log(1/\delta) / n\}

    kl is that of two coins (Hoeffding 1963); the values need not be distributed alike.

    >>> round(least_mean(0.5, 100, 0.05), 4), least_mean(0.0, 100, 0.05)
    (0.3794, 0.0)
    """
    low, high, most = 0.0, mean, math.log(1 / delta) / n
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if _coins(mean, middle) > most:
            low = middle
        else:
            high = middle
    return low


def _coins(a: float, b: float) -> float:
    """Divergence of two coins, nats; infinite where b excludes what a allows."""
    total = 0.0
    for p, q in ((a, b), (1 - a, 1 - b)):
        if p > 0:
            total += math.inf if q <= 0 else p * math.log(p / q)
    return total
