"""What sendings tell of a client's noise, and of the rate beside it."""

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from splitveil.audits.access import finite, send
from splitveil.audits.certificates import fingerprints
from splitveil.audits.noise_tests import (
    SIMULATED,
    Outcome,
    judged,
    listen,
    listen_to_any,
)
from splitveil.errors import AuditError
from splitveil.nets import Channel, Clip, GaussianNoise, LearnedNoise, Quantise, SparseCoding, TopK
from splitveil.rng import stream
from splitveil.surrogates.batch import FirstCall, class_batch
from splitveil.surrogates.rate import diagonal_rate
from splitveil.surrogates.segments import class_moments, uniform_weights
from splitveil.types import Json, Labelled, Victim

Clean = Callable[[Tensor], Tensor]

LISTENED = 1000  # images that are sent twice to hear the noise
DRAWS = 16  # sendings of each image for the rate
LESS = 0.05  # share by which the noise may be smaller than declared
ERRORS = 4  # standard errors of its estimate
CHUNK = 500
SIMULATED_IMAGES = 256  # each is sent offline as often as a random channel of any kind asks
SAME = 1e-3  # of z's size: what arithmetic may change where nothing is random


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


def hear(
    encoder: Clean,
    channel: nn.Module,
    sent: Tensor,
    x: Tensor,
    *,
    again: Tensor | None = None,
    seed: int = 0,
) -> Json:
    """What z̃ sent for images x says of a client's noise: the tests that its channel allows.

    `again` is what another start of the client sent for the first images.
    """
    # On the CPU: a GPU's shortened products would pass for another client.
    channel = copy.deepcopy(channel).cpu().eval()
    if isinstance(encoder, nn.Module):
        encoder = copy.deepcopy(encoder).cpu().eval()
    with torch.no_grad():
        z = torch.cat([encoder(part) for part in torch.split(x.cpu(), CHUNK)])
        mean, std = expected(channel, z)
        rows, known = sent.cpu().flatten(1), mean.flatten(1)
        other = None if again is None else again.cpu().flatten(1)
        if isinstance(std, Tensor) and bool((std > 0).all()):
            wide = std.expand(z.shape[1:]).flatten() if std.ndim else float(std)
            return listen(rows, known, wide, fingerprints(x), other)
        if std is not None:
            return judged({"different": unlike(rows, known)}) | {"rows": len(rows)}
        some = z[:SIMULATED_IMAGES]
        draws = [channel(some, stream(seed, f"wire/{i}")).flatten(1) for i in range(SIMULATED)]
        other = None if other is None else other[: len(some)]
        return listen_to_any(rows[: len(some)], some.flatten(1), torch.stack(draws), other)


def expected(channel: nn.Module, z: Tensor) -> tuple[Tensor, Tensor | None]:
    """Mean and deviation of what a channel sends for z, if it ends in Gaussian noise.

    The deviation is 0 without noise and None where a stage is of another kind or follows the noise.

    >>> found = expected(Channel([Clip(0.0, 1.0), GaussianNoise(0.3)]), torch.tensor([[2.0]]))
    >>> found[0].item(), round(found[1].item(), 6)
    (1.0, 0.3)
    """
    mean, var = z, torch.zeros((), dtype=torch.float64)
    stages = list(channel.stages) if type(channel) is Channel else [channel]
    for stage in stages:
        if type(stage) is GaussianNoise:
            var = var + stage.std**2
        elif type(stage) is LearnedNoise and stage.kind == "gaussian":
            var = var + stage.log_scales().double().mul(2).exp()
            mean = mean if stage.location is None else mean + stage.location
        elif not bool((var > 0).any()) and type(stage) in (Clip, SparseCoding, TopK, Quantise):
            mean = stage(mean)
        else:
            return z, None
    return mean, var.sqrt()


def unlike(sent: Tensor, z: Tensor) -> Outcome:
    """How far what was sent is from z where nothing is random, over z's size."""
    far = float((sent.double() - z.double()).abs().max())
    size = float(z.double().square().mean().sqrt())
    seen = far / size if size else far
    return Outcome(seen, 1.0 if seen <= SAME else 0.0)
