"""The frontier: what is surely a gain, the chord of a coin, and what is drawn grey."""

import base64
import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from made_records import grouped, record
from numpy.typing import NDArray
from PIL import Image

from splitveil.record.groups import Group
from splitveil.report import canvas
from splitveil.report.figures import draw_frontier
from splitveil.report.gains import Frontier, everything_sent, frontier, kind_of, over_chord

Json = dict[str, Any]
IMAGES = 4000
ALONE, SERVER, LEAK = 0.75, 0.90, 0.8
GREY = tuple(int(canvas.GREY[i : i + 2], 16) for i in (1, 3, 5))


def rights(seed: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which images a client alone and its server answer right; some are hard for both."""
    hard = np.random.default_rng(0).random(IMAGES)
    noise = np.random.default_rng(seed).normal(0, 0.05, (2, IMAGES))
    return hard + noise[0] < ALONE, hard + noise[1] < SERVER


def made(right: NDArray[np.bool_], seed: int, defence: str, **more: Any) -> Json:  # noqa: ANN401
    data = record(float(right.mean()), seed=seed, macs=900_000)
    data["client"] |= {"params": 12_000}
    data["config"] |= {"defence": defence, "client": "tiny", "net": "tiny/resnet-128"}
    data["splits"] = {"scored": "abc", "test": "t"}
    data["audit"] |= {"scored": IMAGES, "accuracy_draws": 1}
    data["per_image"] = {"right": base64.b64encode(right.astype("u1").tobytes()).decode()}
    return data | {"sent": 1.0, "exposure": LEAK, "leakage": LEAK, "identified": 0.9} | more


def silent(seed: int) -> Json:
    none = {"sent": 0.0, "exposure": 0.0, "leakage": 0.0, "leakage_sent": None, "identified": 0.0}
    return made(rights(seed)[0], seed, "alone", **none)


def sender(seed: int) -> Json:
    return made(rights(10 + seed)[1], seed, "noise")


def exits(share: float, *, at_random: bool, seed: int, draw: int = 0) -> Json:
    """An early exit that sends images that it gets wrong, or any."""
    own, server = rights(20 + seed)
    order = np.random.default_rng(100 + 10 * draw + seed).random(IMAGES)
    sent = order + (0 if at_random else 1) * own < np.quantile(
        order + (0 if at_random else 1) * own, share
    )
    part = {"sent": share, "exposure": share * LEAK, "leakage_sent": LEAK}
    right = np.where(sent, server, own)
    return made(right, seed, "early-exit", identified=0.9 * share, **part)


def three(name: str, *records: Json) -> Group:
    return grouped(name, [[one] for one in records])


SILENT = three("alone", *map(silent, range(3)))
SENDER = three("noise", *map(sender, range(3)))


def exit_row(name: str, share: float, *, at_random: bool, draw: int = 0) -> Group:
    return three(
        name, *(exits(share, at_random=at_random, seed=s, draw=draw) for s in range(3))
    )  # fmt: skip


def found_in(*groups: Group) -> Frontier:
    found = frontier(groups)
    assert found is not None
    return found


def test_a_random_rule_lies_on_the_chord_and_is_grey() -> None:
    rule = exit_row("coin", 0.3, at_random=True)
    found = found_in(SILENT, SENDER, rule)
    coin = found.points[-1]
    assert coin.over_chord is not None
    assert coin.over_chord.points == pytest.approx(0, abs=0.7)
    assert coin.gain is not None
    assert coin.gain.sure  # more right answers than alone, but a coin would give as many
    assert not coin.sure


def test_a_random_rule_is_rarely_taken_for_a_gain() -> None:
    taken = 0
    for draw in range(40):
        made = over_chord(exit_row("coin", 0.3, at_random=True, draw=draw), SILENT, [SENDER])
        assert made is not None
        taken += made.sure
    assert taken <= 4


def test_a_rule_that_sends_what_it_gets_wrong_lies_surely_above() -> None:
    found = found_in(SILENT, SENDER, exit_row("exit", 0.3, at_random=False))
    point = found.points[-1]
    assert point.kind == "exit"
    assert point.over_chord is not None
    assert point.over_chord.against == "noise"
    assert point.over_chord.points > 5
    assert point.sure


def test_the_chord_leads_from_the_best_alone_to_the_best_sender() -> None:
    dear = three("dear", *(sender(s) | {"exposure": 0.95, "leakage": 0.95} for s in range(3)))
    found = found_in(SILENT, dear, SENDER)
    assert found.chord is not None
    assert found.chord[0] == (0.0, SILENT.mean("accuracy"))
    assert found.chord[1] == pytest.approx((LEAK, SENDER.mean("accuracy")))


def test_beyond_a_senders_own_leakage_the_chord_is_the_sender() -> None:
    part = exit_row("exit", 0.3, at_random=True)
    cheap = three("cheap", *(sender(s) | {"exposure": 0.1, "leakage": 0.1} for s in range(3)))
    made = over_chord(part, SILENT, [SENDER, cheap])
    assert made is not None
    assert made.against == "cheap"
    expected = 100 * ((part.mean("accuracy") or 0) - (cheap.mean("accuracy") or 0))
    assert made.points == pytest.approx(expected)


def test_a_row_without_a_gain_is_grey_whatever_it_leaks() -> None:
    poor = three("veil", *(made(rights(s)[0], s, "veil", exposure=0.01) for s in range(3)))
    found = found_in(SILENT, poor, SENDER)
    assert {p.group.name: p.sure for p in found.points} == {
        "alone": True, "veil": False, "noise": True,
    }  # fmt: skip


def test_without_kept_answers_nothing_is_surely_above_the_chord() -> None:
    part = exit_row("exit", 0.3, at_random=False)
    blind = three("exit", *(r.to_dict() | {"per_image": {}} for r in part.records))
    point = found_in(SILENT, SENDER, blind).points[-1]
    assert point.over_chord is not None
    assert point.over_chord.limits is None
    assert not point.sure


def test_rows_at_chance_are_left_out_and_named() -> None:
    flag = {"flags": [{"name": "accuracy at chance"}]}
    broken = three("broken", made(rights(0)[0], 0, "veil", exposure=0.0, **flag))
    found = found_in(SILENT, SENDER, broken)
    assert [p.group.name for p in found.points] == ["alone", "noise"]
    assert found.left_out == ("broken",)


def test_there_is_no_frontier_without_a_client_alone_or_an_exit() -> None:
    assert frontier([SENDER]) is None
    assert frontier([]) is None


def test_the_curve_of_a_record_is_drawn_through_its_point() -> None:
    shares = [
        {"sent": s, "accuracy": ALONE + 0.1 * s, "leakage_sent": LEAK, "exposure": LEAK * s}
        for s in (1.0, 0.0, 0.5)
    ]
    record = exits(0.3, at_random=False, seed=0) | {"shares": shares}
    (point,) = [p for p in found_in(SILENT, SENDER, three("exit", record)).points if p.curve]
    assert point.curve[0] == (0.0, ALONE)
    assert [round(x, 6) for x, _ in point.curve] == [0.0, 0.4, 0.8]


def whole(seed: int) -> Json:
    """An early exit whose record says what its server answers if everything is sent."""
    own, server = rights(20 + seed)
    bits = {k: base64.b64encode(np.packbits(v).tobytes()).decode()
            for k, v in (("own_right", own), ("server_right", server))}  # fmt: skip
    data = exits(0.3, at_random=False, seed=seed)
    shares = [
        {"sent": 0.0, "accuracy": float(own.mean()), "leakage_sent": None, "exposure": 0.0},
        {"sent": 1.0, "accuracy": float(server.mean()), "leakage_sent": 0.5, "exposure": 0.5},
    ]
    return data | {"per_image": data["per_image"] | bits, "shares": shares}


def test_the_chord_may_end_at_the_server_of_an_early_exit_with_everything_sent() -> None:
    """It leaks less here than the row that sends everything, so a coin does better with it."""
    row = three("exit", *map(whole, range(3)))
    sent = everything_sent(row)
    assert sent is not None
    assert kind_of(sent) == "split"
    accuracy = np.mean([rights(20 + s)[1].mean() for s in range(3)])
    assert sent.mean("accuracy") == pytest.approx(accuracy)
    found = found_in(SILENT, SENDER, row)
    assert found.chord is not None
    assert found.chord[1] == pytest.approx((0.5, accuracy))
    above = found.points[-1].over_chord
    assert above is not None
    assert above.against == "exit (100 % sent)"
    plain = found_in(SILENT, SENDER, exit_row("exit", 0.3, at_random=False)).points[-1].over_chord
    assert plain is not None
    assert plain.against == "noise"
    assert plain.points > above.points


def test_a_curve_is_the_mean_over_the_seeds() -> None:
    found = found_in(SILENT, SENDER, three("exit", *map(whole, range(3))))
    (start, end) = found.points[-1].curve
    owns = [rights(20 + s)[0].mean() for s in range(3)]
    assert start == pytest.approx((0.0, np.mean(owns)))
    assert end[0] == pytest.approx(0.5)


def test_the_picture_draws_what_is_unsure_in_grey() -> None:
    def grey(found: Frontier) -> int:
        png = np.asarray(Image.open(io.BytesIO(draw_frontier(found).png)).convert("RGB"))
        return int((np.abs(png.astype(int) - GREY).max(-1) < 8).sum())

    sure = found_in(SILENT, SENDER, exit_row("exit", 0.3, at_random=False))
    part = sure.points[-1]
    unsure = replace(sure, points=(*sure.points[:-1], replace(part, over_chord=None)))
    assert grey(unsure) > grey(sure) + 100
    assert len(draw_frontier(unsure, canvas.drawable("zh")[0]).svg) > 1000
