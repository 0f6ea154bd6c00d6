"""What an audit measures of a case, whoever made it: attacks, certificates, leaks and flags."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from torch import Tensor, nn

from splitveil.attacks import for_images
from splitveil.audit.tables import Attributes
from splitveil.audits import (
    Attempt,
    Case,
    Evidence,
    Store,
    Wire,
    accuracy,
    by_attack,
    ceiling_mse,
    floor_mse,
    gallery,
    per_image,
    raise_flags,
    run_attacks,
    strongest,
    strongest_blackbox,
    worst_case,
)
from splitveil.audits.certificates import Deployed, Part, certify, count_copies
from splitveil.audits.disclosures import Kept, other_leaks
from splitveil.errors import AuditError
from splitveil.passport import command, device_name, versions
from splitveil.rng import stream
from splitveil.types import Attack, Json, Labelled, Progress, Record, silent

ALIKE = 1e-13  # mean squared error of rounding alone
ACCURACY_DRAWS = 4
NO_ANSWER = "–"


@dataclass(frozen=True, kw_only=True, eq=False)
class Claim:
    """What certificates are about: the client, and which images fitted and measure the bound.

    `seen` are the ids of every image of training and selection; None if they are not known.
    """

    client: Deployed
    fit: Part
    fresh: Part
    seen: Tensor | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """A case, and what is known beside it.

    `test` are the images of the accuracy; None where nobody answers. `members` were trained on,
    `outsiders` were not; a text says why no members are known. `claim` is what can be certified,
    or by kind why not. `left_out` are attacks of the profile that were not asked for. `heard` is
    what the wire itself says, and `versus` compares the attempts with those of another audit.
    `unfinished` says how far a training came that did not end. Of `own_data`, which nobody has
    published, copies among the images are counted.
    """

    case: Case
    wire: Wire
    classes: Sequence[str]
    attacks: Mapping[str, Attack]
    profile: str
    aux: str
    test: Labelled | None
    members: Labelled | str
    outsiders: Labelled
    claim: Claim | Json
    attributes: Attributes | None = None
    left_out: Sequence[str] = ()
    heard: Json = field(default_factory=dict)
    unfinished: str | None = None
    own_data: bool = False
    versus: Callable[[Mapping[str, Attempt]], Json] | None = None


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


def measure(
    subject: Subject, *, progress: Progress = silent, store: Store | None = None
) -> tuple[Json, Json]:
    """The fields of a record that follow from the case, and the audit's pictures.

    Of `audit` these are the keys that every audit has; the caller adds its own.
    """
    case, wire, seed = subject.case, subject.wire, subject.wire.seed
    kept = Kept()
    ceiling = ceiling_mse(case.aux, case.scored, case.num_classes)
    if ceiling < ALIKE:
        raise AuditError(
            "all images of a class are alike: who knows the class knows the image, and there is "
            "nothing left to hide; use a dataset whose classes hold different images"
        )
    attacks = for_images(subject.attacks, case.scored.images.shape[1:].numel(), len(case.scored))
    attempts = run_attacks(case, attacks, seed, progress, wire=wire, store=store, look=kept)
    headline = strongest(attempts)
    certified = _certificates(subject)
    told = other_leaks(
        case, attacks, attempts, subject.members, subject.outsiders,
        wire=wire, kept=kept, profile=subject.profile, attributes=subject.attributes,
    )  # fmt: skip
    heard = dict(subject.heard)
    if subject.versus is not None:
        heard["offline"] = subject.versus(attempts)
    evidence = Evidence(
        case, wire, attempts, certified, heard, subject.left_out, told, subject.unfinished,
        subject.aux, _copies(subject),
    )  # fmt: skip
    facts: Json = {
        "accuracy": _accuracy(subject),
        "attacks": by_attack(attempts),
        "strongest": headline,
        "strongest_blackbox": strongest_blackbox(attempts),
        "worst_case": worst_case(attempts),
        "ceiling": {"mse": ceiling},
        "floor": {"mse": floor_mse(case.aux, case.scored)},
        "leakage": 1.0 - headline["mse"] / ceiling,
        "per_image": per_image(attempts),
        "certificates": certified,
        "leaks": told,
        "flags": [asdict(flag) for flag in raise_flags(evidence)],
        "versions": versions(),
        "device": device_name(case.victim.device),
        "audit": {
            "profile": subject.profile,
            "aux": subject.aux,
            "aux_images": len(case.aux),
            "scored": len(case.scored),
            "not_finite": list(wire.broken),
            "accuracy_draws": None if subject.test is None else ACCURACY_DRAWS,
            "command": command(),
        }
        | ({"wire": heard} if heard else {})
        | ({} if subject.attributes is None else {"attributes": sorted(subject.attributes.aux)}),
    }
    pictures = gallery(case.scored, attempts, wire.seen.answer, subject.classes)
    if subject.test is None:
        return unanswered(facts), without_answers(pictures)
    return facts, pictures


def record_of(facts: Json) -> Record:
    """The record of these fields; one without an accuracy may say so."""
    return ServerlessRecord(**facts) if facts["accuracy"] is None else Record(**facts)


def _accuracy(subject: Subject) -> float | None:
    if subject.test is None:
        return None
    case = replace(subject.case, scored=subject.test)
    return accuracy(case, subject.wire.seed, ACCURACY_DRAWS)


def _copies(subject: Subject) -> str | None:
    """How many scored images are no new ones: they look better than images in use will."""
    if not subject.own_data:
        return None
    known = [subject.case.aux, subject.members]
    images = [some.images for some in known if isinstance(some, Labelled)]
    count = count_copies(subject.case.scored.images, images)
    return (
        f"{count} of {len(subject.case.scored)} are copies of images that were trained on or that "
        "the attacker has"
        if count
        else None
    )


def _certificates(subject: Subject) -> Json:
    claim, case = subject.claim, subject.case
    if not isinstance(claim, Claim):
        return claim
    return certify(
        claim.client,
        case.scored,
        claim.fit,
        claim.fresh,
        claim.seen,
        num_classes=case.num_classes,
        generator=stream(subject.wire.seed, "certificates", case.victim.device),
    )


def unanswered(facts: Json) -> Json:
    """The facts without what a server that is not there would have said."""
    leaks = dict(facts["leaks"])
    if "membership" in leaks:
        told = leaks["membership"]
        best = {k: v for k, v in told["strongest"].items() if k != "outputs"}
        leaks["membership"] = {k: v for k, v in told.items() if k != "outputs"} | {
            "strongest": best
        }
    return facts | {
        "attacks": {n: a | {"accuracy": None} for n, a in facts["attacks"].items()},
        "leaks": leaks,
    }


def without_answers(pictures: Json) -> Json:
    """A gallery in which every answer is a class of its own that says there is none."""
    classes: Sequence[str] = pictures["classes"]
    return pictures | {
        "classes": [*classes, NO_ANSWER],
        "answers": [len(classes)] * len(pictures["answers"]),
    }
