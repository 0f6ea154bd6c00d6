"""The headline, the oracle's bound, and the two errors they are measured by."""

import base64
import math

import numpy as np
import pytest
import torch
from audits.made import Counting, Returns, a_target, an_attempt
from hypothesis import given, settings
from hypothesis import strategies as st

from splitveil.attacks.baseline import MeanImage
from splitveil.attacks.linear import Linear
from splitveil.audits.suite import (
    by_attack,
    label_only_mse,
    mean_image_mse,
    per_image,
    run_attacks,
    strongest,
    strongest_blackbox,
    worst_case,
)
from splitveil.audits.target import Attempt
from splitveil.threat import Access, Attack, Labelled

# `even` is better on average; `lucky` nails the first image and fails on the second.
EVEN = an_attempt([0.25, 0.25], [6.0, 6.0], [0.5, 0.25], [0.25, 0.25])
LUCKY = an_attempt([0.0625, 0.5625], [12.0, 2.5], [0.875, -0.25], [0.5, 0.25])
TWO = {"even": EVEN, "lucky": LUCKY}


def test_strongest_names_the_best_mean_of_each_metric() -> None:
    best = strongest(TWO)
    assert (best["mse"], best["mse_by"]) == (0.25, "even")
    assert (best["psnr"], best["psnr_by"]) == (7.25, "lucky")
    assert best["psnr_pooled"] == pytest.approx(10 * math.log10(4), abs=1e-5)
    assert best["psnr_pooled_by"] == "even"
    assert (best["ssim"], best["ssim_by"]) == (0.375, "even")
    assert (best["ssim_zeropad"], best["ssim_zeropad_by"]) == (0.375, "lucky")
    assert (best["ssim_valid"], best["ssim_valid_by"]) == (None, None)


def test_per_image_values_are_the_strongest_attacks() -> None:
    packed = per_image({"even": LUCKY, "lucky": EVEN})
    assert packed["attack"] == "lucky"
    values = np.frombuffer(base64.b64decode(packed["mse"]), dtype="<f2")
    assert values.tolist() == [0.25, 0.25]
    third = an_attempt([1 / 3, 1e-4], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0])
    values = np.frombuffer(base64.b64decode(per_image({"a": third})["mse"]), dtype="<f2")
    assert values.astype(float) == pytest.approx([1 / 3, 1e-4], rel=5e-4)


def test_worst_case_takes_the_best_attack_of_each_image() -> None:
    worst = worst_case(TWO)
    assert worst["mse"] == (0.0625 + 0.25) / 2
    assert worst["psnr"] == (12.0 + 6.0) / 2
    assert worst["ssim"] == (0.875 + 0.25) / 2


def test_tails_are_numpys_quantiles_of_the_best_mse() -> None:
    errors = np.random.default_rng(0).random((2, 301))
    worst = worst_case({str(i): an_attempt(e.tolist()) for i, e in enumerate(errors)})
    q01, q05 = np.quantile(errors.min(0), [0.01, 0.05])
    assert worst["mse_q01"] == pytest.approx(q01, rel=1e-5)
    assert worst["mse_q05"] == pytest.approx(q05, rel=1e-5)


def test_one_attack_is_its_own_strongest_and_worst_case() -> None:
    alone = {"even": EVEN}
    assert strongest(alone)["mse"] == worst_case(alone)["mse"] == 0.25
    assert strongest(alone)["ssim"] == worst_case(alone)["ssim"] == 0.375


def test_images_without_an_ssim_have_none_anywhere() -> None:
    alone = {"a": an_attempt([0.5])}
    assert strongest(alone)["ssim"] is None
    assert worst_case(alone)["ssim"] is None


SUBSET = an_attempt([0.0], [99.0], [1.0], [1.0], rows=[1], scored=2, access="white-box")
K_QUERY = an_attempt([0.0, 0.0], [99.0] * 2, [1.0] * 2, [1.0] * 2, repeats=4, access="repeats")


@pytest.mark.parametrize("apart", [SUBSET, K_QUERY], ids=["subset", "k-query"])
def test_a_subset_or_several_draws_stand_apart(apart: Attempt) -> None:
    more = {**TWO, "apart": apart}
    assert strongest(more) == strongest(TWO)
    assert strongest_blackbox(more) == strongest(TWO)
    assert worst_case(more) == worst_case(TWO)
    assert by_attack(more)["apart"]["mse"] == 0.0


@pytest.mark.parametrize("apart", [SUBSET, K_QUERY], ids=["subset", "k-query"])
def test_without_an_attack_to_rank_there_is_no_headline(apart: Attempt) -> None:
    alone = {"apart": apart}
    assert set(strongest(alone).values()) == {None}
    assert worst_case(alone).keys() == worst_case(TWO).keys()
    assert set(worst_case(alone).values()) == {None}
    assert "beside" not in by_attack(alone)["apart"]


def test_strongest_blackbox_leaves_white_box_attacks_out() -> None:
    inside = an_attempt([0.125, 0.0], access="white-box")
    more = {**TWO, "inside": inside}
    assert strongest(more)["mse_by"] == "inside"
    assert strongest_blackbox(more) == strongest(TWO)


def test_a_subset_stands_beside_the_best_other_attack_there() -> None:
    best_there = an_attempt([0.9, 0.125], None, [0.1, 0.75])
    inside = an_attempt([0.0, 0.0], access="white-box")
    more = {**TWO, "there": best_there, "inside": inside, "k": K_QUERY, "some": SUBSET}
    said = by_attack(more)
    assert said["some"]["beside"] == {"attack": "there", "mse": 0.125, "ssim": 0.75}
    assert [n for n, s in said.items() if "beside" in s] == ["some"]
    assert list(said) == list(more)


def test_measured_attacks_are_summed_up_by_the_same_rules() -> None:
    case = a_target(noise_std=0.05)
    copy = Returns(case.scored.images, Access.WHITE_BOX)
    some = Counting(access=Access.WHITE_BOX, limit=5)
    chosen: dict[str, Attack] = {"mean": MeanImage(), "linear": Linear(), "copy": copy, "s": some}
    attempts = run_attacks(case, chosen)
    assert (strongest(attempts)["mse"], strongest(attempts)["mse_by"]) == (0.0, "copy")
    best = strongest_blackbox(attempts)["mse_by"]
    assert best in ("mean", "linear")
    rows = attempts["s"].rows
    there = {n: float(attempts[n].mse[rows].mean()) for n in ("mean", "linear")}
    beside = by_attack(attempts)["s"]["beside"]
    assert beside["attack"] == min(there, key=lambda n: there[n])
    assert beside["mse"] == pytest.approx(min(there.values()), rel=1e-6)


Rows = list[list[tuple[float, float]]]
SCORED = st.integers(1, 6).flatmap(
    lambda n: st.lists(
        st.lists(
            st.tuples(st.floats(0, 1, width=32), st.floats(-1, 1, width=32)),
            min_size=n,
            max_size=n,
        ),
        min_size=2,
        max_size=5,
    )
)


def attempts_of(rows: Rows) -> dict[str, Attempt]:
    return {
        str(i): an_attempt([m for m, _ in row], None, [s for _, s in row])
        for i, row in enumerate(rows)
    }


@settings(deadline=None)
@given(rows=SCORED)
def test_the_oracle_is_never_weaker_than_any_attack(rows: Rows) -> None:
    attempts = attempts_of(rows)
    assert worst_case(attempts)["mse"] <= strongest(attempts)["mse"]
    assert worst_case(attempts)["ssim"] >= strongest(attempts)["ssim"]
    assert worst_case(attempts)["mse_q01"] <= worst_case(attempts)["mse_q05"]


@settings(deadline=None)
@given(
    rows=SCORED,
    access=st.sampled_from(list(Access)),
    repeats=st.integers(1, 3),
    cut=st.booleans(),
)
def test_another_attack_never_makes_the_attacker_weaker(
    rows: Rows, access: Access, repeats: int, cut: bool
) -> None:
    fewer = attempts_of(rows[:-1])
    last, n = rows[-1], len(rows[-1])
    kept = range(n - 1) if cut and n > 1 else range(n)
    new = an_attempt(
        [last[i][0] for i in kept],
        None,
        [last[i][1] for i in kept],
        rows=list(kept),
        scored=n,
        access=str(access),
        repeats=repeats,
    )
    more = {**fewer, "new": new}
    for summary in (strongest, strongest_blackbox, worst_case):
        assert summary(more)["mse"] <= summary(fewer)["mse"]
        assert summary(more)["ssim"] >= summary(fewer)["ssim"]


def test_the_ceiling_is_the_class_mean_of_the_true_label() -> None:
    case = a_target()
    x, y = case.aux.images.double().numpy(), case.aux.labels.numpy()
    means = np.stack([x[y == c].mean(0) for c in range(3)])
    scored = case.scored.images.double().numpy()
    expected = ((scored - means[case.scored.labels.numpy()]) ** 2).mean()
    assert label_only_mse(case.aux, case.scored, 4) == pytest.approx(expected, rel=1e-5)


def test_the_ceiling_of_a_class_without_aux_is_the_mean() -> None:
    case = a_target()
    wrong = Labelled(case.scored.images, (case.scored.labels + 1) % 3)
    assert label_only_mse(case.aux, case.scored, 4) != label_only_mse(case.aux, wrong, 4)
    unknown = Labelled(case.scored.images, torch.full_like(case.scored.labels, 3))
    floor = mean_image_mse(case.aux, case.scored)
    assert label_only_mse(case.aux, unknown, 4) == pytest.approx(floor, rel=1e-6)


def test_the_floor_is_the_mean_image() -> None:
    case = a_target()
    mean = case.aux.images.double().numpy().mean(0)
    expected = ((case.scored.images.double().numpy() - mean) ** 2).mean()
    assert mean_image_mse(case.aux, case.scored) == pytest.approx(expected, rel=1e-5)
    measured = run_attacks(case, {"mean": MeanImage()})["mean"].scores().mse
    assert mean_image_mse(case.aux, case.scored) == pytest.approx(measured, rel=1e-6)
