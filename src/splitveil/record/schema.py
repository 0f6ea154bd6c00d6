"""`Record`: everything an audit found, typed to its leaves.

A record is validated once, when it is read, and written back as it was read. Every key may be
absent, as in older records: then a number, a text or a truth value is None, an object or a list is
empty. A number that is not finite counts as not measured. A field's comment or type gives its unit
and range; errors are mean squared errors of pixels in [0, 1].
"""

import base64
import copy
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from splitveil.errors import Range, RunError
from splitveil.io import Json, parse_json, read_text

Part = TypeVar("Part")
Share = Annotated[float, Range(0, 1)]  # also errors: images and reconstructions lie in [0, 1]
Count = Annotated[int, Range(0)]
Points = Annotated[float, Range(-100, 100)]  # of accuracy, in per cent


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Means over the scored images; low `mse` and high `ssim` and `psnr` favour the attacker.

    `accuracy` is the server's on the reconstructions: how much of the class they still show. It is
    None if there is no server.
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
    """Error of an oracle (worst case), of guessing by class (ceiling), of a blind guess (floor)."""

    mse: Share | None


@dataclass(frozen=True, kw_only=True)
class Strongest:
    """For each metric the best mean that an attack reached, and the name of that attack."""

    mse: Share | None
    mse_by: str | None
    ssim: Annotated[float, Range(-1, 1)] | None
    ssim_by: str | None
    ssim_zeropad: float | None
    psnr_pooled: float | None


@dataclass(frozen=True, kw_only=True)
class Rival:
    """The best other attack on the same images, for an attack scored on a subset of them."""

    attack: str | None
    mse: float | None


@dataclass(frozen=True, kw_only=True)
class AttackScores:
    """One attack: its mean scores, its access, how many images it was scored on, its seconds."""

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
    """What the client costs for one image.

    Args:
        macs: Multiply-adds, own head and maps of the channel included.
        params: Parameters in training.
        wire_floats: Numbers of one sending.
        stored: Numbers stored: parameters after folding BatchNorm, tables, noise scales.
        wire_bits: Bits of one sending.
        bits_per_image: Bits sent, on average over all scored images.
        uncounted: Numbers that pooling reads and activations compute, which count 0.
        track: The smallest track that it belongs to.
    """

    macs: Count | None
    params: Count | None
    wire_floats: Count | None
    stored: Count | None
    wire_bits: Count | None
    bits_per_image: float | None
    uncounted: Mapping[str, Any]
    track: str | None


@dataclass(frozen=True, kw_only=True)
class ServerCost:
    """Multiply-adds of the server for one sending, its parameters, and the average per image."""

    macs: Count | None
    params: Count | None
    macs_per_image: float | None


@dataclass(frozen=True, kw_only=True)
class SplitHashes:
    """Hashes of the test images, the images that the attacker knows, and the scored ones."""

    test: str | None
    aux: str | None
    scored: str | None


@dataclass(frozen=True, kw_only=True)
class Seeds:
    """Seed of the training and seed of the attacks."""

    train: int | None
    attack: int | None


@dataclass(frozen=True, kw_only=True)
class AuditFacts:
    """How the audit was made; `model` is the hash of the attacked model.

    `grid` is how many steps of the grid the client's noise has in one deviation; None where it is
    drawn in floating point, as before 0.2.0, or where there is none.
    """

    profile: str | None
    attacks_version: int | None
    precision: str | None
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
    accuracy_draws: Count | None
    grid: Count | None
    wire: Mapping[str, Any]


@dataclass(frozen=True)
class Flag:
    """A warning: its name, what was seen, and what to do about it."""

    name: str
    seen: str | None = None
    advice: str | None = None


@dataclass(frozen=True, kw_only=True)
class PerImage:
    """The strongest attack, and its MSE of every scored image as base64 of float16.

    `right` says how often each test image was answered right, of `audit.accuracy_draws` sendings,
    as base64 of bytes; `own_right` and `server_right` whether the own head and the server answer
    each scored image right, as base64 of bits.
    """

    attack: str | None
    mse: str | None
    right: str | None
    own_right: str | None
    server_right: str | None


@dataclass(frozen=True, kw_only=True)
class AloneRow:
    """The client alone that a record was compared with: the best of its track.

    Args:
        row: Its name.
        track: The track, such as B5; None if the record's client fits none.
        accuracy: Its accuracy.
        seeds: How many training seeds it has.
        same_client: The row that `gain_over_same_client` is against.
    """

    row: str | None
    track: str | None
    accuracy: Share | None
    seeds: Count | None
    same_client: str | None


@dataclass(frozen=True, kw_only=True)
class AtShare:
    """What one exit rule would give if it sent another share of the images; see `Record`."""

    sent: Share | None
    accuracy: Share | None
    leakage_sent: float | None
    exposure: float | None


@dataclass(frozen=True, kw_only=True)
class Identification:
    """The smallest certified share of images that nobody can identify, or why there is none."""

    at_least: float | None
    refused: str | None


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """A bound in nats, or why there is none."""

    refused: str | None
    nats: float | None
    nats_given_class: float | None
    vacuous: bool | None
    identification_error: Identification


@dataclass(frozen=True, kw_only=True)
class Record:
    """Everything an audit measured, with where it comes from; `to_dict` gives `record.json`.

    Args:
        accuracy: The server's on unchanged images, in [0, 1]; None without a server.
        attacks: Scores of every attack by name.
        strongest: The best mean of an attack per metric, over the attacks that can be compared.
        worst_case: Best error per image over all attacks.
        ceiling: Error of an attacker that knows the label alone.
        floor: Error of the mean image.
        leakage: 1 − strongest/ceiling: 1 if the attacker has the image, 0 or less if it knows no
            more than the label.
        true_rate_nats: Information per image about z beyond the class, nats; None if not known.
        client: What the client costs: multiply-adds, parameters, numbers sent.
        server: What the server costs; zeros where nothing is sent.
        config: Settings of the run.
        splits: Hashes of the images used.
        seeds: Seeds of training, splits and attacks.
        versions: Versions of the libraries.
        device: Where it was measured.
        seconds: Durations.
        audit: How the audit was made.
        training: How the run was trained.
        strongest_blackbox: As `strongest`, without white-box attacks.
        flags: Signs that a number should not be believed; None if the audit looked for none.
        per_image: The strongest attack's error of every scored image.
        certificates: Bounds that hold for every attack, by kind.
        leaks: Leaks beyond pixels, by kind.
        sent: Share of the scored images that leave the device; 1 without an exit rule.
        leakage_sent: Largest leakage of image and bands over the sent images; None if none is sent.
        exposure: What leaks over all images: see `audits.exposure`. Without an exit rule it is the
            leakage, for a client that answers alone 0.
        identified: Share of images whose z̃ singles them out among 1,000 that are sent.
        leakage_bands: Leakage of the 4×4 block means (low) and of the rest (detail).
        leakage_beyond_answer: 1 − MSE / MSE of the mean image of the class that the wire answers.
        shares: The same numbers at other thresholds of the exit rule, by the same attacks.
        probe: What linear heads answer without the server, and what the server adds.
        alone: The client alone that the next two were measured against; see `report.gains`.
        server_gain: Accuracy less that of the best client alone of the track, in points.
        gain_over_same_client: Accuracy less that of the same client alone, in points.
        intervals: 95 % limits over images of `sent`, `leakage_sent` and `exposure`, and over images
            and seeds of the gains.
        raw: The JSON that was read, including keys without a field.

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
    sent: Share | None
    leakage_sent: Annotated[float, Range(-math.inf, 1)] | None
    exposure: Annotated[float, Range(-math.inf, 1)] | None
    identified: Share | None
    leakage_bands: Mapping[str, float | None]
    leakage_beyond_answer: Annotated[float, Range(-math.inf, 1)] | None
    shares: tuple[AtShare, ...]
    probe: Mapping[str, Any]
    alone: AloneRow
    server_gain: Points | None
    gain_over_same_client: Points | None
    intervals: Mapping[str, Any]
    server: ServerCost
    raw: Json = field(default_factory=dict, repr=False)

    @property
    def flag_names(self) -> set[str]:
        """Names of the flags that the audit raised."""
        return {flag.name for flag in self.flags or ()}

    @property
    def audit_precision(self) -> Literal["float32", "bf16"]:
        """The precision of the attacks' decoders; older records have the usual one of a device."""
        known = self.audit.precision
        return "bf16" if known == "bf16" or (known is None and on_gpu(self.device)) else "float32"

    def to_dict(self) -> Json:
        """Plain JSON types; what was not measured is None, never NaN."""
        return copy.deepcopy(self.raw)

    def to_json(self) -> str:
        """The text of `record.json`, strict JSON."""
        return json.dumps(self.raw, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls, data: Json) -> "Record":
        """The record of a dictionary that `to_dict` wrote.

        Args:
            data: A JSON object; keys may be absent.

        Returns:
            The typed record.

        Raises:
            RunError: If a value has another type or lies outside its range.
        """
        made = replace(read_part(cls, data), raw=data)
        for key in ("epochs", "lambd", "noise_std"):
            number(made.config, key)
        return made

    @classmethod
    def of(cls, **parts: object) -> "Record":
        """A new record from the JSON of its parts, in the order of the fields."""
        given = {"training": {}} | parts
        missing = [part.name for part in fields(cls)[:-1] if part.name not in given]
        return cls.from_dict(
            {part.name: given[part.name] for part in fields(cls)[:-1] if part.name in given}
            | dict.fromkeys(missing)
        )


def on_gpu(device: str | None) -> bool:
    """Whether a device, as records name it, is a GPU."""
    return (device or "").startswith("cuda")


def parse_record(content: str) -> Record:
    """The record in a text; raises ValueError if it holds none, RunError for a wrong value."""
    try:
        data = parse_json(content, lenient=True)
    except ValueError as err:
        raise ValueError(f"not valid JSON: {err}") from err
    if not isinstance(data, dict):
        raise ValueError(f"a record is a JSON object, got {type(data).__name__}")
    missing = [key for key in ("strongest", "config") if not isinstance(data.get(key), dict)]
    if missing:
        raise ValueError(f"it has no {' and no '.join(missing)}")
    return Record.from_dict(data)


def read_record(path: Path) -> Record:
    """The record in a file; raises RunError if it cannot be read or is not a record."""
    try:
        return parse_record(read_text(path))
    except OSError as err:
        raise RunError(
            f"cannot read {path}: {err.strerror}; give the path of a record.json"
        ) from err
    except (ValueError, RunError) as err:
        raise RunError(f"{path} is not a record: {err}; `splitveil audit` writes records") from err


def read_part(kind: type[Part], data: object, where: str = "") -> Part:
    """A dataclass from a JSON object; the types of its fields say what each key must hold.

    Args:
        kind: The dataclass.
        data: The object, or None for an empty one. Unknown keys are ignored.
        where: The dotted path of the object in its file, for messages.

    >>> read_part(Seeds, {"train": 1, "unknown": 2})
    Seeds(train=1, attack=None)
    """
    values, prefix = _object(data, where), f"{where}." if where else ""
    hints = _hints(kind)  # type: ignore[arg-type] # every class is hashable
    return kind(
        **{key: read_value(hint, values.get(key), prefix + key) for key, hint in hints.items()}
    )


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {name: hint for name, hint in hints.items() if name != "raw"}


def read_value(hint: Any, value: object, where: str) -> Any:  # noqa: ANN401 - as the hint says
    """A JSON value of the type that a hint asks for; RunError for any other.

    >>> read_value(tuple[int, ...], [1, 2.0], "labels")
    (1, 2)
    """
    origin, inner = get_origin(hint), get_args(hint)
    if type(None) in inner:  # `X | None`
        return None if value is None else read_value(inner[0], value, where)
    if origin is Annotated:
        found = read_value(inner[0], value, where)
        if problem := None if found is None else inner[1].problem(f"`{where}`", found):
            raise RunError(problem)
        return found
    if origin is tuple:
        if not isinstance(value, list | None):
            raise wrong(where, "a list", value)
        return tuple(read_value(inner[0], v, f"{where}[{i}]") for i, v in enumerate(value or ()))
    if origin is Mapping:
        values = _object(value, where)
        return {key: read_value(inner[1], v, f"{where}.{key}") for key, v in values.items()}
    if isinstance(hint, type) and is_dataclass(hint):
        return read_part(hint, value, where)
    return _leaf(hint, value, where)


def _leaf(kind: Any, value: object, where: str) -> object:  # noqa: ANN401 - a type, or Any
    if kind in (int, float):
        found = _finite(value, where)
        if kind is float or found is None:
            return found
        if not found.is_integer():
            raise wrong(where, "a whole number", value)
        return value if isinstance(value, int) else int(found)
    if kind is not Any and not isinstance(value, kind):
        raise wrong(where, "a text" if kind is str else "true or false", value)
    return value


def _object(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping | None):
        raise wrong(where, "an object", value)
    return value or {}


def _finite(value: object, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(where, "a number", value)
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer too large for a float
        return None


def wrong(where: str, wanted: str, got: object) -> RunError:
    """The error for a value of the wrong kind at a path of keys."""
    given = "nothing" if got is None else f"{type(got).__name__} {got!r:.60}"
    return RunError(
        f"`{where}` must be {wanted}, got {given}; audit the run again to write a fresh record"
    )


def unpack(packed: str, dtype: str, where: str) -> NDArray[Any]:
    """The numbers (n,) in base64 of raw bytes; RunError if it is not base64 of such numbers."""
    try:
        return np.frombuffer(base64.b64decode(packed, validate=True), dtype=dtype)
    except ValueError as err:
        raise wrong(where, f"base64 of {np.dtype(dtype)}", packed) from err


def get(data: Record | Mapping[str, Any], path: str) -> Any:  # noqa: ANN401 - any JSON value
    """The JSON value at a dotted path of keys; None if a key is absent or null.

    >>> get({"attacks": {"linear": {"mse": 0.1}}}, "attacks.linear")
    {'mse': 0.1}
    """
    value: Any = data.raw if isinstance(data, Record) else data
    keys = path.split(".")
    for depth, key in enumerate(keys):
        value = _object(value, ".".join(keys[:depth])).get(key)
    return value


def number(data: Record | Mapping[str, Any], path: str) -> float | None:
    """A finite number at a dotted path of keys, or None if it was not measured.

    >>> number({"strongest": {"mse": 0.03}}, "strongest.mse")
    0.03
    """
    return _finite(get(data, path), path)


def text(data: Record | Mapping[str, Any], path: str) -> str | None:
    """The value at a dotted path of keys as text, JSON unless it is a text already; or None.

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


# float16 rounds the errors of single images; their mean differs by much less than this share of it,
# or for almost perfect reconstructions by half the smallest step of float16.
ROUNDING, LEAST = 0.01, 2.0**-25
NOT_NEEDED = 0.005  # accuracy that a server must add to what answers without it
BY_ALONE = "the client alone"  # how a flag begins that another run's record raised
LEARNED = 0.1  # of the way from guessing to always right: less is chance
AT_CHANCE, FAR_BELOW = "accuracy at chance", "far below the undefended model"  # flags
# Profiles whose numbers say little about a stronger attacker.
BRIEF = ("smoke", "demo", "quick", "laptop")


def shortfalls(record: Record) -> list[str]:
    """What makes an audit weaker than a standard one of the test images; empty if nothing does.

    >>> shortfalls(Record.from_dict({"audit": {"profile": "quick", "aux": "val"}}))
    ['quick audit', 'validation images']
    """
    audit = record.audit
    return [
        *([f"{audit.profile} audit"] if audit.profile in BRIEF else []),
        *(["some attacks"] if audit.only else []),
        *(["validation images"] if audit.aux == "val" else []),
    ]


def beats_guessing(accuracy: float, guess: float) -> bool:
    """Whether a model answers better than one that guesses.

    >>> beats_guessing(0.3, 0.1), beats_guessing(0.15, 0.1)
    (True, False)
    """
    return accuracy >= guess + LEARNED * (1 - guess)


def answers_well(record: Record) -> bool:
    """Whether a record may be praised: its accuracy is not at chance, nor far below its net's."""
    return record.flag_names.isdisjoint((AT_CHANCE, FAR_BELOW))


def exposure_of(record: Record) -> float | None:
    """What leaks over all images; older records have no exit rule, so theirs is the leakage.

    >>> exposure_of(Record.from_dict({"leakage": 0.25}))
    0.25
    """
    return record.leakage if record.exposure is None else record.exposure


def sends_part(record: Record) -> bool:
    """Whether an exit rule keeps some images: leakage and errors then describe the sent alone."""
    return record.sent is not None and 0 < record.sent < 1


def per_image_mse(record: Record) -> NDArray[np.float64] | None:
    """The strongest attack's MSE of every scored image (n,), or None if the record has none."""
    if not record.per_image.mse:
        return None
    values = unpack(record.per_image.mse, "<f2", "per_image.mse").astype(np.float64)
    mean, stated = float(values.mean()) if len(values) else 0.0, record.strongest.mse
    if stated is None or not abs(mean - stated) <= ROUNDING * stated + LEAST:
        raise RunError(
            f"per_image.mse has mean {mean:.6g}, but strongest.mse is {stated}; audit the run again"
        )
    return values


def answers_of(record: Record, who: Literal["own", "server"]) -> NDArray[np.uint8] | None:
    """Whether one head answers each scored image right (n,), 0 or 1; None if it is not known."""
    images, count = record.per_image, record.audit.scored
    kept = images.own_right if who == "own" else images.server_right
    if not kept or not count:
        return None
    bits = np.unpackbits(unpack(kept, "u1", f"per_image.{who}_right"))
    if not count <= len(bits) < count + 8:
        raise RunError(
            f"per_image.{who}_right holds {len(bits)} bits, but audit.scored is {count}; audit the "
            "run again"
        )
    return bits[:count]


def right_answers(record: Record) -> NDArray[np.float64] | None:
    """How often each test image was answered right (n,), in [0, 1], or None if it is not known."""
    draws = record.audit.accuracy_draws
    if not record.per_image.right or not draws:
        return None
    values = unpack(record.per_image.right, "u1", "per_image.right").astype(np.float64) / draws
    mean, stated = float(values.mean()) if len(values) else 0.0, record.accuracy
    if stated is None or not abs(mean - stated) <= LEAST:
        raise RunError(
            f"per_image.right has mean {mean:.6g}, but accuracy is {stated}; audit the run again"
        )
    return values
