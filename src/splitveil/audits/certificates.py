"""Certificates of a deployed client: each one sound, or refused with its reason.

`docs/certificates.md` says what each claims. A refusal is an entry {"refused": reason}.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import get_args

import torch
from jaxtyping import Float, Int64
from torch import Generator, Tensor, nn

from splitveil.audits.bounds import (
    Covariance,
    NoiseVar,
    beaten,
    capacity,
    gallery_spectrum,
    identification_error,
    inside_box,
    matcher_errors,
    noise_variance,
    pairwise_error,
    population_rate,
    repeats_until_double,
    same_class_error,
)
from splitveil.errors import AuditError, ConfigError, unknown
from splitveil.io import Json
from splitveil.nets.channel import front_of
from splitveil.threat import Labelled

Clean = Callable[[Tensor, Generator | None], Tensor]
PROBES = 32
KINDS = ("capacity", "gallery", "population", "diagnostics")
CHUNK = 1000
PROBED = 16  # images whose Jacobian is looked at
REPEATS = (1, 4, 16, 64)
FULL_DIMS = 1024  # the full covariance of more numbers takes minutes
LIMIT = 4096  # sendings of one image
_SAME = 1e-3  # standard deviations of the noise: less is rounding, not randomness


@dataclass(frozen=True, kw_only=True, eq=False)
class Deployed:
    """A client as certificates see it: z before the noise, and what is known of the noise.

    `clean(x, generator)` gives z and lets gradients through. `noise_var` is the variance of the
    Gaussian noise that follows, for all of z or one for each number; 0 if there is none, None if it
    is not known. `bounds` hold for every image there can be, by construction, or are None.
    `random` says whether `clean` draws.
    """

    clean: Clean
    noise_var: float | Tensor | None
    bounds: tuple[float, float] | None
    random: bool = False


def deployed(encoder: nn.Module, channel: nn.Module, device: torch.device) -> Deployed:
    """A client of known networks as certificates see it."""
    front = front_of(encoder, channel)

    def clean(x: Tensor, generator: torch.Generator | None) -> Tensor:
        z: Tensor = front.stages(encoder(x.to(device)), generator)
        return z

    return Deployed(
        clean=clean,
        noise_var=None if front.noise_std is None else front.noise_std**2,
        bounds=front.bounds,
        random=front.random,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Images and who they are: `ids` (n,) are indices into a dataset, or `fingerprints`."""

    data: Labelled
    ids: Tensor

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.data):
            raise AuditError(
                f"every image needs one id, got {len(self.ids)} ids for {len(self.data)} images"
            )


def fingerprints(images: Float[Tensor, "n c h w"]) -> Int64[Tensor, " n"]:
    """Ids of images by content, for those without an index: 8 bytes of SHA-256 of their levels."""
    levels = images.mul(255).round().to(torch.uint8).cpu().flatten(1).numpy()
    digests = [hashlib.sha256(row.tobytes()).digest()[:8] for row in levels]
    return torch.tensor([int.from_bytes(d, "big", signed=True) for d in digests], dtype=torch.int64)


def count_copies(images: Tensor, others: Sequence[Tensor]) -> int:
    """How many of some images stand, level for level, among others.

    >>> dark, light = torch.zeros(2, 1, 2, 2), torch.ones(3, 1, 2, 2)
    >>> count_copies(torch.cat([dark, light]), [dark])
    2
    """
    known = torch.cat([fingerprints(some) for some in others])
    return int(torch.isin(fingerprints(images), known).sum())


def refuse_overlap(
    fresh: Int64[Tensor, " n"], others: Mapping[str, Int64[Tensor, " _"] | None]
) -> None:
    """Refuse fresh images that stand twice, or that one of the other sets has seen."""
    fresh = fresh.cpu()
    if again := len(fresh) - len(torch.unique(fresh)):
        raise AuditError(
            f"no certificate: {again} of the fresh images are repeats; independent draws are needed"
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
    """Every certificate refused for one reason."""
    return {kind: {"refused": f"no certificate: {reason}"} for kind in KINDS}


def _or_refused(make: Callable[[], Json]) -> Json:
    try:
        return make()
    except AuditError as err:
        return {"refused": str(err)}


@torch.no_grad()
def _encode(client: Deployed, images: Tensor, generator: Generator) -> Tensor:
    parts = [client.clean(x, generator).flatten(1) for x in torch.split(images, CHUNK)]
    return torch.cat(parts)


def _bounds(client: Deployed) -> tuple[float, float]:
    if client.bounds is None:
        raise AuditError("no certificate: z is not bounded; add a clip stage before the noise")
    return client.bounds


def _draws(client: Deployed, z: Tensor, images: Tensor, generator: Generator) -> bool:
    """Whether z before the noise is random, said or not: encoding again gives another z."""
    scale = noise_variance(client.noise_var, z.shape[1], z.device).sqrt()
    moved = _encode(client, images, generator).double() - z.double()
    return client.random or bool((moved / scale).abs().max() > _SAME)


def _gallery(
    client: Deployed, gallery: Labelled, z: Tensor, covariance: Covariance, generator: Generator
) -> Json:
    """Everything that holds for the listed images alone, whose z is given."""
    noise_var = client.noise_var
    if _draws(client, z, gallery.images, generator):
        raise AuditError(
            "no certificate: z is random before the noise, so that its covariance over the listed "
            "images is not known exactly; put random stages after the noise"
        )
    labels = gallery.labels.to(z.device)
    given = gallery_spectrum(z, noise_var, labels, covariance)
    alone = gallery_spectrum(z, noise_var, None, covariance)
    most = given.rate() + given.label_entropy
    rate = min(alone.rate(), most)
    errors = matcher_errors(z, noise_var, generator)
    fano = _or_refused(lambda: {"at_least": identification_error(rate, len(z))})
    return {
        "images": len(z),
        "covariance": covariance,
        "nats": rate,
        "vacuous": rate >= math.log(len(z)),  # x itself has no more
        "nats_given_class": given.rate(),
        **_of_full(z, noise_var, labels),
        "label_entropy": given.label_entropy,
        "identification_error": fano,
        "matcher_error": errors / len(z),
        "beaten": beaten(errors, len(z), fano.get("at_least", 0.0)),
        "same_class_identification_error": _or_refused(
            lambda: {"at_least": same_class_error(given)}
        ),
        "pairwise_error": _or_refused(lambda: asdict(pairwise_error(z, noise_var))),
        "nats_given_class_by_repeats": {str(k): given.rate(k) for k in REPEATS},
        "doubles": _or_refused(lambda: _doubling(repeats_until_double(given.rate, LIMIT), LIMIT)),
    }


def _of_full(z: Tensor, noise_var: float | Tensor | None, labels: Tensor) -> Json:
    """The rates of the full covariance, which are tighter; not for a wire too wide for it."""
    if z.shape[1] > FULL_DIMS:
        return {}
    given = gallery_spectrum(z, noise_var, labels, "full")
    alone = gallery_spectrum(z, noise_var, None, "full")
    whole = min(alone.rate(), given.rate() + given.label_entropy)
    return {"full_covariance": {"nats": whole, "nats_given_class": given.rate()}}


def _doubling(repeats: int | None, limit: int) -> Json:
    found = f"never within {limit}" if repeats is None else f"at {repeats}"
    return {"repeats": repeats, "limit": limit, "says": f"doubles {found} sendings of one image"}


def _population(
    client: Deployed,
    fit: Part,
    fresh: Part,
    seen: Tensor | None,
    *,
    num_classes: int,
    gallery: int,
    delta: float,
    covariance: Covariance,
    generator: Generator,
) -> Json:
    """The bound for images like the fresh ones, and Fano's for i.i.d. galleries of them."""
    refuse_overlap(fresh.ids, {"training": seen, "fit": fit.ids})
    low, high = _bounds(client)
    z = [_encode(client, part.data.images, generator) for part in (fit, fresh)]
    y = [part.data.labels.to(z[0].device) for part in (fit, fresh)]
    found = population_rate(
        z[0], y[0], z[1], y[1],
        noise_var=client.noise_var, low=low, high=high, delta=delta, covariance=covariance,
    )  # fmt: skip
    most = capacity(client.noise_var, low, high, z[0].shape[1])
    whole = min(found.value + math.log(num_classes), most)  # H(y) is at most log C
    return {
        "nats_given_class": found.value,
        "nats": whole,
        "mean": found.mean,
        "range": found.range,
        "images": found.n,
        "fit_images": len(fit.data),
        "confidence": 1 - delta,
        "covariance": covariance,
        "kind": found.kind,
        "asymptotic": {"nats_given_class": found.asymptotic, "says": "no certificate: asymptotic"},
        "identification_error": _or_refused(
            lambda: {"at_least": identification_error(whole, gallery), "images": gallery}
        ),
    }


def certify(
    client: Deployed,
    gallery: Labelled,
    fit: Part,
    fresh: Part,
    seen: Tensor | None,
    *,
    num_classes: int,
    generator: Generator,
    delta: float = 0.05,
    covariance: Covariance = "diagonal",
) -> Json:
    """Every certificate of a client as JSON, or the sentence why it is refused.

    `gallery` are the listed images; `fit` fixes the reference of the population's bound and may be
    training data; `fresh` measures it. `seen` are the ids of all that training and selection used.
    All ids must be of one kind.
    """
    if covariance not in get_args(Covariance):
        raise ConfigError(unknown("covariance", covariance, get_args(Covariance)))
    for part in (gallery, fit.data, fresh.data):
        if len(part) and not 0 <= int(part.labels.min()) <= int(part.labels.max()) < num_classes:
            raise AuditError(
                f"labels must be at least 0 and below num_classes = {num_classes}, got "
                f"{int(part.labels.min())} to {int(part.labels.max())}"
            )
    x = gallery.images
    dims = _encode(client, x[:1], generator).shape[1]
    try:
        noise_variance(client.noise_var, dims)
    except AuditError as err:
        return {kind: {"refused": str(err)} for kind in KINDS}
    z = _encode(client, x, generator)

    def most() -> Json:
        low, high = _bounds(client)
        inside_box(z, low, high)
        return {"nats": capacity(client.noise_var, low, high, dims), "dims": dims}

    def listed() -> Json:
        return _gallery(client, gallery, z, covariance, generator)

    def sampled() -> Json:
        return _population(
            client, fit, fresh, seen, num_classes=num_classes, gallery=len(gallery), delta=delta,
            covariance=covariance, generator=generator,
        )  # fmt: skip

    def slope() -> Json:
        found = dfil(client.clean, x[:PROBED], client.noise_var, generator=generator)
        return {"dfil_per_pixel": float(found.mean()), "images": len(found), "probes": PROBES}

    made = (most, listed, sampled, slope)
    return {kind: _or_refused(make) for kind, make in zip(KINDS, made, strict=True)}


def dfil(
    clean: Clean,
    x: Float[Tensor, "n c h w"],
    noise_var: NoiseVar | None,
    *,
    generator: Generator,
    probes: int | None = PROBES,
) -> Float[Tensor, " n"]:
    r"""Fisher information of z̃ about each image, per pixel: a diagnostic, never a certificate.

    .. math:: \mathrm{tr}(J^\top D^{-1} J) / d_x = E_v \Vert J^\top D^{-1/2} v \Vert^2 / d_x

    It bounds unbiased attacks only, and every attack worth its name is biased. Exact with
    `probes=None`, one backward pass for each number of z; else Hutchinson's estimate with that
    many random signs v.
    """
    with torch.enable_grad():
        x = x.detach().clone().requires_grad_()
        z = clean(x, generator).flatten(1)
        if not z.requires_grad:
            raise AuditError("no gradient reaches the image: the encoder's Jacobian is hidden")
        scaled = z / noise_variance(noise_var, z.shape[1], z.device).sqrt().to(z.dtype)
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
