"""What a sweep varies: text such as `lambd=0.1,0.3,1` or `noise_std=log:0.01:0.2`, checked."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random
from types import UnionType
from typing import Any, Union, get_args, get_origin

from splitveil.config import RUN_KEYS, find_defence
from splitveil.config.settings import Value, checked, parse_pair
from splitveil.errors import ConfigError, unknown

Settings = dict[str, Any]

KINDS = ("lin", "log")
MOST = 10_000  # trials of a defence: what is counted first, so that nothing endless is begun
FIXED = (  # one for the whole sweep, or its trials could not be compared or found again
    "dataset", "defence", "name", "data_dir", "runs_dir", "device", "compile", "final",
    "split_seed", "teacher",
)  # fmt: skip
_SHAPE = "key=a,b,c or key=lin:low:high or key=log:low:high, with :count behind it for a grid"


@dataclass(frozen=True, kw_only=True)
class Choices:
    """A field and the values it may take."""

    key: str
    values: tuple[Value, ...]


@dataclass(frozen=True, kw_only=True)
class Range:
    """A field and the interval it is drawn from; `points` is how many of it a grid takes."""

    key: str
    low: float
    high: float
    log: bool
    points: int | None = None
    whole: bool = False


Dimension = Choices | Range
Space = tuple[Dimension, ...]


def parse_dimension(text: str) -> Dimension:
    """One `--vary`; what its values mean is not known yet.

    >>> parse_dimension("lambd=0.1,1")
    Choices(key='lambd', values=(0.1, 1))
    >>> parse_dimension("noise_std=log:0.01:0.2")
    Range(key='noise_std', low=0.01, high=0.2, log=True, points=None, whole=False)
    """
    key, equals, raw = (part.strip() for part in text.partition("="))
    if not equals or not key or not raw:
        raise ConfigError(f"--vary needs {_SHAPE}; got '{text}'")
    key = "noise_std" if key == "reg_strength" else key
    if key in FIXED:
        raise ConfigError(f"{key} is one for the whole sweep and cannot be varied")
    kind, colon, rest = raw.partition(":")
    if colon and kind in KINDS:
        return _range(key, kind, rest, text)
    items = [item.strip() for item in raw.split(",")]
    if "" in items:
        raise ConfigError(f"--vary {text} has an empty value; give {_SHAPE}")
    values = tuple(parse_pair(f"{key}={item}")[1] for item in items)
    return Choices(key=key, values=values)


def _range(key: str, kind: str, rest: str, text: str) -> Range:
    try:
        low, high, *more = (float(word) for word in rest.split(":"))
        points = None if not more else int(more[0])
        if len(more) > 1 or (more and points != more[0]):
            raise ValueError
    except (ValueError, OverflowError):
        raise ConfigError(f"--vary {text} is no range; give {_SHAPE}") from None
    if not math.isfinite(high - low):
        raise ConfigError(f"--vary {text}: both ends of a range and its width must be finite")
    if low >= high:
        raise ConfigError(f"--vary {text} is empty: its low end must be below its high end")
    if kind == "log" and low <= 0:
        raise ConfigError(f"--vary {text}: a log range must start above 0; use lin, or raise it")
    if points is not None and not 2 <= points <= MOST:  # noqa: PLR2004 - the two ends
        raise ConfigError(
            f"--vary {text}: a grid takes from 2 to {MOST} points of a range, got {points}; give "
            "another count, or leave it out and use --sampler random or optuna"
        )
    return Range(key=key, low=low, high=high, log=kind == "log", points=points)


def applies(key: str, defence: str) -> bool:
    """Whether a defence has this field: noise is none of a defence that adds none."""
    found = find_defence(defence)
    return (key in RUN_KEYS or key in found.setting_types()) and (key != "noise_std" or found.noisy)


def spaces(texts: Sequence[str], defences: Sequence[str]) -> dict[str, Space]:
    """What is varied for each defence: the fields it has, with values of their types.

    A field that none of the defences has is refused, and so is one given twice.
    """
    dimensions = [parse_dimension(text) for text in texts]
    keys = [d.key for d in dimensions]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"--vary {key} is given twice; give it once")
    refuse_strays(keys, defences)
    return {
        name: tuple(_typed(d, name) for d in dimensions if applies(d.key, name))
        for name in defences
    }


def refuse_strays(keys: Iterable[str], defences: Sequence[str]) -> None:
    """Refuse fields that no defence of the sweep has."""
    for key in keys:
        if not any(applies(key, name) for name in defences):
            known = {k for n in defences for k in (*find_defence(n).setting_types(), *RUN_KEYS)}
            what = f"field of {', '.join(defences)}"
            if key in known:
                raise ConfigError(f"{key} means nothing to {', '.join(defences)}; leave it out")
            raise ConfigError(unknown(what, key, known - {*FIXED}))


def _typed(dimension: Dimension, defence: str) -> Dimension:
    """The dimension with values of its field's type."""
    types: Mapping[str, Any] = {**find_defence(defence).setting_types(), **RUN_KEYS}
    kind, key, what = types[dimension.key], dimension.key, f"setting for defence '{defence}'"
    if isinstance(dimension, Choices):
        values = tuple(checked({key: v}, types, what)[key] for v in dimension.values)
        if len(set(map(repr, values))) < len(values):
            raise ConfigError(f"--vary {key} names a value twice: {list(values)}")
        return replace(dimension, values=values)
    plain = [t for t in get_args(kind) if t is not type(None)]
    number = plain[0] if get_origin(kind) in (Union, UnionType) else kind
    if number not in (int, float):
        raise ConfigError(f"{key} is no number and has no range; list its values: {key}=a,b")
    if number is int and not (dimension.low.is_integer() and dimension.high.is_integer()):
        raise ConfigError(
            f"{key} must be a whole number, got the range {dimension.low:g} to {dimension.high:g}"
        )
    return replace(dimension, whole=number is int)


def value_at(dimension: Range, share: float) -> float | int:
    """The value a share of the way through a range; through its logarithms for `log`.

    >>> value_at(Range(key="lambd", low=0.01, high=1.0, log=True), 0.5)
    0.1
    """
    low, high = dimension.low, dimension.high
    if dimension.log:
        raw = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    else:
        raw = low + share * (high - low)
    raw = min(max(raw, low), high)
    return round(raw) if dimension.whole else float(f"{raw:.12g}")


def listed(dimension: Dimension) -> list[Any]:
    """The values a grid takes of a dimension."""
    if isinstance(dimension, Choices):
        return list(dimension.values)
    if dimension.points is None:
        raise ConfigError(
            f"a grid needs listed values, and {dimension.key} is a range; say how many points of "
            f"it, as in {dimension.key}={'log' if dimension.log else 'lin'}:{dimension.low:g}:"
            f"{dimension.high:g}:5, or use --sampler random or optuna"
        )
    shares = [i / (dimension.points - 1) for i in range(dimension.points)]
    return list(dict.fromkeys(value_at(dimension, share) for share in shares))


def grid_size(space: Space) -> int:
    """How many points a grid has, counted before it is built; refused where it has too many."""
    counts = {d.key: len(listed(d)) for d in space}
    size = math.prod(counts.values())
    if size > MOST:
        words = " × ".join(f"{count} of {key}" for key, count in counts.items())
        raise ConfigError(
            f"a grid of {words} has {size} points, and a defence has at most {MOST} trials; take "
            "fewer values, or use --sampler random or optuna with --trials"
        )
    return size


def grid(space: Space) -> list[Settings]:
    """Every combination, the last field changing fastest.

    >>> grid((Choices(key="a", values=(1, 2)), Choices(key="b", values=("x",))))
    [{'a': 1, 'b': 'x'}, {'a': 2, 'b': 'x'}]
    """
    grid_size(space)
    keys = [d.key for d in space]
    return [dict(zip(keys, row, strict=True)) for row in product(*map(listed, space))]


def draw(space: Space, random: Random) -> Settings:
    """One point of the space, each field drawn by itself."""
    return {
        d.key: random.choice(d.values) if isinstance(d, Choices) else value_at(d, random.random())
        for d in space
    }


def corners(space: Space) -> list[Settings]:
    """Settings that together hold every listed value and both ends of every range."""
    ends = [
        list(d.values) if isinstance(d, Choices) else [value_at(d, 0.0), value_at(d, 1.0)]
        for d in space
    ]
    rows = max(map(len, ends), default=1)
    return [{d.key: e[i % len(e)] for d, e in zip(space, ends, strict=True)} for i in range(rows)]
