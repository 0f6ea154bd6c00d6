"""Export: a trained split model as a folder with both halves in ONNX and their manifest.

The channel is not part of the ONNX files: the client applies it from the manifest, with noise from
its own operating system. Noise drawn inside a network file could be seeded by its author.
"""

import copy
import logging
import re
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from splitveil.errors import ExportError
from splitveil.nets import channel as kinds
from splitveil.nets.channel import Channel, GaussianNoise, LearnedNoise, Quantise, SparseCoding
from splitveil.nets.split import SplitModel, with_stage_shapes
from splitveil.serve.manifest import (
    ATTACKER,
    CLIENT,
    CLIENT_INT8,
    FILE,
    IMAGE,
    LOGITS,
    SERVER,
    WIRE,
    Manifest,
    OnnxHalf,
    check_name,
    check_target,
    hashes,
    new_folder,
    open_half,
)
from splitveil.serve.runtime import onnxruntime, onnxruntime_quantisation
from splitveil.serve.stages import STAGES, mean_std, pack_noise
from splitveil.serve.wire import Json, Rows, Shape

OPSET = 18
MAX_DIFF = 1e-4  # of logits and of an attacker's images, between torch and ONNX
PROBES = 16  # images on which ONNX and torch are compared
CALIBRATION_BATCH = 64
REPOSITORY = "repository"  # of Triton, which KServe runs too
MAX_BATCH, MAX_DELAY_US = 64, 2000  # of Triton

_KINDS: dict[type[nn.Module], str] = {  # names of stages in a manifest
    GaussianNoise: "gaussian",
    kinds.Dropout: "dropout",
    kinds.TopK: "topk",
    Quantise: "quantise",
    kinds.Clip: "clip",
    LearnedNoise: "learned",
}


def export_model(
    model: SplitModel,
    image_shape: Shape,
    folder: Path,
    *,
    name: str,
    audit: Json | None = None,
    source: Json | None = None,
    calibration: Rows | None = None,
    attacker: tuple[nn.Module, Json] | None = None,
    classes: Sequence[str] = (),
    overwrite: bool = False,
) -> Manifest:
    """Write both halves, the manifest and a Triton model repository into `folder`.

    Args:
        model: Encoder, channel and head; it is copied, not changed.
        image_shape: Shape of one image (c, h, w).
        folder: Where the export goes, complete or not at all.
        name: The model's name on the wire, 1 to 64 letters, digits, '.', '_' or '-'.
        audit: What an audit found, for the manifest; see `audit_summary`.
        source: Where the model comes from, for the manifest.
        calibration: Images (n, c, h, w) in [0, 1] to make an int8 client too; None: no int8 client.
        attacker: A fitted decoder from smashed data to images, and facts about it, for the page;
            None: no attacker.
        classes: Names of the classes, in order; empty: not known.
        overwrite: Whether to replace an existing export; other folders are never replaced.

    Returns:
        The manifest that was written.

    Raises:
        ExportError: If a channel stage cannot be exported, or ONNX and torch disagree.
    """
    check_name(name)
    check_target(folder, overwrite=overwrite)
    encoder, channel, head = export_parts(model, image_shape)
    stages = stages_json(channel)
    probes = torch.rand(PROBES, *image_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        z = encoder(probes)
        logits = head(z)
    if logits.ndim != 2:  # noqa: PLR2004
        raise ExportError(f"the head must return (n, classes), got {tuple(logits.shape)}")
    with new_folder(folder) as place:
        write_onnx(encoder, probes[:2], place / CLIENT, IMAGE, WIRE)
        write_onnx(head, z[:2], place / SERVER, WIRE, LOGITS)
        write_noise(channel, place)
        parity = measure_parity(place, probes.numpy(), logits.numpy())
        if calibration is not None:
            quantise_client(place / CLIENT, place / CLIENT_INT8, calibration)
            parity |= compare_int8(place, calibration)
        if attacker is not None:
            parity |= write_attacker(attacker[0], z, tuple(image_shape), place)
        shape, num_classes = tuple(z.shape[1:]), int(logits.shape[1])
        write_repository(place, name, shape, num_classes)
        manifest = Manifest(
            name=name,
            image_shape=tuple(image_shape),
            wire_shape=shape,
            num_classes=num_classes,
            stages=stages,
            files=hashes(place),
            parity=parity,
            audit=audit,
            versions=onnx_versions(),
            source=source or {},
            attacker=None if attacker is None else attacker[1],
            classes=tuple(classes),
        )
        (place / FILE).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def write_attacker(net: nn.Module, z: Tensor, image_shape: Shape, place: Path) -> Json:
    """Write `attacker.onnx`, smashed data to images; returns its difference from torch."""
    net = copy.deepcopy(net).cpu().eval()
    with torch.no_grad():
        images = net(z).numpy()
    if images.shape[1:] != image_shape:
        raise ExportError(f"the attacker makes images {images.shape[1:]}, expected {image_shape}")
    write_onnx(net, z[:2], place / ATTACKER, WIRE, IMAGE)
    worst = largest_difference(_half(place, ATTACKER)(z.numpy()), images, "the attacker's images",
                       "export without --attacker")  # fmt: skip
    return {"attacker_max_abs_diff": worst}


def write_onnx(module: nn.Module, example: Tensor, path: Path, given: str, got: str) -> None:
    """Write one half as ONNX, for any number of rows."""
    with quiet("torch.onnx"):  # it warns of missing libraries that are not needed here
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
def quiet(name: str = "") -> Iterator[None]:
    """Without warnings, and without a logger's messages below an error."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def _half(place: Path, file: str) -> OnnxHalf:
    return open_half((place / file).read_bytes(), 1)


def largest_difference(found: Rows, expected: Rows, what: str, advice: str) -> float:
    """The largest difference between ONNX and torch; raises `ExportError` above `MAX_DIFF`."""
    worst = float(np.abs(found - expected).max())
    if not worst <= MAX_DIFF:
        raise ExportError(
            f"ONNX and torch disagree: {what} differ by {worst:.3g}, allowed {MAX_DIFF:g}; {advice}"
        )
    return worst


def measure_parity(place: Path, probes: Rows, logits: Rows) -> Json:
    """Difference between the ONNX halves and torch on some images."""
    found = _half(place, SERVER)(_half(place, CLIENT)(probes))
    advice = "the exporter does not translate some layer of the model; replace that layer"
    worst = largest_difference(found, logits, "logits", advice)
    return {"images": len(probes), "logits_max_abs_diff": worst}


def wire_name(run: str) -> str:
    """A run's name as the name of a model, which allows fewer characters.

    >>> wire_name("clip+noise"), wire_name("+_" + "x" * 99) == "x" * 64
    ('clip-noise', True)
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", run).lstrip("._-")[:64] or "model"


def onnx_versions() -> Json:
    """Versions of the libraries that made the files."""
    import onnx

    made = {lib.__name__: str(lib.__version__) for lib in (torch, onnx, onnxruntime())}
    return {"splitveil": version("splitveil"), **made, "opset": OPSET}


def audit_summary(record: Json) -> Json:
    """What an audit's `record.json` claims about the wire, for the manifest."""
    keys = ("accuracy", "strongest", "worst_case", "ceiling", "leakage", "true_rate_nats", "audit")
    found: Json = {k: record.get(k) for k in keys}
    if isinstance(found["audit"], dict):  # its command contains paths of the auditor's machine
        found["audit"] = {k: v for k, v in found["audit"].items() if k != "command"}
    flags = record.get("flags") or []
    return found | {"flags": [f.get("name") for f in flags if isinstance(f, dict)]}


def export_parts(
    model: SplitModel, image_shape: Shape
) -> tuple[nn.Module, list[nn.Module], nn.Module]:
    """Copies on the CPU, in eval mode: the client's network, the other stages, the head.

    Sparse coding draws nothing, so at the start of the channel it becomes a layer of the client's
    network. After another stage it cannot, and `stages_json` rejects it.
    """
    model = with_stage_shapes(copy.deepcopy(model).cpu().eval(), image_shape)
    every = _each(model.channel)
    codes = list(takewhile(lambda stage: type(stage) is SparseCoding, every))
    encoder = nn.Sequential(model.encoder, *codes) if codes else model.encoder
    return encoder, every[len(codes) :], model.head


def _each(channel: nn.Module) -> list[nn.Module]:
    return list(channel.stages) if type(channel) is Channel else [channel]


def stages_json(channel: nn.Module | Sequence[nn.Module]) -> tuple[Json, ...]:
    """The channel as plain JSON; raises `ExportError` for a stage that the client does not know.

    >>> stages_json(Channel([GaussianNoise(0.1), Quantise(4)]))
    ({'kind': 'gaussian', 'std': 0.1}, {'kind': 'quantise', 'bits': 4})
    """
    parts = _each(channel) if isinstance(channel, nn.Module) else list(channel)
    for stage in parts:
        if type(stage) is SparseCoding:
            raise ExportError(
                "channel stage SparseCoding cannot be exported after another stage, because it "
                "becomes the last layer of the client's network; put it first"
            )
        if type(stage) not in _KINDS:
            known = ", ".join(["SparseCoding", *(kind.__name__ for kind in _KINDS)])
            raise ExportError(
                f"channel stage {type(stage).__name__} cannot be exported; the client knows "
                f"{known}. Move a stage that draws nothing into the encoder"
            )
    return tuple(_described(number, stage) for number, stage in enumerate(parts))


def _described(number: int, stage: nn.Module) -> Json:
    kind = _KINDS[type(stage)]
    if isinstance(stage, LearnedNoise):
        std = mean_std(_scale(stage).numpy(), stage.kind)
        return {"kind": kind, "noise": stage.kind, "file": f"noise-{number}.f32", "std": std}
    return {"kind": kind} | {key: getattr(stage, key) for key in STAGES[kind][1]}


@torch.no_grad()
def _scale(stage: LearnedNoise) -> Tensor:
    return stage.log_scales().exp().cpu()


def write_noise(stages: Sequence[nn.Module], place: Path) -> None:
    """Write the file of every learned stage, as `stages_json` names it."""
    for number, stage in enumerate(stages):
        if isinstance(stage, LearnedNoise):
            scale = _scale(stage)
            place_of = torch.zeros_like(scale) if stage.location is None else stage.location
            content = pack_noise(scale.numpy(), place_of.detach().cpu().numpy())
            (place / f"noise-{number}.f32").write_bytes(content)


class CalibrationImages:
    """Feeds calibration images to onnxruntime, batch by batch."""

    def __init__(self, images: Rows) -> None:
        starts = range(0, len(images), CALIBRATION_BATCH)
        self._batches = iter([images[i : i + CALIBRATION_BATCH] for i in starts])

    def get_next(self) -> dict[str, Rows] | None:
        """The next batch by input name; None at the end."""
        batch = next(self._batches, None)
        return None if batch is None else {IMAGE: batch}


def quantise_client(source: Path, target: Path, images: Rows) -> None:
    """Static int8 quantisation of a client, calibrated on images (n, c, h, w) in [0, 1]."""
    if not len(images):
        raise ExportError("an int8 client needs images for its calibration, got none")
    quantisation = onnxruntime_quantisation()
    with quiet():  # it recommends a preprocessing that changes nothing here
        quantisation.quantize_static(
            source,
            target,
            CalibrationImages(images),
            per_channel=True,
            activation_type=quantisation.QuantType.QUInt8,
            weight_type=quantisation.QuantType.QInt8,
        )


def compare_int8(place: Path, images: Rows) -> Json:
    """Difference between the int8 and the float client, before the channel."""
    z, rough = _half(place, CLIENT)(images), _half(place, CLIENT_INT8)(images)
    head = _half(place, SERVER)
    same = head(z).argmax(1) == head(rough).argmax(1)
    return {
        "int8_images": len(images),
        "int8_z_max_abs_diff": float(np.abs(z - rough).max()),
        "int8_same_answer": float(same.mean()),
    }


def write_repository(place: Path, name: str, wire_shape: Shape, num_classes: int) -> None:
    """Write Triton's `repository/NAME/config.pbtxt` and `repository/NAME/1/model.onnx`."""
    model = place / REPOSITORY / name
    (model / "1").mkdir(parents=True)
    shutil.copyfile(place / SERVER, model / "1" / "model.onnx")
    dims = ", ".join(str(n) for n in wire_shape)
    text = f"""name: "{name}"
platform: "onnxruntime_onnx"
max_batch_size: {MAX_BATCH}
input [ {{ name: "{WIRE}" data_type: TYPE_FP32 dims: [ {dims} ] }} ]
output [ {{ name: "{LOGITS}" data_type: TYPE_FP32 dims: [ {num_classes} ] }} ]
dynamic_batching {{ max_queue_delay_microseconds: {MAX_DELAY_US} }}
"""
    (model / "config.pbtxt").write_text(text, encoding="utf-8")
