"""Auditing somebody else's encoder: a callable and images in, a record out."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from splitveil.audit import Case, Wire, intercept
from splitveil.audit.access import finite
from splitveil.audit.certificates import Part, fingerprints, refusals
from splitveil.audit.tables import Attributes
from splitveil.config import find_profile
from splitveil.disclosures import deployed
from splitveil.errors import AuditError, ConfigError
from splitveil.examining import Claim, NoServer, Subject, measure, record_of
from splitveil.listening import LISTENED, check_noise, hear, hear_noise, sent_rate
from splitveil.nets import Channel, GaussianNoise
from splitveil.nets.cost import Cost
from splitveil.rng import derive_seed, stream
from splitveil.stranger import (
    Given,
    InRows,
    InShape,
    Server,
    Stranger,
    meet,
    own_copy,
    seeded,
)
from splitveil.types import Access, Attack, Json, Labelled, Progress, Record, Victim, silent
from splitveil.victim import Send, by_rows, check_images

PROBED = 2
MET = 16  # images that are encoded alone
SAME = 1e-3  # deviations of the noise: less is rounding
UNKNOWN = "no images are known to be training data; name them with --members"


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
    `members` are all images that the client was trained or chosen on, where they are known.
    """

    name: str
    classes: tuple[str, ...]
    aux: Labelled
    scored: Labelled
    test: Labelled
    knowledge: str
    hashes: Json
    members: Labelled | None = None
    attributes: Attributes | None = None


class OpenVictim(Victim):
    """A stranger's client whose networks are known; queries still go to the function itself."""

    def __init__(self, sender: Stranger, encoder: nn.Module, channel: nn.Module) -> None:
        super().__init__(encoder, channel)
        self._sender = sender

    @torch.no_grad()
    def send(self, x: Tensor, generator: Generator | None = None) -> Tensor:
        """What leaves the client for images x (n, c, h, w) in [0, 1]."""
        check_images(x, "images given to the victim")
        sent: Tensor = self._sender(x, generator)
        return sent

    def prepare(self, images: Tensor) -> Send:
        """Every query goes to the function."""
        return by_rows(self.send, images)


def open_parts(target: Target, sender: Stranger, x: Tensor) -> tuple[nn.Sequential, nn.Module]:
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
        if attack.access == Access.WHITE_BOX and not target.white_box:
            left_out[name] = "white-box: the client's networks are not given"
        elif attack.access == Access.LABEL and target.server is None:
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
    facts, pictures = measure(
        Subject(
            case=case,
            wire=wire,
            classes=material.classes,
            attacks=attacks,
            profile=profile,
            aux=material.knowledge,
            test=None if target.server is None else material.test,
            members=UNKNOWN if material.members is None else material.members,
            outsiders=material.test,
            claim=claim_of(target, material, parts, wire, heard),
            attributes=material.attributes,
            own_data=":" in material.name,
        ),
        progress=progress,
    )
    rate = None
    if target.noise_std is not None and not wire.broken:
        rate = sent_rate(victim, case.scored, case.num_classes, target.noise_std, seed)
    encoder = None if parts is None else parts[0]
    shape = tuple(case.scored.images.shape[1:])
    facts["audit"] |= {
        "threat": "white-box" if target.white_box else "black-box",
        "left_out": left_out,
        "noise": {"declared": target.noise_std, "measured": heard},
        "input": sender.place,
        "repeatable": repeatable,
        "final": None,
        "model": None,
    }
    facts |= {
        "true_rate_nats": rate,
        "client": {
            "macs": None if encoder is None else Cost.of(encoder, shape).macs,
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
        "seconds": {"train": None, "audit": round(time.perf_counter() - started, 3)},
    }
    return record_of(facts), pictures


def _head(target: Target, sender: Stranger, x: Tensor, classes: int, seed: int) -> nn.Module:
    if target.server is None:
        return NoServer(classes)
    name = target.server_name or f"{target.name}'s server"
    z = finite(sender(x, stream(seed, "foreign/server")))
    wire = sender.shape or ()
    stranger = meet(target.server, name, "auto", z.reshape(len(z), *wire), seed)
    return Server(stranger, wire, classes)


def claim_of(
    target: Target,
    material: Material,
    parts: tuple[nn.Sequential, nn.Module] | None,
    wire: Wire,
    heard: float,
) -> Claim | Json:
    """What can be certified of a client whose networks are given, or why nothing can.

    What was sent must be the encoder's z and the declared noise, as far as tests can tell.
    """
    if heard == 0:
        return refusals("the channel is deterministic")
    if target.noise_std is None:
        return refusals("noise of unknown scale; declare it with --noise SIGMA")
    if parts is None:
        return refusals(
            "what a callable computes before its noise is not known for certain; show its "
            "networks with --white-box"
        )
    noise, x = Channel([GaussianNoise(target.noise_std)]), material.scored.images[:LISTENED]
    failed = hear(parts[0], noise, wire.seen.z[: len(x)], x, seed=wire.seed)["failed"]
    if failed:
        return refusals(
            "what is sent is not the encoder's z and the declared noise; tests that fail: "
            f"{', '.join(failed)}"
        )
    if _mixes(parts[0], x, target.noise_std):
        return refusals("z of an image depends on the other images of its batch")
    known = None if material.members is None else fingerprints(material.members.images)
    theirs = parts[0][0]  # without the flattening, behind which no bounds are found
    return Claim(
        client=deployed(theirs, noise, torch.device("cpu")),
        fit=Part(data=material.aux, ids=fingerprints(material.aux.images)),
        fresh=Part(data=material.test, ids=fingerprints(material.test.images)),
        seen=known,
    )


@torch.no_grad()
def _mixes(encoder: nn.Module, x: Tensor, noise_std: float) -> bool:
    """Whether an image alone is encoded otherwise than among others, beyond rounding."""
    among, alone = encoder(x), torch.cat([encoder(one[None]) for one in x[:MET]])
    return bool((among[:MET] - alone).abs().max() > SAME * noise_std)
