"""Which client to take: each is trained briefly, attacked quickly, and ranked by what came out."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from splitveil.audits.suite import Share
from splitveil.config import ANY_RECIPE, RECIPES, SMALL_SIDE, RunConfig, resolve
from splitveil.data import load
from splitveil.errors import ConfigError, RunError, SplitVeilError
from splitveil.nets import NETS, THIN_CLIENTS, Candidate, candidates, cut
from splitveil.sweep.pareto import undominated
from splitveil.teaching import ready_teacher
from splitveil.trials import ranking_attacks, trial
from splitveil.types import Progress, silent

Shape = tuple[int, int, int]

SCORE = "accuracy above chance × MSE of the strongest attack over the ceiling, at most 1"
TOP = 4
_SHARE = 4  # a trial takes this part of the epochs of a full training


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """A client that may compete: its name for `--net` and its costs for one image."""

    net: str
    macs: int
    params: int
    wire_floats: int


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a trial measured on the validation images, and its score.

    `mse` is that of the strongest attack, `attack` its name; `pareto`: no other client of the
    comparison is at least as accurate and as private, and better in one of them.
    """

    net: str
    macs: int
    params: int
    wire_floats: int
    accuracy: float
    mse: float
    attack: str
    ceiling: float
    leakage: float
    score: float
    run: str
    pareto: bool = False


@dataclass(frozen=True)
class Failure:
    """A client whose trial ended in an error."""

    net: str
    error: str


@dataclass(frozen=True)
class Advice:
    """Findings, best score first, and the clients whose trial failed."""

    findings: tuple[Finding, ...]
    failures: tuple[Failure, ...]


def entrants(
    image_shape: Shape,
    *,
    max_macs: float | int,
    wire_floats: int,
    max_params: int | None = None,
    family: str | None = None,
    top: int = TOP,
) -> list[Entrant]:
    """The named nets that fit a budget, and `top` others: the first of `candidates`, spread.

    The families take turns, and within a family the sizes of the map that is sent.

    >>> [e.net for e in entrants((3, 32, 32), max_macs=21.9e6, wire_floats=512, top=1)][-2:]
    ['vgg11', 'client:strided-12-12x4.24x4.48x4.96x4-c32']
    """
    if top < 1:
        raise ConfigError(f"top must be at least 1, got {top}")
    fitting = candidates(
        image_shape,
        max_macs=max_macs,
        wire_floats=wire_floats,
        max_params=max_params,
        family=family,
    )
    most = math.inf if max_params is None else max_params
    named = [
        entrant
        for name in _named(image_shape, family)
        if (entrant := _weighed(name, image_shape)).macs <= max_macs
        and entrant.wire_floats <= wire_floats
        and entrant.params <= most
    ]
    places: Counter[tuple[str, int]] = Counter()
    turns: list[tuple[int, Candidate]] = []
    for client in fitting:
        if client.net not in NETS:
            kind = client.spec.family, client.spec.downsampling
            turns.append((places[kind], client))
            places[kind] += 1
    turns.sort(key=lambda turn: turn[0])  # stable: equals stay in the order of `candidates`
    return named + [
        Entrant(net=c.net, macs=c.macs, params=c.params, wire_floats=c.wire_floats)
        for _, c in turns[:top]
    ]


def _named(image_shape: Shape, family: str | None) -> list[str]:
    """The nets with a name that are made for images of this size; of a family, its thin ones."""
    small = min(image_shape[1:]) < SMALL_SIDE
    names = [name for name in NETS if (name == "small") == small]
    thin = {name for name, spec in THIN_CLIENTS.items() if spec.family == family}
    return [name for name in names if family is None or name in thin]


def _weighed(name: str, image_shape: Shape) -> Entrant:
    with torch.device("meta"):  # shapes alone: no memory, no random numbers
        model = cut(NETS[name].build(image_shape, 2), NETS[name].cut_at)
    return Entrant(
        net=name,
        macs=model.macs(image_shape),
        params=model.client_params(),
        wire_floats=model.wire_floats(image_shape),
    )


def score(accuracy: float, mse: float, ceiling: float, num_classes: int) -> float:
    r"""One number in [0, 1] to rank by, higher is better.

    .. math:: \frac{\max(a - 1/C, 0)}{1 - 1/C} \cdot \min(\text{MSE} / \text{ceiling}, 1)

    At the ceiling the attacker knows no more than the answer, and there is nothing left to win.

    >>> round(score(0.91, 0.02, 0.05, 10), 6)
    0.36
    """
    chance = 1 / num_classes
    return max(accuracy - chance, 0.0) / (1 - chance) * min(mse / ceiling, 1.0)


def ranked(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Best score first, with the Pareto-optimal ones marked."""
    marks = undominated([(f.accuracy, f.mse) for f in findings])
    marked = [replace(f, pareto=mark) for f, mark in zip(findings, marks, strict=True)]
    return tuple(sorted(marked, key=lambda f: (-f.score, f.net)))


def brief_epochs(dataset: str) -> int:
    """Epochs of a trial unless the user says otherwise: a quarter of the dataset's own.

    >>> brief_epochs("digits")
    15
    """
    return max(1, RECIPES.get(dataset.partition(":")[0], ANY_RECIPE).epochs // _SHARE)


def advise(
    clients: Sequence[Entrant], config: RunConfig, profile: str, progress: Progress = silent
) -> Advice:
    """Train and attack every client as `config` says, below `runs_dir`/advisor, and rank them.

    A trial that was finished with the same settings is read, not repeated, and one that was
    stopped goes on; one that fails is named, and tried again the next time.
    """
    attacks = ranking_attacks(profile)
    dataset = load(config.dataset, config.data_dir)
    below = replace(config, runs_dir=str(Path(config.runs_dir) / "advisor"), name=None)
    resolve(below, dataset)  # what no client can mend is said before the first one is trained
    ready_teacher(below, dataset)
    findings: list[Finding] = []
    failures: list[Failure] = []
    total = len(clients)
    for place, client in enumerate(clients):
        part = Share(progress, f"{place + 1}/{total} {client.net}", float(place), 1.0, float(total))
        part(0, 1)
        try:
            folder, found = trial(replace(below, net=client.net), dataset, attacks, part)
        except (SplitVeilError, RuntimeError) as err:  # torch's own: out of memory, say
            failures.append(Failure(client.net, str(err)))
            continue
        merit = score(found["accuracy"], found["mse"], found["ceiling"], dataset.num_classes)
        findings.append(Finding(**asdict(client), **found, score=merit, run=str(folder)))
    progress(total, total, "done")
    if not findings:
        told = "; ".join(f"{f.net}: {f.error}" for f in failures)
        raise RunError(f"no trial came to an end: {told or 'there was no client to try'}")
    return Advice(ranked(findings), tuple(failures))
