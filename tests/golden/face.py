"""The package as its users meet it: the console script, and JSON compared value by value."""

import io
import json
import math
import sys
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent
OLD = GOLDEN / "v0_1_0"


@dataclass(frozen=True)
class Said:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


def command(*words: object) -> Said:
    """Run the console script in this process, found as the installer finds it."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    module, _, function = scripts["project"]["scripts"]["splitveil"].partition(":")
    entry = getattr(import_module(module), function)
    out, err = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, ["splitveil", *map(str, words)]
    code: Any = 0
    try:
        with redirect_stdout(out), redirect_stderr(err):
            entry()
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.argv = before
    return Said(int(code), out.getvalue(), err.getvalue())


def told(*words: object) -> Any:  # noqa: ANN401 - any JSON value
    """What a command prints with `--json`; it must succeed."""
    said = command(*words, "--json")
    assert said.code == 0, said.err + said.out
    return json.loads(said.out)


def differences(old: Any, new: Any, rel: float = 1e-12, at: str = "") -> Iterator[str]:  # noqa: ANN401
    """Where two JSON values differ: keys and their order, types, and numbers beyond `rel`."""
    if isinstance(old, dict) and isinstance(new, dict):
        if list(old) != list(new):
            yield f"{at}: keys {list(old)} became {list(new)}"
        for key in old.keys() & new.keys():
            yield from differences(old[key], new[key], rel, f"{at}/{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from differences(a, b, rel, f"{at}/{i}")
    elif not _same(old, new, rel):
        yield f"{at}: {old!r} became {new!r}"


def _same(old: object, new: object, rel: float) -> bool:
    if isinstance(old, float) and isinstance(new, float):
        return math.isclose(old, new, rel_tol=rel, abs_tol=rel)
    return type(old) is type(new) and old == new


VALUES = ("config", "splits", "client", "seeds")  # of a record: what is decided before measuring
NAMED = ("images", "access", "repeats", "subset", "profile", "aux", "rows", "data_hash")
LOOSE = ("flags", "versions", "device")  # of a machine, or decided by the last bits
PLACES = ("runs_dir", "data_dir", "name", "teacher")


def facts(record: Any, at: tuple[str, ...] = ()) -> dict[str, Any]:  # noqa: ANN401
    """Every key of a fresh record with its type, and values where no machine decides them."""
    if at[:1] and at[0] in LOOSE:
        return {}
    if isinstance(record, dict):
        found: dict[str, Any] = {"/".join((*at, "")): list(record)}
        for key, value in record.items():
            found |= facts(value, (*at, key))
        return found
    if isinstance(record, list) and record and isinstance(record[0], dict):
        return facts(record[0], (*at, "0"))
    known = bool(at) and (at[0] in VALUES or at[-1] in NAMED) and at[-1] not in PLACES
    if known and not isinstance(record, list | float):
        return {"/".join(at): record}
    return {"/".join(at): type(record).__name__}
