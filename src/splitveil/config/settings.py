"""Typed settings from text: `key=value`, TOML, and back. Knows nothing of what the keys mean."""

import json
import os
import re
import tomllib
import types
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from splitveil.errors import ConfigError, unknown

Value = bool | int | float | str | None | list[Any]
_SHORT = re.compile(r"[+-]?(\d+\.|\d*\.\d+)([eE][+-]?\d+)?")  # numbers that TOML has not: .5, 5.


def parse_pair(text: str) -> tuple[str, Value]:
    """`key=value` with the value in TOML syntax; a bare word is a string, .5 is a number too.

    >>> parse_pair("lambd=16"), parse_pair("form=hinge"), parse_pair("lambd=.5")
    (('lambd', 16), ('form', 'hinge'), ('lambd', 0.5))
    """
    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set needs key=value, got '{text}'; for example --set lambd=0.3")
    try:
        value: Value = tomllib.loads(f"v = {raw.strip()}")["v"]
    except tomllib.TOMLDecodeError:
        value = float(raw) if _SHORT.fullmatch(raw.strip()) else raw.strip()
    return key.strip(), value


def parse_pairs(texts: Sequence[str]) -> dict[str, Value]:
    """Several `key=value`; a repeated key is refused."""
    settings: dict[str, Value] = {}
    for text in texts:
        key, value = parse_pair(text)
        if key in settings:
            raise ConfigError(f"--set {key} is given twice; give it once")
        settings[key] = value
    return settings


def read_toml(path: Path) -> dict[str, Any]:
    """The keys of a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"cannot read the configuration {path}: {err}") from err
    except tomllib.TOMLDecodeError as err:
        raise ConfigError(
            f"{path} is not valid TOML: {err}; a text needs quotes, and a number digits on both "
            "sides of its point"
        ) from err


def write_toml(settings: Mapping[str, Any]) -> str:
    """Flat settings as TOML text; TOML has no null, so `"none"` stands for it.

    >>> print(write_toml({"seed": 0, "name": "a", "lr": None}), end="")
    seed = 0
    name = "a"
    lr = "none"
    """
    return "".join(f"{k} = {_toml(v)}\n" for k, v in settings.items())


def _toml(value: object) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(v) for v in value)}]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)


def field_types(cls: type) -> dict[str, Any]:
    """Names and types of a dataclass's fields."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls)}


def converted(settings: Mapping[str, Any], allowed: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The settings with each value of its field's type; every problem is reported at once."""
    problems, good = [], {}
    for key, value in settings.items():
        if key not in allowed:
            problems.append(unknown(what, key, allowed))
            continue
        try:
            good[key] = _convert(value, allowed[key])
        except ValueError as err:
            problems.append(f"{key} must be {err}, got {value!r}")
    if problems:
        raise ConfigError("; ".join(problems))
    return good


def check_settable(
    settings: Mapping[str, Any], kinds: Mapping[str, Any], taken: Collection[str], owner: str
) -> None:
    """Refuse fields of a class that a flat file of settings would not give back as they are."""
    problems = [
        f"{owner} has a field '{key}', which is the name of a setting of the run; rename the field"
        for key in settings
        if key in taken
    ]
    problems += [
        f"{owner} has a field '{key}' of type {getattr(kind, '__name__', kind)}, which cannot be "
        "set; make it a bool, int, float, str or Literal, or one of these with None"
        for key, kind in kinds.items()
        if not _settable(kind)
    ]
    if problems:
        raise ConfigError("; ".join(problems))
    try:
        converted(settings, kinds, "field")
    except ConfigError as err:
        raise ConfigError(f"{owner} is set to what cannot be set: {err}") from err


def _settable(kind: Any) -> bool:  # noqa: ANN401 - any declared type
    if get_origin(kind) in (Union, types.UnionType):
        options = [o for o in get_args(kind) if o is not type(None)]
        return len(options) == 1 and _settable(options[0])
    return get_origin(kind) is Literal or kind in (bool, int, float, str)


def _convert(value: Any, kind: Any) -> Any:  # noqa: ANN401 - a value of any declared type
    if get_origin(kind) in (Union, types.UnionType):
        options = get_args(kind)
        null = value is None or (value == "none" and str not in options)
        if null and type(None) in options:
            return None
        return _convert(value, next(o for o in options if o is not type(None)))
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
        raise ValueError(f"one of {', '.join(map(str, get_args(kind)))}")
    if kind is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise ValueError(names.get(kind, str(kind)))
