"""Many runs, one after the other or on Ray: trained or continued, attacked or read.

A trial that helps to choose something (`aux="val"`) is measured on validation images, because a
choice must not see the test images. Its result is `trial.json` in its run's folder, the only
journal there is. A run that is audited in full needs none: its `record.json` says what is finished.
"""

import gc
import hashlib
import json
import math
import os
import re
import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as Bars
from rich.table import Column

from splitveil import __version__
from splitveil.attacks.profiles import at_precision, find_profile
from splitveil.audits.exposure import what_is_exposed
from splitveil.audits.flags import UNFINISHED
from splitveil.audits.pipeline import ACCURACY_DRAWS
from splitveil.audits.suite import Store, accuracy, label_only_mse, run_attacks, strongest
from splitveil.audits.target import Target
from splitveil.audits.trained_run import open_run
from splitveil.config.machine import PRECISION, machine_precision
from splitveil.config.resolve import find_device, resolve
from splitveil.config.run_config import PLACES, ROUNDING, RunConfig, defaults_for
from splitveil.data.catalogue import load
from splitveil.data.dataset import fingerprint
from splitveil.errors import AuditError, CheckpointError, ConfigError, RunError, unknown
from splitveil.io import (
    Json,
    Progress,
    ProgressPart,
    parse_json,
    printable,
    read_text,
    silent,
    write_text,
)
from splitveil.nets.clients import CLIENT_PREFIX
from splitveil.record.schema import Record, number, read_value, wrong
from splitveil.runs import Run, fit, flush_denormals, load_checked_teacher
from splitveil.table import TimeSpent, duration
from splitveil.threat import Attack

FILE = "trial.json"
JOURNAL: Mapping[str, Any] = {  # what a finished trial is kept as, besides `found`
    "label": str, "settings": Mapping[str, Any], "seed": int, "seconds": float, "error": str | None,
    "run": str | None,
}  # fmt: skip
MAX_MESSAGE = 500
RAY_BEYOND_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # Ray's name for it, on every system
REACH_S = 5.0  # to wait for a cluster; Ray itself tries for minutes
Measure = Callable[[Run, Mapping[str, Attack], Progress], Json]  # of a trial, on validation images
BRIEF_SHARE = 4  # a trial takes this part of the epochs of a full training


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A run to make and, once it has ended, what came of it.

    Args:
        label: Unique among the trials; `group/number` where there are several of a group.
        config: The run. One without a name gets a folder named after its settings and data.
        settings: The settings that differ between the trials.
        found: What was measured; None before the end, and if the trial failed.
        error: Why it failed.
        seconds: How long a trial on validation images took; 0 where it is not known.
    """

    label: str
    config: RunConfig
    settings: Mapping[str, Any] = field(default_factory=dict)
    found: Json | None = None
    error: str | None = None
    seconds: float = 0.0

    @property
    def group(self) -> str:
        """The label without its number.

        >>> Trial(label="veil/2", config=RunConfig()).group
        'veil'
        """
        return self.label.rpartition("/")[0] or self.label

    @property
    def reason(self) -> str:
        """Why it failed, without the type of the error; empty if it did not.

        >>> Trial(label="a", config=RunConfig(), error="RunError: no space left").reason
        'no space left'
        """
        return (self.error or "").partition(": ")[2]

    @property
    def point(self) -> tuple[float, float]:
        """Accuracy and exposure, which is the leakage where every image is sent.

        Below 0 it counts as 0, for there is nothing left to win.
        """
        if self.found is None:
            raise RunError(f"trial {self.label} failed and has no numbers: {self.error}")
        leaks = self.found["exposure" if "exposure" in self.found else "leakage"]
        return float(self.found["accuracy"]), max(float(leaks), 0.0)


class LiveTable(Bars):
    """What is done, one line per group of trials, and what runs, one line per trial.

    Without a terminal it prints a line when a trial ends, and the table at the end; without a
    console nothing.
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(
            TextColumn("{task.description}", markup=False), BarColumn(bar_width=8),
            MofNCompleteColumn(), TimeSpent(),
            TextColumn("{task.fields[note]}", markup=False, table_column=Column(overflow="fold")),
            console=console, disable=console is None,
        )  # fmt: skip
        self._prints = console is not None and not console.is_terminal
        self._began, self._expected = perf_counter(), 0
        self._groups: dict[str, TaskID] = {}
        self._running: dict[str, TaskID] = {}
        self._ended: defaultdict[str, list[Trial]] = defaultdict(list)  # by group

    def expect(self, counts: Mapping[str, int]) -> None:
        """Announce how many trials of each group there will be."""
        self._expected += sum(counts.values())
        for name, count in counts.items():
            self._groups[name] = self.add_task(printable(name), total=count, note="")

    def begin(self, trial: Trial) -> Progress:
        """Show a trial as running; returns its progress display."""
        words = f"  {trial.label}  {trial_words(trial.settings, trial.config.seed)}"
        self._running[trial.label] = task = self.add_task(printable(words), total=None, note="")
        return lambda done, total, note="": self.update(
            task, completed=done, total=total, note=printable(note)
        )

    def finish(self, trial: Trial) -> None:
        """Count a trial that has ended."""
        if trial.label in self._running:
            self.remove_task(self._running.pop(trial.label))
        own = self._ended[trial.group]
        own.append(trial)
        points = [t.point for t in own if t.found is not None]
        note = f"{len(own) - len(points)} failed"
        if points:
            accuracy, leakage = zip(*points, strict=True)
            note += f", best acc {100 * max(accuracy):.2f} %, least leakage {min(leakage):.3f}"
        if trial.group in self._groups:
            self.update(self._groups[trial.group], completed=len(own), note=note)
        if self._prints:
            self._print_end(trial)

    def _print_end(self, trial: Trial) -> None:
        """What came of a trial, how many have ended, and after how long."""
        said = "failed"
        if trial.found is not None:
            accuracy, leakage = trial.point
            said = f"acc {100 * accuracy:.2f} %, leakage {leakage:.3f}"
        ended = sum(map(len, self._ended.values()))
        spent = duration(perf_counter() - self._began)
        line = f"{ended} of {self._expected} after {spent}  {trial.label}: {said}"
        self.console.print(printable(line), soft_wrap=True, markup=False, highlight=False)


def trial_words(settings: Mapping[str, Any], seed: int) -> str:
    """Settings as a user would type them.

    >>> trial_words({"lambd": 0.30000001, "form": "hinge"}, 2)
    'lambd=0.3 form=hinge seed=2'
    """
    words = [f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in settings.items()]
    return " ".join(words if "seed" in settings else [*words, f"seed={seed}"])


@dataclass(frozen=True, kw_only=True)
class Work:
    """How a trial is trained and attacked; called with one, it returns what came of it.

    Args:
        profile: Budget of the attacks: smoke, demo, quick, laptop, standard or paper.
        aux: What the attacker knows: train, held-out, test90 or val. With "val" only what ranks
            trials is measured, on validation images; otherwise the run is audited in full.
        only: Some attacks of the profile, by name; empty: all.
        resume: Read what is finished and continue what was begun, instead of starting anew.
        keep_going: Note the error of a failing trial, instead of raising it.
        precision: What the attacks compute in: float32, bf16 or auto.
        store: Where finished attacks are kept for all trials; None: in each run's own folder.
        measure: What is measured on validation images; None: `validate_on_val`. A journal is read
            only if it is of an equal one.
    """

    profile: str
    aux: str = "train"
    only: Sequence[str] = ()
    resume: bool = True
    keep_going: bool = True
    precision: str = "auto"
    store: Store | None = None
    measure: "Measure | None" = None

    def __call__(self, trial: Trial, progress: Progress = silent) -> Trial:
        """Train and attack a trial, or read what is finished."""
        flush_denormals()
        _free_memory()
        try:
            if trial.config.name is None:
                trial = replace(trial, config=with_own_folder(trial.config))
            if self.aux == "val":
                return self._validated(trial, progress)
            record = self._audited(trial.config, progress)
        except Exception as err:  # a trial may fail in any way; the others continue
            if not self.keep_going:
                raise
            trial = replace(trial, error=f"{type(err).__name__}: {err}"[:MAX_MESSAGE])
            if self.aux == "val" and (trial.config.folder / "config.toml").is_file():
                _write(trial, key="")  # a resumed sweep finds it and tries again
            return trial
        found = {"accuracy": record.accuracy, "leakage": record.leakage}
        if record.sent not in (None, 1):  # an exit rule, or a client alone
            found["exposure"] = record.exposure
        return replace(trial, found=found)

    def has_done(self, record: Record) -> bool:
        """Whether a record is of these attacks, on a training that had ended."""
        made = record.audit.profile, record.audit.aux, sorted(record.audit.only)
        wanted = self.profile, self.aux, sorted(self.only)
        return made == wanted and UNFINISHED not in record.flag_names

    def _validated(self, trial: Trial, progress: Progress) -> Trial:
        started, folder = perf_counter(), trial.config.folder
        attacks = ranking_attacks(self.profile, self.only)
        key = _digest([folder.name, repr(attacks), *([repr(self.measure)] if self.measure else [])])
        saved = read_trial(folder / FILE) if self.resume else {}
        if saved.get("key") == key:
            # Version 0.1.0 did not note the seconds.
            return replace(trial, found=saved["found"], seconds=saved.get("seconds", 0.0))
        try:
            run = self._trained(trial.config, progress)
        except CheckpointError:
            # The folder is named after the settings, so these fit: the checkpoint is broken.
            run = replace(self, resume=False)._trained(trial.config, progress)
        half = ProgressPart(progress, "attacks", 0.5, 0.5, 1.0)
        found = (self.measure or validate_on_val)(run, attacks, half)
        bad = [name for name in ("accuracy", "leakage") if not math.isfinite(found[name])]
        if bad:
            raise AuditError(f"{' and '.join(bad)} of the trial: not finite numbers; see {folder}")
        trial = replace(trial, found=found, seconds=round(perf_counter() - started, 3))
        _write(trial, key)
        return trial

    def _audited(self, config: RunConfig, progress: Progress) -> Record:
        run = self._trained(config, progress)
        if self.resume:
            with suppress(RunError):  # a record that cannot be read counts as none
                if (record := run.record) is not None and self.has_done(record):
                    return record
        half = ProgressPart(progress, "attacks", 0.5, 0.5, 1.0)
        return run.audit(
            self.profile, aux=self.aux, only=self.only, precision=self.precision, store=self.store,
            progress=half,
        )  # fmt: skip

    def _trained(self, config: RunConfig, progress: Progress) -> Run:
        """Train the run, or continue it; this is the first half of a trial's progress."""
        begun = self.resume and (config.folder / "checkpoint.safetensors").is_file()
        half = ProgressPart(progress, "training", 0.0, 0.5, 1.0)
        return fit(config, resume=begun, overwrite=not begun, progress=half)


def run_many(
    trials: Iterable[Trial],
    work: Work,
    *,
    jobs: int | None = 1,
    address: str | None = None,
    progress: LiveTable | None = None,
) -> Iterator[Trial]:
    """Train and attack every trial; each is yielded as soon as it has ended.

    A trial is taken from the iterable only when it can start. So a generator may propose trials
    from what came of the ones before.

    Args:
        trials: What to run.
        work: How.
        jobs: How many run at a time; more than one needs Ray. None: as many as Ray has cores, or
            GPUs where the trials use them.
        address: A Ray cluster to use, "local" for a new one on this machine. None: this process,
            unless there are several jobs.
        progress: The table that shows what happens.

    Returns:
        The trials with what came of them, in the order in which they end.
    """
    table = progress or LiveTable()
    if isinstance(trials, Sequence):
        table.expect(Counter(trial.group for trial in trials))
    ray = check_ray(jobs, address)
    ended: Iterator[Trial] = (work(trial, table.begin(trial)) for trial in trials)
    if ray is not None:
        ended = _on_ray(ray, iter(trials), work, jobs, address or "local", table)
    for trial in ended:
        table.finish(trial)
        yield trial


def _free_memory() -> None:
    """Drop what is left of the run before; else two models are in memory while one trains."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _write(trial: Trial, key: str) -> None:
    content = {
        "key": key, "found": trial.found, "label": trial.label, "settings": dict(trial.settings),
        "seed": trial.config.seed, "seconds": trial.seconds, "error": trial.error,
    }  # fmt: skip
    write_text(trial.config.folder / FILE, json.dumps(content, indent=2, allow_nan=False) + "\n")


def read_trial(file: Path) -> Json:
    """The content of a trial's file; empty where there is none, or it is broken."""
    with suppress(OSError, ValueError, RunError):
        return checked_trial(parse_json(read_text(file)))
    return {}


def checked_trial(saved: object) -> Json:
    """What a journal says of a trial; raises RunError naming what is missing or wrong.

    The `trial.json` of version 0.1.0 has no label, and then less is needed.
    """
    entry = dict(read_value(Mapping[str, Any], saved, "trial"))
    for key, kind in JOURNAL.items():
        if entry.get(key) is None and "label" in entry and key not in ("run", "error"):
            raise wrong(key, "there", None)
        read_value(kind, entry.get(key), key)
    found = read_value(Mapping[str, Any], entry.get("found"), "found")
    for name in ("accuracy", "leakage") if entry.get("error") is None else ():
        if number(found, name) is None:
            raise wrong(f"found.{name}", "a finite number", found.get(name))
    return entry | ({"seconds": float(entry.get("seconds") or 0)})


def ranking_attacks(profile: str, only: Sequence[str] = ()) -> dict[str, Attack]:
    """The attacks of a profile that see one draw of every image: only those can be `strongest`."""
    known = {
        name: attack
        for name, attack in find_profile(profile).items()
        if getattr(attack, "limit", None) is None and getattr(attack, "repeats", 1) == 1
    }
    for name in only:
        if name not in known:
            raise ConfigError(unknown(f"attack of profile '{profile}'", name, known))
    return {name: known[name] for name in only or known}


def validate_on_val(run: Run, attacks: Mapping[str, Attack], progress: Progress = silent) -> Json:
    """Accuracy and what the strongest attack got, on validation images; the attacker knows train.

    Returns:
        `accuracy`, `mse` of the strongest `attack`, the `ceiling`, which is the error of an
        attacker that knows the label alone, and `leakage`, which is 1 - mse / ceiling. A client
        that sends nothing leaks nothing. Where not every image is sent, `sent` and `exposure` as in
        a record; the other numbers are then of all images, as if they were sent.
    """
    target, facts = open_run(run, aux="val", seed=run.config.seed)
    if target.silent:
        return silent_on_val(target)
    attacks = at_precision(attacks, facts.precision)
    store = Store(run.path / "audit", __version__)  # a trial's folder is of one version
    attempts = run_attacks(target, attacks, progress, store=store)
    best = strongest(attempts)
    ceiling = label_only_mse(target.aux, target.scored, target.num_classes)
    found: Json = {
        "accuracy": accuracy(target, ACCURACY_DRAWS), "mse": best["mse"],
        "attack": best["mse_by"], "ceiling": ceiling, "leakage": 1.0 - best["mse"] / ceiling,
    }  # fmt: skip
    if target.exit is not None:
        exposed = what_is_exposed(target, attempts.get(best["mse_by"]))
        found |= {"exposure": exposed["exposure"], "sent": exposed["sent"]}
    return found


def silent_on_val(target: Target) -> Json:
    """What `validate_on_val` says of a client that answers alone: a label is all there is."""
    ceiling = label_only_mse(target.aux, target.scored, target.num_classes)
    return {
        "accuracy": accuracy(target, 1), "mse": ceiling, "attack": "class-mean",
        "ceiling": ceiling, "leakage": 0.0, "sent": 0.0, "exposure": 0.0,
    }  # fmt: skip


def brief_epochs(dataset: str) -> int:
    """Default epochs of a trial: a quarter of the dataset's own.

    >>> brief_epochs("digits")
    15
    """
    return max(1, int(defaults_for(RunConfig(dataset=dataset))["epochs"]) // BRIEF_SHARE)


def with_own_folder(config: RunConfig) -> RunConfig:
    """The run with a name of its own: other settings or other data have another folder."""
    dataset = _data(config.dataset, config.data_dir)
    settings = resolve(config, dataset).settings()
    same = {k: v for k, v in settings.items() if k not in (*PLACES, *ROUNDING, "name")}
    if same["precision"] == "float32":  # folders of 0.1.0 do not name it
        del same["precision"]
    if teacher := load_checked_teacher(config, dataset):
        same["teacher"] = teacher.noted["model"]
    words = f"{config.dataset}-{config.defence}-{config.net.removeprefix(CLIENT_PREFIX)}"
    stem = re.sub(r"[^A-Za-z0-9._+-]+", "-", words)
    return replace(config, name=f"{stem}-{_digest([same, fingerprint(dataset), __version__])}")


_data = lru_cache(maxsize=1)(load)  # all trials of a search use one dataset


def _digest(parts: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:8]


def _on_ray(  # noqa: PLR0917 - what `run_many` knows
    ray: Any,  # noqa: ANN401 - the module
    trials: Iterator[Trial],
    work: Work,
    jobs: int | None,
    address: str,
    table: LiveTable,
) -> Iterator[Trial]:
    """Trials as tasks of a Ray cluster, whose machines see the same package and folders."""
    first = next(trials, None)
    if first is None:  # everything is finished: no cluster is needed
        return
    chosen = machine_precision()  # one choice for all seeds, whichever machine trains them
    trials = chain([first], trials)
    home, gpus = Path.cwd(), int(find_device(first.config.device) == "cuda")

    def task(trial: Trial) -> Trial:
        with suppress(OSError):
            os.chdir(home)  # so that relative paths mean the same in a worker
        torch.set_num_threads(1)  # a trial has one core
        os.environ[PRECISION] = chosen
        return work(trial)

    start_ray(ray, jobs, address)
    running: dict[Any, Trial] = {}
    try:
        slots = jobs or max(int(ray.cluster_resources().get("GPU" if gpus else "CPU", 1)), 1)
        remote = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(task)
        while True:
            for trial in islice(trials, slots - len(running)):
                table.begin(trial)
                running[remote.remote(trial)] = trial
            if not running:
                return
            ready = ray.wait(list(running), num_returns=1)[0][0]
            trial = running.pop(ready)
            try:
                yield ray.get(ready)
            except ray.exceptions.RayError as err:  # its worker died
                reason = f"{type(err).__name__}: {str(err).splitlines()[0]}"
                yield replace(trial, error=reason)
    finally:
        ray.shutdown()  # ends a cluster that was started here, and only leaves another one


def start_ray(ray: Any, jobs: int | None, address: str) -> None:  # noqa: ANN401 - the module
    """Start Ray on this machine, or join the cluster at an address; it reports nothing home."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    new = {"num_cpus": jobs, "include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **new)
    except (ConnectionError, RuntimeError, ValueError) as err:
        raise ConfigError(
            f"cannot reach Ray at '{address}': {err}; check --address, and set RAY_AUTH_TOKEN "
            "if the cluster wants a token"
        ) from err


def check_ray(jobs: int | None, address: str | None) -> Any:  # noqa: ANN401 - the module
    """Ray where it is needed, else None; refused if it is not installed or nobody answers."""
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs must be at least 1, got {jobs}")
    if jobs == 1 and address is None:
        return None
    if address in (None, "local"):
        # On Linux Ray binds to all interfaces, on other systems to loopback; this decides it, when
        # Ray is imported. Whoever wants the former sets the variable to 1.
        os.environ.setdefault(RAY_BEYOND_LOOPBACK, "0")
    with sweep_extra("ray", "use --jobs 1 without --engine ray"):
        import ray
    # Addresses such as "auto" are Ray's own; whether anybody listens at HOST:PORT we can find out.
    host, _, port = (address or "local").removeprefix("ray://").rpartition(":")
    if port.isdecimal() and "/" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
        except (OSError, OverflowError, UnicodeError) as err:
            raise ConfigError(
                f"nobody answers at '{address}': {err}; check --address and that the cluster runs "
                "(`ray status` there), or leave --address out for a new one on this machine"
            ) from err
    return ray


@contextmanager
def sweep_extra(library: str, instead: str) -> Iterator[None]:
    """Import a library of the extra [sweep] inside; refused, with what else to do, if missing."""
    try:
        yield
    except ImportError as err:
        raise ConfigError(
            f"this needs the library {library}, which is not installed: pip install "
            f"'splitveil[sweep]', or {instead}"
        ) from err
