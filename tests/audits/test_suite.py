"""The one place that measures success: what it gives, what it scores, what it refuses."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from audits.made import Returns, Spy, a_target, labelled
from torch import Generator, Tensor

from splitveil.attacks.baseline import ClassMean, MeanImage
from splitveil.attacks.linear import Linear
from splitveil.attacks.profiles import PROFILES
from splitveil.audits.suite import accuracy, run_attacks
from splitveil.audits.target import answer, levels
from splitveil.errors import AuditError
from splitveil.io import Progress, silent
from splitveil.rng import stream
from splitveil.threat import Access, Attack, BlackBox, FittedAttack, Labelled, Observation


def test_accuracy_is_through_the_channel_and_averaged_over_draws() -> None:
    case = a_target(noise_std=2.0, seed=7)
    shares = []
    for i in range(5):
        z = case.victim.send(case.scored.images, stream(7, f"accuracy/{i}"))
        shares.append(float((case.scores(z).argmax(1) == case.scored.labels).double().mean()))
    assert len(set(shares)) > 1
    assert accuracy(case, draws=5) == pytest.approx(np.mean(shares))


def test_a_perfect_server_has_accuracy_one() -> None:
    case = a_target(noise_std=0.0)
    right = Labelled(case.scored.images, answer(case.scores, case.scored.images))
    assert accuracy(replace(case, scored=right), draws=2) == 1.0
    assert accuracy(replace(case, test=right), draws=2) == 1.0
    assert accuracy(replace(case, head=None), draws=2) is None


def test_an_attack_is_given_aux_and_the_wire() -> None:
    case, spy = a_target(), Spy()
    run_attacks(replace(case, seed=5), {"spy": spy})
    assert spy.auxes[0] is case.aux
    assert torch.equal(spy.seen[0].z, replace(case, seed=5).sent.z)


def test_attacks_share_the_draw_and_have_their_own_streams() -> None:
    case, one, other = a_target(), Spy(), Spy()
    run_attacks(replace(case, seed=5), {"one": one, "other": other})
    assert torch.equal(one.seen[0].z, other.seen[0].z)
    assert not torch.equal(one.drawn[0], other.drawn[0])
    alone = Spy()
    run_attacks(replace(case, seed=5), {"other": alone})
    assert torch.equal(alone.drawn[0], other.drawn[0])
    reseeded = Spy()
    run_attacks(replace(case, seed=6), {"other": reseeded})
    assert not torch.equal(reseeded.drawn[0], other.drawn[0])
    assert not torch.equal(reseeded.seen[0].z, other.seen[0].z)


def test_what_was_captured_is_attacked_as_it_is() -> None:
    case, spy = a_target(), Spy()
    captured = case.sent.z + 1
    run_attacks(replace(case, captured=captured), {"spy": spy})
    assert torch.equal(spy.seen[0].z, captured)


def test_the_suite_scores_what_the_attack_returned() -> None:
    case = a_target(noise_std=0.0)
    attempt = run_attacks(case, {"spy": Spy()})["spy"]
    torch.testing.assert_close(attempt.mse, (case.scored.images - 0.5).square().flatten(1).mean(1))
    assert (attempt.access, attempt.repeats, attempt.scored) == ("black-box", 1, 12)
    assert attempt.rows.tolist() == list(range(12))
    assert attempt.images.shape == (12, 1, 8, 8)
    assert bool((attempt.images == 128).all())
    assert attempt.ssim_valid is None  # under 11 pixels
    aux_error = (case.aux.images - 0.5).square().mean()
    assert attempt.aux_mse == pytest.approx(float(aux_error), rel=1e-6)
    # Grey quarters sum up alike, so the server answers 0 for every reconstruction.
    assert attempt.right is not None
    assert torch.equal(attempt.right, case.scored.labels == 0)
    assert attempt.scores().accuracy == pytest.approx(1 / 3)


@pytest.mark.parametrize("limit", [None, 5])
def test_the_images_kept_are_those_of_its_rows(limit: int | None) -> None:
    images = torch.linspace(0, 1, 12).view(12, 1, 1, 1).expand(12, 1, 8, 8)
    scored = Labelled(images, torch.tensor([2, 2, 2, 1, 1, 0, 0, 0, 0, 0, 0, 0]))
    case = a_target(scored=scored, noise_std=0.0)
    attempt = run_attacks(case, {"linear": CopiesZ(limit)})["linear"]
    assert attempt.rows.tolist()[:3] == ([0, 1, 2] if limit is None else [5, 3, 0])
    assert torch.equal(attempt.images, levels(images[attempt.rows]))


@dataclass(frozen=True)
class CopiesZ:
    """Takes what was sent for the image."""

    limit: int | None
    access: Access = Access.BLACK_BOX

    def fit(
        self, victim: BlackBox, aux: Labelled, generator: Generator, progress: Progress = silent
    ) -> FittedAttack:
        del victim, aux, generator, progress
        return FittedAttack(lambda seen: seen.z.clamp(0, 1))


@pytest.mark.parametrize("access", sorted(set(Access) - {Access.BLACK_BOX}))
def test_only_a_black_box_attack_is_scored_on_its_own_images(access: Access) -> None:
    assert run_attacks(a_target(), {"spy": Spy(access)})["spy"].aux_mse is None


def test_an_attack_with_a_limit_is_scored_on_its_subset_alone() -> None:
    case, spy = a_target(), Spy(limit=5)
    attempt = run_attacks(case, {"spy": spy})["spy"]
    assert attempt.right is not None
    assert len(spy.seen[0].z) == len(attempt.mse) == len(attempt.right) == 5
    errors = (case.scored.images - 0.5).square().flatten(1).mean(1)
    torch.testing.assert_close(attempt.mse, errors[attempt.rows])
    assert not attempt.whole
    assert attempt.images.shape == (5, 1, 8, 8)


@dataclass(frozen=True)
class Talks:
    """Tells how far it is, and is heavier than others."""

    said: tuple[tuple[int, int, str], ...]
    effort: float = 1.0
    access: Access = Access.NONE

    def fit(
        self, victim: BlackBox, aux: Labelled, generator: Generator, progress: Progress = silent
    ) -> FittedAttack:
        for done, total, note in self.said:
            progress(done, total, note)
        return FittedAttack(MeanImage().fit(victim, aux, generator))


class Listener:
    def __init__(self) -> None:
        self.said: list[tuple[int, int, str]] = []

    def __call__(self, done: int, total: int, note: str = "") -> None:
        self.said.append((done, total, note))


def test_progress_weighs_attacks_by_their_effort() -> None:
    heard = Listener()
    slow = Talks(((1, 4, "queries"), (4, 4, "")), effort=3.0)
    run_attacks(a_target(), {"slow": slow, "quick": Talks(())}, heard)
    assert heard.said == [
        (0, 4000, "slow"),
        (750, 4000, "slow queries"),
        (3000, 4000, "slow"),
        (3000, 4000, "quick"),
        (4000, 4000, "attacks done"),
    ]


def test_an_attack_that_counts_too_far_does_not_push_the_bar_back() -> None:
    heard = Listener()
    wild = Talks(((7, 4, ""), (1, 0, "")))
    run_attacks(a_target(), {"wild": wild, "tame": Talks(())}, heard)
    assert [done for done, _, _ in heard.said] == [0, 1000, 1000, 1000, 2000]


def test_progress_of_real_attacks_only_rises_to_its_end() -> None:
    heard = Listener()
    cheap = {n: a for n, a in PROFILES["smoke"].items() if n in ("mean", "class-mean", "linear")}
    run_attacks(a_target(), cheap, heard)
    counts = [done for done, _, _ in heard.said]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, heard.said[0][1])
    assert {total for _, total, _ in heard.said} == {counts[-1]}
    notes = [note.split(" ")[0] for _, _, note in heard.said]
    assert set(notes) == {*cheap, "attacks"}


@pytest.mark.parametrize("access", [Access.NONE, Access.BLACK_BOX])
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
    images: Tensor, message: str, access: Access
) -> None:
    with pytest.raises(AuditError, match=f"attack 'forger'.*{message}"):
        run_attacks(a_target(), {"forger": Returns(images, access)})


def test_a_bad_reconstruction_of_aux_images_is_refused() -> None:
    stubborn = Returns(torch.zeros(12, 1, 8, 8), Access.BLACK_BOX)  # there are 30 aux images
    with pytest.raises(AuditError, match=r"'forger'.*\(12, 1, 8, 8\), expected \(30, 1, 8, 8\)"):
        run_attacks(a_target(), {"forger": stubborn})


@dataclass(frozen=True)
class Scribbler:
    """Writes into one of the tensors it is given."""

    into: str
    access: Access = Access.REPEATS
    repeats: int = 2

    def fit(
        self, victim: BlackBox, aux: Labelled, generator: Generator, progress: Progress = silent
    ) -> FittedAttack:
        del victim, generator, progress
        if self.into in ("images", "labels"):
            getattr(aux, self.into)[:1].mul_(0)

        def reconstruct(seen: Observation) -> Tensor:
            if self.into in ("z", "answer", "draws"):
                getattr(seen, self.into).zero_()
            return torch.zeros(len(seen.z), 1, 8, 8)

        return FittedAttack(reconstruct)


@pytest.mark.parametrize("into", ["images", "labels", "z", "answer", "draws"])
def test_an_attack_that_writes_into_its_input_is_refused(into: str) -> None:
    with pytest.raises(AuditError, match="attack 'pen' wrote into the tensors it was given"):
        run_attacks(a_target(), {"pen": Scribbler(into)})
    run_attacks(a_target(), {"pen": Scribbler("nothing")})


def test_too_few_aux_images_are_refused_before_any_attack() -> None:
    spy = Spy()
    attacks: dict[str, Attack] = {
        "spy": spy,
        "linear": Linear(),
        "mean": MeanImage(),
        "greedy": Linear(min_aux=500),
    }
    with pytest.raises(
        AuditError, match=r"has 5 aux images, too few: linear at least 10, greedy at least 500; "
    ):
        run_attacks(a_target(aux=labelled(5, 0)), attacks)
    assert spy.boxes == []
    with pytest.raises(AuditError, match="has 0 aux images, too few: spy at least 1"):
        run_attacks(a_target(aux=labelled(0, 0)), {"spy": spy})


def test_an_audit_without_attacks_or_images_is_refused() -> None:
    with pytest.raises(AuditError, match="at least one attack, got none"):
        run_attacks(a_target(), {})
    with pytest.raises(AuditError, match="no images to score"):
        run_attacks(a_target(scored=labelled(0, 1)), {"mean": MeanImage()})


def test_images_without_a_label_are_refused_not_left_out() -> None:
    images, labels = torch.zeros(5, 1, 8, 8), torch.zeros(3, dtype=torch.long)
    with pytest.raises(AuditError, match=r"each of the scored .* 5 images and 3 labels"):
        run_attacks(a_target(scored=Labelled(images, labels)), {"mean": MeanImage()})


def test_images_outside_the_range_are_refused() -> None:
    bright = Labelled(torch.full((3, 1, 8, 8), 200.0), torch.zeros(3, dtype=torch.long))
    with pytest.raises(AuditError, match=r"must lie in \[0, 1\], got values from 200 to 200"):
        run_attacks(a_target(scored=bright), {"mean": MeanImage()})
    with pytest.raises(AuditError, match=r"aux images must lie in \[0, 1\]"):
        run_attacks(a_target(aux=bright), {"label": ClassMean()})
