"""Every attack on every row, and leaks that are no pictures, read from records made by hand."""

from typing import Any

from made_records import grouped

from paper.breadth import attack_table, breadth, leak_table
from splitveil.record.groups import Group
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


def attack_cells(groups: list[Group]) -> dict[str, list[str]]:
    table, rows = attack_table(groups)
    return {line[0]: line[1:] for line in table.cells(rows)}


def leak_cells(groups: list[Group], lang: Lang = "en") -> list[list[str]]:
    table, rows = leak_table(groups, lang)
    return table.cells(rows, lang)


def test_the_strongest_attack_of_each_row_is_bold_and_subsets_never_are() -> None:
    cells = attack_cells([row("a", record(0.01), record(0.03)), row("b", record(0.05))])
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


def test_an_attack_on_a_subset_stands_beside_its_rival_on_the_same_images() -> None:
    groups = [
        row("beaten", *against((0.002, 0.004), (0.003, 0.004))),  # ratios 1/2 and 3/4
        row("held", *against((0.0055, 0.005))),
        grouped("twice", (tuple(against((4.0, 4.0), (2.0, 4.0))), tuple(against((5.0, 4.0))))),
        row("near", *against((0.0998, 0.1))),
        row("old", *against((0.005, None))),
    ]  # fmt: skip
    cells = attack_cells(groups)
    assert cells["`prior`*"] == [
        "0.0025 ± 0.0007 (×0.62)",
        "0.0055 (×1.10)",
        "4.0000 ± 1.4142 (×1.00)",  # (3/4 + 5/4)/2
        "0.0998 (×0.998)",
        "0.0050",
    ]
    assert cells["`rmle`*"][0] == "0.0010 ± 0.0000"
    table, _ = attack_table(groups)
    assert "above 1 it is weaker" in table.caption
    assert table.notes == (
        "`prior` beats the best black-box attack on the same images (`decoder`) on `beaten` "
        "(×0.62), `near` (×0.998); it does not on `held` (×1.10), `twice` (×1.00).",
    )
    assert table.notes[0] in breadth(groups)


def test_the_sentence_of_an_attack_that_wins_or_loses_everywhere() -> None:
    won, lost = row("won", *against((0.002, 0.004))), row("lost", *against((0.006, 0.004)))
    best = "the best black-box attack on the same images (`decoder`)"
    more = row("more", *against((0.008, 0.004)))
    for groups, told in (
        ([won], f"`prior` beats {best} on `won` (×0.50)."),
        ([lost], f"`prior` nowhere beats {best}: ×1.50."),
        ([lost, more], f"`prior` nowhere beats {best}: ×1.50 to ×2.00."),
    ):
        assert attack_table(groups)[0].notes == (told,)


def test_a_ratio_over_some_of_the_seeds_is_not_shown() -> None:
    half = [row("half", *against((0.002, 0.004), (0.002, None)))]
    assert attack_cells(half)["`prior`*"] == ["0.0020 ± 0.0000"]
    assert attack_table(half)[0].notes == ()


def test_rows_of_a_smaller_suite_are_left_out() -> None:
    old = record(0.01)
    old["attacks"] = {"decoder": {"mse": 0.01}}
    assert attack_cells([row("old", old)]) == {}
    table, _ = attack_table([row("old", old), row("new", record(0.01))])
    assert [c.heading for c in table.columns] == ["attack", "new"]


def test_leaks_are_those_of_the_strongest_score_and_the_best_picture() -> None:
    cells = leak_cells([row("a", record(0.01)), row("b", record(0.01, leaky=False))])
    assert cells == [["`a`", "50.0", "–", "25.0", "0.625", "0.500", "12.5", "20.0", "refused", "9"]]


def certified(gallery: dict[str, Any], population: dict[str, Any]) -> dict[str, Any]:
    made = record(0.01)
    made["certificates"] = {
        "gallery": {"nats_given_class": 20.0} | gallery,
        "population": {"nats_given_class": 30.0} | population,
    }
    return made


EMPTY = {"identification_error": {"refused": "vacuous: 32 nats are not below log 359 − log 2"}}


def rates(*records: dict[str, Any], lang: Lang = "en") -> tuple[str, ...]:
    return tuple(leak_cells([row("a", *records)], lang)[0][7:9])


def test_rates_that_exclude_nothing_are_called_vacuous() -> None:
    bare, tight = certified({"vacuous": True}, EMPTY), certified({"vacuous": False}, {})
    assert rates(bare) == ("20.0, vacuous", "30.0, vacuous")
    assert rates(bare, lang="zh") == ("20.0，无约束力", "30.0，无约束力")
    assert rates(tight) == ("20.0", "30.0")
    assert rates(bare, tight, bare) == tuple(
        f"{value} ± 0.0, vacuous in 2 of 3 seeds" for value in ("20.0", "30.0")
    )


def test_the_matcher_who_knows_the_encoder_stands_beside_the_one_who_queries() -> None:
    known = [certified({"matcher_error": error}, {}) for error in (0.125, 0.375)]
    table, rows = leak_table([row("a", *known), row("b", record(0.01))])
    assert [c.label() for c in table.columns[1:3]] == [
        "re-id by z̃ (%) ↓",
        "re-id, knows the encoder (%) ↓",
    ]
    assert [line[1:3] for line in table.cells(rows)] == [
        ["50.0 ± 0.0", "75.0 ± 17.7"],
        ["50.0", "–"],
    ]


def test_the_legend_gives_the_chance_of_finding_the_image() -> None:
    sized = record(0.01)
    sized["leaks"]["re-id"]["wire"]["gallery"] = 10_000
    table, _ = leak_table([row("a", sized)])
    assert "chance is 1/n" in table.caption
    assert table.caption.endswith("Here n is 10,000: chance 0.01 %.")
    sized["certificates"]["gallery"]["images"] = 500  # the matcher's own list
    table, _ = leak_table([row("a", sized)])
    assert table.caption.endswith("Here n is 500, 10,000: chance 0.2, 0.01 %.")


def test_records_without_leaks_have_no_table() -> None:
    old = row("old", record(0.01, leaky=False))
    assert leak_cells([old]) == []
    assert "Leaks beyond pixels" not in breadth([old])
    assert breadth([]) == "–"


def identified(share: float, sendings: int | None) -> dict[str, Any]:
    made = record(0.01)
    made["leaks"]["re-id"]["wire"] = {"rank_1": share}
    if sendings is not None:
        made["leaks"]["re-id"]["wire"]["sendings"] = sendings
    return made


def test_re_identification_is_of_the_attacker_with_the_most_sendings() -> None:
    mixed = grouped(
        "mixed",
        (
            (identified(0.8, 32), identified(0.9, 32)),
            (identified(0.7, 32), identified(0.1, 4)),
            (identified(0.3, 4), identified(0.2, None)),
        ),
    )
    few = row("few", identified(0.5, 4), identified(0.7, 4))
    silent = row("silent", identified(0.25, None))
    table, rows = leak_table([mixed, few, silent])
    assert {line[0]: line[1] for line in table.cells(rows)} == {
        "`mixed`": "77.5 ± 10.6",  # of .85 and .7
        "`few`": "60.0 ± 14.1",
        "`silent`": "25.0",
    }
    assert table.notes == (
        "Re-id by z̃, number of times the attacker had sent each known image before: 32 times for "
        "`mixed`; 4 times for `few`; for `mixed` the mean covers 2 of 3 training seeds, because "
        "in the other records it was 4.",
    )
    in_chinese, _ = leak_table([mixed, few, silent], "zh")
    assert "`mixed` 为 32 次" in in_chinese.notes[0]


def test_where_all_had_as_many_sendings_nothing_is_said_of_them() -> None:
    same = row("a", identified(0.8, 32), identified(0.9, 32))
    for groups in ([same], [row("a", identified(0.8, None))], [same, row("b", record(0.1))]):
        assert leak_table(groups)[0].notes == ()
