"""Typed settings from text (`key=value` or TOML) and back; the keys have no meaning here."""

import json
import os
import re
import types
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from splitveil.errors import ConfigError, unknown
from splitveil.io import MAX_SETTINGS, parse_toml, read_text

Value = bool | int | float | str | None | list[Any]
# Python writes .5 and 5. where TOML wants 0.5 and 5.0; --set accepts both.
_SHORT = re.compile(r"[+-]?(\d+\.|\d*\.\d+)([eE][+-]?\d+)?")


def parse_pair(text: str) -> tuple[str, Value]:
    """Split `key=value`. The value is in TOML syntax, but a string needs no quotes and .5 is fine.

    Args:
        text: What follows `--set` on the command line.

    Returns:
        The key, and the value as a bool, int, float, str or list.

    >>> parse_pair("lambd=16"), parse_pair("form=hinge"), parse_pair("lambd=.5")
    (('lambd', 16), ('form', 'hinge'), ('lambd', 0.5))
    """
    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set takes key=value, got '{text}'; write for example --set lambd=0.3")
    try:
        value: Value = parse_toml(f"v = {raw.strip()}")["v"]
    except ValueError:
        value = float(raw) if _SHORT.fullmatch(raw.strip()) else raw.strip()
    return key.strip(), value


def parse_pairs(texts: Sequence[str]) -> dict[str, Value]:
    """Several `key=value` as one table; a repeated key raises a ConfigError."""
    settings: dict[str, Value] = {}
    for text in texts:
        key, value = parse_pair(text)
        if key in settings:
            raise ConfigError(f"--set {key} is given twice; keep one of them")
        settings[key] = value
    return settings


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file into a table."""
    try:
        return parse_toml(read_text(path, MAX_SETTINGS))
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"cannot read the settings file {path}: {err}; check the path") from err
    except ValueError as err:
        raise ConfigError(
            f"{path} is not valid TOML: {err}; put strings in quotes, and write a digit on each "
            "side of a decimal point (0.5, not .5)"
        ) from err


def write_toml(settings: Mapping[str, Any]) -> str:
    """Flat settings as TOML text. TOML has no null, so None is written as `"none"`.

    >>> print(write_toml({"seed": 0, "name": "a", "lr": None}), end="")
    seed = 0
    name = "a"
    lr = "none"
    """
    return "".join(f"{k} = {_toml(v)}\n" for k, v in settings.items())


def _toml(value: object) -> str:
    if value is None:
        return '"none"'
    # JSON spells strings, booleans, integers and lists as TOML does, but not inf and nan.
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def field_types(cls: type) -> dict[str, Any]:
    """Name and type of each field of a dataclass."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls)}


# Names that the reference documents use for what has another name here.
DOCUMENT_NAMES = {
    "use_attention_cem": "choose a defence by its name: gated-att, slot-cross, or none",
    "random_ini_centers": "set skip_first_epoch",
    "num_epochs": "set epochs",
    "tau": "set var_threshold, which is tau divided by the squared noise_std",
    "τ": "set var_threshold, which is τ divided by the squared noise_std",
    "warmup": "set attention_warmup_epochs",
    "tau_snr": "set snr_thresh",
    "alpha_snr": "set snr_sharp",
    "beta_sp": "set softplus_beta",
    "alpha_xattn": "it is learned from 0.1 on and cannot be set",
    "alpha_ffn": "it is learned from 0.1 on and cannot be set",
    "assign.temp": "set assign_temp",
}


def converted(settings: Mapping[str, Any], allowed: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Convert each setting to the type of its field.

    Args:
        settings: Values by name, as TOML or a caller gives them.
        allowed: Types by name, see `field_types`.
        what: What a setting is called in messages.

    Raises:
        ConfigError: One message with every unknown name and every value of a wrong type.
    """
    problems, good = [], {}
    for key, value in settings.items():
        if key not in allowed:
            known = DOCUMENT_NAMES.get(key)
            problems.append(
                f"'{key}' has another name here; {known}" if known else unknown(what, key, allowed)
            )
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
    """Validate that `config.toml` can store the fields of a defence and give them back."""
    problems = [
        f"{owner} has a field '{key}', but that is a setting of every run; rename the field"
        for key in settings
        if key in taken
    ]
    problems += [
        f"{owner} has a field '{key}' of type {getattr(kind, '__name__', kind)}, which config.toml "
        "cannot store; use bool, int, float, str or Literal, or one of these or None"
        for key, kind in kinds.items()
        if not _settable(kind)
    ]
    if problems:
        raise ConfigError("; ".join(problems))
    try:
        converted(settings, kinds, "field")
    except ConfigError as err:
        raise ConfigError(f"{owner} has a default of the wrong type: {err}") from err


def _members(kind: Any) -> tuple[Any, ...]:  # noqa: ANN401 - any declared type
    """The types of a union; a type that is no union alone."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _settable(kind: Any) -> bool:  # noqa: ANN401 - any declared type
    options = [o for o in _members(kind) if o is not types.NoneType]
    simple = [o for o in options if get_origin(o) is Literal or o in (bool, int, float, str)]
    return len(options) == len(simple) == 1


def _convert(value: Any, kind: Any) -> Any:  # noqa: ANN401 - a value of any declared type
    options = _members(kind)
    # The word none means None, except where it is a legal string (a run may be called none).
    if types.NoneType in options and (value is None or (value == "none" and str not in options)):
        return None
    kind = next(o for o in options if o is not types.NoneType)
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
        raise ValueError(f"one of {', '.join(map(str, get_args(kind)))}")
    if kind is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    # Python counts bool as int; `seed=true` is a mistake all the same.
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
    raise ValueError(names.get(kind, str(kind)))
