"""Per-image metrics of reconstructions, and shares and ROC areas with their 95 % intervals.

Images are floats in [0, 1], shape (n, c, h, w). Names carry their conventions: three SSIMs and two
PSNRs are in use in this field and differ by up to .15 and several dB on the same images.
"""

import functools
import math
from collections.abc import Callable, Mapping

import torch
from jaxtyping import Bool, Float, Int64
from torch import Generator, Tensor, nn

from splitveil import functional
from splitveil.attacks.membership import placements
from splitveil.errors import AuditError
from splitveil.functional import SSIM_RADIUS, Padding
from splitveil.io import Json
from splitveil.threat import CHUNK, check_images, chunk_for

MSE_FLOOR = 1e-10  # a perfect copy has an infinite PSNR; it is reported as 100 dB
LPIPS_SIDE = 32
Images = Float[Tensor, "n c h w"]
PerImage = Float[Tensor, " n"]


def mse(x: Images, guess: Images) -> PerImage:
    """Mean squared error of each image; low favours the attacker.

    >>> mse(torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.5))
    tensor([0.2500])
    """
    _check_pair(x, guess)
    return (x - guess).square().flatten(1).mean(1)


def psnr(x: Images, guess: Images) -> PerImage:
    """Peak signal-to-noise ratio of each image, dB, peak 1; high favours the attacker.

    >>> round(float(psnr(torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.1))), 4)
    20.0
    """
    return -10.0 * torch.log10(mse(x, guess).clamp_min(MSE_FLOOR))


def ssim(x: Images, guess: Images) -> PerImage | None:
    """Structural similarity of each image in torchmetrics' convention (reflected borders).

    None for images under 6 pixels, which cannot be reflected by the window's radius of 5.
    """
    _check_pair(x, guess)
    if min(x.shape[2:]) <= SSIM_RADIUS:
        return None
    return _ssim(x, guess, "reflect")


def ssim_zeropad(x: Images, guess: Images) -> PerImage:
    """Structural similarity with zero padding: CEM's and the reference documents' way."""
    _check_pair(x, guess)
    return _ssim(x, guess, "zeros")


def ssim_valid(x: Images, guess: Images) -> PerImage | None:
    """Structural similarity over whole windows only: scikit-image's; None under 11 pixels."""
    _check_pair(x, guess)
    if min(x.shape[2:]) < 2 * SSIM_RADIUS + 1:
        return None
    return _ssim(x, guess, "none")


def _ssim(x: Images, guess: Images, padding: Padding) -> PerImage:
    """`functional.ssim` of each image, some at a time: it holds a dozen copies of what it gets."""
    pairs = zip(torch.split(x, CHUNK), torch.split(guess, CHUNK), strict=True)
    return torch.cat([functional.ssim(g, part, padding, per_image=True) for part, g in pairs])


def lpips(x: Images, guess: Images) -> PerImage | None:
    """Learned perceptual distance (AlexNet) of each image; low favours the attacker.

    None without the package `lpips` and its weights, and under 32 pixels, which are too few for
    its network. A grey image enters it as three equal channels.
    """
    _check_pair(x, guess)
    if min(x.shape[2:]) < LPIPS_SIDE or (net := _lpips_net(x.device)) is None:
        return None
    pair = [image.expand(-1, 3, -1, -1) if image.shape[1] == 1 else image for image in (x, guess)]
    with torch.no_grad():
        value: Tensor = net(pair[0] * 2 - 1, pair[1] * 2 - 1)
    return value.reshape(len(x)).float()


@functools.cache
def _lpips_net(device: torch.device) -> nn.Module | None:
    """The package's network, fetched once; None where it is not installed."""
    try:
        import lpips as package  # type: ignore[import-not-found]
    except ImportError:
        return None
    net: nn.Module = package.LPIPS(net="alex", verbose=False)
    return net.eval().requires_grad_(requires_grad=False).to(device)


PER_IMAGE: Mapping[str, Callable[[Images, Images], PerImage | None]] = {
    "mse": mse,
    "psnr": psnr,
    "ssim": ssim,
    "ssim_zeropad": ssim_zeropad,
    "ssim_valid": ssim_valid,
    "lpips": lpips,
}


def measured(x: Images, guess: Images) -> dict[str, PerImage | None]:
    """Every metric of each image, computed for a part of the images at a time to save memory."""
    chunk = chunk_for(x)
    pairs = list(zip(torch.split(x, chunk), torch.split(guess, chunk), strict=True))
    found: dict[str, PerImage | None] = {}
    for name, metric in PER_IMAGE.items():
        parts = [value for pair in pairs if (value := metric(*pair)) is not None]
        found[name] = torch.cat(parts) if parts else None
    return found


def _check_pair(x: Tensor, guess: Tensor) -> None:
    check_images(x, "images given to a metric")
    check_images(guess, "reconstructions given to a metric")


_TAIL = 0.025
_Z = 1.959963984540054  # Φ⁻¹(1 − _TAIL)
ROUNDS = 500  # of the bootstrap
Limits = tuple[float, float]
Members = Float[Tensor, " a"]
Others = Float[Tensor, " b"]


def wilson(hits: int, n: int) -> Limits:
    r"""Wilson's interval of a share.

    .. math:: \frac{p + z^2/2n \pm z \sqrt{p(1-p)/n + z^2/4n^2}}{1 + z^2/n}

    >>> [round(limit, 4) for limit in wilson(8, 10)]
    [0.4902, 0.9433]
    """
    _check_share(hits, n)
    p, c = hits / n, _Z**2 / n
    half = _Z * math.sqrt(p * (1 - p) / n + c / (4 * n))
    low, high = ((p + c / 2 + side * half) / (1 + c) for side in (-1, 1))
    return max(low, 0.0), min(high, 1.0)


def exact(hits: int, n: int) -> Limits:
    """The exact binomial interval of a share (Clopper and Pearson).

    >>> [round(limit, 4) for limit in exact(0, 10)]  # 1 − 0.025^(1/10)
    [0.0, 0.3085]
    """
    from scipy.special import betaincinv

    _check_share(hits, n)
    low = float(betaincinv(hits, n - hits + 1, _TAIL)) if hits else 0.0
    high = float(betaincinv(hits + 1, n - hits, 1 - _TAIL)) if hits < n else 1.0
    return low, high


def _check_share(hits: int, n: int) -> None:
    if not 0 <= hits <= n or n < 1:
        raise AuditError(f"a share needs 0 ≤ hits ≤ n and n ≥ 1, got {hits} of {n}")


def auc_limits(members: Members, others: Others) -> tuple[float, Limits]:
    r"""Area under the ROC curve and its interval after DeLong, on the logit scale.

    .. math:: \operatorname{var} A = \operatorname{var}(V_{10})/a + \operatorname{var}(V_{01})/b

    V are the shares of the other side that a score beats. If every score of one side beats the
    other, the variance is 0; the limit is then that of min(a, b) hits out of as many.

    >>> area, (low, high) = auc_limits(torch.tensor([3.0, 1.0]), torch.tensor([2.0, 0.0]))
    >>> area, round(low, 3), round(high, 3)
    (0.75, 0.069, 0.992)
    """
    if min(len(members), len(others)) <= 1:
        raise AuditError(
            f"an AUC needs at least 2 scores on each side, got {len(members)} and {len(others)}"
        )
    if not bool(members.isfinite().all() & others.isfinite().all()):
        raise AuditError("an AUC needs finite scores, got NaN or infinity")
    up, down = placements(members, others), 1 - placements(others, members)
    area = float(up.mean())
    few = min(len(members), len(others))
    if area >= 1:
        return 1.0, (exact(few, few)[0], 1.0)
    if area <= 0:
        return 0.0, (0.0, exact(0, few)[1])
    error = math.sqrt(float(up.var()) / len(up) + float(down.var()) / len(down))
    middle, reach = math.log(area / (1 - area)), _Z * error / (area * (1 - area))
    low, high = (1 / (1 + math.exp(-middle - side * reach)) for side in (-1, 1))
    return area, (low, high)


def tpr_limits(
    members: Members, others: Others, fpr: float, generator: Generator
) -> tuple[float, Limits] | None:
    """Share of members above the score that at most a share `fpr` of the others exceeds.

    Its interval is a bootstrap over both sides, with a new threshold each time. None if there are
    fewer than 1/fpr others. Runs on the CPU.
    """
    inside, outside = members.cpu(), others.cpu()
    over = math.floor(fpr * len(outside) + 1e-9)
    if over < 1:
        return None
    rate = _tpr(inside[None], outside[None], over)
    drawn = [
        side[torch.randint(len(side), (ROUNDS, len(side)), generator=generator)]
        for side in (inside, outside)
    ]
    rates = _tpr(drawn[0], drawn[1], over)
    low, high = torch.quantile(rates, torch.tensor([_TAIL, 1 - _TAIL], dtype=rates.dtype)).tolist()
    return float(rate), (low, high)


def _tpr(
    members: Float[Tensor, "r a"], others: Float[Tensor, "r b"], over: int
) -> Float[Tensor, " r"]:
    """Share of each row's members above the (over + 1)-th highest of its others."""
    bar = others.kthvalue(others.shape[1] - over, dim=1, keepdim=True).values
    return (members > bar).double().mean(1)


def balanced_limits(
    predicted: Int64[Tensor, " n"], truth: Int64[Tensor, " n"]
) -> tuple[float, Limits]:
    """Balanced accuracy and its 95 % interval: every value that occurs counts the same.

    The mean over values of the share of their images that were recognised; each share varies as
    if two more images had been recognised and two more had not (Agresti and Coull).

    >>> found, (low, high) = balanced_limits(torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 1, 1]))
    >>> found, round(low, 3), high
    (0.75, 0.475, 1.0)
    """
    count = truth.bincount().double()
    hits = truth[predicted == truth].bincount(minlength=len(count)).double()
    there = count > 0
    count, hits = count[there], hits[there]
    mean, p = float((hits / count).mean()), (hits + 2) / (count + 4)
    error = _Z * math.sqrt(float((p * (1 - p) / (count + 4)).sum())) / len(count)
    return mean, (max(mean - error, 0.0), min(mean + error, 1.0))


def from_answer(
    known: Int64[Tensor, " m"],
    values: Int64[Tensor, " m"],
    asked: Int64[Tensor, " n"],
    usual: Int64[Tensor, ""],
) -> Int64[Tensor, " n"]:
    """The most frequent value among known images of the same answer; `usual` if there is none.

    >>> one = torch.tensor
    >>> from_answer(one([0, 0, 1]), one([2, 2, 1]), one([1, 0, 5]), one(0)).tolist()
    [1, 2, 0]
    """
    size = int(torch.cat([known, asked]).max()) + 1
    kinds = int(torch.maximum(values.max(), usual)) + 1
    counts = torch.zeros(size, kinds, dtype=torch.float64, device=known.device)
    counts[:, usual] = 0.5  # wins where there is nothing else, and between equal counts
    counts.index_put_((known, values), counts.new_ones(len(known)), accumulate=True)
    return counts.argmax(1)[asked]


def matched_pairs(
    members: Int64[Tensor, " a"], others: Int64[Tensor, " b"], generator: Generator
) -> Int64[Tensor, "pairs 2"]:
    """Random pairs of a member and another image with the same label: their positions.

    Without pairs a class that is more frequent among members would look like membership.

    >>> one = torch.tensor
    >>> matched_pairs(one([5, 0, 5]), one([2, 5]), torch.Generator())[:, 1].tolist()
    [1]
    """
    sides = [members.cpu(), others.cpu()]
    mixed = [torch.randperm(len(side), generator=generator) for side in sides]
    pairs = [torch.empty(0, 2, dtype=torch.long)]
    for kind in range(max((int(side.max()) + 1 for side in sides if len(side)), default=0)):
        left, right = (m[side[m] == kind] for side, m in zip(sides, mixed, strict=True))
        few = min(len(left), len(right))
        pairs.append(torch.stack([left[:few], right[:few]], 1))
    found = torch.cat(pairs)
    return found[torch.randperm(len(found), generator=generator)]


def share(right: Bool[Tensor, " n"]) -> float:
    """Share of True."""
    return float(right.double().mean())


def named(name: str, limits: tuple[float | None, float | None]) -> Json:
    """Both limits of an interval, under `NAME_low` and `NAME_high`."""
    return {f"{name}_low": limits[0], f"{name}_high": limits[1]}
