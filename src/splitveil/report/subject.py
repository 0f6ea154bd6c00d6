"""What a report is about, before it takes a form."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from splitveil.report import tables
from splitveil.report.breadth import leak_sheet
from splitveil.report.compare import Sheet
from splitveil.report.figures import comparable
from splitveil.report.files import RunFiles
from splitveil.report.published import Published
from splitveil.report.rows import Group
from splitveil.report.sendings import repeat_sheet
from splitveil.report.words import Lang, Said, said, word

MANY_CARDS = 8


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Runs to report, the language, published rows to stand beside, folders left out and why."""

    runs: Sequence[RunFiles]
    lang: Lang = "en"
    title: str | None = None
    published: Mapping[str, Published] = field(default_factory=dict)
    skipped: Sequence[tuple[str, str]] = ()

    @property
    def heading(self) -> str:
        """The title, or the usual one."""
        return self.title if self.title is not None else word("title", self.lang)

    @property
    def rows(self) -> list[tables.Row]:
        """One row per run."""
        return tables.summary_rows(self.runs)

    @property
    def leaks(self) -> Sheet | None:
        """The table of leaks beyond pixels; names stand in their cells without marks."""
        return leak_sheet([Group(r.name, ((r.record,),)) for r in self.runs if r.record], self.lang)

    @property
    def repeats(self) -> Sheet | None:
        """The table of what repeated sendings add; names stand in their cells without marks."""
        return repeat_sheet(self.runs, self.lang)

    @property
    def sources(self) -> Said | None:
        """Who published the hollow marks, if there are any."""
        said_by = [row.source for row in comparable(self.runs, self.published).values()]
        names = {source.rpartition(", ")[0] or source for source in said_by}  # “paper, row”
        return said("caption.published", sources=tuple(sorted(names))) if names else None

    @property
    def key_rows(self) -> list[tables.Row]:
        """Rows that deserve a card: all of a few, else some along the front, most private first."""
        return self.rows if len(self.rows) <= MANY_CARDS else along(front(self.rows), MANY_CARDS)


def along(rows: Sequence[tables.Row], limit: int) -> list[tables.Row]:
    """At most `limit` rows by falling error, both ends and evenly between."""
    ordered = sorted(rows, key=lambda row: -(row.strongest_mse or 0.0))
    if len(ordered) <= limit:
        return ordered
    return [ordered[round(at * (len(ordered) - 1) / (limit - 1))] for at in range(limit)]


def front(rows: Sequence[tables.Row]) -> list[tables.Row]:
    """Rows that no other beats in accuracy and in error, in the order given."""
    known = [
        (row, row.accuracy, row.strongest_mse)
        for row in rows
        if row.accuracy is not None and row.strongest_mse is not None
    ]
    return [
        row
        for row, accuracy, mse in known
        if not any(a >= accuracy and m >= mse and (a, m) != (accuracy, mse) for _, a, m in known)
    ]
