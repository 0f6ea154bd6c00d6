"""All exceptions of the package, and the messages that several rooms share.

SplitVeilError
├── ConfigError      an unknown name, or a value outside its range
├── DataError        a dataset that is missing, corrupt or not what it claims to be
├── RunError         a run folder that already exists, is missing, or cannot be read or written
├── CheckpointError  a checkpoint that is broken or belongs to another architecture
├── AuditError       an audit whose numbers would be wrong
├── ExportError      an exported folder that is missing, broken, or contradicts its manifest
├── WireError        bytes that are not a valid request or answer; has the HTTP status of the reply
└── ServerError      a server that cannot be reached, stays too busy, or refuses
    └── UnreachableError  the first two of these

A message says what is wrong, what was given, what is allowed, and what to do next. The client on a
device imports this module, so it uses the standard library only.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from math import inf
from typing import get_args, get_type_hints


class SplitVeilError(Exception):
    """Base of all errors that a user can cause; the command line then exits with code 2."""


class ConfigError(SplitVeilError):
    """An unknown name, or a value outside its range."""


class DataError(SplitVeilError):
    """A dataset that is missing, corrupt, or not what it claims to be."""


class RunError(SplitVeilError):
    """A run folder that already exists, is missing, or cannot be read or written."""


class CheckpointError(SplitVeilError):
    """A checkpoint that is broken or belongs to another architecture."""


class AuditError(SplitVeilError):
    """An audit whose numbers would be wrong."""


class ExportError(SplitVeilError):
    """An exported folder that is missing, broken, or contradicts its manifest."""


class WireError(SplitVeilError):
    """Bytes that are not a valid request or answer.

    Args:
        reason: The message.
        status: HTTP status of the reply; 400 is a bad request.
    """

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason)
        self.status = status


class ServerError(SplitVeilError):
    """A server that cannot be reached, stays too busy, or refuses."""


class UnreachableError(ServerError):
    """A server that does not answer, or stays too busy."""


def unknown(what: str, got: str, allowed: Iterable[str]) -> str:
    """The message for an unknown name, with the closest allowed one.

    >>> unknown("defence", "vell", ["none", "veil"])
    "unknown defence 'vell'; did you mean 'veil'? choose from: none, veil"
    """
    names = sorted(allowed)
    near = get_close_matches(got, names, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ";"
    return f"unknown {what} '{got}'{hint} choose from: {', '.join(names)}"


@dataclass(frozen=True)
class Range:
    """The numbers that a field accepts, declared at the field: `Annotated[float, Range(0, inf)]`.

    Args:
        low: The smallest number.
        high: The largest number; `inf` allows every finite one.
        above: Whether `low` itself is excluded.
        below: Whether `high` itself is excluded.
        hint: What the message adds, for example what 0 means.

    >>> Range(0, 1, below=True).problem("share", 1.0)
    'share must be in [0, 1), got 1.0'
    """

    low: int | float
    high: int | float = inf
    above: bool = False
    below: bool = False
    hint: str = ""

    def problem(self, name: str, value: int | float) -> str | None:
        """The message for a value outside the range; None for one inside."""
        above = value > self.low if self.above else value >= self.low
        # An open end excludes infinity itself. NaN fails both comparisons.
        below = value < self.high if self.below or self.high == inf else value <= self.high
        if above and below:
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
        """Raise ConfigError for a value outside the range."""
        if problem := self.problem(name, value):
            raise ConfigError(problem)


def check_ranges(owner: object, *others: str) -> None:
    """Raise ConfigError if a field of a dataclass lies outside its declared range.

    Args:
        owner: The dataclass instance. Fields that are None are not checked.
        others: Problems that the caller found; the message lists all problems at once.
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
    """The range in the type of a field, also inside `X | None`."""
    for part in get_args(kind):
        if isinstance(part, Range):
            yield part
        else:
            yield from _ranges(part)
