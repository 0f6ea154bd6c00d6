"""Every attack on every row, and leaks that are no pictures, read from records made by hand."""

from typing import Any

from made_records import grouped

from paper.tables import attack_table
from splitveil.record.groups import Group
from splitveil.report.columns import LEAKS
from splitveil.report.words import Lang


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
    return grouped(name, ([r] for r in records))


def attack_cells(*groups: Group) -> dict[str, list[str]]:
    """The cells of each attack, row by row."""
    table = attack_table(groups)
    columns = zip(*table.cells(groups), strict=True)
    return {c.label(): list(cells) for c, cells in zip(table.columns, columns, strict=True)}


def leak_cells(group: Group, lang: Lang = "en") -> list[str]:
    [cells] = LEAKS.cells([group], lang)
    return cells


def test_the_strongest_attack_is_bold_and_a_subset_never_is() -> None:
    cells = attack_cells(row("a", record(0.01), record(0.03)), row("b", record(0.05)))
    assert cells["`decoder`"] == ["**0.0200 ± 0.0141**", "0.0500"]
    assert cells["`linear`"] == ["0.0400 ± 0.0000", "**0.0400**"]
    assert cells["`rmle`*"] == ["0.0010 ± 0.0000", "0.0010"]
    assert cells["`k-query`†"][1] == "0.0020"


def against(*pairs: tuple[float, float | None]) -> list[dict[str, Any]]:
    """Records whose attack on a subset has these errors, and its rival there those beside them."""
    made = [record(0.01, seed=i) for i in range(len(pairs))]
    for one, (mse, rival) in zip(made, pairs, strict=True):
        entry = {"mse": mse, "subset": "fixed-64"}
        beside = {} if rival is None else {"beside": {"attack": "decoder", "mse": rival}}
        one["attacks"]["prior"] = entry | beside
    return made


def test_an_attack_on_a_subset_stands_beside_its_rival() -> None:
    cells = attack_cells(
        row("beaten", *against((0.002, 0.004), (0.003, 0.004))),  # ratios 1/2 and 3/4
        row("held", *against((0.0055, 0.005))),
        grouped("twice", (tuple(against((4.0, 4.0), (2.0, 4.0))), tuple(against((5.0, 4.0))))),
        row("near", *against((0.0998, 0.1))),
        row("old", *against((0.005, None))),
        row("half", *against((0.002, 0.004), (0.002, None))),
    )
    assert cells["`prior`*"] == [
        "0.0025 ± 0.0007 (×0.62)",
        "0.0055 (×1.10)",
        "4.0000 ± 1.4142 (×1.00)",  # (3/4 + 5/4)/2
        "0.0998 (×0.998)",
        "0.0050",
        "0.0020 ± 0.0000",  # a ratio over some of the seeds is not shown
    ]


def test_leaks_are_of_the_strongest_score_and_the_best_picture() -> None:
    assert leak_cells(row("a", record(0.01))) == [
        "`a`", "50.0", "–", "25.0", "0.625", "0.500", "12.5", "20.0", "refused", "9",
    ]  # fmt: skip


def certified(gallery: dict[str, Any], population: dict[str, Any]) -> dict[str, Any]:
    made = record(0.01)
    made["certificates"] = {
        "gallery": {"nats_given_class": 20.0} | gallery,
        "population": {"nats_given_class": 30.0} | population,
    }
    return made


EMPTY = {"identification_error": {"refused": "vacuous: 32 nats are not below log 359 − log 2"}}


def rates(*records: dict[str, Any], lang: Lang = "en") -> tuple[str, ...]:
    return tuple(leak_cells(row("a", *records), lang)[7:9])


def test_rates_that_exclude_nothing_are_called_vacuous() -> None:
    bare, tight = certified({"vacuous": True}, EMPTY), certified({"vacuous": False}, {})
    assert rates(bare) == ("20.0, vacuous", "30.0, vacuous")
    assert rates(bare, lang="zh") == ("20.0，无约束力", "30.0，无约束力")
    assert rates(tight) == ("20.0", "30.0")
    assert rates(bare, tight, bare) == tuple(
        f"{value} ± 0.0, vacuous in 2 of 3 seeds" for value in ("20.0", "30.0")
    )


def test_who_knows_the_encoder_stands_beside_who_queries() -> None:
    known = [certified({"matcher_error": error}, {}) for error in (0.125, 0.375)]
    assert leak_cells(row("a", *known))[1:3] == ["50.0 ± 0.0", "75.0 ± 17.7"]
    assert leak_cells(row("b", record(0.01)))[1:3] == ["50.0", "–"]


def identified(share: float, sendings: int | None) -> dict[str, Any]:
    made = record(0.01)
    made["leaks"]["re-id"]["wire"] = {"rank_1": share}
    if sendings is not None:
        made["leaks"]["re-id"]["wire"]["sendings"] = sendings
    return made


def test_re_identification_is_of_the_most_sendings() -> None:
    mixed = grouped(
        "mixed",
        (
            (identified(0.8, 32), identified(0.9, 32)),
            (identified(0.7, 32), identified(0.1, 4)),
            (identified(0.3, 4), identified(0.2, None)),
        ),
    )
    assert leak_cells(mixed)[1] == "77.5 ± 10.6"  # of .85 and .7
    assert leak_cells(row("few", identified(0.5, 4), identified(0.7, 4)))[1] == "60.0 ± 14.1"
    assert leak_cells(row("silent", identified(0.25, None)))[1] == "25.0"
