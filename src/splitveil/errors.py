"""One exception tree, the wire's errors included.

SplitVeilError
├── ConfigError      an unknown name, or a value outside its range
├── DataError        a dataset that is missing, corrupt or not what it says
├── RunError         a run folder that exists already, is absent, or cannot be written
├── CheckpointError  a checkpoint that is broken or belongs to another architecture
├── AuditError       an evaluation whose number would be false
├── ExportError      an exported folder that is absent, broken, or not what its manifest says
├── WireError        bytes that are no valid request or answer; carries the HTTP status of the reply
└── ServerError      a server that cannot be reached, is too busy for too long, or refuses

A message says what is wrong, what was got, what is allowed, and what to do next. A device imports
this module: it needs the standard library alone.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from math import inf
from typing import get_args, get_type_hints


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


@dataclass(frozen=True)
class Range:
    """The numbers a field may have, declared at the field: `Annotated[float, Range(0, inf)]`.

    Args:
        low: The smallest number.
        high: The largest number; `inf` leaves every finite one.
        above: Whether `low` itself is excluded.
        below: Whether `high` itself is excluded.
        hint: What else to say to somebody whose number lies outside.

    >>> Range(0, 1, below=True).problem("share", 1.0)
    'share must be in [0, 1), got 1.0'
    """

    low: int | float
    high: int | float = inf
    above: bool = False
    below: bool = False
    hint: str = ""

    def problem(self, name: str, value: int | float) -> str | None:
        """What is wrong with a field's value; None where it lies in the range."""
        over = value > self.low if self.above else value >= self.low
        under = value < self.high if self.below or self.high == inf else value <= self.high
        if over and under:
            return None
        if self.low == -inf:
            allowed = f"at most {self.high:g}"
        elif self.high < inf:
            ends = f"{'(' if self.above else '['}{self.low:g}, {self.high:g}"
            allowed = f"in {ends}{')' if self.below else ']'}"
        elif isinstance(value, int):
            allowed = f"at least {self.low:g}"
        else:
            allowed = f"a finite number {'>' if self.above else '≥'} {self.low:g}"
        return f"{name} must be {allowed}, got {value}" + (f"; {self.hint}" if self.hint else "")

    def check(self, name: str, value: int | float) -> None:
        """Refuse a value outside."""
        if problem := self.problem(name, value):
            raise ConfigError(problem)


def check_ranges(owner: object, *others: str) -> None:
    """Refuse a dataclass with a field outside the range it declares; None is not checked.

    `others` are problems that were found otherwise; all are told together.
    """
    kinds = get_type_hints(type(owner), include_extras=True)
    found = [
        declared.problem(name, value)
        for name, kind in kinds.items()
        for declared in _ranges(kind)
        if (value := getattr(owner, name, None)) is not None
    ]
    if problems := [problem for problem in (*found, *others) if problem]:
        raise ConfigError("; ".join(problems))


def _ranges(kind: object) -> Iterator[Range]:
    """The range in a field's type, behind `| None` too."""
    for part in get_args(kind):
        if isinstance(part, Range):
            yield part
        else:
            yield from _ranges(part)


BAD_REQUEST = 400


class ExportError(SplitVeilError):
    """An exported folder that is absent, broken, or not what its manifest says."""


class WireError(SplitVeilError):
    """Bytes that are not a valid request or answer."""

    def __init__(self, reason: str, status: int = BAD_REQUEST) -> None:
        super().__init__(reason)
        self.status = status


class ServerError(SplitVeilError):
    """A server that cannot be reached, is too busy for too long, or refuses."""
