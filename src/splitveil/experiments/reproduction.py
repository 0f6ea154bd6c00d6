"""Published experiments as one command: their rows, trained and attacked as the authors did."""

import logging
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from splitveil.attacks.profiles import find_profile
from splitveil.config.resolve import build_defence, make_config, read_folder
from splitveil.errors import CheckpointError, ConfigError, RunError, SplitVeilError, unknown
from splitveil.experiments.runner import LiveTable, Trial, Work, run_many
from splitveil.io import Json, write_text
from splitveil.record.groups import Group, dataset_of, find_records
from splitveil.report.columns import REFERENCE, Compared, Published, Reference
from splitveil.report.comparison import TEST90, Track, caption, reference_rows
from splitveil.table import Column, Table, fixed, json_cell

log = logging.getLogger("splitveil")
OLD_NAMES = {"seed-003": "gated-att-report"}  # of 0.1.0; accepted for one version
LAYER = "sparse"  # the layer that the authors' scripts switch on
MEMORY = "training.peak_bytes"
_LEFT_OUT = ("seeds", "by", "psnr")  # of 80 characters; that PSNR is −10 log10 of the MSE

_CAPTION = (
    "MSE (with its PSNR) and SSIM are each of the attack strongest in it, so they may be of two "
    "attacks; `by` is the one strongest in MSE. The accuracy is on what `decoder` rebuilt, the "
    "reported attack, or `by` where that did not run. Memory is the most that tensors held on the "
    "GPU in training; on a CPU it is not measured."
)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A published experiment.

    Args:
        summary: Title of its table.
        common: Settings that its runs share.
        rows: Its rows, each called after its defence.
        aux: What the attacker knows.
        attacks: The attacks it was reported with.
        against: The row that training time and memory are compared with.
        reported: Reported rows.
        rough: More reported rows, whose numbers are approximate.
    """

    summary: str
    common: Mapping[str, Any]
    rows: Sequence[str]
    aux: str
    attacks: Sequence[str]
    against: str
    reported: Mapping[str, Published]
    rough: Sequence[Reference] = ()

    def work(self, profile: str) -> Work:
        """How its runs are attacked, by those of its attacks that the profile has."""
        only = [name for name in self.attacks if name in find_profile(profile)]
        return Work(profile=profile, aux=self.aux, only=only, keep_going=False)


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


def folder_name(name: str, experiment: Experiment, options: Mapping[str, Any]) -> str:
    """The folder of an experiment's runs; a rehearsal on other data or epochs has its own.

    >>> report = EXPERIMENTS["gated-att-report"]
    >>> folder_name("gated-att-report", report, {"seed": 1, "dataset": "folder:/a b", "epochs": 2})
    'gated-att-report-s1-folder-a-b-e2'
    """
    stem = f"{name}-s{options.get('seed', 0)}"
    for key, mark in (("dataset", "-"), ("epochs", "-e")):
        if options.get(key, experiment.common[key]) != experiment.common[key]:
            stem += f"{mark}{options[key]}"
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", stem)


def reproduce(
    name: str,
    *,
    only: Sequence[str] = (),
    profile: str = "standard",
    runs_dir: str | None = None,
    progress: LiveTable | None = None,
    **options: Any,  # noqa: ANN401 - settings of a run
) -> tuple[Table, list[Compared | Reference], Path]:
    """Run an experiment's rows; finished ones are kept, interrupted ones continue.

    Args:
        name: The experiment.
        only: Some of its rows; empty: all.
        profile: Budget of the attacks.
        runs_dir: Where its runs go; None: `runs/` and `folder_name`.
        progress: The table that shows what happens.
        options: Settings of a run that replace the experiment's, for a rehearsal; None: its own.

    Returns:
        The table of all rows in that folder that were made with these options, those rows, and
        the file that the table is written to.
    """
    experiment = find_experiment(name)
    for row in only:
        if row not in experiment.rows:
            raise ConfigError(unknown("row", row, experiment.rows))
    options = {k: v for k, v in options.items() if v is not None}
    # The old name keeps its old folder, so that the same command continues what it began.
    folder = Path(runs_dir or f"runs/{folder_name(name, experiment, options)}")
    common = {**experiment.common, **options, "runs_dir": str(folder)}
    if common["dataset"] != experiment.common["dataset"]:
        common["net"] = "auto"
    trials = [
        Trial(label=row, config=make_config({**common, "defence": row, "name": row}))
        for row in experiment.rows
        if not only or row in only
    ]
    try:
        *_, last = run_many(trials, experiment.work(profile), progress=progress)
    except (RunError, CheckpointError) as error:
        raise type(error)(next_step(error)) from error
    made, rows = group_table(experiment, finished(experiment, last.config.folder, profile))
    write_text(folder / "table.md", made.render(rows, "markdown"))
    return made, rows, folder / "table.md"


def finished(experiment: Experiment, folder: Path, profile: str) -> list[Group]:
    """A run and the rows in the same folder that were trained and attacked as it was."""
    config, built = read_folder(folder)
    found = []
    for row in experiment.rows:
        file = folder.parent / row / "record.json"
        if not file.is_file():
            continue
        try:
            other, data = read_folder(file.parent)
            [group] = find_records([file]).groups
        except SplitVeilError as err:
            log.warning("%s is left out of the table: %s", row, err)
            continue
        own = make_config({**experiment.common, "defence": row})
        # The settings of the defence are compared below; where the data lie does not matter.
        alike = replace(config, name=row, settings=other.settings, data_dir=other.data_dir)
        if (
            (other, data) == (replace(alike, defence=row), built)
            and build_defence(other).settings() == build_defence(own).settings()
            and experiment.work(profile).has_done(group.records[0])
        ):
            found.append(group)
    return found


def next_step(error: SplitVeilError) -> str:
    """The error's message; a step that only `train` has is replaced by one of `reproduce`.

    >>> next_step(RunError("a is broken; train again with --overwrite")).partition(", or")[0]
    'a is broken; give the options as they were to continue'
    """
    what, _, step = str(error).rpartition("; ")
    if not re.search(r"--(name|resume|overwrite)\b", step):
        return str(error)
    return (
        f"{what}; give the options as they were to continue, or another --runs-dir (or remove the "
        "row's folder) to start anew"
    )


def group_table(
    experiment: Experiment, groups: Sequence[Group]
) -> tuple[Table, list[Compared | Reference]]:
    """The experiment's table: our rows, then the reported ones.

    Training time and memory are shares of the row `against`. Rows that are none of the
    experiment's stand last.
    """
    rank = {name: place for place, name in enumerate(experiment.rows)}
    ordered = sorted(groups, key=lambda group: rank.get(group.name, len(rank)))
    track = Track(title=TEST90, groups=tuple(ordered), aux=experiment.aux)
    same_data = comparable(experiment, ordered)
    rows = reference_rows(track, experiment.reported if same_data else {})
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
        caption=f"{caption(ordered)} {_CAPTION}",
    )
    return made, [*rows, *(experiment.rough if same_data else ())]


def shown_json(made: Table, rows: Sequence[Compared | Reference]) -> Json:
    """The table for JSON: one object per row, under the columns' headings; numbers as shown."""
    cells = [
        {
            str(column.heading): json_cell(cell) if column.fmt.numeric else cell.replace("`", "")
            for column, cell in zip(made.columns, line, strict=True)
        }
        for line in made.cells(rows)
    ]
    return {"title": made.title, "caption": made.caption, "rows": cells}


def comparable(experiment: Experiment, groups: Sequence[Group]) -> bool:
    """Whether the rows are of the data that the reported ones are of."""
    return {dataset_of(group) for group in groups} <= {experiment.common["dataset"]}


def _mean(group: Group, path: str) -> float | None:
    """Mean over seeds; none of memory on a CPU, where older records state that of the process."""
    if path == MEMORY and any(device.startswith("cpu") for device in group.distinct("device")):
        return None
    return group.mean(path)
