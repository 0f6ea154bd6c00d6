"""Which client to take: each is trained briefly, attacked quickly, and ranked by the result."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from splitveil.config.resolve import SMALL_SIDE, resolve
from splitveil.config.run_config import RunConfig
from splitveil.data.catalogue import load
from splitveil.errors import ConfigError, RunError
from splitveil.experiments.runner import LiveTable, Trial, Work, ranking_attacks, run_many
from splitveil.io import Json
from splitveil.nets.catalogue import NETS
from splitveil.nets.clients import THIN_CLIENTS
from splitveil.nets.cost import Candidate, CutCost, candidates, cuts_of_nets, nothing_fits
from splitveil.record.statistics import undominated
from splitveil.runs import load_checked_teacher

Shape = tuple[int, int, int]
SCORE = "accuracy above chance × MSE of the strongest attack over the ceiling, at most 1"
COSTS = ("macs", "params", "wire_floats")
TOP = 4


def contenders(
    image_shape: Shape,
    *,
    max_macs: float | int,
    wire_floats: int,
    max_params: int | None = None,
    family: str | None = None,
    top: int = TOP,
) -> dict[str, Candidate | CutCost]:
    """The named nets that fit a budget, and `top` others, from the first of `candidates`.

    The others are spread: the families take turns, and within a family the sizes of the map that
    is sent.

    Args:
        image_shape: Channels, height and width of an image.
        max_macs: Multiply-adds that a client may spend on an image.
        wire_floats: Numbers that it may send for an image.
        max_params: Parameters that it may have; None: any number.
        family: Only this family; None: all.
        top: How many others, at least 1.

    Returns:
        The costs of each client for one image, by the client's name for `--net`.

    >>> list(contenders((3, 32, 32), max_macs=21.9e6, wire_floats=512, top=1))[-2:]
    ['vgg11', 'client:strided-12-12x4.24x4.48x4.96x4-c32']
    """
    if top < 1:
        raise ConfigError(f"top must be at least 1, got {top}")
    budget: Json = {"max_macs": max_macs, "wire_floats": wire_floats, "max_params": max_params}
    budget["family"] = family
    places: Counter[tuple[str, int]] = Counter()
    turns = []
    for other in candidates(image_shape, **budget):
        if other.net not in NETS:
            kind = other.spec.family, other.spec.downsampling
            turns.append((places[kind], other))
            places[kind] += 1
    turns.sort(key=lambda turn: turn[0])  # stable: equals stay in the order of `candidates`
    found: dict[str, Candidate | CutCost] = {}
    for net in _named(image_shape, family):
        [cost] = cuts_of_nets([NETS[net]], image_shape, 2, max_macs, wire_floats)
        if cost.fits and (max_params is None or cost.params <= max_params):
            found[net] = cost
    found |= {other.net: other for _, other in turns[:top]}
    if not found:
        raise ConfigError(nothing_fits(image_shape, **budget))
    return found


def _named(image_shape: Shape, family: str | None) -> list[str]:
    """The nets with a name that are made for images of this size; of a family, its thin ones."""
    small = min(image_shape[1:]) < SMALL_SIDE
    names = [name for name in NETS if (name == "small") == small]
    thin = {name for name, spec in THIN_CLIENTS.items() if spec.family == family}
    return [name for name in names if family is None or name in thin]


def score(accuracy: float, mse: float, ceiling: float, num_classes: int) -> float:
    r"""One number in [0, 1] to rank by, higher is better.

    .. math:: \frac{\max(a - 1/C, 0)}{1 - 1/C} \cdot \min(\text{MSE} / \text{ceiling}, 1)

    At the ceiling the attacker knows no more than the answer, and there is nothing left to win.

    >>> round(score(0.91, 0.02, 0.05, 10), 6)
    0.36
    """
    chance = 1 / num_classes
    return max(accuracy - chance, 0.0) / (1 - chance) * min(mse / ceiling, 1.0)


def ranked(clients: Sequence[Json]) -> list[Json]:
    """Best score first, with the Pareto-optimal ones marked."""
    marks = undominated([(c["accuracy"], c["mse"]) for c in clients])
    marked = [c | {"pareto": mark} for c, mark in zip(clients, marks, strict=True)]
    return sorted(marked, key=lambda c: (-c["score"], c["net"]))


def rank_clients(
    clients: Mapping[str, Candidate | CutCost],
    config: RunConfig,
    profile: str,
    progress: LiveTable | None = None,
) -> tuple[list[Json], dict[str, str]]:
    """Train and attack every client as `config` says, below `runs_dir`/advisor, and rank them.

    A trial that was finished with the same settings is read, not repeated, and one that was
    stopped continues. One that fails is named, and tried again the next time.

    Args:
        clients: Who competes and at what costs, from `contenders`.
        config: Settings of all runs but `net`.
        profile: Budget of the attacks.
        progress: The table that shows what happens.

    Returns:
        What was found on validation images, best score first, and the errors of trials that
        failed, by net. A client has its costs, its numbers (`mse` is that of the strongest attack,
        `attack` its name), its `score`, its folder `run`, and `pareto`: no other client is at
        least as accurate and as private, and better in one of them.
    """
    ranking_attacks(profile)
    dataset = load(config.dataset, config.data_dir)
    below = replace(config, runs_dir=str(Path(config.runs_dir) / "advisor"), name=None)
    # Settings that are wrong for every client are refused before the first one is trained.
    resolve(below, dataset)
    load_checked_teacher(below, dataset)
    trials = [Trial(label=net, config=replace(below, net=net)) for net in clients]
    found: list[Json] = []
    failed: dict[str, str] = {}
    for trial in run_many(trials, Work(profile=profile, aux="val"), progress=progress):
        numbers = trial.found
        if numbers is None:
            failed[trial.label] = trial.reason
            continue
        merit = score(numbers["accuracy"], numbers["mse"], numbers["ceiling"], dataset.num_classes)
        cost = {key: getattr(clients[trial.label], key) for key in COSTS}
        own = {"score": merit, "run": str(trial.config.folder)}
        found.append({"net": trial.label} | cost | numbers | own)
    if not found:
        errors = "; ".join(f"{net}: {error}" for net, error in failed.items())
        raise RunError(f"every trial failed: {errors or 'there was no client to try'}")
    return ranked(found), failed
