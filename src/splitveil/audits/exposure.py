r"""What leaks of a client that sends only some images, and what leakage alone does not show.

Per image: b = sent or not, l = label-only error (mean image of the true class), e = the attack's
error. With s = mean b and w = Σ_sent l / Σ l,

.. math:: \mathrm{exposure} = \max(s, w)\,\max(0, \mathrm{leakage\_sent})
    + (1 - s)\,\max(0, \mathrm{leakage\_bit})

where leakage_sent = 1 − Σ_sent e / Σ_sent l, and leakage_bit is that of an attacker who answers an
unsent image with the mean of the unsent aux images of its class.

Whether the server was needed at all is said by linear heads on what was sent.
"""

import base64
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from splitveil.attacks.baseline import class_means
from splitveil.audits import metrics
from splitveil.audits.beyond_pixels import LEAST_PAIRS, matched_pairs, simple_attributes
from splitveil.audits.suite import attempt, strongest
from splitveil.audits.target import Attempt, DeviceAnswers, Target, send
from splitveil.data.dataset import Attributes
from splitveil.errors import AuditError
from splitveil.io import Json, Progress
from splitveil.nets.exit import threshold_for
from splitveil.record.statistics import wilson
from splitveil.rng import derive_seed, seeded_globals, stream
from splitveil.threat import Attack, Labelled, chunk_for, without_nan

BLOCKS = 4  # a thumbnail of 4×4 block means is the low band
CANDIDATES = 1000  # among which an image is identified
ROUNDS, AT_ONCE = 1000, 100  # of the bootstrap
PERMUTATIONS = 1000
MEMBERSHIP = "membership"
SHARES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)  # of the images sent, for a curve
FITTED_ON = 10_000  # aux images at most
STEPS = 60  # of L-BFGS
DECAY = 1e-4  # on the weights of the head
Errors = Float[Tensor, " n"]


def exposure(
    asked: Bool[Tensor, " n"],
    error: Errors,
    label_only: Errors,
    by_bit: Errors,
    bands: Mapping[str, tuple[Errors, Errors]] | None = None,
) -> dict[str, float | None]:
    """Sent, leakage of what was sent, and exposure; see the module's formula.

    Args:
        asked: b (n,).
        error: e (n,); read for sent images only.
        label_only: l (n,).
        by_bit: Error (n,) of answering with the mean of the unsent aux images of the true class;
            read for unsent images only.
        bands: (e, l) of each band of the image; the largest leakage of image and bands counts.

    Returns:
        `sent`, `leakage_sent` (None if nothing is sent) and `exposure`.

    >>> half = torch.tensor([True, False])
    >>> one = torch.ones(2)
    >>> exposure(half, one / 2, one, one)
    {'sent': 0.5, 'leakage_sent': 0.5, 'exposure': 0.25}
    """
    once = np.ones((1, len(asked)))
    found = weighted_exposure(once, asked, error, label_only, by_bit, bands=bands)
    return {k: None if np.isnan(v[0]) else float(v[0]) for k, v in found.items()}


def weighted_exposure(
    weights: NDArray[np.float64],
    asked: Bool[Tensor, " n"],
    error: Errors,
    label_only: Errors,
    by_bit: Errors,
    *,
    bands: Mapping[str, tuple[Errors, Errors]] | None = None,
) -> dict[str, NDArray[np.float64]]:
    """The same numbers (r,) for r ways of weighing the images.

    Args:
        weights: How much each image counts (r, n), such as how often a resample drew it.
        asked: As for `exposure`, as are the others.
        error: See there.
        label_only: See there.
        by_bit: See there.
        bands: See there.
    """

    def total(values: Tensor) -> NDArray[np.float64]:
        sums: NDArray[np.float64] = weights @ values.double().cpu().numpy()
        return sums

    def leakage(missed: Tensor, ceiling: Tensor, where: Tensor) -> NDArray[np.float64]:
        least = total(ceiling.where(where, 0.0))
        learnt = least - total(missed.where(where, 0.0))
        return np.divide(learnt, least, out=np.zeros_like(least), where=least > 0)

    s = total(asked) / weights.sum(1)
    every = total(label_only)
    w = np.divide(total(label_only.where(asked, 0.0)), every, out=s.copy(), where=every > 0)
    pairs = [(error, label_only), *(bands or {}).values()]
    sent = np.max([leakage(e, ceiling, asked) for e, ceiling in pairs], axis=0)
    bit = np.maximum(0, leakage(by_bit, label_only, ~asked))
    exposed = np.maximum(s, w) * np.maximum(0, sent) + (1 - s) * bit
    return {"sent": s, "leakage_sent": np.where(s > 0, sent, np.nan), "exposure": exposed}


def leakage_of(error: Errors, label_only: Errors) -> float:
    """1 − Σe/Σl, unclipped; 0 where nothing is left to learn."""
    ceiling = float(label_only.double().sum())
    return 1.0 - float(error.double().sum()) / ceiling if ceiling > 0 else 0.0


def bands_of(
    images: Float[Tensor, "n c h w"],
) -> tuple[Float[Tensor, "n c h w"], Float[Tensor, "n c h w"]]:
    """Images as their 4×4 block means, and what is left of them.

    >>> low, rest = bands_of(torch.rand(2, 3, 8, 8))
    >>> float(F.avg_pool2d(rest, 2).abs().max()) < 1e-6
    True
    """
    means = F.adaptive_avg_pool2d(images, BLOCKS)
    low = F.interpolate(means, size=images.shape[2:], mode="nearest")
    return low, images - low


def band_errors(x: Tensor, guess: Tensor) -> dict[str, Errors]:
    """Mean squared errors (n,) of images in each band: "low" and "detail"."""
    missed = (band.square().flatten(1).mean(1) for band in bands_of(x - guess))
    return dict(zip(("low", "detail"), missed, strict=True))


def by_bit(target: Target, device: DeviceAnswers) -> Errors:
    """Error (n,) of an attacker who knows only label and bit: the mean of the unsent aux images.

    A class without an unsent aux image is answered with its mean image.
    """
    unsent = Labelled(target.aux.images[~device.aux_asked], target.aux.labels[~device.aux_asked])
    means = class_means(target.aux, target.num_classes)
    if len(unsent):
        there = unsent.labels.bincount(minlength=target.num_classes) > 0
        means[there] = class_means(unsent, target.num_classes)[there]
    return metrics.mse(target.scored.images, means[target.scored.labels].clamp(0, 1))


def only(target: Target, rows: Int64[Tensor, " m"]) -> Target:
    """The target with some of its scored images, which were sent as before."""
    given = target.attributes
    if given is not None:
        kept = {k: v[rows.to(v.device)] for k, v in given.scored.items()}
        given = Attributes(given.aux, kept)
    scored = Labelled(target.scored.images[rows], target.scored.labels[rows])
    return replace(target, scored=scored, captured=target.sent.z[rows], attributes=given)


def selected(attempts: Mapping[str, Attempt], rows: Int64[Tensor, " m"]) -> dict[str, Attempt]:
    """The attempts on some of the scored images; one that attacked none of them is left out."""
    found = {}
    for name, whole in attempts.items():
        place = whole.place(rows)
        there = place >= 0
        if not bool(there.any()):
            continue
        at = place[there]
        per_image: dict[str, Any] = {
            f.name: value[at]
            for f in fields(whole)
            if isinstance(value := getattr(whole, f.name), Tensor) and f.name != "rows"
        }
        own = there.nonzero().flatten()
        found[name] = replace(whole, rows=own, scored=len(rows), **per_image)
    return found


@torch.no_grad()
def identified(target: Target, rows: Int64[Tensor, " m"]) -> float | None:
    """Share of images that their z̃ singles out among at most 1,000 of `rows`.

    The attacker has the client and the list, and takes the candidate whose clean z is nearest: the
    likeliest one for Gaussian noise. None if the client gives no clean z.
    """
    encoder = getattr(target.victim, "encoder", None)
    if encoder is None or len(rows) == 0:
        return None
    rows = rows[:: max(1, len(rows) // CANDIDATES)][:CANDIDATES]
    images = target.scored.images[rows].to(target.device)
    clean = (
        torch.cat([encoder(x) for x in torch.split(images, chunk_for(images))]).flatten(1).double()
    )
    sent = target.sent.z[rows].flatten(1).double()
    if clean.shape != sent.shape:
        return None
    nearest = torch.cdist(sent, clean).argmin(1)
    return float((nearest == torch.arange(len(rows), device=nearest.device)).double().mean())


def bit_leaks(
    asked: Bool[Tensor, " n"], known: Mapping[str, Int64[Tensor, " n"]], seed: int
) -> Json:
    """What it tells that an image was sent: I(b; v) in bits for each v, against permutations.

    Args:
        asked: b (n,).
        known: Labels, answers or attributes (n,) by name.
        seed: Of the permutations.

    Returns:
        By name: `bits`, `p` over 1,000 permutations, and `share_sent` of each value.
    """
    generator = np.random.default_rng(seed)
    b = asked.cpu().numpy()
    said: Json = {}
    for name, values in known.items():
        kinds, codes = np.unique(values.cpu().numpy(), return_inverse=True)
        every, sent = np.bincount(codes), np.bincount(codes[b], minlength=len(kinds))
        found = float(mutual_bits(sent, every))
        # How many of each kind a random permutation of b sends.
        by_chance = generator.multivariate_hypergeometric(every, int(b.sum()), PERMUTATIONS)
        more = int((mutual_bits(by_chance, every) >= found - 1e-12).sum())
        said[name] = {
            "bits": found, "p": (1 + more) / (1 + PERMUTATIONS),
            "share_sent": {str(k): float(s) for k, s in zip(kinds, sent / every, strict=True)},
        }  # fmt: skip
    return said


def mutual_bits(sent: NDArray[np.int64], every: NDArray[np.int64]) -> NDArray[np.float64]:
    """Mutual information, in bits, of a kind and of whether an image of it was sent.

    Args:
        sent: How many images of each kind were sent (…, k).
        every: How many there are of each kind (k,), each > 0.

    >>> float(mutual_bits(np.array([2, 0]), np.array([2, 2])))
    1.0
    """
    n, total = every.sum(), sent.sum(-1, keepdims=True)
    bits = np.zeros(sent.shape[:-1])
    for part, size in ((sent, total), (every - sent, n - total)):
        joint, product = part / n, size * every / n**2
        ratio = np.divide(joint, product, out=np.ones_like(joint), where=joint > 0)
        bits += (joint * np.log2(ratio)).sum(-1)
    return bits


def intervals(
    asked: Bool[Tensor, " n"],
    error: Errors,
    ceiling: Errors,
    unsent: Errors,
    bands: Mapping[str, tuple[Errors, Errors]],
    *,
    seed: int,
) -> dict[str, list[float]]:
    """95 % intervals of `sent`, `leakage_sent` and `exposure`: images resampled jointly."""
    n = len(asked)
    draws = np.random.default_rng(derive_seed(seed, "exposure/bootstrap"))
    parts = []
    for _ in range(ROUNDS // AT_ONCE):
        weights = draws.multinomial(n, np.full(n, 1 / n), AT_ONCE).astype(np.float64)
        parts.append(weighted_exposure(weights, asked, error, ceiling, unsent, bands=bands))
    drawn = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    limits = {k: np.nanquantile(v, (0.025, 0.975)) for k, v in drawn.items()}
    return {name: [float(low), float(high)] for name, (low, high) in limits.items()}


def unsure_aux(target: Target) -> Target:
    """The same target for an attacker who fits on the images that the client would send.

    These are the round(s·a) aux images it is least sure of, by rank: an own head that overfits is
    sure of almost every image it was trained on. Where nobody knows how sure it is, they are the
    aux images that it sends.
    """
    device = target.exit
    if device is None:
        return target
    rows = device.aux_asked.nonzero().flatten()
    if device.aux_sure is not None:
        count = round(float(device.asked.double().mean()) * len(target.aux))
        rows = device.aux_sure.argsort(stable=True)[:count].sort().values
    aux = Labelled(target.aux.images[rows], target.aux.labels[rows])
    given = target.attributes
    if given is not None:
        given = Attributes({k: v[rows.to(v.device)] for k, v in given.aux.items()}, given.scored)
    return replace(target, aux=aux, attributes=given)


def attack_the_sent(
    target: Target,
    attacks: Mapping[str, Attack],
    attempts: Mapping[str, Attempt],
    progress: Progress,
) -> tuple[dict[str, Attempt], Target, dict[str, Attempt]]:
    """What the attacks make of the images that are sent, and of which they know that they are.

    The strongest attack is fitted once more, on the aux images that the client would send; it
    stands beside the others as NAME-unsure.

    Returns:
        All attempts on all scored images; the target with the sent images alone; the attempts on
        these.
    """
    rows = target.exit.asked.nonzero().flatten() if target.exit else torch.arange(0)
    if len(rows) == 0:
        raise AuditError(
            "the exit rule sends none of the scored images, so there is nothing to attack; give a "
            "larger send=, or train the client with --defence alone"
        )
    name = strongest(selected(attempts, rows))["mse_by"]
    narrow, every = unsure_aux(target), dict(attempts)
    attack = attacks[name]
    if len(narrow.aux) >= int(getattr(attack, "min_aux", 1)):
        every[f"{name}-unsure"] = attempt(narrow, f"{name}-unsure", attack, progress)
    return every, only(target, rows), selected(every, rows)


def exit_leaks(target: Target) -> Json:
    """What the bit tells of label, own answer, attributes and membership."""
    device = target.exit
    if device is None:
        return {}
    known = {"label": target.scored.labels}
    if device.own is not None:
        known["own answer"] = device.own
    known |= dict((target.attributes or simple_attributes(target)).scored)
    found = bit_leaks(device.asked, known, target.seed)
    return found | membership_of_bit(target, device)


def membership_of_bit(target: Target, device: DeviceAnswers) -> Json:
    """What the bit tells of whether an image was trained on, over pairs of one class; see above.

    Half of the images are members, the other half are not. Empty where no members are known.
    """
    members, others = target.members, target.outsiders
    if isinstance(members, str) or others is None:
        return {}
    pairs = matched_pairs(members.labels, others.labels, stream(target.seed, "leaks/exit"))
    if len(pairs) < LEAST_PAIRS:
        return {}
    bits = [
        device.asks(some.images[at]) for some, at in zip((members, others), pairs.T, strict=True)
    ]
    member = torch.arange(2 * len(pairs)) < len(pairs)
    return bit_leaks(torch.cat(bits), {MEMBERSHIP: member.long()}, target.seed)


def what_is_exposed(target: Target, best: Attempt | None) -> Json:
    """The fields of a record on what was sent, and on what the mean error does not show.

    Args:
        target: All scored images, sent or not.
        best: The strongest attack on all scored images; None where nothing is sent.

    Returns:
        `sent`, `leakage_sent`, `exposure`, `identified`, `leakage_bands`, `leakage_beyond_answer`
        and `intervals`.
    """
    if target.silent or best is None:
        return {"sent": 0.0, "leakage_sent": None, "exposure": 0.0, "identified": 0.0}
    x, labels = target.scored.images, target.scored.labels
    guess = best.images.to(x) / 255
    means = class_means(target.aux, target.num_classes)
    blind = means[labels].clamp(0, 1)
    error, ceiling = best.mse.to(x.device), metrics.mse(x, blind)
    errors, ceilings = band_errors(x, guess), band_errors(x, blind)
    bands = {name: (errors[name], ceilings[name]) for name in errors}
    device = target.keeps
    everything = torch.ones(len(x), dtype=torch.bool, device=x.device)
    asked = everything if device is None else device.asked
    unsent = ceiling if device is None else by_bit(target, device)
    told = metrics.mse(x, means[target.sent.answer].clamp(0, 1))
    found = exposure(asked, error, ceiling, unsent, bands if device is not None else None)
    if device is None:  # without a rule they are the leakage itself
        found["exposure"] = found["leakage_sent"]
    limits = intervals(asked, error, ceiling, unsent, bands if device else {}, seed=target.seed)
    among = identified(target, asked.nonzero().flatten())
    return {
        **found,
        "identified": None if among is None else float(asked.double().mean()) * among,
        "leakage_bands": {k: leakage_of(e[asked], c[asked]) for k, (e, c) in bands.items()},
        "leakage_beyond_answer": leakage_of(error[asked], told[asked]),
        "intervals": limits,
    }


def per_image_of_exit(target: Target, best: Attempt) -> Json:
    """What `per_image` holds of every scored image where only some are sent.

    `error` and `label_only` as base64 of float16, `sure` of float32, `sent`, `own_right` and
    `server_right` as base64 of packed bits; without what is not known.
    """
    device = target.exit
    if device is None:
        return {}
    x, labels = target.scored.images, target.scored.labels
    blind = class_means(target.aux, target.num_classes)[labels].clamp(0, 1)
    said = {
        "error": packed(best.mse, "<f2"),
        "label_only": packed(metrics.mse(x, blind), "<f2"),
        "sent": packed_bits(device.asked),
    }
    if device.sure is not None:
        said["sure"] = packed(device.sure, "<f4")
    if device.own is not None:
        said["own_right"] = packed_bits(device.own == labels)
    if target.head is not None:
        said["server_right"] = packed_bits(target.sent.answer == labels)
    return said


def packed(values: Tensor, dtype: str) -> str:
    """Base64 of numbers of a numpy type."""
    return base64.b64encode(values.cpu().numpy().astype(dtype).tobytes()).decode("ascii")


def packed_bits(values: Bool[Tensor, " n"]) -> str:
    """Base64 of bits, eight to a byte, the first one the highest."""
    return base64.b64encode(np.packbits(values.cpu().numpy()).tobytes()).decode("ascii")


def at_shares(target: Target, best: Attempt) -> list[Json]:
    """What the same client would expose and answer if its threshold sent another share.

    Args:
        target: All scored images, sent or not.
        best: An attack that was fitted on all aux images; one fit serves all shares.

    Returns:
        `sent`, `leakage_sent`, `exposure` and `accuracy` on the scored images for each of `SHARES`;
        empty without a rule by sureness.
    """
    device = target.exit
    if device is None or target.head is None:
        return []
    if device.sure is None or device.aux_sure is None or device.own is None:
        return []
    x, labels = target.scored.images, target.scored.labels
    blind = class_means(target.aux, target.num_classes)[labels].clamp(0, 1)
    guess = best.images.to(x) / 255
    error, ceiling = best.mse.to(x.device), metrics.mse(x, blind)
    errors, ceilings = band_errors(x, guess), band_errors(x, blind)
    bands = {name: (errors[name], ceilings[name]) for name in errors}
    here, there = device.own == labels, target.if_asked == labels
    said = []
    for share in SHARES:
        threshold = threshold_for(device.sure, share)
        asked, known = device.sure < threshold, device.aux_sure < threshold
        unsent = by_bit(target, replace(device, asked=asked, aux_asked=known))
        right = there.where(asked, here).double().mean()
        found = exposure(asked, error, ceiling, unsent, bands)
        said.append({**found, "accuracy": float(right)})
    return said


def probe(
    features: Float[Tensor, "a d"],
    labels: Int64[Tensor, " a"],
    unseen: Float[Tensor, "n d"],
    num_classes: int,
) -> Int64[Tensor, " n"]:
    """Classes (n,) that a logistic head answers, fitted on aux features and labels.

    Args:
        features: What the head is fitted on, standardised here.
        labels: Classes of these rows.
        unseen: Features of the images that it answers.
        num_classes: Number of classes.

    >>> x = torch.tensor([[0.0], [1.0]])
    >>> probe(x, torch.tensor([0, 1]), x, 2).tolist()
    [0, 1]
    """
    mean, spread = features.mean(0), features.std(0).clamp_min(1e-6)
    x, new = (features - mean) / spread, (unseen - mean) / spread
    weight = x.new_zeros(num_classes, x.shape[1], requires_grad=True)
    bias = x.new_zeros(num_classes, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [weight, bias], max_iter=STEPS, line_search_fn="strong_wolfe", tolerance_change=1e-7
    )

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = F.cross_entropy(F.linear(x, weight, bias), labels)
        value = value + DECAY * weight.square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    with torch.enable_grad():
        optimiser.step(loss)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        return F.linear(new, weight, bias).argmax(1)


def probe_answers(target: Target) -> dict[str, Tensor]:
    """Classes that heads answer for the scored images: `sent` from z̃, `clean` from clean z.

    `own` is the client's own head, if it has one. Clean z needs the client's network; a function of
    a user's own has only `sent`.
    """
    rows = torch.arange(min(FITTED_ON, len(target.aux)), device=target.aux.labels.device)
    aux = Labelled(target.aux.images[rows], target.aux.labels[rows])
    labels = aux.labels.to(target.device)
    found = {}
    with seeded_globals(derive_seed(target.seed, "probe")):
        sent = without_nan(send(target.victim, aux.images, target.seed, "probe")).flatten(1).float()
        seen = target.sent.z.flatten(1).float()
        found["sent"] = probe(sent, labels, seen, target.num_classes)
        encoder = getattr(target.victim, "encoder", None)
        if encoder is not None:
            clean = [_clean(target, encoder, x) for x in (aux.images, target.scored.images)]
            found["clean"] = probe(clean[0], labels, clean[1], target.num_classes)
    if target.exit is not None and target.exit.own is not None:
        found["own"] = target.exit.own
    return found


@torch.no_grad()
def _clean(target: Target, encoder: torch.nn.Module, images: Tensor) -> Tensor:
    parts = torch.split(images.to(target.device), chunk_for(images))
    return without_nan(torch.cat([encoder(x) for x in parts]).flatten(1).float())


def server_need(target: Target, answers: dict[str, Tensor]) -> Json:
    """Accuracy of each probe on the scored images, of the server there, and the difference.

    `server_adds` is server − best probe with its 95 % limits over images, None without a server.
    """
    truth = target.scored.labels
    said: Json = {}
    for name, answered in answers.items():
        right = answered.to(truth.device) == truth
        low, high = wilson(int(right.sum()), len(truth))
        said[name] = {"accuracy": float(right.double().mean()), "low": low, "high": high}
    if target.head is None or not said:
        return said
    best = max(said, key=lambda name: said[name]["accuracy"])
    served = (target.sent.answer == truth).double()
    gained = served - (answers[best].to(truth.device) == truth).double()
    half = 1.96 * float(gained.std()) / len(truth) ** 0.5 if len(truth) > 1 else 1.0
    mean = float(gained.mean())
    return said | {"server_adds": {"gain": mean, "low": mean - half, "high": mean + half}}
