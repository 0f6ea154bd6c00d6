"""A sweep: settings of several defences tried under one budget, and the front they reach.

`--vary` says what differs, a sampler proposes settings, `runner.run_many` trains and attacks them
on validation images. Grid and random proposals are functions of the plan. Optuna's also depend on
the trials that were finished before; each is asked of a fresh sampler with a seed of its own, so
that a sweep that was killed goes on as if it had not been.
"""

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args

import numpy as np

from splitveil.config.resolve import make_config, resolve
from splitveil.config.run_config import RUN_KEYS, RunConfig, one_noise_name
from splitveil.config.settings import converted, parse_pair, parse_pairs
from splitveil.data.catalogue import load
from splitveil.data.dataset import Dataset
from splitveil.defences.catalogue import find_defence
from splitveil.errors import AuditError, ConfigError, RunError, unknown
from splitveil.experiments.runner import (
    FILE,
    LiveTable,
    Trial,
    brief_epochs,
    check_ray,
    ranking_attacks,
    read_trial,
    run_many,
)
from splitveil.io import Json, as_run_error, folder_lock, write_text
from splitveil.nets.clients import require
from splitveil.record.statistics import front, hypervolume, most_private
from splitveil.rng import derive_seed
from splitveil.runs import load_checked_teacher, load_teacher, splits_of, teacher_folder

log = logging.getLogger("splitveil")
Settings = dict[str, Any]
Sampler = Literal["grid", "random", "optuna"]
DEFENCES = ("none", "noise", "veil")
NAIVE = ("none", "noise")
OWN = ("defence", "seed", "name", "runs_dir")  # of every trial's; the sweep's are options
MOST = 10_000  # trials of a defence: what is counted first, so that nothing endless is begun

FIXED = (  # one for the whole sweep, or its trials could not be compared or found again
    "dataset", "defence", "name", "data_dir", "runs_dir", "device", "compile", "final",
    "split_seed", "teacher",
)  # fmt: skip

STARTUP = 10  # Optuna's trials at random before it models anything, or a third of the budget
PLAN_FILE, RESULT_FILE, TRIALS = "sweep.json", "result.json", "trials"
OLD_JOURNAL = "journal.jsonl"  # of version 0.1.0
LOSS = 0.01  # accuracy that privacy may cost: one point
_ROUNDING = 1e-9
_SHAPE = "key=a,b,c or key=lin:low:high or key=log:low:high, with :count behind it for a grid"


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """A field, and the values it may take or, without any, the interval it is drawn from.

    `points` is how many values a grid takes of an interval; `whole`: they are whole numbers.
    """

    key: str
    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    points: int | None = None
    whole: bool = False

    def at(self, share: float) -> float | int:
        """The value a share of the way through the interval; through its logarithms for `log`.

        >>> Dimension(key="lambd", low=0.01, high=1.0, log=True).at(0.5)
        0.1
        """
        low, high = self.low, self.high
        if self.log:
            raw = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
        else:
            raw = low + share * (high - low)
        raw = min(max(raw, low), high)
        return round(raw) if self.whole else float(f"{raw:.12g}")

    def listed(self) -> list[Any]:
        """The values a grid takes."""
        if self.values:
            return list(self.values)
        if self.points is None:
            scale = "log" if self.log else "lin"
            raise ConfigError(
                f"a grid needs listed values, and {self.key} is a range; say how many points of "
                f"it, as in {self.key}={scale}:{self.low:g}:{self.high:g}:5, or use --sampler "
                "random or optuna"
            )
        return list(dict.fromkeys(self.at(i / (self.points - 1)) for i in range(self.points)))


Space = tuple[Dimension, ...]


@dataclass(frozen=True, kw_only=True)
class SearchPlan:
    """Everything that decides which trials a sweep has and how each is measured.

    `options` are the run's common settings, `vary` the texts of what differs; `trials` is the
    budget of every defence. `attacks` empty: all of the profile that see every image once.
    `teacher` is the hash of the model that all trials learn from, if there is one.
    """

    defences: tuple[str, ...]
    vary: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    trials: int
    sampler: Sampler
    profile: str = "quick"
    attacks: tuple[str, ...] = ()
    seed: int = 0
    teacher: str | None = None


# What is varied.


def spaces(texts: Sequence[str], defences: Sequence[str]) -> dict[str, Space]:
    """What is varied for each defence: the fields it has, with values of their types.

    A field that none of the defences has is refused, and so is one given twice.
    """
    given: dict[str, str] = {}
    for text in texts:
        key, _, raw = (part.strip() for part in text.partition("="))
        key = "noise_std" if key == "reg_strength" else key
        require(
            (bool(key and raw), f"--vary needs {_SHAPE}; got '{text}'"),
            (key not in FIXED, f"{key} is one for the whole sweep and cannot be varied"),
            (key not in given, f"--vary {key} is given twice; give it once"),
        )
        given[key] = raw
    _check_known(given, defences)
    return {
        name: tuple(parse_dimension(k, raw, name) for k, raw in given.items() if applies(k, name))
        for name in defences
    }


def applies(key: str, defence: str) -> bool:
    """Whether a defence has this field: noise is none of a defence that adds none."""
    found = find_defence(defence)
    return (key in RUN_KEYS or key in found.setting_types()) and (key != "noise_std" or found.noisy)


def _check_known(keys: Iterable[str], defences: Sequence[str]) -> None:
    """Refuse fields that no defence of the sweep has."""
    for key in keys:
        if not any(applies(key, name) for name in defences):
            known = {k for n in defences for k in (*find_defence(n).setting_types(), *RUN_KEYS)}
            names = ", ".join(defences)
            if key in known:
                raise ConfigError(f"{key} means nothing to {names}; leave it out")
            raise ConfigError(unknown(f"field of {names}", key, known - {*FIXED}))


def parse_dimension(key: str, raw: str, defence: str) -> Dimension:
    """What is varied of a field that the defence has, as `--vary key=raw` says it.

    >>> parse_dimension("lambd", "0.1,1", "veil").values
    (0.1, 1.0)
    >>> parse_dimension("noise_std", "log:0.01:0.2", "veil").at(1.0)
    0.2
    """
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


def _span(key: str, raw: str, kind: Any) -> Dimension:  # noqa: ANN401 - a field's type
    scale, _, rest = raw.partition(":")
    said = f"--vary {key}={raw}"
    try:
        low, high, *more = (float(word) for word in rest.split(":"))
        points = int(more[0]) if more else None
        if len(more) > 1 or (more and points != more[0]):
            raise ValueError
    except (ValueError, OverflowError):
        raise ConfigError(f"{said} is no range; give {_SHAPE}") from None
    numbers = {int, float} & {kind, *get_args(kind)}
    whole = int in numbers
    require(
        (bool(numbers), f"{key} is no number and has no range; list its values: {key}=a,b"),
        (math.isfinite(high - low), f"{said}: both ends of a range and its width must be finite"),
        (low < high, f"{said} is empty: its low end must be below its high end"),
        (
            scale == "lin" or low > 0,
            f"{said}: a log range must start above 0; use lin, or raise it",
        ),
        (
            not whole or (low.is_integer() and high.is_integer()),
            f"{key} must be a whole number, got the range {low:g} to {high:g}",
        ),
        (
            points is None or 2 <= points <= MOST,  # noqa: PLR2004 - the two ends
            f"{said}: a grid takes from 2 to {MOST} points of a range, got {points}; give another "
            "count, or leave it out and use --sampler random or optuna",
        ),
    )
    return Dimension(key=key, low=low, high=high, log=scale == "log", points=points, whole=whole)


def grid_size(space: Space) -> int:
    """How many points a grid has, counted before it is built; refused where it has too many."""
    counts = {d.key: len(d.listed()) for d in space}
    size = math.prod(counts.values())
    if size > MOST:
        words = " × ".join(f"{count} of {key}" for key, count in counts.items())
        raise ConfigError(
            f"a grid of {words} has {size} points, and a defence has at most {MOST} trials; take "
            "fewer values, or use --sampler random or optuna with --trials"
        )
    return size


def grid(space: Space) -> list[Settings]:
    """Every combination, the last field changing fastest.

    >>> grid((Dimension(key="a", values=(1, 2)), Dimension(key="b", values=("x",))))
    [{'a': 1, 'b': 'x'}, {'a': 2, 'b': 'x'}]
    """
    grid_size(space)
    keys = [d.key for d in space]
    return [dict(zip(keys, row, strict=True)) for row in product(*(d.listed() for d in space))]


def draw(space: Space, random: Random) -> Settings:
    """One point of the space, each field drawn by itself."""
    return {d.key: random.choice(d.values) if d.values else d.at(random.random()) for d in space}


def corners(space: Space) -> list[Settings]:
    """Settings that together hold every listed value and both ends of every range."""
    ends = [d.values or (d.at(0.0), d.at(1.0)) for d in space]
    rows = max(map(len, ends), default=1)
    return [{d.key: e[i % len(e)] for d, e in zip(space, ends, strict=True)} for i in range(rows)]


def plan_of(
    given: Mapping[str, Any],
    options: Mapping[str, Any],
    pairs: Sequence[str] = (),
    saved: Path | None = None,
) -> SearchPlan:
    """A plan from what a user gave, None standing for nothing, over that of a saved sweep.

    Where everything is listed a grid is taken, with the trials of the largest one; otherwise
    Optuna, which needs a number of trials.

    Args:
        given: Fields of the plan.
        options: Settings of all runs.
        pairs: More of them, as `key=value`.
        saved: Folder of the sweep to go on with.

    Returns:
        The plan, with what was left open filled in.
    """
    common = one_noise_name(parse_pairs(pairs))
    for key in OWN:
        if key in common:
            option = f"--{key.replace('_', '-')}"
            raise ConfigError(f"--set {key} would change nothing in a sweep; use {option}")
    common |= {k: v for k, v in options.items() if v is not None}
    plan: Json = {"defences": DEFENCES, "vary": ()}
    if saved is None:
        common = {"dataset": "digits"} | common
        common.setdefault("epochs", brief_epochs(str(common["dataset"])))
    else:
        plan = asdict(read_plan(saved))
        common = plan["options"] | common
    plan |= {k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if v is not None}
    plan |= {"options": common, "teacher": None}
    if common.get("teacher") not in (None, "none"):
        place = teacher_folder(str(common["teacher"])).resolve()
        common["teacher"], plan["teacher"] = str(place), load_teacher(place).noted["model"]
    return SearchPlan(**_filled_in(plan))


def _filled_in(plan: Json) -> Json:
    """The fields of a plan with a sampler and a number of trials."""
    defences, vary = plan["defences"], plan["vary"]
    for name in defences:
        if defences.count(name) > 1:
            raise ConfigError(f"--defence {name} is given twice; every defence has one budget")
    found = spaces(vary, defences)
    finite = all(d.values or d.points is not None for space in found.values() for d in space)
    plan.setdefault("sampler", "grid" if finite else "optuna")
    converted({"sampler": plan["sampler"]}, {"sampler": Sampler}, "field of a plan")
    if plan["sampler"] == "grid":
        plan.setdefault("trials", max(map(grid_size, found.values())))
    trials = plan.get("trials")
    if trials is None:
        raise ConfigError(
            f"--sampler {plan['sampler']} needs --trials, the number for each defence"
        )
    if not 1 <= trials <= MOST:
        raise ConfigError(f"trials must be from 1 to {MOST} for each defence, got {trials}")
    return plan


def read_plan(folder: Path) -> SearchPlan:
    """The plan of a sweep's folder."""
    file = folder / PLAN_FILE
    if not file.is_file():
        raise RunError(f"nothing to resume: {folder} holds no sweep; leave out --resume")
    try:
        saved: Json = dict(json.loads(file.read_text(encoding="utf-8")))
        saved |= {k: tuple(saved[k]) for k in ("defences", "vary", "attacks")}
        numbers = {"trials": int, "seed": int}
        converted({k: saved[k] for k in numbers}, numbers, "field of a plan")
        return SearchPlan(**saved)
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as err:
        raise RunError(
            f"{file} is not the plan of a sweep: {err}; mend it, or start a new sweep with "
            "another --name"
        ) from err


def check(plan: SearchPlan) -> Dataset:
    """Refuse what could not work before anything starts; returns the data of the sweep."""
    found = spaces(plan.vary, plan.defences)
    _check_known(plan.options.keys() - {"dataset"}, plan.defences)
    if clash := {d.key for space in found.values() for d in space} & plan.options.keys():
        raise ConfigError(f"{', '.join(sorted(clash))} cannot be both varied and set; do one")
    ranking_attacks(plan.profile, plan.attacks)
    if plan.sampler == "optuna":
        _need_optuna()
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
                f"'{config.dataset}' has no validation images to choose by, and the test "
                f"images must not be (final={str(config.final).lower()}, "
                f"held_out={config.held_out}); leave these as they are, or add images"
            )
    return data


def check_folder(folder: Path, plan: SearchPlan, *, resume: bool) -> None:
    """Refuse a folder that is taken, or a sweep to go on with that has another plan."""
    if not resume:
        if folder.exists():
            raise RunError(
                f"{folder} exists already; go on with --resume, choose another --name, "
                "or remove it yourself"
            )
        return
    old, new = asdict(read_plan(folder)), asdict(plan)
    changed = [k for k in new if new[k] != old[k]]
    if "trials" in changed and new["trials"] > old["trials"]:
        changed.remove("trials")  # more of the same
    if changed:
        told = "; ".join(f"{k} was {old[k]!r}, is {new[k]!r}" for k in changed)
        raise ConfigError(
            f"cannot resume {folder} with another plan: {told}; leave the options out (only "
            "--trials may grow), or start a new sweep with another --name"
        )


def config_of(
    plan: SearchPlan, defence: str, settings: Mapping[str, Any], folder: Path
) -> RunConfig:
    """The run of a trial; common settings that its defence lacks are left out."""
    common = {k: v for k, v in plan.options.items() if applies(k, defence)}
    own = {"defence": defence, "runs_dir": str(folder / TRIALS)}
    return make_config(common | {"seed": plan.seed} | dict(settings) | own)


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
        resume: Go on with the sweep in that folder; trials that failed are tried again.
        jobs: Trials at a time, see `runner.run_many`.
        address: A Ray cluster, see `runner.run_many`.
        progress: The table that shows what happens.

    Returns:
        What `result.json` holds; refused where no trial came to its end.
    """
    table = progress or LiveTable()
    check_folder(folder, plan, resume=resume)  # before any data is fetched
    check_ray(jobs, address)
    classes = check(plan).num_classes
    if not set(NAIVE) & set(plan.defences):
        log.warning("no naive baseline takes part; add --defence none or --defence noise")
    with folder_lock(
        folder, f"another process is working on the sweep in {folder}; wait, or end it"
    ):
        check_folder(folder, plan, resume=resume)  # others may have been quicker
        with as_run_error(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / PLAN_FILE, json.dumps(asdict(plan), indent=2) + "\n")
        done = ended_trials(plan, folder)
        table.expect(dict.fromkeys(plan.defences, plan.trials))
        for trial in done.values():
            if trial.error is None:
                table.finish(trial)
        if failed := [label for label, trial in done.items() if trial.error is not None]:
            log.warning("tried again, because they failed: %s", ", ".join(failed))
        for trial in run_many(
            _proposed(plan, folder, done), profile=plan.profile, aux="val", only=plan.attacks,
            jobs=jobs, address=address, progress=table,
        ):  # fmt: skip
            done[trial.label] = trial
        summary = summarise(plan, done.values(), folder, classes)
        write_text(folder / RESULT_FILE, json.dumps(summary, indent=2, allow_nan=False) + "\n")
    return summary


def ended_trials(plan: SearchPlan, folder: Path) -> dict[str, Trial]:
    """The trials that lie in a sweep's folder, by label; of version 0.1.0 too."""
    saved = _old_journal(folder / OLD_JOURNAL)
    for file in sorted((folder / TRIALS).glob(f"*/{FILE}")):
        saved.append(read_trial(file) | {"run": file.parent.name})
    found = {}
    for told in saved:
        if "label" in told:  # else the file is broken
            own = {key: told[key] for key in ("label", "settings", "found", "error", "seconds")}
            name = told["run"] if told["error"] is None else None
            config = config_of(plan, own["label"].rpartition("/")[0], own["settings"], folder)
            config = replace(config, seed=told["seed"], name=name)
            found[own["label"]] = Trial(config=config, **own)
    return {label: found[label] for label in sorted(found, key=_number)}


def _old_journal(file: Path) -> list[Json]:
    """Trials as version 0.1.0 kept them, a line each; a killed process left the last one torn."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    found = []
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        try:
            entry = json.loads(line)
            found.append(entry | {"label": f"{entry['defence']}/{entry['number']}"})
        except (ValueError, TypeError, KeyError) as err:
            raise RunError(
                f"{file}, line {number} is not a finished trial: {err}; remove that line, and its "
                "trial will be run again"
            ) from err
    return found


def _proposed(plan: SearchPlan, folder: Path, done: Mapping[str, Trial]) -> Iterator[Trial]:
    """What is left to run: failed trials first, then new ones, the defences in turns.

    Each is proposed when it is asked for, from what is in `done` by then.
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
        while config in taken:  # few settings: the budget goes into seeds, and no trial is a twin
            config = replace(config, seed=config.seed + 1)
        taken.append(config)
        begun[label] = Trial(label=label, config=config, settings=settings)
        yield begun[label]


def _drawn(plan: SearchPlan, label: str, space: Space) -> Settings:
    """What a sampler that does not learn proposes for the trial of this label."""
    if plan.sampler == "random":
        return draw(space, Random(derive_seed(plan.seed, f"sweep/{label}")))  # noqa: S311 - no secret
    points = grid(space)
    if plan.trials < len(points):
        seed = derive_seed(plan.seed, f"sweep/{label.rpartition('/')[0]}")
        Random(seed).shuffle(points)  # noqa: S311 - no secret
    return points[_number(label) % len(points)]


def _need_optuna() -> Any:  # noqa: ANN401 - the module
    try:
        import optuna
    except ImportError as err:
        raise ConfigError(
            "--sampler optuna needs Optuna, which is not installed; "
            "pip install 'splitveil[sweep]', or use --sampler random"
        ) from err
    return optuna


def _ask_optuna(plan: SearchPlan, label: str, space: Space, known: Sequence[Trial]) -> Settings:
    """Optuna's next point (multi-objective TPE): accuracy up, leakage down.

    `known` are the trials that were proposed before; some of them may run.
    """
    optuna = _need_optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(
        seed=derive_seed(plan.seed, f"sweep/{label}") % 2**32,
        n_startup_trials=min(STARTUP, max(1, plan.trials // 3)),
        constant_liar=not all(t.found or t.error for t in known),  # what runs is not asked again
    )
    study = optuna.create_study(directions=["maximize", "minimize"], sampler=sampler)
    kinds = {d.key: _distribution(optuna.distributions, d) for d in space}
    states = optuna.trial.TrialState
    for trial in known:
        told: Json = {"state": states.FAIL if trial.error else states.RUNNING}
        if trial.found is not None:
            told = {"state": states.COMPLETE, "values": trial.point}
        params = {key: trial.settings[key] for key in kinds}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=kinds, **told))
    return dict(study.ask(kinds).params)


def _number(label: str) -> int:
    return int(label.rpartition("/")[2])


def _distribution(kinds: Any, dimension: Dimension) -> Any:  # noqa: ANN401 - Optuna's, if it is there
    if dimension.values:
        return kinds.CategoricalDistribution(dimension.values)
    low, high = dimension.low, dimension.high
    if dimension.whole:
        return kinds.IntDistribution(int(low), int(high), log=dimension.log)
    return kinds.FloatDistribution(low, high, log=dimension.log)


# What was found.


def _row(trial: Trial) -> Json:
    """A trial that has ended as JSON."""
    told = {
        "trial": trial.label, "defence": trial.group, "settings": dict(trial.settings),
        "seed": trial.config.seed, "seconds": trial.seconds,
    }  # fmt: skip
    if trial.found is None:
        return told | {"error": trial.error}
    found = {k: v for k, v in trial.found.items() if k != "classes"}  # which 0.1.0 noted
    return told | found | {"run": str(trial.config.folder)}


def summarise(plan: SearchPlan, trials: Iterable[Trial], folder: Path, classes: int) -> Json:
    """Front, hypervolumes and the best of each defence; refused where no trial came to its end."""
    order = plan.defences.index
    every = sorted(trials, key=lambda t: (_number(t.label), order(t.group)))
    good = [t for t in every if t.found is not None]
    if not good:
        told = "; ".join(f"{t.label}: {t.error}" for t in every[:3])
        raise RunError(f"no trial came to an end: {told}; mend that, and try again with --resume")
    base = max([t for t in good if t.group == "none"] or good, key=lambda t: t.point[0])
    best = {}
    for name in plan.defences:
        own = [t for t in good if t.group == name]
        chosen = most_private([t.point for t in own], base.point[0] - LOSS - _ROUNDING)
        count = sum(t.group == name for t in every)
        best[name] = {
            "trials": count, "failed": count - len(own),
            "accuracy": max((t.point[0] for t in own), default=None),
            "hypervolume": _volume(own, classes),
            "best": None if chosen is None else _row(own[chosen]),
        }  # fmt: skip
    marks = front([t.point for t in good])
    members = [t for t, mark in zip(good, marks, strict=True) if mark]
    return {
        "sweep": str(folder),
        "plan": asdict(plan) | {"attacks": list(ranking_attacks(plan.profile, plan.attacks))},
        "measured_on": "validation images",
        "reference_point": {"accuracy": 1.0 / classes, "leakage": 1.0},
        "hypervolume": _volume(good, classes),
        "reference_accuracy": {
            "accuracy": base.point[0], "defence": base.group, "trial": base.label
        },
        "allowed_loss": LOSS,
        "defences": best,
        "front": [_row(t) for t in sorted(members, key=lambda t: -t.point[0])],
        "trials": [_row(t) for t in every],
    }  # fmt: skip


def _volume(trials: Sequence[Trial], classes: int) -> Json | None:
    if not trials:
        return None
    accuracy, leakage = np.array([t.point for t in trials]).T
    return {"value": hypervolume(accuracy, leakage, 1.0 / classes)}
