"""A run from configuration to folder and back: `fit`, `load_run`, `Run`, `audit`, export."""

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from splitveil.audits.trained_run import audit_run, fit_attacker
from splitveil.config.resolve import (
    DataFacts,
    Plan,
    find_device,
    flat_config,
    make_config,
    merge,
    plan_of,
    resolve,
)
from splitveil.config.run_config import NAME, NAME_RULE, RunConfig
from splitveil.config.settings import read_toml
from splitveil.data.catalogue import load
from splitveil.data.dataset import Dataset, fingerprint
from splitveil.data.splits import Splits, make_splits
from splitveil.defences.catalogue import find_defence
from splitveil.errors import AuditError, CheckpointError, ConfigError, RunError, SplitVeilError
from splitveil.io import (
    Json,
    Progress,
    as_run_error,
    folder_lock,
    silent,
    temporary_path,
    write_text,
)
from splitveil.nets.channel import GaussianNoise
from splitveil.nets.split import SplitModel
from splitveil.provenance import model_hash, versions
from splitveil.record.files import class_names, last_epoch
from splitveil.record.schema import Record, read_record
from splitveil.rng import seeded_globals
from splitveil.serve.export import export_model, verdict, wire_name
from splitveil.serve.manifest import FILE, Manifest, check_target, read_manifest, sha256
from splitveil.serve.wire import Rows
from splitveil.threat import Victim
from splitveil.train.distillation import Teacher, check_same_teacher, check_teacher
from splitveil.train.state import CHECKPOINT, load_module, read_checkpoint, read_meta

EARLIER = {"ramp": 0.0, "sparse_place": "wire"}  # what a setting was before folders named it


def flush_denormals() -> None:
    """Flush denormals to zero: must be the process's first torch statement to reach all threads.

    The gated forms produce many; without this they train an order of magnitude slower on a CPU.
    """
    torch.set_flush_denormal(True)


class Run:
    """A trained split model and its folder."""

    def __init__(self, path: Path, config: RunConfig, built: DataFacts, model: SplitModel) -> None:
        self.path, self.config, self.built, self.model = path, config, built, model
        self.model.eval()

    @property
    def victim(self) -> Victim:
        """The deployed client, frozen: what an attacker meets."""
        return self.model.victim()

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise the deployed channel really adds."""
        return float(getattr(self.model.channel, "noise_std", 0.0))

    @property
    def record(self) -> Record | None:
        """What the last audit measured; None before one."""
        path = self.path / "record.json"
        return read_record(path) if path.is_file() else None

    def data(self, progress: Progress = silent) -> tuple[Dataset, Splits]:
        """The dataset and splits it was trained with; refuses data that have changed since."""
        config = self.config
        dataset = load(config.dataset, config.data_dir, progress)
        if fingerprint(dataset) != self.built.data_hash:
            raise AuditError(
                f"the data of '{config.dataset}' are not those the run was trained on: hash "
                f"{fingerprint(dataset)}, expected {self.built.data_hash}; point data_dir to the "
                "original data or train again"
            )
        return dataset, splits_of(config, dataset)

    def trained(self) -> Json:
        """Its training: `steps`, `seconds`, `peak_bytes`, and `teacher` or None."""
        meta = read_meta(self.path / CHECKPOINT)
        return {
            "steps": meta["step"],
            "seconds": meta.get("seconds"),
            "peak_bytes": meta.get("peak_bytes"),
            "teacher": meta.get("passport", {}).get("teacher"),
        }

    def audit(
        self,
        profile: str = "quick",
        *,
        aux: str = "train",
        seed: int = 0,
        progress: Progress = silent,
        fresh: bool = False,
        only: Sequence[str] = (),
        compile: bool = False,
        attributes: Path | None = None,
    ) -> Record:
        """Attack the run, write `record.json` and `gallery.json`, and return the record.

        Attacks finished before on the same model and data are not repeated, unless `fresh`.
        `only` some attacks of the profile, which the record says and flags; `compile` has torch
        compile the decoders on a GPU. `attributes` is a table of attributes of the images.
        """
        return audit_run(
            self, profile, aux=aux, seed=seed, progress=progress, fresh=fresh, only=only,
            compile=compile, attributes=attributes,
        )  # fmt: skip


def audit(
    run: Run,
    profile: str = "quick",
    *,
    aux: str = "train",
    seed: int = 0,
    progress: Progress = silent,
    fresh: bool = False,
    only: Sequence[str] = (),
    compile: bool = False,
    attributes: Path | None = None,
) -> Record:
    """Attack a run, write its `record.json`, and return the record.

    Args:
        run: A trained run, from `fit` or `load_run`.
        profile: Budget of the attacks: smoke, quick, standard or paper.
        aux: What the attacker knows: train, held-out, test90, or val to choose settings by.
        seed: Seed of the attacks, 0 or more.
        progress: Told of every attack.
        fresh: Run every attack, also those finished before.
        only: Some attacks of the profile, by name; the record says so and is flagged.
        compile: Have torch compile the decoders, on a GPU.
        attributes: A table of attributes of the images, CSV.

    Returns:
        The record; `record.strongest.mse` is the headline number.
    """
    return run.audit(
        profile, aux=aux, seed=seed, progress=progress, fresh=fresh, only=only, compile=compile,
        attributes=attributes,
    )  # fmt: skip


def fit(
    config: RunConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Run:
    """Train a run into `runs/<name>/`.

    An existing folder is refused unless `resume` (continue where it stopped, bit for bit on a
    CPU) or `overwrite` is given.

    Args:
        config: The run's settings; what is None is filled in from the dataset's recipe.
        resume: Continue the run in the folder.
        overwrite: Replace it.
        progress: Told of every step.
    """
    flush_denormals()
    plan = resolve(config)  # what does not depend on the data is refused before they are fetched
    folder = plan.folder
    with as_run_error(folder):
        _check_folder(folder, resume=resume, overwrite=overwrite)
    teacher = open_teacher(config)
    dataset = load(config.dataset, config.data_dir, progress)
    plan, splits = plan.on(dataset), splits_of(config, dataset)
    built = plan.data
    if teacher is not None:
        check_teacher(teacher, config, dataset, built.data_hash)
    if resume:
        _check_same(folder, plan)
        check_same_teacher(teacher, folder)
    parts = plan.build()
    passport: Json = {"versions": versions(), "splits": splits.hashes()}
    if teacher is not None:
        passport["teacher"] = teacher.noted
    from splitveil.train.loop import train_run  # imports Fabric, which takes seconds

    with folder_lock(folder):
        _check_folder(folder, resume=resume, overwrite=overwrite)  # others may have been quicker
        if resume:
            _set_aside(folder)
        else:
            _start_folder(folder, plan)
        train_run(
            plan, parts, dataset, splits, progress, passport=passport, teacher=teacher,
            resume=resume,
        )  # fmt: skip
        _set_aside(folder)  # somebody may have audited it meanwhile
    return Run(folder, plan.config, built, parts.model)


def fit_given(
    recipe: str | None,
    file: Path | None,
    pairs: Sequence[str],
    options: Mapping[str, Any],
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Run:
    """Train with settings of several sources, as `merge` takes them; see `fit`.

    A run that is resumed has its own settings before all others.
    """
    config = merge(recipe, file, pairs, options)
    if resume and not overwrite:  # both are refused together, by `fit`
        saved = flat_config(read_folder(config.folder)[0])
        config = merge(recipe, file, pairs, options, saved=saved)
    return fit(config, resume=resume, overwrite=overwrite, progress=progress)


def load_run(path: str | Path) -> Run:
    """Read a run folder back; the data are not needed."""
    folder = Path(path)
    config, built = read_folder(folder)
    device = find_device("cpu" if config.device == "cpu" else "auto")
    with seeded_globals(0):
        model = plan_of(config, built).build_model()
    load_module(model, read_checkpoint(folder / CHECKPOINT).part("model"), "model")
    return Run(folder, config, built, model.to(device))


def open_teacher(config: RunConfig) -> Teacher | None:
    """The run that a configuration names as its teacher; None where it names none."""
    if config.teacher is None:
        for key in ("teacher_share", "teacher_temperature"):
            if getattr(config, key) != getattr(RunConfig, key):
                raise ConfigError(
                    f"{key} is {getattr(config, key)}, but there is no teacher; "
                    "add --set teacher=RUN, the folder of a trained run, or leave it out"
                )
        return None
    folder = teacher_folder(config.teacher)
    if folder.resolve() == config.folder.resolve():
        raise ConfigError(
            f"{folder} cannot be its own teacher; name another run, or give this one a --name"
        )
    return load_teacher(folder)


def load_teacher(folder: Path) -> Teacher:
    """A run as a teacher.

    It may add noise to what it sends, and answers without it; whatever else its channel does, its
    server has learnt to expect.
    """
    try:
        run = load_run(folder)
    except SplitVeilError as err:
        raise ConfigError(
            f"the teacher {folder} cannot be used: {err} (this is said of the teacher's folder)"
        ) from err
    stages = cast(nn.ModuleList, run.model.channel.stages)
    more = [type(stage).__name__ for stage in stages if not isinstance(stage, GaussianNoise)]
    if more:
        raise ConfigError(
            f"the teacher {folder} does more to what it sends than add noise ({', '.join(more)}), "
            "so it cannot answer in one piece; train one with --defence none"
        )
    return Teacher(
        model=run.model,
        folder=folder,
        config=run.config,
        data_hash=run.built.data_hash,
        model_hash=model_hash(run.model),
        steps=int(read_meta(folder / CHECKPOINT)["step"]),
    )


def teacher_folder(text: str) -> Path:
    """The folder that `teacher` names."""
    if not text.strip():
        raise ConfigError(f"teacher must be the folder of a trained run, or none, got '{text}'")
    return Path(text).expanduser()


def load_checked_teacher(config: RunConfig, dataset: Dataset) -> Teacher | None:
    """The teacher of a run on these data, checked; None where it has none."""
    teacher = open_teacher(config)
    if teacher is not None:
        check_teacher(teacher, config, dataset, fingerprint(dataset))
    return teacher


def splits_of(config: RunConfig, dataset: Dataset) -> Splits:
    """Which images a run trains on, chooses by and is tested on."""
    return make_splits(
        dataset, split_seed=config.split_seed, held_out=config.held_out, final=config.final
    )


def read_folder(folder: Path) -> tuple[RunConfig, DataFacts]:
    """Configuration and data facts of a run folder."""
    path = folder / "config.toml"
    try:
        there = path.is_file()
    except OSError as err:  # below a folder that may not be searched
        raise RunError(f"cannot look into {folder}: {err.strerror}; check the path") from err
    if not there:
        raise RunError(
            f"{folder} is not a run: it has no config.toml; `splitveil train` makes runs, "
            "by default below ./runs"
        )
    flat = read_toml(path)
    try:
        shape = tuple(int(v) for v in flat.pop("image_shape"))
        built = DataFacts(
            (shape[0], shape[1], shape[2]), int(flat.pop("num_classes")), flat.pop("data_hash")
        )
    except (KeyError, ValueError, TypeError, IndexError) as err:
        raise RunError(f"{path} lacks {err}; it was not written by a training run") from err
    defence = find_defence(str(flat.get("defence", RunConfig.defence)))
    flat = {k: v for k, v in EARLIER.items() if k in defence.settings()} | flat
    place = folder.resolve() if folder.name in ("", "..") else folder  # `.` has no name
    flat["runs_dir"], flat["name"] = str(place.parent), place.name
    if not NAME.fullmatch(place.name):
        raise RunError(
            f"cannot read the run {folder}: its {NAME_RULE}, got '{place.name}'; rename the folder"
        )
    return make_config(flat), built


def _check_folder(folder: Path, *, resume: bool, overwrite: bool) -> None:
    if resume and overwrite:
        raise RunError("--resume and --overwrite exclude each other; give one")
    if resume and not (folder / CHECKPOINT).is_file():
        raise RunError(
            f"nothing to resume: {folder} has no checkpoint; start it again with --overwrite"
        )
    if _is_empty(folder):  # killed before its first file
        return
    if overwrite and folder.exists() and not (folder / "config.toml").is_file():
        raise RunError(
            f"{folder} is not a run (it has no config.toml) and will not be overwritten; "
            "choose another --name or remove it yourself"
        )
    if not (resume or overwrite) and (folder.exists() or folder.is_symlink()):
        raise RunError(
            f"{folder} exists already; choose another --name, continue it with --resume, "
            "or replace it with --overwrite"
        )


def _is_empty(folder: Path) -> bool:
    """Whether it is a folder, of its own, with nothing complete in it."""
    try:
        begun = {
            temporary_path(folder / "config.toml")
        }  # as it is left where its writing is killed
        return set(folder.iterdir()) <= begun and not folder.is_symlink()
    except OSError:
        return False


def _set_aside(folder: Path) -> None:
    """What was measured of an unfinished training is not of the model that comes of it.

    It is kept, as `record.unfinished.json` and `gallery.unfinished.json`.
    """
    from splitveil.audits.flags import UNFINISHED

    try:
        names = read_record(folder / "record.json").flag_names
    except RunError:
        return  # none, or one that is refused wherever it is read
    for name in ("record", "gallery") if UNFINISHED in names else ():
        file = folder / f"{name}.json"
        with as_run_error(file):
            if file.exists():
                file.replace(folder / f"{name}.unfinished.json")


def _check_same(folder: Path, plan: Plan) -> None:
    """Refuse to resume with other settings, naming each one."""
    saved, saved_built = read_folder(folder)
    old, new = flat_config(saved) | asdict(saved_built), plan.settings() | asdict(plan.data)
    free = ("data_dir", "runs_dir", "name", "teacher")  # the teacher itself is compared
    changed = [
        f"{k} was {old.get(k)!r}, is {new[k]!r}"
        for k in new
        if k not in free and old.get(k) != new[k]
    ]
    if changed:
        raise CheckpointError(
            f"cannot resume {folder} with other settings: {'; '.join(changed)}; "
            "leave them as they were, or start a new run with another --name"
        )


def _start_folder(folder: Path, plan: Plan) -> None:
    with as_run_error(folder):
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    write_text(folder / "config.toml", plan.to_toml())


log = logging.getLogger("splitveil")
EXPORT_FOLDER = "export"  # below a run
CALIBRATION_IMAGES = 512


def export_run(
    run: Run,
    target: Path,
    *,
    name: str | None = None,
    int8: bool = False,
    attacker: bool = False,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Manifest:
    """Export a run with its audit's verdict; warns when it has none.

    Args:
        run: A trained run.
        target: Folder to write; appears when it is complete.
        name: What the model is called on the wire; None: as the run.
        int8: Also a client in eight bits, calibrated on images of the training set.
        attacker: Also the strongest decoder of the run's audit, fitted again.
        overwrite: Replace an existing export.
        progress: Told how far the attacker's fit has come.

    Returns:
        The manifest as it was written.
    """
    check_target(target, overwrite=overwrite)
    warn_unfinished(run)
    record = usable_record(run)
    if attacker and record is None:
        raise ConfigError(
            f"--attacker needs an audit of this state of {run.path}; audit it first: "
            f"splitveil audit {run.path}"
        )
    return export_model(
        run.model,
        run.built.image_shape,
        target,
        name=wire_name(run.path.resolve().name) if name is None else name,
        audit=None if record is None else verdict(record.to_dict()),
        source=source_of(run.path),
        calibration=calibration_images(run) if int8 else None,
        attacker=fit_attacker(run, record, progress) if attacker and record else None,
        classes=class_names(run.path, run.built.num_classes),
        overwrite=overwrite,
    )


def find_export(path: Path) -> Path:
    """The export at `path`, or that of the run there, made now if it has none."""
    if (path / FILE).is_file() or not (path / "config.toml").is_file():
        return path
    inside = path / EXPORT_FOLDER
    if not inside.exists():
        export_run(load_run(path), inside)
    elif not (path / CHECKPOINT).is_file():
        raise RunError(
            f"{path} has no checkpoint to compare its export with; serve the export itself: "
            f"splitveil serve {inside}"
        )
    elif read_manifest(inside).source.get("checkpoint") != source_of(path)["checkpoint"]:
        raise RunError(
            f"{inside} was made from another checkpoint than {path} has now; export it again: "
            f"splitveil export {path} --overwrite"
        )
    return inside


def warn_unfinished(run: Run) -> None:
    """Warn where the run's log says that its training has not ended."""
    try:
        done = last_epoch(run.path).get("epoch")
    except RunError:  # there is no log to ask
        return
    if done is not None and done < (run.config.epochs or 1):
        log.warning(
            f"the training of {run.path} has not ended, it is at epoch {done} of "
            f"{run.config.epochs}; finish it with --resume and export again"
        )


def usable_record(run: Run) -> Record | None:
    """The record of this state of a run; None, with a warning, where there is none."""
    record = run.record
    if record is None:
        log.warning(
            f"{run.path} has no audit: nobody has measured what its wire gives away; audit it"
        )
    elif record.training.get("steps") != run.trained()["steps"]:
        log.warning(
            f"the audit of {run.path} is of another state of its training and is left out; "
            "audit it again"
        )
        return None
    elif record.audit.aux == "val":
        log.warning(
            f"the audit of {run.path} is of validation images, by which settings are chosen; audit "
            "its test images before anybody relies on it"
        )
    return record


def source_of(run: Path) -> Json:
    """Which run and which state of it an export is made from."""
    return {"run": run.resolve().name, "checkpoint": sha256((run / CHECKPOINT).read_bytes())}


def calibration_images(run: Run) -> Rows:
    """Training images, evenly spread over the training set, as floats in [0, 1]."""
    dataset, splits = run.data()
    rows = splits.train.cpu().numpy()
    chosen = rows[np.linspace(0, len(rows) - 1, min(CALIBRATION_IMAGES, len(rows))).astype(int)]
    return np.asarray(dataset.images.cpu().numpy()[chosen] / 255, np.float32)
