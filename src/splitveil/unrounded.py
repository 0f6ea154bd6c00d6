"""Comparisons for other programs: every number as it was measured, under a short key."""

from collections.abc import Mapping, Sequence

from splitveil.audit.statistics import Difference
from splitveil.comparing import Contrast, contrast_sheet, limits, views
from splitveil.report.choosing import View
from splitveil.report.exchange import Cell
from splitveil.report.published import Published
from splitveil.report.quantities import QUANTITIES, plain_row
from splitveil.report.rows import Found
from splitveil.report.tracks import Track, caption
from splitveil.types import Json

Row = dict[str, Cell]


def plain_rows(found: Found, published: Mapping[str, Published], view: View) -> list[Row]:
    """Every row of every track, for a spreadsheet.

    Shares stay shares. With a row to compare `against`, the differences to it follow.
    """
    tracks = views(found, published, view)
    return [row for track, pairs in tracks for row in _rows(track, pairs, published, view)]


def plain_tables(found: Found, published: Mapping[str, Published], view: View) -> list[Json]:
    """The same rows as a table per track, each followed by its differences, for JSON."""
    made: list[Json] = []
    for track, pairs in views(found, published, view):
        rows = _rows(track, pairs, published, view)
        made.append({"title": track.title, "caption": caption(track.groups), "rows": rows})
        if pairs:
            sheet = contrast_sheet(track, pairs)
            gaps = [{"track": track.title, "row": pair.ours, **_gap(pair)} for pair in pairs]
            made.append({"title": sheet.title, "caption": sheet.caption, "rows": gaps})
    return made


def _rows(
    track: Track, pairs: Sequence[Contrast], published: Mapping[str, Published], view: View
) -> list[Row]:
    columns = tuple(QUANTITIES.values()) if view.columns is None else view.columns
    against = {pair.ours: pair for pair in pairs}
    made: list[Row] = []
    for group in track.groups:
        row: Row = {"track": track.title, **plain_row(group, columns, published)}
        made.append(row | ({} if view.against is None else _gap(against.get(group.name))))
    return made


def _gap(pair: Contrast | None) -> Row:
    row: Row = {"against": None if pair is None else pair.other}
    for name in ("accuracy", "mse"):
        made: Difference | None = None if pair is None else getattr(pair, name)
        row[f"{name}_gap"] = None if pair is None else getattr(pair, f"{name}_gap")
        row[f"{name}_gap_low"], row[f"{name}_gap_high"] = limits(made) or (None, None)
        row[f"{name}_gap_p"] = None if pair is None else getattr(pair, f"p_{name}")
    row["interval_over"] = None if pair is None else pair.over
    row["verdict"] = None if pair is None else pair.verdict
    return row
