"""Record typed to its leaves: read, validated, written once."""

import base64
import binascii
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitveil.errors import RunError
from splitveil.io import Json


def _dig(data: Mapping[str, Any] | None, keys: tuple[str, ...]) -> object:
    """The value at a path of keys, or None as soon as a key is absent or null."""
    value: object = data
    for depth, key in enumerate(keys):
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise _wrong(".".join(keys[:depth]), "an object", value)
        value = value.get(key)
    return value


def _wrong(where: str, wanted: str, got: object) -> RunError:
    return RunError(
        f"`{where}` must be {wanted}, got {type(got).__name__} {got!r:.60}; "
        "audit the run again to write a fresh record"
    )


def number(data: Mapping[str, Any] | None, *keys: str) -> float | None:
    """A finite number at a path of keys, or None when it was not measured.

    >>> number({"strongest": {"mse": 0.03}}, "strongest", "mse")
    0.03
    >>> number({"strongest": None}, "strongest", "mse") is None
    True
    """
    value = _dig(data, keys)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(".".join(keys), "a number", value)
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number beyond every float
        return None


def text(data: Mapping[str, Any] | None, *keys: str) -> str | None:
    """The value at a path of keys as text (JSON where it is not text), or None.

    >>> text({"config": {"seed": 0, "final": True}}, "config", "seed")
    '0'
    """
    value = _dig(data, keys)
    return value if value is None or isinstance(value, str) else json.dumps(value)


def section(data: Mapping[str, Any] | None, *keys: str) -> Json:
    """The object at a path of keys; empty when absent.

    >>> section({"attacks": {"linear": {"mse": 0.1}}}, "attacks", "linear")
    {'mse': 0.1}
    """
    value = _dig(data, keys)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _wrong(".".join(keys), "an object", value)
    return dict(value)


def leaves(data: Mapping[str, Any], prefix: str = "") -> Json:
    """The values of nested JSON by dotted keys, in file order.

    >>> leaves({"seeds": {"train": 0}, "device": "cpu"})
    {'seeds.train': 0, 'device': 'cpu'}
    """
    found: Json = {}
    for key, value in data.items():
        inner = isinstance(value, Mapping)
        found |= leaves(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return found


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Means over the scored images; `mse` low and `ssim`, `psnr` high favour the attacker.

    `accuracy` is the server's on the reconstructions: what they still tell of the class; None if
    nobody answers.
    """

    mse: float
    psnr: float
    psnr_pooled: float
    ssim: float | None
    ssim_zeropad: float
    ssim_valid: float | None
    accuracy: float | None
    lpips: float | None = None


@dataclass(frozen=True, kw_only=True)
class Record:
    """Everything measured of one run, with its passport; `record.json` is its `to_dict`.

    `accuracy` is None if nobody answers what the client sends.
    """

    accuracy: float | None
    attacks: Mapping[str, Json]
    strongest: Json
    worst_case: Json
    ceiling: Json
    floor: Json
    leakage: float
    true_rate_nats: float | None
    client: Json
    config: Json
    splits: Json
    seeds: Json
    versions: Json
    device: str
    seconds: Json
    audit: Json
    training: Json = field(default_factory=dict)
    strongest_blackbox: Json = field(default_factory=dict)
    flags: list[Json] = field(default_factory=list)
    per_image: Json = field(default_factory=dict)
    certificates: Json = field(default_factory=dict)
    leaks: Json = field(default_factory=dict)

    def to_dict(self) -> Json:
        """Plain JSON types only; what was not measured is null, never NaN."""
        return asdict(self)

    def to_json(self) -> str:
        """Text of `record.json`; strict JSON."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls, data: Json) -> "Record":
        """Read back what `to_dict` wrote."""
        return cls(**data)


def read_record(path: Path) -> Record:
    """A record from a file; anything else is refused with its reason."""
    try:
        record = Record.from_dict(json.loads(path.read_text(encoding="utf-8")))
        if not (isinstance(record.audit, dict) and isinstance(record.seeds, dict)):
            raise TypeError("audit and seeds must be tables")
        return record
    except OSError as err:
        raise RunError(
            f"cannot read {path}: {err.strerror}; give the path of a record.json"
        ) from err
    except (ValueError, TypeError) as err:
        raise RunError(f"{path} is not a record: {err}; `splitveil audit` writes records") from err


ROUNDING = 0.01  # half-precision errors per image average to far less than this share of the mean
LEAST = 2.0**-25  # but those of images rebuilt all but perfectly: half a step of half precision
BRIEF = ("smoke", "quick")  # profiles whose numbers say little about a stronger attacker

NUMBERS = (
    "accuracy", "strongest.mse", "strongest.ssim", "strongest.ssim_zeropad",
    "strongest.psnr_pooled", "worst_case.mse", "ceiling.mse", "leakage", "true_rate_nats",
    "client.macs", "client.params", "client.wire_floats", "seconds.train",
    "audit.scored", "audit.aux_images",
    "config.epochs", "config.lambd", "config.noise_std",
)  # fmt: skip

SHARE, COUNT = (0.0, 1.0), (0.0, math.inf)  # images and their reconstructions lie in [0, 1]

LIMITS = {
    "accuracy": SHARE, "strongest.mse": SHARE, "worst_case.mse": SHARE, "ceiling.mse": SHARE,
    "floor.mse": SHARE, "leakage": (-math.inf, 1.0), "strongest.ssim": (-1.0, 1.0),
    "client.macs": COUNT, "client.params": COUNT, "client.wire_floats": COUNT,
}  # fmt: skip

TEXTS = (
    "strongest.mse_by", "config.net", "config.dataset", "config.defence", "audit.aux",
    "audit.profile", "audit.final", "splits.scored", "seeds.train", "seeds.attack", "device",
)  # fmt: skip


def flag_names(record: Json) -> set[str]:
    """The flags that an audit raised."""
    return {flag["name"] for flag in record.get("flags") or ()}


def shortfalls(record: Json | None) -> list[str]:
    """What makes an audit less than a standard one of test images; empty where nothing does.

    >>> shortfalls({"audit": {"profile": "quick", "aux": "val"}})
    ['quick audit', 'validation images']
    """
    told = section(record, "audit")
    profile = text(told, "profile")
    return [
        *([f"{profile} audit"] if profile in BRIEF else []),
        *(["some attacks"] if told.get("only") else []),
        *(["validation images"] if text(told, "aux") == "val" else []),
    ]


def _check(record: Json) -> None:
    """Refuse a record whose values are not of the kind that an audit writes."""
    for path in NUMBERS:
        number(record, *path.split("."))
    refuse_impossible(record, LIMITS)
    for path in TEXTS:
        text(record, *path.split("."))
    best = text(record, "strongest", "mse_by")
    if best is not None:
        number(section(record, "attacks"), best, "accuracy")
    flags = record.get("flags")
    named = isinstance(flags, list) and all(
        isinstance(flag, dict) and isinstance(flag.get("name"), str) for flag in flags
    )
    if flags is not None and not named:
        raise RunError("`flags` must be a list of objects with a name; audit the run again")
    per_image_mse(record)


def per_image_mse(record: Json) -> NDArray[np.float64] | None:
    """The strongest attack's MSE of every scored image (n,), or None where none is kept."""
    packed = text(record, "per_image", "mse")
    if not packed:
        return None
    try:
        values = np.frombuffer(base64.b64decode(packed, validate=True), dtype="<f2")
    except (binascii.Error, ValueError) as err:
        raise RunError(
            f"per_image.mse is not base64 of float16: {err}; audit the run again"
        ) from err
    made = values.astype(np.float64)
    mean, stated = float(made.mean()) if len(made) else 0.0, number(record, "strongest", "mse")
    if stated is None or not abs(mean - stated) <= ROUNDING * stated + LEAST:
        raise RunError(
            f"per_image.mse has mean {mean:.6g}, but strongest.mse is {stated}; audit the run again"
        )
    return made


def refuse_impossible(record: Mapping[str, Any], limits: Mapping[str, tuple[float, float]]) -> None:
    """Refuse a number, known by its path of keys, that lies outside its limits."""
    for path, (least, most) in limits.items():
        value = number(record, *path.split("."))
        if value is not None and not least <= value <= most:
            rule = f"lie between {least:g} and {most:g}"
            if math.isinf(least) or math.isinf(most):
                rule = f"be at least {least:g}" if math.isinf(most) else f"be at most {most:g}"
            raise RunError(f"`{path}` must {rule}, got {value:g}")
