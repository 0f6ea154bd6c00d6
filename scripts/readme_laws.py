"""Rows that a law of docs/maths.md, or another claim of the pages, is seen in, as tables."""

from collections.abc import Collection, Iterable
from dataclasses import replace

from splitveil.report.compare import Sheet, track_sheet
from splitveil.report.rows import Group
from splitveil.report.tracks import Track, least_private_first

COLUMNS = ("row", "net", "seeds", "accuracy", "strongest attack MSE", "by", "leakage", "rate")
STATISTICS = ("noise", "gated-att", "slot-cross", "cem", "veil-vgg11")
CLIENTS = ("noise", "noise-thin-deep", "cem", "cem-thin-deep", "veil-vgg11", "veil-fast")


def seen_in(groups: Iterable[Group], names: Collection[str] | None = None) -> str:
    """Some rows, least private first, and what their records have in common."""
    chosen = least_private_first(g for g in groups if names is None or g.name in names)
    sheet = track_sheet(Track(title="", groups=chosen), {})
    return f"{sheet.caption}\n\n{few(sheet, COLUMNS).table()}"


def few(sheet: Sheet, wanted: Collection[str]) -> Sheet:
    """A sheet with some of its columns, by heading."""
    kept = [i for i, column in enumerate(sheet.columns) if column.heading in wanted]
    return replace(
        sheet,
        columns=tuple(sheet.columns[i] for i in kept),
        rows=tuple(tuple(row[i] for i in kept) for row in sheet.rows),
    )
