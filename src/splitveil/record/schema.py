"""`Record`, typed to its leaves: checked once when it is read, written as it was read.

Every key may be absent, as in older records: a number, a text or a truth value is then None, an
object or a list empty. A number that is not finite counts as not measured.
"""

import base64
import binascii
import copy
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from splitveil.errors import Range, RunError
from splitveil.io import Json, parse

Part = TypeVar("Part")
Share = Annotated[float, Range(0, 1)]  # images and their reconstructions lie in [0, 1], too
Count = Annotated[int, Range(0)]


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
class Bound:
    """Error of an oracle (worst case), of a guess by class (ceiling), of a blind guess (floor)."""

    mse: Share | None


@dataclass(frozen=True, kw_only=True)
class Strongest:
    """Per metric the best mean of an attack, and which attack it was."""

    mse: Share | None
    mse_by: str | None
    ssim: Annotated[float, Range(-1, 1)] | None
    ssim_by: str | None
    ssim_zeropad: float | None
    psnr_pooled: float | None


@dataclass(frozen=True, kw_only=True)
class Rival:
    """The best of the other attacks on the images that an attack on a subset was scored on."""

    attack: str | None
    mse: float | None


@dataclass(frozen=True, kw_only=True)
class AttackScores:
    """One attack: its `Scores`, what it may see, on how many images, and how long it took."""

    mse: float | None
    psnr_pooled: float | None
    ssim: float | None
    accuracy: float | None
    access: str | None
    images: int | None
    subset: str | None
    beside: Rival
    repeats: int | None
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class ClientCost:
    """Operations and parameters of the client; numbers it sends per image."""

    macs: Count | None
    params: Count | None
    wire_floats: Count | None


@dataclass(frozen=True, kw_only=True)
class SplitHashes:
    """Which images were tested, known to the attacker, and scored."""

    test: str | None
    aux: str | None
    scored: str | None


@dataclass(frozen=True, kw_only=True)
class Seeds:
    """Of the training and of the attacks."""

    train: int | None
    attack: int | None


@dataclass(frozen=True, kw_only=True)
class AuditFacts:
    """How the audit was made; `model` is the hash of what was attacked."""

    profile: str | None
    aux: str | None
    aux_images: int | None
    scored: int | None
    command: str | None
    final: bool | None
    model: str | None
    compiled: bool | None
    only: tuple[str, ...]
    attributes: tuple[str, ...] | None
    left_out: Mapping[str, str]
    repeatable: bool | None
    wire: Mapping[str, Any]


@dataclass(frozen=True)
class Flag:
    """A sign of trouble: its name, what was seen, and what to do about it."""

    name: str
    seen: str | None = None
    advice: str | None = None


@dataclass(frozen=True, kw_only=True)
class PerImage:
    """The strongest attack and, as base64 of float16, its MSE of every scored image."""

    attack: str | None
    mse: str | None


@dataclass(frozen=True, kw_only=True)
class Identification:
    """The least share of images that are not recognised, or why none is certified."""

    at_least: float | None
    refused: str | None


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """A bound in nats, or why it is refused."""

    refused: str | None
    nats: float | None
    nats_given_class: float | None
    vacuous: bool | None
    identification_error: Identification


@dataclass(frozen=True, kw_only=True)
class Record:
    """Everything measured of one run, with its passport; `record.json` is its `to_dict`.

    `accuracy` is None if nobody answers what the client sends, `flags` if nobody looked for any.
    `raw` is the JSON that was read, with the keys that have no field.

    >>> Record.from_dict({"strongest": {"mse": 0.03, "mse_by": "linear"}}).strongest.mse
    0.03
    """

    accuracy: Share | None
    attacks: Mapping[str, AttackScores]
    strongest: Strongest
    worst_case: Bound
    ceiling: Bound
    floor: Bound
    leakage: Annotated[float, Range(-math.inf, 1)] | None
    true_rate_nats: float | None
    client: ClientCost
    config: Mapping[str, Any]
    splits: SplitHashes
    seeds: Seeds
    versions: Mapping[str, Any]
    device: str | None
    seconds: Mapping[str, float | None]
    audit: AuditFacts
    training: Mapping[str, Any]
    strongest_blackbox: Strongest
    flags: tuple[Flag, ...] | None
    per_image: PerImage
    certificates: Mapping[str, Certificate]
    leaks: Mapping[str, Mapping[str, Any]]
    raw: Json = field(default_factory=dict, repr=False)

    @property
    def flag_names(self) -> set[str]:
        """The flags that the audit raised."""
        return {flag.name for flag in self.flags or ()}

    def to_dict(self) -> Json:
        """Plain JSON types only; what was not measured is null, never NaN."""
        return copy.deepcopy(self.raw)

    def to_json(self) -> str:
        """Text of `record.json`; strict JSON."""
        return json.dumps(self.raw, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls, data: Json) -> "Record":
        """Read back what `to_dict` wrote; refuses values of another kind or out of their range."""
        made = replace(read_part(cls, data), raw=data)
        for key in ("epochs", "lambd", "noise_std"):
            number(made.config, key)
        return made

    @classmethod
    def of(cls, **parts: object) -> "Record":
        """A fresh record of the JSON of its parts, written in the order of the fields."""
        given = {"training": {}} | parts
        return cls.from_dict({part.name: given[part.name] for part in fields(cls)[:-1]})


def parse_record(content: str) -> Record:
    """The record in a text; raises ValueError where it holds none, RunError for a wrong value."""
    try:
        data = parse(content)
    except ValueError as err:
        raise ValueError(f"no JSON: {err}") from err
    if not isinstance(data, dict):
        raise ValueError(f"a record is an object, got {type(data).__name__}")
    missing = [key for key in ("strongest", "config") if not isinstance(data.get(key), dict)]
    if missing:
        raise ValueError(f"no {' and no '.join(missing)} in it")
    return Record.from_dict(data)


def read_record(path: Path) -> Record:
    """A record from a file; anything else is refused with its reason."""
    try:
        return parse_record(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise RunError(
            f"cannot read {path}: {err.strerror}; give the path of a record.json"
        ) from err
    except (ValueError, RunError) as err:
        raise RunError(f"{path} is not a record: {err}; `splitveil audit` writes records") from err


def read_part(kind: type[Part], data: object, where: str = "") -> Part:
    """A dataclass of a JSON object, whose fields' types say what each key must hold.

    Args:
        kind: The dataclass.
        data: The object, or None for an empty one.
        where: The path of keys that leads to it, for the message.

    >>> read_part(Seeds, {"train": 1, "unknown": 2})
    Seeds(train=1, attack=None)
    """
    values, prefix = _object(data, where), f"{where}." if where else ""
    hints = _hints(kind)  # type: ignore[arg-type] # every class is hashable
    return kind(**{key: _read(hint, values.get(key), prefix + key) for key, hint in hints.items()})


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {name: hint for name, hint in hints.items() if name != "raw"}


def _read(hint: Any, value: object, where: str) -> Any:  # noqa: ANN401 - whatever the hint says
    """A JSON value as a type hint says."""
    origin, inner = get_origin(hint), get_args(hint)
    if type(None) in inner:  # of `X | None`
        return None if value is None else _read(inner[0], value, where)
    if origin is Annotated:
        found = _read(inner[0], value, where)
        if problem := None if found is None else inner[1].problem(f"`{where}`", found):
            raise RunError(problem)
        return found
    if origin is tuple:
        if not isinstance(value, list | None):
            raise _wrong(where, "a list", value)
        return tuple(_read(inner[0], v, f"{where}[{at}]") for at, v in enumerate(value or ()))
    if origin is Mapping:
        values = _object(value, where)
        return {key: _read(inner[1], item, f"{where}.{key}") for key, item in values.items()}
    if isinstance(hint, type) and is_dataclass(hint):
        return read_part(hint, value, where)
    return _leaf(hint, value, where)


def _leaf(kind: Any, value: object, where: str) -> object:  # noqa: ANN401 - a type, or Any
    if kind in (int, float):
        found = _finite(value, where)
        if kind is float or found is None:
            return found
        if not found.is_integer():
            raise _wrong(where, "a whole number", value)
        return value if isinstance(value, int) else int(found)
    if kind is not Any and not isinstance(value, kind):
        raise _wrong(where, "a text" if kind is str else "true or false", value)
    return value


def _object(value: object, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _wrong(where, "an object", value)
    return value


def _finite(value: object, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(where, "a number", value)
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number beyond every float
        return None


def _wrong(where: str, wanted: str, got: object) -> RunError:
    return RunError(
        f"`{where}` must be {wanted}, got {type(got).__name__} {got!r:.60}; "
        "audit the run again to write a fresh record"
    )


def get(data: Record | Mapping[str, Any], path: str) -> Any:  # noqa: ANN401 - any JSON value
    """The JSON value at a path of keys with dots between; None as soon as a key is absent or null.

    >>> get({"attacks": {"linear": {"mse": 0.1}}}, "attacks.linear")
    {'mse': 0.1}
    """
    value: Any = data.raw if isinstance(data, Record) else data
    keys = path.split(".")
    for depth, key in enumerate(keys):
        value = _object(value, ".".join(keys[:depth])).get(key)
    return value


def number(data: Record | Mapping[str, Any], path: str) -> float | None:
    """A finite number at a path of keys, or None when it was not measured.

    >>> number({"strongest": {"mse": 0.03}}, "strongest.mse")
    0.03
    """
    return _finite(get(data, path), path)


def text(data: Record | Mapping[str, Any], path: str) -> str | None:
    """The value at a path of keys as text (JSON where it is not text), or None.

    >>> text({"config": {"seed": 0, "final": True}}, "config.seed")
    '0'
    """
    value = get(data, path)
    return value if value is None or isinstance(value, str) else json.dumps(value)


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


ROUNDING = 0.01  # half-precision errors per image average to far less than this share of the mean
LEAST = 2.0**-25  # but those of images rebuilt all but perfectly: half a step of half precision
BRIEF = ("smoke", "quick")  # profiles whose numbers say little about a stronger attacker


def shortfalls(record: Record) -> list[str]:
    """What makes an audit less than a standard one of test images; empty where nothing does.

    >>> shortfalls(Record.from_dict({"audit": {"profile": "quick", "aux": "val"}}))
    ['quick audit', 'validation images']
    """
    told = record.audit
    return [
        *([f"{told.profile} audit"] if told.profile in BRIEF else []),
        *(["some attacks"] if told.only else []),
        *(["validation images"] if told.aux == "val" else []),
    ]


def per_image_mse(record: Record) -> NDArray[np.float64] | None:
    """The strongest attack's MSE of every scored image (n,), or None where none is kept."""
    if not record.per_image.mse:
        return None
    try:
        values = np.frombuffer(base64.b64decode(record.per_image.mse, validate=True), dtype="<f2")
    except (binascii.Error, ValueError) as err:
        raise RunError(
            f"per_image.mse is not base64 of float16: {err}; audit the run again"
        ) from err
    made = values.astype(np.float64)
    mean, stated = float(made.mean()) if len(made) else 0.0, record.strongest.mse
    if stated is None or not abs(mean - stated) <= ROUNDING * stated + LEAST:
        raise RunError(
            f"per_image.mse has mean {mean:.6g}, but strongest.mse is {stated}; audit the run again"
        )
    return made
