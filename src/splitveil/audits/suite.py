"""Running attacks against a victim and measuring what they got: the only place that does."""

import hashlib
import inspect
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from splitveil.audits import similarity as metrics
from splitveil.audits.access import (
    Case,
    Wire,
    allowed,
    answer,
    attacked_rows,
    finite,
    intercept,
    send,
    view,
)
from splitveil.audits.gallery import gallery_rows, levels
from splitveil.audits.target import Attempt, from_bytes, to_bytes
from splitveil.errors import AuditError
from splitveil.rng import stream
from splitveil.types import Access, Attack, Observation, Progress, check_images, silent
from splitveil.victim import chunk_for

Look = Callable[[str, Tensor, Tensor], None]
AUX_SHOWN = 1000  # images an attack was fitted on that it is scored on too: does it overfit?


@dataclass(frozen=True)
class Store:
    """Where finished attacks are kept: bytes under a key."""

    read: Callable[[str], bytes | None]
    write: Callable[[str, bytes], None]


def accuracy(case: Case, seed: int, draws: int) -> float:
    """Share of correct answers on the scored images through the channel, mean over draws."""
    labels = case.scored.labels
    shares = [
        (answer(case.head, send(case.victim, case.scored.images, seed, f"accuracy/{i}")) == labels)
        .double()
        .mean()
        for i in range(draws)
    ]
    return float(torch.stack(shares).mean())


def run_attacks(
    case: Case,
    attacks: Mapping[str, Attack],
    seed: int,
    progress: Progress = silent,
    *,
    wire: Wire | None = None,
    store: Store | None = None,
    look: Look | None = None,
) -> dict[str, Attempt]:
    """Every attack on the same scored images and the same draw of the channel.

    With a store, an attack that was finished before on the same case is read, not run again.
    `look` is shown the name, rows and images of what every attack that is run makes.
    """
    _check_case(case, attacks)
    wire = intercept(case, seed) if wire is None else wire
    if wire.seed != seed:
        raise AuditError(f"the wire was drawn with seed {wire.seed}, the audit's is {seed}")
    efforts = {name: float(getattr(a, "effort", 1.0)) for name, a in attacks.items()}
    total = sum(efforts.values())
    attempts: dict[str, Attempt] = {}
    for name, attack in attacks.items():
        before = sum((efforts[n] for n in attempts), 0.0)
        share = Share(progress, name, before, efforts[name], total)
        share(0, 1)
        attempts[name] = _stored(case, (name, attack), wire, share, store, look)
    progress(int(1000 * total), int(1000 * total), "attacks done")
    return attempts


@dataclass(frozen=True)
class Share:
    """One attack's part of the suite's progress bar."""

    whole: Progress
    name: str
    before: float
    effort: float
    total: float

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """`done` of `total` of this attack's own work."""
        here = self.before + self.effort * min(done / max(total, 1), 1.0)
        self.whole(int(1000 * here), int(1000 * self.total), f"{self.name} {note}".rstrip())


def _stored(  # noqa: PLR0917 - what an attempt takes, and the store
    case: Case,
    named: tuple[str, Attack],
    wire: Wire,
    progress: Progress,
    store: Store | None,
    look: Look | None,
) -> Attempt:
    """The attempt from the store, or a new one, which is stored."""
    if store is None or not case.identity:
        return attempt(case, *named, wire, progress, look)
    key = attempt_key(case.identity, *named, wire.seed)
    if key is None:
        return attempt(case, *named, wire, progress, look)
    blob = store.read(key)
    found = None if blob is None else from_bytes(blob, case.victim.device)
    if found is None or found.scored != len(case.scored):
        found = attempt(case, *named, wire, progress, look)
        store.write(key, to_bytes(found))
    return found


def attempt_key(identity: str, name: str, attack: Attack, seed: int) -> str | None:
    """Content hash of everything an attempt depends on, the source included.

    None for an attack that cannot be told from another: its source is not to be read, as in a
    notebook, or it does not say how it is set.
    """
    code = [source(type(attack).__module__), source(__name__)]
    if None in code or type(attack).__repr__ is object.__repr__:
        return None
    parts = (identity, name, repr(attack), str(seed), *map(str, code))
    return hashlib.sha256("\x00".join(parts).encode()).hexdigest()[:24]


def source(module: str) -> str | None:
    """Text of a module and of those of its package and ours that it takes names from, and they."""
    packages, waiting = {module.partition(".")[0], "splitveil"}, [module]
    texts: dict[str, str] = {}
    while waiting:
        name = waiting.pop()
        if name in texts or name.partition(".")[0] not in packages:
            continue
        try:
            texts[name] = inspect.getsource(sys.modules[name])
        except (KeyError, OSError, TypeError):
            return None
        for value in vars(sys.modules[name]).values():
            waiting.append(str(getattr(value, "__module__", getattr(value, "__name__", ""))))
    return "\x00".join(texts[name] for name in sorted(texts))


def attempt(  # noqa: PLR0917 - the case, the attack, and who watches
    case: Case,
    name: str,
    attack: Attack,
    wire: Wire,
    progress: Progress = silent,
    look: Look | None = None,
) -> Attempt:
    """Fit one attack and score it; the attack sees neither the scored images nor its score."""
    started = time.perf_counter()
    rows = attacked_rows(case.scored, getattr(attack, "limit", None))
    repeats = int(getattr(attack, "repeats", 1))
    access = Access(attack.access)  # somebody may have written its text
    given = allowed(case, access, wire, rows, repeats)
    generator = stream(wire.seed, f"attack/{name}", case.victim.device)
    before = _versions(case, given)
    fitted = attack.fit(view(case, access, wire), case.aux, generator, progress)
    if not callable(fitted):
        raise AuditError(
            f"attack '{name}' must give a function from what was observed to images, "
            f"got {type(fitted).__name__}; return it from fit"
        )
    guess = _checked(name, fitted(given), case.scored.images[rows])
    if _versions(case, given) != before:
        raise AuditError(
            f"attack '{name}' wrote into the tensors it was given; it must copy them first"
        )
    if look is not None:
        look(name, rows, guess)
    x = case.scored.images[rows]
    sent = send(case.victim, guess, wire.seed, f"reconstructions/{name}")
    shown = gallery_rows(case.scored.labels)  # the first of `rows` where those are a subset
    return Attempt(
        access=str(access),
        rows=rows,
        scored=len(case.scored),
        **measured(x, guess),  # type: ignore[arg-type]  # None only where allowed
        right=answer(case.head, sent) == case.scored.labels[rows],
        pictures=levels(guess[: len(shown)] if len(rows) < len(case.scored) else guess[shown]),
        repeats=repeats,
        curve=tuple(getattr(fitted, "curve", ())),
        aux_mse=_aux_mse(case, (name, attack), fitted, wire.seed),
        seconds=round(time.perf_counter() - started, 3),
    )


def measured(x: Tensor, guess: Tensor) -> dict[str, Tensor | None]:
    """Per-image metrics, a part of the images at a time."""
    kinds = {
        "mse": metrics.mse,
        "psnr": metrics.psnr,
        "ssim": metrics.ssim,
        "ssim_zeropad": metrics.ssim_zeropad,
        "ssim_valid": metrics.ssim_valid,
        "lpips": metrics.lpips,
    }
    chunk = chunk_for(x)
    pairs = list(zip(torch.split(x, chunk), torch.split(guess, chunk), strict=True))
    found: dict[str, Tensor | None] = {}
    for name, metric in kinds.items():
        parts = [value for pair in pairs if (value := metric(*pair)) is not None]
        found[name] = torch.cat(parts) if parts else None
    return found


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


def _aux_mse(
    case: Case, named: tuple[str, Attack], fitted: Callable[[Observation], Tensor], seed: int
) -> float | None:
    """Error on the first aux images: far below that on the scored ones, the attack overfits."""
    name, attack = named
    if attack.access != Access.BLACK_BOX:
        return None
    x = case.aux.images[:AUX_SHOWN]
    z = finite(send(case.victim, x, seed, "aux"))
    guess = _checked(name, fitted(Observation(z, answer(case.head, z))), x)
    return float(metrics.mse(x, guess).mean())


def _versions(case: Case, given: Observation) -> tuple[int, ...]:
    """Counters that every write in place moves."""
    tensors = (case.aux.images, case.aux.labels, given.z, given.answer, given.draws)
    return tuple(t._version for t in tensors if t is not None)  # the only witness of a write


def _check_case(case: Case, attacks: Mapping[str, Attack]) -> None:
    if not attacks:
        raise AuditError("an audit needs at least one attack, got none")
    for what, data in (("aux", case.aux), ("scored", case.scored)):
        if len(data.images) != len(data.labels):
            raise AuditError(
                f"every one of the {what} images needs a label, got {len(data.images)} images and "
                f"{len(data.labels)} labels"
            )
    if len(case.scored) == 0:
        raise AuditError("there are no images to score; the test split is empty")
    for name, attack in attacks.items():
        if attack.access not in list(Access):  # else it would be given some other one's view
            raise AuditError(
                f"access of attack '{name}' must be a member of Access, got {attack.access!r}; "
                f"write one of {', '.join(f'Access.{one.name}' for one in Access)}"
            )
    check_images(case.aux.images, "aux images")
    few = {
        name: need
        for name, a in attacks.items()
        if (need := int(getattr(a, "min_aux", 1))) > len(case.aux)
    }
    if few:
        needs = ", ".join(f"{name} at least {need}" for name, need in few.items())
        raise AuditError(
            f"the attacker has {len(case.aux)} aux images, too few: {needs}; "
            "choose another aux or a larger dataset"
        )
