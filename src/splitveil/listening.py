"""What sendings of the same images tell of a client's noise, and of the rate beside it."""

import math

import torch
from torch import Tensor

from splitveil.audit.access import finite, send
from splitveil.errors import AuditError
from splitveil.surrogates.batch import FirstCall, class_batch
from splitveil.surrogates.rate import diagonal_rate
from splitveil.surrogates.segments import class_moments, uniform_weights
from splitveil.types import Labelled, Victim

LISTENED = 1000  # images that are sent twice to hear the noise
DRAWS = 16  # sendings of each image for the rate
LESS = 0.05  # share by which the noise may be smaller than declared
ERRORS = 4  # standard errors of its estimate


def hear_noise(victim: Victim, x: Tensor, seed: int) -> tuple[float, bool]:
    """Standard deviation between sendings of the same images, and whether a seed repeats one."""
    first, again = (finite(send(victim, x, seed, "foreign/first")) for _ in range(2))
    other = finite(send(victim, x, seed, "foreign/other"))
    heard = float((first.double() - other).square().mean().div(2).sqrt())
    return heard, torch.equal(first, again)


def check_noise(declared: float, heard: float, values: int) -> None:
    """Refuse declared noise that is not there: the rate would be too low.

    The measured one may be larger, as a client may draw elsewhere too; smaller by chance alone it
    is by at most four standard errors of `values` differences.
    """
    if heard < declared * (1 - max(LESS, ERRORS / math.sqrt(2 * values))):
        raise AuditError(
            f"noise of standard deviation {declared:.4g} was declared, but two sendings of the "
            f"same images differ as by {heard:.4g}; declare what the client adds last, with "
            "nothing behind it that clips or rounds, or leave --noise out"
        )


def sent_rate(
    victim: Victim, data: Labelled, num_classes: int, noise_std: float, seed: int
) -> float:
    r"""Upper bound on I(x; z̃ | y) of the scored images from what is sent alone, total nats.

    .. math:: \tfrac12 \sum_c p_c \sum_j \log(1 + (v_{cj} - \sigma^2)_+ / \sigma^2)

    v is the variance of class c over images and `DRAWS` sendings of each; all of it that is not
    the declared noise counts as signal. The estimate errs upwards where there is little.
    """
    means, squares = [], []
    for i in range(DRAWS):
        z = finite(send(victim, data.images, seed, f"foreign/rate/{i}")).flatten(1).double()
        batch = class_batch(z, data.labels, z.shape[1], num_classes, FirstCall())
        weight = uniform_weights(batch.y, batch.count)
        found = class_moments(batch.z, weight, batch.y, num_classes)
        means.append(found.mean)
        squares.append(found.var + found.mean.square())
    var = torch.stack(squares).mean(0) - torch.stack(means).mean(0).square()
    signal = (var - noise_std**2).clamp_min(0)
    return float(batch.average(diagonal_rate(signal, noise_std))) * z.shape[1]
