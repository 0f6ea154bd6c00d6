"""Defences alone and with a penalty: the sentences say what planted records hold."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from made_records import grouped

from paper.bases import (
    HOLDS,
    TABLE1,
    Base,
    against_reported_line,
    base_lines,
    base_section,
    base_table,
    count_line,
    holding_lines,
    missing_line,
    reported_line,
    rivals_line,
)
from splitveil.record.groups import Group
from splitveil.report.columns import Published

BASES = (
    Base(title="Plain", rows=("none", "cem", "veil-vgg11")),
    Base(title="ARL", rows=("arl", "arl+cem", "arl+veil")),
)

CEILING = 0.06


def record(accuracy: float, mse: float, defence: str = "arl") -> dict[str, Any]:
    return {
        "accuracy": accuracy,
        "strongest": {"mse": mse, "mse_by": "decoder"},
        "ceiling": {"mse": CEILING},
        "config": {"net": "vgg11", "dataset": "cifar10", "defence": defence, "noise_std": 0.025},
        "audit": {"profile": "standard", "aux": "train"},
    }


def row(name: str, *seeds: tuple[float, float]) -> Group:
    return grouped(name, ([record(*seed)] for seed in seeds))


ARL = (row("arl+veil", (0.85, 0.045)), row("arl", (0.88, 0.03)), row("arl+cem", (0.89, 0.024)))


def test_a_sentence_says_what_each_addition_gains_and_costs() -> None:
    (line,) = base_lines(BASES, ARL)
    assert line == (
        "**ARL**, alone MSE 0.0300 at 88.00 %: highest with `arl+veil`, 0.0450 (1.50×), "
        "-3.00 points; then `arl+cem`, 0.0240 (0.80×), +1.00 points."
    )


def test_a_base_that_nothing_improves_is_highest_alone() -> None:
    (line,) = base_lines(BASES, [row("arl", (0.88, 0.03)), row("arl+cem", (0.87, 0.03))])
    assert line.endswith("88.00 %: highest alone; then `arl+cem`, 0.0300 (1.00×), -1.00 points.")


def test_several_seeds_are_averaged() -> None:
    (line,) = base_lines(BASES, [row("arl", (0.80, 0.02), (0.90, 0.04)), ARL[2]])
    assert line.startswith("**ARL**, alone MSE 0.0300 at 85.00 %")


def test_bases_that_cannot_be_compared_say_why() -> None:
    lines = base_lines(BASES, [row("none", (0.9, 0.004)), row("arl+cem", (0.9, 0.03))])
    assert lines == [
        "**Plain**, alone MSE 0.0040 at 90.00 %: no record yet of what is added to it.",
        "**ARL**: no record of `arl` to compare with.",
    ]
    assert base_lines(BASES, []) == []


def test_an_addition_is_counted_over_the_bases_that_have_both_rows() -> None:
    plain = (row("none", (0.9, 0.004)), row("cem", (0.9, 0.005)))
    said = count_line(BASES, [*ARL, *plain])
    assert said == "More MSE than the base alone: `cem` on 1 of 2, `veil` on 1 of 1."
    assert not count_line(BASES, plain[:1])


def test_two_additions_are_counted_against_each_other_on_the_same_base() -> None:
    plain = (row("none", (0.9, 0.004)), row("cem", (0.88, 0.01)), row("veil-vgg11", (0.89, 0.02)))
    assert rivals_line(BASES, [*ARL, *plain]) == (
        "`veil` in the place of `cem`: more MSE on 2 of 2 bases, more accuracy on 1, both on 1."
    )
    level = (row("cem", (0.9, 0.01)), row("veil-vgg11", (0.9, 0.01)))
    assert rivals_line(BASES, level).endswith(
        "more MSE on 0 of 1 bases, more accuracy on 0, both on 0."
    )
    assert not rivals_line(BASES, plain[:2])


def test_rows_lie_on_one_side_of_what_is_reported() -> None:
    published = {
        "arl": Published(accuracy=0.87, mse=0.04, source="paper", dataset="cifar10"),
        "arl+cem": Published(accuracy=0.90, mse=0.03, source="paper", dataset="cifar10"),
        "none": Published(accuracy=0.90, mse=0.004, source="paper", dataset="cifar10"),
    }
    assert reported_line(ARL, published) == (
        "Measured against reported – more accurate, less MSE: `arl`; "
        "less accurate and less MSE: `arl+cem`."
    )
    assert not reported_line(ARL[:1], published)


def test_ours_as_measured_is_held_against_theirs_as_reported() -> None:
    published = {
        "cem": Published(accuracy=0.90, mse=0.010, source="paper", dataset="cifar10"),
        "arl+cem": Published(accuracy=0.84, mse=0.040, source="paper", dataset="cifar10"),
    }
    assert against_reported_line(BASES, [*ARL, row("veil-vgg11", (0.88, 0.02))], published) == (
        "`veil` as measured against `cem` as reported: more MSE on 2 of 2 bases, more accuracy on "
        "1, both on 1 (`veil-vgg11` -2.00 points, +0.0100; `arl+veil` +1.00 points, +0.0050)."
    )
    assert not against_reported_line(BASES, ARL, {})


def test_who_holds_up_is_half_of_the_ceiling_inclusive() -> None:
    half = row("half", (0.8, HOLDS * CEILING))
    under = row("under", (0.8, 0.029))
    assert holding_lines([under, half, row("all", (0.1, 0.06))]) == [
        "Hold up, the strongest attack on one sending has an MSE of at least 50 % of the ceiling: "
        "`all` (100 %, accuracy 10.00 %), `half` (50 %, accuracy 80.00 %).",
        "Do not, it is under 50 %: `under` (48 %, accuracy 80.00 %).",
    ]


@given(st.lists(st.floats(0.0001, 0.06), min_size=1, max_size=6))
def test_every_row_is_judged_once(errors: list[float]) -> None:
    lines = holding_lines([row(f"r{i}", (0.9, mse)) for i, mse in enumerate(errors)])
    assert all("".join(lines).count(f"`r{i}`") == 1 for i in range(len(errors)))
    assert lines[0].count("`r") == sum(mse / CEILING >= HOLDS for mse in errors)


def test_the_table_has_the_bases_order_and_what_is_reported() -> None:
    said = {
        "arl": Published(
            accuracy=0.8778, mse=0.029, source="CEM paper, Noise_ARL", dataset="cifar10"
        )
    }
    table, rows = base_table("Title", BASES, [*ARL, row("stranger", (0.5, 0.05))], said)
    headings = [column.heading for column in table.columns]
    cells = [dict(zip(headings, line, strict=True)) for line in table.cells(rows)]
    assert [c["row"] for c in cells] == ["`arl`", "`arl+cem`", "`arl+veil`"]
    assert [c["reported MSE"] for c in cells] == ["0.0290", "", ""]
    assert [c["strongest attack MSE"] for c in cells] == ["0.0300", "0.0240", "0.0450"]
    assert table.notes[0].startswith("Reported: Table 1 of the CEM paper")
    assert base_table("Title", BASES, ARL, {})[0].notes == ()


def test_the_section_names_what_has_no_record() -> None:
    assert missing_line(BASES, ARL) == "No record yet: `none`, `cem`, `veil-vgg11`."
    full = [*ARL, *(row(name, (0.9, 0.01)) for name in BASES[0].rows)]
    assert not missing_line(BASES, full)
    assert base_section("Title", BASES, ARL, {}).endswith(missing_line(BASES, ARL))
    assert "No record" not in base_section("Title", BASES, full, {})


def test_table_1_is_the_papers_seven_defences() -> None:
    assert [base.title for base in TABLE1] == [
        "Bottleneck", "DistCorr", "Dropout", "PATROL", "ResSFL", "Noise_Nopeek", "Noise_ARL",
    ]  # fmt: skip
    rows = [name for base in TABLE1 for name in base.rows]
    assert len(rows) == len(set(rows)) == 4 + 6 * 3
