"""Auditing somebody else's encoder: a callable and images in, a record out."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from torch import Tensor, nn

from splitveil.audit import (
    Attempt,
    Case,
    Evidence,
    accuracy,
    by_attack,
    ceiling_mse,
    floor_mse,
    gallery,
    intercept,
    per_image,
    raise_flags,
    run_attacks,
    strongest,
    strongest_blackbox,
    worst_case,
)
from splitveil.audit.access import finite
from splitveil.audit.certificates import KINDS
from splitveil.auditing import ACCURACY_DRAWS
from splitveil.config import find_profile
from splitveil.errors import AuditError, ConfigError
from splitveil.listening import LISTENED, check_noise, hear_noise, sent_rate
from splitveil.nets import Channel, GaussianNoise
from splitveil.nets.split import count_macs
from splitveil.passport import command, device_name, versions
from splitveil.rng import derive_seed, stream
from splitveil.stranger import (
    Given,
    InRows,
    InShape,
    OpenVictim,
    Server,
    Stranger,
    meet,
    own_copy,
    seeded,
)
from splitveil.types import Access, Attack, Json, Labelled, Progress, Record, Victim, silent

PROBED = 2
NO_ANSWER = "–"


@dataclass(frozen=True, kw_only=True, eq=False)
class Target:
    """What is audited: `client` gives what leaves the device, `server` answers it.

    `noise_std` is the declared standard deviation of Gaussian noise that the client adds last.
    With `white_box` the attacker also has the client's networks: the module itself, or `encoder`
    and `channel` of the object.
    """

    client: object
    name: str
    server: object | None = None
    server_name: str | None = None
    noise_std: float | None = None
    white_box: bool = False
    given: Given = "auto"

    def __post_init__(self) -> None:
        if self.noise_std is not None and not 0 < self.noise_std < math.inf:
            raise ConfigError(
                f"noise must be a finite number > 0, got {self.noise_std}; leave it out if the "
                "client adds none, or if you do not know it"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class Material:
    """The images of an audit: what the attacker fits on, what is scored, and `test` for accuracy.

    `knowledge` names the attacker's knowledge and `hashes` identify the images in a record.
    """

    name: str
    classes: tuple[str, ...]
    aux: Labelled
    scored: Labelled
    test: Labelled
    knowledge: str
    hashes: Json


@dataclass(frozen=True, kw_only=True)
class ServerlessRecord(Record):
    """A record of a client alone: nobody answered, so its `accuracy` is null."""

    accuracy: float | None = None  # type: ignore[assignment]  # wider than a run's, on purpose


class NoServer(nn.Module):
    """Stands where a server is missing; says the same of everything, and nobody listens."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes

    def forward(self, z: Tensor) -> Tensor:
        """Scores (n, classes), all 0."""
        return z.new_zeros(len(z), self.num_classes)


def open_parts(target: Target, sender: Stranger, x: Tensor) -> tuple[nn.Module, nn.Module]:
    """Encoder and channel of a client that can be opened; refuses one that cannot.

    Without a `channel` of its own, what follows an object's `encoder` is the declared noise.
    """
    inner = getattr(target.client, "encoder", None)
    whole = isinstance(target.client, nn.Module) and not isinstance(inner, nn.Module)
    found = target.client if whole else inner
    if not isinstance(found, nn.Module):
        raise ConfigError(
            f"a white-box audit needs an nn.Module, or an object whose `encoder` is one; "
            f"'{target.name}' is a {type(target.client).__name__}: leave --white-box out"
        )
    encoder = own_copy(found, target.name).cpu()
    noise = [GaussianNoise(target.noise_std)] if target.noise_std and not whole else []
    channel: nn.Module = Channel(noise)  # of a whole module the noise, if any, is inside
    theirs = None if whole else getattr(target.client, "channel", None)
    probe = Stranger(encoder, f"{target.name}.encoder", "cpu")  # says clearly what goes wrong
    z = probe(x)
    if callable(theirs):
        channel = InShape(Stranger(theirs, f"{target.name}.channel", "cpu"), probe.shape or ())
    made = channel(z, stream(0, "foreign/open")).shape
    wire = sender(x, stream(0, "foreign/open")).shape
    if not z.shape == made == wire:
        raise AuditError(
            f"of '{target.name}' the encoder gives {tuple(z.shape[1:])} per image, the channel "
            f"{tuple(made[1:])}, and {tuple(wire[1:])} is sent; in a white-box audit all three "
            "must have one shape"
        )
    return nn.Sequential(encoder, InRows()), channel


def runnable(target: Target, attacks: Mapping[str, Attack]) -> tuple[dict[str, Attack], Json]:
    """The attacks that can be run on the target, and why the others are left out."""
    left_out: Json = {}
    for name, attack in attacks.items():
        if attack.access is Access.WHITE_BOX and not target.white_box:
            left_out[name] = "white-box: the client's networks are not given"
        elif attack.access is Access.LABEL and target.server is None:
            left_out[name] = "needs the server's answers, and no server is given"
    return {n: a for n, a in attacks.items() if n not in left_out}, left_out


def examine(
    target: Target,
    material: Material,
    profile: str,
    *,
    seed: int = 0,
    progress: Progress = silent,
) -> tuple[Record, Json]:
    """The record of an audit and its pictures; writes nothing.

    Attacks run on the CPU, wherever the callable does its work. What the record cannot know, as
    the training or the client's multiply-adds, is null.
    """
    with seeded(derive_seed(seed, "foreign")):  # for what draws outside of a sending
        return _examine(target, material, profile, seed, progress)


def _examine(
    target: Target, material: Material, profile: str, seed: int, progress: Progress
) -> tuple[Record, Json]:
    started = time.perf_counter()
    attacks, left_out = runnable(target, find_profile(profile))
    few = material.scored.images[:PROBED]
    sender = meet(target.client, target.name, target.given, few, seed)
    parts = open_parts(target, sender, few) if target.white_box else None
    victim = Victim(nn.Identity(), sender) if parts is None else OpenVictim(sender, *parts)
    case = Case(
        victim=victim,
        head=_head(target, sender, few, len(material.classes), seed),
        num_classes=len(material.classes),
        aux=material.aux,
        scored=material.scored,
    )
    heard, repeatable = hear_noise(victim, case.scored.images[:LISTENED], seed)
    wire = intercept(case, seed)
    floats = wire.seen.z[0].numel()
    if target.noise_std is not None:
        check_noise(target.noise_std, heard, min(LISTENED, len(case.scored)) * floats)
    attempts = run_attacks(case, attacks, seed, progress, wire=wire)
    rate = None
    if target.noise_std is not None and not wire.broken:
        rate = sent_rate(victim, case.scored, case.num_classes, target.noise_std, seed)
    encoder = None if parts is None else parts[0]
    shape = tuple(case.scored.images.shape[1:])
    facts = _facts(case, attempts) | {
        "true_rate_nats": rate,
        "per_image": per_image(attempts),
        "flags": [asdict(f) for f in raise_flags(Evidence(case, wire, attempts))],
        "certificates": {kind: {"refused": _refusal(target, heard)} for kind in KINDS},
        "client": {
            "macs": None if encoder is None else count_macs(encoder, shape),
            "params": None if encoder is None else sum(p.numel() for p in encoder.parameters()),
            "wire_floats": floats,
        },
        "config": {
            "dataset": material.name,
            "callable": target.name,
            "server": target.server_name,
            "noise_std": target.noise_std,
            "defence": None,
            "net": None,
            "seed": None,
        },
        "splits": material.hashes,
        "seeds": {"train": None, "attack": seed, "split": None},
        "versions": versions(),
        "device": device_name(victim.device),
        "audit": {
            "profile": profile,
            "aux": material.knowledge,
            "aux_images": len(case.aux),
            "scored": len(case.scored),
            "not_finite": list(wire.broken),
            "accuracy_draws": None if target.server is None else ACCURACY_DRAWS,
            "threat": "white-box" if target.white_box else "black-box",
            "left_out": left_out,
            "noise": {"declared": target.noise_std, "measured": heard},
            "input": sender.place,
            "repeatable": repeatable,
            "final": None,
            "model": None,
            "command": command(),
        },
    }
    pictures = gallery(case.scored, attempts, wire.seen.answer, material.classes)
    facts["seconds"] = {"train": None, "audit": round(time.perf_counter() - started, 3)}
    if target.server is None:
        return ServerlessRecord(**unanswered(facts)), without_answers(pictures)
    score = accuracy(replace(case, scored=material.test), seed, ACCURACY_DRAWS)
    return Record(accuracy=score, **facts), pictures


def _head(target: Target, sender: Stranger, x: Tensor, classes: int, seed: int) -> nn.Module:
    if target.server is None:
        return NoServer(classes)
    name = target.server_name or f"{target.name}'s server"
    z = finite(sender(x, stream(seed, "foreign/server")))
    wire = sender.shape or ()
    stranger = meet(target.server, name, "auto", z.reshape(len(z), *wire), seed)
    return Server(stranger, wire, classes)


def _facts(case: Case, attempts: Mapping[str, Attempt]) -> Json:
    headline = strongest(attempts)
    ceiling = ceiling_mse(case.aux, case.scored, case.num_classes)
    return {
        "attacks": by_attack(attempts),
        "strongest": headline,
        "strongest_blackbox": strongest_blackbox(attempts),
        "worst_case": worst_case(attempts),
        "ceiling": {"mse": ceiling},
        "floor": {"mse": floor_mse(case.aux, case.scored)},
        "leakage": 1.0 - headline["mse"] / ceiling,
    }


def _refusal(target: Target, heard: float) -> str:
    if heard == 0:
        return "no certificate: the channel is deterministic"
    if target.noise_std is None:
        return "no certificate: noise of unknown scale; declare it with --noise SIGMA"
    return "no certificate: what a callable computes before its noise is not known for certain"


def unanswered(facts: Json) -> Json:
    """The facts without the accuracies of a server that is not there."""
    return facts | {"attacks": {n: a | {"accuracy": None} for n, a in facts["attacks"].items()}}


def without_answers(pictures: Json) -> Json:
    """A gallery in which every answer is a class of its own that says there is none."""
    classes: Sequence[str] = pictures["classes"]
    return pictures | {
        "classes": [*classes, NO_ANSWER],
        "answers": [len(classes)] * len(pictures["answers"]),
    }
