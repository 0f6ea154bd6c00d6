"""Tables for other programs: what CSV keeps, and what LaTeX can read."""

import csv
import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitveil.report.compare import Sheet
from splitveil.report.exchange import SPECIAL, csv_text, escape, latex
from splitveil.report.tables import Column

texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)
numbers = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(st.tuples(texts, numbers, st.one_of(st.none(), numbers)), min_size=1, max_size=5))
def test_csv_comes_back_through_the_csv_module_bit_for_bit(
    rows: list[tuple[str, float, float | None]],
) -> None:
    keys = ("row", "mse", "mse_sd")
    text = csv_text([dict(zip(keys, row, strict=True)) for row in rows])
    read = list(csv.DictReader(io.StringIO(text, newline="")))
    back = [(r["row"], float(r["mse"]), float(r["mse_sd"]) if r["mse_sd"] else None) for r in read]
    assert back == rows


def test_rows_without_a_key_are_empty_there_and_a_line_break_stays_inside_its_cell() -> None:
    text = csv_text([{"row": "a\nb"}, {"row": 'say "c"', "n": 2.0}])
    assert list(csv.reader(io.StringIO(text, newline=""))) == [
        ["row", "n"],
        ["a\nb", ""],
        ['say "c"', "2"],
    ]


@given(st.text("ab &%$#_{}\\~^<>|±×↑↓Δλ–", max_size=20))
def test_escaping_can_be_undone_and_leaves_nothing_special(text: str) -> None:
    made = escape(text)
    signs = {said: sign for sign, said in SPECIAL.items()}
    longest = sorted(signs, key=len, reverse=True)
    pieces = re.findall("|".join([*map(re.escape, longest), "."]), made)
    assert "".join(signs.get(piece, piece) for piece in pieces) == text
    assert not {piece for piece in pieces if piece not in signs} & set("&%$#_{}\\~^")


def sheet() -> Sheet:
    columns = (
        Column(heading="row", numeric=False),
        Column(heading="empty"),
        Column(heading="MSE_a", unit="%", arrow="↑"),
        Column(heading="p"),
    )
    rows = (
        ("`a_b & c`", "", "0.1 ± 0.2", "<0.001"),
        ("*seed*", "", "+0.1 [-0.2, +0.4]", "–"),
        ("[x]", "", "", "-1e-3"),
    )
    return Sheet(
        title="T_1", caption="50 % of **all** `x_y`.", columns=columns, rows=rows, notes=("N & M.",)
    )


def test_latex_is_a_booktabs_table() -> None:
    assert latex(sheet()).splitlines() == [
        r"\begin{table}",
        r"  \centering\small",
        r"  \caption{T\_1. 50 \% of \textbf{all} \texttt{x\_y}.}",
        r"  \begin{tabular}{lrr}",
        r"    \toprule",
        r"    row & MSE\_a (\%) $\uparrow$ & p \\",
        r"    \midrule",
        r"    \texttt{a\_b \& c} & 0.1 $\pm$ 0.2 & \textless{}0.001 \\",
        r"    \emph{seed} & +0.1 [$-$0.2, +0.4] & -- \\",
        r"    {[x]} &  & $-$1e-3 \\",
        r"    \bottomrule",
        r"  \end{tabular}",
        r"  N \& M.",
        r"\end{table}",
    ]


@pytest.mark.parametrize("ends", [("{", "}"), (r"\begin", r"\end"), ("[", "]")])
def test_latex_closes_what_it_opens(ends: tuple[str, str]) -> None:
    bare = re.sub(r"\\[{}]", "", latex(sheet()))
    assert bare.count(ends[0]) == bare.count(ends[1]) > 0
