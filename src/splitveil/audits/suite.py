"""Attacks run on a target and kept when they are finished; their results in a few numbers."""

import base64
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int64
from torch import Tensor

from splitveil.attacks.baseline import class_means
from splitveil.attacks.rmle import ImageSearch, scaled
from splitveil.audits import metrics
from splitveil.audits.target import (
    Attempt,
    Target,
    answer,
    attacked_rows,
    from_bytes,
    levels,
    send,
    sender,
    to_bytes,
)
from splitveil.errors import AuditError
from splitveil.io import Json, Progress, ProgressPart, as_run_error, atomic_file, opened, silent
from splitveil.rng import stream
from splitveil.threat import (
    CHUNK,
    Access,
    Attack,
    Labelled,
    Observation,
    Reconstructor,
    check_images,
    without_nan,
)

AUX_SHOWN = 1000  # aux images that an attack is scored on too, to see whether it overfits
OWN_PACKAGE = __name__.partition(".")[0]
BETTER = {  # for the attacker: 1 if high values are, −1 if low ones are
    "mse": -1, "psnr": 1, "psnr_pooled": 1, "ssim": 1, "ssim_zeropad": 1, "ssim_valid": 1,
    "lpips": -1,
}  # fmt: skip


@dataclass(frozen=True)
class Store:
    """Finished attacks as files of a folder; a broken file counts as absent.

    Args:
        folder: Where they are kept.
        code: Version of the code that makes them; None, as in a checkout with changes, to keep
            nothing.
        fresh: Whether none is read.
    """

    folder: Path
    code: str | None
    fresh: bool = False

    def read(self, key: str) -> bytes | None:
        """The bytes under a key; None if there are none."""
        if self.fresh:
            return None
        try:
            with opened(self.folder / f"{key}.safetensors") as file:
                return file.read()
        except OSError:
            return None

    def write(self, key: str, blob: bytes) -> None:
        """Keep bytes under a key."""
        with as_run_error(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(self.folder / f"{key}.safetensors") as file:
            file.write(blob)


def attempt_key(target: Target, name: str, attack: Attack, code: str | None) -> str | None:
    """Content hash of everything an attempt depends on; None if a part of it cannot be named.

    Such a part is code with changes, a target without an identity, an attack whose `repr` does not
    show its settings, or one from outside the package without a `version`.
    """
    kind, version = type(attack), getattr(attack, "version", None)
    outside = kind.__module__.partition(".")[0] != OWN_PACKAGE
    unnamed = (outside and version is None) or kind.__repr__ is object.__repr__
    if unnamed or code is None or not target.identity:
        return None
    parts = (target.identity, name, repr(attack), str(version), str(target.seed), code)
    return hashlib.sha256("\x00".join(parts).encode()).hexdigest()[:24]


def accuracy(target: Target, draws: int) -> float | None:
    """Share of right answers on the test images, sent through the channel; None if not known.

    Args:
        target: The client and its server.
        draws: How often all images are sent; the result is the mean.
    """
    right = right_counts(target, draws)
    return None if right is None else float(right.double().mean()) / draws


@torch.no_grad()
def right_counts(target: Target, draws: int) -> Int64[Tensor, " n"] | None:
    """How often the device's answer for each test image is right; None if it is not known.

    Args:
        target: The client and its server.
        draws: How often all images are sent.

    Returns:
        (n,), each from 0 to `draws`.
    """
    data = target.scored if target.test is None else target.test
    if target.answers is None and (target.head is None or target.exit is not None):
        return None
    truth = data.labels.to(target.device)
    right = torch.zeros_like(truth)
    if target.answers is None:
        again = sender(target.victim, data.images)
        for i in range(draws):
            z = again(target.seed, f"accuracy/{i}")
            right += answer(target.scores, z).to(truth.device) == truth
        return right
    for i in range(draws):
        generator = stream(target.seed, f"accuracy/{i}", target.device)
        for start in range(0, len(data), CHUNK):
            part = slice(start, start + CHUNK)
            logits, _ = target.answers(data.images[part].to(target.device), generator)
            right[part] += logits.argmax(1) == truth[part]
    return right


def scaled_searches(attacks: Mapping[str, Attack], scored: Labelled) -> dict[str, Attack]:
    """The attacks with searches that take about as long for images of any size."""
    values = scored.images.shape[1:].numel()
    return {
        name: scaled(attack, values, len(scored)) if isinstance(attack, ImageSearch) else attack
        for name, attack in attacks.items()
    }


def run_attacks(
    target: Target,
    attacks: Mapping[str, Attack],
    progress: Progress = silent,
    *,
    store: Store | None = None,
) -> dict[str, Attempt]:
    """Run attacks on the same scored images and the same draw of the channel.

    Args:
        target: What is attacked.
        attacks: The attacks by name.
        progress: Told how far they have come.
        store: Where finished attacks are kept: those found there are not run again.

    Returns:
        The attempts by name, in the order of the attacks.

    Example:
        `strongest(run_attacks(target, {"mean": MeanImage()}))["mse"]`
    """
    _check_target(target, attacks)
    efforts = {name: float(getattr(a, "effort", 1.0)) for name, a in attacks.items()}
    total = sum(efforts.values())
    attempts: dict[str, Attempt] = {}
    for name, attack in attacks.items():
        before = sum((efforts[n] for n in attempts), 0.0)
        share = ProgressPart(progress, name, before, efforts[name], total)
        share(0, 1)
        attempts[name] = _stored_attempt(target, name, attack, share, store)
    progress(int(1000 * total), int(1000 * total), "attacks done")
    return attempts


def _stored_attempt(
    target: Target, name: str, attack: Attack, progress: Progress, store: Store | None
) -> Attempt:
    """The attempt from the store, or a new one, which goes into the store."""
    key = None if store is None else attempt_key(target, name, attack, store.code)
    if store is None or key is None:
        return attempt(target, name, attack, progress)
    blob = store.read(key)
    found = None if blob is None else from_bytes(blob, target.device)
    if found is None or found.scored != len(target.scored):
        found = attempt(target, name, attack, progress)
        store.write(key, to_bytes(found))
    return found


def attempt(target: Target, name: str, attack: Attack, progress: Progress = silent) -> Attempt:
    """Fit one attack and score it; the attack sees neither the scored images nor its score."""
    started = time.perf_counter()
    rows = attacked_rows(target.scored, getattr(attack, "limit", None))
    repeats = int(getattr(attack, "repeats", 1))
    access = Access(attack.access)  # an attack may state it as plain text
    given = target.allowed(access, rows, repeats)
    generator = stream(target.seed, f"attack/{name}", target.device)
    before = _versions(target, given)
    fitted = attack.fit(target.view(access), target.aux, generator, progress)
    if not callable(fitted):
        raise AuditError(
            f"`fit` of attack '{name}' must return a function from an Observation to images, got "
            f"{type(fitted).__name__}"
        )
    reconstruct = getattr(fitted, "reconstruct", fitted)
    x = target.scored.images[rows]
    guess = _checked(name, reconstruct(given), x)
    if _versions(target, given) != before:
        raise AuditError(
            f"attack '{name}' wrote into the tensors it was given; let it copy them first"
        )
    sent = send(target.victim, guess, target.seed, f"reconstructions/{name}")
    right = answer(target.scores, sent) == target.scored.labels[rows]
    return Attempt(
        access=str(access), rows=rows, scored=len(target.scored), images=levels(guess),
        **metrics.measured(x, guess),  # type: ignore[arg-type]  # None only where allowed
        right=None if target.head is None else right, repeats=repeats,
        curve=tuple(getattr(fitted, "curve", ())),
        aux_mse=_aux_mse(target, name, reconstruct) if access == Access.BLACK_BOX else None,
        keeps_aux=bool(getattr(attack, "keeps_aux", False)),
        seconds=round(time.perf_counter() - started, 3),
    )  # fmt: skip


def _checked(name: str, guess: object, x: Tensor) -> Tensor:
    if not isinstance(guess, Tensor):
        raise AuditError(
            f"attack '{name}' returned images as {type(guess).__name__}, expected a tensor; "
            "wrap an array with torch.from_numpy"
        )
    if guess.shape != x.shape:
        raise AuditError(
            f"attack '{name}' returned images of shape {tuple(guess.shape)}, "
            f"expected {tuple(x.shape)}"
        )
    guess = guess.detach()
    check_images(guess, f"reconstructions of attack '{name}'")
    return guess.to(x)


def _aux_mse(target: Target, name: str, reconstruct: Reconstructor) -> float:
    """Error on the first aux images; if it is far below that on the scored ones, it overfits."""
    x = target.aux.images[:AUX_SHOWN]
    z = without_nan(send(target.victim, x, target.seed, "aux"))
    guess = _checked(name, reconstruct(Observation(z, answer(target.scores, z))), x)
    return float(metrics.mse(x, guess).mean())


def _versions(target: Target, given: Observation) -> tuple[int, ...]:
    """Torch's counters of writes in place, one per tensor."""
    tensors = (target.aux.images, target.aux.labels, given.z, given.answer, given.draws)
    return tuple(t._version for t in tensors if t is not None)


def _check_target(target: Target, attacks: Mapping[str, Attack]) -> None:
    if not attacks:
        raise AuditError("an audit needs at least one attack, got none")
    for what, data in (("aux", target.aux), ("scored", target.scored)):
        if len(data.images) != len(data.labels):
            raise AuditError(
                f"each of the {what} images needs a label, got {len(data.images)} images and "
                f"{len(data.labels)} labels"
            )
    if len(target.scored) == 0:
        raise AuditError("there are no images to score; the test split is empty")
    for name, attack in attacks.items():
        if attack.access not in list(Access):
            raise AuditError(
                f"access of attack '{name}' must be a member of Access, got {attack.access!r}; "
                f"write one of {', '.join(f'Access.{one.name}' for one in Access)}"
            )
    check_images(target.aux.images, "aux images")
    few = {
        name: need
        for name, a in attacks.items()
        if (need := int(getattr(a, "min_aux", 1))) > len(target.aux)
    }
    if few:
        needs = ", ".join(f"{name} at least {need}" for name, need in few.items())
        raise AuditError(
            f"the attacker has {len(target.aux)} aux images, too few: {needs}; "
            "choose another aux or a larger dataset"
        )


def summarise(target: Target, attempts: Mapping[str, Attempt]) -> Json:
    """The fields of a record on how well the attacks did."""
    ceiling = label_only_mse(target.aux, target.scored, target.num_classes)
    headline = strongest(attempts)
    return {
        "attacks": by_attack(attempts),
        "strongest": headline,
        "strongest_blackbox": strongest_blackbox(attempts),
        "worst_case": worst_case(attempts),
        "ceiling": {"mse": ceiling},
        "floor": {"mse": mean_image_mse(target.aux, target.scored)},
        "leakage": 1.0 - headline["mse"] / ceiling,
        "per_image": per_image(attempts),
    }


def comparable(attempts: Mapping[str, Attempt]) -> dict[str, Attempt]:
    """Attacks that got one draw of every scored image; only these are ranked."""
    return {n: a for n, a in attempts.items() if a.whole and a.repeats == 1}


def strongest(attempts: Mapping[str, Attempt]) -> Json:
    """Per metric the best mean of an attack and, under `METRIC_by`, its name: the headline.

    Args:
        attempts: Results of the attacks by name. Only those that saw one draw of every scored image
            are compared.

    Returns:
        `mse`, `psnr` (dB), `ssim` and the other metrics, None where no attack has one; and
        `mse_by`, `psnr_by`, ….

    >>> strongest({})["mse_by"] is None
    True
    """
    scores = {name: a.scores() for name, a in comparable(attempts).items()}
    best: Json = {}
    for metric, sign in BETTER.items():
        values = {n: getattr(s, metric) for n, s in scores.items()}
        known = {n: v for n, v in values.items() if v is not None}
        name = max(known, key=lambda n: sign * known[n], default=None)
        best[metric] = None if name is None else known[name]
        best[f"{metric}_by"] = name
    return best


def strongest_blackbox(attempts: Mapping[str, Attempt]) -> Json:
    """`strongest` without the white-box attacks."""
    return strongest({n: a for n, a in attempts.items() if a.access != Access.WHITE_BOX})


def worst_case(attempts: Mapping[str, Attempt]) -> Json:
    """The mean and tails of the best error per image over all attacks.

    No single attacker reaches it: only an oracle knows which attack is best on which image.
    """
    every = list(comparable(attempts).values())
    if not every:
        return dict.fromkeys(("mse", "psnr", "ssim", "mse_q01", "mse_q05"))
    mse = torch.stack([a.mse for a in every]).amin(0)
    psnr = torch.stack([a.psnr for a in every]).amax(0)
    ssims = [a.ssim for a in every if a.ssim is not None]
    tails = torch.quantile(
        mse.double(), torch.tensor([0.01, 0.05], dtype=torch.float64).to(mse.device)
    )
    return {
        "mse": float(mse.mean()),
        "psnr": float(psnr.mean()),
        "ssim": float(torch.stack(ssims).amax(0).mean()) if ssims else None,
        "mse_q01": float(tails[0]),
        "mse_q05": float(tails[1]),
    }


def per_image(attempts: Mapping[str, Attempt]) -> Json:
    """MSE of every scored image under the strongest attack, packed into text.

    Base64 of little-endian float16: 27 kB for 10,000 images, each within 0.05 % down to 6e-5.
    """
    best = strongest(attempts)["mse_by"]
    if best is None:
        return {}
    values = attempts[best].mse.cpu().numpy().astype("<f2")
    return {"attack": best, "mse": base64.b64encode(values.tobytes()).decode("ascii")}


def by_attack(attempts: Mapping[str, Attempt]) -> dict[str, Json]:
    """Scores of every attack; one on a subset has the best other attack there `beside` it."""
    whole = {n: a for n, a in comparable(attempts).items() if a.access != Access.WHITE_BOX}
    said = {}
    for name, attempt in attempts.items():
        said[name] = attempt.to_json()
        if not attempt.whole and whole:
            there = {n: a.scores(attempt.rows) for n, a in whole.items()}
            rival = min(there, key=lambda n: there[n].mse)
            said[name]["beside"] = {
                "attack": rival, "mse": there[rival].mse, "ssim": there[rival].ssim,
            }  # fmt: skip
    return said


def label_only_mse(aux: Labelled, scored: Labelled, num_classes: int) -> float:
    """MSE of guessing the aux mean of the *true* class: what the label alone gives away.

    Args:
        aux: Images the attacker knows.
        scored: Images that are guessed.
        num_classes: How many classes there are.

    Returns:
        The squared error per pixel, in [0, 1]; 0 where all images of a class are equal.

    >>> x = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1)
    >>> label_only_mse(Labelled(x, torch.tensor([0, 0])), Labelled(x, torch.tensor([0, 0])), 1)
    0.25
    """
    means = class_means(aux, num_classes)
    return float(metrics.mse(scored.images, means[scored.labels].clamp(0, 1)).mean())


def mean_image_mse(aux: Labelled, scored: Labelled) -> float:
    """MSE of guessing the aux mean image, whatever was sent."""
    mean = aux.images.mean(0, keepdim=True).expand_as(scored.images)
    return float(metrics.mse(scored.images, mean.clamp(0, 1)).mean())
