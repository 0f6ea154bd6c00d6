"""What holds of reported comparisons: the words follow planted records."""

from typing import Any

import pytest
from made_records import grouped

from paper.claims import (
    claim_lines,
    layer_lines,
    order_line,
    own_images_line,
    pair_lines,
    span_lines,
)
from splitveil.record.groups import Group
from splitveil.report.columns import Published

REPORTED = {
    "cem": Published(
        accuracy=0.85, mse=0.04, source="log", dataset="cifar10", aux="test90", ssim_zeropad=0.43,
        psnr_pooled=13.6, reconstruction_accuracy=0.24,
    ),
    "gated": Published(
        accuracy=0.84, mse=0.05, source="log", dataset="cifar10", aux="test90", ssim_zeropad=0.41,
        psnr_pooled=13.2, reconstruction_accuracy=0.25,
    ),
}  # fmt: skip


def row(
    name: str, mse: float, *, strongest: float | None = None, accuracy: float = 0.9
) -> tuple[str, Group]:
    decoder = {"mse": mse, "ssim_zeropad": 0.5, "psnr_pooled": 20 - 100 * mse, "accuracy": 0.3}
    record: dict[str, Any] = {"accuracy": accuracy, "attacks": {"decoder": decoder}}
    record["strongest"] = {"mse": mse if strongest is None else strongest}
    return name, grouped(name, [[record]])


def test_each_number_holds_or_does_not_with_all_four_figures() -> None:
    groups = dict([row("cem", 0.02, accuracy=0.86), row("gated", 0.03, accuracy=0.87)])
    (line,) = pair_lines(groups, REPORTED, "cem", "sparse")
    assert line == (
        "`gated` against `cem` under `decoder`, the reported attack – "
        "MSE holds: higher, 0.0300 against 0.0200 (reported higher, 0.0500 against 0.0400); "
        "zero-pad SSIM does not hold: equal, 0.5000 against 0.5000 "
        "(reported lower, 0.4100 against 0.4300); "
        "pooled PSNR holds: lower, 17.00 against 18.00 (reported lower, 13.20 against 13.60); "
        "accuracy on reconstructions does not hold: equal, 30.00 against 30.00 "
        "(reported higher, 25.00 against 24.00); "
        "task accuracy does not hold: higher, 87.00 against 86.00 "
        "(reported lower, 84.00 against 85.00). "
        "Under the strongest attack MSE holds: higher, 0.0300 against 0.0200."
    )


def test_the_strongest_attack_may_say_otherwise() -> None:
    groups = dict([row("cem", 0.02, strongest=0.019), row("gated", 0.03, strongest=0.01)])
    (line,) = pair_lines(groups, REPORTED, "cem", "sparse")
    assert "– MSE holds: higher" in line
    assert line.endswith("attack MSE does not hold: lower, 0.0100 against 0.0190.")


def test_a_pair_with_the_layer_is_compared_with_the_same_figures() -> None:
    groups = dict([row("sparse+cem", 0.03), row("sparse+gated", 0.02)])
    (line,) = pair_lines(groups, REPORTED, "cem", "sparse")
    assert line.startswith("`sparse+gated` against `sparse+cem`")
    assert "MSE does not hold: lower, 0.0200 against 0.0300 (reported higher" in line


@pytest.mark.parametrize(
    ("gated", "words"),
    [
        (0.03, "`cem`, `gated` agrees with the reported `cem`, `gated`."),
        (0.01, "`gated`, `cem` differs from the reported `cem`, `gated`."),
    ],
)
def test_the_order_is_that_of_the_reported_rows(gated: float, words: str) -> None:
    groups = dict([row("cem", 0.02), row("gated", gated), row("other", 0.001)])
    said = [f"Order by MSE of `decoder`, lowest first: {words}"]
    assert order_line(groups, REPORTED, "sparse") == said


def test_what_the_layer_changes() -> None:
    layered = row("sparse+cem", 0.03, strongest=0.025, accuracy=0.88)
    groups = dict([row("cem", 0.02, accuracy=0.9), layered, row("gated", 1.0)])
    assert layer_lines(groups, "sparse") == [
        "`sparse` with `cem`: strongest attack's MSE 0.0200 → 0.0250 (+0.0050); "
        "task accuracy 90.00 → 88.00 (-2.00)."
    ]


def test_between_what_numbers_the_rows_lie_with_the_layer_and_without() -> None:
    rows = [("cem", 0.02, 0.9), ("gated", 0.01, 0.85), ("sparse+cem", 0.03, 0.8),
            ("sparse+gated", 0.03, 0.82), ("alone", 1.0, 0.1)]  # fmt: skip
    known = dict(row(name, 9.9, strongest=mse, accuracy=right) for name, mse, right in rows)
    ceiling = {"ceiling": {"mse": 0.04}}
    groups = {
        name: grouped(name, [[group.records[0].to_dict() | ceiling]])
        for name, group in known.items()
    }
    assert span_lines(groups, "sparse") == [
        "Without `sparse` the strongest attack on 2 rows leaves MSE 0.0100–0.0200 (25–50 % of the "
        "ceiling) at a task accuracy of 85.00–90.00 %.",
        "With `sparse` the strongest attack on 2 rows leaves MSE 0.0300 (75 % of the ceiling) at a "
        "task accuracy of 80.00–82.00 %.",
    ]
    del groups["sparse+cem"]
    assert span_lines(groups, "sparse") == []


def test_another_kind_of_the_layer_is_compared_too() -> None:
    rows = [
        row("cem", 0.02),
        row("gated", 0.01),
        row("sparse+cem-x", 0.03),
        row("sparse+gated-x", 0.04),
    ]
    lines = claim_lines([group for _, group in rows], {}, "cem", "sparse", ("", "-x"))
    assert lines[0].startswith("`sparse-x` with `cem`: strongest attack's MSE 0.0200 → 0.0300")
    assert lines[2].startswith("Without `sparse` the strongest attack on 2 rows")
    assert lines[3].startswith("With `sparse-x` the strongest attack on 2 rows leaves MSE 0.0300–")
    assert len(lines) == 4
    both = [*rows, row("sparse+cem", 0.05), row("sparse+gated", 0.06)]
    lines = claim_lines([group for _, group in both], {}, "cem", "sparse", ("", "-x"))
    assert sum(line.startswith("Without") for line in lines) == 1


def test_nothing_is_said_of_what_was_not_measured() -> None:
    alone = [row("gated", 0.03)[1], row("other", 0.01)[1]]
    assert claim_lines(alone, REPORTED, "cem", "sparse") == []
    name, _ = row("gated", 0.03)
    bare = grouped(name, [[{"accuracy": 0.9, "attacks": {}, "strongest": {}}]])
    (line,) = claim_lines([bare, row("cem", 0.02)[1]], REPORTED, "cem", "sparse")
    assert "MSE" not in line
    assert "task accuracy does not hold: equal" in line


def fitted(name: str, own: float | None, *flags: str) -> Group:
    _, group = row(name, 0.045)
    record = group.records[0].to_dict()
    attack = record["attacks"]["decoder"] | ({} if own is None else {"aux_mse": own})
    flagged = {"attacks": {"decoder": attack}, "flags": [{"name": flag} for flag in flags]}
    return grouped(name, [[record | flagged]])


def test_rows_whose_attack_fitted_its_own_images_alone_are_named() -> None:
    close = fitted("close", 0.013, "attacks left out", "attack overfitted")
    others = [fitted("calm", 0.044, "attacks left out"), fitted("old", None, "attack overfitted")]
    (line,) = own_images_line([close, *others])
    assert line.startswith("`decoder` fits the images it was given better than new ones, MSE: ")
    assert "`close` 0.0130 and 0.0450. An attacker" in line
    assert own_images_line(others) == []
    assert own_images_line([row("bare", 0.02)[1]]) == []
    assert line in claim_lines([close], {}, "cem", "sparse")
