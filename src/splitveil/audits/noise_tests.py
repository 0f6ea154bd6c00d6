"""Statistical tests of the noise on the wire: of z̃ − z, what was sent less the clean z.

Under a client that adds fresh independent N(0, σ²) to every number of z of every image, each
p-value below is exact or too large. All tests together give a false alarm in at most a share
`ALPHA` of audits.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Int64
from scipy.special import chdtr, chdtrc, chdtri, kolmogorov, stdtr
from torch import Tensor, nn

from splitveil.attacks.arithmetic import MOST
from splitveil.audits.certificates import fingerprints
from splitveil.audits.target import send
from splitveil.errors import AuditError
from splitveil.grid import STEPS
from splitveil.io import Json
from splitveil.nets.channel import (
    Channel,
    Clip,
    GaussianNoise,
    LearnedNoise,
    Quantise,
    SparseCoding,
    TopK,
    deployed,
)
from splitveil.rng import stream
from splitveil.surrogates.base import (
    FirstCallCheck,
    class_batch,
    class_moments,
    diagonal_rate,
    uniform_weights,
)
from splitveil.threat import Labelled, Victim, without_nan

ALPHA = 1e-3
NOT_THE_NOISE = "what was sent is not the encoder's output plus the declared noise; failed tests: "
SIMULATED = 32  # sendings that one is compared with where the noise is not Gaussian
PAIRED = 20_000  # rows of which every two are compared
SHAPED = 20_000_000  # values whose distribution is tested
MATTERS = 0.01  # of σ: a smaller offset or slope is arithmetic, whatever its p-value
CROSSED = 2048  # numbers of z of which every two are compared
CHUNK = 500
_PAIR = 2
Rows = Float[Tensor, "n d"]
Clean = Callable[[Tensor], Tensor]
LISTENED = 1000  # images that are sent twice to measure the noise
DRAWS = 16  # sendings of each image for the rate
LESS = 0.05  # share by which the noise may be smaller than declared
ERRORS = 4  # standard errors of its estimate
SIMULATED_IMAGES = 256  # images that are sent `SIMULATED` times offline
SAME = 1e-3  # of z's size: what arithmetic may change where nothing is random


@dataclass(frozen=True)
class Outcome:
    """What a test saw, and its p-value: how likely a sound client shows at least that much."""

    seen: float
    p: float


def measure_noise(victim: Victim, x: Tensor, seed: int) -> tuple[float, bool]:
    """Standard deviation of the noise by two sendings, and whether equal seeds send the same."""
    first, again = (without_nan(send(victim, x, seed, "foreign/first")) for _ in range(2))
    other = without_nan(send(victim, x, seed, "foreign/other"))
    heard = float((first.double() - other).square().mean().div(2).sqrt())
    return heard, torch.equal(first, again)


def check_noise(declared: float, heard: float, values: int) -> None:
    """Refuse declared noise that is not there: the rate in nats would come out too low.

    More noise than declared is fine, since a client may draw elsewhere too. Less may be chance, up
    to `ERRORS` standard errors of an estimate from so many `values`.
    """
    if heard < declared * (1 - max(LESS, ERRORS / math.sqrt(2 * values))):
        raise AuditError(
            f"noise of standard deviation {declared:.4g} was declared, but two sendings of the "
            f"same images differ as by {heard:.4g}; declare the noise that the client adds last, "
            "with no clipping or rounding after it, or leave --noise out"
        )


def sent_rate(
    victim: Victim, data: Labelled, num_classes: int, noise_std: float, seed: int
) -> float:
    r"""Upper bound on I(x; z̃ | y) of the scored images from what is sent alone, total nats.

    .. math:: \tfrac12 \sum_c p_c \sum_j \log(1 + (v_{cj} - \sigma^2)_+ / \sigma^2)

    v is the variance of class c over images and `DRAWS` sendings of each. All of it beyond the
    declared noise counts as signal. With few images the estimate is too large, never too small.
    """
    means, squares = [], []
    for i in range(DRAWS):
        z = without_nan(send(victim, data.images, seed, f"foreign/rate/{i}")).flatten(1).double()
        batch = class_batch(z, data.labels, z.shape[1], num_classes, FirstCallCheck())
        weight = uniform_weights(batch.y, batch.count)
        found = class_moments(batch.z, weight, batch.y, num_classes)
        means.append(found.mean)
        squares.append(found.var + found.mean.square())
    var = torch.stack(squares).mean(0) - torch.stack(means).mean(0).square()
    signal = (var - noise_std**2).clamp_min(0)
    return float(batch.average(diagonal_rate(signal, noise_std))) * z.shape[1]


def channel_tests(
    encoder: Clean,
    channel: nn.Module,
    sent: Tensor,
    x: Tensor,
    *,
    again: Tensor | None = None,
    seed: int = 0,
    own: bool = False,
) -> Json:
    """Test what was sent for images x against the encoder's z, with the tests its channel allows.

    Args:
        encoder: From images to clean z.
        channel: What follows it on the client.
        sent: What was sent (n, …), in the order of the images.
        x: The images (n, c, h, w).
        again: What the client sent for the first images after a restart.
        seed: Seed of the simulated sendings.
        own: Whether the channel is a user's own, whose noise is not on this package's grid.
    """
    # On the CPU, because the shortened products of a GPU would look like another client.
    channel = (copy.deepcopy(channel) if own else deployed(channel)).cpu().eval()
    if isinstance(encoder, nn.Module):
        encoder = copy.deepcopy(encoder).cpu().eval()
    with torch.no_grad():
        z = torch.cat([encoder(part) for part in torch.split(x.cpu(), CHUNK)])
        mean, std = expected(channel, z)
        rows, known = sent.cpu().flatten(1), mean.flatten(1)
        other = None if again is None else again.cpu().flatten(1)
        if isinstance(std, Tensor) and bool((std > 0).all()):
            wide = std.expand(z.shape[1:]).flatten() if std.ndim else float(std)
            grid = one_grid(channel)
            return gaussian_tests(rows, known, wide, fingerprints(x), other, grid=grid)
        if std is not None:
            return decide({"different": unlike(rows, known)}) | {"rows": len(rows)}
        some = z[:SIMULATED_IMAGES]
        draws = [channel(some, stream(seed, f"wire/{i}")).flatten(1) for i in range(SIMULATED)]
        other = None if other is None else other[: len(some)]
        return simulated_tests(rows[: len(some)], some.flatten(1), torch.stack(draws), other)


def expected(channel: nn.Module, z: Tensor) -> tuple[Tensor, Tensor | None]:
    """Mean and standard deviation of what a channel sends for z, if it ends in Gaussian noise.

    The deviation is 0 without noise, and None if another random stage or any after the noise.

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
            var = var + stage.log_scales().exp().double().square()
            mean = mean if stage.location is None else mean + stage.location
        elif not bool((var > 0).any()) and type(stage) in (Clip, SparseCoding, TopK, Quantise):
            mean = stage(mean)
        else:
            return z, None
    return mean, var.sqrt()


def one_grid(channel: nn.Module) -> bool:
    """Whether a channel of `expected` adds noise once, on a grid."""
    noises = [s for s in channel.modules() if isinstance(s, GaussianNoise | LearnedNoise)]
    return len(noises) == 1 and noises[0].grid


def unlike(sent: Tensor, z: Tensor) -> Outcome:
    """Largest distance of what was sent from z, over z's size, for a channel that draws nothing."""
    far = float((sent.double() - z.double()).abs().max())
    size = float(z.double().square().mean().sqrt())
    seen = far / size if size else far
    return Outcome(seen, 1.0 if seen <= SAME else 0.0)


def gaussian_tests(
    sent: Rows,
    clean: Rows,
    std: float | Float[Tensor, " d"],
    ids: Int64[Tensor, " n"],
    again: Float[Tensor, "m d"] | None = None,
    *,
    grid: bool = False,
) -> Json:
    """Every test for Gaussian noise, and which of them fail.

    Args:
        sent: What was sent.
        clean: Clean z of the same images.
        std: The declared σ, for all of z or one per number.
        ids: Rows with equal ids are one image, which counts once: the same noise is no fault there.
        again: What the client sent for the first m images after a restart.
        grid: Whether the noise is on a grid of σ/16, as `splitveil.grid` draws it.
    """
    scale = torch.as_tensor(std, dtype=torch.float64, device=sent.device)
    if not bool(((scale > 0) & (scale < math.inf)).all()):
        raise AuditError(f"the noise's deviation must be a finite number > 0, got {std}")
    _, first = np.unique(ids.cpu().numpy(), return_index=True)
    rows = torch.from_numpy(first).sort().values.to(sent.device)
    residuals = partial(unrounded, scale=scale) if grid else partial(standardised, std=scale)
    e = residuals(sent[rows], clean[rows])
    tests = residual_tests(e, clean[rows].double())
    if grid:
        tests |= grid_tests(sent[rows], clean[rows], e, scale)
    if again is not None:
        other = residuals(again, clean[: len(again)])
        tests["starts"] = closest(e[:PAIRED], other[:PAIRED])
    declared = float(scale.square().mean().sqrt())
    low, high = std_limits(e.numel(), ALPHA)
    noise = {
        "declared": declared,
        "measured": declared * float(e.square().mean().sqrt()),
        "measured_low": declared * low,
        "measured_high": declared * high,
    }
    return {"rows": len(sent), "images": len(rows), "noise": noise} | decide(tests)


def simulated_tests(
    sent: Rows,
    clean: Rows,
    draws: Float[Tensor, "k n d"],
    again: Float[Tensor, "m d"] | None = None,
) -> Json:
    """The tests that hold for every random channel, against k sendings made offline.

    Under a sound client the mean squared distance from z is one more draw from the distribution of
    the offline ones, which is normal for so many numbers. Two starts of it send equal rows no more
    often than two offline sendings do.
    """

    def distance(z: Tensor) -> Tensor:
        return (z.double() - clean.double()).square().mean()

    known, here = torch.stack([distance(z) for z in draws]), float(distance(sent))
    k = len(draws)
    spread = float(known.std()) * math.sqrt(1 + 1 / k)
    score = (here - float(known.mean())) / max(spread, 1e-12 * float(known.mean()) + 1e-300)
    usual = math.sqrt(float(known.mean()))
    seen = math.sqrt(here) / usual if usual else math.inf
    tests = {
        "nearer": Outcome(seen, float(stdtr(k - 1, score))),
        "farther": Outcome(seen, float(stdtr(k - 1, -score))),
    }
    if again is not None:
        m = len(again)
        equal, usually = (
            float((a == b).all(1).double().mean())
            for a, b in ((sent[:m], again), (draws[0, :m], draws[1, :m]))
        )
        tests["starts"] = Outcome(equal, 1.0 if equal <= 2 * usually else 0.0)
    return {"rows": len(sent), "images": len(sent)} | decide(tests)


def decide(tests: Mapping[str, Outcome]) -> Json:
    """The tests as JSON, and which of them fail; each gets an equal part of `ALPHA`."""
    least = ALPHA / len(tests)
    return {
        "tests": {name: asdict(test) for name, test in tests.items()},
        "alpha": ALPHA,
        "failed": [
            name
            for name, test in tests.items()
            if test.p < least and (name not in ("offset", "slope") or abs(test.seen) > MATTERS)
        ],
    }


def residual_tests(e: Rows, z: Rows) -> dict[str, Outcome]:
    """The tests of one capture: standardised residuals e and clean z, one row per image."""
    found = {
        "quieter": quieter(e),
        "louder": louder(e),
        "offset": offset(e),
        "slope": slope(e, z),
        "shape": shape(e),
    }
    if len(e) >= _PAIR:
        found["next image"] = follows(e[: len(e) // 2 * 2 : 2], e[1::2])
        found["repeats"] = closest(e[:PAIRED])
    if e.shape[1] >= _PAIR:
        columns = e.shape[1] // 2 * 2
        found["next number"] = follows(e[:, :columns:2], e[:, 1:columns:2])
        found["other number"] = together(e[:, :CROSSED])
    return found


def standardised(sent: Rows, clean: Rows, std: Tensor) -> Rows:
    """(z̃ − z)/σ in double precision: standard normal under a sound client."""
    return (sent.double() - clean.double()) / std


def grid_steps(sent: Rows, clean: Rows, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """K = n − q of what was sent, whether it is n steps of the grid, and z less q, in steps."""
    step = scale.float().double() / STEPS
    n, z = (sent.double() / step).round(), clean.double() / step
    q = z.round()
    return n - q, (n * step).float() == sent.float(), z - q


def unrounded(sent: Rows, clean: Rows, scale: Tensor) -> Rows:
    """Standard normal residuals under a sound client whose noise is on a grid.

    K = rint(16 ε) is put back to a random place of its cell, distributed as ε is there. Off the
    grid, and beyond what the noise can reach, the residual is (z̃ − z)/σ.
    """
    k, on, _ = grid_steps(sent, clean, scale)
    lots = torch.rand(k.shape, dtype=torch.float64, generator=stream(0, "wire/cells")).to(k.device)
    low, high = (torch.special.ndtr(-(k.abs() + side) / STEPS) for side in (0.5, -0.5))
    e = -k.sign() * torch.special.ndtri(low + lots * (high - low))
    e = torch.where(k == 0, torch.special.ndtri(low + lots * (high - low)), e)
    usable = on & (k.abs() <= MOST)
    return torch.where(usable, e, (sent.double() - clean.double()) / scale)


def grid_tests(sent: Rows, clean: Rows, e: Rows, scale: Tensor) -> dict[str, Outcome]:
    """Whether everything sent is on the grid, and the noise is independent of z's low bits.

    `grid` is the share of numbers off the grid: one is too many. `low bits` correlates the noise
    with the rounding of z, which the client drops before it adds noise.
    """
    _, on, rest = grid_steps(sent, clean, scale)
    off = 1 - float(on.double().mean())
    return {"grid": Outcome(off, 0.0 if off > 0 else 1.0), "low bits": follows(rest, e)}


def std_limits(count: int, alpha: float) -> tuple[float, float]:
    r"""Limits that the root mean square of `count` standard normals leaves with chance alpha.

    .. math:: \sqrt{\chi^2_{N,\,\alpha/2} / N}, \ \sqrt{\chi^2_{N,\,1-\alpha/2} / N}

    >>> [round(v, 4) for v in std_limits(10, 0.05)]  # χ² of 10: 3.2470 and 20.4832
    [0.5698, 1.4312]
    """
    low, high = chdtri(count, 1 - alpha / 2), chdtri(count, alpha / 2)
    return math.sqrt(low / count), math.sqrt(high / count)


def quieter(e: Rows) -> Outcome:
    """Less noise than declared: P(χ²_N ≤ Σe²); `seen` is the measured over the declared σ."""
    total = float(e.square().sum())
    return Outcome(math.sqrt(total / e.numel()), float(chdtr(e.numel(), total)))


def louder(e: Rows) -> Outcome:
    """More noise than declared: P(χ²_N ≥ Σe²)."""
    total = float(e.square().sum())
    return Outcome(math.sqrt(total / e.numel()), float(chdtrc(e.numel(), total)))


def offset(e: Rows) -> Outcome:
    """A constant added to all of z, in σ; √N times the mean is standard normal."""
    mean = float(e.mean())
    return Outcome(mean, two_sided(mean * math.sqrt(e.numel())))


def slope(e: Rows, z: Rows) -> Outcome:
    r"""Another client's z in place of ours: the correlation of the residual with z.

    .. math:: \sum e (z - \bar z) \,/ \|z - \bar z\|

    is standard normal whatever z is; `seen` is that over √N: σ per standard deviation of z.
    """
    return follows(z - z.mean(), e)


def follows(one: Rows, next_: Rows) -> Outcome:
    """Whether neighbours share noise: the correlation of disjoint pairs of residuals.

    Given one side, Σab/‖a‖ is exactly standard normal, since no value is in two pairs.
    """
    length = float(one.square().sum().sqrt())
    if length == 0:
        return Outcome(0.0, 1.0)
    t = float((next_ * one).sum()) / length
    return Outcome(t / math.sqrt(next_.numel()), two_sided(t))


def together(e: Rows) -> Outcome:
    r"""Whether any two numbers share their noise: the largest correlation of two columns.

    .. math:: \max_{j \ne k} \left| \textstyle\sum_i e_{ij} e_{ik} \right| / \lVert e_j \rVert

    Given column j each is standard normal, and the p-value of the largest is at most the sum of
    all p-values. `seen` is the correlation.
    """
    d = e.shape[1]
    length = e.square().sum(0).sqrt()
    if float(length.min()) == 0:
        return Outcome(1.0, 0.0)
    products = e.T @ e
    products.fill_diagonal_(0.0)
    t = products / torch.minimum(length[:, None], length)
    place = int(t.abs().argmax())
    j, k = place // d, place % d
    seen = float(products[j, k] / (length[j] * length[k]))
    return Outcome(seen, min(1.0, d * (d - 1) * two_sided(float(t[j, k]))))


def shape(e: Rows) -> Outcome:
    """Kolmogorov's largest distance of the residuals' distribution from the normal one.

    The residuals are divided by their own deviation, so that their size is not tested twice. The
    p-value is then too large, never too small.
    """
    values = e.flatten()[:SHAPED]
    scale = values.square().mean().sqrt()
    if float(scale) == 0:
        return Outcome(1.0, 0.0)
    ranked = torch.special.ndtr((values / scale).sort().values)
    steps = torch.arange(len(ranked) + 1, dtype=ranked.dtype, device=ranked.device) / len(ranked)
    gap = float(torch.maximum(ranked - steps[:-1], steps[1:] - ranked).max())
    return Outcome(gap, float(kolmogorov(gap * math.sqrt(len(ranked)))))


def closest(e: Rows, other: Float[Tensor, "m d"] | None = None) -> Outcome:
    """Noise shared by two images, or by two starts of the client: the two nearest residuals.

    `seen` is their distance over √d, which is √2 for independent rows. Half the squared distance
    is χ² with d degrees of freedom; the p-value of the nearest pair is at most the sum over pairs.
    """
    mine = e if other is None else other
    pairs = len(e) * (len(e) - 1) // 2 if other is None else len(e) * len(mine)
    size = mine.square().sum(1)
    best, which = math.inf, (0, 0)
    for start, part in enumerate(torch.split(e, CHUNK)):
        # By products the distances err by about 1e-12: enough to find the nearest pair only.
        near = (part.square().sum(1)[:, None] + size).addmm_(part, mine.T, alpha=-2)
        if other is None:
            near.diagonal(CHUNK * start).fill_(math.inf)
        place = int(near.argmin())
        if float(near.flatten()[place]) < best:
            best = float(near.flatten()[place])
            which = (CHUNK * start + place // len(mine), place % len(mine))
    nearest = float((e[which[0]] - mine[which[1]]).norm())
    p = min(1.0, pairs * float(chdtr(e.shape[1], nearest**2 / 2)))
    return Outcome(nearest / math.sqrt(e.shape[1]), p)


def two_sided(t: float) -> float:
    """P(|N(0, 1)| ≥ |t|).

    >>> round(two_sided(1.959964), 6)
    0.05
    """
    return math.erfc(abs(t) / math.sqrt(2))
