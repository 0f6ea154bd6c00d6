"""Published experiments as one command: the rows, trained and attacked as their authors did."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from splitveil.config import find_profile, make_config
from splitveil.errors import ConfigError, unknown
from splitveil.report.claims import claim_lines
from splitveil.report.compare import Sheet, test90_sheet
from splitveil.report.rows import Group, Published
from splitveil.report.tables import NOTHING, Column
from splitveil.report.tracks import TEST90, Track
from splitveil.runs import Run, fit, load_run
from splitveil.types import Json, Progress

Bar = Callable[[str], Progress]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Rows by name, each a defence; what they have in common; who attacks them, and how."""

    summary: str
    common: Mapping[str, Any]
    rows: Mapping[str, str]
    aux: str
    attacks: Sequence[str]
    against: str
    reported: Mapping[str, Published]


# What seed 003 reports; the task's accuracies stand in the public logs of those runs.
_SOURCE = "seed 003; task accuracy from the run's public log"
SEED_003: Mapping[str, Published] = {
    "cem-test90": Published(
        accuracy=0.8535, mse=0.0436, reconstruction_accuracy=0.2445, ssim_zeropad=0.4316,
        psnr_pooled=13.60, aux="test90", source=_SOURCE,
    ),
    "gated-att-test90": Published(
        accuracy=0.8434, mse=0.0473, reconstruction_accuracy=0.2480, ssim_zeropad=0.4109,
        psnr_pooled=13.25, aux="test90", source=_SOURCE,
    ),
}  # fmt: skip
# λ, optimiser and length of the public scripts, which train on all training images; `sparse` is the
# layer that they switch on.
LAYER = "sparse"
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
    ),
}


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


def run_row(
    experiment: Experiment, row: str, options: Mapping[str, Any], profile: str, bar: Bar
) -> Run:
    """Train and attack one row; a finished one is read, an interrupted one continues."""
    config = make_config(
        {**experiment.common, **options, "defence": experiment.rows[row], "name": row}
    )
    started = (config.folder / "checkpoint.safetensors").is_file()
    run = fit(config, resume=started, overwrite=not started, progress=bar(f"train {row}"))
    record = run.record
    if record is None or (record.audit["profile"], record.audit["aux"]) != (
        profile,
        experiment.aux,
    ):
        only = [name for name in experiment.attacks if name in find_profile(profile)]
        run.audit(profile, aux=experiment.aux, only=only, progress=bar(f"audit {row}"))
    return load_run(run.path)


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
    sheet = test90_sheet(track, experiment.reported)
    against = experiment.against
    base = next((group for group in rows if group.name == against), None)
    extra = [
        (_share(g, base, "seconds", "train"), _share(g, base, "training", "peak_bytes"))
        for g in rows
    ]
    extra += [(NOTHING, NOTHING)] * (len(sheet.rows) - len(extra))
    return Sheet(
        title=experiment.summary,
        caption=sheet.caption,
        columns=(
            *sheet.columns,
            Column(heading=f"training time / {against}"),
            Column(heading=f"memory / {against}"),
        ),
        rows=tuple((*row, *more) for row, more in zip(sheet.rows, extra, strict=True)),
        notes=sheet.notes,
    )


def _share(group: Group, base: Group | None, *keys: str) -> str:
    own, other = group.mean(*keys), None if base is None else base.mean(*keys)
    return NOTHING if own is None or not other else f"{own / other:.2f}"


def claims(experiment: Experiment, groups: Sequence[Group]) -> list[str]:
    """What holds of what the experiment's authors report, and what does not."""
    reported = {
        name.removesuffix(f"-{experiment.aux}"): said for name, said in experiment.reported.items()
    }
    return claim_lines(groups, reported, experiment.against, LAYER)


def section(experiment: Experiment, groups: Sequence[Group]) -> str:
    """Table, what holds and what does not, what is missing: Markdown."""
    parts = [group_table(experiment, groups).markdown(3).strip()]
    if said := claims(experiment, groups):
        parts.append("What holds and what does not:\n\n" + "\n".join(f"- {line}" for line in said))
    known = {group.name for group in groups}
    if absent := [f"`{row}`" for row in experiment.rows if row not in known]:
        parts.append(f"No record yet: {', '.join(absent)}.")
    return "\n\n".join(parts)
