"""Leaks beyond pixels: attributes, membership, identity, and what repeated sendings add.

Each number comes with what guessing gives, and with a 95 % interval over images.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int64
from scipy.special import bdtrc
from torch import Generator, Tensor

from splitveil.attacks.arithmetic import Arithmetic, model_of
from splitveil.attacks.attribute import AttributeHead, image_attributes
from splitveil.attacks.base import tenth, units_of
from splitveil.attacks.linear import Linear, ridge
from splitveil.attacks.membership import OUTPUTS, WIRE, Membership, Verdict, placements
from splitveil.attacks.profiles import LeakBudget
from splitveil.attacks.reid import ReId, ranks, unit_directions
from splitveil.audits import metrics
from splitveil.audits.suite import label_only_mse, strongest_blackbox
from splitveil.audits.target import Attempt, Target, answer, attacked_rows, send
from splitveil.data.dataset import Attributes
from splitveil.errors import AuditError
from splitveil.io import Json
from splitveil.nets.channel import before_noise
from splitveil.record.statistics import TAIL, Z95, LowHigh, Sample, exact, interval, wilson
from splitveil.rng import derive_seed, seeded_globals, stream
from splitveil.threat import CHUNK, Access, Labelled, Send, WhiteBox, chunk_for, without_nan

FPR = 0.01
ROUNDS = 500  # of the bootstrap
LEAST_PAIRS = 20  # pairs of a member and a non-member
ANSWERED = 5000  # aux images from which is learned what an answer says of an attribute
TOP = 5
ALWAYS = "linear"  # re-identified in every audit, besides the strongest attack
SENDINGS = (1, 2, 4, 8, 16)
AUX, SCORED = 10_000, 1000  # images at most: the cost does not grow with the dataset
WIDEST = 4096  # numbers of z̃; the time to solve grows with their third power
HALF = 0.5  # a leakage above it cannot double
STREAM = "leaks/repeats"
_ROUNDING = 1e-12  # relative, so that a leakage of exactly twice another counts as twice
Members = Float[Tensor, " a"]
Others = Float[Tensor, " b"]


def leaks_beyond_pixels(
    target: Target, attempts: Mapping[str, Attempt], budget: LeakBudget
) -> Json:
    """What z̃ says about attributes, membership and identity, and what repeated sendings add.

    Args:
        target: What was attacked; its seed fixes the result.
        attempts: What the attacks made of it, for re-identification.
        budget: The budgets of the attacks.

    Returns:
        One entry per leak. A leak that cannot be measured has its reason under `refused`.
    """
    best = strongest_blackbox(attempts)["mse_by"]
    looked_up = {n: attempts[n] for n in dict.fromkeys((ALWAYS, best)) if n in attempts}
    steps: dict[str, Callable[[], Json | None]] = {
        "attribute": lambda: attribute_leaks(target, budget.attribute),
        "membership": lambda: membership_leaks(target, budget.membership),
        "re-id": lambda: identity_leaks(target, looked_up, budget.reid),
        "repeats": lambda: repeat_leaks(target),
        "arithmetic": lambda: arithmetic_leaks(target, budget.arithmetic),
    }
    said: Json = {}
    refused: Json = {}
    if len(target.scored) <= 1:
        refused["every"] = f"leaks need at least 2 scored images, got {len(target.scored)}"
        steps = {"repeats": steps["repeats"]}
    for name, step in steps.items():
        try:
            found = step()
        except AuditError as err:
            refused[name] = str(err)
        else:
            said |= {} if found is None else {name: found}
    return said | ({"refused": refused} if refused else {})


def share(right: Bool[Tensor, " n"]) -> float:
    """Share of True."""
    return float(right.double().mean())


def named(name: str, limits: tuple[float | None, float | None]) -> Json:
    """Both limits of an interval, under `NAME_low` and `NAME_high`."""
    return {f"{name}_low": limits[0], f"{name}_high": limits[1]}


def attribute_leaks(target: Target, attack: AttributeHead) -> Json:
    """How well each attribute of the scored images is guessed from z̃, and from the answer alone."""
    given = simple_attributes(target) if target.attributes is None else target.attributes
    if not given.aux:
        return {}
    device, seed = target.device, target.seed
    for name, values in given.scored.items():
        if values.shape != (len(target.scored),):
            raise AuditError(
                f"attribute '{name}' must have one value for each of the {len(target.scored)} "
                f"scored images, got {tuple(values.shape)}"
            )
    generator = stream(seed, "leaks/attribute", device)
    probed = attack.fit(target.view(attack.access), target.aux, given.aux, generator)
    some = attacked_rows(target.aux, ANSWERED)
    sent = without_nan(send(target.victim, target.aux.images[some], seed, "leaks/answers"))
    told = answer(target.scores, sent)
    said: Json = {}
    for name, logits in probed(target.sent.z).items():
        predicted = logits.argmax(1)
        aux, truth = given.aux[name].to(device), given.scored[name].to(device)
        usual = aux.bincount().argmax()
        by_answer = from_answer(told, aux[some.to(device)], target.sent.answer, usual)
        right = predicted == truth
        balanced, limits = balanced_limits(predicted, truth)
        gained = right.double() - (by_answer == truth).double()
        beyond = interval(Sample.of(gained[None].cpu().numpy()))
        said[name] = {
            "accuracy": share(right),
            **named("accuracy", wilson(int(right.sum()), len(right))),
            "balanced_accuracy": balanced,
            **named("balanced_accuracy", limits),
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


def simple_attributes(target: Target) -> Attributes:
    """Simple attributes computed from the images, without those that are constant on aux."""
    aux = image_attributes(target.aux.images, target.aux.images)
    scored = image_attributes(target.scored.images, target.aux.images)
    kept = [name for name, values in aux.items() if bool((values != values[0]).any())]
    return Attributes({n: aux[n] for n in kept}, {n: scored[n] for n in kept})


def balanced_limits(
    predicted: Int64[Tensor, " n"], truth: Int64[Tensor, " n"]
) -> tuple[float, LowHigh]:
    """Balanced accuracy and its 95 % interval: every value that occurs counts the same.

    The mean over values of the share of their images that were recognised; each share varies as
    if two more images had been recognised and two more had not (Agresti and Coull).

    >>> found, (low, high) = balanced_limits(torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 1, 1]))
    >>> found, round(low, 3), high
    (0.75, 0.475, 1.0)
    """
    count = truth.bincount().double()
    hits = truth[predicted == truth].bincount(minlength=len(count)).double()
    there = count > 0
    count, hits = count[there], hits[there]
    mean, p = float((hits / count).mean()), (hits + 2) / (count + 4)
    error = Z95 * math.sqrt(float((p * (1 - p) / (count + 4)).sum())) / len(count)
    return mean, (max(mean - error, 0.0), min(mean + error, 1.0))


def from_answer(
    known: Int64[Tensor, " m"],
    values: Int64[Tensor, " m"],
    asked: Int64[Tensor, " n"],
    usual: Int64[Tensor, ""],
) -> Int64[Tensor, " n"]:
    """The most frequent value among known images of the same answer; `usual` if there is none.

    >>> one = torch.tensor
    >>> from_answer(one([0, 0, 1]), one([2, 2, 1]), one([1, 0, 5]), one(0)).tolist()
    [1, 2, 0]
    """
    size = int(torch.cat([known, asked]).max()) + 1
    kinds = int(torch.maximum(values.max(), usual)) + 1
    counts = torch.zeros(size, kinds, dtype=torch.float64, device=known.device)
    counts[:, usual] = 0.5  # wins where there is nothing else, and between equal counts
    counts.index_put_((known, values), counts.new_ones(len(known)), accumulate=True)
    return counts.argmax(1)[asked]


def membership_leaks(target: Target, attack: Membership) -> Json:
    """How well training images (members) are told from other images of the same classes.

    The attacker knows half of the pairs and is scored on the other half. Of each source, what was
    sent and the server's outputs, the strongest score is the one with the best AUC on the known
    half. Without a server there is only the first source.
    """
    members, nonmembers = target.members, target.outsiders
    if isinstance(members, str):
        raise AuditError(members)
    if nonmembers is None:
        raise AuditError("membership needs images that were not trained on, but none are known")
    lots = stream(target.seed, "leaks/pairs")
    pairs = matched_pairs(members.labels, nonmembers.labels, lots)[: attack.limit]
    if len(pairs) < LEAST_PAIRS:
        raise AuditError(
            f"membership needs at least {LEAST_PAIRS} members and as many non-members of the same "
            f"classes, got {len(pairs)} such pairs from {len(members)} and {len(nonmembers)} images"
        )
    device, half = target.device, len(pairs) // 2
    generator = stream(target.seed, "leaks/membership", device)
    box = target.view(attack.access)
    sides = zip((members, nonmembers), pairs.T, strict=True)
    both = [(data.images[rows], data.labels[rows]) for data, rows in sides]
    images, labels = (torch.cat(each) for each in zip(*both, strict=True))
    # Rounding may depend on a row's place in its batch, so members and others are mixed.
    order = torch.randperm(len(labels), generator=lots)
    mixed = Labelled(images[order], labels[order])
    trace = attack.observe(box, target.scores, mixed, generator).at(order.argsort())
    place = torch.arange(2 * len(pairs), device=device)
    first, member = place % len(pairs) < half, place < len(pairs)
    known, asked = first.nonzero().flatten(), (~first).nonzero().flatten()
    verdicts = attack.judge(trace.at(asked), trace.at(known), member[known], generator)
    rows = {name: _judged(v, member[asked], target.seed) for name, v in verdicts.items()}
    sources = {"wire": WIRE} if target.head is None else {"outputs": OUTPUTS, "wire": WIRE}
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
    """The numbers of one score; there are as many members as non-members."""
    scores = verdict.scores
    area, limits = auc_limits(scores[member], scores[~member])
    right = (scores >= verdict.threshold) == member
    found = tpr_limits(scores[member], scores[~member], FPR, stream(seed, "leaks/bootstrap"))
    tpr, tpr_at = (None, (None, None)) if found is None else found
    return {
        "auc": area,
        **named("auc", limits),
        "balanced_accuracy": share(right),
        **named("balanced_accuracy", wilson(int(right.sum()), len(right))),
        "tpr": tpr,
        **named("tpr", tpr_at),
        "known_auc": verdict.known_auc,
    }


def matched_pairs(
    members: Int64[Tensor, " a"], others: Int64[Tensor, " b"], generator: Generator
) -> Int64[Tensor, "pairs 2"]:
    """Random pairs of a member and another image with the same label: their positions.

    Without pairs a class that is more frequent among members would look like membership.

    >>> one = torch.tensor
    >>> matched_pairs(one([5, 0, 5]), one([2, 5]), torch.Generator())[:, 1].tolist()
    [1]
    """
    sides = [members.cpu(), others.cpu()]
    mixed = [torch.randperm(len(side), generator=generator) for side in sides]
    pairs = [torch.empty(0, 2, dtype=torch.long)]
    for kind in range(max((int(side.max()) + 1 for side in sides if len(side)), default=0)):
        left, right = (m[side[m] == kind] for side, m in zip(sides, mixed, strict=True))
        few = min(len(left), len(right))
        pairs.append(torch.stack([left[:few], right[:few]], 1))
    found = torch.cat(pairs)
    return found[torch.randperm(len(found), generator=generator)]


def auc_limits(members: Members, others: Others) -> tuple[float, LowHigh]:
    r"""Area under the ROC curve and its interval after DeLong, on the logit scale.

    .. math:: \operatorname{var} A = \operatorname{var}(V_{10})/a + \operatorname{var}(V_{01})/b

    V are the shares of the other side that a score beats. If every score of one side beats the
    other, the variance is 0; the limit is then that of min(a, b) hits out of as many.

    >>> area, (low, high) = auc_limits(torch.tensor([3.0, 1.0]), torch.tensor([2.0, 0.0]))
    >>> area, round(low, 3), round(high, 3)
    (0.75, 0.069, 0.992)
    """
    if min(len(members), len(others)) <= 1:
        raise AuditError(
            f"an AUC needs at least 2 scores on each side, got {len(members)} and {len(others)}"
        )
    if not bool(members.isfinite().all() & others.isfinite().all()):
        raise AuditError("an AUC needs finite scores, got NaN or infinity")
    up, down = placements(members, others), 1 - placements(others, members)
    area = float(up.mean())
    few = min(len(members), len(others))
    if area >= 1:
        return 1.0, (exact(few, few)[0], 1.0)
    if area <= 0:
        return 0.0, (0.0, exact(0, few)[1])
    error = math.sqrt(float(up.var()) / len(up) + float(down.var()) / len(down))
    middle, reach = math.log(area / (1 - area)), Z95 * error / (area * (1 - area))
    low, high = (1 / (1 + math.exp(-middle - side * reach)) for side in (-1, 1))
    return area, (low, high)


def tpr_limits(
    members: Members, others: Others, fpr: float, generator: Generator
) -> tuple[float, LowHigh] | None:
    """Share of members above the score that at most a share `fpr` of the others exceeds.

    Its interval is a bootstrap over both sides, with a new threshold each time. None if there are
    fewer than 1/fpr others. Runs on the CPU.
    """
    inside, outside = members.cpu(), others.cpu()
    over = math.floor(fpr * len(outside) + 1e-9)
    if over < 1:
        return None
    rate = _tpr(inside[None], outside[None], over)
    drawn = [
        side[torch.randint(len(side), (ROUNDS, len(side)), generator=generator)]
        for side in (inside, outside)
    ]
    rates = _tpr(drawn[0], drawn[1], over)
    low, high = torch.quantile(rates, torch.tensor([TAIL, 1 - TAIL], dtype=rates.dtype)).tolist()
    return float(rate), (low, high)


def _tpr(
    members: Float[Tensor, "r a"], others: Float[Tensor, "r b"], over: int
) -> Float[Tensor, " r"]:
    """Share of each row's members above the (over + 1)-th highest of its others."""
    bar = others.kthvalue(others.shape[1] - over, dim=1, keepdim=True).values
    return (members > bar).double().mean(1)


def identity_leaks(target: Target, attempts: Mapping[str, Attempt], attack: ReId) -> Json:
    """How often the image that was sent is found among the scored ones.

    It is looked up by z̃ alone (`wire`), and by the reconstruction of an attack, by distance
    (`NAME/mse`) and by direction (`NAME/correlation`).
    """
    device = target.device
    rows = attacked_rows(target.scored, attack.limit)
    images = target.scored.images[rows].to(device)
    generator = stream(target.seed, "leaks/re-id", device)
    box = target.view(attack.access)
    name, scale = attack.pick(box, target.aux.images, generator)
    gallery = attack.send(box, images, generator).mean * scale
    seen = target.sent.z[rows].flatten(1).float() * scale
    every = torch.arange(len(rows), device=device)
    found = _identified(ranks(seen, gallery, every, generator), len(rows), str(attack.access))
    said: Json = {"wire": found | {"scaling": name, "sendings": attack.draws}}
    place = torch.full((len(target.scored),), -1, device=device)
    place[rows.to(device)] = every
    middle = target.aux.images.mean(0).to(device)
    for title, made in attempts.items():
        lots = stream(target.seed, f"leaks/re-id/{title}", device)
        truth = place[made.rows.to(device)]
        kept = (truth >= 0).nonzero().flatten()
        mine = made.images.to(device)[kept].float() / 255
        for metric, pair in {
            "mse": (mine.flatten(1), images.flatten(1)),
            "correlation": (unit_directions(mine, middle), unit_directions(images, middle)),
        }.items():
            places = ranks(*pair, truth[kept], lots)
            said[f"{title}/{metric}"] = _identified(places, len(rows), made.access)
    return said


@torch.no_grad()
def arithmetic_leaks(target: Target, attack: Arithmetic) -> Json | None:
    """How often arithmetic finds the image that was sent, and how often distance alone does.

    Both know the encoder and the scored images. `p` is the chance that two attackers who are
    equally good differ as much for the first (an exact test over the images on which they differ).
    None where no Gaussian noise of a known deviation is added to z.
    """
    box = target.view(attack.access)
    if not isinstance(box, WhiteBox):
        return None
    front = before_noise(box.encoder, box.channel)
    if not front.noise_std or front.random:
        return None
    std, stages, network = front.noise_std, front.stages, box.encoder

    def clean(x: Tensor) -> Tensor:
        parts = torch.split(x, chunk_for(x))
        return torch.cat([stages(network(part.to(box.device))) for part in parts]).flatten(1)

    tried = target.aux.images[: attack.tried]
    own = send(target.victim, tried, target.seed, "leaks/arithmetic").flatten(1)
    model = model_of(own, clean(tried), std)
    rows = attacked_rows(target.scored, attack.limit)
    sent = target.sent.z[rows.to(target.device)].flatten(1)
    found, near, out = attack.name(sent, clean(target.scored.images[rows]), std, model)
    every = torch.arange(len(rows), device=found.device)
    right, plain = found == every, near == every
    gained, lost = int((right & ~plain).sum()), int((plain & ~right).sum())
    said: Json = {"model": model, "excluded": share(out.flatten())}
    for name, hits in (("rank_1", int(right.sum())), ("distance", int(plain.sum()))):
        said |= {name: hits / len(rows), **named(name, exact(hits, len(rows)))}
    p = float(bdtrc(gained - 1, gained + lost, 0.5)) if gained else 1.0
    counts = {"p": p, "chance_1": 1 / len(rows), "gallery": len(rows), "n": len(rows)}
    return said | counts | {"access": str(attack.access)}


def _identified(places: Int64[Tensor, " n"], gallery: int, access: str) -> Json:
    """Share of images found first, and share found among the first five."""
    said: Json = {}
    for top in (1, TOP):
        hits = int((places <= top).sum())
        said |= {
            f"rank_{top}": hits / len(places),
            **named(f"rank_{top}", exact(hits, len(places))),
            f"chance_{top}": min(top / gallery, 1.0),
        }
    median = float(places.double().median())
    return said | {"median_rank": median, "gallery": gallery, "n": len(places), "access": access}


@dataclass(frozen=True, kw_only=True)
class Doubling:
    """Where leakage doubles: after more than `after` sendings and at most `by`; None if nowhere.

    `kind` is "between", "never" (within what was measured), "cannot" (more than half leaks already)
    or "nothing": then one sending leaks nothing, and `by` is the first number that leaks something.
    """

    kind: Literal["between", "never", "cannot", "nothing"]
    after: int | None = None
    by: int | None = None
    says: str


def running_max(leakage: Mapping[int, float]) -> dict[int, float]:
    """The most that k sendings or fewer leak, by k: an attacker may use fewer.

    >>> running_max({4: 0.3, 1: 0.1, 2: 0.4})
    {1: 0.1, 2: 0.4, 4: 0.4}
    """
    order = sorted(leakage)
    return dict(zip(order, accumulate((leakage[k] for k in order), max), strict=True))


def doubling(leakage: Mapping[int, float]) -> Doubling:
    """Between which measured numbers of sendings the leakage reaches twice that of one.

    >>> doubling({1: 0.2, 2: 0.333, 4: 0.5, 16: 0.8}).says
    'doubles between 2 and 4 sendings of one image'
    """
    if 1 not in leakage:
        raise AuditError(f"leakage of one sending is needed, got k = {sorted(leakage)}")
    most = running_max(leakage)
    if most[1] > HALF:
        return Doubling(kind="cannot", says="cannot double: more than half leaks already")
    twice = 2 * most[1] * (1 - _ROUNDING)
    by = next((k for k in most if most[k] > 0 and most[k] >= twice), None)
    after = None if by is None else max(k for k in most if k < by)
    if most[1] <= 0:
        found = "" if by is None else f" at one sending of an image; something does at {by}"
        return Doubling(kind="nothing", after=after, by=by, says=f"nothing leaks to double{found}")
    if by is None or after is None:
        says = f"does not double within {max(most)} sendings of one image"
        return Doubling(kind="never", says=says)
    where = f"at {by}" if by == after + 1 else f"between {after} and {by}"
    says = f"doubles {where} sendings of one image"
    return Doubling(kind="between", after=after, by=by, says=says)


def repeat_leaks(target: Target) -> Json:
    r"""Leakage to the linear attack by the number k of sendings of one image, and its doubling.

    .. math:: \max_{k' \le k} 1 - \mathrm{MSE}_{k'} / \mathrm{ceiling}

    At each k the attack is fitted on means of k sendings of each aux image, and scored on means of
    k sendings of each scored one. The first of these is what every attack got.
    """
    numbers = target.sent.z[0].numel()
    if numbers > WIDEST:
        raise AuditError(
            f"repeated sendings are measured by a linear attack on at most {WIDEST} numbers per "
            f"image, but the client sends {numbers}; see the k-query attack instead"
        )
    rows = attacked_rows(target.aux, AUX)
    aux = Labelled(target.aux.images[rows], target.aux.labels[rows])
    if len(aux) < Linear.min_aux:
        raise AuditError(
            f"the linear attack needs at least {Linear.min_aux} aux images, got {len(aux)}"
        )
    rows = attacked_rows(target.scored, SCORED)
    scored = Labelled(target.scored.images[rows], target.scored.labels[rows])
    ceiling = label_only_mse(target.aux, scored, target.num_classes)
    if not ceiling > 0:
        raise AuditError("no leakage: every scored image is the mean image of its class")
    device = target.device
    with seeded_globals(derive_seed(target.seed, STREAM), device):  # for encoders that draw
        errors = _errors(target, aux, scored, target.sent.z[rows.to(device)])
    leakage = running_max({k: 1 - mse / ceiling for k, mse in errors.items()})
    return {
        "attack": ALWAYS,
        "access": str(Access.REPEATS),
        "aux": len(aux),
        "n": len(scored),
        "ceiling": ceiling,
        "mse": {str(k): mse for k, mse in errors.items()},
        "leakage": {str(k): value for k, value in leakage.items()},
        "doubles": asdict(doubling(leakage)),
    }


@torch.no_grad()
def _errors(target: Target, aux: Labelled, scored: Labelled, first: Tensor) -> dict[int, float]:
    """MSE of the attack at each number of sendings; `first` is what every attack got."""
    box, device, seed = target.view(Access.REPEATS), target.device, target.seed
    known = _means(box.sender(aux.images), aux.images, stream(seed, f"{STREAM}/aux", device))
    asked = _means(
        box.sender(scored.images), scored.images,
        stream(seed, f"{STREAM}/scored", device), first,
    )  # fmt: skip
    found: dict[int, float] = {}
    last: tuple[Tensor, Tensor] | None = None
    error = 0.0
    for k, (z, sent) in enumerate(zip(known, asked, strict=True), start=1):
        if k not in SENDINGS:
            continue
        if last is None or not (torch.equal(z, last[0]) and torch.equal(sent, last[1])):
            # With equal random splits at every k, only the sendings make a difference.
            lots = stream(seed, f"{STREAM}/held", device)
            made = rebuilt(z, aux.images.to(device), sent, lots)
            error = float(metrics.mse(scored.images.to(device), made).double().mean())
        found[k], last = error, (z, sent)
    return found


def _means(
    send: Send, images: Tensor, generator: Generator, first: Tensor | None = None
) -> Iterator[Float[Tensor, "n d"]]:
    """The mean of the first k sendings, for k = 1, 2, …; only their sum is in memory."""
    rows = torch.split(torch.arange(len(images), device=images.device), CHUNK)

    def once() -> Tensor:
        return torch.cat([send(part, generator).flatten(1) for part in rows]).double()

    total = once() if first is None else first.flatten(1).double()
    yield total
    for k in range(2, max(SENDINGS) + 1):
        total = total + once()
        yield total / k


def rebuilt(
    known: Float[Tensor, "n d"],
    images: Float[Tensor, "n c h w"],
    sent: Float[Tensor, "m d"],
    lots: Generator,
) -> Float[Tensor, "m c h w"]:
    """Images for `sent` by ridge regression on z̃ and images of aux.

    It is solved on nine tenths of aux; the penalty is the one that is best on the last tenth.
    """
    units = units_of(known)
    z, pixels = units(known).double(), images.flatten(1).double()
    held, used = tenth(len(z), lots, z.device)
    solved = ridge(z[used], pixels[used], Linear.penalties)
    errors = [(z[held] @ w + b - pixels[held]).square().mean() for w, b in solved]
    weight, bias = solved[int(torch.stack(errors).argmin())]
    made = (units(sent).double() @ weight + bias).clamp(0, 1)
    rebuilt: Tensor = made.to(images.dtype).view(len(sent), *images.shape[1:])
    return rebuilt
