"""A table declared by its columns, written as HTML, Markdown, LaTeX, CSV, JSON or plain text."""

import csv
import io
import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from html import escape as html_escape
from itertools import groupby
from typing import Any, Literal

NOTHING = "–"
SMALL_MSE = 1e-3  # below this, four decimals would hide the leading digits
ARROWS = {"": "", "up": "↑", "down": "↓"}
LATEX: Mapping[str, str] = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "±": r"$\pm$",
    "×": r"$\times$", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "Δ": r"$\Delta$",
    "λ": r"$\lambda$", "–": "--", "“": "``", "”": "''",
}  # fmt: skip
_MINUS = re.compile(r"(?<![\w.-])-(?=\d)")
_MARKED = re.compile(r"`([^`]*)`|\*\*(.+?)\*\*")

Cell = float | str | None
Words = str | Mapping[str, str]  # the same in every language, or one text per language
Form = Literal["html", "markdown", "latex", "csv", "json", "terminal"]


def spread(values: Sequence[float | None], scale: float, digits: int) -> str:
    """Mean ± sd over seeds; a single seed has no sd.

    >>> spread([0.5, 0.7], 100.0, 1), spread([0.5], 1.0, 4), spread([None], 1.0, 2)
    ('60.0 ± 14.1', '0.5000', '–')
    """
    known = [v * scale for v in values if v is not None]
    if not known:
        return NOTHING
    mean = f"{statistics.fmean(known):.{digits}f}"
    return f"{mean} ± {statistics.stdev(known):.{digits}f}" if len(known) > 1 else mean


def format_mse(value: float | None) -> str:
    """A mean squared error, pixels in [0, 1].

    >>> format_mse(0.05291), format_mse(0.000362), format_mse(None)
    ('0.0529', '0.00036', '–')
    """
    if value is None:
        return NOTHING
    return f"{value:.4f}" if value == 0 or abs(value) >= SMALL_MSE else f"{value:.2g}"


def percent(value: float | None, digits: int) -> str:
    """A fraction as per cent, without the sign (the heading has it).

    >>> percent(0.981, 2)
    '98.10'
    """
    return NOTHING if value is None else f"{100 * value:.{digits}f}"


def decimals(value: float | None, digits: int) -> str:
    """A number with a fixed count of decimals."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def count(value: float | None) -> str:
    """A whole number with thousands set apart.

    >>> count(1234567.0)
    '1,234,567'
    """
    return NOTHING if value is None else f"{value:,.0f}"


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a column shows its values.

    Args:
        text: The cell of a value in a language.
        exact: What other programs get of a value, one entry per suffix.
        suffixes: What these entries add to the column's key.
        numeric: Whether cells are aligned to the right; a text among numbers stays as it is.
        nothing: The cell where there is no value.
    """

    text: Callable[[Any, Any], str]
    exact: Callable[[Any], tuple[Cell, ...]] = lambda value: (value,)
    suffixes: tuple[str, ...] = ("",)
    numeric: bool = True
    nothing: str = NOTHING


TEXT = Format(text=lambda value, _: str(value), numeric=False)
DIGITS = replace(TEXT, numeric=True)
CODE = replace(TEXT, text=lambda name, _: name if name.startswith("*") else f"`{name}`")
TEXTS = Format(  # the different texts of a row
    text=lambda values, _: ", ".join(values),
    exact=lambda values: (", ".join(v for v in values if v != NOTHING) or None,),
    numeric=False,
)
MSE = Format(text=lambda value, _: format_mse(value))
COUNT = Format(text=lambda value, _: count(value))
P_VALUE = Format(text=lambda p, _: f"{p:.3f}" if p >= 0.0005 else "<0.001")  # noqa: PLR2004


def fixed(digits: int, scale: float = 1.0, nothing: str = NOTHING) -> Format:
    """A number with this many decimals; `scale` 100 shows a share in per cent."""
    return Format(text=lambda value, _: f"{scale * value:.{digits}f}", nothing=nothing)


def mean_sd(digits: int, scale: float = 1.0) -> Format:
    """Numbers of several seeds as mean ± sd."""
    return Format(
        text=lambda values, _: spread(values, scale, digits),
        exact=lambda values: (_mean(values), _sd(values)),
        suffixes=("", "_sd"),
    )


def shared(digits: int, scale: float = 1.0) -> Format:
    """A number that all seeds should share: each of its different values."""

    def text(values: Sequence[float | None], _: str) -> str:
        return ", ".join(sorted({spread([v], scale, digits) for v in values}))

    return Format(text=text, exact=lambda values: (_mean(values),))


def gap(digits: int, scale: float = 1.0) -> Format:
    """A difference and the ends of its interval, None where it has none.

    >>> shown = gap(1, 100.0).text
    >>> shown((0.02, (0.01, 0.03)), "en"), shown((-0.005, None), "en")
    ('+2.0 [+1.0, +3.0]', '-0.5')
    """

    def text(value: tuple[float, tuple[float, float] | None], _: str) -> str:
        middle, *ends = (f"{scale * v:+.{digits}f}" for v in (value[0], *(value[1] or ())))
        return f"{middle} [{', '.join(ends)}]" if ends else middle

    return Format(
        text=text,
        exact=lambda value: (value[0], *(value[1] or (None, None))),
        suffixes=("", "_low", "_high"),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    if len(set(known)) == 1:
        return known[0]  # a mean of equal numbers may differ in the last bit
    return statistics.fmean(known) if known else None


def _sd(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.stdev(known) if len(known) > 1 else None


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Args:
        key: Its name for other programs.
        heading: Its name for readers.
        get: Reads its value off a row, None where nothing is known. A row that is a mapping from
            keys to values is read by `key`.
        fmt: How the value is shown.
        unit: Unit of the numbers, in brackets after the heading.
        better: Where the defender wants the number to go.
        brief: Heading in a terminal, where a column without one is left out.
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
        words = in_language(self.heading, lang) + (f" ({unit})" if unit else "")
        return f"{words} {ARROWS[self.better]}".rstrip()

    def value(self, row: Any) -> Any:  # noqa: ANN401 - a table does not know its rows
        """What a row has in this column."""
        return row.get(self.key) if self.get is None or isinstance(row, Mapping) else self.get(row)

    def cell(self, row: Any, lang: str = "en") -> str:  # noqa: ANN401
        """The value as readers see it."""
        value = self.value(row)
        if value is None:
            return self.fmt.nothing
        as_it_is = self.fmt.numeric and isinstance(value, str)
        return str(value) if as_it_is else self.fmt.text(value, lang)

    @property
    def keys(self) -> list[str]:
        """What other programs know its values by."""
        return [self.key + suffix for suffix in self.fmt.suffixes]

    def exact(self, row: Any) -> dict[str, Cell]:  # noqa: ANN401
        """The value without rounding, by key."""
        value = self.value(row)
        if value is None:
            return dict.fromkeys(self.keys)
        return dict(zip(self.keys, self.fmt.exact(value), strict=True))


def plain_column(key: str, heading: str, fmt: Format = TEXT) -> Column:
    """A column of a listing in a terminal, with one heading everywhere."""
    return Column(key, heading, fmt=fmt, brief=heading)


def in_language(words: Words, lang: str) -> str:
    """A text in a language."""
    return words if isinstance(words, str) else words[lang]


class Table:
    """Columns, and what stands around the rows.

    A cell may hold the marks of Markdown for code, bold and emphasis, as may caption and notes.

    Args:
        columns: The columns, from the left.
        title: Heading of the table.
        caption: What the rows have in common.
        notes: Lines below the table.
        style: CSS class of the HTML table.
        together: Rows with the same value of this stand in one body of the HTML table.

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
        """The columns of some keys, in this order."""
        known = {column.key: column for column in self.columns}
        columns = [known[key] for key in keys]
        return Table(*columns, title=self.title, caption=self.caption, notes=self.notes)

    def cells(self, rows: Sequence[Any], lang: str = "en") -> list[list[str]]:
        """The cells of every row."""
        return [[column.cell(row, lang) for column in self.columns] for row in rows]

    def exact(self, rows: Sequence[Any]) -> list[dict[str, Cell]]:
        """Every row without rounding, under the columns' keys."""
        return [
            {key: value for column in self.columns for key, value in column.exact(row).items()}
            for row in rows
        ]

    def shown(self, rows: Sequence[Any], lang: str = "en") -> tuple[list[Column], list[list[str]]]:
        """Columns and cells without the columns that say nothing."""
        cells = self.cells(rows, lang)
        kept = [i for i in range(len(self.columns)) if any(line[i] for line in cells)]
        return [self.columns[i] for i in kept], [[line[i] for i in kept] for line in cells]

    def brief(self, rows: Sequence[Any], lang: str = "en") -> tuple[list[str], list[list[str]]]:
        """Headings and cells of the columns that fit a terminal of 80 characters."""
        columns, cells = self.shown(rows, lang)
        kept = [i for i, column in enumerate(columns) if column.brief]
        headings = [f"{columns[i].brief} {ARROWS[columns[i].better]}".rstrip() for i in kept]
        return headings, [[_unmarked(line[i]) for i in kept] for line in cells]

    def render(self, rows: Sequence[Any], form: Form, lang: str = "en", *, level: int = 2) -> str:
        """The table as text.

        Args:
            rows: Whatever the columns read.
            form: The form to write: CSV and JSON hold every digit, the others what readers see.
            lang: Language of headings and cells.
            level: Level of the title in Markdown.
        """
        match form:
            case "csv":
                return csv_text(self.exact(rows))
            case "json":
                return json.dumps(self.exact(rows), ensure_ascii=False, indent=2)
            case "html":
                return self._html(rows, lang)
            case "latex":
                return self._latex(rows, lang)
            case "markdown":
                return self._markdown(rows, lang, level)
            case "terminal":
                return self._terminal(rows, lang)

    def _markdown(self, rows: Sequence[Any], lang: str, level: int) -> str:
        columns, cells = self.shown(rows, lang)
        lines = [[column.label(lang) for column in columns]]
        lines.append(["--:" if column.fmt.numeric else "---" for column in columns])
        lines += [[cell.replace("|", "\\|") for cell in line] for line in cells]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        title = f"{'#' * level} {self.title}" if self.title else ""
        parts = (title, self.caption, table, *self.notes)
        return "\n\n".join(part for part in parts if part) + "\n"

    def _latex(self, rows: Sequence[Any], lang: str) -> str:
        r"""A table environment; the document needs `\usepackage{booktabs}`."""
        columns, cells = self.shown(rows, lang)
        align = "".join("r" if column.fmt.numeric else "l" for column in columns)
        caption = ". ".join(part for part in (self.title, self.caption) if part)
        lines = [
            r"\begin{table}",
            r"  \centering\small",
            *([rf"  \caption{{{_latex_marked(caption)}}}"] if caption else []),
            rf"  \begin{{tabular}}{{{align}}}",
            r"    \toprule",
            f"    {' & '.join(latex_text(column.label(lang)) for column in columns)} \\\\",
            r"    \midrule",
            *(f"    {' & '.join(map(_latex_cell, line, columns))} \\\\" for line in cells),
            r"    \bottomrule",
            r"  \end{tabular}",
            *(f"  {_latex_marked(note)}" for note in self.notes),
            r"\end{table}",
        ]
        return "\n".join(lines) + "\n"

    def _html(self, rows: Sequence[Any], lang: str) -> str:
        """A table element; the row whose last cell has a star is of class `best`."""
        style = f' class="{self.style}"' if self.style else ""
        lines = [f"<table{style}>", "<thead><tr>"]
        lines += [_html_heading(column, lang) for column in self.columns]
        lines.append("</tr></thead>")
        for _, together in groupby(rows, self.together):
            lines.append("<tbody>")
            for name, *cells in self.cells(list(together), lang):
                best = ' class="best"' if cells and cells[-1].startswith("★") else ""
                lines += [f"<tr{best}>", f'<th scope="row">{html_escape(_unmarked(name))}</th>']
                lines += [
                    f"<td{_html_class(column)}>{html_escape(_unmarked(cell))}</td>"
                    for cell, column in zip(cells, self.columns[1:], strict=True)
                ]
                lines.append("</tr>")
            lines.append("</tbody>")
        return "\n".join([*lines, "</table>"])

    def _terminal(self, rows: Sequence[Any], lang: str) -> str:
        headings, cells = self.brief(rows, lang)
        columns = [column for column in self.shown(rows, lang)[0] if column.brief]
        pads = [str.rjust if column.fmt.numeric else str.ljust for column in columns]
        lines = [headings, *cells]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = (
            "  ".join(pad(cell, wide) for pad, cell, wide in zip(pads, line, widths, strict=True))
            for line in lines
        )
        return "\n".join(map(str.rstrip, padded)) + "\n"


def csv_text(rows: Sequence[Mapping[str, Cell]]) -> str:
    r"""Rows as CSV under the keys of all of them; numbers keep every digit, None is empty.

    >>> csv_text([{"row": "a,b", "mse": 0.1}, {"row": "c", "mse": None, "n": 3.0}])
    'row,mse,n\n"a,b",0.1,\nc,,3\n'
    """
    keys = list(dict.fromkeys(key for row in rows for key in row))
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(keys)
    writer.writerows([[_digits(row.get(key)) for key in keys] for row in rows])
    return stream.getvalue()


def _digits(value: Cell) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(value)
    return str(value)


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


def latex_text(text: str) -> str:
    r"""Text that LaTeX prints as it stands.

    >>> latex_text("slot_cross: 90 % ± 1")
    'slot\\_cross: 90 \\% $\\pm$ 1'
    """
    return "".join(LATEX.get(sign, sign) for sign in text)


def _latex_marked(text: str) -> str:
    """Markdown's code and bold as LaTeX, the rest escaped."""
    made, end = "", 0
    for found in _MARKED.finditer(text):
        made += latex_text(text[end : found.start()])
        code, bold = found.groups()
        name, inner = ("textbf", bold) if code is None else ("texttt", code)
        made += rf"\{name}{{{latex_text(inner)}}}"
        end = found.end()
    return made + latex_text(text[end:])


def _latex_cell(text: str, column: Column) -> str:
    emphasised = re.fullmatch(r"\*([^*]+)\*", text)
    made = _latex_marked(text) if emphasised is None else rf"\emph{{{latex_text(emphasised[1])}}}"
    if column.fmt.numeric:
        made = _MINUS.sub("$-$", made)
    return f"{{{made}}}" if made.startswith("[") else made  # \\ takes a bracket as a length


def _html_heading(column: Column, lang: str) -> str:
    heading, unit = (html_escape(in_language(w, lang)) for w in (column.heading, column.unit))
    arrow = f"&nbsp;{ARROWS[column.better]}" if column.better else ""
    if unit:
        arrow = f' <span class="unit">({unit}){arrow}</span>'
    return f'<th scope="col"{_html_class(column)}>{heading}{arrow}</th>'


def _html_class(column: Column) -> str:
    return ' class="num"' if column.fmt.numeric else ""


def _unmarked(cell: str) -> str:
    """A cell without the marks of code around it."""
    return re.sub(r"^`(.*)`$", r"\1", cell)
