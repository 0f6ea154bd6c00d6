"""Exposure by hand, its intervals, its bands, what the bit tells, and what linear heads answer."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from audits.made import SHAPE, a_target, labelled
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from splitveil.attacks.baseline import Nearest
from splitveil.audits.exposure import (
    at_shares,
    bands_of,
    bit_leaks,
    exit_leaks,
    exposure,
    intervals,
    leakage_of,
    mutual_bits,
    probe,
    probe_answers,
    server_need,
    unsure_aux,
    weighted_exposure,
    what_is_exposed,
)
from splitveil.audits.flags import exit_tells, exit_tells_members, server_not_needed
from splitveil.audits.suite import label_only_mse, run_attacks
from splitveil.audits.target import Attempt, DeviceAnswers, Target
from splitveil.io import Json
from splitveil.report.words import translated
from splitveil.threat import Labelled


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_exposure_by_hand() -> None:
    asked = torch.tensor([True, True, False, False])
    error, ceiling = numbers(0.1, 0.1, 9, 9), numbers(0.3, 0.5, 0.1, 0.1)
    unsent = numbers(9, 9, 0.05, 0.15)
    found = exposure(asked, error, ceiling, unsent)
    # s = .5, w = .8 / 1.0, leakage of the sent 1 − .2/.8 = .75, of the bit 1 − .2/.2 = 0
    assert found == {
        "sent": 0.5,
        "leakage_sent": pytest.approx(0.75),
        "exposure": pytest.approx(0.6),
    }


def test_what_the_bit_alone_gives_away_counts_for_the_unsent() -> None:
    asked = torch.tensor([True, False])
    found = exposure(asked, numbers(1, 0), numbers(1, 1), numbers(0, 0.5))
    assert found["leakage_sent"] == 0
    assert found["exposure"] == pytest.approx(0.5 * 0.5)


def test_the_band_that_leaks_most_counts() -> None:
    asked = torch.tensor([True, False])
    bands = {"low": (numbers(0.1, 1), numbers(1, 1)), "detail": (numbers(2, 1), numbers(1, 1))}
    found = exposure(asked, numbers(0.5, 1), numbers(1, 1), numbers(1, 1), bands)
    assert found["leakage_sent"] == pytest.approx(0.9)


def test_a_rule_that_sends_what_the_label_knows_anyway_does_not_lower_exposure() -> None:
    near = torch.tensor([True] * 3 + [False] * 7)
    ceiling = numbers(*[0.01] * 3, *[0.1] * 7)
    found = exposure(near, 0.2 * ceiling, ceiling, ceiling)
    assert found["exposure"] == pytest.approx(0.3 * 0.8)


@given(st.integers(0, 2**30))
def test_nothing_sent_exposes_nothing_and_everything_its_leakage(seed: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    error, ceiling = torch.rand(2, 30, generator=draws, dtype=torch.float64).unbind(0)
    every = torch.ones(30, dtype=torch.bool)
    whole = exposure(every, error, ceiling, ceiling)
    assert whole["leakage_sent"] == pytest.approx(leakage_of(error, ceiling))
    assert whole["exposure"] == pytest.approx(max(0.0, leakage_of(error, ceiling)))
    none = exposure(~every, error, ceiling, ceiling)
    assert none == {"sent": 0.0, "leakage_sent": None, "exposure": 0.0}


def test_the_interval_covers_its_estimate_and_shrinks_with_images() -> None:
    draws = torch.Generator().manual_seed(0)

    def width(n: int) -> float:
        error, ceiling = torch.rand(2, n, generator=draws, dtype=torch.float64).unbind(0)
        asked = torch.rand(n, generator=draws) < 0.3
        low, high = intervals(asked, 0.3 * error, ceiling, ceiling, {}, seed=0)["exposure"]
        assert low <= float(exposure(asked, 0.3 * error, ceiling, ceiling)["exposure"] or 0) <= high
        return high - low

    assert width(4000) < 0.3 * width(100)


def test_weights_are_how_often_an_image_counts() -> None:
    draws = torch.Generator().manual_seed(3)
    error, ceiling, unsent = torch.rand(3, 20, generator=draws, dtype=torch.float64).unbind(0)
    asked = torch.rand(20, generator=draws) < 0.4
    bands = {"low": (ceiling * unsent, ceiling)}
    rows = torch.randint(20, (20,), generator=draws)
    plain = exposure(
        asked[rows], error[rows], ceiling[rows], unsent[rows],
        {"low": ((ceiling * unsent)[rows], ceiling[rows])},
    )  # fmt: skip
    counts = rows.bincount(minlength=20).double().numpy()[None]
    weighted = weighted_exposure(counts, asked, error, ceiling, unsent, bands=bands)
    assert {k: v[0] for k, v in weighted.items()} == pytest.approx(plain)


@pytest.mark.parametrize("side", [8, 28, 32])
def test_bands_add_up_and_do_not_overlap(side: int) -> None:
    images = torch.rand(5, 3, side, side, generator=torch.Generator().manual_seed(0))
    low, detail = bands_of(images)
    torch.testing.assert_close(low + detail, images)
    assert abs(float((low * detail).sum())) < 1e-3
    again, none = bands_of(low)
    torch.testing.assert_close(again, low)
    torch.testing.assert_close(none, torch.zeros_like(low), atol=1e-6, rtol=0)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), min_size=1, max_size=40))
def test_mutual_information_is_that_of_the_entropies(pairs: list[tuple[bool, int]]) -> None:
    b, v = np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])

    def entropy(values: list[object]) -> float:
        shares = np.array([values.count(one) for one in set(values)]) / len(values)
        return float(-(shares * np.log2(shares)).sum())

    expected = entropy(list(b)) + entropy(list(v)) - entropy(list(zip(b, v, strict=True)))
    kinds = [k for k in range(4) if k in v]
    sent, every = (np.array([int(x[v == k].sum()) for k in kinds]) for x in (b, b | ~b))
    assert float(mutual_bits(sent, every)) == pytest.approx(expected, abs=1e-9)


def test_the_p_value_is_that_of_permuting_the_bits() -> None:
    rng = np.random.default_rng(0)
    v = rng.integers(0, 3, 60)
    b = rng.random(60) < np.array([0.3, 0.45, 0.6])[v]
    found = bit_leaks(torch.from_numpy(b), {"v": torch.from_numpy(v)}, seed=1)["v"]
    every = np.bincount(v)
    permuted = [np.bincount(v[rng.permutation(b)], minlength=3) for _ in range(4000)]
    chance = np.mean([float(mutual_bits(one, every)) >= found["bits"] - 1e-12 for one in permuted])
    assert found["p"] == pytest.approx(chance, abs=0.05)


def test_a_rule_by_class_is_seen_and_a_random_one_rarely() -> None:
    labels = torch.arange(600) % 10
    planted = bit_leaks(labels < 3, {"label": labels}, seed=0)["label"]
    assert planted["p"] < 0.01
    assert planted["bits"] == pytest.approx(0.8813, abs=1e-3)  # all of H(.3)
    assert planted["share_sent"]["0"] == 1
    draws = torch.Generator().manual_seed(0)
    own = torch.where(torch.rand(600, generator=draws) < 0.9, labels, labels.flip(0))
    known = {"label": labels, "own answer": own, "brightness": torch.arange(600) % 3}
    raised = 0
    for s in range(100):
        found = bit_leaks(torch.rand(600, generator=draws) < 0.3, known, seed=s)
        raised += exit_tells(found) is not None
    assert raised <= 5


def exiting(
    asks: Callable[[Tensor], Tensor], *, members: Labelled, others: Labelled
) -> tuple[Target, Json]:
    """A target whose device sends what `asks` says, and what the bit tells of its images."""
    target = a_target(scored=others)
    device = DeviceAnswers(asked=asks(others.images), aux_asked=asks(target.aux.images), asks=asks)
    target = replace(target, exit=device, members=members, outsiders=others)
    return target, exit_leaks(target)


def test_a_device_that_is_surer_of_what_it_was_trained_on_tells_the_members() -> None:
    members, others = labelled(300, 5), labelled(300, 6)
    trained = {image.numpy().tobytes() for image in members.images[:200]}

    def asks(images: Tensor) -> Tensor:
        return torch.tensor([one.numpy().tobytes() not in trained for one in images])

    _, told = exiting(asks, members=members, others=others)
    assert told["membership"]["share_sent"] == pytest.approx({"0": 1.0, "1": 1 / 3})
    assert told["membership"]["p"] < 0.01
    seen = exit_tells_members(told)
    assert seen is not None
    assert translated(seen, "zh").startswith("一张图像是否被发送，透露了它是否为训练图像的")
    _, blind = exiting(lambda x: x.mean((1, 2, 3)) < 0.5, members=members, others=others)
    assert exit_tells_members(blind) is None


def test_the_bit_is_set_against_simple_attributes_where_no_table_names_any() -> None:
    images = labelled(300, 6)
    dark, told = exiting(lambda x: x.mean((1, 2, 3)) < 0.5, members=images, others=images)
    assert exit_tells(told) is not None
    assert {"label", "brightness", "side", "edges", "membership"} == set(told)
    assert told["brightness"]["bits"] > 0.5
    assert unsure_aux(dark).aux.images.mean((1, 2, 3)).max() < 0.5


def test_a_linear_head_finds_a_linear_rule() -> None:
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(400, 5, generator=draws)
    rule = torch.randn(3, 5, generator=draws)
    labels = (x @ rule.T).argmax(1)
    answers = probe(x[:300], labels[:300], x[300:], 3)
    assert float((answers == labels[300:]).double().mean()) > 0.9


def test_what_a_server_adds_is_told_with_its_limits() -> None:
    target = a_target()
    truth = target.scored.labels
    told = server_need(target, {"sent": truth, "clean": 1 - truth.clamp(max=1)})
    assert told["sent"]["accuracy"] == 1
    adds = told["server_adds"]
    served = float((target.sent.answer == truth).double().mean())
    assert adds["gain"] == pytest.approx(served - 1)
    assert adds["low"] <= adds["gain"] <= adds["high"]
    assert set(probe_answers(target)) == {"sent", "clean"}


def test_without_a_rule_the_exposure_is_the_leakage() -> None:
    target = a_target(noise_std=0.01)
    attempt = run_attacks(target, {"nearest": Nearest(min_aux=1)})["nearest"]
    told = what_is_exposed(target, attempt)
    assert told["sent"] == 1
    assert told["exposure"] == told["leakage_sent"]
    ceiling = label_only_mse(target.aux, target.scored, target.num_classes)
    assert told["exposure"] == pytest.approx(1 - float(attempt.mse.mean()) / ceiling, rel=1e-5)
    assert 0 <= told["identified"] <= 1


def prototypes(n: int, seed: int, *, crossed: bool) -> Labelled:
    """Bright or dark left and right halves; the class is the left half, or whether they differ."""
    draws = torch.Generator().manual_seed(seed)
    halves = torch.randint(2, (n, 2), generator=draws)
    images = 0.02 * torch.rand(n, *SHAPE, generator=draws)
    images[:, :, :, :4] += 0.8 * halves[:, 0, None, None, None]
    images[:, :, :, 4:] += 0.8 * halves[:, 1, None, None, None]
    return Labelled(images, (halves[:, 0] ^ halves[:, 1]) if crossed else halves[:, 0])


class Halves(nn.Module):
    """A server that answers whether the left half is bright, or whether the halves differ."""

    def __init__(self, *, crossed: bool) -> None:
        super().__init__()
        self.crossed = crossed

    def forward(self, z: Tensor) -> Tensor:
        left, right = (side.flatten(1).mean(1) > 0.4 for side in torch.split(z, 4, 3))
        said = (left ^ right) if self.crossed else left
        return torch.nn.functional.one_hot(said.long(), 4).float()


@pytest.mark.parametrize("needed", [False, True])
def test_a_linear_head_as_a_server_is_flagged_and_a_necessary_server_is_not(needed: bool) -> None:
    target = a_target(
        aux=prototypes(400, 0, crossed=needed), scored=prototypes(1000, 1, crossed=needed),
        head=Halves(crossed=needed),
    )  # fmt: skip
    found = server_need(target, probe_answers(target))
    assert float((target.sent.answer == target.scored.labels).double().mean()) == 1
    assert (server_not_needed(found) is None) == needed


def surer_of_the_first(asked: float) -> tuple[Target, Attempt]:
    """A target whose device is sure of the first images, and an attempt on all of them."""
    target = a_target(scored=labelled(40, 1))
    sure = torch.linspace(1, 0, 40).double()
    known = torch.linspace(1, 0, 30).double()
    device = DeviceAnswers(
        asked=sure < asked, aux_asked=known < asked, asks=lambda x: torch.ones(len(x)) > 0,
        aux_sure=known, sure=sure,
        own=torch.arange(40) % 2,
    )  # fmt: skip
    target = replace(target, exit=device)
    return target, run_attacks(target, {"nearest": Nearest(min_aux=1)})["nearest"]


def test_other_shares_agree_with_the_rule_at_its_own_threshold() -> None:
    target, attempt = surer_of_the_first(0.3)
    shares = {share["sent"]: share for share in at_shares(target, attempt)}
    told = what_is_exposed(target, attempt)
    assert told["sent"] == 0.3
    assert shares[0.3]["exposure"] == pytest.approx(told["exposure"])
    assert shares[0.3]["leakage_sent"] == pytest.approx(told["leakage_sent"])
    labels, own = target.scored.labels, torch.arange(40) % 2
    assert shares[0.0]["accuracy"] == pytest.approx(float((own == labels).double().mean()))
    assert shares[0.0]["leakage_sent"] is None
    served = float((target.sent.answer == labels).double().mean())
    assert shares[1.0]["accuracy"] == pytest.approx(served)


def test_a_device_that_averages_reports_its_mean_where_it_asks() -> None:
    target, attempt = surer_of_the_first(0.3)
    assert target.exit is not None
    right = target.scored.labels  # device and server together answer everything right
    averaging = replace(target, exit=replace(target.exit, reports=lambda scores: right))
    plain = {share["sent"]: share for share in at_shares(target, attempt)}
    shares = {share["sent"]: share for share in at_shares(averaging, attempt)}
    assert shares[1.0]["accuracy"] == 1.0
    assert shares[0.0]["accuracy"] == plain[0.0]["accuracy"]
    assert [s["exposure"] for s in shares.values()] == [s["exposure"] for s in plain.values()]
    assert at_shares(replace(target, exit=None), attempt) == []
