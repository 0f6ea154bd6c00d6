"""Published experiments as one command: the rows, trained and attacked as their authors did."""

import gc
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from splitveil.audits.flags import UNFINISHED
from splitveil.config import RunConfig, build_defence, find_profile, make_config
from splitveil.errors import ConfigError, RunError, SplitVeilError, unknown
from splitveil.report.claims import claim_lines
from splitveil.report.compare import Sheet, find_records, test90_sheet
from splitveil.report.published import Published
from splitveil.report.rows import Group, flag_names
from splitveil.report.tables import NOTHING, Column
from splitveil.report.tracks import TEST90, Track, dataset_of
from splitveil.runs import Run, fit, read_folder
from splitveil.types import Json, Progress

log = logging.getLogger("splitveil")
Bar = Callable[[str], Progress]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Rows by name, each a defence; what they have in common; who attacks them, and how.

    `rough` are the cells of further reported rows, whose numbers are approximate.
    """

    summary: str
    common: Mapping[str, Any]
    rows: Mapping[str, str]
    aux: str
    attacks: Sequence[str]
    against: str
    reported: Mapping[str, Published]
    rough: Sequence[tuple[str, ...]] = ()


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
_TUNED = (
    "*gated-att tuned*", "vgg11", NOTHING, NOTHING, "≈26", "≈0.045", "decoder", "≈0.40", "≈13.3",
    "seed 003, approximate; a larger λ and fine tuning, values not stated",
)  # fmt: skip
# λ, optimiser and length of the public scripts, which train on all training images; `sparse` is the
# layer that they switch on.
LAYER, LAYER_KINDS = "sparse", ("", "-wire")  # rows of the second kind have it behind the client
_SCRIPT = {
    "dataset": "cifar10", "net": "vgg11", "epochs": 240, "batch_size": 128, "lr": 0.05,
    "schedule": "cem", "lambd": 16.0, "final": True,
}  # fmt: skip
EXPERIMENTS: Mapping[str, Experiment] = {
    "seed-003": Experiment(
        summary="seed 003: CEM against gated attention and slots, with and without sparse coding",
        common=_SCRIPT,
        rows={
            "cem": "cem",
            "gated-att": "gated-att",
            "gated-att-simple": "gated-att-simple",
            "slot-cross": "slot-cross",
            "sparse+cem": "sparse+cem",
            "sparse+gated-att": "sparse+gated-att",
            "sparse+gated-att-simple": "sparse+gated-att-simple",
            "sparse+slot-cross": "sparse+slot-cross",
        },
        aux="test90",
        attacks=("decoder", "decoder-large"),
        against="cem",
        reported=SEED_003,
        rough=(_TUNED,),
    ),
}

MEMORY = ("training", "peak_bytes")
_LEFT_OUT = ("seeds", "by", "pooled PSNR")  # of 80 characters; that PSNR is −10 log10 of the MSE
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


def run_row(
    experiment: Experiment, row: str, options: Mapping[str, Any], profile: str, bar: Bar
) -> Path:
    """Train and attack one row; a finished one is left, an interrupted one continues.

    Returns its folder, not the run: nothing of it stays in memory while the next one trains.
    """
    _free_memory()
    config = make_config(
        {**experiment.common, **options, "defence": experiment.rows[row], "name": row}
    )
    started = (config.folder / "checkpoint.safetensors").is_file()
    run = fit(config, resume=started, overwrite=not started, progress=bar(f"train {row}"))
    record = _record(run)
    if record is None or not _attacked(experiment, record, profile):
        only = _attacks(experiment, profile)
        run.audit(profile, aux=experiment.aux, only=only, progress=bar(f"audit {row}"))
    return run.path


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _record(run: Run) -> Json | None:
    """The run's record; one that cannot be read counts as none."""
    try:
        return None if run.record is None else run.record.to_dict()
    except RunError:
        return None


def _attacks(experiment: Experiment, profile: str) -> list[str]:
    return [name for name in experiment.attacks if name in find_profile(profile)]


def _attacked(experiment: Experiment, record: Json, profile: str) -> bool:
    """Whether a record is of the experiment's attacks, with this budget and its knowledge.

    And of a training that had ended.
    """
    if UNFINISHED in flag_names(record):
        return False
    audit = record.get("audit") or {}
    asked = profile, experiment.aux, sorted(_attacks(experiment, profile))
    return (audit.get("profile"), audit.get("aux"), sorted(audit.get("only") or [])) == asked


def finished(experiment: Experiment, folder: Path, profile: str) -> dict[str, Json]:
    """Records of a run and of the rows beside it that were trained and attacked as it was."""
    config, built = read_folder(folder)
    found = {}
    for row, defence in experiment.rows.items():
        file = folder.parent / row / "record.json"
        if not file.is_file():
            continue
        try:
            other, data = read_folder(file.parent)
            (record,) = find_records([file]).groups[0].records
        except SplitVeilError as err:
            log.warning("%s is left out of the table: %s", row, err)
            continue
        own = make_config({**experiment.common, "defence": defence})
        same = (_shared(other), data) == (_shared(config), built) and other.defence == defence
        if (
            same
            and build_defence(other).settings() == build_defence(own).settings()
            and _attacked(experiment, record, profile)
        ):
            found[row] = record
    return found


def _shared(config: RunConfig) -> Json:
    """What all rows of an experiment have in common."""
    own = ("defence", "settings", "name", "data_dir", "runs_dir")
    return {key: value for key, value in asdict(config).items() if key not in own}


def advice(error: SplitVeilError) -> str:
    """The error with a next step that `reproduce` has, where it names an option of `train`.

    >>> advice(RunError("a is broken; train again with --overwrite")).partition(", or")[0]
    'a is broken; give the options as they were to continue'
    """
    what, _, step = str(error).rpartition("; ")
    if not re.search(r"--(name|resume|overwrite)\b", step):
        return str(error)
    return (
        f"{what}; give the options as they were to continue, or another --runs-dir (or remove the "
        "row's folder) to start anew"
    )


def table(experiment: Experiment, runs: Mapping[str, Json]) -> Sheet:
    """The experiment's table of single runs; `runs` are records by row."""
    return group_table(experiment, [Group(name, ((record,),)) for name, record in runs.items()])


def group_table(experiment: Experiment, groups: Sequence[Group]) -> Sheet:
    """The experiment's table, with training time and memory as shares of the row it compares with.

    Rows stand in the experiment's order, others after them.
    """
    known = list(experiment.rows)
    rank = {name: place for place, name in enumerate(known)}
    rows = sorted(groups, key=lambda group: rank.get(group.name, len(known)))
    track = Track(title=TEST90, groups=tuple(rows), aux=experiment.aux)
    beside = _comparable(experiment, rows)
    sheet = test90_sheet(track, experiment.reported if beside else {})
    against = experiment.against
    base = next((group for group in rows if group.name == against), None)
    lines = [
        (*row, _share(g, base, "seconds", "train"), _share(g, base, *MEMORY))
        for row, g in zip(sheet.rows, rows, strict=False)
    ]
    said = [*sheet.rows[len(rows) :], *(experiment.rough if beside else ())]
    return Sheet(
        title=experiment.summary,
        caption=f"{sheet.caption} {_CAPTION}",
        columns=(
            *(replace(c, brief="") if c.heading in _LEFT_OUT else c for c in sheet.columns),
            Column(heading=f"training time / {against}", brief=f"time /{against}"),
            Column(heading=f"memory / {against}", brief=f"mem /{against}"),
        ),
        rows=(*lines, *((*row, NOTHING, NOTHING) for row in said)),
        notes=sheet.notes,
    )


def _comparable(experiment: Experiment, groups: Sequence[Group]) -> bool:
    """Whether the rows are of the data that the reported ones are of."""
    return {dataset_of(group) for group in groups} <= {experiment.common["dataset"]}


def _share(group: Group, base: Group | None, *keys: str) -> str:
    own, other = _mean(group, *keys), None if base is None else _mean(base, *keys)
    return NOTHING if own is None or not other else f"{own / other:.2f}"


def _mean(group: Group, *keys: str) -> float | None:
    """Mean over seeds; memory on a CPU is none, though older records state the process's."""
    if keys == MEMORY and any(device.startswith("cpu") for device in group.distinct("device")):
        return None
    return group.mean(*keys)


def claims(experiment: Experiment, groups: Sequence[Group]) -> list[str]:
    """What holds of what the experiment's authors report, and what does not."""
    beside = experiment.reported if _comparable(experiment, groups) else {}
    reported = {name.removesuffix(f"-{experiment.aux}"): said for name, said in beside.items()}
    return claim_lines(groups, reported, experiment.against, LAYER, LAYER_KINDS)


def section(experiment: Experiment, groups: Sequence[Group]) -> str:
    """Table, what holds and what does not, what is missing: Markdown."""
    parts = [group_table(experiment, groups).markdown(3).strip()]
    if said := claims(experiment, groups):
        parts.append("What holds and what does not:\n\n" + "\n".join(f"- {line}" for line in said))
    known = {group.name for group in groups}
    if absent := [f"`{row}`" for row in experiment.rows if row not in known]:
        parts.append(f"No record yet: {', '.join(absent)}.")
    return "\n\n".join(parts)
