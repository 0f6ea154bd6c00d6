"""Rows that a law of the maths page, or another claim of the pages, is seen in, as tables."""

from collections.abc import Collection, Iterable, Sequence

from splitveil.record.groups import Group
from splitveil.report.columns import Compared
from splitveil.report.comparison import Track, track_table
from splitveil.table import Table

COLUMNS = ("row", "net", "seeds", "accuracy", "mse", "by", "leakage", "rate")
STATISTICS = ("noise", "gated-att", "slot-cross", "cem", "veil-vgg11")
CLIENTS = ("noise", "noise-thin-deep", "cem", "cem-thin-deep", "veil-vgg11", "veil-fast")


def seen_in(groups: Iterable[Group], names: Collection[str] | None = None) -> str:
    """Some rows, least private first, and what their records have in common."""
    chosen = [g for g in groups if names is None or g.name in names]
    chosen.sort(key=lambda g: (g.mean("strongest.mse") or 0.0, g.name))
    table, rows = track_table(Track(title="", groups=tuple(chosen)), {})
    return f"{table.caption}\n\n{few(table, rows, COLUMNS)}"


def few(table: Table, rows: Sequence[Compared], keys: Sequence[str]) -> str:
    """Some columns of a table as Markdown, without its title and caption."""
    return table.titled("").only(*keys).render(rows, "markdown").strip()
