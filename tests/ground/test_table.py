"""A table in all its forms: what readers see, what CSV keeps, what LaTeX and HTML can read."""

import csv
import io
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitveil.table import CODE, DIGITS, LATEX, Column, Table, csv_text, fixed, latex_text, mean_sd

texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)
numbers = st.floats(allow_nan=False, allow_infinity=False)


def number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@given(st.lists(st.tuples(texts, numbers, st.one_of(st.none(), numbers)), min_size=1, max_size=5))
def test_csv_keeps_every_bit_of_a_number(
    rows: list[tuple[str, float, float | None]],
) -> None:
    keys = ("row", "mse", "mse_sd")
    text = csv_text([dict(zip(keys, row, strict=True)) for row in rows])
    read = list(csv.DictReader(io.StringIO(text, newline="")))
    back = [(r["row"], float(r["mse"]), float(r["mse_sd"]) if r["mse_sd"] else None) for r in read]
    formulas = [(f"'{t}" if t[0] in "=+-@" and not number(t) else t, *n) for t, *n in rows]
    assert back == formulas


def test_csv_leaves_missing_keys_empty_and_quotes_line_breaks() -> None:
    text = csv_text([{"row": "a\nb"}, {"row": 'say "c"', "n": 2.0}])
    assert list(csv.reader(io.StringIO(text, newline=""))) == [
        ["row", "n"],
        ["a\nb", ""],
        ['say "c"', "2"],
    ]


@given(st.text("ab &%$#_{}\\~^<>|±×↑↓Δλ–", max_size=20))
def test_latex_escaping_can_be_undone(text: str) -> None:
    made = latex_text(text)
    signs = {said: sign for sign, said in LATEX.items()}
    longest = sorted(signs, key=len, reverse=True)
    pieces = re.findall("|".join([*map(re.escape, longest), "."]), made)
    assert "".join(signs.get(piece, piece) for piece in pieces) == text
    assert not {piece for piece in pieces if piece not in signs} & set("&%$#_{}\\~^")


TABLE = Table(
    Column("row", "row"),
    Column("empty", "empty", fmt=DIGITS),
    Column("mse", "MSE_a", fmt=DIGITS, unit="%", better="up"),
    Column("p", "p", fmt=DIGITS),
    title="T_1",
    caption="50 % of **all** `x_y`.",
    notes=("N & M.",),
)
ROWS = [
    {"row": "`a_b & c`", "empty": "", "mse": "0.1 ± 0.2", "p": "<0.001"},
    {"row": "*seed*", "empty": "", "mse": "+0.1 [-0.2, +0.4]"},
    {"row": "[x]", "empty": "", "mse": "", "p": "-1e-3"},
]


def test_latex_is_a_booktabs_table() -> None:
    assert TABLE.render(ROWS, "latex").splitlines() == [
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
    bare = re.sub(r"\\[{}]", "", TABLE.render(ROWS, "latex"))
    assert bare.count(ends[0]) == bare.count(ends[1]) > 0


NAMED = Table(
    Column("row", "row", fmt=CODE, brief="row"),
    Column("empty", "empty", fmt=fixed(2, nothing="")),
    Column("mse", {"en": "MSE", "zh": "误差"}, fmt=mean_sd(2), better="up", brief="MSE"),
    Column("share", "share", fmt=fixed(1, 100.0), unit="%"),
    title="T",
    caption="c.",
    notes=("n.",),
)
NAMED_ROWS = [{"row": "a", "mse": [0.25, 0.75], "share": 1 / 3}, {"row": "b|c", "mse": [None]}]


def test_readers_see_the_same_in_markdown_and_terminal() -> None:
    assert NAMED.render(NAMED_ROWS, "markdown") == (
        "## T\n\nc.\n\n| row | MSE ↑ | share (%) |\n| --- | --: | --: |\n"
        "| `a` | 0.50 ± 0.35 | 33.3 |\n| `b\\|c` | – | – |\n\nn.\n"
    )
    assert NAMED.brief(NAMED_ROWS) == (["row", "MSE ↑"], [["a", "0.50 ± 0.35"], ["b|c", "–"]])
    assert (
        NAMED.render(NAMED_ROWS, "terminal")
        == "row        MSE ↑\na    0.50 ± 0.35\nb|c            –\n"
    )
    assert "| 误差 ↑ |" in NAMED.render(NAMED_ROWS, "markdown", "zh")


def test_other_programs_get_every_digit_under_the_keys() -> None:
    rows = [
        {"row": "a", "empty": None, "mse": 0.5, "mse_sd": 0.125**0.5, "share": 1 / 3},
        {"row": "b|c", "empty": None, "mse": None, "mse_sd": None, "share": None},
    ]
    assert json.loads(NAMED.render(NAMED_ROWS, "json")) == rows
    lines = NAMED.render(NAMED_ROWS, "csv").splitlines()
    assert lines[0] == "row,empty,mse,mse_sd,share"
    assert lines[1] == f"a,,0.5,{0.125**0.5!r},{1 / 3!r}"


def test_html_is_escaped_and_marks_numbers_and_the_best() -> None:
    table = Table(
        Column("row", "<r>", fmt=CODE),
        Column("n", "n", fmt=DIGITS, unit="%", better="down"),
        Column("star", "star"),
        style="prose",
        together=lambda row: row["row"],
    )
    rows = [{"row": "<a>", "n": "1", "star": ""}, {"row": "<a>", "n": "2", "star": "★ MSE"}]
    assert table.render([*rows, {"row": "b", "n": None, "star": "&"}], "html").split("\n") == [
        '<table class="prose">', "<thead><tr>", '<th scope="col">&lt;r&gt;</th>',
        '<th scope="col" class="num">n <span class="unit">(%)&nbsp;↓</span></th>',
        '<th scope="col">star</th>', "</tr></thead>", "<tbody>",
        "<tr>", '<th scope="row">&lt;a&gt;</th>', '<td class="num">1</td>', "<td></td>", "</tr>",
        '<tr class="best">', '<th scope="row">&lt;a&gt;</th>', '<td class="num">2</td>',
        "<td>★ MSE</td>", "</tr>", "</tbody>", "<tbody>",
        "<tr>", '<th scope="row">b</th>', '<td class="num">–</td>', "<td>&amp;</td>", "</tr>",
        "</tbody>", "</table>",
    ]  # fmt: skip
