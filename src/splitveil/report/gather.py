"""Run folders from a command line: those that can be reported, and why the others cannot."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from splitveil.errors import RunError
from splitveil.report.breadth import leak_sheet
from splitveil.report.checks import audit_row, flags_of, refusals
from splitveil.report.files import RunFiles, read_run
from splitveil.report.phases import phases
from splitveil.report.rows import LIMITS, Group, refuse_impossible
from splitveil.report.sentences import caveats, passport, statement, verdict
from splitveil.report.tables import attack_rows, summary_rows


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """Readable runs under distinct names, and (path, reason) of each that was left out."""

    runs: tuple[RunFiles, ...]
    skipped: tuple[tuple[str, str], ...] = ()


def read_runs(paths: Sequence[Path]) -> Gathered:
    """Read run folders; one that is broken or foreign is named and left out.

    A folder met twice counts once. Raises RunError, with every reason, when none is left.
    """
    folders: dict[Path, Path] = {}
    for path in paths:
        folders.setdefault(path.resolve(), path)
    runs: list[RunFiles] = []
    skipped: list[tuple[str, str]] = []
    for path in folders.values():
        try:
            run = read_run(path)
            _probe(run)
        except RunError as err:
            skipped.append((str(path), str(err)))
        else:
            runs.append(run)
    if not runs:
        why = "; ".join(f"{path}: {reason}" for path, reason in skipped)
        raise RunError(why or "no runs to report; name at least one run folder")
    names = distinct_names([run.path.resolve() for run in runs])
    return Gathered(
        runs=tuple(replace(run, name=names[run.path.resolve()]) for run in runs),
        skipped=tuple(skipped),
    )


def distinct_names(folders: Sequence[Path]) -> dict[Path, str]:
    """The last part of each path, and as many parts above as tell namesakes apart.

    >>> list(distinct_names([Path("/r/veil/seed0"), Path("/r/none/seed0")]).values())
    ['veil/seed0', 'none/seed0']
    """
    return {folder: _shortest(folder, folders) for folder in folders}


def _shortest(folder: Path, folders: Sequence[Path]) -> str:
    parts = folder.parts
    for length in range(1, len(parts)):
        end = parts[-length:]
        if sum(other.parts[-length:] == end for other in folders) == 1:
            return "/".join(end)
    return str(folder)


def _probe(run: RunFiles) -> None:
    """Read everything a report reads; raises RunError where a record is not what it must be."""
    for read in (summary_rows, statement, verdict, caveats, refusals):
        read([run])
    for look in (attack_rows, audit_row, flags_of, passport, phases):
        look(run)
    if run.record is not None:
        refuse_impossible(run.record, LIMITS)
        leak_sheet([Group(run.name, ((run.record,),))])
