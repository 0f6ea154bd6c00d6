"""Whose image is it? Errors that no attacker can go below, and what repeated sendings undo."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from splitveil.audits.rates import NoiseVar, Spectrum, whiten
from splitveil.errors import AuditError
from splitveil.rng import normal_like

PAIRED = 2000  # images; two million pairs
CHUNK = 1000
_ROUNDING = 1e-12  # relative; a rate that is exactly twice another must count as such


def identification_error(rate_nats: float, n: int) -> float:
    r"""Lower bound on the error of picking the right one of n equally likely images (Fano).

    .. math:: P_{err} \ge 1 - (I + \log 2) / \log n

    Refused as vacuous where it says nothing, I ≥ log n − log 2.

    >>> identification_error(0.0, 4), identification_error(math.log(2), 16)
    (0.5, 0.5)
    """
    if n <= 1:
        raise AuditError(f"identification needs at least 2 images, got {n}")
    if math.isnan(rate_nats) or rate_nats < 0:
        raise AuditError(f"a rate must be at least 0 nats, got {rate_nats}")
    if rate_nats >= math.log(n / 2):
        raise AuditError(
            f"vacuous: {rate_nats:.4g} nats are not below log {n} − log 2 = "
            f"{math.log(n / 2):.4g}, so Fano's bound excludes nothing"
        )
    return 1 - (rate_nats + math.log(2)) / math.log(n)


def same_class_error(spectrum: Spectrum, repeats: int = 1) -> float:
    r"""Lower bound on the error of picking the right image among those of its known class.

    .. math:: P_{err} \ge \sum_c \frac{N_c}{N} [1 - (I_c + \log 2) / \log N_c]_+

    Refused as vacuous where every class's share of it is 0.
    """
    rates: list[float] = spectrum.rates(repeats).tolist()
    counts: list[int] = spectrum.count.tolist()
    total = 0.0
    for rate, count in zip(rates, counts, strict=True):
        if count > 1:
            total += count * max(0.0, 1 - (rate + math.log(2)) / math.log(count))
    if total <= 0:
        raise AuditError("vacuous: no class's rate is below the log of half its images")
    return total / sum(counts)


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Errors of the optimal test between two images, over all pairs of `images` images.

    `least` is that of the pair that is easiest to tell apart; 0.5 is a coin. The median is that of
    evenly spread images where there are many.
    """

    least: float
    median: float
    most: float
    images: int


def pair_error(distance: Float[Tensor, "*pairs"], repeats: int = 1) -> Float[Tensor, "*pairs"]:
    r"""Error of the optimal test between two equally likely images.

    .. math:: \Phi(-\sqrt{k}\, \Vert D^{-1/2} (z - z') \Vert / 2)

    `distance` is ‖D^-½(z − z')‖, `repeats` the number k of independent draws.

    >>> round(float(pair_error(torch.tensor(2.0), repeats=4)), 6)  # Φ(−2)
    0.02275
    """
    error: Tensor = torch.special.ndtr(-0.5 * math.sqrt(repeats) * distance.double())
    return error


def pairwise_error(
    z: Float[Tensor, "n d"], noise_var: NoiseVar | None, repeats: int = 1, limit: int = PAIRED
) -> Pairs:
    """The optimal errors over the pairs of a gallery; the median over `limit` images at most.

    >>> z = torch.tensor([[0.0], [1.0], [4.0]])
    >>> found = pairwise_error(z, 1.0)
    >>> [round(v, 6) for v in (found.most, found.median, found.least)]  # Φ(−½), Φ(−3/2), Φ(−2)
    [0.308538, 0.066807, 0.02275]
    """
    if len(z) <= 1:
        raise AuditError(f"a pair needs 2 images, got {len(z)}")
    rows, n = whiten(z, noise_var), min(len(z), limit)
    chosen = torch.arange(n, device=z.device) * len(z) // n
    largest, smallest = _extremes(rows)
    # The two ways to a distance round differently: the median stays between the extremes.
    middle = torch.nn.functional.pdist(rows[chosen]).median().clamp(smallest, largest)
    marks = torch.stack([largest, smallest, middle])
    least, most, median = pair_error(marks, repeats).tolist()
    return Pairs(least=least, median=median, most=most, images=len(z))


def _extremes(rows: Float[Tensor, "n d"]) -> tuple[Tensor, Tensor]:
    """The largest and the smallest distance of two rows."""
    largest, smallest = rows.new_zeros(()), rows.new_full((), math.inf)
    for start, part in zip(range(0, len(rows), CHUNK), torch.split(rows, CHUNK), strict=True):
        apart = torch.cdist(part, rows)
        largest = torch.maximum(largest, apart.max())
        apart.diagonal(start).fill_(math.inf)
        smallest = torch.minimum(smallest, apart.min())
    return largest, smallest


def matcher_errors(
    z: Float[Tensor, "n d"], noise_var: NoiseVar | None, generator: Generator, repeats: int = 1
) -> int:
    """How many of n sent images the best matcher there is takes for another of the n.

    Each image is sent `repeats` times; the nearest listed z, in units of the noise, is the optimal
    guess where all images are equally likely. The attacker holds the list and the encoder.
    """
    rows = whiten(z, noise_var)
    sent = rows + normal_like(rows, generator) / math.sqrt(repeats)
    size = rows.square().sum(1)
    wrong = torch.zeros((), dtype=torch.int64, device=rows.device)
    for start, part in zip(range(0, len(rows), CHUNK), torch.split(sent, CHUNK), strict=True):
        guess = (size - 2 * part @ rows.T).argmin(1)
        own = torch.arange(start, start + len(part), device=rows.device)
        wrong += (guess != own).sum()
    return int(wrong)


def beaten(errors: int, n: int, at_least: float, level: float = 0.95) -> bool:
    """Whether so few errors in n tries contradict an error probability of `at_least`.

    The chance of as few or fewer is below 1 − level. Tries may have different probabilities if
    `at_least` bounds their mean: equal ones make few errors likeliest (Hoeffding 1956).

    >>> beaten(0, 28, 0.1), beaten(0, 29, 0.1)  # 0.9^28 = 0.052, 0.9^29 = 0.047
    (False, True)
    """
    if errors >= at_least * n - 1:  # as many as expected; Hoeffding's comparison ends here
        return False
    logs = [
        math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        + k * math.log(at_least) + (n - k) * math.log1p(-at_least)
        for k in range(errors + 1)
    ]  # fmt: skip
    return math.fsum(map(math.exp, logs)) < 1 - level


def repeats_until_double(rate: Callable[[int], float], limit: int = 1024) -> int | None:
    """The smallest number of sendings k ≤ limit with rate(k) ≥ 2·rate(1); None if there is none.

    `rate` must not fall with k: the interval is halved.

    >>> repeats_until_double(lambda k: math.log(1 + k))  # log 4 = 2 log 2
    3
    """
    once = rate(1)
    if not once > 0:
        raise AuditError(f"nothing to double: the rate of one sending is {once}")
    twice = 2 * once * (1 - _ROUNDING)
    if rate(limit) < twice:
        return None
    low, high = 1, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if rate(middle) >= twice else (middle, high)
    return high
