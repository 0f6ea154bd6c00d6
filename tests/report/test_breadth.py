"""Every attack on every row, and leaks that are no pictures, read from records made by hand."""

from typing import Any

from splitveil.report.breadth import attack_sheet, breadth, leak_sheet
from splitveil.report.rows import Group


def record(decoder: float, *, seed: int = 0, leaky: bool = True) -> dict[str, Any]:
    attacks: dict[str, Any] = {
        name: {"mse": mse}
        for name, mse in (
            ("mean", 0.06),
            ("class-mean", 0.05),
            ("linear", 0.04),
            ("decoder", decoder),
        )
    }
    attacks["rmle"] = {"mse": 0.001, "subset": "fixed-64"}
    attacks["k-query"] = {"mse": 0.002, "repeats": 16}
    made: dict[str, Any] = {
        "attacks": attacks,
        "strongest": {
            "mse": min(decoder, 0.04),
            "mse_by": "decoder" if decoder < 0.04 else "linear",
        },
        "config": {"seed": seed},
    }
    if leaky:
        made["leaks"] = {
            "re-id": {
                "wire": {"rank_1": 0.5},
                "linear/mse": {"rank_1": 0.125},
                "linear/correlation": {"rank_1": 0.25},
            },
            "membership": {
                "strongest": {"outputs": "lrt", "wire": "distance"},
                "outputs": {"lrt": {"auc": 0.625}, "loss": {"auc": 0.75}},
                "wire": {"distance": {"auc": 0.5}},
            },
            "attribute": {"side": {"beyond_answer": 0.125}, "edges": {"beyond_answer": -0.5}},
        }
        made["certificates"] = {
            "gallery": {"nats_given_class": 20.0, "doubles": {"repeats": 9}},
            "population": {"refused": "no certificate: the channel is deterministic"},
        }
    return made


def row(name: str, *records: dict[str, Any]) -> Group:
    return Group(name, tuple((r,) for r in records))


def test_the_strongest_attack_of_each_row_is_bold_and_subsets_never_are() -> None:
    sheet = attack_sheet([row("a", record(0.01), record(0.03)), row("b", record(0.05))])
    assert sheet is not None
    cells = {line[0]: line[1:] for line in sheet.rows}
    assert cells["`decoder`"] == ("**0.0200 ± 0.0141**", "0.0500")
    assert cells["`linear`"] == ("0.0400 ± 0.0000", "**0.0400**")
    assert cells["`rmle`*"] == ("0.0010 ± 0.0000", "0.0010")
    assert cells["`k-query`†"][1] == "0.0020"


def test_rows_of_a_smaller_suite_are_left_out() -> None:
    old = record(0.01)
    old["attacks"] = {"decoder": {"mse": 0.01}}
    assert attack_sheet([row("old", old)]) is None
    sheet = attack_sheet([row("old", old), row("new", record(0.01))])
    assert sheet is not None
    assert [c.heading for c in sheet.columns] == ["attack", "new"]


def test_leaks_are_those_of_the_strongest_score_and_the_best_picture() -> None:
    sheet = leak_sheet([row("a", record(0.01)), row("b", record(0.01, leaky=False))])
    assert sheet is not None
    assert sheet.rows == (
        ("`a`", "50.0", "25.0", "0.625", "0.500", "12.5", "20.0", "–", "9"),
    )  # fmt: skip


def test_records_without_leaks_have_no_table() -> None:
    old = row("old", record(0.01, leaky=False))
    assert leak_sheet([old]) is None
    assert "Leaks beyond pixels" not in breadth([old])
    assert breadth([]) == "–"
