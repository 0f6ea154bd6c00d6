"""Published experiments as one command: their rows, trained and attacked as the authors did."""

import logging
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from splitveil.attacks.profiles import find_profile
from splitveil.config.resolve import build_defence, make_config, read_folder, resolve
from splitveil.data.catalogue import load
from splitveil.errors import ConfigError, RunError, SplitVeilError, unknown
from splitveil.experiments.runner import LiveTable, Trial, Work, run_many
from splitveil.io import Json, as_run_error, write_text
from splitveil.record.groups import Group, dataset_of
from splitveil.record.schema import Record, read_record
from splitveil.report.columns import REFERENCE, Compared, Published, ReferenceRow
from splitveil.report.comparison import Track, caption, reference_rows
from splitveil.table import Column, Table, fixed, json_cell

log = logging.getLogger("splitveil")
OLD_NAMES = {"seed-003": "gated-att-report"}  # of 0.1.0; accepted for one version
ATTACKERS = ("test90", "train")  # the trainings hold no image back for another one
STANDARD = "standard"  # the budget whose table is called `table.md`
MEMORY = "training.peak_bytes"
_LEFT_OUT = ("seeds", "by", "psnr")  # of 80 characters; that PSNR is −10 log10 of the MSE

_CAPTION = (
    "MSE and PSNR are of the attack with the smallest MSE, named under `by`; SSIM is of the attack "
    "with the largest SSIM, which may be another one. The accuracy on reconstructions is on those "
    "of `decoder`, as reported, or of `by` where `decoder` did not run. Memory is the most that "
    "tensors held on the GPU in training; it is not measured on a CPU."
)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A published experiment.

    Args:
        summary: Title of its table.
        note: What a reader of the table must know of the rows, and of what was reported.
        common: Settings that its runs share.
        rows: Its rows by name, each with the settings of its own.
        aux: What the attacker knows.
        attacks: The attacks it was reported with.
        against: The row that training time and memory are compared with.
        reported: Reported rows.
        rough: More reported rows, whose numbers are approximate.
    """

    summary: str
    note: str
    common: Mapping[str, Any]
    rows: Mapping[str, Mapping[str, Any]]
    aux: str
    attacks: Sequence[str]
    against: str
    reported: Mapping[str, Published]
    rough: Sequence[ReferenceRow] = ()

    def settings(self, row: str) -> dict[str, Any]:
        """All settings of a row's runs, without name and seed."""
        return {**self.common, **self.rows[row]}

    def work(self, profile: str) -> Work:
        """How its runs are attacked, by those of its attacks that the profile has."""
        only = [name for name in self.attacks if name in find_profile(profile)]
        return Work(profile=profile, aux=self.aux, only=only)


def _read_experiments() -> dict[str, Experiment]:
    file = resources.files("splitveil.experiments").joinpath("published.toml")
    tables = tomllib.loads(file.read_text("utf-8"))
    for table in tables.values():
        table["reported"] = {name: Published(**row) for name, row in table["reported"].items()}
    return {name: Experiment(**table) for name, table in tables.items()}


EXPERIMENTS: Mapping[str, Experiment] = _read_experiments()


def find_experiment(name: str) -> Experiment:
    """The experiment of this name; an old name is accepted, with a warning."""
    if name in OLD_NAMES:
        log.warning("'%s' is now called '%s'; please use the new name", name, OLD_NAMES[name])
    name = OLD_NAMES.get(name, name)
    if name not in EXPERIMENTS:
        raise ConfigError(unknown("experiment", name, EXPERIMENTS))
    return EXPERIMENTS[name]


def folder_name(
    name: str, experiment: Experiment, options: Mapping[str, Any], seeds: Sequence[int] = (0,)
) -> str:
    """The folder of an experiment's runs; a rehearsal on other data or epochs has its own.

    >>> report = EXPERIMENTS["gated-att-report"]
    >>> folder_name("report", report, {"dataset": "folder:/a b", "epochs": 2}, [1])
    'report-s1-folder-a-b-e2'
    >>> folder_name("report", report, {}, [0, 1, 2])
    'report-s0-1-2'
    """
    stem = f"{name}-s{'-'.join(map(str, seeds))}"
    for key, mark in (("dataset", "-"), ("epochs", "-e")):
        if options.get(key, experiment.common[key]) != experiment.common[key]:
            stem += f"{mark}{options[key]}"
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", stem)


def reproduce(
    name: str,
    *,
    seeds: Sequence[int] = (0,),
    only: Sequence[str] = (),
    profile: str = STANDARD,
    aux: str | None = None,
    runs_dir: str | None = None,
    progress: LiveTable | None = None,
    **options: Any,  # noqa: ANN401 - settings of a run
) -> tuple[Table, list[Compared | ReferenceRow], Path, dict[str, str]]:
    """Run an experiment's rows; finished ones are kept, interrupted ones continue.

    A row that fails is named, and tried again the next time.

    Args:
        name: The experiment.
        seeds: Random seeds of the trainings; every row is trained once with each.
        only: Some of its rows; empty: all.
        profile: Budget of the attacks.
        aux: What the attacker knows, train or test90; None: as in the experiment. Another one
            audits the same runs again and leaves the reported rows out.
        runs_dir: Where its runs go, with several seeds below `s0`, `s1`, …; None: a folder of
            `runs/` for each seed, see `folder_name`.
        progress: The table that shows what happens.
        options: Settings of a run that replace the experiment's, for a rehearsal; None: its own.

    Returns:
        The table of all rows with these seeds that were made with these options, those rows, the
        file that the table is written to, and the errors of rows that failed, by label.
    """
    experiment = find_experiment(name)
    experiment = replace(experiment, aux=aux or experiment.aux)
    if experiment.aux not in ATTACKERS:
        raise ConfigError(unknown("attacker's knowledge", experiment.aux, ATTACKERS))
    for row in only:
        if row not in experiment.rows:
            raise ConfigError(unknown("row", row, experiment.rows))
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(
            f"seeds must be at least one and each only once, got {[*seeds]}; for example 0,1,2"
        )
    find_profile(profile)  # an unknown one is refused before any data are loaded
    options = {k: v for k, v in options.items() if v is not None}
    # The old name keeps its old folder, so that the same command continues what it began.
    folders = {seed: f"runs/{folder_name(name, experiment, options, [seed])}" for seed in seeds}
    folder = Path(runs_dir or f"runs/{folder_name(name, experiment, options, seeds)}")
    if runs_dir:
        folders = {seed: str(folder / (f"s{seed}" * (len(seeds) > 1))) for seed in seeds}
    if options.get("dataset", experiment.common["dataset"]) != experiment.common["dataset"]:
        options["net"] = "auto"
    trials = [
        Trial(
            label=row if len(seeds) == 1 else f"{row}/{seed}",
            config=make_config(
                {**experiment.settings(row), **options, "name": row, "seed": seed,
                 "runs_dir": folders[seed]}
            ),
        )
        for seed in seeds
        for row in experiment.rows
        if not only or row in only
    ]  # fmt: skip
    check_rows(trials)
    ended = [*run_many(trials, experiment.work(profile), progress=progress)]
    failed = {t.label: next_step(t.reason) for t in ended if t.error is not None}
    last = {t.config.seed: t.config.folder for t in ended if t.error is None}
    if not last:
        raise RunError("every row failed: " + "; ".join(f"{k}: {v}" for k, v in failed.items()))
    groups = finished(experiment, list(last.values()), profile)
    made, rows = group_table(experiment, groups)
    with as_run_error(folder):
        folder.mkdir(parents=True, exist_ok=True)
    target = folder / table_name(profile, "" if aux == find_experiment(name).aux else aux)
    write_text(target, made.render(rows, "markdown"))
    return made, rows, target, failed


def table_name(profile: str, aux: str | None) -> str:
    """The file of a table; other budgets and attackers than the experiment's have their own.

    >>> table_name("standard", None), table_name("paper", "train")
    ('table.md', 'table-paper-train.md')
    """
    other = "" if profile == STANDARD else profile
    return "-".join(filter(None, ("table", other, aux))) + ".md"


def check_rows(trials: Sequence[Trial]) -> None:
    """Refuse data and settings that cannot be used, before the first row is trained."""
    dataset = load(trials[0].config.dataset, trials[0].config.data_dir)
    for trial in trials:
        resolve(trial.config, dataset)


def finished(experiment: Experiment, folders: Sequence[Path], profile: str) -> list[Group]:
    """The rows made alike: those of runs, one per seed, and of others beside them.

    Args:
        experiment: The experiment.
        folders: A run folder for each seed, trained and attacked as asked.
        profile: Budget of the attacks.
    """
    found: dict[str, list[Record]] = {row: [] for row in experiment.rows}
    for folder in folders:
        for row, record in _beside(experiment, folder, profile):
            found[row].append(record)
    return [
        Group(row, tuple((record,) for record in records)) for row, records in found.items()
        if records
    ]  # fmt: skip


def _beside(experiment: Experiment, folder: Path, profile: str) -> Iterator[tuple[str, Record]]:
    """The rows whose runs lie beside a run and were trained and attacked as it was."""
    config, built = read_folder(folder)
    for row in experiment.rows:
        file = folder.parent / row / "record.json"
        if not file.is_file():
            continue
        try:
            other, data = read_folder(file.parent)
            record = read_record(file)
        except SplitVeilError as err:
            log.warning("%s is left out of the table: %s", row, err)
            continue
        own = make_config(experiment.settings(row))
        # The settings of the defence are compared below; where the data lie does not matter.
        alike = replace(
            config, name=row, defence=own.defence, settings=other.settings, data_dir=other.data_dir
        )
        if (
            (other, data) == (alike, built)
            and build_defence(other).settings() == build_defence(own).settings()
            and experiment.work(profile).has_done(record)
        ):
            yield row, record


def next_step(error: str) -> str:
    """An error's message; a step that only `train` has is replaced by one of `reproduce`.

    >>> next_step("a is broken; train again with --overwrite").partition(", or")[0]
    'a is broken; give the options as they were to continue'
    """
    what, _, step = error.rpartition("; ")
    if not re.search(r"--(name|resume|overwrite)\b", step):
        return error
    return (
        f"{what}; give the options as they were to continue, or another --runs-dir (or remove the "
        "row's folder) to start anew"
    )


def group_table(
    experiment: Experiment, groups: Sequence[Group]
) -> tuple[Table, list[Compared | ReferenceRow]]:
    """The experiment's table: our rows, then the reported ones.

    Training time and memory are shares of the row `against`. Rows that are none of the
    experiment's stand last.
    """
    rank = {name: place for place, name in enumerate(experiment.rows)}
    ordered = sorted(groups, key=lambda group: rank.get(group.name, len(rank)))
    track = Track(title=experiment.summary, groups=tuple(ordered), aux=experiment.aux)
    like_reported = is_comparable(experiment, ordered)
    rows = reference_rows(track, experiment.reported if like_reported else {})
    against = experiment.against
    base = next((group for group in ordered if group.name == against), None)

    def share(heading: str, brief: str, path: str) -> Column:
        def get(row: Compared) -> float | None:
            own, other = _mean(row.group, path), base and _mean(base, path)
            return None if own is None or not other else own / other

        return Column(brief, f"{heading} / {against}", get, fixed(2), brief=f"{brief} /{against}")

    made = Table(
        *(replace(c, brief="") if c.key in _LEFT_OUT else c for c in REFERENCE.columns),
        share("training time", "time", "seconds.train"),
        share("memory", "mem", MEMORY),
        title=experiment.summary,
        caption=f"{caption(ordered)} {experiment.note} {_CAPTION}",
    )
    return made, [*rows, *(experiment.rough if like_reported else ())]


def shown_json(made: Table, rows: Sequence[Compared | ReferenceRow]) -> Json:
    """The table for JSON: one object per row, under the columns' headings; numbers as shown."""
    cells = [
        {
            str(column.heading): json_cell(cell) if column.fmt.numeric else cell.replace("`", "")
            for column, cell in zip(made.columns, line, strict=True)
        }
        for line in made.cells(rows)
    ]
    return {"title": made.title, "caption": made.caption, "rows": cells}


def is_comparable(experiment: Experiment, groups: Sequence[Group]) -> bool:
    """Whether the rows are of the data and the attacker that the reported ones are of."""
    same_attacker = experiment.aux in {row.aux for row in experiment.reported.values()}
    datasets = {dataset_of(group) for group in groups}
    return same_attacker and datasets <= {experiment.common["dataset"]}


def _mean(group: Group, path: str) -> float | None:
    """Mean over seeds; none of memory on a CPU, where older records state that of the process."""
    if path == MEMORY and any(device.startswith("cpu") for device in group.distinct("device")):
        return None
    return group.mean(path)
