"""Tables for other programs: CSV without rounding, and LaTeX with booktabs."""

import csv
import io
import re
from collections.abc import Mapping, Sequence

from splitveil.report.compare import Sheet
from splitveil.report.tables import Column

Cell = float | str | None
SPECIAL: Mapping[str, str] = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "Δ": r"$\Delta$",
    "λ": r"$\lambda$",
    "–": "--",
    "“": "``",
    "”": "''",
}
_MINUS = re.compile(r"(?<![\w.-])-(?=\d)")
_MARKED = re.compile(r"`([^`]*)`|\*\*(.+?)\*\*")


def csv_text(rows: Sequence[Mapping[str, Cell]]) -> str:
    r"""Rows as CSV under the keys of all of them; numbers keep every digit, None is empty.

    >>> csv_text([{"row": "a,b", "mse": 0.1}, {"row": "c", "mse": None, "n": 3.0}])
    'row,mse,n\n"a,b",0.1,\nc,,3\n'
    """
    keys = list(dict.fromkeys(key for row in rows for key in row))
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(keys)
    writer.writerows([[_exact(row.get(key)) for key in keys] for row in rows])
    return stream.getvalue()


def _exact(value: Cell) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(value)
    return value


def escape(text: str) -> str:
    r"""Text that LaTeX prints as it stands.

    >>> escape("slot_cross: 90 % ± 1")
    'slot\\_cross: 90 \\% $\\pm$ 1'
    """
    return "".join(SPECIAL.get(sign, sign) for sign in text)


def latex(sheet: Sheet) -> str:
    r"""A table environment of booktabs; columns that say nothing are left out.

    The document needs `\usepackage{booktabs}`.
    """
    columns, rows = sheet.filled()
    align = "".join("r" if column.numeric else "l" for column in columns)
    lines = [
        r"\begin{table}",
        r"  \centering\small",
        rf"  \caption{{{_marked(f'{sheet.title}. {sheet.caption}')}}}",
        rf"  \begin{{tabular}}{{{align}}}",
        r"    \toprule",
        f"    {' & '.join(escape(column.label) for column in columns)} \\\\",
        r"    \midrule",
        *(f"    {' & '.join(map(_cell, row, columns))} \\\\" for row in rows),
        r"    \bottomrule",
        r"  \end{tabular}",
        *(f"  {_marked(note)}" for note in sheet.notes),
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _marked(text: str) -> str:
    """Markdown's code and bold as LaTeX, the rest escaped."""
    made, end = "", 0
    for found in _MARKED.finditer(text):
        made += escape(text[end : found.start()])
        code, bold = found.groups()
        made += rf"\textbf{{{escape(bold)}}}" if code is None else rf"\texttt{{{escape(code)}}}"
        end = found.end()
    return made + escape(text[end:])


def _cell(text: str, column: Column) -> str:
    emphasised = re.fullmatch(r"\*([^*]+)\*", text)
    made = _marked(text) if emphasised is None else rf"\emph{{{escape(emphasised[1])}}}"
    if column.numeric:
        made = _MINUS.sub("$-$", made)
    return f"{{{made}}}" if made.startswith("[") else made  # \\ takes a bracket as a length
