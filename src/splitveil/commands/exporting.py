"""From a run to an export: its audit's verdict, images to calibrate on, the audit's attacker."""

import json
import logging
from pathlib import Path

import numpy as np

from splitveil.audits.trained_run import fit_attacker
from splitveil.commands import last_epoch
from splitveil.errors import ConfigError, RunError
from splitveil.runs import Run, load_run
from splitveil.serve.export import Attacker, export_model, verdict, wire_name
from splitveil.serve.manifest import FILE, Manifest, check_target, read_manifest, sha256
from splitveil.serve.wire import Rows
from splitveil.train.state import read_checkpoint
from splitveil.types import Json, Progress, Record, silent

log = logging.getLogger("splitveil")

EXPORT_FOLDER = "export"  # below a run
CHECKPOINT = "checkpoint.safetensors"
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
    fitted = None
    if attacker and record is not None:
        net, facts = fit_attacker(run, record, progress)
        fitted = Attacker(net=net, facts=facts)
    return export_model(
        run.model,
        run.built.image_shape,
        target,
        name=wire_name(run.path.resolve().name) if name is None else name,
        audit=None if record is None else verdict(record.to_dict()),
        source=source_of(run.path),
        calibration=calibration_images(run) if int8 else None,
        attacker=fitted,
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
    elif record.training.get("steps") != read_checkpoint(run.path / CHECKPOINT).meta.get("step"):
        log.warning(
            f"the audit of {run.path} is of another state of its training and is left out; "
            "audit it again"
        )
        return None
    elif record.audit.get("aux") == "val":
        log.warning(
            f"the audit of {run.path} is of validation images, by which settings are chosen; audit "
            "its test images before anybody relies on it"
        )
    return record


def class_names(path: Path, num_classes: int) -> tuple[str, ...]:
    """Names of the classes as the audit wrote them into a run's gallery; empty without one."""
    try:
        found = json.loads((path / "gallery.json").read_text(encoding="utf-8"))["classes"]
    except (OSError, ValueError, KeyError, TypeError):
        return ()
    right = isinstance(found, list) and len(found) == num_classes
    return tuple(map(str, found)) if right else ()


def source_of(run: Path) -> Json:
    """Which run and which state of it an export is made from."""
    return {"run": run.resolve().name, "checkpoint": sha256((run / CHECKPOINT).read_bytes())}


def calibration_images(run: Run) -> Rows:
    """Training images, evenly spread over the training set, as floats in [0, 1]."""
    dataset, splits = run.data()
    rows = splits.train.cpu().numpy()
    chosen = rows[np.linspace(0, len(rows) - 1, min(CALIBRATION_IMAGES, len(rows))).astype(int)]
    return np.asarray(dataset.images.cpu().numpy()[chosen] / 255, np.float32)
