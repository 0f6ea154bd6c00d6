"""The one place that measures success: its summaries, and what it refuses to believe."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from splitveil.attacks import ClassMean, Linear, MeanImage
from splitveil.audit import (
    Attempt,
    Case,
    accuracy,
    ceiling_mse,
    floor_mse,
    run_attacks,
    strongest,
    worst_case,
)
from splitveil.audit.suite import answer, send
from splitveil.errors import AuditError
from splitveil.rng import stream
from splitveil.types import Access, BlackBox, Labelled, Observation, Reconstruct, silent

MakeCase = Callable[..., Case]
MakeAttempt = Callable[..., Attempt]


@pytest.fixture
def two(make_attempt: MakeAttempt) -> dict[str, Attempt]:
    """`even` is better on average; `lucky` nails the first image and fails on the second."""
    return {
        "even": make_attempt([0.25, 0.25], [6.0, 6.0], [0.5, 0.25], [0.25, 0.25]),
        "lucky": make_attempt([0.0625, 0.5625], [12.0, 2.5], [0.875, -0.25], [0.5, 0.25]),
    }


def test_strongest_names_the_best_mean_of_each_metric(two: dict[str, Attempt]) -> None:
    best = strongest(two)
    assert (best["mse"], best["mse_by"]) == (0.25, "even")
    assert (best["psnr"], best["psnr_by"]) == (7.25, "lucky")
    assert best["psnr_pooled"] == pytest.approx(10 * math.log10(4), abs=1e-5)
    assert best["psnr_pooled_by"] == "even"
    assert (best["ssim"], best["ssim_by"]) == (0.375, "even")
    assert (best["ssim_zeropad"], best["ssim_zeropad_by"]) == (0.375, "lucky")
    assert (best["ssim_valid"], best["ssim_valid_by"]) == (None, None)


def test_worst_case_takes_the_best_attack_of_each_image(two: dict[str, Attempt]) -> None:
    worst = worst_case(two)
    assert worst["mse"] == (0.0625 + 0.25) / 2
    assert worst["psnr"] == (12.0 + 6.0) / 2
    assert worst["ssim"] == (0.875 + 0.25) / 2


def test_tails_are_numpys_quantiles_of_the_best_mse(make_attempt: MakeAttempt) -> None:
    errors = np.random.default_rng(0).random((2, 301))
    worst = worst_case({str(i): make_attempt(e.tolist()) for i, e in enumerate(errors)})
    q01, q05 = np.quantile(errors.min(0), [0.01, 0.05])
    assert worst["mse_q01"] == pytest.approx(q01, rel=1e-5)
    assert worst["mse_q05"] == pytest.approx(q05, rel=1e-5)


def test_one_attack_is_its_own_strongest_and_worst_case(two: dict[str, Attempt]) -> None:
    alone = {"even": two["even"]}
    assert strongest(alone)["mse"] == worst_case(alone)["mse"] == 0.25
    assert strongest(alone)["ssim"] == worst_case(alone)["ssim"] == 0.375


def test_images_without_an_ssim_have_none_anywhere(make_attempt: MakeAttempt) -> None:
    alone = {"a": make_attempt([0.5])}
    assert strongest(alone)["ssim"] is None
    assert worst_case(alone)["ssim"] is None


def test_pooled_psnr_is_of_the_mean_error_not_the_mean_of_decibels(
    make_attempt: MakeAttempt,
) -> None:
    scores = make_attempt([0.1, 0.001], [10.0, 30.0]).scores()
    assert scores.psnr == pytest.approx(20.0)
    assert scores.psnr_pooled == pytest.approx(-10 * math.log10(0.0505), abs=1e-4)


def test_a_perfect_copy_pools_to_100_decibels(make_attempt: MakeAttempt) -> None:
    assert make_attempt([0.0, 0.0]).scores().psnr_pooled == 100.0


def attempts_of(rows: list[list[tuple[float, float]]], make: MakeAttempt) -> dict[str, Attempt]:
    return {
        str(i): make([m for m, _ in row], None, [s for _, s in row]) for i, row in enumerate(rows)
    }


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


@settings(deadline=None)
@given(rows=SCORED)
def test_the_oracle_is_never_weaker_than_any_attack(
    rows: list[list[tuple[float, float]]],
) -> None:
    attempts = attempts_of(rows, plain_attempt)
    assert worst_case(attempts)["mse"] <= strongest(attempts)["mse"]
    assert worst_case(attempts)["ssim"] >= strongest(attempts)["ssim"]
    assert worst_case(attempts)["mse_q01"] <= worst_case(attempts)["mse_q05"]


@settings(deadline=None)
@given(rows=SCORED)
def test_another_attack_never_makes_the_attacker_weaker(
    rows: list[list[tuple[float, float]]],
) -> None:
    more = attempts_of(rows, plain_attempt)
    fewer = attempts_of(rows[:-1], plain_attempt)
    assert strongest(more)["mse"] <= strongest(fewer)["mse"]
    assert strongest(more)["ssim"] >= strongest(fewer)["ssim"]
    assert worst_case(more)["mse"] <= worst_case(fewer)["mse"]
    assert worst_case(more)["ssim"] >= worst_case(fewer)["ssim"]


def plain_attempt(mse: list[float], psnr: None, ssim: list[float]) -> Attempt:
    del psnr
    n = len(mse)
    return Attempt(
        guess=torch.zeros(n, 1, 1, 1),
        mse=torch.tensor(mse),
        psnr=torch.zeros(n),
        ssim=torch.tensor(ssim),
        ssim_zeropad=torch.zeros(n),
        ssim_valid=None,
        access="black-box",
        seconds=0.0,
    )


def test_the_ceiling_is_the_class_mean_of_the_true_label(make_case: MakeCase) -> None:
    case = make_case()
    x, y = case.aux.images.double().numpy(), case.aux.labels.numpy()
    means = np.stack([x[y == c].mean(0) for c in range(3)])
    scored = case.scored.images.double().numpy()
    expected = ((scored - means[case.scored.labels.numpy()]) ** 2).mean()
    assert ceiling_mse(case) == pytest.approx(expected, rel=1e-5)


def test_the_ceiling_does_not_ask_the_server(make_case: MakeCase) -> None:
    case = make_case()
    wrong = Labelled(case.scored.images, (case.scored.labels + 1) % 3)
    assert ceiling_mse(case) != ceiling_mse(make_case(scored=wrong))


def test_the_floor_is_the_mean_image(make_case: MakeCase) -> None:
    case = make_case()
    mean = case.aux.images.double().numpy().mean(0)
    expected = ((case.scored.images.double().numpy() - mean) ** 2).mean()
    assert floor_mse(case) == pytest.approx(expected, rel=1e-5)


def test_accuracy_is_through_the_channel_and_averaged_over_draws(make_case: MakeCase) -> None:
    case = make_case(noise_std=2.0)
    shares = []
    for i in range(5):
        z = case.victim.send(case.scored.images, stream(7, f"accuracy/{i}"))
        shares.append(float((case.head(z).argmax(1) == case.scored.labels).double().mean()))
    assert len(set(shares)) > 1
    assert accuracy(case, seed=7, draws=5) == pytest.approx(np.mean(shares))


def test_a_perfect_server_has_accuracy_one(make_case: MakeCase) -> None:
    case = make_case(noise_std=0.0)
    right = Labelled(case.scored.images, answer(case.head, case.scored.images))
    assert accuracy(make_case(noise_std=0.0, scored=right), seed=0, draws=2) == 1.0


def test_sending_in_parts_draws_from_one_stream(make_case: MakeCase) -> None:
    case = make_case()
    many = torch.rand(1003, 1, 8, 8, generator=stream(0, "images"))
    generator = stream(3, "wire")
    parts = [case.victim.send(x, generator) for x in (many[:1000], many[1000:])]
    assert torch.equal(send(case.victim, many, 3, "wire"), torch.cat(parts))


@dataclass(frozen=True)
class Spy:
    """Writes down everything it is given."""

    access: Access = Access.BLACK_BOX
    boxes: list[BlackBox] = field(default_factory=list)
    auxes: list[Labelled] = field(default_factory=list)
    seen: list[Observation] = field(default_factory=list)
    drawn: list[Tensor] = field(default_factory=list)

    def fit(self, victim: BlackBox, aux: Labelled, generator: torch.Generator) -> Reconstruct:
        self.boxes.append(victim)
        self.auxes.append(aux)
        self.drawn.append(torch.rand(4, generator=generator))

        def reconstruct(seen: Observation) -> Tensor:
            self.seen.append(seen)
            return torch.full((len(seen.answer), 1, 8, 8), 0.5)

        return reconstruct


def tensors_in(value: object) -> list[Tensor]:
    """Every tensor that attributes of a record lead to."""
    if isinstance(value, Tensor):
        return [value]
    names = [f.name for f in fields(value)] if hasattr(value, "__dataclass_fields__") else []  # type: ignore[arg-type]
    return [t for name in names for t in tensors_in(getattr(value, name))]


def test_an_attack_sees_the_wire_and_the_answer_but_not_the_images(make_case: MakeCase) -> None:
    case, spy = make_case(), Spy()
    run_attacks(case, {"spy": spy}, 5, silent)
    given = [spy.boxes[0], spy.auxes[0], spy.seen[0]]
    x = case.scored.images
    for tensor in [t for record in given for t in tensors_in(record)]:
        assert tensor.data_ptr() != x.data_ptr()
        assert not (tensor.shape == x.shape and torch.equal(tensor, x))
    assert type(spy.boxes[0]) is BlackBox
    assert spy.auxes[0] is case.aux
    wire = case.victim.send(x, stream(5, "wire"))
    assert torch.equal(spy.seen[0].z, wire)
    assert torch.equal(spy.seen[0].answer, case.head(wire).argmax(1))


def test_every_attack_meets_the_same_draw_and_has_a_stream_of_its_own(make_case: MakeCase) -> None:
    case, one, other = make_case(), Spy(), Spy()
    run_attacks(case, {"one": one, "other": other}, 5, silent)
    assert torch.equal(one.seen[0].z, other.seen[0].z)
    assert not torch.equal(one.drawn[0], other.drawn[0])
    alone = Spy()
    run_attacks(case, {"other": alone}, 5, silent)
    assert torch.equal(alone.drawn[0], other.drawn[0])
    reseeded = Spy()
    run_attacks(case, {"other": reseeded}, 6, silent)
    assert not torch.equal(reseeded.drawn[0], other.drawn[0])
    assert not torch.equal(reseeded.seen[0].z, other.seen[0].z)


def test_the_suite_scores_what_the_attack_returned(make_case: MakeCase) -> None:
    case = make_case()
    attempt = run_attacks(case, {"spy": Spy()}, 0, silent)["spy"]
    expected = (case.scored.images - 0.5).square().flatten(1).mean(1)
    torch.testing.assert_close(attempt.mse, expected)
    assert attempt.access == "black-box"
    assert bool((attempt.guess == 0.5).all())
    assert attempt.ssim_valid is None


def test_progress_is_told_of_every_attack(make_case: MakeCase) -> None:
    said: list[tuple[int, int, str]] = []

    def listen(done: int, total: int, note: str = "") -> None:
        said.append((done, total, note))

    run_attacks(make_case(), {"a": MeanImage(), "b": ClassMean()}, 0, listen)
    assert said == [(0, 2, "attack a"), (1, 2, "attack b"), (2, 2, "attacks done")]


@dataclass(frozen=True)
class Returns:
    """Returns what it is told to, whatever it was asked."""

    images: Tensor
    access: Access = Access.NONE

    def fit(self, victim: BlackBox, aux: Labelled, generator: torch.Generator) -> Reconstruct:
        del victim, aux, generator
        return lambda seen: self.images


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(11, 1, 8, 8), r"returned images of shape \(11, 1, 8, 8\), expected \(12, 1"),
        (torch.zeros(12, 1, 8, 7), r"shape \(12, 1, 8, 7\)"),
        (torch.zeros(1, 1, 8, 8), r"shape \(1, 1, 8, 8\)"),
        (torch.full((12, 1, 8, 8), 1.5), "from 1.5 to 1.5"),
        (torch.full((12, 1, 8, 8), -0.5), "from -0.5 to -0.5"),
        (torch.full((12, 1, 8, 8), math.nan), "from nan to nan"),
        (torch.zeros((12, 1, 8, 8), dtype=torch.uint8), r"torch\.uint8"),
    ],
)
def test_a_reconstruction_that_is_no_image_is_refused_by_name(
    images: Tensor, message: str, make_case: MakeCase
) -> None:
    with pytest.raises(AuditError, match=f"attack 'forger'.*{message}"):
        run_attacks(make_case(), {"forger": Returns(images)}, 0, silent)


class NanWhenBright(nn.Module):
    """Sends NaN for images whose first pixel is above a threshold."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, x: Tensor) -> Tensor:
        bright = x[:, :1, :1, :1] > self.threshold
        return torch.where(bright, torch.nan, x)


def test_a_victim_that_sends_nan_is_refused_with_a_count(make_case: MakeCase) -> None:
    images = torch.full((12, 1, 8, 8), 0.25)
    images[:3] = 0.75
    scored = Labelled(images, torch.zeros(12, dtype=torch.long))
    case = make_case(encoder=NanWhenBright(0.5), scored=scored)
    with pytest.raises(AuditError, match="not finite for 3 of 12 images"):
        run_attacks(case, {"mean": MeanImage()}, 0, silent)


def test_a_victim_that_sends_nan_for_aux_alone_is_refused_too(make_case: MakeCase) -> None:
    dark = Labelled(torch.full((12, 1, 8, 8), 0.25), torch.zeros(12, dtype=torch.long))
    case = make_case(encoder=NanWhenBright(0.5), scored=dark)
    assert bool((case.aux.images[:, 0, 0, 0] > 0.5).any())
    with pytest.raises(AuditError, match=r"attack 'linear'.*nan"):
        run_attacks(case, {"linear": Linear()}, 0, silent)


def test_an_audit_without_attacks_or_images_is_refused(make_case: MakeCase) -> None:
    with pytest.raises(AuditError, match="at least one attack, got none"):
        run_attacks(make_case(), {}, 0, silent)
    nothing = Labelled(torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.long))
    with pytest.raises(AuditError, match="no images to score"):
        run_attacks(make_case(scored=nothing), {"mean": MeanImage()}, 0, silent)


def test_scored_images_outside_the_range_are_refused(make_case: MakeCase) -> None:
    bright = Labelled(torch.full((3, 1, 8, 8), 200.0), torch.zeros(3, dtype=torch.long))
    with pytest.raises(AuditError, match=r"must lie in \[0, 1\], got values from 200 to 200"):
        run_attacks(make_case(scored=bright), {"mean": MeanImage()}, 0, silent)
