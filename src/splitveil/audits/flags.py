"""Flags: signs that a number is not to be trusted. `docs/reference/flags.md` explains each."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from splitveil.audits.bounds import beaten
from splitveil.audits.certificates import count_copies
from splitveil.audits.exposure import MEMBERSHIP
from splitveil.audits.suite import comparable, mean_image_mse
from splitveil.audits.target import Attempt, Target
from splitveil.io import Json
from splitveil.record.schema import AT_CHANCE, FAR_BELOW, NOT_NEEDED, Flag, beats_guessing
from splitveil.rng import normal_like, stream
from splitveil.threat import Access, Labelled, without_nan

WEAKER = 1.05  # times the MSE of the best black-box attack: a worse white-box one is suspect
FALLING = 0.02  # per epoch: a loss that still falls faster at the end has not converged
LARGER_LOSES = 1.02  # times the MSE of the base decoder: a worse large one was not fitted
LINEAR_SHARE = 0.05  # of the mean image's error: with less, ridge regression undoes the client
OVERFIT = 0.7  # of the error on scored images: with less on its own images it overfits
UNFINISHED = "training unfinished"
PROBED = 64
MASKED = 1e-3  # of the change that a small step of the image makes: a gradient below it is masked
SILENT = 0.01  # of the declared noise: less counts as none
UNDECLARED = ("louder", "farther", "shape", "next image", "next number", "other number")
SURE = 1e-3  # p-value below which two audits differ
BESIDE = (FAR_BELOW,)  # raised where other rows are at hand: `report.gains`
PROBED_ON = {"sent": "what is sent", "clean": "the clean features", "own": "the end of the body"}
TELLS_P, TELLS_BITS = 0.01, 0.01  # of the bit that says whether an image was sent
Attempts = Mapping[str, Attempt]


def white_box_weaker(attempts: Attempts) -> str | None:
    """A white-box attack knows more than a black-box one; if it does worse, it failed."""
    rivals = {n: a for n, a in comparable(attempts).items() if a.access == Access.BLACK_BOX}
    for name, attempt in attempts.items():
        if attempt.access != Access.WHITE_BOX or not rivals:
            continue
        there = {n: a.scores(attempt.rows).mse for n, a in rivals.items()}
        best = min(there, key=lambda n: there[n])
        own = attempt.scores().mse
        if own > WEAKER * there[best]:
            return f"{name} has MSE {own:.4f} where {best} has {there[best]:.4f}"
    return None


def fall_per_epoch(curve: Sequence[float]) -> float:
    """Relative fall of a training loss per epoch, from its last tenth and the tenth before.

    Each tenth, at least one epoch, counts by its mean, because single epochs are noisy.

    >>> round(fall_per_epoch((1.0, 0.5, 0.45)), 6)
    0.1
    """
    back = max(1, len(curve) // 10)
    last, before = sum(curve[-back:]), sum(curve[-2 * back : -back])
    if before <= 0:
        return 0.0
    return float(1.0 - max(last / before, 0.0) ** (1.0 / back))


def not_converged(attempts: Attempts) -> str | None:
    """A decoder was stopped early if its loss still falls, or if the larger one does worse."""
    for name, attempt in attempts.items():
        if len(attempt.curve) == 1:
            return f"{name} was trained for one epoch at most, so nothing shows that it converged"
        fall = fall_per_epoch(attempt.curve)
        if fall > FALLING:
            return f"the training loss of {name} still fell by {100 * fall:.1f} % per epoch"
    base, large = attempts.get("decoder"), attempts.get("decoder-large")
    if base is not None and large is not None:
        small_mse, large_mse = base.scores().mse, large.scores().mse
        if large_mse > LARGER_LOSES * small_mse:
            return f"decoder-large has MSE {large_mse:.4f}, decoder {small_mse:.4f}"
    return None


def gradient_masked(target: Target) -> str | None:
    """An encoder that reacts to its input but has no gradient misleads white-box attacks."""
    box = target.victim.white_box()
    x = target.scored.images[:PROBED].to(box.device)
    generator = stream(target.seed, "flags/gradient", box.device)
    near = (x + 0.02 * normal_like(x, generator)).clamp(0, 1)
    with torch.no_grad():
        z = box.encoder(x)
        moved = box.encoder(near) - z
    step = near - x
    towards = normal_like(z, generator)
    real = without_nan((moved * towards).flatten(1).sum(1))
    x = x.clone().requires_grad_()
    with torch.enable_grad():
        out = box.encoder(x)
        grad = None
        if out.requires_grad:
            (grad,) = torch.autograd.grad((out * towards).sum(), x, allow_unused=True)
    along = torch.zeros_like(real) if grad is None else without_nan((grad * step).flatten(1).sum(1))
    size = float(real.square().mean().sqrt())
    told = float(along.square().mean().sqrt())
    if size > 0 and told < MASKED * size:
        return f"a small change moves z by {size:.3g} along a probe, the gradient says {told:.3g}"
    return None


def one_draw(target: Target, attempts: Attempts) -> str | None:
    """A random channel must also be attacked with several draws of one image."""
    repeated = any(a.repeats > 1 for a in attempts.values())
    if not repeated and varies(target, training=False):
        return "two sendings of one image differ, and no attack with repeats was run"
    return None


def train_only_noise(target: Target) -> str | None:
    """Noise that is gone in deployment protects nobody."""
    if varies(target, training=True) and not varies(target, training=False):
        return "two sendings of one image differ in train mode and are equal in eval mode"
    return None


@torch.no_grad()
def varies(target: Target, *, training: bool) -> bool:
    """Whether sending the same images twice gives different values, in either mode."""
    box = target.victim.white_box()
    x = target.scored.images[:PROBED].to(box.device)
    x = torch.cat([x, x])  # BatchNorm in train mode needs two
    generator = stream(target.seed, "flags/draws", box.device)
    encoder, channel = box.encoder.train(training), box.channel.train(training)

    def once() -> Tensor:
        return without_nan(channel(encoder(x), generator))  # NaN differs from itself

    with torch.random.fork_rng([box.device] if box.device.type == "cuda" else []):
        return not torch.equal(once(), once())


def linearly_invertible(target: Target, attempts: Attempts) -> str | None:
    """A client that a linear map undoes hides nothing, whatever other attacks find."""
    linear = attempts.get("linear")
    if linear is None:
        return None
    own, floor = linear.scores().mse, mean_image_mse(target.aux, target.scored)
    if own < LINEAR_SHARE * floor:
        return f"ridge regression has MSE {own:.2g}, {100 * own / floor:.1f} % of the mean image's"
    return None


def attack_overfitted(attempts: Attempts) -> str | None:
    """An attack that does far better on its own images than on new ones needs more images."""
    for name, attempt in comparable(attempts).items():
        if attempt.aux_mse is None or attempt.keeps_aux:
            continue
        own = attempt.scores().mse
        if attempt.aux_mse < OVERFIT * own:
            return f"{name} has MSE {attempt.aux_mse:.4f} on its own images, {own:.4f} on new ones"
    return None


def not_finite(target: Target) -> str | None:
    """The client sends NaN or infinity for some images."""
    broken = target.sent.broken
    if not broken:
        return None
    named = ", ".join(str(i) for i in broken[:8]) + (", …" if len(broken) > 8 else "")  # noqa: PLR2004
    return f"{len(broken)} of {len(target.scored)} scored images: {named}"


def certificate_beaten(certificates: Json, leaks: Json) -> str | None:
    """An attacker identifies more images than a certificate allows: one of the two is wrong.

    The attackers are the best matcher of clean z, and every re-identification of the certified
    images.
    """
    gallery = certificates.get("gallery", {})
    least = gallery.get("identification_error", {}).get("at_least")
    if least is None:
        return None
    images, said = gallery["images"], f"the certificate says {100 * least:.2f} %"
    if gallery.get("beaten"):
        return f"the best matcher errs in {100 * gallery['matcher_error']:.2f} %, {said}"
    for name, found in leaks.get("re-id", {}).items():
        errors = round((1 - found["rank_1"]) * found["n"])
        if found["n"] == found["gallery"] == images and beaten(errors, images, least):
            return f"re-identification by {name} errs in {100 * errors / images:.2f} %, {said}"
    return None


def arithmetic_identifies(leaks: Json) -> str | None:
    """Arithmetic finds images that distance does not: the noise is rounded before it is added."""
    found = leaks.get("arithmetic", {})
    if found.get("p", 1.0) >= SURE:
        return None
    return (
        f"of {found['n']} images arithmetic finds {100 * found['rank_1']:.1f} %, distance "
        f"{100 * found['distance']:.1f} %"
    )


def known_before(target: Target) -> str | None:
    """Scored images that the model or the attacker knows are not like images in use."""
    if not target.own_data:
        return None
    known = [some.images for some in (target.aux, target.members) if isinstance(some, Labelled)]
    count, told = count_copies(target.scored.images, known), len(target.scored)
    seen = f"{count} of {told} are copies of images that were trained on or that the attacker has"
    return seen if count else None


def _failed(wire: Json, *names: str) -> str | None:
    """What the first of these tests that failed saw; None if none failed."""
    for name in wire.get("failed", ()):
        if name in names:
            test = wire["tests"][name]
            return f"test '{name}' saw {test['seen']:.3g}, p = {test['p']:.2g}"
    return None


def _noise_failed(wire: Json, *names: str) -> str | None:
    """The same for tests of the noise, which mean nothing where there is almost no noise."""
    noise = wire.get("noise")
    silent = noise is not None and noise["measured"] < SILENT * noise["declared"]
    return None if silent else _failed(wire, *names)


def wire_without_noise(wire: Json) -> str | None:
    """The client's noise is off, or weaker than in the audit."""
    noise = wire.get("noise")
    seen = _failed(wire, "quieter", "nearer")
    if seen is None or noise is None:
        return seen
    return (
        f"the noise of {wire['images']} images has deviation {noise['measured']:.4g}; "
        f"declared is {noise['declared']:.4g}, which gives no less than {noise['measured_low']:.4g}"
    )


def wire_leaks_more(wire: Json) -> str | None:
    """The same attack does better on what was captured than in the run's audit."""
    found = wire.get("offline", {})
    if found.get("p", 1.0) >= SURE or found["difference"] >= 0:
        return None
    return (
        f"{found['attack']} has MSE {found['mse'] + found['difference']:.4f} on the wire, "
        f"{found['mse']:.4f} in the run's audit"
    )


def sends_more(wire: Json) -> str | None:
    """A client with an exit rule sent more images than the rule, or other ones."""
    rule = wire.get("rule")
    if rule is None or not rule["not_allowed"]:
        return None
    return (
        f"{rule['sent']} of {rule['images']} images were sent, the exit rule sends "
        f"{rule['allowed']}; {rule['not_allowed']} of them it answers on the device"
    )


def server_not_needed(probe: Json) -> str | None:
    """A linear head on the device answers as well as the server, within half a point."""
    adds = probe.get("server_adds")
    if adds is None or adds["high"] >= NOT_NEEDED:
        return None
    heads = {name: found["accuracy"] for name, found in probe.items() if name != "server_adds"}
    best = max(heads, key=lambda name: heads[name])
    return (
        f"a linear head on {PROBED_ON[best]} answers {100 * heads[best]:.2f} %; the server adds "
        f"{100 * adds['gain']:+.2f} points, at most {100 * adds['high']:+.2f}"
    )


def exit_tells(found: Json) -> str | None:
    """Whether an image was sent tells something about it."""
    told = {k: v for k, v in found.items() if v["p"] < TELLS_P and v["bits"] > TELLS_BITS}
    if not told:
        return None
    most = max(told, key=lambda name: told[name]["bits"])
    return f"whether an image is sent tells {told[most]['bits']:.3f} bits of its {most}"


def exit_tells_members(found: Json) -> str | None:
    """Whether an image was sent tells whether the client was trained on it."""
    told = found.get(MEMBERSHIP)
    if told is None or exit_tells({MEMBERSHIP: told}) is None:
        return None
    others, members = told["share_sent"].values()
    return (
        f"whether an image is sent tells {told['bits']:.3f} bits of its membership: "
        f"{100 * members:.1f} % of trained images are sent, {100 * others:.1f} % of others"
    )


def answers_at_chance(target: Target, accuracy: float | None) -> str | None:
    """A model that learned nothing has nothing to protect, and protects it well."""
    labels = (target.scored if target.test is None else target.test).labels
    guess = float(labels.bincount().max()) / len(labels)
    if accuracy is None or beats_guessing(accuracy, guess):
        return None
    return f"accuracy is {100 * accuracy:.2f} %, always guessing one class {100 * guess:.2f} %"


FLAGS: Mapping[str, str] = {  # every flag, and what to do about it
    "white-box weaker than black-box": (
        "raise the white-box attack's steps and restarts; the headline rests on the other attacks"
    ),
    "decoder not converged": "audit with a larger profile before believing the number",
    "gradients masked": "do not count the failure of white-box attacks as protection",
    "one draw of a random channel": "add k-query, or use a profile that has it",
    "noise only in training": "make the noise a channel stage, active in eval mode",
    "linearly invertible": "treat the client as sending the image itself",
    "attack overfitted": "give the attacker more aux images",
    "certificate beaten": "trust neither: the channel is not the one that was certified",
    "noise undone by arithmetic": (
        "draw the noise on a grid, as this package's client does; certificates do not cover this"
    ),
    "values not finite": "correct the encoder; these images were attacked with 0 for such values",
    UNFINISHED: (
        "continue it with --resume, then audit again: this is not the model that will be deployed"
    ),
    "attacks left out": "audit without --attacks before reporting the number",
    "validation images scored": (
        "choose, train once with --final, and report an audit of test images"
    ),
    "scored images known before": "take the copies out of one of the parts, train and audit again",
    "noise missing on the wire": (
        "do not use this client: switch its noise on, or audit a run with the noise it has"
    ),
    "floating-point noise on the wire": (
        "deploy this version's client with a new export: arithmetic undoes noise in floating point"
    ),
    "noise repeats on the wire": "draw noise from the operating system's generator, without a seed",
    "noise not as declared on the wire": "make the client's channel the one that was audited",
    "another client on the wire": (
        "deploy the encoder of this run, or audit the one that is deployed"
    ),
    "more than z on the wire": "send the tensor and its description alone",
    "server not needed": (
        "ship the client alone, with a linear head: it is as accurate, and nothing leaves"
    ),
    "exit tells the class": (
        "whether an image is sent says something about it; use thresholds per class, or send all"
    ),
    "exit tells the members": (
        "the device is surer of images that it was trained on; train with augmentation or for "
        "fewer epochs, or send all"
    ),
    "sent more than the rule allows": (
        "find out why the client sends these images, and do not rely on the audited exposure"
    ),
    AT_CHANCE: (
        "train it again with a weaker penalty; a model that answers nothing has nothing to protect"
    ),
    FAR_BELOW: (
        "weaken the defence: what little leaks is bought with answers that nobody would use"
    ),
    "wire leaks more than the audit": (
        "believe this record, and find out what the deployed client does differently"
    ),
}


def raise_flags(
    target: Target,
    attempts: Attempts,
    *,
    certificates: Json,
    leaks: Json,
    wire: Json,
    left_out: Sequence[str] = (),
    probe: Json | None = None,
    accuracy: float | None = None,
) -> list[Flag]:
    """Check for every flag; returns those that are raised.

    Args:
        target: What was attacked.
        attempts: What the attacks made of it.
        certificates: Its certificates, as in the record.
        leaks: Its leaks beyond pixels, as in the record.
        wire: What was found in captured requests; empty if there are none.
        left_out: Attacks of the profile that the user chose not to run.
        probe: What linear heads answer without the server, as in the record.
        accuracy: Its accuracy; None if it is not known.
    """
    beside = wire.get("beside", ())  # fields of a request that no attack looks at
    bit = leaks.get("exit", {})  # what it tells that an image was sent
    validated = "settings are chosen by them" if target.knowledge == "val" else None
    seen = {
        "white-box weaker than black-box": white_box_weaker(attempts),
        "decoder not converged": not_converged(attempts),
        "gradients masked": gradient_masked(target),
        "one draw of a random channel": one_draw(target, attempts),
        "noise only in training": train_only_noise(target),
        "linearly invertible": linearly_invertible(target, attempts),
        "attack overfitted": attack_overfitted(attempts),
        "certificate beaten": certificate_beaten(certificates, leaks),
        "noise undone by arithmetic": arithmetic_identifies(leaks),
        "values not finite": not_finite(target),
        UNFINISHED: target.unfinished,
        "attacks left out": f"{', '.join(left_out)} did not run" if left_out else None,
        "validation images scored": validated,
        "scored images known before": known_before(target),
        "noise missing on the wire": wire_without_noise(wire),
        # The server can subtract noise that it sees twice: it came from a seed.
        "noise repeats on the wire": _noise_failed(wire, "repeats", "starts"),
        "floating-point noise on the wire": _noise_failed(wire, "grid", "low bits"),
        "noise not as declared on the wire": _noise_failed(wire, *UNDECLARED),
        "another client on the wire": _failed(wire, "offset", "slope", "different"),
        "more than z on the wire": f"requests hold {', '.join(beside)}" if beside else None,
        "wire leaks more than the audit": wire_leaks_more(wire),
        "sent more than the rule allows": sends_more(wire),
        "server not needed": server_not_needed(probe or {}),
        AT_CHANCE: answers_at_chance(target, accuracy),
        "exit tells the class": exit_tells({k: v for k, v in bit.items() if k != MEMBERSHIP}),
        "exit tells the members": exit_tells_members(bit),
    }
    return [Flag(name, what, FLAGS[name]) for name, what in seen.items() if what is not None]
