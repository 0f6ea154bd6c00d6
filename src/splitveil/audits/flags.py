"""Flags: signs that an audit's number should not be believed. `docs/flags.md` explains each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from splitveil.audits.access import Case, Wire, finite
from splitveil.audits.identification import beaten
from splitveil.audits.summary import comparable, floor_mse
from splitveil.audits.target import Attempt
from splitveil.audits.wire_flags import WIRE_CHECKS
from splitveil.rng import normal_like, stream
from splitveil.types import Access, Json, Victim

WEAKER = 1.05  # a white-box attack this much worse than the best black-box one is suspect
FALLING = 0.02  # relative fall of the training loss per epoch at the end
LARGER_LOSES = 1.02
LINEAR_SHARE = 0.05  # of the mean image's error: what a linear map leaves of an open client
OVERFIT = 0.7
UNFINISHED = "training unfinished"
PROBED = 64
MASKED = 1e-3  # gradient over what a small change of the image really does


@dataclass(frozen=True)
class Flag:
    """A sign of trouble: its name, what was seen, and what to do about it."""

    name: str
    seen: str
    advice: str


@dataclass(frozen=True)
class Evidence:
    """What the checks look at.

    `heard` is what `noise_tests` says of a real wire; `left_out` are the attacks of the
    profile that somebody chose not to run; `copies` says how many scored images are known.
    """

    case: Case
    wire: Wire
    attempts: Mapping[str, Attempt]
    certificates: Json = field(default_factory=dict)
    heard: Json = field(default_factory=dict)
    left_out: Sequence[str] = ()
    leaks: Json = field(default_factory=dict)
    unfinished: str | None = None
    knowledge: str = "train"
    copies: str | None = None

    @property
    def seed(self) -> int:
        """Seed of the audit."""
        return self.wire.seed


def white_box_weaker(evidence: Evidence) -> str | None:
    """A white-box attack knows more than a black-box one; doing worse, it was led astray."""
    rivals = {
        n: a for n, a in comparable(evidence.attempts).items() if a.access == Access.BLACK_BOX
    }
    for name, attempt in evidence.attempts.items():
        if attempt.access != Access.WHITE_BOX or not rivals:
            continue
        there = {n: a.scores_at(attempt.rows).mse for n, a in rivals.items()}
        best = min(there, key=lambda n: there[n])
        own = attempt.scores().mse
        if own > WEAKER * there[best]:
            return f"{name} has MSE {own:.4f} where {best} has {there[best]:.4f}"
    return None


def fall_per_epoch(curve: tuple[float, ...]) -> float:
    """Relative fall of a training loss per epoch, from its last tenth and the tenth before.

    A tenth is at least one epoch; its mean is taken, as single epochs of few images are noisy.

    >>> round(fall_per_epoch((1.0, 0.5, 0.45)), 6)
    0.1
    """
    back = max(1, len(curve) // 10)
    last, before = sum(curve[-back:]), sum(curve[-2 * back : -back])
    if before <= 0:
        return 0.0
    return float(1.0 - max(last / before, 0.0) ** (1.0 / back))


def not_converged(evidence: Evidence) -> str | None:
    """A decoder whose loss still falls, or a larger one that does worse, was stopped early."""
    attempts = evidence.attempts
    for name, attempt in attempts.items():
        if len(attempt.curve) == 1:
            return f"{name} was trained for one epoch at most: nothing shows if its loss settled"
        fall = fall_per_epoch(attempt.curve)
        if fall > FALLING:
            return f"the training loss of {name} still fell by {100 * fall:.1f} % per epoch"
    base, large = attempts.get("decoder"), attempts.get("decoder-large")
    if base is not None and large is not None:
        small_mse, large_mse = base.scores().mse, large.scores().mse
        if large_mse > LARGER_LOSES * small_mse:
            return f"decoder-large has MSE {large_mse:.4f}, decoder {small_mse:.4f}"
    return None


def gradient_masked(evidence: Evidence) -> str | None:
    """An encoder that reacts to its input but hands back no gradient misleads white-box attacks."""
    case = evidence.case
    box = case.victim.white_box()
    x = case.scored.images[:PROBED].to(box.device)
    generator = stream(evidence.seed, "flags/gradient", box.device)
    step = 0.02 * normal_like(x, generator)
    with torch.no_grad():
        z = box.encoder(x)
        moved = box.encoder((x + step).clamp(0, 1)) - z
        step = (x + step).clamp(0, 1) - x
    towards = normal_like(z, generator)
    real = finite((moved * towards).flatten(1).sum(1))
    x = x.clone().requires_grad_()
    with torch.enable_grad():
        out = box.encoder(x)
        grad = None
        if out.requires_grad:
            (grad,) = torch.autograd.grad((out * towards).sum(), x, allow_unused=True)
    along = torch.zeros_like(real) if grad is None else finite((grad * step).flatten(1).sum(1))
    size = float(real.square().mean().sqrt())
    told = float(along.square().mean().sqrt())
    if size > 0 and told < MASKED * size:
        return f"a small change moves z by {size:.3g} along a probe, the gradient says {told:.3g}"
    return None


def one_draw(evidence: Evidence) -> str | None:
    """A random channel must also meet an attacker who sees several draws of one image."""
    if varies(evidence.case, evidence.seed, training=False) and not any(
        a.repeats > 1 for a in evidence.attempts.values()
    ):
        return "two sendings of one image differ, and no attack with repeats was run"
    return None


def train_only_noise(evidence: Evidence) -> str | None:
    """Noise that is gone in deployment protects nobody."""
    case, seed = evidence.case, evidence.seed
    if varies(case, seed, training=True) and not varies(case, seed, training=False):
        return "two sendings of one image differ in train mode and are equal in eval mode"
    return None


@torch.no_grad()
def varies(case: Case, seed: int, *, training: bool) -> bool:
    """Whether sending the same images twice gives different values, in either mode."""
    box = case.victim.white_box()
    victim = Victim(box.encoder, box.channel)
    x = case.scored.images[:PROBED].to(box.device)
    x = torch.cat([x, x])  # BatchNorm in train mode needs two
    generator = stream(seed, "flags/draws", box.device)
    encoder, channel = box.encoder.train(training), box.channel.train(training)

    def once() -> Tensor:
        sent = channel(encoder(x), generator) if training else victim.send(x, generator)
        return finite(sent)  # NaN differs from itself

    with torch.random.fork_rng([box.device] if box.device.type == "cuda" else []):
        return not torch.equal(once(), once())


def linearly_open(evidence: Evidence) -> str | None:
    """A client that a fixed linear map undoes hides nothing, whatever other attacks say."""
    linear = evidence.attempts.get("linear")
    if linear is None:
        return None
    own, floor = linear.scores().mse, floor_mse(evidence.case.aux, evidence.case.scored)
    if own < LINEAR_SHARE * floor:
        return f"ridge regression has MSE {own:.2g}, {100 * own / floor:.1f} % of the mean image's"
    return None


def overfitted(evidence: Evidence) -> str | None:
    """An attack far better on its own images than on new ones needs more images, not belief."""
    for name, attempt in comparable(evidence.attempts).items():
        if attempt.aux_mse is None or name == "nearest":  # the nearest aux image is itself
            continue
        own = attempt.scores().mse
        if attempt.aux_mse < OVERFIT * own:
            return f"{name} has MSE {attempt.aux_mse:.4f} on its own images, {own:.4f} on new ones"
    return None


def not_finite(evidence: Evidence) -> str | None:
    """A client that sends NaN or infinity for some images."""
    broken = evidence.wire.broken
    if not broken:
        return None
    named = ", ".join(str(i) for i in broken[:8]) + (", …" if len(broken) > 8 else "")  # noqa: PLR2004
    return f"{len(broken)} of {len(evidence.case.scored)} scored images: {named}"


def certificate_beaten(evidence: Evidence) -> str | None:
    """Somebody identifies more images than a certificate allows: one of the two is wrong.

    Tried are the best matcher of clean z, and every re-identification of the certified images.
    """
    gallery = evidence.certificates.get("gallery", {})
    least = gallery.get("identification_error", {}).get("at_least")
    if least is None:
        return None
    images, said = gallery["images"], f"the certificate says {100 * least:.2f} %"
    if gallery.get("beaten"):
        return f"the best matcher errs in {100 * gallery['matcher_error']:.2f} %, {said}"
    for name, found in evidence.leaks.get("re-id", {}).items():
        errors = round((1 - found["rank_1"]) * found["n"])
        if found["n"] == found["gallery"] == images and beaten(errors, images, least):
            return f"re-identification by {name} errs in {100 * errors / images:.2f} %, {said}"
    return None


def picked(evidence: Evidence) -> str | None:
    """The strongest of some attacks is not the strongest of all."""
    if not evidence.left_out:
        return None
    return f"{', '.join(evidence.left_out)} did not run"


Check = Callable[[Evidence], str | None]


def of_the_wire(check: Callable[[Json], str | None]) -> Check:
    """A check of what was heard on the wire as a check of all the evidence."""
    return lambda evidence: check(evidence.heard)


FLAGS: Mapping[str, tuple[Check, str]] = {
    "white-box weaker than black-box": (
        white_box_weaker,
        "raise the white-box attack's steps and restarts; the headline rests on the other attacks",
    ),
    "decoder not converged": (
        not_converged,
        "audit with a larger profile before believing the number",
    ),
    "gradients masked": (
        gradient_masked,
        "do not count the failure of white-box attacks as protection",
    ),
    "one draw of a random channel": (
        one_draw,
        "add k-query, or use a profile that has it",
    ),
    "noise only in training": (
        train_only_noise,
        "make the noise a channel stage, active in eval mode",
    ),
    "linearly invertible": (
        linearly_open,
        "treat the client as sending the image itself",
    ),
    "attack overfitted": (
        overfitted,
        "give the attacker more aux images",
    ),
    "certificate beaten": (
        certificate_beaten,
        "believe neither: the channel is not what the certificate was told it is",
    ),
    "values not finite": (
        not_finite,
        "mend the encoder; these images count as they are, attacked through zeros",
    ),
    UNFINISHED: (
        lambda evidence: evidence.unfinished,
        "continue it with --resume, then audit again: this is not the model that will be deployed",
    ),
    "attacks left out": (
        picked,
        "audit without --attacks before reporting the number",
    ),
    "validation images scored": (
        lambda evidence: "settings are chosen by them" if evidence.knowledge == "val" else None,
        "choose, train once with --final, and report an audit of test images",
    ),
    "scored images known before": (
        lambda evidence: evidence.copies,
        "take the copies out of one of the parts, train and audit again",
    ),
    **{name: (of_the_wire(check), advice) for name, (check, advice) in WIRE_CHECKS.items()},
}


def raise_flags(evidence: Evidence) -> list[Flag]:
    """Every flag whose check found something."""
    return [
        Flag(name, seen, advice)
        for name, (check, advice) in FLAGS.items()
        if (seen := check(evidence)) is not None
    ]
