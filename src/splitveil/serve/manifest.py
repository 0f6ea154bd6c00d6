"""An export's folder: its manifest, the hashes of its files, and its halves as functions.

The folder is either complete or absent, and is never overwritten without being asked to.
"""

import hashlib
import json
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from splitveil.errors import ExportError
from splitveil.serve.runtime import onnxruntime
from splitveil.serve.stages import Stage, check_stages, total_noise, with_noise
from splitveil.serve.wire import DATATYPE, Json, Rows, Shape, TensorSpec

OnnxHalf = Callable[[Rows], Rows]  # the client's or the server's network
FORMAT = "splitveil-export-1"
FILE = "manifest.json"
CLIENT, CLIENT_INT8, SERVER = "client.onnx", "client-int8.onnx", "server.onnx"
ATTACKER = "attacker.onnx"
IMAGE, WIRE, LOGITS = "image", "z", "logits"  # names of the tensors
PREPROCESSING: Json = {"layout": "NCHW", "range": [0.0, 1.0], "uint8_divisor": 255}
ERRORS_ONLY = 3  # log level of onnxruntime
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Both halves of one split model, as they were exported.

    Args:
        name: The model's name on the wire.
        image_shape: Shape of one image (c, h, w).
        wire_shape: Shape of one image's smashed data.
        num_classes: Number of logits, ≥ 1.
        stages: The channel, see `serve.stages`.
        files: SHA-256 of every file of the export, by relative path.
        parity: Largest differences between ONNX and torch.
        audit: What the last audit found; None: no audit.
        versions: Versions of the libraries that made it.
        source: The run it was made from.
        attacker: What `attacker.onnx` is; None: there is none.
        classes: Names of the classes; empty: not known.

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

    def __post_init__(self) -> None:
        check_name(self.name)
        check_stages(self.stages)
        for what in ("image_shape", "wire_shape"):
            sizes = getattr(self, what)
            if not sizes or not all(type(n) is int and n > 0 for n in sizes):
                raise ExportError(f"{what} must be positive whole numbers, got {sizes}")
        if type(self.num_classes) is not int or self.num_classes < 1:
            raise ExportError(f"num_classes must be at least 1, got {self.num_classes}")
        named = len(self.classes)
        if named not in {0, self.num_classes} or not all(type(n) is str for n in self.classes):
            raise ExportError(
                f"classes must be {self.num_classes} names, or empty; got {self.classes!r:.200}"
            )

    def class_name(self, index: int) -> str:
        """Name of a class, or its number if it has none."""
        return self.classes[index] if self.classes else f"class {index}"

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise that the client adds, see `total_noise`."""
        return total_noise(self.stages)

    @property
    def wire(self) -> TensorSpec:
        """What the client sends."""
        return TensorSpec(name=WIRE, shape=self.wire_shape)

    @property
    def logits(self) -> TensorSpec:
        """What the server answers."""
        return TensorSpec(name=LOGITS, shape=(self.num_classes,))

    @property
    def wire_floats(self) -> int:
        """Numbers sent for one image."""
        return math.prod(self.wire_shape)

    @property
    def identity(self) -> str:
        """A name for this pair of halves; a client and a server must have the same."""
        return sha256(f"{self.files.get(CLIENT, '')}/{self.files.get(SERVER, '')}".encode())[:16]

    def to_dict(self) -> Json:
        """The JSON of `manifest.json`."""
        own = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
        return {
            "format": FORMAT,
            **own,
            "noise_std": self.noise_std,
            "noise_source": "os.urandom",
            "datatype": DATATYPE,
            "preprocessing": PREPROCESSING,
        }

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


def read_manifest(folder: Path) -> Manifest:
    """Read and check `manifest.json`; other files are checked when they are read.

    Args:
        folder: An export.

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
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ExportError(f"{path} has format {data['format']!r}, expected {FORMAT!r}")
        data = {"attacker": None, "classes": (), **data}  # missing in the first exports
        own = {f.name: data[f.name] for f in fields(Manifest)}
        for name in ("image_shape", "wire_shape", "stages", "classes"):
            own[name] = tuple(own[name])
        manifest = Manifest(**own | {"files": dict(own["files"])})
    except (ValueError, KeyError, TypeError) as err:
        raise ExportError(f"{path} is broken: {err!r}; export the run again") from err
    # A manipulated total would promise noise that no stage adds.
    if data.get("noise_std") != manifest.noise_std or data.get("datatype") != DATATYPE:
        raise ExportError(
            f"{path} contradicts itself: noise_std {data.get('noise_std')} but its stages add "
            f"{manifest.noise_std}, datatype {data.get('datatype')}; export the run again"
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
        content = (folder / file).read_bytes()
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
    """One half of an export, its hash checked; `threads` 0 lets onnxruntime choose."""
    return open_half(read_verified(folder, manifest, file), threads, where=str(folder / file))


def open_half(model: bytes, threads: int = 0, *, where: str = "the model") -> OnnxHalf:
    """An ONNX model with one input and one output as a function of rows."""
    ort = onnxruntime()  # not at the top: a manifest can be read where it is not installed
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = ERRORS_ONLY
    try:
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as err:  # onnxruntime's own errors have no common parent below this
        raise ExportError(f"{where} cannot be loaded by onnxruntime: {err}; export again") from err
    (name,) = (i.name for i in session.get_inputs())

    def half(rows: Rows) -> Rows:
        found: Rows = session.run(None, {name: rows})[0]
        return found

    return half


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
def new_folder(folder: Path) -> Iterator[Path]:
    """A new folder to fill, which replaces `folder` if the block succeeds.

    If `folder` is a link, the link stays and its target is replaced.
    """
    folder = folder.resolve() if folder.is_symlink() else folder
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
            folder.rename(old)
        fresh.rename(folder)
    except OSError as err:
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise ExportError(f"cannot write {folder}: {err.strerror or err}; free some space") from err
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
