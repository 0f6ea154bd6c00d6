"""Typed reading of plain JSON: absent, null and non-finite are None; a wrong type is an error."""

import json
import math
from collections.abc import Mapping
from typing import Any

from splitveil.errors import RunError

Json = dict[str, Any]


def parse(content: str) -> object:
    """The JSON value in a text; raises ValueError for what is none, or is nested without end."""
    try:
        return json.loads(content)
    except RecursionError as err:
        raise ValueError("it is nested too deep") from err


def finite(value: object) -> object:
    """A JSON value with null for every number that JSON does not know.

    >>> finite({"mse": math.nan, "per_class": [0.5, -math.inf]})
    {'mse': None, 'per_class': [0.5, None]}
    """
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
