"""Many runs, one after the other or on Ray: trained or continued, attacked or read.

A trial that chooses something (`aux="val"`) is measured on validation images, because what chooses
must not see the test images. Its result is `trial.json` in its run's folder, the only journal there
is; of a run that is audited in full, `record.json` says what is finished.
"""

import gc
import hashlib
import json
import math
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Column

from splitveil import __version__
from splitveil.attacks.profiles import find_profile
from splitveil.audits.flags import UNFINISHED
from splitveil.audits.pipeline import ACCURACY_DRAWS
from splitveil.audits.suite import accuracy, folder_store, run_attacks
from splitveil.audits.summary import label_only_mse, strongest
from splitveil.audits.trained_run import open_run
from splitveil.config.resolve import find_device, resolve
from splitveil.config.run_config import PLACES, RunConfig, defaults_for
from splitveil.data.catalogue import load
from splitveil.data.dataset import fingerprint
from splitveil.errors import AuditError, CheckpointError, ConfigError, RunError, unknown
from splitveil.io import Json, Progress, ProgressPart, silent, write_text
from splitveil.nets.clients import CLIENT_PREFIX
from splitveil.record.schema import Record
from splitveil.runs import Run, fit, flush_denormals, load_checked_teacher
from splitveil.threat import Attack

FILE = "trial.json"
MAX_MESSAGE = 500
REACH_S = 5.0  # for a cluster to answer; Ray itself would try for minutes
BRIEF_SHARE = 4  # a trial takes this part of the epochs of a full training


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A run to make, and once it has ended what came of it.

    Args:
        label: Unique among its like.
        config: The run; one without a name gets a folder named after its settings and data.
        settings: The varied ones.
        found: What was measured; None before its end, and if it failed.
        error: Why it failed.
        seconds: How long a trial on validation images took, 0 where it is not known.
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
    def point(self) -> tuple[float, float]:
        """Accuracy, and leakage of at least 0: below, there is nothing left to win."""
        if self.found is None:
            raise RunError(f"trial {self.label} failed and has no numbers: {self.error}")
        return float(self.found["accuracy"]), max(float(self.found["leakage"]), 0.0)


class LiveTable(Bars):
    """What is done, one line per group of trials, and what runs, one line per trial.

    It shows nothing without a console.
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(
            TextColumn("{task.description}", markup=False), BarColumn(bar_width=8),
            MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", markup=False, table_column=Column(overflow="fold")),
            console=console, disable=console is None,
        )  # fmt: skip
        self._groups: dict[str, TaskID] = {}
        self._running: dict[str, TaskID] = {}
        self._ended: list[Trial] = []

    def expect(self, counts: Mapping[str, int]) -> None:
        """So many trials of each group are to come."""
        for name, count in counts.items():
            self._groups[name] = self.add_task(name, total=count, note="")

    def begin(self, trial: Trial) -> Progress:
        """Show a trial as running; returns whom it tells how far it is."""
        words = f"  {trial.label}  {trial_words(trial.settings, trial.config.seed)}"
        self._running[trial.label] = task = self.add_task(words, total=None, note="")
        return lambda done, total, note="": self.update(
            task, completed=done, total=total, note=note
        )

    def finish(self, trial: Trial) -> None:
        """Count a trial that has ended."""
        self._ended.append(trial)
        if trial.label in self._running:
            self.remove_task(self._running.pop(trial.label))
        own = [t for t in self._ended if t.group == trial.group]
        points = [t.point for t in own if t.found is not None]
        note = f"{len(own) - len(points)} failed"
        if points:
            accuracy, leakage = zip(*points, strict=True)
            note += f", best acc {100 * max(accuracy):.2f} %, least leakage {min(leakage):.3f}"
        if trial.group in self._groups:
            self.update(self._groups[trial.group], completed=len(own), note=note)


def trial_words(settings: Mapping[str, Any], seed: int) -> str:
    """Settings as a user would type them.

    >>> trial_words({"lambd": 0.30000001, "form": "hinge"}, 2)
    'lambd=0.3 form=hinge seed=2'
    """
    words = [f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in settings.items()]
    return " ".join(words if "seed" in settings else [*words, f"seed={seed}"])


def run_many(
    trials: Iterable[Trial],
    *,
    profile: str,
    aux: str = "train",
    only: Sequence[str] = (),
    jobs: int | None = 1,
    address: str | None = None,
    resume: bool = True,
    keep_going: bool = True,
    progress: LiveTable | None = None,
) -> Iterator[Trial]:
    """Train and attack every trial; each is yielded as soon as it has ended.

    Trials are taken from the iterable only when they can start, so that a generator may propose
    them from what came of others.

    Args:
        trials: What to run.
        profile: Budget of the attacks.
        aux: What the attacker knows; with "val" only what ranks trials is measured, on validation
            images, and otherwise the run is audited in full.
        only: Some attacks of the profile; empty: all.
        jobs: How many run at a time; more than one needs Ray. None: as many as Ray has cores, or
            GPUs where the trials use them.
        address: A Ray cluster to use, "local" for a new one on this machine; None: this process,
            unless there are several jobs.
        resume: Read what is finished and continue what was begun, instead of starting anew.
        keep_going: Note the error of a failing trial, instead of raising it.
        progress: The table that shows what happens.

    Returns:
        The trials with what came of them, in the order in which they end.
    """
    table = progress or LiveTable()
    if isinstance(trials, Sequence):
        table.expect(Counter(trial.group for trial in trials))
    work = partial(
        run_one, profile=profile, aux=aux, only=only, resume=resume, keep_going=keep_going
    )
    ray = check_ray(jobs, address)
    ended: Iterator[Trial] = (work(trial, progress=table.begin(trial)) for trial in trials)
    if ray is not None:
        ended = _on_ray(ray, trials, work, jobs, address or "local", table)
    for trial in ended:
        table.finish(trial)
        yield trial


def run_one(
    trial: Trial,
    *,
    profile: str,
    aux: str,
    only: Sequence[str],
    resume: bool,
    keep_going: bool,
    progress: Progress = silent,
) -> Trial:
    """Train and attack one trial, or read what is finished; see `run_many`."""
    flush_denormals()
    _free_memory()
    try:
        if trial.config.name is None:
            trial = replace(trial, config=with_own_folder(trial.config))
        if aux == "val":
            return _validated(trial, ranking_attacks(profile, only), resume, progress)
        record = _audited(trial.config, profile, aux, only, resume, progress)
    except Exception as err:  # a trial may fail in any way; the others go on
        if not keep_going:
            raise
        failed = replace(trial, error=f"{type(err).__name__}: {err}"[:MAX_MESSAGE])
        if aux == "val" and (trial.config.folder / "config.toml").is_file():
            _write(failed, key="")
        return failed
    return replace(trial, found={"accuracy": record.accuracy, "leakage": record.leakage})


def _free_memory() -> None:
    """Nothing of a run stays in memory while the next one trains."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _validated(
    trial: Trial, attacks: Mapping[str, Attack], resume: bool, progress: Progress
) -> Trial:
    started, folder = time.perf_counter(), trial.config.folder
    key = _digest([folder.name, repr(attacks)])
    saved = read_trial(folder / FILE) if resume else {}
    if saved.get("key") == key:
        seconds = saved.get("seconds", 0.0)  # version 0.1.0 did not note them
        return replace(trial, found=saved["found"], seconds=seconds)
    try:
        run = _trained(trial.config, resume, progress)
    except CheckpointError:  # the folder is named after the settings, so it is a broken one
        run = _trained(trial.config, False, progress)
    found = validate_on_val(run, attacks, ProgressPart(progress, "attacks", 0.5, 0.5, 1.0))
    bad = [name for name in ("accuracy", "leakage") if not math.isfinite(found[name])]
    if bad:
        raise AuditError(f"{' and '.join(bad)} of the trial are not finite numbers; see {folder}")
    seconds = round(time.perf_counter() - started, 3)
    ended = replace(trial, found=found, seconds=seconds)
    _write(ended, key)
    return ended


def _audited(  # noqa: PLR0917 - what an audit takes
    config: RunConfig, profile: str, aux: str, only: Sequence[str], resume: bool, progress: Progress
) -> Record:
    run = _trained(config, resume, progress)
    if resume:
        with suppress(RunError):  # a record that cannot be read counts as none
            record = run.record
            if record is not None and attacked(record, profile, aux, only):
                return record
    told = ProgressPart(progress, "attacks", 0.5, 0.5, 1.0)
    return run.audit(profile, aux=aux, only=only, progress=told)


def _trained(config: RunConfig, resume: bool, progress: Progress) -> Run:
    """Training is the first half of a trial."""
    begun = resume and (config.folder / "checkpoint.safetensors").is_file()
    told = ProgressPart(progress, "training", 0.0, 0.5, 1.0)
    return fit(config, resume=begun, overwrite=not begun, progress=told)


def attacked(record: Record, profile: str, aux: str, only: Sequence[str]) -> bool:
    """Whether a record is of these attacks, on a training that had ended."""
    there = record.audit.profile, record.audit.aux, sorted(record.audit.only)
    return there == (profile, aux, sorted(only)) and UNFINISHED not in record.flag_names


def _write(trial: Trial, key: str) -> None:
    told = {
        "key": key, "found": trial.found, "label": trial.label, "settings": dict(trial.settings),
        "seed": trial.config.seed, "seconds": trial.seconds, "error": trial.error,
    }  # fmt: skip
    write_text(trial.config.folder / FILE, json.dumps(told, indent=2, allow_nan=False) + "\n")


def read_trial(file: Path) -> Json:
    """A trial's file; empty where there is none, or it is broken."""
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return saved if isinstance(saved, dict) else {}


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
    """Accuracy and what the strongest attack got, on validation images, attacker knowing train."""
    target, _ = open_run(run, aux="val", seed=run.config.seed)
    store = folder_store(run.path / "audit", __version__)  # a trial's folder is of one version
    best = strongest(run_attacks(target, attacks, progress, store=store))
    ceiling = label_only_mse(target.aux, target.scored, target.num_classes)
    return {
        "accuracy": accuracy(target, ACCURACY_DRAWS), "mse": best["mse"],
        "attack": best["mse_by"], "ceiling": ceiling, "leakage": 1.0 - best["mse"] / ceiling,
    }  # fmt: skip


def brief_epochs(dataset: str) -> int:
    """Epochs of a trial unless the user says otherwise: a quarter of the dataset's own.

    >>> brief_epochs("digits")
    15
    """
    return max(1, int(defaults_for(RunConfig(dataset=dataset))["epochs"]) // BRIEF_SHARE)


def with_own_folder(config: RunConfig) -> RunConfig:
    """The run with a name of its own: other settings or other data, another folder."""
    dataset = _data(config.dataset, config.data_dir)
    settings = resolve(config, dataset).settings()
    same = {k: v for k, v in settings.items() if k not in (*PLACES, "name")}
    if teacher := load_checked_teacher(config, dataset):
        same["teacher"] = teacher.noted["model"]
    words = f"{config.dataset}-{config.defence}-{config.net.removeprefix(CLIENT_PREFIX)}"
    stem = re.sub(r"[^A-Za-z0-9._+-]+", "-", words)
    return replace(config, name=f"{stem}-{_digest([same, fingerprint(dataset), __version__])}")


_data = lru_cache(maxsize=1)(load)  # the trials of a search are on one dataset


def _digest(parts: Sequence[object]) -> str:
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _on_ray(  # noqa: PLR0917 - what `run_many` knows
    ray: Any,  # noqa: ANN401 - the module
    trials: Iterable[Trial],
    work: Callable[[Trial], Trial],
    jobs: int | None,
    address: str,
    table: LiveTable,
) -> Iterator[Trial]:
    """Trials as tasks of a Ray cluster, whose machines see the same package and folders."""
    waiting = iter(trials)
    first = next(waiting, None)
    if first is None:  # everything is finished: no cluster is needed
        return
    waiting = chain([first], waiting)
    home, gpus = Path.cwd(), int(find_device(first.config.device) == "cuda")

    def task(trial: Trial) -> Trial:
        with suppress(OSError):
            os.chdir(home)  # relative paths of datasets mean what they mean here
        torch.set_num_threads(1)
        return work(trial)

    _start_ray(ray, jobs, address)
    running: dict[Any, Trial] = {}
    try:
        slots = jobs or max(int(ray.cluster_resources().get("GPU" if gpus else "CPU", 1)), 1)
        remote = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(task)
        while True:
            for trial in islice(waiting, slots - len(running)):
                table.begin(trial)
                running[remote.remote(trial)] = trial
            if not running:
                return
            ready = ray.wait(list(running), num_returns=1)[0][0]
            trial = running.pop(ready)
            try:
                yield ray.get(ready)
            except ray.exceptions.RayError as err:  # its worker died
                told = f"{type(err).__name__}: {str(err).splitlines()[0]}"
                yield replace(trial, error=told)
    finally:
        ray.shutdown()  # a cluster that was started here ends, another one is left


def _start_ray(ray: Any, jobs: int | None, address: str) -> None:  # noqa: ANN401 - the module
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    new = {"num_cpus": jobs, "include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **new)
    except (ConnectionError, RuntimeError, ValueError) as err:
        raise ConfigError(
            f"cannot reach Ray at '{address}': {err}; check --address, and "
            "the token where the cluster wants one (RAY_AUTH_TOKEN)"
        ) from err


def check_ray(jobs: int | None, address: str | None) -> Any:  # noqa: ANN401 - the module
    """Ray where it is needed, else None; refused if it is not installed or does not answer."""
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs must be at least 1, got {jobs}")
    if jobs == 1 and address is None:
        return None
    try:
        import ray
    except ImportError as err:
        raise ConfigError(
            "several trials at a time need Ray, which is not installed; "
            "pip install 'splitveil[sweep]', or use --jobs 1 without --engine ray"
        ) from err
    _reach(address or "local")
    return ray


def _reach(address: str) -> None:
    """Refuse the address of a machine where nobody listens; only Ray understands other ones."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
    except (OSError, OverflowError, UnicodeError) as err:
        raise ConfigError(
            f"nobody answers at '{address}': {err}; check --address and that the cluster runs "
            "(`ray status` there), or leave --address out for a new one on this machine"
        ) from err
