"""Rows of records side by side: one table per track, and what makes rows incomparable."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from splitveil.report.fields import number, section, text
from splitveil.report.kinds import FREE
from splitveil.report.published import Published, reported
from splitveil.report.published import read_published as read_published  # noqa: PLC0414 - re-exported
from splitveil.report.quantities import QUANTITIES, STANDARD, Quantity
from splitveil.report.rows import Found, Group, spread
from splitveil.report.rows import find_records as find_records  # noqa: PLC0414 - re-exported
from splitveil.report.tables import NOTHING, Column, decimals, percent
from splitveil.report.tracks import TRAINING, Track, caption, dataset_of, seeds_text, setting

Json = dict[str, Any]

MEASURED = {"accuracy": ("accuracy",), "MSE": ("strongest", "mse"), "leakage": ("leakage",)}


def compare_columns() -> tuple[Column, ...]:
    """Columns in the order of `compare_row`; `brief` ones fit a terminal."""
    return tuple(quantity.column for quantity in STANDARD)


def compare_row(
    group: Group, published: Mapping[str, Published], columns: Sequence[Quantity] = STANDARD
) -> list[str]:
    """The cells of one row as text."""
    said = reported(group, published)
    return [quantity.cell(group, said) for quantity in columns]


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """A titled table: what its rows have in common, its columns, its cells, and notes below."""

    title: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def markdown(self, level: int = 2) -> str:
        """Heading, caption, table and notes; the first column is a row's name."""
        parts = [f"{'#' * level} {self.title}", self.caption, self.table(), *self.notes]
        return "\n\n".join(part for part in parts if part) + "\n"

    def filled(self) -> tuple[list[Column], list[list[str]]]:
        """Columns and cells without the columns that say nothing."""
        kept = [i for i in range(len(self.columns)) if any(row[i] for row in self.rows)]
        return [self.columns[i] for i in kept], [[row[i] for i in kept] for row in self.rows]

    def table(self) -> str:
        """The table alone as Markdown, without columns that say nothing."""
        columns, rows = self.filled()
        lines = [[column.label for column in columns]]
        lines.append(["--:" if column.numeric else "---" for column in columns])
        lines += [[cell.replace("|", "\\|") for cell in row] for row in rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def brief(self) -> tuple[list[str], list[list[str]]]:
        """Headings and cells of the columns that fit a terminal."""
        columns, rows = self.filled()
        kept = [(i, column.brief) for i, column in enumerate(columns) if column.brief]
        cells = [[row[i].replace("`", "") for i, _ in kept] for row in rows]
        return [name for _, name in kept], cells

    def to_dict(self) -> Json:
        """The table as JSON: one object per row, under the columns' headings; numbers as shown."""
        rows = [
            {
                column.heading: json_cell(cell) if column.numeric else cell.replace("`", "")
                for column, cell in zip(self.columns, row, strict=True)
            }
            for row in self.rows
        ]
        return {"title": self.title, "caption": self.caption, "rows": rows}


def json_cell(cell: str) -> float | int | str | None:
    """A cell of a numeric column: a number where it is one, null where there is none, else text.

    >>> json_cell("0.0473"), json_cell("1"), json_cell("–"), json_cell("≈0.045")
    (0.0473, 1, None, '≈0.045')
    """
    if cell in ("", NOTHING):
        return None
    for read in (int, float):
        with suppress(ValueError):
            return read(cell)
    return cell


def gap_text(
    gap: float | None, limits: tuple[float, float] | None, scale: float, digits: int
) -> str:
    """A difference, with its interval where it has one.

    >>> gap_text(0.02, (0.01, 0.03), 100.0, 1), gap_text(-0.5, None, 1.0, 2)
    ('+2.0 [+1.0, +3.0]', '-0.50')
    """
    if gap is None:
        return NOTHING
    said = f"{scale * gap:+.{digits}f}"
    if limits is None:
        return said
    low, high = (f"{scale * limit:+.{digits}f}" for limit in limits)
    return f"{said} [{low}, {high}]"


def p_text(value: float | None) -> str:
    """A p-value.

    >>> p_text(0.0312), p_text(0.00002), p_text(None)
    ('0.031', '<0.001', '–')
    """
    if value is None:
        return NOTHING
    return f"{value:.3f}" if value >= 0.0005 else "<0.001"  # noqa: PLR2004 - what prints as 0.000


def track_sheet(
    track: Track,
    published: Mapping[str, Published],
    columns: Sequence[Quantity] | None = None,
) -> Sheet:
    """The table of one track, in the standard columns or in those given."""
    if track.aux == "test90" and columns is None:
        return test90_sheet(track, published)
    shown = STANDARD if columns is None else columns
    rows = [compare_row(group, published, shown) for group in track.groups]
    said = {reported(group, published) for group in track.groups} - {None}
    sources = sorted({one.source for one in said if one is not None})
    if not any(quantity.key.startswith("reported") for quantity in shown):
        sources = []
    return Sheet(
        title=track.title,
        caption=caption(track.groups),
        columns=tuple(quantity.column for quantity in shown),
        rows=tuple((f"`{name}`", *cells) for name, *cells in rows),
        notes=(f"Reported: {'; '.join(sources)}.",) if sources else (),
    )


def test90_sheet(track: Track, published: Mapping[str, Published]) -> Sheet:
    """Rows attacked as in the seeds: what was measured, then what they report."""
    columns = (
        Column(heading="row", numeric=False, brief="row"),
        Column(heading="net", numeric=False),
        Column(heading="seeds", brief="n"),
        Column(heading="task accuracy", unit="%", arrow="↑", brief="acc% ↑"),
        Column(heading="accuracy on reconstructions", unit="%", arrow="↓", brief="rec% ↓"),
        Column(heading="strongest attack MSE", arrow="↑", brief="MSE ↑"),
        Column(heading="by", numeric=False, brief="by"),
        Column(heading="zero-pad SSIM", arrow="↓", brief="SSIM₀ ↓"),
        Column(heading="pooled PSNR", unit="dB", arrow="↓", brief="PSNR ↓"),
        Column(heading="source", numeric=False),
    )
    rows = [
        (
            f"`{group.name}`",
            ", ".join(group.distinct("config", "net")),
            seeds_text(group),
            spread(group.values("accuracy"), 100.0, 2),
            QUANTITIES["rec-accuracy"].cell(group, None),
            spread(group.values("strongest", "mse"), 1.0, 4),
            ", ".join(group.distinct("strongest", "mse_by")),
            QUANTITIES["ssim-zeropad"].cell(group, None),
            spread(group.values("strongest", "psnr_pooled"), 1.0, 2),
            ", ".join(["measured", *QUANTITIES["remark"].words(group)]),
        )
        for group in track.groups
    ]
    rows += [
        (
            f"*{name.removesuffix('-test90')}*",
            "vgg11",
            "1",
            percent(said.accuracy, 2),
            percent(said.reconstruction_accuracy, 2),
            decimals(said.mse, 4),
            "decoder",
            decimals(said.ssim_zeropad, 4),
            decimals(said.psnr_pooled, 2),
            said.source,
        )
        for name, said in published.items()
        if said.aux == track.aux and said.is_of([dataset_of(g) for g in track.groups])
    ]
    return Sheet(
        title=track.title, caption=caption(track.groups), columns=columns, rows=tuple(rows)
    )


def warnings(found: Found) -> list[str]:
    """What makes rows of one dataset and one kind of attacker incomparable; what was left out."""
    reasons = [f" ({reason})" for reason in found.reasons] or [""] * len(found.broken)
    said = [
        f"skipped, not a record: {name}{reason}"
        for name, reason in zip(found.broken, reasons, strict=True)
    ]
    for group in found.groups:
        said += _inner_faults(group)
    kinds: dict[tuple[str, str], list[Group]] = {}
    for group in found.groups:
        first = group.records[0]
        kind = text(first, "config", "dataset") or NOTHING, text(first, "audit", "aux") or NOTHING
        kinds.setdefault(kind, []).append(group)
    for (dataset, aux), groups in kinds.items():
        where = f"{dataset}, attacker knows {aux}: rows"
        for key in TRAINING:
            told = [g for g in groups if NOTHING not in map(setting(key), g.records)]
            said += _outliers(told, setting(key), f"{where} differ in {key}")
        said += _outliers(groups, _profile, f"{where} differ in audit profile")
        said += _outliers(groups, _scored, f"{where} differ in scored images")
        said += _outliers(groups, _suite, f"{where} were attacked by different suites")
    return said


def _outliers(groups: Sequence[Group], read: Callable[[Json], str], words: str) -> list[str]:
    """A line if the rows' records differ in what `read` reads: each value with its rows."""
    rows: dict[str, list[str]] = {}
    for group in groups:
        for value in sorted({read(record) for record in group.records}):
            rows.setdefault(value, []).append(group.name)
    listed = "; ".join(f"{value} ({', '.join(names)})" for value, names in rows.items())
    return [f"{words}: {listed}"] if len(rows) > 1 else []


def _profile(record: Json) -> str:
    return text(record, "audit", "profile") or NOTHING


def _scored(record: Json) -> str:
    return text(record, "splits", "scored") or NOTHING


def _suite(record: Json) -> str:
    return ", ".join(sorted(record.get("attacks") or {})) or "none"


def _inner_faults(group: Group) -> list[str]:
    """What the seeds of one row must share and do not."""
    said = []
    named = {key for record in group.records for key in section(record, "config")} - {*FREE}
    for key in sorted(named):
        values = {setting(key)(record) for record in group.records} - {NOTHING}
        if len(values) > 1:
            listed = ", ".join(sorted(values))
            said.append(f"row {group.name}: its seeds differ in {key}: {listed}")
    for name, path in MEASURED.items():
        without = sum(number(record, *path) is None for record in group.records)
        if 0 < without < len(group.records):
            said.append(
                f"row {group.name}: {without} of its {len(group.records)} records "
                f"{'has' if without == 1 else 'have'} no {name}; the mean is of the others"
            )
    trained = [text(seed[0], "seeds", "train") for seed in group.seeds]
    for seed in sorted({s for s in trained if s is not None and trained.count(s) > 1}):
        said.append(
            f"row {group.name}: {trained.count(seed)} folders are of training seed {seed}, and "
            "count as so many seeds; put attack seeds of one training into its folder"
        )
    pairs = [(text(r, "seeds", "train"), text(r, "seeds", "attack")) for r in group.records]
    for pair in sorted({p for p in pairs if pairs.count(p) > 1 and None not in p}):
        said.append(
            f"row {group.name}: training seed {pair[0]}, attack seed {pair[1]} is met twice"
        )
    return said
