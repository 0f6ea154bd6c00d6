"""A sweep: settings of several defences, tried under one budget, and the front they reach.

`--vary` says what differs, a sampler proposes settings, and `runner.run_many` trains and attacks
the trials on validation images. Grid and random proposals depend on the plan alone. Optuna's also
depend on the trials finished before; each is asked of a fresh sampler with its own seed, so that a
killed sweep continues as if nothing had happened.
"""

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, get_args

import numpy as np

from splitveil.config.resolve import make_config, resolve
from splitveil.config.run_config import (
    ALIASES,
    RUN_KEYS,
    RunConfig,
    converted,
    own_names,
    parse_pair,
    parse_pairs,
)
from splitveil.data.catalogue import load
from splitveil.data.dataset import Dataset
from splitveil.defences.catalogue import find_defence
from splitveil.errors import AuditError, ConfigError, Range, RunError, check_ranges, unknown
from splitveil.experiments.runner import (
    FILE,
    LiveTable,
    Trial,
    Work,
    brief_epochs,
    check_ray,
    checked_trial,
    ranking_attacks,
    read_trial,
    run_many,
    sweep_extra,
)  # fmt: skip
from splitveil.io import (
    Json,
    as_run_error,
    folder_lock,
    parse_json,
    read_bytes,
    read_text,
    write_text,
)
from splitveil.nets.clients import require
from splitveil.record.schema import beats_guessing
from splitveil.record.statistics import front, hypervolume, most_private
from splitveil.rng import derive_seed
from splitveil.runs import load_checked_teacher, load_teacher, splits_of, teacher_folder

log = logging.getLogger("splitveil")
Settings = dict[str, Any]
Sampler = Literal["grid", "random", "optuna"]
DEFENCES = ("none", "noise", "veil")
NAIVE = ("none", "noise")
OWN = ("defence", "seed", "name", "runs_dir")  # differ between the trials; the sweep has options
MOST = 10_000  # trials of a defence; checked first, so that nothing endless begins

FIXED = (  # shared by the whole sweep, or its trials could not be compared or found again
    "dataset", "defence", "name", "data_dir", "runs_dir", "device", "compile", "final",
    "split_seed", "teacher",
)  # fmt: skip

STARTUP = 10  # Optuna's trials at random before it models anything, or a third of the budget
PLAN_FILE, RESULT_FILE, TRIALS = "sweep.json", "result.json", "trials"
OLD_JOURNAL = "journal.jsonl"  # of version 0.1.0
LOSS = 0.01  # accuracy that privacy may cost: one point
_ROUNDING = 1e-9
_SHAPE = (
    "key=a,b,c or key=lin:low:high or key=log:low:high; a grid also needs a count, as in "
    "key=lin:low:high:5"
)


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """A setting and the values it may take, or the interval it is drawn from.

    Args:
        key: Name of the setting.
        values: The listed values; empty for an interval.
        low: Low end of the interval.
        high: High end.
        log: Whether it is drawn evenly in its logarithm.
        points: How many values a grid takes of the interval.
        whole: Whether its values are whole numbers.
    """

    key: str
    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    points: int | None = None
    whole: bool = False

    def at(self, share: float) -> float | int:
        """The value at a share in [0, 1] of the interval, or of its logarithms for `log`.

        >>> Dimension(key="lambd", low=0.01, high=1.0, log=True).at(0.5)
        0.1
        """
        raw = self.low + share * (self.high - self.low)
        if self.log:
            low, high = math.log(self.low), math.log(self.high)
            raw = math.exp(low + share * (high - low))
        raw = min(max(raw, self.low), self.high)  # exp and log round
        return round(raw) if self.whole else float(f"{raw:.12g}")

    def listed(self) -> list[Any]:
        """The values a grid takes."""
        if self.values:
            return list(self.values)
        if self.points is None:
            example = f"{'log' if self.log else 'lin'}:{self.low:g}:{self.high:g}:5"
            raise ConfigError(
                f"--sampler grid must know how many values of {self.key} to try; write "
                f"{self.key}={example} for 5 of them, or use --sampler random or optuna"
            )
        return list(dict.fromkeys(self.at(i / (self.points - 1)) for i in range(self.points)))


Space = tuple[Dimension, ...]


@dataclass(frozen=True, kw_only=True)
class SearchPlan:
    """Everything that decides which trials a sweep has and how each is measured.

    Args:
        defences: Names of the defences, each once.
        vary: What differs, as `--vary` takes it.
        options: Settings that all runs share.
        trials: Number of trials of each defence, 1 to 10,000.
        sampler: Who proposes the settings.
        profile: Budget of the attacks.
        attacks: Some attacks of the profile; empty: all that see every image once.
        seed: Seed of the proposals, and of the first run.
        teacher: Hash of the model that all runs learn from, if there is one.
    """

    defences: tuple[str, ...]
    vary: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    trials: Annotated[int, Range(1, MOST, hint="this is the number for each defence")]
    sampler: Sampler
    profile: str = "quick"
    attacks: tuple[str, ...] = ()
    seed: int = 0
    teacher: str | None = None

    def __post_init__(self) -> None:
        twice = {name for name in self.defences if self.defences.count(name) > 1}
        check_ranges(self, *(f"--defence {name} is given twice; give it once" for name in twice))


# What is varied.


def spaces(texts: Sequence[str], defences: Sequence[str]) -> dict[str, Space]:
    """What is varied for each defence: the settings it has, with values of their types.

    Args:
        texts: As `--vary` takes them: `key=a,b,c`, `key=lin:low:high` or `key=log:low:high`.
        defences: Names of the defences; each setting must belong to one of them.

    >>> found = spaces(["lambd=0.1,1", "noise_std=log:0.01:0.2"], ["noise", "veil"])
    >>> [dimension.key for dimension in found["noise"]], found["veil"][0].values
    (['noise_std'], (0.1, 1.0))
    """
    given: dict[str, str] = {}
    for text in texts:
        key, _, raw = (part.strip() for part in text.partition("="))
        key = ALIASES.get(key, key)
        require(
            (bool(key and raw), f"--vary needs {_SHAPE}; got '{text}'"),
            (key not in FIXED, f"all trials of a sweep share {key}, so --vary cannot vary it"),
            (key not in given, f"--vary {key} is given twice; give it once"),
        )
        given[key] = raw
    _check_known(given, defences)
    return {
        name: tuple(_dimension(k, raw, name) for k, raw in given.items() if applies(k, name))
        for name in defences
    }


def applies(key: str, defence: str) -> bool:
    """Whether a defence has this setting; `noise_std` belongs to those that add noise."""
    found = find_defence(defence)
    return (key in RUN_KEYS or key in found.setting_types()) and (key != "noise_std" or found.noisy)


def _check_known(keys: Iterable[str], defences: Sequence[str]) -> None:
    """Refuse settings that no defence of the sweep has."""
    names = ", ".join(defences)
    for key in keys:
        if not any(applies(key, name) for name in defences):
            known = {k for n in defences for k in (*find_defence(n).setting_types(), *RUN_KEYS)}
            if key in known:
                raise ConfigError(f"{key} has no effect with the defences {names}; leave it out")
            raise ConfigError(unknown(f"setting of {names}", key, known - {*FIXED}))


def _dimension(key: str, raw: str, defence: str) -> Dimension:
    """A setting that the defence has, with what `--vary key=raw` says of it."""
    types: Mapping[str, Any] = {**find_defence(defence).setting_types(), **RUN_KEYS}
    if raw.startswith(("lin:", "log:")):
        return _span(key, raw, types[key])
    items = [item.strip() for item in raw.split(",")]
    if "" in items:
        raise ConfigError(f"--vary {key}={raw} has an empty value; give {_SHAPE}")
    pairs = [dict([parse_pair(f"{key}={item}")]) for item in items]
    values = [converted(pair, types, f"setting for defence '{defence}'")[key] for pair in pairs]
    if len(set(map(repr, values))) < len(values):
        raise ConfigError(f"--vary {key} names a value twice: {values}")
    return Dimension(key=key, values=tuple(values))


def _span(key: str, raw: str, kind: Any) -> Dimension:  # noqa: ANN401 - a setting's type
    scale, *words = raw.split(":")
    try:
        low, high = (float(word) for word in words[:2])
        points = int(":".join(words[2:])) if words[2:] else None
    except ValueError:
        raise ConfigError(f"--vary {key}={raw} is not a range; give {_SHAPE}") from None
    numbers = {int, float} & {kind, *get_args(kind)}
    whole = int in numbers
    wrong = f"--vary {key}={raw}: "
    require(
        (bool(numbers), f"{key} is not a number; list its values instead of a range: {key}=a,b"),
        (0 < high - low < math.inf, f"{wrong}the low end must be below the high end, both finite"),
        (scale == "lin" or low > 0, f"{wrong}a log range must start above 0; use lin, or raise it"),
        (
            not whole or (low.is_integer() and high.is_integer()),
            f"{wrong}{key} is a whole number, and so must be both ends",
        ),
        (
            points is None or 2 <= points <= MOST,  # noqa: PLR2004 - the two ends
            f"{wrong}the count must be from 2 to {MOST}, got {points}; or leave it out and use "
            "--sampler random or optuna",
        ),
    )
    return Dimension(key=key, low=low, high=high, log=scale == "log", points=points, whole=whole)


def grid_size(space: Space) -> int:
    """How many points a grid has, counted before it is built; too many are refused."""
    counts = {d.key: len(d.listed()) for d in space}
    size = math.prod(counts.values())
    if size > MOST:
        words = " × ".join(f"{count} of {key}" for key, count in counts.items())
        raise ConfigError(
            f"a grid of {words} has {size} points, but a defence has at most {MOST} trials; list "
            "fewer values, or use --sampler random or optuna with --trials"
        )
    return size


def grid_settings(space: Space) -> list[Settings]:
    """Every combination; the last setting changes fastest.

    >>> grid_settings((Dimension(key="a", values=(1, 2)), Dimension(key="b", values=("x",))))
    [{'a': 1, 'b': 'x'}, {'a': 2, 'b': 'x'}]
    """
    grid_size(space)
    keys = [d.key for d in space]
    return [dict(zip(keys, row, strict=True)) for row in product(*(d.listed() for d in space))]


def random_settings(space: Space, random: Random) -> Settings:
    """One random point of the space; its settings are independent."""
    return {d.key: random.choice(d.values) if d.values else d.at(random.random()) for d in space}


def corners(space: Space) -> list[Settings]:
    """Settings that together hold every listed value and both ends of every range."""
    ends = [d.values or (d.at(0.0), d.at(1.0)) for d in space]
    rows = max(map(len, ends), default=1)
    return [{d.key: e[i % len(e)] for d, e in zip(space, ends, strict=True)} for i in range(rows)]


# The plan.


def make_plan(
    given: Mapping[str, Any],
    options: Mapping[str, Any],
    pairs: Sequence[str] = (),
    saved: Path | None = None,
) -> SearchPlan:
    """A plan from what a user gave; what is None comes from a saved sweep, or has a default.

    Where everything is listed the sampler is a grid, with as many trials as the largest grid has
    points; otherwise it is Optuna, which needs a number of trials.

    Args:
        given: Fields of the plan.
        options: Settings that all runs share.
        pairs: More of them, as `key=value`.
        saved: Folder of the sweep to continue.
    """
    common = own_names(parse_pairs(pairs))
    for key in OWN:
        if key in common:
            option = f"--{key.replace('_', '-')}"
            raise ConfigError(f"--set {key} does not work in a sweep; use {option} instead")
    plan: Json = {"defences": DEFENCES, "vary": (), "options": {"dataset": "digits"}}
    if saved is not None:
        plan = asdict(read_plan(saved))
    common = plan["options"] | common | {k: v for k, v in options.items() if v is not None}
    if saved is None:
        common.setdefault("epochs", brief_epochs(str(common["dataset"])))
    plan |= {k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if v is not None}
    plan |= {"options": common, "teacher": None}
    if common.get("teacher") not in (None, "none"):
        place = teacher_folder(str(common["teacher"])).resolve()
        common["teacher"], plan["teacher"] = str(place), load_teacher(place).noted["model"]
    found = spaces(plan["vary"], plan["defences"]).values()
    finite = all(d.values or d.points is not None for space in found for d in space)
    plan.setdefault("sampler", "grid" if finite else "optuna")
    if _typed(plan)["sampler"] == "grid":
        plan.setdefault("trials", max(map(grid_size, found)))
    elif "trials" not in plan:
        raise ConfigError(
            f"--sampler {plan['sampler']} needs --trials, the number of trials of each defence"
        )
    return SearchPlan(**plan)


def _typed(plan: Json) -> Json:
    """Some fields of a plan that comes from outside, checked and of their types."""
    kinds = {"trials": int, "seed": int, "sampler": Sampler}
    return converted({k: plan[k] for k in kinds if k in plan}, kinds, "field of a plan")


def read_plan(folder: Path) -> SearchPlan:
    """The plan of a sweep's folder."""
    file = folder / PLAN_FILE
    if not file.is_file():
        raise RunError(f"nothing to resume: {folder} holds no sweep; leave out --resume")
    try:
        saved: Json = dict(parse_json(read_text(file)))
        lists = {k: tuple(saved[k]) for k in ("defences", "vary", "attacks")}
        return SearchPlan(**saved | lists | _typed(saved))
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as err:
        raise RunError(
            f"{file} is not the plan of a sweep: {err}; correct the file, or start a new sweep "
            "with another --name"
        ) from err


def check_plan(plan: SearchPlan) -> Dataset:
    """Refuse what could not work before anything starts; returns the data of the sweep."""
    found = spaces(plan.vary, plan.defences)
    _check_known(plan.options.keys() - {"dataset"}, plan.defences)
    if clash := {d.key for space in found.values() for d in space} & plan.options.keys():
        raise ConfigError(f"{', '.join(sorted(clash))} cannot be both varied and set; do one")
    ranking_attacks(plan.profile, plan.attacks)
    if plan.sampler == "optuna":
        _optuna()
    configs = [
        config_of(plan, defence, settings, Path("unused"))
        for defence, space in found.items()
        for settings in corners(space)
    ]
    data = load(configs[0].dataset, configs[0].data_dir)
    for config in configs:
        resolve(config, data).build()
        load_checked_teacher(config, data)
        if not len(splits_of(config, data).val):
            raise AuditError(
                f"a sweep chooses by validation images, and '{config.dataset}' has none with "
                f"final={str(config.final).lower()} and held_out={config.held_out}; leave these "
                "settings out, or add images"
            )
    return data


def check_sweep_folder(folder: Path, plan: SearchPlan, *, resume: bool) -> None:
    """Refuse a folder that is taken, or a sweep to continue that has another plan."""
    if not resume:
        if folder.exists():
            raise RunError(
                f"{folder} exists already; continue it with --resume, choose another --name, or "
                "remove it yourself"
            )
        return
    old, new = asdict(read_plan(folder)), asdict(plan)
    # More trials of the same plan are welcome; fewer would leave finished ones out.
    changed = [k for k in new if new[k] != old[k] and (k != "trials" or new[k] < old[k])]
    if changed:
        listed = "; ".join(f"{k} was {old[k]!r}, is {new[k]!r}" for k in changed)
        raise ConfigError(
            f"cannot resume {folder} with another plan: {listed}; leave these options out (only "
            "--trials may grow), or start a new sweep with another --name"
        )


def config_of(
    plan: SearchPlan, defence: str, settings: Mapping[str, Any], folder: Path
) -> RunConfig:
    """The run of a trial; shared settings that its defence lacks are left out."""
    common = {k: v for k, v in plan.options.items() if applies(k, defence)}
    own = {"defence": defence, "runs_dir": str(folder / TRIALS)}
    return make_config(common | {"seed": plan.seed} | dict(settings) | own)


# The trials.


def run_sweep(
    plan: SearchPlan,
    folder: Path,
    *,
    resume: bool = False,
    jobs: int | None = 1,
    address: str | None = None,
    progress: LiveTable | None = None,
) -> Json:
    """Run every trial of a plan that is not finished, and say what all of them found.

    Args:
        plan: What to try.
        folder: The sweep's folder, which gets `sweep.json`, `trials/` and `result.json`.
        resume: Continue the sweep in that folder; trials that failed are tried again.
        jobs: Trials at a time, see `runner.run_many`.
        address: A Ray cluster, see `runner.run_many`.
        progress: The table that shows what happens.

    Returns:
        What `result.json` holds, see `sweep_result`.
    """
    table = progress or LiveTable()
    check_sweep_folder(folder, plan, resume=resume)  # before any data are downloaded
    check_ray(jobs, address)
    classes = check_plan(plan).num_classes
    if not set(NAIVE) & set(plan.defences):
        log.warning("no baseline to compare with; add --defence none or --defence noise")
    busy = f"another process is working on the sweep in {folder}; wait for it, or end it"
    with folder_lock(folder, busy):
        check_sweep_folder(folder, plan, resume=resume)  # another process may have been quicker
        with as_run_error(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / PLAN_FILE, json.dumps(asdict(plan), indent=2) + "\n")
        done = ended_trials(plan, folder)
        table.expect(dict.fromkeys(plan.defences, plan.trials))
        for trial in done.values():
            if trial.error is None:
                table.finish(trial)
        if failed := [label for label, trial in done.items() if trial.error is not None]:
            log.warning("trying again what failed: %s", ", ".join(failed))
        work = Work(profile=plan.profile, aux="val", only=plan.attacks)
        trials = _proposed(plan, folder, done)
        for trial in run_many(trials, work, jobs=jobs, address=address, progress=table):
            done[trial.label] = trial
        summary = sweep_result(plan, done.values(), folder, classes)
        write_text(folder / RESULT_FILE, json.dumps(summary, indent=2, allow_nan=False) + "\n")
    return summary


def ended_trials(plan: SearchPlan, folder: Path) -> dict[str, Trial]:
    """The trials in a sweep's folder that have ended, by label; version 0.1.0's too."""
    saved = _old_journal(folder / OLD_JOURNAL)
    for file in sorted((folder / TRIALS).glob(f"*/{FILE}")):
        saved.append(read_trial(file) | {"run": file.parent.name})
    found = []
    for entry in saved:
        group, _, number = entry.get("label", "").rpartition("/")
        # Else the file is broken or of another plan, and its trial is run again.
        if group in plan.defences and number.isdecimal():
            own: Json = {
                k: entry.get(k) for k in ("label", "settings", "found", "error", "seconds")
            }
            name = entry.get("run") if own["error"] is None else None
            config = config_of(plan, group, own["settings"], folder)
            found.append(Trial(config=replace(config, seed=entry["seed"], name=name), **own))
    return {trial.label: trial for trial in sorted(found, key=lambda t: _number(t.label))}


def _old_journal(file: Path) -> list[Json]:
    """Trials as version 0.1.0 kept them, a line each; a killed process left the last one torn."""
    text = read_bytes(file).decode("utf-8", errors="replace") if file.is_file() else ""
    found = []
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        try:
            entry = parse_json(line)
            label = {"label": f"{entry['defence']}/{entry['number']}"}
            found.append(checked_trial(entry | label))
        except (ValueError, TypeError, KeyError, RunError) as err:
            raise RunError(
                f"{file}, line {number} is not a finished trial: {err}; remove that line, and its "
                "trial is run again"
            ) from err
    return found


def _proposed(plan: SearchPlan, folder: Path, done: Mapping[str, Trial]) -> Iterator[Trial]:
    """What is left to run: failed trials first, then new ones, the defences in turns.

    A generator: each trial is proposed only when there is room for it, from what is in `done` by
    then.
    """
    begun = dict(done)
    yield from [replace(trial, error=None) for trial in begun.values() if trial.error is not None]
    found = spaces(plan.vary, plan.defences)
    taken = [replace(trial.config, name=None) for trial in begun.values()]
    for number, defence in product(range(plan.trials), plan.defences):
        label = f"{defence}/{number}"
        if label in begun:
            continue
        if plan.sampler == "optuna":
            known = [done.get(k, t) for k, t in begun.items() if t.group == defence]
            settings = _ask_optuna(plan, label, found[defence], known)
        else:
            settings = _drawn(plan, label, found[defence])
        config = config_of(plan, defence, settings, folder)
        while config in taken:  # with few settings the budget goes into seeds: no trial is a twin
            config = replace(config, seed=config.seed + 1)
        taken.append(config)
        begun[label] = Trial(label=label, config=config, settings=settings)
        yield begun[label]


def _number(label: str) -> int:
    return int(label.rpartition("/")[2])


def _random(plan: SearchPlan, name: str) -> Random:
    return Random(derive_seed(plan.seed, f"sweep/{name}"))  # noqa: S311 - no secret


def _drawn(plan: SearchPlan, label: str, space: Space) -> Settings:
    """What a sampler that does not learn proposes for the trial of this label."""
    if plan.sampler == "random":
        return random_settings(space, _random(plan, label))
    points = grid_settings(space)
    if plan.trials < len(points):
        _random(plan, label.rpartition("/")[0]).shuffle(points)
    return points[_number(label) % len(points)]


def _optuna() -> Any:  # noqa: ANN401 - the module
    with sweep_extra("optuna", "use --sampler random"):
        import optuna
    return optuna


def _ask_optuna(plan: SearchPlan, label: str, space: Space, known: Sequence[Trial]) -> Settings:
    """Optuna's next point (multi-objective TPE): accuracy up, leakage down.

    `known` are the trials of the defence that were proposed before; some may still run.
    """
    optuna = _optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(
        seed=derive_seed(plan.seed, f"sweep/{label}") % 2**32,
        n_startup_trials=min(STARTUP, max(1, plan.trials // 3)),
        # While a trial runs, its surroundings count as bad, so that it is not proposed again.
        constant_liar=not all(t.found or t.error for t in known),
    )
    study = optuna.create_study(directions=["maximize", "minimize"], sampler=sampler)
    kinds = {d.key: _distribution(optuna.distributions, d) for d in space}
    states = optuna.trial.TrialState
    for trial in known:
        ended: Json = {"state": states.FAIL if trial.error else states.RUNNING}
        if trial.found is not None:
            ended = {"state": states.COMPLETE, "values": trial.point}
        params = {key: trial.settings[key] for key in kinds}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=kinds, **ended))
    return dict(study.ask(kinds).params)


def _distribution(kinds: Any, dimension: Dimension) -> Any:  # noqa: ANN401 - Optuna's, if it is there
    if dimension.values:
        return kinds.CategoricalDistribution(dimension.values)
    low, high = dimension.low, dimension.high
    if dimension.whole:
        return kinds.IntDistribution(int(low), int(high), log=dimension.log)
    return kinds.FloatDistribution(low, high, log=dimension.log)


# The result.


def _row(trial: Trial) -> Json:
    """A trial that has ended as JSON."""
    row = {
        "trial": trial.label, "defence": trial.group, "settings": dict(trial.settings),
        "seed": trial.config.seed, "seconds": trial.seconds,
    }  # fmt: skip
    if trial.found is None:
        return row | {"error": trial.error}
    found = {k: v for k, v in trial.found.items() if k != "classes"}  # 0.1.0 noted the classes
    return row | found | {"run": str(trial.config.folder)}


def sweep_result(plan: SearchPlan, trials: Iterable[Trial], folder: Path, classes: int) -> Json:
    """Front, hypervolumes and the best trial of each defence; refused where every trial failed.

    Trials at chance are on no front: they leak little because they know nothing.

    Args:
        plan: The sweep's plan.
        trials: Trials that have ended.
        folder: The sweep's folder.
        classes: Number of classes of the data; guessing has accuracy 1 / classes.
    """
    order = plan.defences.index
    every = sorted(trials, key=lambda t: (_number(t.label), order(t.group)))
    good = [t for t in every if t.found is not None]
    if not good:
        errors = "; ".join(f"{t.label}: {t.error}" for t in every[:3])
        raise RunError(f"every trial failed: {errors}; fix the cause and try again with --resume")
    guess = 1.0 / classes
    living = [t for t in good if beats_guessing(t.point[0], guess)]
    base = max([t for t in good if t.group == "none"] or good, key=lambda t: t.point[0])
    best = {}
    for name in plan.defences:
        own = [t for t in good if t.group == name]
        alive = [t for t in own if t in living]
        chosen = most_private([t.point for t in alive], base.point[0] - LOSS - _ROUNDING)
        count = sum(t.group == name for t in every)
        best[name] = {
            "trials": count, "failed": count - len(own),
            "accuracy": max((t.point[0] for t in own), default=None),
            "hypervolume": _volume(own, classes),
            "best": None if chosen is None else _row(alive[chosen]),
        }  # fmt: skip
    marks = front([t.point for t in living])
    members = [t for t, mark in zip(living, marks, strict=True) if mark]
    return {
        "sweep": str(folder),
        "plan": asdict(plan) | {"attacks": list(ranking_attacks(plan.profile, plan.attacks))},
        "measured_on": "validation images",
        "reference_point": {"accuracy": guess, "leakage": 1.0},
        "hypervolume": _volume(good, classes),
        "reference_accuracy": {
            "accuracy": base.point[0], "defence": base.group, "trial": base.label
        },
        "allowed_loss": LOSS,
        "defences": best,
        "at_chance": [t.label for t in good if t not in living],
        "front": [_row(t) for t in sorted(members, key=lambda t: -t.point[0])],
        "trials": [_row(t) for t in every],
    }  # fmt: skip


def _volume(trials: Sequence[Trial], classes: int) -> Json | None:
    if not trials:
        return None
    accuracy, leakage = np.array([t.point for t in trials]).T
    return {"value": hypervolume(accuracy, leakage, 1.0 / classes)}
