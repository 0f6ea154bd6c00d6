"""A run from configuration to folder and back: `fit`, `load_run`, `Run`."""

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from splitveil import config as configuration
from splitveil.config import RunConfig
from splitveil.data import Dataset, Splits, load, make_splits
from splitveil.errors import AuditError, CheckpointError, RunError
from splitveil.nets import SplitModel
from splitveil.rng import seeded_globals
from splitveil.settings import read_toml, write_toml
from splitveil.train.checkpoint import load_module, read_checkpoint
from splitveil.train.files import beside, explain_os_error, held, write_text
from splitveil.types import Json, Progress, Record, Victim, silent

EARLIER = {"ramp": 0.0, "sparse_place": "wire"}  # what a setting was before folders named it


def prepare_process() -> None:
    """Flush denormals to zero: must be the process's first torch statement to reach all threads.

    The gated forms produce many; without this they train an order of magnitude slower on a CPU.
    """
    torch.set_flush_denormal(True)


@dataclass(frozen=True)
class Built:
    """What a run folder must remember of its data to rebuild the model without them."""

    image_shape: tuple[int, int, int]
    num_classes: int
    data_hash: str


class Run:
    """A trained split model and its folder."""

    def __init__(self, path: Path, config: RunConfig, built: Built, model: SplitModel) -> None:
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
        if not path.is_file():
            return None
        try:
            return Record.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as err:
            raise RunError(f"{path} is broken: {err}; audit the run again") from err

    def data(self, progress: Progress = silent) -> tuple[Dataset, Splits]:
        """The dataset and splits it was trained with; refuses data that have changed since."""
        return load_data(self, progress)

    def trained(self) -> Json:
        """Its training: `steps`, `seconds`, `peak_bytes`, and `teacher` or None."""
        meta = read_checkpoint(self.path / "checkpoint.safetensors").meta
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
        from splitveil.audits.trained_run import audit_run

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
    """Attack a run and return the record; see `Run.audit`."""
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
    """
    prepare_process()
    folder = config.folder
    with explain_os_error(folder):
        _check_folder(folder, resume=resume, overwrite=overwrite)
    configuration.refuse(config)
    from splitveil.teaching import check_same_teacher, check_teacher, open_teacher

    teacher = open_teacher(config)
    dataset = load(config.dataset, config.data_dir, progress)
    config = configuration.resolve(config, dataset)
    built = Built(dataset.image_shape, dataset.num_classes, fingerprint(dataset))
    splits = make_splits(
        dataset,
        split_seed=config.split_seed,
        held_out=config.held_out,
        final=config.final,
    )
    if teacher is not None:
        check_teacher(teacher, config, dataset)
    if resume:
        _check_same(folder, config, built)
        check_same_teacher(teacher, folder)
    from splitveil.training import build, train_run

    parts = build(config, built.image_shape, built.num_classes)
    with held(folder):
        _check_folder(folder, resume=resume, overwrite=overwrite)  # others may have been quicker
        if resume:
            _set_aside(folder)
        else:
            _start_folder(folder, config, built)
        train_run(config, dataset, splits, parts, progress, teacher=teacher, resume=resume)
        _set_aside(folder)  # somebody may have audited it meanwhile
    return Run(folder, config, built, parts.model)


def load_run(path: str | Path) -> Run:
    """Read a run folder back; the data are not needed."""
    folder = Path(path)
    config, built = read_folder(folder)
    device = configuration.find_device("cpu" if config.device == "cpu" else "auto")
    with seeded_globals(0):
        model = configuration.build_model(config, built.image_shape, built.num_classes)
    load_module(model, read_checkpoint(folder / "checkpoint.safetensors").part("model"), "model")
    return Run(folder, config, built, model.to(device))


def load_data(run: Run, progress: Progress = silent) -> tuple[Dataset, Splits]:
    """The dataset and splits a run was trained with; refuses data that have changed since."""
    config = run.config
    dataset = load(config.dataset, config.data_dir, progress)
    if fingerprint(dataset) != run.built.data_hash:
        raise AuditError(
            f"the data of '{config.dataset}' are not those the run was trained on: hash "
            f"{fingerprint(dataset)}, expected {run.built.data_hash}; point data_dir to the "
            "original data or train again"
        )
    splits = make_splits(
        dataset, split_seed=config.split_seed, held_out=config.held_out, final=config.final
    )
    return dataset, splits


def fingerprint(dataset: Dataset) -> str:
    """First 16 hex digits of the SHA-256 of the images' and labels' bytes."""
    digest = hashlib.sha256(dataset.images.cpu().numpy().tobytes())
    digest.update(dataset.labels.cpu().numpy().astype("<i8").tobytes())
    return digest.hexdigest()[:16]


def planned_steps(config: RunConfig, images: int) -> int:
    """Steps of a resolved run that is trained on so many images to its end.

    >>> planned_steps(RunConfig(epochs=3, batch_size=128), 1000)
    21
    """
    return (config.epochs or 1) * (images // min(config.batch_size or images, images))


def flat_config(config: RunConfig) -> Json:
    """The run's and the defence's settings in one flat table."""
    run = {k: v for k, v in asdict(config).items() if k != "settings" and v is not None}
    return run | configuration.build_defence(config).settings()


def read_folder(folder: Path) -> tuple[RunConfig, Built]:
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
        built = Built(
            (shape[0], shape[1], shape[2]), int(flat.pop("num_classes")), flat.pop("data_hash")
        )
    except (KeyError, ValueError, TypeError, IndexError) as err:
        raise RunError(f"{path} lacks {err}; it was not written by a training run") from err
    defence = configuration.find_defence(str(flat.get("defence", RunConfig.defence)))
    flat = {k: v for k, v in EARLIER.items() if k in defence.settings()} | flat
    place = folder.resolve() if folder.name in ("", "..") else folder  # `.` has no name
    flat["runs_dir"], flat["name"] = str(place.parent), place.name
    if not configuration.NAME.fullmatch(place.name):
        raise RunError(
            f"cannot read the run {folder}: its {configuration.NAME_RULE}, got '{place.name}'; "
            "rename the folder"
        )
    return configuration.make_config(flat), built


def _check_folder(folder: Path, *, resume: bool, overwrite: bool) -> None:
    if resume and overwrite:
        raise RunError("--resume and --overwrite exclude each other; give one")
    if resume and not (folder / "checkpoint.safetensors").is_file():
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
        begun = {beside(folder / "config.toml")}  # as it is left where its writing is killed
        return set(folder.iterdir()) <= begun and not folder.is_symlink()
    except OSError:
        return False


def _set_aside(folder: Path) -> None:
    """What was measured of an unfinished training is not of the model that comes of it.

    It is kept, as `record.unfinished.json` and `gallery.unfinished.json`.
    """
    from splitveil.audits.flags import UNFINISHED

    try:
        flags = json.loads((folder / "record.json").read_bytes()).get("flags") or []
        names = [flag["name"] for flag in flags]
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return  # none, or one that is refused wherever it is read
    for name in ("record", "gallery") if UNFINISHED in names else ():
        file = folder / f"{name}.json"
        with explain_os_error(file):
            if file.exists():
                file.replace(folder / f"{name}.unfinished.json")


def _check_same(folder: Path, config: RunConfig, built: Built) -> None:
    """Refuse to resume with other settings, naming each one."""
    saved, saved_built = read_folder(folder)
    old, new = flat_config(saved) | asdict(saved_built), flat_config(config) | asdict(built)
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


def _start_folder(folder: Path, config: RunConfig, built: Built) -> None:
    with explain_os_error(folder):
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    write_text(folder / "config.toml", write_toml(flat_config(config) | asdict(built)))
