"""Export: a trained split model becomes a folder with both halves as ONNX and their manifest.

The channel is not in the files: the client applies it from the manifest, with noise from its own
operating system. A network file that draws its noise itself could be seeded by whoever wrote it.
"""

import copy
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from splitveil.nets import Channel, Dropout, GaussianNoise, Quantise, SplitModel, TopK
from splitveil.nets.clip import Clip
from splitveil.serve import int8, repository
from splitveil.serve.faults import ExportError
from splitveil.serve.manifest import (
    CLIENT,
    CLIENT_INT8,
    FILE,
    IMAGE,
    LOGITS,
    SERVER,
    WIRE,
    Json,
    Manifest,
    Shape,
    check_name,
    sha256,
)
from splitveil.serve.session import open_half

Images = NDArray[np.float32]

OPSET = 18
MAX_DIFF = 1e-4  # of logits, between torch and ONNX
PROBES = 16  # images the halves are compared on


def export_model(
    model: SplitModel,
    image_shape: Shape,
    folder: Path,
    *,
    name: str,
    audit: Json | None = None,
    source: Json | None = None,
    calibration: Images | None = None,
    overwrite: bool = False,
) -> Manifest:
    """Write both halves, the manifest and a Triton model repository into `folder`.

    Args:
        model: Encoder, channel and head; copied, so the caller's stays as it is.
        image_shape: (c, h, w) of one image.
        folder: Appears when it is complete; an existing one is refused unless `overwrite`.
        name: What the model is called on the wire.
        audit: Verdict that the manifest carries, see `verdict`.
        source: Where the model comes from, for the manifest.
        calibration: Images (n, c, h, w) for an int8 client beside the float one; None: no such.
        overwrite: Replace an existing export (never a folder that is none).

    Raises:
        ExportError: When a channel stage is unknown or ONNX and torch disagree.
    """
    check_name(name)
    check_target(folder, overwrite=overwrite)
    encoder, head = (copy.deepcopy(m).cpu().eval() for m in (model.encoder, model.head))
    stages = stages_of(model.channel)
    probes = torch.rand(PROBES, *image_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        z, logits = encoder(probes), head(encoder(probes))
    if logits.ndim != 2:  # noqa: PLR2004
        raise ExportError(f"the head must give (n, classes), got {tuple(logits.shape)}")
    with replaced(folder) as place:
        write_onnx(encoder, probes[:2], place / CLIENT, IMAGE, WIRE)
        write_onnx(head, z[:2], place / SERVER, WIRE, LOGITS)
        parity = compare(place, probes.numpy(), logits.numpy())
        if calibration is not None:
            int8.quantise_client(place / CLIENT, place / CLIENT_INT8, calibration)
            parity |= int8.compare(place, calibration)
        shape, classes = tuple(z.shape[1:]), int(logits.shape[1])
        repository.write(place, name, shape, classes)
        manifest = Manifest(
            name=name,
            image_shape=tuple(image_shape),
            wire_shape=shape,
            num_classes=classes,
            stages=stages,
            files=hashes(place),
            parity=parity,
            audit=audit,
            versions=versions(),
            source=source or {},
        )
        (place / FILE).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


_STAGES: dict[type[nn.Module], tuple[str, tuple[str, ...]]] = {
    GaussianNoise: ("gaussian", ("std",)),
    Dropout: ("dropout", ("p",)),
    TopK: ("topk", ("prune",)),
    Quantise: ("quantise", ("bits",)),
    Clip: ("clip", ("low", "high")),
}


def stages_of(channel: nn.Module) -> tuple[Json, ...]:
    """The channel as plain JSON; an unknown stage is refused, never left out.

    >>> stages_of(Channel([GaussianNoise(0.1), Quantise(4)]))
    ({'kind': 'gaussian', 'std': 0.1}, {'kind': 'quantise', 'bits': 4})
    """
    parts = list(channel.stages) if type(channel) is Channel else [channel]
    unknown = [type(s).__name__ for s in parts if type(s) not in _STAGES]
    if unknown:
        known = ", ".join(kind.__name__ for kind in _STAGES)
        raise ExportError(
            f"channel stage {unknown[0]} cannot be exported; the client knows {known}. A stage "
            "that draws nothing can be part of the encoder instead"
        )
    described = [(s, *_STAGES[type(s)]) for s in parts]
    return tuple({"kind": kind} | {k: getattr(s, k) for k in keys} for s, kind, keys in described)


def write_onnx(module: nn.Module, example: torch.Tensor, path: Path, given: str, got: str) -> None:
    """One half as ONNX, for any number of rows."""
    with quiet():
        torch.onnx.export(
            module,
            (example,),
            path,
            input_names=[given],
            output_names=[got],
            opset_version=OPSET,
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            external_data=False,
            verbose=False,
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Without the exporter's remarks about libraries that are not installed."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def compare(place: Path, probes: Images, logits: Images) -> Json:
    """How far the ONNX halves are from torch; raises when it is too far."""
    client, server = (open_half((place / f).read_bytes(), 1) for f in (CLIENT, SERVER))
    worst = float(np.abs(server(client(probes)) - logits).max())
    if not worst <= MAX_DIFF:
        raise ExportError(
            f"ONNX and torch disagree: logits differ by {worst:.3g}, allowed {MAX_DIFF:g}; the "
            "model does something that the exporter does not translate"
        )
    return {"images": len(probes), "logits_max_abs_diff": worst}


def hashes(place: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder, by relative path."""
    files = sorted(p for p in place.rglob("*") if p.is_file())
    return {p.relative_to(place).as_posix(): sha256(p.read_bytes()) for p in files}


def versions() -> Json:
    """What made the files."""
    import onnx
    import onnxruntime  # type: ignore[import-untyped]

    return {
        "splitveil": version("splitveil"),
        "torch": str(torch.__version__),
        "onnx": onnx.__version__,
        "onnxruntime": onnxruntime.__version__,
        "opset": OPSET,
    }


def verdict(record: Json) -> Json:
    """What an audit's `record.json` says, for the manifest: the claim that the wire must keep."""
    keys = ("accuracy", "strongest", "worst_case", "ceiling", "leakage", "true_rate_nats", "audit")
    found: dict[str, Any] = {k: record.get(k) for k in keys}
    flags = record.get("flags") or []
    return found | {"flags": [f.get("name") for f in flags if isinstance(f, dict)]}


def check_target(folder: Path, *, overwrite: bool) -> None:
    """Refuse to replace what was not asked to be replaced, or is no export."""
    if not (folder.exists() or folder.is_symlink()):
        return
    if not overwrite:
        raise ExportError(f"{folder} exists already; choose another --out or give --overwrite")
    if not (folder / FILE).is_file():
        raise ExportError(
            f"{folder} is no export (it has no {FILE}) and will not be overwritten; choose another "
            "--out or remove it yourself"
        )


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """A new folder to fill, which takes the place of `folder` when the block succeeds."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as err:
        raise ExportError(f"cannot write {folder}: {err.strerror}; choose another --out") from err
    fresh, old = scratch / "new", scratch / "old"
    try:
        fresh.mkdir()
        yield fresh
        if folder.exists():
            os.rename(folder, old)
        os.rename(fresh, folder)
    except OSError as err:
        if old.exists() and not folder.exists():
            os.rename(old, folder)
        raise ExportError(f"cannot write {folder}: {err.strerror or err}; free some space") from err
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
