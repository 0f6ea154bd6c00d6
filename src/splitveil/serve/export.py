"""Export: a trained split model becomes a folder with both halves as ONNX and their manifest.

The channel is not in the files: the client applies it from the manifest, with noise from its own
operating system. A network file that draws its noise itself could be seeded by whoever wrote it.
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
from splitveil.nets.channel import (
    Channel,
    Clip,
    Dropout,
    GaussianNoise,
    LearnedNoise,
    Quantise,
    SparseCoding,
    TopK,
)
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
from splitveil.serve.stages import STAGES, mean_std, pack_noise
from splitveil.serve.wire import Json, Rows, Shape

OPSET = 18
MAX_DIFF = 1e-4  # of logits and of an attacker's images, between torch and ONNX
PROBES = 16  # images the halves are compared on
CALIBRATION_BATCH = 64
REPOSITORY = "repository"  # for Triton, and for KServe, which runs Triton
MAX_BATCH, MAX_DELAY_US = 64, 2000  # of Triton

_KINDS: dict[type[nn.Module], str] = {  # what the client calls a stage
    GaussianNoise: "gaussian",
    Dropout: "dropout",
    TopK: "topk",
    Quantise: "quantise",
    Clip: "clip",
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
        model: Encoder, channel and head; copied, so the caller's stays as it is.
        image_shape: (c, h, w) of one image.
        folder: Appears when it is complete; an existing one is refused unless `overwrite`.
        name: What the model is called on the wire.
        audit: Verdict that the manifest carries, see `verdict`.
        source: Where the model comes from, for the manifest.
        calibration: Images (n, c, h, w) for an int8 client beside the float one; None: no such.
        attacker: A fitted decoder, from smashed data to images, and facts about it; it shows what
            the wire gives away. None: no such.
        classes: Their names, in order; empty where they are not known.
        overwrite: Replace an existing export (never a folder that is none).

    Raises:
        ExportError: When a channel stage is unknown or ONNX and torch disagree.
    """
    check_name(name)
    check_target(folder, overwrite=overwrite)
    encoder, channel, head = parts_of(model, image_shape)
    stages = stages_of(channel)
    probes = torch.rand(PROBES, *image_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        z = encoder(probes)
        logits = head(z)
    if logits.ndim != 2:  # noqa: PLR2004
        raise ExportError(f"the head must give (n, classes), got {tuple(logits.shape)}")
    with new_folder(folder) as place:
        write_onnx(encoder, probes[:2], place / CLIENT, IMAGE, WIRE)
        write_onnx(head, z[:2], place / SERVER, WIRE, LOGITS)
        write_noise(channel, place)
        parity = compare(place, probes.numpy(), logits.numpy())
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
            versions=versions(),
            source=source or {},
            attacker=None if attacker is None else attacker[1],
            classes=tuple(classes),
        )
        (place / FILE).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def write_attacker(net: nn.Module, z: Tensor, image_shape: Shape, place: Path) -> Json:
    """`attacker.onnx`: smashed data to images; how far from torch, refused when too far."""
    net = copy.deepcopy(net).cpu().eval()
    with torch.no_grad():
        images = net(z).numpy()
    if images.shape[1:] != image_shape:
        raise ExportError(f"the attacker gives images {images.shape[1:]}, expected {image_shape}")
    write_onnx(net, z[:2], place / ATTACKER, WIRE, IMAGE)
    worst = difference(_half(place, ATTACKER)(z.numpy()), images, "the attacker's images",
                       "export without --attacker")  # fmt: skip
    return {"attacker_max_abs_diff": worst}


def write_onnx(module: nn.Module, example: Tensor, path: Path, given: str, got: str) -> None:
    """One half as ONNX, for any number of rows."""
    with quiet("torch.onnx"):  # it remarks on libraries that are not installed
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
    """Without warnings, and without a logger's remarks below an error."""
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


def difference(found: Rows, expected: Rows, what: str, advice: str) -> float:
    """The largest difference between ONNX and torch; raises when it is too large."""
    worst = float(np.abs(found - expected).max())
    if not worst <= MAX_DIFF:
        raise ExportError(
            f"ONNX and torch disagree: {what} differ by {worst:.3g}, allowed {MAX_DIFF:g}; {advice}"
        )
    return worst


def compare(place: Path, probes: Rows, logits: Rows) -> Json:
    """How far the ONNX halves are from torch; raises when it is too far."""
    found = _half(place, SERVER)(_half(place, CLIENT)(probes))
    advice = "the model does something that the exporter does not translate"
    return {
        "images": len(probes),
        "logits_max_abs_diff": difference(found, logits, "logits", advice),
    }


def wire_name(run: str) -> str:
    """A run's name as a model's, which allows less.

    >>> wire_name("clip+noise"), wire_name("+_" + "x" * 99) == "x" * 64
    ('clip-noise', True)
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", run).lstrip("._-")[:64] or "model"


def versions() -> Json:
    """What made the files."""
    import onnx
    import onnxruntime  # type: ignore[import-untyped]

    made = {lib.__name__: str(lib.__version__) for lib in (torch, onnx, onnxruntime)}
    return {"splitveil": version("splitveil"), **made, "opset": OPSET}


def verdict(record: Json) -> Json:
    """What an audit's `record.json` says, for the manifest: the claim that the wire must keep."""
    keys = ("accuracy", "strongest", "worst_case", "ceiling", "leakage", "true_rate_nats", "audit")
    found: Json = {k: record.get(k) for k in keys}
    if isinstance(found["audit"], dict):  # its command names folders of the auditor's machine
        found["audit"] = {k: v for k, v in found["audit"].items() if k != "command"}
    flags = record.get("flags") or []
    return found | {"flags": [f.get("name") for f in flags if isinstance(f, dict)]}


def parts_of(model: SplitModel, image_shape: Shape) -> tuple[nn.Module, list[nn.Module], nn.Module]:
    """Copies on the CPU, in eval mode: the client's network, its stages, the server's network.

    Sparse coding draws nothing and is a layer of the client's network, unless a stage stands
    before it: then `stages_of` refuses it.
    """
    model = with_stage_shapes(copy.deepcopy(model).cpu().eval(), image_shape)
    every = _each(model.channel)
    codes = list(takewhile(lambda stage: type(stage) is SparseCoding, every))
    encoder = nn.Sequential(model.encoder, *codes) if codes else model.encoder
    return encoder, every[len(codes) :], model.head


def _each(channel: nn.Module) -> list[nn.Module]:
    return list(channel.stages) if type(channel) is Channel else [channel]


def stages_of(channel: nn.Module | Sequence[nn.Module]) -> tuple[Json, ...]:
    """The channel as plain JSON; an unknown stage is refused, never left out.

    >>> stages_of(Channel([GaussianNoise(0.1), Quantise(4)]))
    ({'kind': 'gaussian', 'std': 0.1}, {'kind': 'quantise', 'bits': 4})
    """
    parts = _each(channel) if isinstance(channel, nn.Module) else list(channel)
    for stage in parts:
        if type(stage) is SparseCoding:
            raise ExportError(
                "channel stage SparseCoding stands behind another stage and cannot be exported; "
                "the client's network ends before its channel: put sparse coding first"
            )
        if type(stage) not in _KINDS:
            known = ", ".join(["SparseCoding", *(kind.__name__ for kind in _KINDS)])
            raise ExportError(
                f"channel stage {type(stage).__name__} cannot be exported; the client knows "
                f"{known}. A stage that draws nothing can be part of the encoder instead"
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
    """The file of every learned stage, as `stages_of` names it."""
    for number, stage in enumerate(stages):
        if isinstance(stage, LearnedNoise):
            scale = _scale(stage)
            place_of = torch.zeros_like(scale) if stage.location is None else stage.location
            content = pack_noise(scale.numpy(), place_of.detach().cpu().numpy())
            (place / f"noise-{number}.f32").write_bytes(content)


class CalibrationImages:
    """Gives calibration images to onnxruntime, batch by batch."""

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
        raise ExportError("an int8 client needs images to calibrate on, got none")
    from onnxruntime.quantization import (  # type: ignore[import-untyped]
        CalibrationDataReader,
        QuantType,
        quantize_static,
    )

    CalibrationDataReader.register(CalibrationImages)
    with quiet():  # it advises a preprocessing that changes nothing here
        quantize_static(
            source,
            target,
            CalibrationImages(images),
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )


def compare_int8(place: Path, images: Rows) -> Json:
    """How far the int8 client is from the float one, before the channel."""
    z, rough = _half(place, CLIENT)(images), _half(place, CLIENT_INT8)(images)
    head = _half(place, SERVER)
    same = head(z).argmax(1) == head(rough).argmax(1)
    return {
        "int8_images": len(images),
        "int8_z_max_abs_diff": float(np.abs(z - rough).max()),
        "int8_same_answer": float(same.mean()),
    }


def config_text(name: str, wire_shape: Shape, num_classes: int) -> str:
    """The `config.pbtxt` of the head.

    >>> config_text("first", (8, 8, 8), 10).splitlines()[0]
    'name: "first"'
    """
    dims = ", ".join(str(n) for n in wire_shape)
    return f"""name: "{name}"
platform: "onnxruntime_onnx"
max_batch_size: {MAX_BATCH}
input [ {{ name: "{WIRE}" data_type: TYPE_FP32 dims: [ {dims} ] }} ]
output [ {{ name: "{LOGITS}" data_type: TYPE_FP32 dims: [ {num_classes} ] }} ]
dynamic_batching {{ max_queue_delay_microseconds: {MAX_DELAY_US} }}
"""


def write_repository(place: Path, name: str, wire_shape: Shape, num_classes: int) -> None:
    """Write `repository/NAME/config.pbtxt` and `repository/NAME/1/model.onnx` below an export."""
    model = place / REPOSITORY / name
    (model / "1").mkdir(parents=True)
    shutil.copyfile(place / SERVER, model / "1" / "model.onnx")
    text = config_text(name, wire_shape, num_classes)
    (model / "config.pbtxt").write_text(text, encoding="utf-8")
