"""The first screen: what the rows say in every case, and one table whose rows hold pictures."""

import base64
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from made_runs import MakeRun, make_gallery, make_record

from splitveil.record.files import RunFiles
from splitveil.report.first_screen import (
    FRONT,
    FrontRow,
    conclusions,
    front_rows,
    front_tables,
    mmacs,
    sent_at,
    stamps,
)

TINY = FrontRow(
    name="tiny-alone", kind="alone", defence="alone", client="t", macs=84_672.0, accuracy=0.805,
    sent=0.0, exposure=0.0,
)  # fmt: skip
BARE = replace(
    TINY, name="undefended", kind="split", defence="noise", accuracy=0.871, sent=1.0, leakage=0.84,
    exposure=0.84,
)  # fmt: skip
VEIL = replace(BARE, name="veil", defence="veil", accuracy=0.84, leakage=0.73, exposure=0.73)
UNSURE = replace(
    BARE, name="if-unsure", kind="exit", defence="early-exit", accuracy=0.857, sent=0.3,
    exposure=0.25,
)  # fmt: skip
LARGER = replace(TINY, name="larger-alone", client="l", macs=1.2e6, accuracy=0.873)
SIX = (TINY, BARE, VEIL, UNSURE, LARGER)


def told(*rows: FrontRow) -> str:
    return " ".join(said.plain() for said in conclusions(rows))


def test_the_prototypes_rows_give_the_demos_sentence() -> None:
    assert told(*SIX) == (
        "If the device can afford 1.2 MMAC, ship that client alone: as accurate as the best split "
        "(87.3 against 87.1 %), and no picture leaves it. If it cannot, let it ask only when "
        "unsure: +5.2 points over “tiny-alone”, and 7 of 10 pictures never leave the device. Sent "
        "always and undefended, a stranger rebuilds 84 % of what the label does not tell. “veil” "
        "lowers that to 73 % and costs 3.1 points of accuracy."
    )
    assert told(*SIX) == told(*SIX[::-1])


CASES: dict[str, tuple[tuple[FrontRow, ...], str]] = {
    "a larger client that is better": (
        (BARE, replace(LARGER, accuracy=0.9)),
        "more accurate than the best split (90.0 against 87.1 %)",
    ),
    "a larger client that is not enough": (
        (TINY, BARE, UNSURE, replace(LARGER, accuracy=0.85)),
        "A client of 1.2 MMAC alone answers 85.0 % right, 2.1 points less than “undefended” with "
        "its server (87.1 %); no picture leaves it. Let the device ask only when unsure: +5.2",
    ),
    "asking gains nothing": (
        (TINY, replace(UNSURE, accuracy=0.803)),
        "Asking only when unsure gains −0.2 points over “tiny-alone”: not worth sending anything.",
    ),
    "asking without a row alone": (
        (BARE, UNSURE),
        "If the device asks only when unsure, 85.7 % of the answers are right and 7 of 10",
    ),
    "a server that adds": ((TINY, BARE), "The server adds 6.6 points to the same client alone"),
    "a server that adds nothing": (
        (TINY, replace(BARE, accuracy=0.806)),
        "The same client alone answers 80.5 % right, with the server 80.6 %: the server is not "
        "needed.",
    ),
    "no client alone": ((BARE, VEIL), "whether the server is needed is not known"),
    "hardly anything leaks undefended": (
        (TINY, replace(BARE, leakage=0.04)),
        "Sent always and undefended, a stranger rebuilds 4 %: little more than the label tells.",
    ),
    "nothing leaks undefended": (
        (TINY, replace(BARE, leakage=-0.5)), "a stranger rebuilds 0 %: little more",
    ),
    "a defence that lowers nothing": (
        (BARE, replace(VEIL, leakage=0.81)),
        "No defence here lowers that by much: “veil” leaves 81 %.",
    ),
    "a defence that gains": (
        (BARE, replace(VEIL, accuracy=0.88)), "to 73 % and gains 0.9 points of accuracy.",
    ),
    "a defence that costs nothing": (
        (BARE, replace(VEIL, accuracy=0.869)), "to 73 % and keeps the accuracy.",
    ),
    "defences without an undefended row": (
        (VEIL, replace(VEIL, name="worse", leakage=0.9)),
        "“veil” leaks the least: 73 % of what the label does not tell. There is no undefended row",
    ),
    "clients alone only": ((TINY, LARGER), "The best, “larger-alone”, answers 87.3 % right."),
    "one split": ((BARE,), "“undefended” answers 87.1 % right, and a stranger rebuilds 84 %"),
    "one exit": ((UNSURE,), "and 7 of 10 pictures never leave the device. Of those that do"),
    "one alone": ((TINY,), "“tiny-alone” answers 80.5 % right by itself"),
    "a dead model": (
        (BARE, replace(VEIL, accuracy=0.1, leakage=-0.75, poor=True)),
        "Left out, because no better than guessing or far below the undefended model: veil.",
    ),
    "no accuracy is known": ((replace(BARE, accuracy=None),), "is not known"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_sentence_agrees_with_the_rows(case: str) -> None:
    rows, expected = CASES[case]
    assert expected in told(*rows)


def test_without_any_accuracy_the_sentence_says_what_leaks() -> None:
    unknown = [replace(row, accuracy=None) for row in (VEIL, BARE)]
    assert told(*unknown) == (
        "The accuracy of “undefended” is not known. A stranger rebuilds 84 % of what the label "
        "does not tell."
    )
    assert told(replace(unknown[0], leakage=None)).startswith("Nothing was audited yet")


def test_a_dead_model_is_never_praised() -> None:
    dead = replace(VEIL, accuracy=0.1, leakage=-0.75, poor=True)
    assert "“veil”" not in told(BARE, TINY, dead)
    assert "model: veil" in told(dead)


@pytest.mark.parametrize(
    ("macs", "shown"),
    [(None, "–"), (999.0, "0.0010"), (19_600.0, "0.020"), (84_672.0, "0.085"), (1.0e6, "1.0")],
)
def test_multiply_adds_are_short(macs: float | None, shown: str) -> None:
    assert mmacs(macs) == shown


def exit_record(bits: list[int], sent: float, **more: Any) -> dict[str, Any]:  # noqa: ANN401
    packed = base64.b64encode(np.packbits(np.array(bits, np.uint8)).tobytes()).decode()
    record = make_record("veil") | {"sent": sent, "leakage_sent": 0.8, "exposure": 0.4} | more
    record["per_image"] = {"sent": packed}
    record["config"] |= {"defence": "early-exit", "client": "tiny", "server": "small"}
    return record


def alone_record() -> dict[str, Any]:
    record = make_record("veil") | {"sent": 0.0, "leakage_sent": None, "exposure": 0.0}
    record["config"] |= {"defence": "alone", "client": "tiny"}
    return record | {"accuracy": 0.9}


def run_of(make_run: MakeRun, name: str, record: dict[str, Any] | None, **more: Any) -> RunFiles:  # noqa: ANN401
    return make_run(name, record=record, metrics=None, **more)


def test_rows_are_read_from_records(make_run: MakeRun) -> None:
    asks = run_of(make_run, "asks", exit_record([0] * 8, 0.5))
    rows = front_rows([run_of(make_run, "by-itself", alone_record()), asks])
    alone, unsure = rows
    assert (alone.kind, alone.sent, alone.exposure, alone.leakage) == ("alone", 0.0, 0.0, None)
    assert (unsure.kind, unsure.leakage, unsure.exposure) == ("exit", 0.8, 0.4)
    assert unsure.adds == pytest.approx(7.78)
    assert FRONT.cells(rows) == [
        ["by-itself", "1.2", "90.0", "–", "0 %"],
        ["asks", "1.2", "97.8", "+7.8", "80 % of 5 pictures in 10: exposure 40 %"],
    ]


@pytest.mark.parametrize(
    ("defence", "kind"), [("early-exit+veil", "exit"), ("alone", "alone"), ("veil", "split")]
)
def test_a_run_without_an_audit_says_so_and_is_what_its_settings_say(
    make_run: MakeRun, defence: str, kind: str
) -> None:
    run = replace(run_of(make_run, "new", None, gallery=None), config={"defence": defence})
    rows = front_rows([run])
    assert rows[0].kind == kind
    assert FRONT.cells(rows)[0][-1] == "not audited"


def test_without_a_client_alone_the_gain_that_a_record_states_is_taken(make_run: MakeRun) -> None:
    stated = exit_record([0] * 8, 0.5, gain_over_same_client=1.25)
    assert front_rows([run_of(make_run, "asks", stated)])[0].adds == 1.25


def test_old_records_are_splits_that_expose_what_leaks(three: list[RunFiles]) -> None:
    rows = front_rows(three)
    assert [row.kind for row in rows] == ["split"] * 3
    assert [row.undefended for row in rows] == [True, False, False]
    assert [row.exposure for row in rows] == [row.leakage for row in rows]
    assert "no client alone" not in told(*rows)
    assert "“veil” lowers that to 6 % and costs 0.8 points of accuracy." in told(*rows)


def test_every_row_shows_the_same_six_images(three: list[RunFiles]) -> None:
    (table,) = front_tables(front_rows(three), "en")
    gallery = three[0].gallery
    assert gallery is not None
    assert tuple(look.words for look in table.originals) == gallery.label_names[:6]
    assert table.side == 72  # nine times 8 px
    assert all(len(row.looks) == 6 for row in table.rows)
    assert len({look.uri for row in table.rows for look in row.looks}) == 18


@pytest.mark.parametrize(("side", "shown"), [(8, 72), (28, 84), (32, 96), (64, 96), (96, 96)])
def test_pictures_are_large_enough_to_see(make_run: MakeRun, side: int, shown: int) -> None:
    run = make_run("x", gallery=make_gallery("veil", (3, side, side), n=6))
    (table,) = front_tables(front_rows([run]), "en")
    assert table.side == shown


def test_what_is_not_sent_stays(make_run: MakeRun) -> None:
    run = run_of(make_run, "asks", exit_record([0, 1, 0, 0, 0, 0, 0, 0], 0.1))
    ((row,),) = [table.rows for table in front_tables(front_rows([run]), "en")]
    assert [bool(look.uri) for look in row.looks] == [False, True, False, False, False, False]
    assert [look.words for look in row.looks if not look.uri] == ["stays"] * 5
    assert (row.note, row.extra) == ("", ())


def test_if_none_of_the_six_is_sent_the_first_that_is_stands_beside(make_run: MakeRun) -> None:
    run = run_of(make_run, "asks", exit_record([0] * 7 + [1], 0.1))
    ((row,),) = [table.rows for table in front_tables(front_rows([run]), "en")]
    assert "The first that is sent" in row.note
    assert [bool(look.uri) for look in row.extra] == [True, True]
    nothing = run_of(make_run, "silent", exit_record([0] * 8, 0.1))
    ((row,),) = [table.rows for table in front_tables(front_rows([nothing]), "en")]
    assert (row.note, row.extra) == ("All of these pictures stay on the device.", ())


def test_a_client_alone_shows_its_answers(make_run: MakeRun) -> None:
    run = run_of(make_run, "by-itself", alone_record())
    ((row,),) = [table.rows for table in front_tables(front_rows([run]), "en")]
    gallery = run.gallery
    assert gallery is not None
    assert tuple(look.words for look in row.looks) == gallery.answer_names[:6]
    assert not any(look.uri for look in row.looks)
    assert sent_at(run, gallery) == [True] * 8  # no rule


def test_rows_on_other_images_have_a_table_of_their_own(
    three: list[RunFiles], make_run: MakeRun
) -> None:
    other = make_record("veil")
    other["config"]["dataset"] = "photos"
    rgb = make_run("photos", record=other, gallery=make_gallery("veil", (3, 32, 32), first=40))
    bare = make_run("bare", gallery=None)
    assert [len(t.rows) for t in front_tables(front_rows([*three, rgb]), "en")] == [3, 1]
    with_bare = front_tables(front_rows([three[0], bare]), "en")
    assert [len(table.rows) for table in with_bare] == [2]
    assert front_tables(front_rows([bare]), "en")[0].originals == ()


def test_a_weak_audit_is_stamped(make_run: MakeRun, three: list[RunFiles]) -> None:
    assert [said.plain() for said in stamps(three)] == ["quick audit: not for claims"]
    record = make_record("veil")
    record["audit"]["profile"] = "standard"
    assert stamps([make_run("x", record=record)]) == []
