"""How often may one image be sent? The same attacker, given more and more sendings of it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Literal

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from splitveil.attacks.linear import Linear, ridge
from splitveil.attacks.units import units_of
from splitveil.audits import similarity as metrics
from splitveil.audits.access import Case, Wire, attacked_rows, view
from splitveil.audits.summary import ceiling_mse
from splitveil.errors import AuditError
from splitveil.rng import derive_seed, seeded_globals, stream
from splitveil.types import Access, Json, Labelled
from splitveil.victim import CHUNK, Send

ATTACK = "linear"
SENDINGS = (1, 2, 4, 8, 16)
AUX, SCORED = 10_000, 1000  # images at most: the cost does not grow with the dataset
WIDEST = 4096  # numbers of z̃; solving takes their third power, once for each k
HALF = 0.5  # of all that an image has
STREAM = "leaks/repeats"
_ROUNDING = 1e-12  # relative; a leakage that is exactly twice another must count as such


@dataclass(frozen=True, kw_only=True)
class Doubling:
    """Leakage doubles after more than `after` sendings, and by `by`; None where it does not.

    `kind` is "between", "never" (within what was measured), "cannot" (more than half leaks already)
    or "nothing": then one sending leaks nothing, and `by` is the first number that leaks something.
    """

    kind: Literal["between", "never", "cannot", "nothing"]
    after: int | None = None
    by: int | None = None
    says: str


def running_max(leakage: Mapping[int, float]) -> dict[int, float]:
    """The most that k sendings give by k: whoever has them may use fewer.

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
    if most[1] <= 0:
        by = next((k for k in most if most[k] > 0), None)
        if by is None:
            return Doubling(kind="nothing", says="nothing leaks to double")
        says = f"nothing leaks to double at one sending of an image; something does at {by}"
        return Doubling(kind="nothing", after=_before(by, most), by=by, says=says)
    if most[1] > HALF:
        return Doubling(kind="cannot", says="cannot double: more than half leaks already")
    twice = 2 * most[1] * (1 - _ROUNDING)
    by = next((k for k in most if most[k] >= twice), None)
    if by is None:
        says = f"does not double within {max(most)} sendings of one image"
        return Doubling(kind="never", says=says)
    after = _before(by, most)
    where = f"at {by}" if by == after + 1 else f"between {after} and {by}"
    says = f"doubles {where} sendings of one image"
    return Doubling(kind="between", after=after, by=by, says=says)


def _before(k: int, measured: Iterable[int]) -> int:
    return max(other for other in measured if other < k)


def repeat_leaks(case: Case, wire: Wire) -> Json:
    r"""Leakage to the linear attack by the number k of sendings of one image, and its doubling.

    .. math:: \max_{k' \le k} 1 - \mathrm{MSE}_{k'} / \mathrm{ceiling}

    At each k the attack is fitted on means of k sendings of aux images, and scored on means of k
    sendings of the scored ones, of which the first is the wire's. Its draws are of its own streams.
    """
    numbers = wire.seen.z[0].numel()
    if numbers > WIDEST:
        raise AuditError(
            f"sendings are counted with a linear attack on at most {WIDEST} numbers for each "
            f"image, and the client sends {numbers}; read the k-query attack instead"
        )
    aux = _some(case.aux, attacked_rows(case.aux, AUX))
    if len(aux) < Linear.min_aux:
        raise AuditError(
            f"the linear attack needs at least {Linear.min_aux} aux images, got {len(aux)}"
        )
    rows = attacked_rows(case.scored, SCORED)
    scored = _some(case.scored, rows)
    ceiling = ceiling_mse(case.aux, scored, case.num_classes)
    if not ceiling > 0:
        raise AuditError("no leakage: every scored image is the mean image of its class")
    device = case.victim.device
    with seeded_globals(derive_seed(wire.seed, STREAM), device):  # for encoders that draw
        errors = _errors(case, wire, aux, scored, wire.seen.z[rows.to(device)])
    leakage = running_max({k: 1 - mse / ceiling for k, mse in errors.items()})
    return {
        "attack": ATTACK,
        "access": str(Access.REPEATS),
        "aux": len(aux),
        "n": len(scored),
        "ceiling": ceiling,
        "mse": {str(k): mse for k, mse in errors.items()},
        "leakage": {str(k): value for k, value in leakage.items()},
        "doubles": asdict(doubling(leakage)),
    }


def _some(data: Labelled, rows: Tensor) -> Labelled:
    return Labelled(data.images[rows], data.labels[rows])


@torch.no_grad()
def _errors(
    case: Case, wire: Wire, aux: Labelled, scored: Labelled, first: Tensor
) -> dict[int, float]:
    """MSE of the attack at each number of sendings, of which `first` is the scored images' own."""
    box, device = view(case, Access.REPEATS, wire), case.victim.device
    known = _means(box.sender(aux.images), aux.images, stream(wire.seed, f"{STREAM}/aux", device))
    asked = _means(
        box.sender(scored.images), scored.images,
        stream(wire.seed, f"{STREAM}/scored", device), first,
    )  # fmt: skip
    found: dict[int, float] = {}
    last: tuple[Tensor, Tensor] | None = None
    error = 0.0
    for k, (z, sent) in enumerate(zip(known, asked, strict=True), start=1):
        if k not in SENDINGS:
            continue
        if last is None or not (torch.equal(z, last[0]) and torch.equal(sent, last[1])):
            # Equal lots at every k: what differs between two of them is the sendings.
            lots = stream(wire.seed, f"{STREAM}/held", device)
            made = rebuilt(z, aux.images.to(device), sent, lots)
            error = float(metrics.mse(scored.images.to(device), made).double().mean())
        found[k], last = error, (z, sent)
    return found


def _means(
    send: Send, images: Tensor, generator: Generator, first: Tensor | None = None
) -> Iterator[Float[Tensor, "n d"]]:
    """The mean of the first k sendings, for k = 1, 2, …; only their sum is held."""
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

    Solved on nine tenths of aux; the penalty is the one that is best on the rest.
    """
    units = units_of(known)
    z, pixels = units(known).double(), images.flatten(1).double()
    order = torch.randperm(len(z), generator=lots, device=lots.device).to(z.device)
    held, used = order[: len(z) // 10], order[len(z) // 10 :]
    solved = ridge(z[used], pixels[used], Linear.penalties)
    errors = [(z[held] @ w + b - pixels[held]).square().mean() for w, b in solved]
    weight, bias = solved[int(torch.stack(errors).argmin())]
    made = (units(sent).double() @ weight + bias).clamp(0, 1)
    return made.to(images.dtype).view(len(sent), *images.shape[1:])
