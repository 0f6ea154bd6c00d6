"""Published experiments as one command: the rows, trained and attacked as their authors did."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from splitveil.attacks.profiles import find_profile
from splitveil.config.resolve import build_defence, make_config
from splitveil.config.run_config import RunConfig
from splitveil.errors import CheckpointError, ConfigError, RunError, SplitVeilError, unknown
from splitveil.experiments.runner import LiveTable, Trial, attacked, run_many
from splitveil.io import Json, write_text
from splitveil.record.groups import Group, dataset_of, find_records
from splitveil.report.columns import REFERENCE, Compared, Published, Reference
from splitveil.report.comparison import TEST90, Track, caption, reference_rows
from splitveil.runs import read_folder
from splitveil.table import Column, Table, fixed, json_cell

log = logging.getLogger("splitveil")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Rows, each called after its defence; what they have in common; who attacks them, and how.

    `rough` are further reported rows, whose numbers are approximate.
    """

    summary: str
    common: Mapping[str, Any]
    rows: Sequence[str]
    aux: str
    attacks: Sequence[str]
    against: str
    reported: Mapping[str, Published]
    rough: Sequence[Reference] = ()


# What seed 003 reports; the task's accuracies stand in the public logs of those runs.
_SOURCE = "seed 003; task accuracy from the run's public log"

SEED_003: Mapping[str, Published] = {
    "cem-test90": Published(
        accuracy=0.8535, mse=0.0436, reconstruction_accuracy=0.2445, ssim_zeropad=0.4316,
        psnr_pooled=13.60, aux="test90", source=_SOURCE, dataset="cifar10",
    ),
    "gated-att-test90": Published(
        accuracy=0.8434, mse=0.0473, reconstruction_accuracy=0.2480, ssim_zeropad=0.4109,
        psnr_pooled=13.25, aux="test90", source=_SOURCE, dataset="cifar10",
    ),
}  # fmt: skip
# Printed with ≈ and without the settings; no log gives the task's accuracy.
_TUNED: Reference = {
    "row": "*gated-att tuned*", "net": ["vgg11"], "rec-accuracy": "≈26", "mse": "≈0.045",
    "by": ["decoder"], "ssim-zeropad": "≈0.40", "psnr": "≈13.3",
    "source": "seed 003, approximate; a larger λ and fine tuning, values not stated",
}  # fmt: skip
# λ, optimiser and length of the public scripts, which train on all training images.
_SCRIPT = {
    "dataset": "cifar10", "net": "vgg11", "epochs": 240, "batch_size": 128, "lr": 0.05,
    "schedule": "cem", "lambd": 16.0, "final": True,
}  # fmt: skip

_PENALTIES = ("cem", "gated-att", "gated-att-simple", "slot-cross")
LAYER = "sparse"  # the layer that the scripts switch on

EXPERIMENTS: Mapping[str, Experiment] = {
    "seed-003": Experiment(
        summary="seed 003: CEM against gated attention and slots, with and without sparse coding",
        common=_SCRIPT,
        rows=(*_PENALTIES, *(f"{LAYER}+{name}" for name in _PENALTIES)),
        aux="test90",
        attacks=("decoder", "decoder-large"),
        against="cem",
        reported=SEED_003,
        rough=(_TUNED,),
    ),
}

MEMORY = ("training", "peak_bytes")
_LEFT_OUT = ("seeds", "by", "psnr")  # of 80 characters; that PSNR is −10 log10 of the MSE

_CAPTION = (
    "MSE (with its PSNR) and SSIM are each of the attack strongest in it, so they may be of two "
    "attacks; `by` is the one strongest in MSE. The accuracy is on what `decoder` rebuilt, the "
    "reported attack, or `by` where that did not run. Memory is the most that tensors held on the "
    "GPU in training; on a CPU it is not measured."
)


def find_experiment(name: str) -> Experiment:
    """The experiment of this name."""
    if name not in EXPERIMENTS:
        raise ConfigError(unknown("experiment", name, EXPERIMENTS))
    return EXPERIMENTS[name]


def chosen_rows(experiment: Experiment, only: Sequence[str]) -> list[str]:
    """The rows to run: all, or those asked for."""
    for name in only:
        if name not in experiment.rows:
            raise ConfigError(unknown("row", name, experiment.rows))
    return [name for name in experiment.rows if not only or name in only]


def folder_name(name: str, seed: int, dataset: str | None, epochs: int | None) -> str:
    """The folder of an experiment's runs; a rehearsal on other data or epochs has its own.

    >>> folder_name("seed-003", 1, None, 240), folder_name("seed-003", 0, "folder:/a b", 2)
    ('seed-003-s1', 'seed-003-s0-folder-a-b-e2')
    """
    common, stem = find_experiment(name).common, f"{name}-s{seed}"
    if dataset not in (None, common["dataset"]):
        stem += f"-{dataset}"
    if epochs not in (None, common["epochs"]):
        stem += f"-e{epochs}"
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
    """Run an experiment's rows; what is finished is left, what was interrupted continues.

    Args:
        name: The experiment.
        only: Some of its rows; empty: all.
        profile: Budget of the attacks.
        runs_dir: Where its runs go; None: `runs/` and `folder_name`.
        progress: The table that shows what happens.
        options: Settings of a run that replace the experiment's, None for its own; for a rehearsal.

    Returns:
        The table of all rows in that folder that were made alike, those rows, and the file it is
        written to.
    """
    experiment = find_experiment(name)
    options = {k: v for k, v in options.items() if v is not None}
    place = folder_name(name, options.get("seed", 0), options.get("dataset"), options.get("epochs"))
    folder = Path(runs_dir or f"runs/{place}")
    common = {**experiment.common, **options, "runs_dir": str(folder)}
    if common["dataset"] != experiment.common["dataset"]:
        common["net"] = "auto"
    trials = [
        Trial(label=row, config=make_config({**common, "defence": row, "name": row}))
        for row in chosen_rows(experiment, only)
    ]
    try:
        *_, last = run_many(
            trials, profile=profile, aux=experiment.aux, only=_attacks(experiment, profile),
            keep_going=False, progress=progress,
        )  # fmt: skip
    except (RunError, CheckpointError) as error:
        raise type(error)(next_step(error)) from error
    made, rows = group_table(experiment, finished(experiment, last.config.folder, profile))
    write_text(folder / "table.md", made.render(rows, "markdown"))
    return made, rows, folder / "table.md"


def _attacks(experiment: Experiment, profile: str) -> list[str]:
    known = find_profile(profile)
    return [name for name in experiment.attacks if name in known]


def finished(experiment: Experiment, folder: Path, profile: str) -> list[Group]:
    """A run and the rows beside it that were trained and attacked as it was."""
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
        alike = (
            (_shared(other), data, other.defence) == (_shared(config), built, row)
            and build_defence(other).settings() == build_defence(own).settings()
            and attacked(group.records[0], profile, experiment.aux, _attacks(experiment, profile))
        )
        if alike:
            found.append(group)
    return found


def _shared(config: RunConfig) -> Json:
    """What all rows of an experiment have in common."""
    own = ("defence", "settings", "name", "data_dir", "runs_dir")
    return {key: value for key, value in asdict(config).items() if key not in own}


def next_step(error: SplitVeilError) -> str:
    """The error with a next step that `reproduce` has, where it names an option of `train`.

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
    """The experiment's table, with training time and memory as shares of the row it compares with.

    Rows stand in the experiment's order, others after them.
    """
    rank = {name: place for place, name in enumerate(experiment.rows)}
    ordered = sorted(groups, key=lambda group: rank.get(group.name, len(rank)))
    track = Track(title=TEST90, groups=tuple(ordered), aux=experiment.aux)
    beside = comparable(experiment, ordered)
    rows = reference_rows(track, experiment.reported if beside else {})
    against = experiment.against
    base = next((group for group in ordered if group.name == against), None)

    def share(heading: str, brief: str, *keys: str) -> Column:
        def get(row: Compared) -> float | None:
            own, other = _mean(row.group, *keys), base and _mean(base, *keys)
            return None if own is None or not other else own / other

        return Column(brief, f"{heading} / {against}", get, fixed(2), brief=f"{brief} /{against}")

    made = Table(
        *(replace(c, brief="") if c.key in _LEFT_OUT else c for c in REFERENCE.columns),
        share("training time", "time", "seconds", "train"),
        share("memory", "mem", *MEMORY),
        title=experiment.summary,
        caption=f"{caption(ordered)} {_CAPTION}",
    )
    return made, [*rows, *(experiment.rough if beside else ())]


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


def _mean(group: Group, *keys: str) -> float | None:
    """Mean over seeds; memory on a CPU is none, though older records state the process's."""
    if keys == MEMORY and any(device.startswith("cpu") for device in group.distinct("device")):
        return None
    return group.mean(*keys)
