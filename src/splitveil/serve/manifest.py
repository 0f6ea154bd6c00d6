"""An export as it is opened: its manifest, the hashes of its files, and its halves as functions.

A manifest says everything that decides what is sent and what the answer means; its identity is one
hash of that. Nothing in it is ignored: a reader refuses what it does not know.
"""

import hashlib
import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from splitveil.errors import ExportError
from splitveil.io import Json, parse_json, read_bytes
from splitveil.serve.exits import NOTHING, ExitRule, read_rule
from splitveil.serve.runtime import onnxruntime
from splitveil.serve.signature import check_signature
from splitveil.serve.stages import (
    Stage,
    check_stages,
    describe_noise,
    total_noise,
    wire_step,
    with_noise,
)
from splitveil.serve.wire import CODES, FLOATS, Rows, Shape, TensorSpec

OnnxHalf = Callable[[Rows], Rows]  # a network with one output
OnnxNetwork = Callable[[Rows], list[Rows]]  # one with several
FORMAT = "splitveil-export-2"
FIRST_FORMAT = "splitveil-export-1"  # of 0.1.0, whose readers ignore keys that they do not know
FILE = "manifest.json"
MAX_MANIFEST = 1 << 24  # bytes
MAX_FILE = 1 << 31  # bytes of an ONNX file, which cannot hold more
CLIENT, CLIENT_INT8, SERVER = "client.onnx", "client-int8.onnx", "server.onnx"
ATTACKER = "attacker.onnx"
IMAGE, WIRE, LOGITS, OWN = "image", "z", "logits", "own_logits"  # names of the tensors
PREPROCESSING: Json = {"layout": "NCHW", "range": [0.0, 1.0], "uint8_divisor": 255}
NOTES = ("parity", "audit", "versions", "source", "attacker")  # they decide nothing
ERRORS_ONLY = 3  # log level of onnxruntime
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

log = logging.getLogger("splitveil")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Both halves of one split model, as they were exported.

    Args:
        name: The model's name on the wire.
        image_shape: Shape of one image (c, h, w).
        wire_shape: Shape of one image's smashed data; empty if nothing is sent.
        num_classes: Number of logits, ≥ 1.
        stages: The channel, see `serve.stages`.
        files: SHA-256 of every file of the export, by relative path.
        parity: Largest differences between ONNX and torch.
        audit: What the last audit found; None: no audit.
        versions: Versions of the libraries that made it.
        source: The run it was made from.
        attacker: What `attacker.onnx` is; None: there is none.
        classes: Names of the classes; empty: not known.
        datatype: How features are sent: FP32, or INT16 or INT32 for multiples of `grid`.
        exit: When the device answers alone, see `serve.exits`; None: never.
        format: What the JSON of the manifest may hold.

    >>> stages = ({"kind": "gaussian", "std": 0.1},)
    >>> m = Manifest(name="m", image_shape=(1, 2, 2), wire_shape=(3,), num_classes=2, stages=stages)
    >>> m.noise_std, m.wire_floats, m.class_name(1)
    (0.1, 3, 'class 1')
    """

    name: str
    image_shape: Shape
    wire_shape: Shape
    num_classes: int
    stages: tuple[Json, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    parity: Json = field(default_factory=dict)
    audit: Json | None = None
    versions: Json = field(default_factory=dict)
    source: Json = field(default_factory=dict)
    attacker: Json | None = None
    classes: tuple[str, ...] = ()
    datatype: str = FLOATS
    exit: Json | None = None
    format: str = FORMAT

    def __post_init__(self) -> None:
        check_name(self.name)
        check_stages(self.stages)
        for what in ("image_shape", "wire_shape"):
            sizes = getattr(self, what)
            empty = what == "wire_shape" and self.silent
            if bool(sizes) is empty or not all(type(n) is int and n > 0 for n in sizes):
                raise ExportError(f"{what} must be positive whole numbers, got {sizes}")
        if type(self.num_classes) is not int or self.num_classes < 1:
            raise ExportError(f"num_classes must be at least 1, got {self.num_classes}")
        named = len(self.classes)
        if named not in {0, self.num_classes} or not all(type(n) is str for n in self.classes):
            raise ExportError(
                f"classes must be {self.num_classes} names, or empty; got {self.classes!r:.200}"
            )
        whole = self.datatype != FLOATS
        gridless = self.grid is None or self.format == FIRST_FORMAT
        if self.datatype not in CODES or (whole and gridless):
            raise ExportError(
                f"datatype must be one of {', '.join(CODES)}, and {FLOATS} where what is sent is "
                f"not on one grid; got {self.datatype!r:.40}"
            )
        read_rule(self.exit, self.num_classes)
        if self.silent and self.stages:
            raise ExportError(
                f"this client sends nothing, but has channel stages {self.stages!r:.200}; export "
                "the run again"
            )
        audited = (self.audit or {}).get("noise_std", self.noise_std)
        if audited != self.noise_std:
            raise ExportError(
                f"the audit holds for noise of std {audited!r:.40}, but the stages add "
                f"{self.noise_std}; export the run again"
            )

    def class_name(self, index: int) -> str:
        """Name of a class, or its number if it has none."""
        return self.classes[index] if self.classes else f"class {index}"

    @property
    def silent(self) -> bool:
        """Whether the device answers everything and sends nothing."""
        return self.exit == NOTHING

    @property
    def rule(self) -> ExitRule | None:
        """Which images are sent; None if all are, or none."""
        return read_rule(self.exit, self.num_classes)

    def rule_of(self, file: str) -> ExitRule | None:
        """The exit rule of a client's file: `client.onnx`, or the one in eight bits."""
        return read_rule(self.exit, self.num_classes, int8=file == CLIENT_INT8)

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise that the client adds, see `total_noise`."""
        return total_noise(self.stages)

    @property
    def grid(self) -> float | None:
        """Step h of the grid that everything sent lies on; None if there is no single one."""
        return wire_step(self.stages)

    @property
    def wire(self) -> TensorSpec:
        """What the client sends."""
        step = None if self.datatype == FLOATS else self.grid
        return TensorSpec(name=WIRE, shape=self.wire_shape, datatype=self.datatype, step=step)

    @property
    def logits(self) -> TensorSpec:
        """What the server answers."""
        return TensorSpec(name=LOGITS, shape=(self.num_classes,))

    @property
    def client_tensors(self) -> tuple[TensorSpec, ...]:
        """What the client takes, and what it gives: z, its own logits, or both in this order."""
        image = TensorSpec(name=IMAGE, shape=self.image_shape)
        own = TensorSpec(name=OWN, shape=(self.num_classes,))
        if self.silent:
            return image, own
        return (image, self.wire) if self.exit is None else (image, self.wire, own)

    @property
    def wire_floats(self) -> int:
        """Numbers sent for one image."""
        return 0 if self.silent else math.prod(self.wire_shape)

    @property
    def identity(self) -> str:
        """SHA-256 of all that decides what is sent and what the answer means.

        That is the whole manifest but `NOTES`, with the hashes of the client's and the server's
        half and of learned noise. A client and a server must have the same.
        """
        if self.format == FIRST_FORMAT:
            return sha256(f"{self.files.get(CLIENT, '')}/{self.files.get(SERVER, '')}".encode())[
                :16
            ]
        stated = self._stated()
        files = {f: h for f, h in self.files.items() if f != ATTACKER and "/" not in f}
        decisive = {k: v for k, v in stated.items() if k not in NOTES} | {"files": files}
        canonical = json.dumps(decisive, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return sha256(canonical.encode())

    def _stated(self) -> Json:
        own = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
        return {
            "format": own.pop("format"),
            **own,
            "noise_std": self.noise_std,
            "noise_source": "os.urandom",
            "grid": self.grid,
            "preprocessing": PREPROCESSING,
        }

    def to_dict(self) -> Json:
        """The JSON of `manifest.json`."""
        found = self._stated()
        if self.format == FIRST_FORMAT:
            return {k: v for k, v in found.items() if k not in ("exit", "grid")}
        return found | {"identity": self.identity}

    def to_json(self) -> str:
        """Text of `manifest.json`; strict JSON."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"


def check_name(name: str) -> None:
    """Reject model names that cannot be part of an address or a folder of a model repository."""
    if not _NAME.fullmatch(name):
        raise ExportError(
            f"a model's name must be 1 to 64 letters, digits, '.', '_' or '-', got {name!r}; "
            "give --name"
        )


def read_manifest(folder: Path, *, verify: Path | None = None) -> Manifest:
    """Read and check `manifest.json`; other files are checked when they are read.

    Args:
        folder: An export.
        verify: Public key that must have signed it; None: no signature is needed.

    Returns:
        The manifest.

    Raises:
        ExportError: The folder is no export, or its manifest is broken.

    Example:
        `read_manifest(Path("runs/first/export")).noise_std`
    """
    path = folder / FILE
    if not path.is_file():
        raise ExportError(
            f"{folder} is not an export: it has no {FILE}; make one: splitveil export RUN"
        )
    try:
        content = read_bytes(path, MAX_MANIFEST)
        data = parse_json(content)
        if not isinstance(data, dict):
            raise ValueError(f"it must hold a JSON object, got {type(data).__name__}")
        if data["format"] not in (FORMAT, FIRST_FORMAT):
            raise ExportError(
                f"{path} has format {data['format']!r:.80}, expected {FORMAT!r} or "
                f"{FIRST_FORMAT!r}; install the version of splitveil that exported the model"
            )
        if data["format"] == FIRST_FORMAT:
            data = {"attacker": None, "classes": (), **data, "exit": None}
        own = {f.name: data[f.name] for f in fields(Manifest)}
        for name in ("image_shape", "wire_shape", "stages", "classes"):
            own[name] = tuple(own[name])
        manifest = Manifest(**own | {"files": dict(own["files"])})
        check_stated(path, data, manifest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise ExportError(f"{path} is broken: {err!r}; export the run again") from err
    if verify is not None:
        check_signature(folder, verify, manifest.identity, content)
    return manifest


def check_stated(path: Path, data: Json, manifest: Manifest) -> None:
    """Refuse what a manifest states beyond its fields, and what does not follow from them.

    A manipulated total would promise noise that no stage adds; an unknown key could ask for
    something that this version would not do.
    """
    stated = manifest.to_dict()
    if manifest.format == FORMAT and (more := sorted(data.keys() - stated.keys())):
        raise ExportError(
            f"{path} has unknown keys: {', '.join(more)!r:.200}; a reader that ignored them could "
            "send more than was audited. Install the version of splitveil that exported the model"
        )
    checked = stated if manifest.format == FORMAT else ("noise_std", "datatype")
    for key in checked:
        if data.get(key) != stated[key]:
            raise ExportError(
                f"{path} contradicts itself: {key} is {data.get(key)!r:.80}, but the rest of it "
                f"gives {stated[key]!r:.80}; export the run again"
            )


def open_export(
    folder: Path, *, allow_no_noise: bool = False, verify: Path | None = None
) -> Manifest:
    """The manifest of an export that is put into service.

    Args:
        folder: The export.
        allow_no_noise: Whether it may send features without noise.
        verify: Public key that must have signed it; None: no signature is needed.

    Raises:
        ExportError: If it adds no noise and nobody asked for that by name, or is not signed.
    """
    manifest = read_manifest(folder, verify=verify)
    if manifest.silent:
        return manifest
    if manifest.noise_std == 0 and not allow_no_noise:
        raise ExportError(
            f"{folder} adds no noise to what is sent ({describe_noise(manifest.stages)}). If it "
            "was trained and audited like that, allow it by name: --allow-no-noise, or "
            "allow_no_noise=True; if not, get the export again from where it was made"
        )
    if manifest.noise_std == 0:
        log.warning(f"{folder} adds no noise: the server gets the features as they are")
    elif manifest.format == FIRST_FORMAT:
        log.warning(
            f"{folder} was exported by 0.1.0: its clients add noise in floating point, and "
            "arithmetic on what they send can tell which of some candidate images it was. This "
            "version draws on a grid, but they do not: export the run again"
        )
    return manifest


def sha256(content: bytes) -> str:
    """Hexadecimal SHA-256."""
    return hashlib.sha256(content).hexdigest()


def read_verified(folder: Path, manifest: Manifest, file: str) -> bytes:
    """The bytes of a file whose hash is the manifest's."""
    # Callers use these bytes and do not read the file again: it could be replaced in between.
    expected = manifest.files.get(file)
    if expected is None:
        has = ", ".join(sorted(manifest.files)) or "none"
        raise ExportError(
            f"{folder} has no {file}, only {has}; export again, with --int8 for the int8 client or "
            "--attacker for the attacker"
        )
    try:
        content = read_bytes(folder / file, MAX_FILE)
    except OSError as err:
        raise ExportError(f"cannot read {folder / file}: {err.strerror}; export again") from err
    if sha256(content) != expected:
        raise ExportError(
            f"{folder / file} is not the file that was exported: SHA-256 {sha256(content)}, "
            f"expected {expected}; copy it again, or export the run again"
        )
    return content


def read_stages(folder: Path, manifest: Manifest) -> tuple[Stage, ...]:
    """The channel; learned stages get the numbers of their files, hashes checked."""
    return tuple(
        with_noise(s, read_verified(folder, manifest, s["file"]), manifest.wire_shape)
        if s["kind"] == "learned"
        else s
        for s in manifest.stages
    )


def load_half(folder: Path, manifest: Manifest, file: str, threads: int = 0) -> OnnxHalf:
    """A network of an export that gives one tensor, its hash and tensors checked."""
    client = manifest.client_tensors[:2]
    tensors = {CLIENT: client, CLIENT_INT8: client, SERVER: (manifest.wire, manifest.logits)}
    content = read_verified(folder, manifest, file)
    return open_half(content, threads, where=str(folder / file), tensors=tensors.get(file))


def load_client(folder: Path, manifest: Manifest, file: str, threads: int = 0) -> OnnxNetwork:
    """The client of an export, hash and tensors checked; `threads` 0 lets onnxruntime choose."""
    content, where = read_verified(folder, manifest, file), str(folder / file)
    tensors = manifest.client_tensors
    return open_network(content, threads, where=where, tensors=tensors, gives=len(tensors) - 1)


def open_half(
    model: bytes,
    threads: int = 0,
    *,
    where: str = "the model",
    tensors: Sequence[TensorSpec] | None = None,
) -> OnnxHalf:
    """An ONNX model with one output as a function of rows; see `open_network`."""
    network = open_network(model, threads, where=where, tensors=tensors)
    return lambda rows: network(rows)[0]


def open_network(
    model: bytes,
    threads: int = 0,
    *,
    where: str = "the model",
    tensors: Sequence[TensorSpec] | None = None,
    gives: int = 1,
) -> OnnxNetwork:
    """An ONNX model as a function of rows.

    Args:
        model: The bytes of its file.
        threads: Threads of onnxruntime; 0 lets it choose.
        where: What an error calls it.
        tensors: What it must take and give; None: not checked.
        gives: How many tensors it must give.
    """
    ort = onnxruntime()  # not at the top: a manifest can be read where it is not installed
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = ERRORS_ONLY
    try:
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as err:  # onnxruntime's own errors have no common parent below this
        raise ExportError(f"{where} cannot be loaded by onnxruntime: {err}; export again") from err
    inputs, outputs = session.get_inputs(), session.get_outputs()
    if (len(inputs), len(outputs)) != (1, gives):
        raise ExportError(
            f"{where} has {len(inputs)} inputs and {len(outputs)} outputs, expected "
            f"{'one of each' if gives == 1 else f'1 and {gives}'}; export the run again"
        )
    if tensors is not None:
        _check_tensors(where, "takes", inputs, tensors[0])
        for output, spec in zip(outputs, tensors[1:], strict=True):
            _check_tensors(where, "gives", [output], spec)
    name = inputs[0].name

    def network(rows: Rows) -> list[Rows]:
        found: list[Rows] = session.run(None, {name: rows})
        return found

    return network


def _check_tensors(where: str, verb: str, found: Sequence[Any], spec: TensorSpec) -> None:
    """Refuse a network whose tensor is not float32 of shape (any number of rows, *spec.shape)."""
    told = ", ".join(f"{tensor.type} {list(tensor.shape)}" for tensor in found)
    shape = list(found[0].shape) if len(found) == 1 and found[0].type == "tensor(float)" else []
    # A size that is only known when the network runs is a name, or None.
    wanted = (None, *spec.shape)
    fits = len(shape) == len(wanted) and all(
        own == size or not isinstance(own, int) for own, size in zip(shape, wanted, strict=True)
    )
    if not fits:
        raise ExportError(
            f"{where} {verb} {told or 'nothing'}, but the manifest says {FLOATS} "
            f"[rows, {', '.join(map(str, spec.shape))}] for '{spec.name}'; export the run again"
        )
