"""What a server adds to the best client alone, and what the records then say."""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from made_records import grouped, record
from made_runs import MakeRun
from numpy.typing import NDArray

from splitveil.errors import ConfigError, RunError
from splitveil.record.groups import Group, Records
from splitveil.record.schema import Record, answers_well
from splitveil.record.statistics import Sample, difference
from splitveil.report.columns import summary_of
from splitveil.report.comparison import compare_records, track_table, tracks, warnings
from splitveil.report.figures import draw_pictures
from splitveil.report.gains import (
    answers_alone,
    beside,
    best_alone,
    check_data,
    check_rivals,
    clients_alone,
    exposure_over,
    gain,
    gains,
    group_track,
    nothing_sent,
    right_table,
    rows_beside,
)
from splitveil.report.page import read_runs
from splitveil.report.sentences import caveats

Json = dict[str, Any]
IMAGES, DRAWS = 2000, 4
HARD = np.random.default_rng(0).random(IMAGES)  # how hard each image is, for everybody


def answers(share: float, seed: int) -> NDArray[np.int64]:
    """How often of four each image is answered right; hard images are wrong everywhere."""
    noise = np.random.default_rng(seed).normal(0, 0.005, IMAGES)
    return np.where(HARD + noise < share, DRAWS, 0)


def made(
    share: float,
    seed: int = 0,
    defence: str = "noise",
    client: str = "inverted-a",
    *,
    answered: bool = True,
    **more: Any,  # noqa: ANN401 - keys of a record
) -> Json:
    """A record of a B1 client on 2,000 test images."""
    right = answers(share, seed + len(defence))
    alone = defence == "alone"
    data = record(float(right.mean() / DRAWS), seed=seed, macs=900_000)
    data["client"] |= {"params": 12_000}
    data["config"] |= {"defence": defence, "client": client, "net": f"{client}/resnet-128"}
    data["splits"] = {"scored": "abc", "test": "t1"}
    data["audit"] |= {"scored": IMAGES, "accuracy_draws": DRAWS}
    data |= {"leakage": 0.0 if alone else 0.6, "sent": 0.0 if alone else 1.0}
    data |= {"exposure": 0.0 if alone else 0.6, "intervals": {}}
    if answered:
        data["per_image"] = {"right": base64.b64encode(right.astype("u1").tobytes()).decode()}
    for key, value in more.items():
        data[key] = data.get(key, {}) | value if isinstance(value, dict) else value
    return data


def row(name: str, *records: Json) -> Group:
    return grouped(name, [[one] for one in records])


def seeds(name: str, share: float, count: int = 3, **facts: Any) -> Group:  # noqa: ANN401
    return row(name, *(made(share, seed, **facts) for seed in range(count)))


ALONE = seeds("alone", 0.80, defence="alone")
SENDS = seeds("noise", 0.86)


def flags(group: Group, rows: Sequence[Group]) -> set[str]:
    return beside(group.records[0], rows).flag_names


def test_the_gain_pairs_images_and_lets_seeds_vary_on_both_sides() -> None:
    found = gain(SENDS, ALONE)
    assert found is not None
    assert found.against == "alone"
    assert found.points == pytest.approx(6, abs=1)
    tables = [
        Sample.of([answers(share, s + len(d)) / DRAWS for s in range(3)])
        for share, d in ((0.86, "noise"), (0.80, "alone"))
    ]
    expected = difference(*tables, paired=False).interval
    assert found.limits == pytest.approx((100 * expected.low, 100 * expected.high))
    assert found.sure
    assert found.over == "seeds and images"


def test_answers_that_nobody_kept_give_wider_limits_never_narrower() -> None:
    paired = gain(row("a", made(0.86)), row("b", made(0.80, defence="alone")))
    blind = gain(
        row("a", made(0.86, answered=False)), row("b", made(0.80, defence="alone", answered=False))
    )
    assert paired is not None
    assert blind is not None
    assert paired.limits is not None
    assert blind.limits is not None
    assert blind.points == paired.points
    assert blind.limits[0] < paired.limits[0] < paired.limits[1] < blind.limits[1]


def test_a_useless_server_is_flagged_and_a_necessary_one_is_not() -> None:
    useless = seeds("useless", 0.80)
    assert "server not needed" in flags(useless, [useless, ALONE])
    assert "server not needed" not in flags(SENDS, [SENDS, ALONE])
    (flag,) = [f for f in beside(useless.records[0], [ALONE]).flags or () if "server" in f.name]
    assert str(flag.seen).startswith("the client alone alone answers 79.")
    assert "server not needed" not in flags(useless, [useless])  # without a row, nothing is known


def test_the_record_names_the_row_it_was_compared_with() -> None:
    found = beside(SENDS.records[0], [ALONE, SENDS])
    assert found.alone.row == "alone"
    assert found.alone.track == "B1"
    assert found.alone.seeds == 3
    assert found.alone.same_client == "alone"
    assert found.alone.accuracy == pytest.approx(ALONE.mean("accuracy"))
    assert found.server_gain == found.gain_over_same_client
    low, high = found.intervals["server_gain"]
    assert low < (found.server_gain or 0) < high
    assert Record.from_dict(found.to_dict()) == found
    assert beside(ALONE.records[0], [ALONE, SENDS]).alone.row is None


def test_the_best_client_alone_is_chosen_on_val_where_all_know_it() -> None:
    lucky = seeds("lucky", 0.82, defence="alone", training={"val_accuracy": 0.7})
    good = seeds("good", 0.80, defence="alone", training={"val_accuracy": 0.8})
    assert best_alone([lucky, good]) is good
    assert best_alone([lucky, good, seeds("old", 0.81, defence="alone")]) is lucky
    assert best_alone([]) is None


def asking(own: float, val: float | None = None, **more: Any) -> Group:  # noqa: ANN401
    """A row that sends a fifth; its own head answers a share of the images right."""
    bits = base64.b64encode(np.packbits(answers(own, 7) > 0).tobytes()).decode()
    part: Json = {"defence": "early-exit", "sent": 0.2, "exposure": 0.15, "leakage_sent": 0.7}
    known: Json = {} if val is None else {"training": {"val_own_accuracy": val}}
    return seeds("exit", 0.86, per_image={"own_right": bits}, **part, **known, **more)


def test_an_own_head_with_nothing_sent_is_a_client_alone() -> None:
    """The server beside it in training may make it better than any client trained alone."""
    head = nothing_sent(asking(0.83))
    assert head is not None
    assert answers_alone(head)
    assert right_table(head) is not None
    accuracy = head.mean("accuracy")
    assert accuracy == pytest.approx((answers(0.83, 7) > 0).mean())
    found = gains(asking(0.83), [ALONE, asking(0.83)])
    assert found.best is not None
    assert found.best.name == "exit (0 % sent)"
    assert found.over_best is not None
    assert accuracy is not None
    ours = asking(0.83).mean("accuracy")
    assert found.over_best.points == pytest.approx(100 * ((ours or 0) - accuracy))
    weak = gains(asking(0.70), [ALONE, asking(0.70)])
    assert weak.best is not None
    assert weak.best.name == "alone"
    for unknown in (SENDS, ALONE, part_row()):
        assert nothing_sent(unknown) is None


def test_an_audit_counts_the_own_head_of_its_run_though_no_row_has_it() -> None:
    """The record of an early exit says the same beside clients alone as among all rows."""
    row = asking(0.83)
    told = beside(row.records[0], [ALONE]).alone
    assert told.row == "own head (0 % sent)"
    assert told.same_client == "alone"
    assert beside(row.records[0], [ALONE, row]).alone.row == "exit (0 % sent)"


def test_own_heads_are_chosen_on_val_and_only_beside_a_client_trained_alone() -> None:
    assert clients_alone([asking(0.83), SENDS]) == []
    assert gains(SENDS, [asking(0.83), SENDS]).best is None
    known = seeds("alone", 0.80, defence="alone", training={"val_accuracy": 0.81})
    by_val = gains(SENDS, [known, asking(0.83, val=0.79)]).best
    assert by_val is not None
    assert by_val.name == "alone"


def test_a_record_with_too_few_bits_of_its_own_head_says_so() -> None:
    short = asking(0.83, audit={"scored": IMAGES + 8})
    with pytest.raises(RunError, match=r"own_right holds 2000 bits, but audit.scored is 2008"):
        nothing_sent(short)


def test_only_clients_alone_of_the_track_or_a_smaller_one_are_rivals() -> None:
    costly = [
        made(0.9, s, "alone", "big") | {"client": {"macs": 4e6, "params": 6e4}} for s in (0, 1)
    ]
    large = row("large", *costly)
    assert (group_track(large), group_track(SENDS)) == ("B5", "B1")
    found = gains(SENDS, [SENDS, ALONE, large])
    assert found.best is ALONE
    other = row("other", made(0.8, defence="alone", client="inverted-b"))
    found = gains(SENDS, [other, large])
    assert found.best is other
    assert found.over_same is None
    tapped = row("tapped", made(0.86, client="inverted-b@3"))
    same = gains(tapped, [other]).over_same
    assert same is not None
    assert same.against == "other"


def test_clients_alone_on_other_data_or_images_are_refused() -> None:
    digits = seeds("digits", 0.8, defence="alone", config={"dataset": "digits"})
    other = seeds("split", 0.8, defence="alone", splits={"test": "t2"})
    assert gains(SENDS, [digits, other]).best is None
    with pytest.raises(ConfigError, match="answers 'digits' and this run 'cifar10'"):
        check_data("cifar10", [digits])
    with pytest.raises(ConfigError, match=r"other images \(hash t2\) than this run \(hash t1\)"):
        check_rivals(SENDS.records[0], [other])
    with pytest.raises(ConfigError, match="answers alone, so it has no server"):
        check_rivals(ALONE.records[0], [ALONE])
    costs = {"macs": 4e6, "params": 6e4}
    large = row("large", made(0.9, 0, "alone", "big") | {"client": costs})
    with pytest.raises(ConfigError, match="belongs to track B5, this run's to B1"):
        check_rivals(SENDS.records[0], [large])


def test_a_row_far_below_its_net_without_a_defence_is_not_praised() -> None:
    bare = seeds("none", 0.9, defence="none")
    broken, fair = seeds("strong", 0.5, defence="veil"), seeds("veil", 0.85, defence="veil")
    found = beside(broken.records[0], [bare])
    assert "far below the undefended model" in found.flag_names
    assert not answers_well(found)
    assert answers_well(beside(fair.records[0], [bare]))
    assert answers_well(beside(ALONE.records[0], [bare]))  # a client alone is compared by its gain
    part = seeds("exit", 0.5, defence="early-exit", sent=0.2, exposure=0.1)
    assert answers_well(beside(part.records[0], [bare]))


def test_exposure_of_several_seeds_is_wider_than_over_images_alone() -> None:
    def exposed(*values: float) -> Group:
        limits = [{"exposure": [v - 0.01, v + 0.01]} for v in values]
        pairs = zip(values, limits, strict=True)
        return row("x", *(made(0.8, exposure=v, intervals=i) for v, i in pairs))

    mean, limits = exposure_over(exposed(0.2)) or (0.0, None)
    assert mean == 0.2
    assert limits == pytest.approx((0.19, 0.21))
    mean, limits = exposure_over(exposed(0.1, 0.2, 0.3)) or (0.0, None)
    assert mean == pytest.approx(0.2)
    assert limits is not None
    half = (0.01**2 + (4.30265 * 0.1 / 3**0.5) ** 2) ** 0.5
    assert limits == pytest.approx((0.2 - half, 0.2 + half), rel=1e-4)
    old = row("old", {k: v for k, v in made(0.8).items() if k not in ("exposure", "intervals")})
    assert exposure_over(old) == (0.6, None)


def part_row(name: str = "exit") -> Group:
    return seeds(
        name, 0.85, defence="early-exit", sent=0.2, exposure=0.15, leakage_sent=0.7, identified=0.1
    )


def headings(groups: Sequence[Group]) -> list[str]:
    (track,) = tracks(groups)
    table, rows = track_table(track, {})
    return table.render(rows, "markdown").split("\n")[4].strip("| ").split(" | ")


def test_columns_of_exposure_and_gain_stand_where_rows_have_something_to_tell() -> None:
    new = {"sent (%) ↓", "exposure (%) ↓", "identified of 1,000 (%) ↓", "server gain (points) ↑"}
    assert new.isdisjoint(headings([SENDS]))
    shown = headings([SENDS, ALONE])
    assert new <= set(shown)
    assert "leakage of the sent (%) ↓" not in shown
    assert "leakage of the sent (%) ↓" in headings([SENDS, part_row()])


def test_the_leakage_of_the_sent_never_stands_as_if_it_compared() -> None:
    (track,) = tracks([SENDS, ALONE, part_row()])
    table, rows = track_table(track, {})
    cells = {
        line[0].strip("`"): dict(zip([c.key for c in table.columns], line, strict=True))
        for line in table.cells(rows)
    }
    assert cells["exit"]["leakage"] == "–"
    assert cells["exit"]["leakage-sent"] == "70.0 ± 0.0"
    assert cells["exit"]["exposure"] == "15.0"
    assert cells["noise"]["leakage"] == "60.0 ± 0.0"
    assert cells["noise"]["server-gain"].startswith("+")
    assert cells["alone"]["server-gain"] == "–"
    assert any("Of `exit` only some images are sent" in note for note in table.notes)
    assert any("that is `alone` (B1)." in note for note in table.notes)
    latex = table.render(rows, "latex")
    assert "leakage of the sent" in latex


def test_the_differences_of_a_part_sending_row_leave_its_error_out() -> None:
    rows = (SENDS, part_row())
    (made,) = compare_records(Records(rows), {}, against="noise")
    (one,) = made.contrasts
    assert one.mse_gap is None
    assert one.mse is None
    assert one.verdict.endswith("; compare exposures")


def test_a_client_alone_and_an_unsure_fit_are_no_other_attacks() -> None:
    unsure: Json = {"attacks": {"decoder-unsure": {"mse": 0.05}}}
    part = seeds("exit", 0.85, defence="early-exit", sent=0.2, **unsure)
    silent = seeds("alone", 0.80, defence="alone", audit={"profile": "standard"})
    said = [line for line in warnings(Records((SENDS, part, silent))) if "attacks" in line]
    assert said == []
    other = seeds("other", 0.8, attacks={"linear": {"mse": 0.05}})
    assert any("by the same attacks" in line for line in warnings(Records((SENDS, other))))


def test_csv_holds_gains_in_points_with_their_limits() -> None:
    (found,) = compare_records(Records((SENDS, ALONE)), {})
    lines = {str(line["row"]): line for line in found.exact()}
    low, points, high = (
        lines["noise"][k] for k in ("server-gain_low", "server-gain", "server-gain_high")
    )
    assert isinstance(low, float)
    assert isinstance(points, float)
    assert isinstance(high, float)
    assert 0 < low < points < high
    assert lines["alone"]["server-gain"] is None


def test_rows_beside_each_other_keep_what_they_were() -> None:
    before = [SENDS, ALONE]
    after = rows_beside(before)
    assert [g.name for g in after] == ["noise", "alone"]
    assert after[0].values("accuracy") == SENDS.values("accuracy")
    assert after[0].records[0].server_gain is not None


def test_the_report_finds_the_clients_alone_among_its_runs(make_run: MakeRun) -> None:
    """Its summary, its pictures and its caveats tell what is sent, exposed and gained."""
    rows = (SENDS, ALONE, part_row())
    folders = [
        make_run(g.name, record=g.records[0].to_dict(), gallery=None).path for g in rows
    ]  # fmt: skip
    content = read_runs(folders)
    assert [run.record.alone.row for run in content.runs] == ["alone", None, "alone"]
    table = summary_of(content.runs).render(content.runs, "html")
    assert "Server gain" in table
    assert "Leakage of the sent" in table
    pictures = draw_pictures(content.runs, {})
    assert pictures.frontier is not None
    assert "Only some images are sent by: exit" in " ".join(
        said.plain() for said in caveats(content.runs)
    )
    again = read_runs(folders[:1])
    assert "Server gain" not in summary_of(again.runs).render(again.runs, "html")
    assert draw_pictures(again.runs, {}).frontier is None
