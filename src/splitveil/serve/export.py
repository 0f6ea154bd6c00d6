"""Export: a trained split model as a folder with both halves in ONNX and their manifest.

A client that answers alone has no other half; one that exits early gives z and its own logits.

The channel is not part of the ONNX files: the client applies it from the manifest, with noise from
its own operating system. Noise drawn inside a network file could be seeded by its author.

The folder is either complete or absent, and is never overwritten without being asked to.
"""

import copy
import logging
import re
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from splitveil.errors import ExportError
from splitveil.grid import REACH
from splitveil.io import Json, folder_lock
from splitveil.nets import channel as kinds
from splitveil.nets.channel import (
    Channel,
    GaussianNoise,
    LearnedNoise,
    Quantise,
    SparseCoding,
    wire_bits,
)
from splitveil.nets.exit import Exit, TappedClient, threshold_for
from splitveil.nets.split import SplitModel, with_stage_shapes
from splitveil.provenance import model_hash
from splitveil.serve.exits import ALWAYS, LEVELS, NEVER, NOTHING, Choice, ExitRule, sureness
from splitveil.serve.manifest import (
    ATTACKER,
    CLIENT,
    CLIENT_INT8,
    FILE,
    IMAGE,
    LOGITS,
    OWN,
    SERVER,
    WIRE,
    Manifest,
    OnnxHalf,
    OnnxNetwork,
    check_name,
    open_half,
    open_network,
    sha256,
)
from splitveil.serve.runtime import onnxruntime, onnxruntime_quantisation
from splitveil.serve.signature import FILE as SIGNATURE
from splitveil.serve.signature import read_signing_key, signature_json
from splitveil.serve.stages import STAGES, mean_std, pack_noise, total_noise, wire_step
from splitveil.serve.wire import FLOATS, Rows, Shape, TensorSpec

OPSET = 18
ONNX_NOTES = frozenset({"doc_string", "metadata_props"})  # fields of many parts of an ONNX file
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
    validation: Rows | None = None,
    attacker: tuple[nn.Module, Json] | None = None,
    classes: Sequence[str] = (),
    overwrite: bool = False,
    sign: Path | None = None,
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
        validation: Images (n, c, h, w) in [0, 1] that say how many an exit rule sends; None: not
            stated.
        attacker: A fitted decoder from smashed data to images, and facts about it, for the page;
            None: no attacker.
        classes: Names of the classes, in order; empty: not known.
        overwrite: Whether to replace an existing export; other folders are never replaced.
        sign: Private key (PEM, Ed25519) to sign the manifest with; None: no signature.

    Returns:
        The manifest that was written.

    Raises:
        ExportError: If a channel stage cannot be exported, ONNX and torch disagree, or the audit is
            of another model.

    Example:
        `export_model(run.model, run.built.image_shape, Path("export"), name="first")`
    """
    check_name(name)
    check_target(folder, overwrite=overwrite)
    key = None if sign is None else read_signing_key(sign)
    if audit is not None:
        check_verdict(audit, model)
    parts = export_parts(model, image_shape)
    stages = stages_json(parts.channel)
    probes = torch.rand(PROBES, *image_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        given = parts.run(probes)
    for logits in (given[name] for name in (LOGITS, OWN) if name in given):
        if logits.ndim != 2:  # noqa: PLR2004
            raise ExportError(f"the head must return (n, classes), got {tuple(logits.shape)}")
    unseen = validation is None or not len(validation)
    if model.exit is not None and calibration is not None and unseen:
        raise ExportError(
            "a client in eight bits decides otherwise than the exit rule was set for, and needs "
            "validation images for a threshold of its own, got none; export without --int8"
        )
    with new_folder(folder, overwrite=overwrite) as place:
        write_onnx(parts.client, probes[:2], place / CLIENT, IMAGE, *parts.names)
        if parts.head is not None:
            write_onnx(parts.head, given[WIRE][:2], place / SERVER, WIRE, LOGITS)
        write_noise(parts.channel, place)
        parity = measure_parity(place, probes.numpy(), {k: v.numpy() for k, v in given.items()})
        if calibration is not None:
            quantise_client(place / CLIENT, place / CLIENT_INT8, calibration)
            parity |= compare_int8(place, calibration, parts.names)
        if attacker is not None:
            parity |= write_attacker(attacker[0], given[WIRE], tuple(image_shape), place)
        num_classes = int(given[LOGITS if LOGITS in given else OWN].shape[1])
        shape, datatype = tuple(given[WIRE].shape[1:]) if WIRE in given else (), FLOATS
        if parts.head is not None:
            step, datatype = wire_step(stages), wire_datatype(parts, given[WIRE])
            wire = TensorSpec(name=WIRE, shape=shape, datatype=datatype, step=step)
            write_repository(place, name, wire, num_classes, parts.head)
        manifest = Manifest(
            name=name,
            image_shape=tuple(image_shape),
            wire_shape=shape,
            num_classes=num_classes,
            stages=stages,
            files=hashes(place),
            parity=parity,
            audit=None if audit is None else audit | {"noise_std": total_noise(stages)},
            versions=onnx_versions(),
            source=source or {},
            attacker=None if attacker is None else attacker[1],
            classes=tuple(classes),
            datatype=datatype,
            exit=exit_json(model, place, validation),
        )
        content = manifest.to_json().encode()
        (place / FILE).write_bytes(content)
        if key is not None:
            (place / SIGNATURE).write_text(signature_json(key, manifest.identity, content))
    return manifest


def exit_json(model: SplitModel, place: Path, validation: Rows | None) -> Json | None:
    """The field `exit` of the manifest of a model whose client is in `place`."""
    if model.silent:
        return dict(NOTHING)
    if model.exit is None:
        return None
    rule = exit_rule(model.exit)
    if validation is None or not len(validation):
        return rule.to_json()
    own = _own_logits(place, CLIENT, validation)
    if not (place / CLIENT_INT8).exists():
        return _with_levels(rule, own).to_json()
    rough = _own_logits(place, CLIENT_INT8, validation)
    small = int8_rule(rule, own, rough)
    return _with_levels(rule, own).to_json(_with_levels(small, rough))


def _own_logits(place: Path, file: str, images: Rows) -> Rows:
    client = _network(place, file, 2)
    starts = range(0, len(images), CALIBRATION_BATCH)
    return np.concatenate([client(images[i : i + CALIBRATION_BATCH])[1] for i in starts])


def _with_levels(rule: ExitRule, own: Rows) -> ExitRule:
    """The rule with what it does with validation images, whose own logits are given."""
    sure = sureness(own, rule.kind, rule.temperature)
    levels = np.quantile(sure, np.linspace(0, 1, LEVELS))
    return replace(rule, send=float(rule.asks(own).mean()), levels=tuple(levels.tolist()))


def int8_rule(rule: ExitRule, own: Rows, rough: Rows) -> ExitRule:
    """The rule of a client in eight bits: it sends as many validation images as the float client.

    Where every class has its own threshold, as large a share of the images that it answers with
    the class.

    Args:
        rule: The float client's.
        own: The float client's own logits (n, classes) of validation images.
        rough: Those of the client in eight bits.
    """
    asked, sure = rule.asks(own), sureness(rough, rule.kind, rule.temperature)

    def threshold(images: Choice, like: Choice) -> float:
        share = float(asked[like].mean()) if like.any() else float(asked.mean())
        found = threshold_for(torch.from_numpy(sure[images]), share)
        return min(max(found, NEVER), ALWAYS)

    every = np.ones_like(asked)
    thresholds = (threshold(every, every),) * len(rule.thresholds)
    if len(set(rule.thresholds)) > 1:
        pairs = [(rough.argmax(1) == k, own.argmax(1) == k) for k in range(len(thresholds))]
        thresholds = tuple(
            threshold(images, like) if images.any() else thresholds[k]
            for k, (images, like) in enumerate(pairs)
        )
    found = replace(rule, thresholds=thresholds)
    return replace(found, changed=float((found.asks(rough) != asked).mean()))


def exit_rule(found: Exit) -> ExitRule:
    """The exit rule of a model, for the device.

    >>> exit_rule(Exit(nn.Linear(4, 2), 2)).thresholds  # not set yet: everything is sent
    (1000.0, 1000.0)
    """
    limited = found.thresholds.detach().cpu().clamp(NEVER, ALWAYS)
    return ExitRule(
        kind=found.kind, temperature=float(found.temperature), average=found.average,
        thresholds=tuple(limited.tolist()),
    )  # fmt: skip


def write_attacker(net: nn.Module, z: Tensor, image_shape: Shape, place: Path) -> Json:
    """Write `attacker.onnx`, smashed data to images; returns its difference from torch."""
    net = _for_export(net)
    with torch.no_grad():
        images = net(z).numpy()
    if images.shape[1:] != image_shape:
        raise ExportError(f"the attacker makes images {images.shape[1:]}, expected {image_shape}")
    write_onnx(net, z[:2], place / ATTACKER, WIRE, IMAGE)
    worst = largest_difference(_half(place, ATTACKER)(z.numpy()), images, "the attacker's images",
                       "export without --attacker")  # fmt: skip
    return {"attacker_max_abs_diff": worst}


def write_onnx(module: nn.Module, example: Tensor, path: Path, given: str, *got: str) -> None:
    """Write a network as ONNX, for any number of rows; `given` and `got` name its tensors."""
    with quiet("torch.onnx"):  # it warns of missing libraries that are not needed here
        torch.onnx.export(
            module,
            (example,),
            path,
            input_names=[given],
            output_names=list(got),
            opset_version=OPSET,
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            external_data=False,
            verbose=False,
        )
    strip(path)


def strip(path: Path) -> None:
    """Remove notes from an ONNX file: the exporter's stack traces, which name folders and code."""
    import onnx

    model = onnx.load(path)
    _strip_message(model)
    path.write_bytes(model.SerializeToString())


def _strip_message(message: Any) -> None:  # noqa: ANN401 - protobuf has no types
    for name in ONNX_NOTES.intersection(message.DESCRIPTOR.fields_by_name):
        message.ClearField(name)
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in [value] if hasattr(value, "ListFields") else value:
                _strip_message(part)


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


def _network(place: Path, file: str, gives: int) -> OnnxNetwork:
    return open_network((place / file).read_bytes(), 1, where=file, gives=gives)


def largest_difference(found: Rows, expected: Rows, what: str, advice: str) -> float:
    """The largest difference between ONNX and torch; raises `ExportError` above `MAX_DIFF`."""
    worst = float(np.abs(found - expected).max())
    if not worst <= MAX_DIFF:
        raise ExportError(
            f"ONNX and torch disagree: {what} differ by {worst:.3g}, allowed {MAX_DIFF:g}; {advice}"
        )
    return worst


def measure_parity(place: Path, probes: Rows, given: dict[str, Rows]) -> Json:
    """Difference between the ONNX halves and torch on some images.

    Args:
        place: Folder with the networks.
        probes: Images (n, c, h, w).
        given: What torch gives for them, by the tensors' names.
    """
    advice = "the exporter does not translate some layer of the model; replace that layer"
    names = [name for name in (WIRE, OWN) if name in given]
    found = dict(zip(names, _network(place, CLIENT, len(names))(probes), strict=True))
    if WIRE in found:
        found[LOGITS] = _half(place, SERVER)(found[WIRE])
    worst = {
        name: largest_difference(found[name], given[name], name, advice)
        for name in (LOGITS, OWN)
        if name in found
    }
    return {"images": len(probes)} | {f"{k}_max_abs_diff": value for k, value in worst.items()}


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
    keys = (
        "accuracy", "strongest", "worst_case", "ceiling", "leakage", "sent", "leakage_sent",
        "exposure", "true_rate_nats", "audit",
    )  # fmt: skip
    found: Json = {k: record.get(k) for k in keys}
    if isinstance(found["audit"], dict):  # its command contains paths of the auditor's machine
        found["audit"] = {k: v for k, v in found["audit"].items() if k != "command"}
    flags = record.get("flags") or []
    return found | {"flags": [f.get("name") for f in flags if isinstance(f, dict)]}


def check_verdict(audit: Json, model: SplitModel) -> None:
    """Refuse a verdict about another model than the one that is exported."""
    facts, own = audit.get("audit"), model_hash(model)
    told = facts.get("model") if isinstance(facts, dict) else None
    if told != own:
        raise ExportError(
            f"record.json is about model {told}, but the checkpoint holds model {own}; audit it "
            "again (splitveil audit RUN), or move record.json away to export without a verdict"
        )


class WithOwnHead(nn.Module):
    """A client that exits early, as one network: z, and the logits of its own head.

    Args:
        client: Body and projection.
        codes: Layers between the projection and the wire.
        head: From the end of the body to logits.
    """

    def __init__(self, client: TappedClient, codes: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.client, self.codes, self.head = client, codes, head

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Clean z (n, …) and own logits (n, classes)."""
        z, features = self.client.both(x)
        return self.codes(z), self.head(features)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What is exported of a model.

    Args:
        client: The network on the device; it gives the tensors `names`.
        names: z, own logits, or both.
        channel: The stages between z and the wire.
        head: The server's network; None if nothing is sent.
        to_wire: What of the client leads to z, for the range of z.
    """

    client: nn.Module
    names: tuple[str, ...]
    channel: list[nn.Module]
    head: nn.Module | None
    to_wire: nn.Module

    def run(self, images: Tensor) -> dict[str, Tensor]:
        """All tensors for some images, by name; nothing happens to z before the head."""
        out = self.client(images)
        found = dict(zip(self.names, out if isinstance(out, tuple) else (out,), strict=True))
        return found if self.head is None else found | {LOGITS: self.head(found[WIRE])}


def export_parts(model: SplitModel, image_shape: Shape) -> Parts:
    """Copies on the CPU, in eval mode: the client's network, the other stages, the head.

    Sparse coding draws nothing, so at the start of the channel it becomes a layer of the client's
    network. After another stage it cannot, and `stages_json` rejects it.
    """
    model = with_stage_shapes(_for_export(model), image_shape)
    encoder, every = model.encoder, _each(model.channel)
    if model.silent:
        alone = nn.Sequential(encoder, model.head)
        return Parts(client=alone, names=(OWN,), channel=[], head=None, to_wire=encoder)
    codes = list(takewhile(lambda stage: type(stage) is SparseCoding, every))
    rest = every[len(codes) :]
    if model.exit is not None and isinstance(encoder, TappedClient):
        both = WithOwnHead(encoder, nn.Sequential(*codes), model.exit.head)
        to_wire = nn.Sequential(encoder.projection, *codes)
        return Parts(client=both, names=(WIRE, OWN), channel=rest, head=model.head, to_wire=to_wire)
    client = nn.Sequential(encoder, *codes) if codes else encoder
    return Parts(client=client, names=(WIRE,), channel=rest, head=model.head, to_wire=client)


Copied = TypeVar("Copied", bound=nn.Module)


def _for_export(module: Copied) -> Copied:
    """A copy on the CPU in eval mode, its weights in the order in which ONNX stores them."""
    copied = copy.deepcopy(module).cpu().eval()
    copied.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return copied


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
    strip(target)


def compare_int8(place: Path, images: Rows, names: Sequence[str]) -> Json:
    """Difference between the int8 and the float client in the tensors `names`, before the channel.

    The answer is the server's for what is sent; a client that answers alone gives its own.
    """
    found, rough = (_network(place, file, len(names))(images) for file in (CLIENT, CLIENT_INT8))
    head = _half(place, SERVER) if WIRE in names else (lambda logits: logits)
    same = head(found[0]).argmax(1) == head(rough[0]).argmax(1)
    worst = {
        f"int8_{name}_max_abs_diff": float(np.abs(a - b).max())
        for name, a, b in zip(names, found, rough, strict=True)
    }
    return {"int8_images": len(images), **worst, "int8_same_answer": float(same.mean())}


def wire_datatype(parts: Parts, z: Tensor) -> str:
    """INT16 if z is bounded and its steps surely fit, INT32 if they may not, FP32 without a grid.

    Args:
        parts: The client's network and its channel.
        z: Some z, to see that the noise is not too small for any grid.
    """
    stages = parts.channel
    step = wire_step(stages_json(stages))
    if step is None:
        return FLOATS
    if (most := float(z.abs().max())) > step * REACH:
        raise ExportError(
            f"the noise is too small: z goes up to {most:.4g}, {most / step:.3g} steps of the "
            f"noise's grid, allowed {REACH}; train with more noise"
        )
    return f"INT{wire_bits(parts.to_wire, Channel(stages))}"


class FromSteps(nn.Module):
    """A head that takes integers and multiplies them by the grid's step first."""

    def __init__(self, head: nn.Module, step: float) -> None:
        super().__init__()
        self.head, self.step = head, step

    def forward(self, steps: Tensor) -> Tensor:
        """The head's logits."""
        logits: Tensor = self.head(steps.to(torch.float32) * self.step)
        return logits


def write_repository(
    place: Path, name: str, wire: TensorSpec, num_classes: int, head: nn.Module
) -> None:
    """Write Triton's `repository/NAME/config.pbtxt` and `repository/NAME/1/model.onnx`.

    The model takes what a client sends. That is the server's half, or, for integers, the server's
    half with the multiplication by the grid's step before it.
    """
    model = place / REPOSITORY / name
    (model / "1").mkdir(parents=True)
    if wire.step is None:
        shutil.copyfile(place / SERVER, model / "1" / "model.onnx")
    else:
        whole = torch.int16 if wire.datatype == "INT16" else torch.int32
        example = torch.zeros(2, *wire.shape, dtype=whole)
        write_onnx(FromSteps(head, wire.step), example, model / "1" / "model.onnx", WIRE, LOGITS)
    dims = ", ".join(str(n) for n in wire.shape)
    text = f"""name: "{name}"
platform: "onnxruntime_onnx"
max_batch_size: {MAX_BATCH}
input [ {{ name: "{WIRE}" data_type: TYPE_{wire.datatype} dims: [ {dims} ] }} ]
output [ {{ name: "{LOGITS}" data_type: TYPE_FP32 dims: [ {num_classes} ] }} ]
dynamic_batching {{ max_queue_delay_microseconds: {MAX_DELAY_US} }}
"""
    (model / "config.pbtxt").write_text(text, encoding="utf-8")


def hashes(place: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder, by relative path."""
    files = sorted(p for p in place.rglob("*") if p.is_file())
    return {p.relative_to(place).as_posix(): sha256(p.read_bytes()) for p in files}


def check_target(folder: Path, *, overwrite: bool) -> None:
    """Reject an existing folder, unless it is an export and may be overwritten."""
    if not (folder.exists() or folder.is_symlink()):
        return
    if not overwrite:
        raise ExportError(f"{folder} exists already; choose another --out or give --overwrite")
    if not (folder / FILE).is_file():
        raise ExportError(
            f"{folder} is not an export (it has no {FILE}) and is not overwritten; choose another "
            "--out, or remove it yourself"
        )


@contextmanager
def new_folder(folder: Path, *, overwrite: bool) -> Iterator[Path]:
    """A new folder to fill, which replaces `folder` if the block succeeds.

    If `folder` is a link, the link stays and its target is replaced. Whatever ends the block, the
    old export is back and nothing lies beside it; what a killed process left is removed, or put
    back, by the next export.
    """
    folder = folder.resolve() if folder.is_symlink() else folder
    scratch = folder.with_name(f".{folder.name}.new")
    fresh, old = scratch / "new", scratch / "old"

    def put_back() -> None:
        if old.exists() and not folder.exists():
            old.rename(folder)

    with folder_lock(folder, f"another process exports to {folder}; wait until it ends"):
        try:
            put_back()
            check_target(folder, overwrite=overwrite)
            shutil.rmtree(scratch, ignore_errors=True)
            fresh.mkdir(parents=True)
            yield fresh
            if folder.exists():
                folder.rename(old)
            fresh.rename(folder)
        except OSError as err:
            raise ExportError(
                f"cannot write {folder}: {err.strerror or err}; free some space, or choose another "
                "--out"
            ) from err
        finally:
            put_back()
            shutil.rmtree(scratch, ignore_errors=True)
