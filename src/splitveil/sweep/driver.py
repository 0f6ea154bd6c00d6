"""A sweep from its plan to its journal: check, open, run what is not finished yet."""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from splitveil.config import make_config
from splitveil.config.resolve import resolve
from splitveil.config.settings import checked
from splitveil.data import Dataset, load, make_splits
from splitveil.errors import AuditError, ConfigError, RunError
from splitveil.runs import ready_teacher
from splitveil.sweep.engines import Engine
from splitveil.sweep.journal import Entry, Journal
from splitveil.sweep.proposals import (
    Past,
    alike,
    default_trials,
    fixed,
    learned,
    need_optuna,
    task,
)
from splitveil.sweep.space import MOST, Choices, Space, corners, refuse_strays, spaces
from splitveil.sweep.trial import Plan, Task, chosen_attacks, job_of, options_of
from splitveil.train.files import explain_os_error, write_text
from splitveil.types import Json

FILE = "sweep.json"
NUMBERS = {"trials": int, "seed": int}
FREE = ("trials",)  # what may differ when a sweep is resumed
SAMPLERS = ("grid", "random", "optuna")
MAX_MESSAGE = 500


@runtime_checkable
class Watch(Protocol):
    """Told what happens in a sweep."""

    def started(self, task: Task) -> None:
        """A trial was handed to a worker."""
        ...

    def finished(self, entry: Entry) -> None:
        """A trial is in the journal."""
        ...


class Silent:
    """The watch of somebody who wants none."""

    def started(self, task: Task) -> None:
        """Say nothing."""

    def finished(self, entry: Entry) -> None:
        """Say nothing."""


def make_plan(
    defences: tuple[str, ...],
    vary: tuple[str, ...],
    *,
    trials: int | None,
    sampler: str | None,
    **rest: Any,  # noqa: ANN401 - the other fields of a Plan
) -> Plan:
    """A plan with what was left open filled in.

    Where everything is listed a grid is taken, with the trials of the largest one; otherwise
    Optuna, which needs a number of trials.
    """
    for name in defences:
        if defences.count(name) > 1:
            raise ConfigError(f"--defence {name} is given twice; every defence has one budget")
    found = spaces(vary, defences)
    finite = all(isinstance(d, Choices) or d.points is not None for s in found.values() for d in s)
    chosen = sampler or ("grid" if finite else "optuna")
    if chosen not in SAMPLERS:
        raise ConfigError(f"sampler must be one of {', '.join(SAMPLERS)}, got '{chosen}'")
    if trials is None and chosen != "grid":
        raise ConfigError(f"--sampler {chosen} needs --trials, the number for each defence")
    number = default_trials(found) if trials is None else trials
    if not 1 <= number <= MOST:
        raise ConfigError(f"trials must be from 1 to {MOST} for each defence, got {number}")
    return Plan(defences=defences, vary=vary, trials=number, sampler=chosen, **rest)  # type: ignore[arg-type]


def check(plan: Plan) -> dict[str, Space]:
    """Refuse what could not work before anything starts; returns what each defence varies."""
    found = spaces(plan.vary, plan.defences)
    refuse_strays((k for k in plan.options if k != "dataset"), plan.defences)
    clash = {d.key for s in found.values() for d in s} & plan.options.keys()
    if clash:
        raise ConfigError(f"{', '.join(sorted(clash))} cannot be both varied and set; do one")
    chosen_attacks(plan)
    if plan.sampler == "optuna":
        need_optuna()
    if plan.sampler == "grid":
        default_trials(found)
    data: Dataset | None = None
    for defence, space in found.items():
        for settings in corners(space):
            one = task(plan, defence, 0, settings, ())
            config = make_config(options_of(plan, one, Path("unused")))
            data = load(config.dataset, config.data_dir) if data is None else data
            resolve(config, data).build()
            ready_teacher(config, data)
            if config.final or not len(make_splits(data, held_out=config.held_out).val):
                raise AuditError(
                    f"'{config.dataset}' has no validation images to choose by, and the test "
                    f"images must not be (final={str(config.final).lower()}, "
                    f"held_out={config.held_out}); leave these as they are, or add images"
                )
    return found


def check_folder(folder: Path, plan: Plan, *, resume: bool) -> None:
    """Refuse a folder that is taken, or a sweep to go on with that has another plan."""
    file = folder / FILE
    if resume:
        if not file.is_file():
            raise RunError(f"nothing to resume: {folder} holds no sweep; leave out --resume")
        old, new = _read(file), json.loads(json.dumps(asdict(plan)))
        changed = [
            f"{k} was {old.get(k)!r}, is {new[k]!r}"
            for k in new
            if k not in FREE and old.get(k) != new[k]
        ]
        if changed:
            raise ConfigError(
                f"cannot resume {folder} with another plan: {'; '.join(changed)}; leave the "
                "options out, or start a new sweep with another --name"
            )
        if new["trials"] < old["trials"]:
            raise ConfigError(
                f"the sweep has {old['trials']} trials for each defence; add, or keep"
            )
    elif folder.exists():
        raise RunError(
            f"{folder} exists already; go on with --resume, choose another --name, "
            "or remove it yourself"
        )


def open_sweep(folder: Path, plan: Plan, *, resume: bool) -> Journal:
    """The journal of a new sweep, or of the one to go on with, which must have the same plan."""
    check_folder(folder, plan, resume=resume)
    with explain_os_error(folder):
        folder.mkdir(parents=True, exist_ok=resume)
    journal = Journal(folder)  # before the plan: another process may be working by it
    try:
        write_text(folder / FILE, json.dumps(asdict(plan), indent=2) + "\n")
    except RunError:
        with journal:
            raise
    return journal


def read_plan(folder: Path) -> Plan:
    """The plan of a sweep's folder."""
    file = folder / FILE
    if not file.is_file():
        raise RunError(f"nothing to resume: {folder} holds no sweep; leave out --resume")
    saved = _read(file)
    try:
        lists = {k: tuple(saved[k]) for k in ("defences", "vary", "attacks")}
        numbers = checked({k: saved[k] for k in NUMBERS}, NUMBERS, "field of a plan")
        return Plan(**saved | lists | numbers)
    except (KeyError, TypeError, ConfigError) as err:
        raise RunError(f"{file} is not the plan of a sweep: {err}") from err


def _read(file: Path) -> Json:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as err:
        raise RunError(
            f"{file} cannot be read: {err}; mend it, or start a new sweep with another --name"
        ) from err


def run_sweep(
    plan: Plan,
    folder: Path,
    journal: Journal,
    engine: Engine,
    watch: Watch | None = None,
) -> list[Entry]:
    """Run every trial that the journal lacks, defences in turns; returns all entries.

    Those that the journal says have failed are tried again first, each once.
    """
    watch = watch or Silent()
    found = spaces(plan.vary, plan.defences)
    order = [(number, defence) for number in range(plan.trials) for defence in plan.defences]
    tasks = {} if plan.sampler == "optuna" else _fixed(plan, found)
    again = {entry.task.key: entry.task for entry in journal.failed}
    done = {entry.task.key for entry in journal.entries}
    waiting = [(one.number, one.defence) for one in again.values()]
    waiting += [(n, d) for n, d in order if f"{d}/{n}" not in done]
    tasks |= again
    running: dict[str, Task] = {}
    while waiting or running:
        while waiting and len(running) < engine.slots:
            number, defence = waiting.pop(0)
            key = f"{defence}/{number}"
            one = tasks.get(key) or _next(plan, defence, number, found[defence], journal, running)
            running[key] = one
            engine.submit(key, job_of(plan, one, folder))
            watch.started(one)
        key, answer = engine.wait()
        entry = _entry(running.pop(key), answer)
        journal.append(entry)
        watch.finished(entry)
    return journal.entries


def _fixed(plan: Plan, found: Mapping[str, Space]) -> dict[str, Task]:
    """Every trial of a plan whose proposals do not depend on what was found."""
    tasks: dict[str, Task] = {}
    for defence, space in found.items():
        used = defaultdict[str, set[int]](set)
        for number, settings in enumerate(fixed(plan, defence, space)):
            mine = used[alike(settings)]
            one = task(plan, defence, number, settings, mine)
            mine.add(one.seed)
            tasks[one.key] = one
    return tasks


def _next(  # noqa: PLR0917 - the plan, the place in it, and what is known
    plan: Plan,
    defence: str,
    number: int,
    space: Space,
    journal: Journal,
    running: Mapping[str, Task],
) -> Task:
    """The next trial of a sampler that learns."""
    mine = sorted((e for e in journal.entries if e.defence == defence), key=lambda e: e.number)
    past = [
        Past(
            settings=e.settings,
            values=None if e.found is None else (e.found["accuracy"], max(e.found["leakage"], 0.0)),
        )
        for e in mine
    ]
    settings = learned(plan, defence, number, space, past)
    taken = [e.task for e in mine] + [t for t in running.values() if t.defence == defence]
    used = {t.seed for t in taken if alike(t.settings) == alike(settings)}
    return task(plan, defence, number, settings, used)


def _entry(one: Task, answer: Json) -> Entry:
    error = answer.get("error")
    return Entry(
        defence=one.defence,
        number=one.number,
        settings=dict(one.settings),
        seed=one.seed,
        seconds=answer.get("seconds", 0.0),
        run=answer.get("run"),
        found=answer.get("found"),
        images=answer.get("images", {}),
        error=None if error is None else error[:MAX_MESSAGE],
    )
