"""The rows that each of the three laws of docs/maths.md is seen in, as tables."""

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from splitveil.report.compare import Sheet, track_sheet
from splitveil.report.rows import Found, Group
from splitveil.report.tracks import Track

if TYPE_CHECKING:
    from scripts.readme_parts import estimators
else:
    from readme_parts import estimators

COLUMNS = ("row", "net", "seeds", "accuracy", "strongest attack MSE", "by", "leakage", "rate")
WEIGHERS = "digits-laws"  # one penalty, what weighs the samples is varied
STATISTICS = ("noise", "gated-att", "slot-cross", "cem", "veil-vgg11")
CLIENTS = ("noise", "noise-thin-deep", "cem", "cem-thin-deep", "veil-vgg11", "veil-fast")


def law(number: int, found: Callable[[str], Found], results: Path) -> str:
    """The rows of a law, least private first; of the second also what estimators say."""
    chosen = {1: STATISTICS, 3: CLIENTS}
    if number in chosen:
        return _table([g for g in found("cifar10").groups if g.name in chosen[number]])
    groups = found(WEIGHERS).groups
    return f"{_table(groups)}\n\n{estimators(groups, results / WEIGHERS)}"


def few(sheet: Sheet, wanted: Collection[str]) -> Sheet:
    """A sheet with some of its columns, by heading."""
    kept = [i for i, column in enumerate(sheet.columns) if column.heading in wanted]
    return replace(
        sheet,
        columns=tuple(sheet.columns[i] for i in kept),
        rows=tuple(tuple(row[i] for i in kept) for row in sheet.rows),
    )


def _table(groups: Collection[Group]) -> str:
    ordered = sorted(groups, key=lambda g: (g.mean("strongest", "mse") or 0.0, g.name))
    sheet = track_sheet(Track(title="", groups=tuple(ordered)), {})
    return f"{sheet.caption}\n\n{few(sheet, COLUMNS).table()}"
