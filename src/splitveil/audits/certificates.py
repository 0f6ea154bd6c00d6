"""Certificates of a deployed client: each one sound, or refused with its reason.

`docs/reference/certificates.md` says what each claims. A refused one is {"refused": reason}.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Generator, Tensor, nn

from splitveil.audits import bounds
from splitveil.audits.list_bound import ONE_SIDED, VACUOUS, least_mean, list_errors
from splitveil.audits.target import Target
from splitveil.errors import AuditError
from splitveil.io import Json
from splitveil.nets.channel import before_noise, deployed
from splitveil.nets.split import SplitModel
from splitveil.rng import stream
from splitveil.surrogates.base import FirstCallCheck, class_batch, true_rate
from splitveil.threat import Labelled, Victim, chunk_for

Clean = Callable[[Tensor, Generator | None], Tensor]
PROBES = 32
KINDS = ("capacity", "gallery", "population", "diagnostics")
DELTA = 0.05  # chance that the bound for the population does not hold
PROBED = 16  # images whose Jacobian is estimated
REPEATS = (1, 4, 16, 64)
FULL_DIMS = 1024  # beyond, the full covariance takes minutes
LIMIT = 4096  # sendings of one image that are looked at for a doubling
GRID_NOISE = "exact: noise on a grid of a sixteenth of its deviation"
FLOAT_NOISE = "assumed exact: what floating point gives away besides is not covered"
_SAME = 1e-3  # standard deviations of the noise: less is rounding, not randomness


@dataclass(frozen=True, kw_only=True, eq=False)
class CertifiedClient:
    """A client as certificates see it: z before the noise, and what is known of the noise.

    Args:
        clean: From images (n, c, h, w) and a generator to z; gradients pass through it.
        noise_var: Variance of the Gaussian noise that follows, for all of z or one per number; 0
            without noise, None if it is not known.
        bounds: Least and largest value of z for every possible image, by construction; or None.
        random: Whether `clean` draws random numbers.
        grid: Whether the noise is on a grid; `clean` then gives z rounded to it.
    """

    clean: Clean
    noise_var: float | Tensor | None
    bounds: tuple[float, float] | None
    random: bool = False
    grid: bool = False


def certified_client(
    encoder: nn.Module, channel: nn.Module, device: torch.device
) -> CertifiedClient:
    """The client as certificates see it, from its encoder and channel."""
    front = before_noise(encoder, channel)

    def clean(x: Tensor, generator: torch.Generator | None) -> Tensor:
        return front.rounded(front.stages(encoder(x.to(device)), generator))

    ends = None if front.bounds is None else front.rounded(torch.tensor(front.bounds)).tolist()
    return CertifiedClient(
        clean=clean,
        noise_var=None if front.noise_std is None else front.noise_std**2,
        bounds=None if ends is None else (ends[0], ends[1]),
        random=front.random,
        grid=front.grid,
    )


def fingerprints(images: Float[Tensor, "n c h w"]) -> Int64[Tensor, " n"]:
    """Ids of images by their content: 8 bytes of the SHA-256 of their pixels as bytes."""
    levels = images.mul(255).round().to(torch.uint8).cpu().flatten(1).numpy()
    digests = [hashlib.sha256(row.tobytes()).digest()[:8] for row in levels]
    return torch.tensor([int.from_bytes(d, "big", signed=True) for d in digests], dtype=torch.int64)


def count_copies(images: Tensor, others: Sequence[Tensor]) -> int:
    """How many of some images are among others, pixel by pixel.

    >>> dark, light = torch.zeros(2, 1, 2, 2), torch.ones(3, 1, 2, 2)
    >>> count_copies(torch.cat([dark, light]), [dark])
    2
    """
    known = torch.cat([fingerprints(some) for some in others])
    return int(torch.isin(fingerprints(images), known).sum())


def check_fresh(
    fresh: Int64[Tensor, " n"], others: Mapping[str, Int64[Tensor, " _"] | None]
) -> None:
    """Refuse fresh images that repeat, or that are also in one of the other sets."""
    fresh = fresh.cpu()
    if again := len(fresh) - len(torch.unique(fresh)):
        raise AuditError(
            f"no certificate: {again} of the fresh images are repeats; give each image once"
        )
    for name, ids in others.items():
        if ids is None:
            raise AuditError(
                f"no certificate: certificate data may overlap {name} data, whose ids are not "
                "given; say which images were used"
            )
        if shared := int(torch.isin(fresh, ids.cpu()).sum()):
            raise AuditError(
                f"no certificate: certificate data overlap {name} data in {shared} images; "
                "use images that were never shown"
            )


def refusals(reason: str) -> Json:
    """Every certificate refused, all for one reason."""
    return {kind: {"refused": f"no certificate: {reason}"} for kind in KINDS}


def _or_refused(make: Callable[[], Json]) -> Json:
    try:
        return make()
    except AuditError as err:
        return {"refused": str(err)}


@torch.no_grad()
def _encode(client: CertifiedClient, images: Tensor, generator: Generator) -> Tensor:
    parts = torch.split(images, chunk_for(images))
    return torch.cat([client.clean(x, generator).flatten(1) for x in parts])


def _bounds(client: CertifiedClient) -> tuple[float, float]:
    if client.bounds is None:
        raise AuditError("no certificate: z is not bounded; add a clip stage before the noise")
    return client.bounds


def _draws(client: CertifiedClient, z: Tensor, images: Tensor, generator: Generator) -> bool:
    """Whether z before the noise is random: stated, or seen when the images are encoded again."""
    scale = bounds.noise_variance(client.noise_var, z.shape[1], z.device).sqrt()
    moved = _encode(client, images, generator).double() - z.double()
    return client.random or bool((moved / scale).abs().max() > _SAME)


def _rates(
    z: Tensor, noise_var: float | Tensor | None, labels: Tensor, covariance: bounds.Covariance
) -> tuple[bounds.Spectrum, float]:
    """Spectrum of the listed images given their class, and the rate in nats without the class."""
    given = bounds.gallery_spectrum(z, noise_var, labels, covariance)
    alone = bounds.gallery_spectrum(z, noise_var, None, covariance)
    return given, min(alone.rate(), given.rate() + given.label_entropy)


def _check_known(client: CertifiedClient, z: Tensor, images: Tensor, generator: Generator) -> None:
    if _draws(client, z, images, generator):
        raise AuditError(
            "no certificate: z is random before the noise, so that its covariance over the listed "
            "images is not known exactly; put random stages after the noise"
        )


def _gallery(
    client: CertifiedClient,
    gallery: Labelled,
    z: Tensor,
    generator: Generator,
    asked: Bool[Tensor, " n"] | None,
) -> Json:
    """The certificate of the listed images, whose clean z (n, d) is given."""
    noise_var, bit = client.noise_var, _bit(asked)
    _check_known(client, z, gallery.images, generator)
    labels = gallery.labels.to(z.device)
    given, rate = _rates(z, noise_var, labels, "diagonal")
    rate += bit
    errors = _matcher_errors(z, noise_var, generator, asked)
    fano = _or_refused(lambda: {"at_least": bounds.identification_error(rate, len(z))})
    tighter: Json = {}
    if z.shape[1] <= FULL_DIMS:
        full, whole = _rates(z, noise_var, labels, "full")
        told = {"nats": whole + bit, "nats_given_class": full.rate() + bit}
        tighter = {"full_covariance": told}
    return {
        "images": len(z),
        "covariance": "diagonal",
        "nats": rate,
        "vacuous": rate >= math.log(len(z)),  # the image itself has no more nats
        "nats_given_class": given.rate() + bit,
        **tighter,
        "label_entropy": given.label_entropy,
        "identification_error": fano,
        "matcher_error": errors / len(z),
        "beaten": bounds.beaten(errors, len(z), fano.get("at_least", 0.0)),
        "same_class_identification_error": _or_refused(
            lambda: {"at_least": bounds.same_class_error(given, beyond=bit)}
        ),
        "pairwise_error": _or_refused(lambda: _pairs(z, noise_var, asked)),
        "nats_given_class_by_repeats": {str(k): given.rate(k) + bit for k in REPEATS},
        "doubles": _or_refused(lambda: _doubling(given, bit)),
    }


def _bit(asked: Tensor | None) -> float:
    """Nats that it may tell which images are sent: it is one bit, and a function of the image."""
    return 0.0 if asked is None else math.log(2)


def _matcher_errors(
    z: Tensor, noise_var: bounds.NoiseVar | None, generator: Generator, asked: Tensor | None
) -> int:
    """Errors of the optimal matcher; of the images that are not sent it names one for all."""
    if asked is None:
        return bounds.matcher_errors(z, noise_var, generator)
    unsent = int((~asked).sum())
    wrong = bounds.matcher_errors(z[asked], noise_var, generator) if bool(asked.any()) else 0
    return wrong + max(0, unsent - 1)


def _pairs(z: Tensor, noise_var: bounds.NoiseVar | None, asked: Tensor | None) -> Json:
    if asked is not None:
        raise AuditError(
            "no certificate: of two images one may be sent and the other not, which tells them "
            "apart"
        )
    return asdict(bounds.pairwise_error(z, noise_var))


def _list(
    client: CertifiedClient, gallery: Labelled, z: Tensor, generator: Generator, asked: Tensor
) -> Json:
    """The least error of any attacker on the listed images, under an exit rule."""
    _check_known(client, z, gallery.images, generator)
    found = list_errors(z, client.noise_var, gallery.images, asked, generator)
    n, mean = len(z), float(found.losses.mean())
    least = least_mean(mean, n, DELTA)
    return {
        "images": n,
        "mse": mean,
        "mse_at_least": least,
        "confidence": 1 - DELTA,
        "variance": found.variance,
        "vacuous": least < VACUOUS * found.variance,
        "identified": float(found.likeliest.mean()),
        "asymptotic": {
            "mse_at_least": mean - ONE_SIDED * float(found.losses.std()) / math.sqrt(n),
            "says": "no certificate: asymptotic",
        },
    }


def _doubling(given: bounds.Spectrum, bit: float) -> Json:
    repeats = bounds.repeats_until_double(lambda k: given.rate(k) + bit, LIMIT)
    found = f"never within {LIMIT}" if repeats is None else f"at {repeats}"
    return {"repeats": repeats, "limit": LIMIT, "says": f"doubles {found} sendings of one image"}


def _population(  # noqa: PLR0917 - what is measured, on what, and how
    client: CertifiedClient,
    fit: Labelled,
    fresh: Labelled,
    seen: Sequence[Labelled] | None,
    num_classes: int,
    gallery: int,
    generator: Generator,
    bit: float,
) -> Json:
    """The bound for images like the fresh ones, and Fano's bound for galleries of such images."""
    known = None if seen is None else torch.cat([fingerprints(some.images) for some in seen])
    others = {"training": known, "fit": fingerprints(fit.images)}
    check_fresh(fingerprints(fresh.images), others)
    low, high = _bounds(client)
    z = [_encode(client, data.images, generator) for data in (fit, fresh)]
    y = [data.labels.to(z[0].device) for data in (fit, fresh)]
    found = bounds.population_rate(
        z[0], y[0], z[1], y[1], noise_var=client.noise_var, low=low, high=high, delta=DELTA
    )
    most = bounds.capacity(client.noise_var, low, high, z[0].shape[1])
    whole = min(found.value + math.log(num_classes), most) + bit  # H(y) is at most log C
    limit = found.asymptotic + bit
    return {
        "nats_given_class": found.value + bit,
        "nats": whole,
        "mean": found.mean,
        "range": found.range,
        "images": found.n,
        "fit_images": len(fit),
        "confidence": 1 - DELTA,
        "covariance": "diagonal",
        "kind": found.kind,
        "asymptotic": {"nats_given_class": limit, "says": "no certificate: asymptotic"},
        "identification_error": _or_refused(
            lambda: {"at_least": bounds.identification_error(whole, gallery), "images": gallery}
        ),
    }


def certify(
    client: CertifiedClient,
    gallery: Labelled,
    fit: Labelled,
    fresh: Labelled,
    seen: Sequence[Labelled] | None,
    *,
    num_classes: int,
    generator: Generator,
    asked: Bool[Tensor, " n"] | None = None,
) -> Json:
    """Every certificate of a client as JSON, or why it is refused.

    Args:
        client: The client.
        gallery: The listed images, for the certificate of a finite gallery.
        fit: Images on which the reference of the population's bound is fitted; training data
            are allowed.
        fresh: Images on which the population's bound is measured.
        seen: All images that training and selection used; None if they are not known. Images
            are compared by their content.
        num_classes: How many classes there are.
        generator: Source of the random numbers.
        asked: Which of the listed images an exit rule sends; None where every image is sent.
            Which images are sent is one bit more, log 2 in every rate.

    Returns:
        One entry for each of `KINDS`, and under an exit rule one more, `list`.
    """
    for part in (gallery, fit, fresh):
        if len(part) and not 0 <= int(part.labels.min()) <= int(part.labels.max()) < num_classes:
            raise AuditError(
                f"labels must be at least 0 and below num_classes = {num_classes}, got "
                f"{int(part.labels.min())} to {int(part.labels.max())}"
            )
    x, bit = gallery.images, _bit(asked)
    asked = None if asked is None else asked.to(generator.device)
    dims = _encode(client, x[:1], generator).shape[1]
    try:
        bounds.noise_variance(client.noise_var, dims)
    except AuditError as err:
        return {kind: {"refused": str(err)} for kind in KINDS}
    z = _encode(client, x, generator)

    def most() -> Json:
        low, high = _bounds(client)
        bounds.inside_box(z, low, high)
        return {"nats": bounds.capacity(client.noise_var, low, high, dims) + bit, "dims": dims}

    def slope() -> Json:
        found = dfil(client.clean, x[:PROBED], client.noise_var, generator=generator)
        return {"dfil_per_pixel": float(found.mean()), "images": len(found), "probes": PROBES}

    makers: Mapping[str, Callable[[], Json]] = {
        "capacity": most,
        "gallery": lambda: _gallery(client, gallery, z, generator, asked),
        "population": lambda: _population(
            client, fit, fresh, seen, num_classes, len(gallery), generator, bit
        ),
        "diagnostics": slope,
    }
    if asked is not None:
        makers = {**makers, "list": lambda: _list(client, gallery, z, generator, asked)}
    noise: Json = {"noise": GRID_NOISE if client.grid else FLOAT_NOISE}
    found = {kind: _or_refused(make) for kind, make in makers.items()}
    told = {k: v | {"bit_nats": bit} if bit and "nats" in v else v for k, v in found.items()}
    return {k: v if "refused" in v else v | noise for k, v in told.items()}


def certify_networks(  # noqa: PLR0917 - the client, and images for its certificates
    target: Target,
    encoder: nn.Module,
    channel: nn.Module,
    fit: Labelled,
    fresh: Labelled,
    seen: Sequence[Labelled] | None,
) -> Json:
    """`certify` for the scored images of a target whose client has these networks."""
    return certify(
        certified_client(encoder, channel, target.device), target.scored, fit, fresh, seen,
        num_classes=target.num_classes,
        generator=stream(target.seed, "certificates", target.device),
        asked=None if target.exit is None else target.exit.asked,
    )  # fmt: skip


def certify_split(
    target: Target, model: SplitModel, fit: Labelled, fresh: Labelled, seen: Sequence[Labelled]
) -> tuple[Json, float | None]:
    """The certificates of a split model's client, and its rate in nats; see `certify`."""
    found = certify_networks(target, model.encoder, deployed(model.channel), fit, fresh, seen)
    noise_std = float(getattr(model.channel, "noise_std", 0.0))
    return found, rate_nats(target.victim, target.scored, target.num_classes, noise_std)


@torch.no_grad()
def rate_nats(victim: Victim, data: Labelled, num_classes: int, noise_std: float) -> float | None:
    """Upper bound on I(x; z̃ | y) of the scored images, total nats; None without noise.

    Clean z in eval mode, class-conditional, diagonal.
    """
    if noise_std == 0:
        return None
    box = victim.white_box()
    before = before_noise(box.encoder, box.channel)  # a dictionary could magnify z
    parts = [
        before.rounded(before.stages(victim.encoder(x.to(victim.device))))
        for x in torch.split(data.images, chunk_for(data.images))
    ]
    z = torch.cat(parts).flatten(1).double()
    if not bool(torch.isfinite(z).all()):
        return None
    batch = class_batch(z, data.labels.to(z.device), z.shape[1], num_classes, FirstCallCheck())
    return float(true_rate(batch, noise_std)) * z.shape[1]


def dfil(
    clean: Clean,
    x: Float[Tensor, "n c h w"],
    noise_var: bounds.NoiseVar | None,
    *,
    generator: Generator,
    probes: int | None = PROBES,
) -> Float[Tensor, " n"]:
    r"""Fisher information of z̃ about each image, per pixel: a diagnostic, never a certificate.

    .. math:: \mathrm{tr}(J^\top D^{-1} J) / d_x = E_v \Vert J^\top D^{-1/2} v \Vert^2 / d_x

    It bounds unbiased attacks only, and every good attack is biased. It is exact with
    `probes=None`, one backward pass for each number of z; else Hutchinson's estimate with that
    many random signs v.
    """
    with torch.enable_grad():
        x = x.detach().clone().requires_grad_()
        z = clean(x, generator).flatten(1)
        if not z.requires_grad:
            raise AuditError("no gradient reaches the image: the encoder's Jacobian is hidden")
        scaled = z / bounds.noise_variance(noise_var, z.shape[1], z.device).sqrt().to(z.dtype)
        total = torch.zeros(len(x), dtype=torch.float64, device=z.device)
        for i in range(z.shape[1] if probes is None else probes):
            if probes is None:
                seed = torch.zeros_like(z)
                seed[:, i] = 1.0
            else:
                where = generator.device
                coin = torch.randint(2, z.shape, generator=generator, device=where)
                seed = (2 * coin - 1).to(z)
            (slope,) = torch.autograd.grad(scaled, x, seed, retain_graph=True)
            total += slope.flatten(1).double().square().sum(1).to(z.device)
    return total / x[0].numel() / (probes or 1)
