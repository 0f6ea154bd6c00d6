"""Export: a trained split model becomes a folder with both halves as ONNX and their manifest.

The channel is not in the files: the client applies it from the manifest, with noise from its own
operating system. A network file that draws its noise itself could be seeded by whoever wrote it.
"""

import copy
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from splitveil.nets import SplitModel
from splitveil.serve import int8, repository
from splitveil.serve.channel import parts_of, stages_of, write_noise
from splitveil.serve.faults import ExportError
from splitveil.serve.folders import check_target, hashes, replaced
from splitveil.serve.manifest import (
    ATTACKER,
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
)
from splitveil.serve.session import open_half

Images = NDArray[np.float32]

OPSET = 18
MAX_DIFF = 1e-4  # of logits, between torch and ONNX
PROBES = 16  # images the halves are compared on


@dataclass(frozen=True, kw_only=True)
class Attacker:
    """A fitted decoder of this client, from smashed data to images, and what is known of it."""

    net: nn.Module
    facts: Json


def export_model(
    model: SplitModel,
    image_shape: Shape,
    folder: Path,
    *,
    name: str,
    audit: Json | None = None,
    source: Json | None = None,
    calibration: Images | None = None,
    attacker: Attacker | None = None,
    classes: Sequence[str] = (),
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
        attacker: A decoder that shows what the wire gives away; None: no such.
        classes: Their names, in order; empty where they are not known.
        overwrite: Replace an existing export (never a folder that is none).

    Raises:
        ExportError: When a channel stage is unknown or ONNX and torch disagree.
    """
    check_name(name)
    check_target(folder, overwrite=overwrite)
    parts = parts_of(model, image_shape)
    stages = stages_of(parts.stages)
    probes = torch.rand(PROBES, *image_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        z = parts.encoder(probes)
        logits = parts.head(z)
    if logits.ndim != 2:  # noqa: PLR2004
        raise ExportError(f"the head must give (n, classes), got {tuple(logits.shape)}")
    with replaced(folder) as place:
        write_onnx(parts.encoder, probes[:2], place / CLIENT, IMAGE, WIRE)
        write_onnx(parts.head, z[:2], place / SERVER, WIRE, LOGITS)
        write_noise(parts.stages, place)
        parity = compare(place, probes.numpy(), logits.numpy())
        if calibration is not None:
            int8.quantise_client(place / CLIENT, place / CLIENT_INT8, calibration)
            parity |= int8.compare(place, calibration)
        if attacker is not None:
            parity |= write_attacker(attacker.net, z, tuple(image_shape), place)
        shape, num_classes = tuple(z.shape[1:]), int(logits.shape[1])
        repository.write(place, name, shape, num_classes)
        manifest = Manifest(
            name=name,
            image_shape=tuple(image_shape),
            wire_shape=shape,
            num_classes=num_classes,
            stages=stages,
            files=hashes(place),
            parity=parity,
            audit=audit,
            versions=versions(),
            source=source or {},
            attacker=None if attacker is None else attacker.facts,
            classes=tuple(classes),
        )
        (place / FILE).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def write_attacker(net: nn.Module, z: torch.Tensor, image_shape: Shape, place: Path) -> Json:
    """`attacker.onnx`: smashed data to images; how far from torch, refused when too far."""
    net = copy.deepcopy(net).cpu().eval()
    with torch.no_grad():
        images = net(z).numpy()
    if images.shape[1:] != image_shape:
        raise ExportError(f"the attacker gives images {images.shape[1:]}, expected {image_shape}")
    write_onnx(net, z[:2], place / ATTACKER, WIRE, IMAGE)
    found = open_half((place / ATTACKER).read_bytes(), 1)(z.numpy())
    worst = float(np.abs(found - images).max())
    if not worst <= MAX_DIFF:
        raise ExportError(
            f"ONNX and torch disagree: the attacker's images differ by {worst:.3g}, allowed "
            f"{MAX_DIFF:g}; export without --attacker"
        )
    return {"attacker_max_abs_diff": worst}


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
    if isinstance(found["audit"], dict):  # its command names folders of the auditor's machine
        found["audit"] = {k: v for k, v in found["audit"].items() if k != "command"}
    flags = record.get("flags") or []
    return found | {"flags": [f.get("name") for f in flags if isinstance(f, dict)]}
