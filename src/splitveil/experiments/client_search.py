"""Which client to take: each is trained briefly, and ranked by the result.

`rank_clients` attacks split clients quickly; `search_alone` looks for the client that answers best
without any server, by successive halving.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from splitveil.config.resolve import SMALL_SIDE, resolve
from splitveil.config.run_config import RunConfig
from splitveil.data.catalogue import load
from splitveil.errors import ConfigError, RunError
from splitveil.experiments.runner import (
    LiveTable,
    Measure,
    Trial,
    Work,
    ranking_attacks,
    run_many,
)
from splitveil.io import Json
from splitveil.nets.budget import (
    Answering,
    Candidate,
    CutCost,
    candidates,
    cuts_of_nets,
    nothing_fits,
)
from splitveil.nets.catalogue import NETS
from splitveil.nets.clients import THIN_CLIENTS
from splitveil.nets.split import count_network, cut
from splitveil.record.statistics import undominated
from splitveil.runs import load_checked_teacher

Shape = tuple[int, int, int]
ALONE = 16  # clients that compete at first for the best one alone
SCORE = "accuracy above chance × MSE of the strongest attack over the ceiling, at most 1"
COSTS = ("macs", "params", "wire_floats")
TOP = 4


def contenders(
    image_shape: Shape,
    *,
    max_macs: float | int,
    wire_floats: int,
    max_params: int | None = None,
    max_stored: int | None = None,
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
        max_params: Parameters that it may have in training; None: any number.
        max_stored: Numbers that it may store when deployed; None: any number.
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
    budget |= {"max_stored": max_stored, "family": family}
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
        stored = 0 if max_stored is None else _stored(net, image_shape)
        if cost.fits and cost.params <= (max_params or math.inf) and stored <= (max_stored or 0):
            found[net] = cost
    found |= {other.net: other for _, other in turns[:top]}
    if not found:
        raise ConfigError(nothing_fits(image_shape, **budget))
    return found


def _stored(net: str, image_shape: Shape) -> int:
    with torch.device("meta"):
        model = cut(NETS[net].build(image_shape, 2), NETS[net].cut_at)
        return count_network(model.encoder, image_shape).stored


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


def rungs(epochs: int, clients: int) -> list[tuple[int, int]]:
    """Epochs and number of clients of each round: half as many clients, twice as many epochs.

    The last round has all epochs and at least two clients, where there are two.

    >>> rungs(20, 16), rungs(15, 4), rungs(1, 1)
    ([(5, 16), (10, 8), (20, 4)], [(8, 4), (15, 2)], [(1, 1)])
    """
    count = 3 if clients >= 8 else 2 if clients >= 4 else 1  # noqa: PLR2004
    return [
        (max(1, math.ceil(epochs / 2 ** (count - 1 - at))), max(1, clients >> at))
        for at in range(count)
    ]


def search_alone(
    clients: Sequence[Answering],
    config: RunConfig,
    fits: Callable[[int, int], bool],
    progress: LiveTable | None = None,
    measure: Measure | None = None,
) -> tuple[list[Json], dict[str, str]]:
    """Train clients that answer alone, in rounds that keep the better half of them.

    A trial that was finished with the same settings is read, not repeated; one that failed is
    named, and tried again the next time. The leader of the last but one round is tried with the
    numbers of its last map flattened too, if that fits.

    Args:
        clients: Who competes, from `answering_clients`.
        config: Settings of all runs but defence and client; its epochs are those of the last round.
        fits: Whether a device can have these multiply-adds and stored numbers.
        progress: The table that shows what happens.
        measure: What is measured of each besides; a row then has it as `found`.

    Returns:
        Every trial, those of the last round first, each round by accuracy on validation images:
        `client`, `pooling`, `epochs`, `accuracy`, costs and folder; and the errors of those that
        failed.
    """
    dataset = load(config.dataset, config.data_dir)
    below = replace(
        config, defence="alone", name=None, runs_dir=str(Path(config.runs_dir) / "advisor")
    )
    resolve(replace(below, client=str(clients[0].spec)), dataset)
    load_checked_teacher(below, dataset)
    epochs = resolve(below, dataset).config.epochs or 1
    left: list[tuple[Answering, str]] = [(one, "mean") for one in clients]
    rounds: list[list[Json]] = []
    failed: dict[str, str] = {}
    plan = rungs(epochs, len(left))
    for at, (length, many) in enumerate(plan):
        left = left[:many]
        if at and at == len(plan) - 1:
            flat = flattened(left[0][0], dataset.image_shape, dataset.num_classes)
            left += [(flat, "flatten")] if fits(flat.macs, flat.stored) else []
        known = {f"{length} epochs/{one.spec} {pooling}": (one, pooling) for one, pooling in left}
        trials = [
            Trial(label=label, config=answering_run(below, one, pooling, length))
            for label, (one, pooling) in known.items()
        ]
        rows: list[Json] = []
        work = Work(profile="smoke", aux="val", measure=measure)
        for trial in run_many(trials, work, progress=progress):
            one, pooling = known[trial.label]
            if trial.found is None:
                failed[trial.label] = trial.reason
                continue
            row = {
                "client": str(one.spec), "pooling": pooling, "epochs": length,
                "accuracy": trial.found["accuracy"], "macs": one.macs, "stored": one.stored,
                "depth": one.depth, "run": str(trial.config.folder),
            }  # fmt: skip
            rows.append(row | ({"found": trial.found} if measure else {}))
        if not rows:
            raise RunError(
                "every trial failed: " + "; ".join(f"{k}: {v}" for k, v in failed.items())
            )
        rows.sort(key=lambda row: (-row["accuracy"], row["macs"], row["client"]))
        rounds.append(rows)
        by_name = {str(one.spec): one for one, _ in left}
        left = [(by_name[row["client"]], row["pooling"]) for row in rows]
    return [row for rows in reversed(rounds) for row in rows], failed


def answering_run(config: RunConfig, one: Answering, pooling: str, epochs: int) -> RunConfig:
    """The run of a client that answers alone."""
    own = {**config.settings, "pooling": pooling}
    return replace(config, client=str(one.spec), epochs=epochs, settings=own)


def flattened(one: Answering, image_shape: Shape, num_classes: int) -> Answering:
    """The client with a linear layer on all numbers of its last map.

    >>> from splitveil.nets.clients import parse_client
    >>> from splitveil.nets.budget import weigh_alone
    >>> one = weigh_alone(parse_client("strided-8s2-16-c1"), (1, 8, 8), 10)
    >>> flattened(one, (1, 8, 8), 10).stored - one.stored  # 4×4 places instead of one
    2400
    """
    _, height, width = one.spec.wire_shape(image_shape)
    more = (height * width - 1) * one.spec.widths[-1] * num_classes
    return replace(one, macs=one.macs + more, stored=one.stored + more)
