"""One exception tree: everything a user can cause and mend derives from `SplitVeilError`.

SplitVeilError
├── ConfigError      an unknown name, or a value outside its range
├── DataError        a dataset that is missing, corrupt or not what it says
├── RunError         a run folder that exists already, is absent, or cannot be written
├── CheckpointError  a checkpoint that is broken or belongs to another architecture
├── AuditError       an evaluation whose number would be false
└── in serve/faults.py, which a device imports alone:
    ExportError, WireError, ServerError

A message says what is wrong, what was got, what is allowed, and what to do next.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class SplitVeilError(Exception):
    """Base of every error that a user can cause; the command line exits with 2 on it."""


class ConfigError(SplitVeilError):
    """An unknown name, or a value outside its range."""


class DataError(SplitVeilError):
    """A dataset that is missing, corrupt, or not what it says it is."""


class RunError(SplitVeilError):
    """A run folder that exists already, is absent, or cannot be written."""


class CheckpointError(SplitVeilError):
    """A checkpoint that is broken or belongs to another architecture."""


class AuditError(SplitVeilError):
    """An evaluation that would produce a number nobody should believe."""


def unknown(what: str, got: str, allowed: Iterable[str]) -> str:
    """Message for an unknown name, with the nearest allowed one.

    >>> unknown("defence", "vell", ["none", "veil"])
    "unknown defence 'vell'; did you mean 'veil'? choose from: none, veil"
    """
    names = sorted(allowed)
    near = get_close_matches(got, names, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ";"
    return f"unknown {what} '{got}'{hint} choose from: {', '.join(names)}"
