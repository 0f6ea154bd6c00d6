"""From a run to an export: its audit's verdict, images to calibrate on, the audit's attacker."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from splitveil.runs import Run

CALIBRATION_IMAGES = 512


def export_run(
    run: "Run",
    target: Path,
    *,
    name: str | None = None,
    int8: bool = False,
    attacker: bool = False,
    overwrite: bool = False,
) -> Any:  # noqa: ANN401 - Manifest, which must not be imported at module level
    """Export a run with its audit's verdict; warns when it has none."""
    from splitveil.audits.trained_run import fit_attacker
    from splitveil.console import progress_bar, warn
    from splitveil.errors import ConfigError
    from splitveil.serve.export import Attacker, export_model, verdict
    from splitveil.serve.folders import check_target

    check_target(target, overwrite=overwrite)
    done = epochs_of(run.path)
    if done is not None and done < (run.config.epochs or 1):
        warn(
            f"the training of {run.path} has not ended, it is at epoch {done} of "
            f"{run.config.epochs}; finish it with --resume and export again"
        )
    record = run.record
    if record is None:
        warn(f"{run.path} has no audit: nobody has measured what its wire gives away; audit it")
    elif record.training.get("steps") != steps_of(run.path):
        warn(
            f"the audit of {run.path} is of another state of its training and is left out; "
            "audit it again"
        )
        record = None
    elif record.audit.get("aux") == "val":
        warn(
            f"the audit of {run.path} is of validation images, by which settings are chosen; audit "
            "its test images before anybody relies on it"
        )
    fitted = None
    if attacker:
        if record is None:
            raise ConfigError(
                f"--attacker needs an audit of this state of {run.path}; audit it first: "
                f"splitveil audit {run.path}"
            )
        with progress_bar("attacker") as bar:
            net, facts = fit_attacker(run, record, bar)
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
        classes=class_names(run),
        overwrite=overwrite,
    )


def wire_name(run: str) -> str:
    """A run's name as a model's, which allows less.

    >>> wire_name("clip+noise"), wire_name("+_" + "x" * 99) == "x" * 64
    ('clip-noise', True)
    """
    import re

    return re.sub(r"[^A-Za-z0-9._-]+", "-", run).lstrip("._-")[:64] or "model"


def class_names(run: "Run") -> tuple[str, ...]:
    """Names of the classes as the audit wrote them into the run's gallery; empty without one."""
    import json

    try:
        found = json.loads((run.path / "gallery.json").read_text(encoding="utf-8"))["classes"]
    except (OSError, ValueError, KeyError, TypeError):
        return ()
    right = isinstance(found, list) and len(found) == run.built.num_classes
    return tuple(map(str, found)) if right else ()


def steps_of(run: Path) -> int | None:
    """How many steps the checkpoint of a run has seen."""
    from splitveil.train.checkpoint import read_checkpoint

    return read_checkpoint(run / "checkpoint.safetensors").meta.get("step")


def epochs_of(run: Path) -> int | None:
    """How many epochs a run was trained for; None where its log does not tell."""
    from splitveil.commands import last_epoch
    from splitveil.errors import RunError

    try:
        return last_epoch(run).get("epoch")
    except RunError:
        return None


def source_of(run: Path) -> dict[str, Any]:
    """Which run and which state of it an export is made from."""
    from splitveil.serve.manifest import sha256

    content = (run / "checkpoint.safetensors").read_bytes()
    return {"run": run.resolve().name, "checkpoint": sha256(content)}


def calibration_images(run: "Run") -> "NDArray[np.float32]":
    """Training images, evenly spread over the training set, as floats in [0, 1]."""
    import numpy as np

    from splitveil.runs import load_data

    dataset, splits = load_data(run)
    rows = splits.train.cpu().numpy()
    chosen = rows[np.linspace(0, len(rows) - 1, min(CALIBRATION_IMAGES, len(rows))).astype(int)]
    return np.asarray(dataset.images.cpu().numpy()[chosen] / 255, np.float32)
