"""What a client gives away beyond pictures: its certificates, and leaks of other kinds."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from splitveil.audit.tables import Attributes
from splitveil.audits import Attempt, Case, Wire, strongest_blackbox
from splitveil.audits.beyond_pixels import PLANS, Guess, guess, leaks
from splitveil.audits.certificates import Deployed
from splitveil.audits.gallery import levels
from splitveil.audits.repeats import repeat_leaks
from splitveil.errors import AuditError
from splitveil.nets import front_of
from splitveil.types import Attack, Json, Labelled

ALWAYS = "linear"  # whose reconstructions are looked up beside the strongest attack's


@dataclass(frozen=True)
class Kept:
    """Reconstructions as the audit made them, one byte per value; a suite's `look`."""

    images: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(self, name: str, rows: Tensor, made: Tensor) -> None:
        """Keep what attack `name` made of the scored images at `rows`."""
        self.images[name] = (rows, levels(made))


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


def other_leaks(
    case: Case,
    attacks: Mapping[str, Attack],
    attempts: Mapping[str, Attempt],
    members: Labelled | str,
    outsiders: Labelled,
    *,
    wire: Wire,
    kept: Kept,
    profile: str,
    attributes: Attributes | None = None,
) -> Json:
    """Attributes, membership, identity, and what repeated sendings add.

    `refused` says why one of them is absent.
    """
    best = strongest_blackbox(attempts)["mse_by"]
    names = [n for n in dict.fromkeys((ALWAYS, best)) if n in attacks]
    made = {n: _reconstructions(case, n, attacks[n], wire, kept) for n in names}
    try:
        told = leaks(
            case, members, outsiders, made, wire.seed,
            attributes=attributes, plan=PLANS[profile], wire=wire, strict=False,
        )  # fmt: skip
    except AuditError as err:
        told = {"refused": {"every": str(err)}}
    refused: Json = told.pop("refused", {})
    try:
        told["repeats"] = repeat_leaks(case, wire)
    except AuditError as err:
        refused["repeats"] = str(err)
    return told | ({"refused": refused} if refused else {})


def _reconstructions(case: Case, name: str, attack: Attack, wire: Wire, kept: Kept) -> Guess:
    """What the audit made; an attack that was read from the store is fitted once more."""
    if name in kept.images:
        rows, made = kept.images[name]
        return Guess(str(attack.access), rows, made.to(case.victim.device).float() / 255)
    found = guess(case, name, attack, wire)
    return Guess(found.access, found.rows, levels(found.images).float() / 255)
