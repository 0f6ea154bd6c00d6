"""A table declared by its columns, written as HTML, Markdown, LaTeX, CSV, JSON or plain text.

A column says what to read from a row (`get`) and how to show it (`fmt`). The four forms for readers
share the same cells; CSV and JSON get the values without rounding.
"""

import csv
import io
import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby
from typing import Any, Literal

from rich.progress import ProgressColumn, Task
from rich.text import Text

from splitveil.io import printable

NOTHING = "–"
SMALL_MSE = 1e-3  # below this, four decimals would hide the leading digits
ARROWS = {"": "", "up": " ↑", "down": " ↓"}
LATEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "±": r"$\pm$",
    "×": r"$\times$", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "Δ": r"$\Delta$",
    "λ": r"$\lambda$", "–": "--", "“": "``", "”": "''",
}  # fmt: skip
_MINUS = re.compile(r"(?<![\w.-])-(?=\d)")
_MARKED = re.compile(r"`([^`]*)`|\*\*(.+?)\*\*")

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # how a spreadsheet tells a formula from a text

Cell = float | str | None
Words = str | Mapping[str, str]  # one text for every language, or one for each
Form = Literal["html", "markdown", "latex", "csv", "json", "terminal"]


def _known(values: Iterable[float | None]) -> list[float]:
    return [v for v in values if v is not None]


def spread(values: Sequence[float | None], scale: float, digits: int) -> str:
    """Mean ± sd over seeds; a single seed has no sd.

    >>> spread([0.5, 0.7], 100.0, 1), spread([0.5], 1.0, 4), spread([None], 1.0, 2)
    ('60.0 ± 14.1', '0.5000', '–')
    """
    scaled = [v * scale for v in _known(values)]
    numbers = [statistics.fmean(scaled)] if scaled else []
    numbers += [statistics.stdev(scaled)] if len(scaled) > 1 else []
    return " ± ".join(f"{number:.{digits}f}" for number in numbers) or NOTHING


def format_mse(value: float | None) -> str:
    """A mean squared error of pixels in [0, 1]: four decimals, or two digits if it is small.

    >>> format_mse(0.05291), format_mse(0.000362), format_mse(None)
    ('0.0529', '0.00036', '–')
    """
    if value is None:
        return NOTHING
    return f"{value:.4f}" if value == 0 or abs(value) >= SMALL_MSE else f"{value:.2g}"


def percent(value: float | None, digits: int) -> str:
    """A fraction in per cent, without the sign: the heading has it.

    >>> percent(0.981, 2)
    '98.10'
    """
    return decimals(None if value is None else 100 * value, digits)


def decimals(value: float | None, digits: int) -> str:
    """A number with a fixed count of decimals."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def duration(seconds: float | int) -> str:
    """A time as people say it.

    >>> duration(0.42), duration(42.4), duration(252.3), duration(7500)
    ('0.4 s', '42 s', '4 min 12 s', '2 h 5 min')
    """
    if seconds < 10:  # noqa: PLR2004
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 60:  # noqa: PLR2004
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"  # noqa: PLR2004


class TimeLeft(ProgressColumn):
    """The time that a bar still needs, at its end the time it took, as people say it."""

    max_refresh = 0.5  # seconds

    def render(self, task: Task) -> Text:
        """The time, or a dash until there is an estimate."""
        seconds = task.finished_time if task.finished else task.time_remaining
        return Text(NOTHING if seconds is None else duration(seconds), style="cyan")


class TimeSpent(ProgressColumn):
    """The time since a bar began, as people say it."""

    def render(self, task: Task) -> Text:
        """The time, or a dash before it begins."""
        return Text(NOTHING if task.elapsed is None else duration(task.elapsed), style="cyan")


def count(value: int | float | None) -> str:
    """A whole number with commas between thousands.

    >>> count(1234567.0)
    '1,234,567'
    """
    return NOTHING if value is None else f"{value:,.0f}"


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a column shows its values.

    Args:
        text: Gives the cell, from a value and a language.
        exact: Gives the values for CSV and JSON, one for each suffix.
        suffixes: What is appended to the column's key, for each of these values.
        numeric: Whether cells are aligned to the right. A value that is a text is shown unchanged.
        nothing: The cell of a missing value.
    """

    text: Callable[[Any, Any], str]
    exact: Callable[[Any], tuple[Cell, ...]] = lambda value: (value,)
    suffixes: tuple[str, ...] = ("",)
    numeric: bool = True
    nothing: str = NOTHING


TEXT = Format(text=lambda value, _: str(value), numeric=False)
DIGITS = replace(TEXT, numeric=True)
CODE = replace(TEXT, text=lambda name, _: name if name.startswith("*") else f"`{name}`")
TEXTS = Format(  # of a row with several values
    text=lambda values, _: ", ".join(values),
    exact=lambda values: (", ".join(v for v in values if v != NOTHING) or None,),
    numeric=False,
)
MSE = Format(text=lambda value, _: format_mse(value))
COUNT = Format(text=lambda value, _: count(value))
P_VALUE = Format(text=lambda p, _: f"{p:.3f}" if p >= 0.0005 else "<0.001")  # noqa: PLR2004


def fixed(digits: int, scale: float = 1.0, nothing: str = NOTHING) -> Format:
    """A number with this many decimals; with `scale` 100 a fraction is shown in per cent."""
    return Format(text=lambda value, _: f"{scale * value:.{digits}f}", nothing=nothing)


def _mean(values: Sequence[float | None]) -> float | None:
    known = _known(values)
    if len(set(known)) == 1:
        return known[0]  # a mean of equal numbers may differ in the last bit
    return statistics.fmean(known) if known else None


def mean_sd(digits: int, scale: float = 1.0) -> Format:
    """Numbers of several seeds as mean ± sd."""

    def exact(values: Sequence[float | None]) -> tuple[Cell, ...]:
        known = _known(values)
        return _mean(known), statistics.stdev(known) if len(known) > 1 else None

    return Format(
        text=lambda values, _: spread(values, scale, digits), exact=exact, suffixes=("", "_sd")
    )


def shared(digits: int, scale: float = 1.0) -> Format:
    """A number that should be the same for all seeds: each different value."""

    def text(values: Sequence[float | None], _: str) -> str:
        return ", ".join(sorted({spread([v], scale, digits) for v in values}))

    return Format(text=text, exact=lambda values: (_mean(values),))


def gap(digits: int, scale: float = 1.0, sign: Literal["+", ""] = "+") -> Format:
    """A difference with its interval; (difference, None) has no interval.

    With `sign` "" it is a number that only shows a minus.

    >>> shown = gap(1, 100.0).text
    >>> shown((0.02, (0.01, 0.03)), "en"), shown((-0.005, None), "en")
    ('+2.0 [+1.0, +3.0]', '-0.5')
    """

    def text(value: tuple[float, tuple[float, float] | None], _: str) -> str:
        middle, *ends = (f"{scale * v:{sign}.{digits}f}" for v in (value[0], *(value[1] or ())))
        return f"{middle} [{', '.join(ends)}]" if ends else middle

    return Format(
        text=text,
        exact=lambda value: (value[0], *(value[1] or (None, None))),
        suffixes=("", "_low", "_high"),
    )


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Args:
        key: Its name in CSV and JSON.
        heading: Its name for readers.
        get: Reads the value from a row; None stands for a missing one. A row that is a mapping is
            read by `key` instead.
        fmt: How the value is shown.
        unit: Unit of the numbers, shown in brackets after the heading.
        better: The direction that favours the defender, shown as an arrow.
        brief: Short heading for a terminal. Columns without one are left out there.
    """

    key: str
    heading: Words
    get: Callable[[Any], Any] | None = None
    fmt: Format = TEXT
    unit: Words = ""
    better: Literal["", "up", "down"] = ""
    brief: str = ""

    def label(self, lang: str = "en") -> str:
        """Heading, unit and arrow in one line.

        >>> Column("psnr", "PSNR", unit="dB", better="down").label()
        'PSNR (dB) ↓'
        """
        unit = in_language(self.unit, lang)
        unit = f" ({unit})" if unit else ""
        return in_language(self.heading, lang) + unit + ARROWS[self.better]

    def value(self, row: Any) -> Any:  # noqa: ANN401 - a table does not know its rows
        """The value of this column in a row."""
        return row.get(self.key) if self.get is None or isinstance(row, Mapping) else self.get(row)

    def cell(self, row: Any, lang: str = "en") -> str:  # noqa: ANN401
        """The value as readers see it."""
        value = self.value(row)
        if value is None:
            return self.fmt.nothing
        unchanged = self.fmt.numeric and isinstance(value, str)
        return str(value) if unchanged else self.fmt.text(value, lang)

    @property
    def keys(self) -> list[str]:
        """The names of its values in CSV and JSON."""
        return [self.key + suffix for suffix in self.fmt.suffixes]

    def exact(self, row: Any) -> dict[str, Cell]:  # noqa: ANN401
        """The value without rounding, by key."""
        value = self.value(row)
        known = [None] * len(self.keys) if value is None else self.fmt.exact(value)
        return dict(zip(self.keys, known, strict=True))


def plain_column(key: str, heading: str, fmt: Format = TEXT) -> Column:
    """A column with the same heading in a terminal and elsewhere."""
    return Column(key, heading, fmt=fmt, brief=heading)


def in_language(words: Words, lang: str) -> str:
    """The text in a language."""
    return words if isinstance(words, str) else words[lang]


class Table:
    """Columns, and the text around the rows.

    Cells, caption and notes may contain Markdown's marks for code and bold, cells also emphasis.

    Args:
        columns: The columns, from left to right.
        title: Heading of the table.
        caption: What all rows have in common.
        notes: Lines below the table.
        style: CSS class of the HTML table.
        together: Rows for which it gives the same value share one body of the HTML table.

    >>> table = Table(Column("row", "row", fmt=CODE), Column("n", "n"))
    >>> print(table.render([{"row": "a", "n": "1"}], "markdown"))
    | row | n |
    | --- | --- |
    | `a` | 1 |
    <BLANKLINE>
    """

    def __init__(
        self,
        *columns: Column,
        title: str = "",
        caption: str = "",
        notes: Sequence[str] = (),
        style: str = "",
        together: Callable[[Any], object] = lambda _: None,
    ) -> None:
        self.columns = columns
        self.title, self.caption, self.notes = title, caption, tuple(notes)
        self.style, self.together = style, together

    def titled(self, title: str, caption: str = "", notes: Sequence[str] = ()) -> "Table":
        """The same columns under another title."""
        return Table(*self.columns, title=title, caption=caption, notes=notes)

    def only(self, *keys: str) -> "Table":
        """The columns with these keys, in this order."""
        known = {column.key: column for column in self.columns}
        return Table(*map(known.__getitem__, keys)).titled(self.title, self.caption, self.notes)

    def cells(self, rows: Sequence[Any], lang: str = "en") -> list[list[str]]:
        """The cells of every row."""
        return [[column.cell(row, lang) for column in self.columns] for row in rows]

    def exact(self, rows: Sequence[Any]) -> list[dict[str, Cell]]:
        """Every row without rounding, under the columns' keys."""
        return [
            {key: value for column in self.columns for key, value in column.exact(row).items()}
            for row in rows
        ]

    def shown(
        self, rows: Sequence[Any], lang: str = "en", *, brief: bool = False
    ) -> tuple[list[Column], list[list[str]]]:
        """Columns and cells without empty columns, and with `brief` only those for a terminal."""
        cells = self.cells(rows, lang)
        kept = [
            i
            for i, column in enumerate(self.columns)
            if any(line[i] for line in cells) and (column.brief or not brief)
        ]
        return [self.columns[i] for i in kept], [[line[i] for i in kept] for line in cells]

    def brief(self, rows: Sequence[Any], lang: str = "en") -> tuple[list[str], list[list[str]]]:
        """Headings and cells of the columns that fit a terminal of 80 characters."""
        columns, cells = self.shown(rows, lang, brief=True)
        headings = [
            column.brief + ARROWS[column.better] if lang == "en" else column.label(lang)
            for column in columns
        ]
        return headings, [[_unmarked(cell) for cell in line] for line in cells]

    def render(self, rows: Sequence[Any], form: Form, lang: str = "en", *, level: int = 2) -> str:
        """The table as text.

        Args:
            rows: Anything that the columns can read.
            form: CSV and JSON contain every digit; the others show what readers see. A LaTeX
                document needs the package booktabs.
            lang: Language of headings and cells.
            level: Level of the title in Markdown, from 1.

        Returns:
            The text of the table, for HTML one `<table>` element.
        """
        if form == "csv":
            return csv_text(self.exact(rows))
        if form == "json":
            return json.dumps(self.exact(rows), ensure_ascii=False, indent=2)
        if form == "html":
            return self._html(rows, lang)
        columns, cells = self.shown(rows, lang, brief=form == "terminal")
        labels, numeric = [c.label(lang) for c in columns], [c.fmt.numeric for c in columns]
        if form == "latex":
            lines = [list(map(latex_text, labels))]
            lines += [list(map(_latex_cell, line, numeric)) for line in cells]
            return self._latex([" & ".join(line) for line in lines], numeric)
        if form == "terminal":
            headings, cells = self.brief(rows, lang)
            shown = [[printable(cell) for cell in line] for line in (headings, *cells)]
            return _aligned(shown, numeric)
        rule = ["--:" if right else "---" for right in numeric]
        lines = [labels, rule]
        lines += [[cell.replace("|", "\\|") for cell in line] for line in cells]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        title = f"{'#' * level} {self.title}" if self.title else ""
        return "\n\n".join(filter(None, (title, self.caption, table, *self.notes))) + "\n"

    def _latex(self, lines: Sequence[str], numeric: Sequence[bool]) -> str:
        """A table environment around lines of cells, of which the first is the heading."""
        caption = _latex_marked(". ".join(filter(None, (self.title, self.caption))))
        heading, *body = [rf"    {line} \\" for line in lines]
        parts = [
            r"\begin{table}",
            r"  \centering\small",
            rf"  \caption{{{caption}}}" if caption else "",
            rf"  \begin{{tabular}}{{{''.join('r' if right else 'l' for right in numeric)}}}",
            "\n".join([r"    \toprule", heading, r"    \midrule", *body, r"    \bottomrule"]),
            r"  \end{tabular}",
            *(f"  {_latex_marked(note)}" for note in self.notes),
            r"\end{table}",
        ]
        return "\n".join(filter(None, parts)) + "\n"

    def _html(self, rows: Sequence[Any], lang: str) -> str:
        """A table element; the row whose last cell has a star is of class `best`."""
        marks = [' class="num"' if column.fmt.numeric else "" for column in self.columns]
        lines = [f'<table class="{self.style}">' if self.style else "<table>", "<thead><tr>"]
        lines += map(_html_heading, self.columns, marks, [lang] * len(marks))
        lines.append("</tr></thead>")
        for _, together in groupby(rows, self.together):
            lines.append("<tbody>")
            for line in self.cells(list(together), lang):
                name, *cells = (escape(_unmarked(cell)) for cell in line)
                best = ' class="best"' if cells and cells[-1].startswith("★") else ""
                lines += [f"<tr{best}>", f'<th scope="row">{name}</th>']
                lines += [f"<td{m}>{c}</td>" for m, c in zip(marks[1:], cells, strict=True)]
                lines.append("</tr>")
            lines.append("</tbody>")
        return "\n".join([*lines, "</table>"])


def _html_heading(column: Column, mark: str, lang: str) -> str:
    heading, unit = (escape(in_language(w, lang)) for w in (column.heading, column.unit))
    arrow = ARROWS[column.better].replace(" ", "&nbsp;")
    after = f' <span class="unit">({unit}){arrow}</span>' if unit else arrow
    return f'<th scope="col"{mark}>{heading}{after}</th>'


def _aligned(lines: Sequence[Sequence[str]], numeric: Sequence[bool]) -> str:
    """Lines of cells as columns of plain text, numbers to the right."""
    columns = []
    for right, cells in zip(numeric, zip(*lines, strict=True), strict=True):
        width = max(map(len, cells))
        columns.append([cell.rjust(width) if right else cell.ljust(width) for cell in cells])
    return "".join("  ".join(line).rstrip() + "\n" for line in zip(*columns, strict=True))


def csv_text(rows: Sequence[Mapping[str, Cell]]) -> str:
    r"""Rows as CSV, with every key that any row has; numbers keep every digit, None is empty.

    A text that a spreadsheet would run as a formula gets an apostrophe in front.

    >>> csv_text([{"row": "a,b", "mse": 0.1}, {"row": "c", "mse": None, "n": 3.0}])
    'row,mse,n\n"a,b",0.1,\nc,,3\n'
    """
    keys = list(dict.fromkeys(key for row in rows for key in row))
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([_csv_cell(key) for key in keys])
    writer.writerows([_csv_cell(row.get(key)) for key in keys] for row in rows)
    return stream.getvalue()


def _csv_cell(cell: Cell) -> int | Cell:
    """What the csv module writes as it should stand; it writes floats by repr, None as empty."""
    if isinstance(cell, float) and cell.is_integer():
        return int(cell)
    if not isinstance(cell, str):
        return cell
    formula = cell.startswith(FORMULA) and isinstance(json_cell(cell), str)
    return "'" * formula + cell.replace("\r", " ")  # which some readers take for a row's end


def json_cell(cell: str) -> float | int | str | None:
    """A cell of a numeric column read back: a number, None for a missing one, else the text.

    >>> json_cell("0.0473"), json_cell("1"), json_cell("–"), json_cell("≈0.045")
    (0.0473, 1, None, '≈0.045')
    """
    if cell in ("", NOTHING):
        return None
    for read in (int, float):
        with suppress(ValueError):
            return read(cell)
    return cell


def latex_text(text: str) -> str:
    r"""Text escaped for LaTeX.

    >>> latex_text("slot_cross: 90 % ± 1")
    'slot\\_cross: 90 \\% $\\pm$ 1'
    """
    return "".join(LATEX.get(sign, sign) for sign in text)


def _latex_marked(text: str) -> str:
    """Markdown's code and bold as LaTeX, the rest escaped."""
    # `split` with two groups gives text, code, bold, text, …; a group without a match is None.
    pieces = _MARKED.split(text)
    made = [latex_text(pieces[0])]
    for code, bold, after in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
        name, inner = ("textbf", bold) if code is None else ("texttt", code)
        made.append(rf"\{name}{{{latex_text(inner)}}}{latex_text(after)}")
    return "".join(made)


def _latex_cell(text: str, numeric: bool) -> str:
    emphasised = re.fullmatch(r"\*([^*]+)\*", text)
    made = _latex_marked(text) if emphasised is None else rf"\emph{{{latex_text(emphasised[1])}}}"
    if numeric:
        made = _MINUS.sub("$-$", made)
    return f"{{{made}}}" if made.startswith("[") else made  # after \\ a bracket is a length


def _unmarked(cell: str) -> str:
    """A cell without the marks of code around it."""
    return re.sub(r"^`(.*)`$", r"\1", cell)
