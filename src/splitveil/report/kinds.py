"""Runs that differ in their seeds alone: one kind, of which a verdict speaks and a colour tells."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from splitveil.record.groups import Group
from splitveil.record.schema import section, text
from splitveil.report.files import RunFiles
from splitveil.table import NOTHING

FREE = ("seed", "name", "device", "compile")  # settings in which runs of one kind may differ


ALIKE = (
    ("audit", "profile"), ("audit", "aux"), ("audit", "only"), ("splits", "scored"),
    ("splits", "test"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Runs of the same settings, audited alike, in the order met; a run alone gives its name."""

    name: str
    runs: tuple[RunFiles, ...]

    @property
    def group(self) -> Group:
        """The records by training seed."""
        seeds: dict[str | None, list[RunFiles]] = {}
        for run in self.runs:
            seeds.setdefault(text(run.record, "seeds", "train"), []).append(run)
        return Group(
            self.name, tuple(tuple(r.record or {} for r in same) for same in seeds.values())
        )


def kinds(runs: Sequence[RunFiles]) -> list[Kind]:
    """The runs by kind, in the order in which each is first met.

    Several runs are called after their defence, or what their names begin with where another kind
    has the same defence.
    """
    found: dict[str, list[RunFiles]] = {}
    for run in runs:
        found.setdefault(_settings(run), []).append(run)
    defences = [_defence(same[0]) for same in found.values()]
    return [
        Kind(name=_name(same, alone=defences.count(_defence(same[0])) == 1), runs=tuple(same))
        for same in found.values()
    ]


def _settings(run: RunFiles) -> str:
    """What makes a run of its kind, as text; one that was not audited is a kind of its own."""
    if run.record is None:
        return str(run.path)
    config = {k: v for k, v in section(run.record, "config").items() if k not in FREE}
    told = [text(run.record, *keys) for keys in ALIKE]
    heard = "wire" in section(run.record, "audit")
    return json.dumps([config, told, heard], sort_keys=True)


def _defence(run: RunFiles) -> str:
    return text(run.record, "config", "defence") or NOTHING


def _name(runs: Sequence[RunFiles], *, alone: bool) -> str:
    if len(runs) == 1:
        return runs[0].name
    start = common_start([run.name for run in runs])
    return _defence(runs[0]) if alone or not start else start


def common_start(names: Sequence[str]) -> str:
    """What names begin with, up to the word for a seed.

    >>> common_start(["veil/seed0", "veil/seed1"]), common_start(["fast-s0", "fast-s12"])
    ('veil', 'fast')
    """
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    return re.sub(r"(^|[\W_]+)(seed|s)?$", "", "".join(letters[0] for letters in same))
