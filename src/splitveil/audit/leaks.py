"""Leaks beyond pixels: attributes, membership and identity, each with its chance level.

Every number stands beside what guessing gives, and has a 95 % interval over images.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from splitveil.attacks.attribute import AttributeHead, image_attributes
from splitveil.attacks.membership import OUTPUTS, WIRE, Membership, Verdict
from splitveil.attacks.reid import ReId, centred, ranks
from splitveil.audit import shares
from splitveil.audit.access import (
    Case,
    Wire,
    allowed,
    answer,
    attacked_rows,
    finite,
    intercept,
    view,
)
from splitveil.audit.access import send as send_all
from splitveil.audit.shares import named, share
from splitveil.audit.statistics import Sample, interval
from splitveil.audit.tables import Attributes
from splitveil.errors import AuditError
from splitveil.rng import stream
from splitveil.types import Attack, Json, Labelled, Progress, check_images, silent

FPR = 0.01
LEAST_PAIRS = 20  # members, and as many non-members
ANSWERED = 5000  # aux images whose answers say what an answer tells of an attribute
TOP = 5


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The budget of each attack on more than pixels."""

    attribute: AttributeHead
    membership: Membership
    reid: ReId


_FULL = Plan(
    attribute=AttributeHead(epochs=8, min_steps=1500, batch_size=256),
    membership=Membership(draws=8, limit=10000, min_steps=1500),
    reid=ReId(),
)
PLANS: Mapping[str, Plan] = {
    "smoke": Plan(
        attribute=AttributeHead(epochs=0, min_steps=40, batch_size=32),
        membership=Membership(draws=2, references=1, limit=200, min_steps=40, batch_size=32),
        reid=ReId(draws=8, limit=200, tried=100),
    ),
    "quick": Plan(
        attribute=AttributeHead(epochs=1, min_steps=300, batch_size=64),
        membership=Membership(limit=1000, min_steps=300, batch_size=64),
        reid=ReId(draws=16, limit=2000),
    ),
    "standard": _FULL,
    "paper": _FULL,
}


@dataclass(frozen=True)
class Guess:
    """Reconstructions of the scored images at `rows`, and the access of the attack."""

    access: str
    rows: Tensor
    images: Tensor


def guess(case: Case, name: str, attack: Attack, wire: Wire) -> Guess:
    """The reconstructions that attack `name` makes in an audit of this case and seed."""
    rows = attacked_rows(case.scored, getattr(attack, "limit", None))
    given = allowed(case, attack.access, wire, rows, int(getattr(attack, "repeats", 1)))
    generator = stream(wire.seed, f"attack/{name}", case.victim.device)
    fitted = attack.fit(view(case, attack.access, wire), case.aux, generator)
    return Guess(str(attack.access), rows, fitted(given).detach())


def leaks(
    case: Case,
    members: Labelled | str,
    nonmembers: Labelled,
    reconstructions: Mapping[str, Guess] | None,
    seed: int,
    *,
    attributes: Attributes | None = None,
    plan: Plan = PLANS["quick"],
    wire: Wire | None = None,
    strict: bool = True,
    progress: Progress = silent,
) -> Json:
    """What z̃ says about attributes, membership and identity; deterministic under the seed.

    `members` were trained on and `nonmembers` were not; a text says why no members are known.
    `attributes` replaces the simple ones of the images themselves. `wire` is the draw of the
    scored images, if there is one already. What cannot be measured raises; unless `strict` it is
    absent, and `refused` has its reason.
    """
    if len(case.scored) <= 1:
        raise AuditError(f"leaks need at least 2 scored images, got {len(case.scored)}")
    case = replace(case, head=copy.deepcopy(case.head).eval())  # BatchNorm must not learn here
    wire = intercept(case, seed) if wire is None else wire
    steps: dict[str, Callable[[], Json]] = {
        "attribute": lambda: attribute_leaks(case, attributes, plan.attribute, wire),
        "membership": lambda: membership_leaks(case, members, nonmembers, plan.membership, wire),
        "re-id": lambda: identity_leaks(case, reconstructions or {}, plan.reid, wire),
    }
    said: Json = {}
    refused: Json = {}
    for done, (name, step) in enumerate(steps.items()):
        progress(done, len(steps), name)
        try:
            said[name] = step()
        except AuditError as err:
            if strict:
                raise
            refused[name] = str(err)
    progress(len(steps), len(steps), "leaks measured")
    return said | ({"refused": refused} if refused else {})


def attribute_leaks(
    case: Case, attributes: Attributes | None, attack: AttributeHead, wire: Wire
) -> Json:
    """How well each attribute of the scored images is read off z̃, and off the answer alone."""
    given = _simple(case) if attributes is None else attributes
    if not given.aux:
        return {}
    device, seed = case.victim.device, wire.seed
    for name, values in given.scored.items():
        if values.shape != (len(case.scored),):
            raise AuditError(
                f"attribute '{name}' must have one value for each of the {len(case.scored)} "
                f"scored images, got {tuple(values.shape)}"
            )
    generator = stream(seed, "leaks/attribute", device)
    probed = attack.fit(view(case, attack.access, wire), case.aux, given.aux, generator)
    some = attacked_rows(case.aux, ANSWERED)
    sent = finite(send_all(case.victim, case.aux.images[some], seed, "leaks/answers"))
    told = answer(case.head, sent)
    said: Json = {}
    for name, logits in probed(wire.seen.z).items():
        aux, truth = given.aux[name].to(device), given.scored[name].to(device)
        usual = aux.bincount().argmax()
        by_answer = shares.from_answer(told, aux[some.to(device)], wire.seen.answer, usual)
        predicted = logits.argmax(1)
        right = predicted == truth
        balanced, balanced_limits = shares.balanced_limits(predicted, truth)
        beyond = interval(Sample.of((right.double() - (by_answer == truth).double())[None]))
        said[name] = {
            "accuracy": share(right),
            **named("accuracy", shares.wilson(int(right.sum()), len(right))),
            "balanced_accuracy": balanced,
            **named("balanced_accuracy", balanced_limits),
            "chance": share(usual == truth),
            "chance_balanced": 1.0 / int((truth.bincount() > 0).sum()),
            "from_answer": share(by_answer == truth),
            "beyond_answer": beyond.mean,
            **named("beyond_answer", (beyond.low, beyond.high)),
            "head": probed.picked[name],
            "n": len(right),
            "access": str(attack.access),
        }
    return said


def _simple(case: Case) -> Attributes:
    """The simple attributes of the images that take more than one value on aux."""
    aux = image_attributes(case.aux.images, case.aux.images)
    scored = image_attributes(case.scored.images, case.aux.images)
    kept = [name for name, values in aux.items() if bool((values != values[0]).any())]
    return Attributes({n: aux[n] for n in kept}, {n: scored[n] for n in kept})


def membership_leaks(
    case: Case, members: Labelled | str, nonmembers: Labelled, attack: Membership, wire: Wire
) -> Json:
    """How well members are told from non-members of the same classes.

    Half of the pairs are known to the attacker; the numbers are those of the other half. The
    strongest score of each source is the one with the best AUC on the known half.
    """
    if isinstance(members, str):
        raise AuditError(members)
    lots = stream(wire.seed, "leaks/pairs")
    pairs = shares.matched_pairs(members.labels, nonmembers.labels, lots)[: attack.limit]
    if len(pairs) < LEAST_PAIRS:
        raise AuditError(
            f"membership needs at least {LEAST_PAIRS} members and as many non-members of the same "
            f"classes, got {len(pairs)} such pairs from {len(members)} and {len(nonmembers)} images"
        )
    device, half = case.victim.device, len(pairs) // 2
    generator = stream(wire.seed, "leaks/membership", device)
    box = view(case, attack.access, wire)
    sides = zip((members, nonmembers), pairs.T, strict=True)
    both = [(data.images[rows], data.labels[rows]) for data, rows in sides]
    images, labels = (torch.cat(each) for each in zip(*both, strict=True))
    # Rounding may depend on a row's place in its batch: no side gets places of its own.
    order = torch.randperm(len(labels), generator=lots)
    mixed = Labelled(images[order], labels[order])
    trace = attack.observe(box, case.head, mixed, generator).at(order.argsort())
    place = torch.arange(2 * len(pairs), device=device)
    first, member = place % len(pairs) < half, place < len(pairs)
    known, asked = first.nonzero().flatten(), (~first).nonzero().flatten()
    verdicts = attack.judge(trace.at(asked), trace.at(known), member[known], generator)
    rows = {name: _judged(v, member[asked], wire.seed) for name, v in verdicts.items()}
    sources = {"outputs": OUTPUTS, "wire": WIRE}
    best = {s: max(names, key=lambda n: verdicts[n].known_auc) for s, names in sources.items()}
    return {
        "access": str(attack.access),
        "draws": attack.draws,
        "n": len(asked),
        "known": len(known),
        "chance": 0.5,
        "chance_tpr": FPR,
        "strongest": best,
        **{source: {name: rows[name] for name in names} for source, names in sources.items()},
    }


def _judged(verdict: Verdict, member: Bool[Tensor, " n"], seed: int) -> Json:
    """One score's row: members and non-members are equally many."""
    scores = verdict.scores
    area, limits = shares.auc_limits(scores[member], scores[~member])
    right = (scores >= verdict.threshold) == member
    found = shares.tpr_limits(scores[member], scores[~member], FPR, stream(seed, "leaks/bootstrap"))
    tpr, tpr_at = (None, (None, None)) if found is None else found
    return {
        "auc": area,
        **named("auc", limits),
        "balanced_accuracy": share(right),
        **named("balanced_accuracy", shares.wilson(int(right.sum()), len(right))),
        "tpr": tpr,
        **named("tpr", tpr_at),
        "known_auc": verdict.known_auc,
    }


def identity_leaks(
    case: Case, reconstructions: Mapping[str, Guess], attack: ReId, wire: Wire
) -> Json:
    """How often the image that was sent is found among the scored ones.

    `wire`: by z̃ alone. `NAME/mse` and `NAME/correlation`: by the reconstructions of an attack.
    """
    device = case.victim.device
    rows = attacked_rows(case.scored, attack.limit)
    images = case.scored.images[rows].to(device)
    generator = stream(wire.seed, "leaks/re-id", device)
    box = view(case, attack.access, wire)
    name, scale = attack.pick(box, case.aux.images, generator)
    gallery = attack.send(box, images, generator).mean * scale
    seen = wire.seen.z[rows].flatten(1).float() * scale
    every = torch.arange(len(rows), device=device)
    found = _identified(ranks(seen, gallery, every, generator), len(rows), str(attack.access))
    said: Json = {"wire": found | {"scaling": name, "sendings": attack.draws}}
    place = torch.full((len(case.scored),), -1, device=device)
    place[rows.to(device)] = every
    middle = case.aux.images.mean(0).to(device)
    for title, made in reconstructions.items():
        check_images(made.images, f"reconstructions of attack '{title}'")
        lots = stream(wire.seed, f"leaks/re-id/{title}", device)
        truth = place[made.rows.to(device)]
        kept = (truth >= 0).nonzero().flatten()
        mine = made.images.to(device)[kept]
        for metric, pair in {
            "mse": (mine.flatten(1), images.flatten(1)),
            "correlation": (centred(mine, middle), centred(images, middle)),
        }.items():
            places = ranks(*pair, truth[kept], lots)
            said[f"{title}/{metric}"] = _identified(places, len(rows), made.access)
    return said


def _identified(places: Int64[Tensor, " n"], gallery: int, access: str) -> Json:
    """Shares of images found at once and among the first five."""
    said: Json = {}
    for top in (1, TOP):
        hits = int((places <= top).sum())
        said |= {
            f"rank_{top}": hits / len(places),
            **named(f"rank_{top}", shares.exact(hits, len(places))),
            f"chance_{top}": min(top / gallery, 1.0),
        }
    median = float(places.double().median())
    return said | {"median_rank": median, "gallery": gallery, "n": len(places), "access": access}
