"""Runs: trained by `fit`, read by `load_run`, attacked by `audit`, exported by `export_run`."""

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from splitveil.audits.flags import UNFINISHED
from splitveil.audits.trained_run import audit, fit_attacker
from splitveil.config.machine import computing_threads
from splitveil.config.resolve import (
    DataFacts,
    Plan,
    find_device,
    flat_config,
    merge,
    plan_of,
    read_folder,
    resolve,
)
from splitveil.config.run_config import PLACES, ROUNDING, RunConfig
from splitveil.cuda import to_device
from splitveil.data.catalogue import load
from splitveil.data.dataset import Dataset, fingerprint
from splitveil.data.splits import Splits, make_splits
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
from splitveil.record.files import last_epoch, saved_class_names
from splitveil.record.schema import Record, read_record
from splitveil.rng import seeded_globals
from splitveil.serve.export import (
    audit_summary,
    check_target,
    check_verdict,
    export_model,
    wire_name,
)
from splitveil.serve.manifest import FILE, Manifest, read_manifest, sha256
from splitveil.serve.wire import Rows
from splitveil.threat import Victim
from splitveil.train.distillation import Teacher, check_same_teacher, check_teacher
from splitveil.train.state import CHECKPOINT, load_module, read_checkpoint, read_meta


def flush_denormals() -> None:
    """Compute with zero in place of denormal numbers, in all threads started after this call.

    The gated surrogates produce many denormals; on a CPU they would train about ten times slower.
    """
    torch.set_flush_denormal(True)


class Run:
    """A trained split model and its folder, from `fit` or `load_run`.

    Args:
        path: The run's folder.
        config: Its settings, with nothing left to defaults.
        built: What is known of its data: image shape, number of classes, hash.
        model: The trained model; it is put into eval mode.

    Example:
        `splitveil.load_run("runs/first").victim.send(images)`
    """

    def __init__(self, path: Path, config: RunConfig, built: DataFacts, model: SplitModel) -> None:
        self.path, self.config, self.built, self.model = path, config, built, model
        self.model.eval()

    @property
    def victim(self) -> Victim:
        """The deployed client, frozen: what an attacker meets."""
        return self.model.victim()

    @property
    def noise_std(self) -> float:
        """Standard deviation of the Gaussian noise that the deployed channel adds; 0 without."""
        return float(getattr(self.model.channel, "noise_std", 0.0))

    @property
    def record(self) -> Record | None:
        """The record of the last audit; None if there was none."""
        path = self.path / "record.json"
        return read_record(path) if path.is_file() else None

    def data(self, progress: Progress = silent) -> tuple[Dataset, Splits]:
        """The dataset and splits it was trained with; data that have changed since are an error."""
        config = self.config
        dataset = load(config.dataset, config.data_dir, progress)
        if fingerprint(dataset) != self.built.data_hash:
            raise AuditError(
                f"the data of '{config.dataset}' are not those the run was trained on: their hash "
                f"is {fingerprint(dataset)}, expected {self.built.data_hash}; point data_dir to "
                "the original data, or train again"
            )
        return dataset, splits_of(config, dataset)

    def trained(self) -> Json:
        """Its training: `steps`, `seconds`, `peak_bytes`, accuracies on val, `teacher` or None."""
        meta, last = read_meta(self.path / CHECKPOINT), last_epoch(self.path)
        return {
            "steps": meta["step"],
            "seconds": meta.get("seconds"),
            "peak_bytes": meta.get("peak_bytes"),
            "val_accuracy": last.get("val_accuracy"),
            "val_own_accuracy": last.get("val_own_accuracy"),
            "teacher": meta.get("passport", {}).get("teacher"),
        }

    audit = audit


def fit(
    config: RunConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Run:
    """Train a run into `runs/<name>/`.

    Args:
        config: The run's settings; each one that is None gets the default of its dataset.
        resume: Continue the run in the folder where it stopped, bit for bit on a CPU.
        overwrite: Replace the run in the folder. Without either, an existing folder is an error.
        progress: Told of every step.

    Returns:
        The trained run.

    Example:
        `run = splitveil.fit(splitveil.RunConfig(dataset="digits", defence="veil", name="first"))`
    """
    flush_denormals()
    if resume and config.precision == "auto":
        config = with_saved_precision(config)
    plan = resolve(config)  # validates what does not depend on the data, before any download
    with as_run_error(plan.folder):
        _check_folder(plan.folder, resume=resume, overwrite=overwrite)
    with computing_threads(config.threads):
        return _train(plan, resume=resume, overwrite=overwrite, progress=progress)


def _train(plan: Plan, *, resume: bool, overwrite: bool, progress: Progress) -> Run:
    """Load the data and the teacher, check the folder, train."""
    config, folder = plan.config, plan.folder
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
    if parts.model.exit is not None:
        parts.model.exit.check_images(len(splits.val))
    passport: Json = {"versions": versions(), "splits": splits.hashes()}
    if teacher is not None:
        passport["teacher"] = teacher.noted
    from splitveil.train.loop import train_run  # imports Fabric, which takes seconds

    with folder_lock(folder):
        # Again, under the lock: meanwhile another process may have made the folder.
        _check_folder(folder, resume=resume, overwrite=overwrite)
        if resume:
            _set_aside(folder)
        else:
            _start_folder(folder, plan)
        train_run(
            plan, parts, dataset, splits, progress, passport=passport, teacher=teacher,
            resume=resume,
        )  # fmt: skip
        _set_aside(folder)  # the run may have been audited while it was trained
    if parts.model.exit is not None and parts.model.exit.unsettled:
        raise ConfigError(f"{parts.model.exit.unsettled}. {folder} is kept, and sends every image")
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
    """Train with settings from several sources, which are those of `merge`; see `fit`.

    The settings of a run that is resumed are the base that all sources override.
    """
    config = merge(recipe, file, pairs, options)
    if resume and not overwrite:  # `fit` refuses both together
        saved = flat_config(read_folder(config.folder)[0])
        config = merge(recipe, file, pairs, options, saved=saved)
    return fit(config, resume=resume, overwrite=overwrite, progress=progress)


def load_run(path: str | Path) -> Run:
    """Read a run from its folder; the dataset is not needed.

    Args:
        path: The folder, such as "runs/first".

    Returns:
        The run, on the GPU where there is one unless it was trained with device "cpu".

    Example:
        `run = splitveil.load_run("runs/first")`
    """
    folder = Path(path)
    config, built = read_folder(folder)
    device = find_device("cpu" if config.device == "cpu" else "auto")
    with seeded_globals(0):
        model = plan_of(config, built).build_model()
    load_module(model, read_checkpoint(folder / CHECKPOINT).part("model"), "model")
    to_device(model, torch.device(device))
    return Run(folder, config, built, model)


def open_teacher(config: RunConfig) -> Teacher | None:
    """Load the teacher that a configuration names; None if it names none."""
    if config.teacher is None:
        for key in ("teacher_share", "teacher_temperature"):
            if getattr(config, key) != getattr(RunConfig, key):
                raise ConfigError(
                    f"{key} is {getattr(config, key)}, but there is no teacher; add "
                    f"--set teacher=RUN with the folder of a trained run, or leave {key} out"
                )
        return None
    folder = teacher_folder(config.teacher)
    if folder.resolve() == config.folder.resolve():
        raise ConfigError(
            f"{folder} cannot be its own teacher; name another run, or give this one a --name"
        )
    return load_teacher(folder)


def load_teacher(folder: Path) -> Teacher:
    """Load a run as a teacher.

    A teacher answers without its channel. Noise may be left out so; any other stage changes what
    the server has learnt to expect, so a run with such a stage is refused.
    """
    try:
        run = load_run(folder)
    except SplitVeilError as err:
        raise ConfigError(
            f"the teacher {folder} cannot be used: {err} (in the teacher's folder)"
        ) from err
    stages = cast(nn.ModuleList, run.model.channel.stages)
    more = [type(stage).__name__ for stage in stages if not isinstance(stage, GaussianNoise)]
    if more:
        raise ConfigError(
            f"the teacher {folder} has channel stages other than noise ({', '.join(more)}), but a "
            "teacher answers without its channel; train one with --defence none"
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
    """The folder that the setting `teacher` names."""
    if not text.strip():
        raise ConfigError(f"teacher must be the folder of a trained run, got '{text}'")
    return Path(text).expanduser()


def load_checked_teacher(config: RunConfig, dataset: Dataset) -> Teacher | None:
    """Load the teacher of a run on these data and check it; None if the run has none."""
    teacher = open_teacher(config)
    if teacher is not None:
        check_teacher(teacher, config, dataset, fingerprint(dataset))
    return teacher


def splits_of(config: RunConfig, dataset: Dataset) -> Splits:
    """The images that a run trains on, chooses settings by, and is tested on."""
    return make_splits(
        dataset, split_seed=config.split_seed, held_out=config.held_out, final=config.final
    )


def _check_folder(folder: Path, *, resume: bool, overwrite: bool) -> None:
    if resume and overwrite:
        raise RunError("--resume and --overwrite exclude each other; give one")
    if resume and not (folder / CHECKPOINT).is_file():
        raise RunError(
            f"nothing to resume: {folder} has no checkpoint; start it again with --overwrite"
        )
    if _is_empty(folder):  # of a training that was killed before its first file
        return
    if overwrite and folder.exists() and not (folder / "config.toml").is_file():
        raise RunError(
            f"{folder} is not a run (it has no config.toml) and is not overwritten; choose "
            "another --name, or remove the folder yourself"
        )
    if not (resume or overwrite) and (folder.exists() or folder.is_symlink()):
        raise RunError(
            f"{folder} exists already; choose another --name, continue it with --resume, "
            "or replace it with --overwrite"
        )


def _is_empty(folder: Path) -> bool:
    """Whether it is a folder, not a link, without a complete file."""
    half_written = {temporary_path(folder / "config.toml")}  # left where its writing was killed
    try:
        return set(folder.iterdir()) <= half_written and not folder.is_symlink()
    except OSError:
        return False


def _set_aside(folder: Path) -> None:
    """Rename the record of an unfinished training: it is not of the model that comes out.

    Its files become `record.unfinished.json` and `gallery.unfinished.json`.
    """
    try:
        names = read_record(folder / "record.json").flag_names
    except RunError:
        return  # there is no record, or a broken one, which every reader refuses
    for name in ("record", "gallery") if UNFINISHED in names else ():
        file = folder / f"{name}.json"
        with as_run_error(file):
            if file.exists():
                file.replace(folder / f"{name}.unfinished.json")


def with_saved_precision(config: RunConfig) -> RunConfig:
    """The settings of a resumed run, in the precision that it began with."""
    if not (config.folder / "config.toml").is_file():  # `fit` says that there is nothing to resume
        return config
    return replace(config, precision=read_folder(config.folder)[0].precision)


def _check_same(folder: Path, plan: Plan) -> None:
    """Refuse to resume a run with other settings than it began with, and name each."""
    saved, saved_built = read_folder(folder)
    old, new = flat_config(saved) | asdict(saved_built), plan.settings() | asdict(plan.data)
    # These are places and may change; the teacher's model is compared by `check_same_teacher`.
    compared = new.keys() - {*PLACES, *ROUNDING, "name", "teacher"}
    changed = [k for k in new if k in compared and old.get(k) != new[k]]
    if changed:
        told = "; ".join(f"{k} was {old.get(k)!r}, is {new[k]!r}" for k in changed)
        raise CheckpointError(
            f"cannot resume {folder} with other settings: {told}; "
            "give the settings it began with, or start a new run with another --name"
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
    sign: Path | None = None,
    progress: Progress = silent,
) -> Manifest:
    """Export client and server of a run, with the verdict of its audit; warns if it has none.

    Args:
        run: A trained run.
        target: Folder to write; it appears when it is complete.
        name: Name of the model on the wire; None for that of the run.
        int8: Whether to add a client in eight bits, calibrated on images of the training set; an
            exit rule has a threshold of its own for it.
        attacker: Whether to add the strongest decoder of the run's audit, fitted again.
        overwrite: Whether to replace an existing export.
        sign: Private key to sign it with; None: no signature.
        progress: Told how far the attacker's fit has come.

    Returns:
        The manifest as it was written.
    """
    check_target(target, overwrite=overwrite)
    if attacker and run.model.silent:
        raise ConfigError(
            f"{run.path} sends nothing (defence '{run.config.defence}'), so there is nothing that "
            "an attacker could see; export without --attacker"
        )
    warn_unfinished(run)
    record = usable_record(run)
    if attacker and record is None:
        raise ConfigError(
            f"--attacker needs an audit of {run.path} as it is now; audit it first: splitveil "
            f"audit {run.path}"
        )
    told = None if record is None else audit_summary(record.to_dict())
    if told is not None:
        check_verdict(told, run.model)  # before an attacker is fitted, which takes long
    return export_model(
        run.model,
        run.built.image_shape,
        target,
        name=wire_name(run.path.resolve().name) if name is None else name,
        audit=told,
        source=source_of(run.path),
        calibration=calibration_images(run) if int8 else None,
        validation=None if run.model.exit is None else validation_images(run),
        attacker=fit_attacker(run, record, progress) if attacker and record else None,
        classes=saved_class_names(run.path, run.built.num_classes),
        overwrite=overwrite,
        sign=sign,
    )


def find_export(path: Path) -> Path:
    """The export at `path`, or that of the run at `path`, which is made now if it has none."""
    if (path / FILE).is_file() or not (path / "config.toml").is_file():
        return path
    inside = path / EXPORT_FOLDER
    if not inside.exists():
        export_run(load_run(path), inside)
    elif not (path / CHECKPOINT).is_file():
        raise RunError(
            f"{path} has no checkpoint, so nothing shows whether its export is up to date; serve "
            f"the export itself: splitveil serve {inside}"
        )
    elif read_manifest(inside).source.get("checkpoint") != source_of(path)["checkpoint"]:
        raise RunError(
            f"{inside} was made from another checkpoint than {path} has now; export it again: "
            f"splitveil export {path} --overwrite"
        )
    return inside


def warn_unfinished(run: Run) -> None:
    """Warn if the run's log says that its training has not ended."""
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
    """The record of a run as it is now; None, with a warning, if there is none.

    A client that sends nothing needs none.
    """
    record = run.record
    if record is None and run.model.silent:
        return None
    if record is None:
        log.warning(
            f"{run.path} has no audit: nobody has measured what leaks from what it sends; audit it "
            f"with splitveil audit {run.path}"
        )
    elif record.training.get("steps") != run.trained()["steps"]:
        log.warning(
            f"{run.path} was trained further after its audit, which is left out; audit it again"
        )
        return None
    elif record.audit.aux == "val":
        log.warning(
            f"the audit of {run.path} scored validation images, by which settings are chosen; "
            "audit its test images before you rely on it"
        )
    return record


def source_of(run: Path) -> Json:
    """The run that an export is made from, and the hash of its checkpoint."""
    return {"run": run.resolve().name, "checkpoint": sha256((run / CHECKPOINT).read_bytes())}


def calibration_images(run: Run) -> Rows:
    """Training images, evenly spread over the training set, as floats in [0, 1]."""
    dataset, splits = run.data()
    rows = splits.train.cpu().numpy()
    chosen = rows[np.linspace(0, len(rows) - 1, min(CALIBRATION_IMAGES, len(rows))).astype(int)]
    return _as_floats(dataset, chosen)


def validation_images(run: Run) -> Rows:
    """The images by which an exit rule was set, as floats in [0, 1]."""
    dataset, splits = run.data()
    return _as_floats(dataset, splits.val.cpu().numpy())


def _as_floats(dataset: Dataset, rows: NDArray[np.int64]) -> Rows:
    return np.asarray(dataset.images.cpu().numpy()[rows] / 255, np.float32)
