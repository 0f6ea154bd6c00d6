"""What each threat model is given, and clients that misbehave."""

import pytest
import torch
from audits.made import Spy, a_target, labelled
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor, nn

from splitveil.attacks.baseline import MeanImage
from splitveil.attacks.linear import Linear
from splitveil.audits.suite import run_attacks
from splitveil.audits.target import answer, attacked_rows, gallery_rows, send
from splitveil.errors import AuditError
from splitveil.nets.catalogue import small
from splitveil.nets.channel import Channel, GaussianNoise
from splitveil.nets.split import SplitModel, cut
from splitveil.rng import stream
from splitveil.threat import Access, Labelled


def seen_by(spy: Spy, seed: int = 5) -> Spy:
    run_attacks(a_target(seed=seed), {"spy": spy})
    return spy


def test_every_access_sees_what_its_threat_model_allows() -> None:
    case = a_target(seed=5)
    wire = case.sent
    assert len(set(wire.answer.tolist())) > 1
    shown = {access: seen_by(Spy(access)).seen[0] for access in Access}
    for access in (Access.NONE, Access.LABEL):
        assert shown[access].z.shape == (12, 0)
    assert shown[Access.NONE].answer.tolist() == [0] * 12
    for access in set(Access) - {Access.NONE}:
        assert torch.equal(shown[access].answer, wire.answer)
    for access in (Access.BLACK_BOX, Access.REPEATS, Access.WHITE_BOX):
        assert torch.equal(shown[access].z, wire.z)
    drawn = case.victim.send(case.scored.images, stream(5, "wire"))
    assert torch.equal(wire.z, drawn)
    assert torch.equal(wire.answer, case.scores(drawn).argmax(1))


def test_only_repeats_come_with_draws() -> None:
    for access in set(Access) - {Access.REPEATS}:
        assert seen_by(Spy(access)).seen[0].draws is None
    once = seen_by(Spy(Access.REPEATS)).seen[0]
    assert once.draws is not None
    assert once.draws.shape == (1, 12, 1, 8, 8)


def test_repeats_are_the_wire_and_further_sendings() -> None:
    case = a_target(noise_std=0.5, seed=5)
    spy = Spy(Access.REPEATS, repeats=4)
    run_attacks(case, {"spy": spy})
    seen = spy.seen[0]
    assert seen.draws is not None
    assert seen.draws.shape == (4, 12, 1, 8, 8)
    assert torch.equal(seen.draws[0], seen.z)
    noise = (seen.draws - case.scored.images).flatten(2) / 0.5
    flat = noise.flatten(0, 1)  # (4·12, 64)
    alike = (flat @ flat.T / 64).fill_diagonal_(0)
    assert float(alike.abs().max()) < 0.6  # 64 samples: sd 1/8; a draw used twice would give 1
    assert float(flat.std()) == pytest.approx(1.0, abs=0.05)


def test_repeats_on_a_subset_are_sendings_of_the_subset() -> None:
    spy = Spy(Access.REPEATS, repeats=3, limit=5)
    case = a_target(noise_std=0.0, seed=5)
    attempt = run_attacks(case, {"spy": spy})["spy"]
    assert spy.seen[0].draws is not None
    rows = attempt.rows
    assert torch.equal(spy.seen[0].draws, case.scored.images[rows].expand(3, 5, 1, 8, 8))


@pytest.fixture
def model() -> SplitModel:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        built = cut(small((1, 8, 8), 4), 1, Channel([GaussianNoise(0.1)]))
    built.train()(torch.rand(32, 1, 8, 8, generator=stream(5, "x")), stream(6, "noise"))
    return built.eval()


def test_the_attacker_gets_the_servers_tensors_bit_for_bit(model: SplitModel) -> None:
    case = a_target(model.encoder, channel=model.channel, head=model.head, seed=3)
    spy = Spy()
    run_attacks(case, {"spy": spy})
    with torch.no_grad():
        served = model.split_forward(case.scored.images, stream(3, "wire"))
    assert torch.equal(spy.seen[0].z, served.z_sent)
    assert torch.equal(spy.seen[0].answer, served.logits.argmax(1))
    again = spy.boxes[0].send(case.scored.images, stream(3, "wire"))
    assert torch.equal(again, served.z_sent)


def test_every_query_draws_anew_and_batchnorm_stays(model: SplitModel) -> None:
    case = a_target(model.encoder, channel=model.channel, head=model.head, seed=3)
    spy = Spy()
    before = {k: v.clone() for k, v in case.victim.encoder.state_dict().items()}
    assert any(k.endswith("running_mean") for k in before)
    run_attacks(case, {"spy": spy, "linear": Linear()})
    generator = stream(0, "queries")
    one, other = (spy.boxes[0].send(case.aux.images, generator) for _ in range(2))
    assert not bool((one == other).flatten(1).all(1).any())
    after = case.victim.encoder.state_dict()
    assert all(torch.equal(after[k], v) for k, v in before.items())


def test_sending_in_parts_draws_from_one_stream() -> None:
    case = a_target()
    many = torch.rand(1003, 1, 8, 8, generator=stream(0, "images"))
    generator = stream(3, "wire")
    parts = [case.victim.send(x, generator) for x in (many[:1000], many[1000:])]
    assert torch.equal(send(case.victim, many, 3, "wire"), torch.cat(parts))
    assert torch.equal(answer(case.scores, many), case.scores(many).argmax(1))


@settings(deadline=None)
@given(
    labels=st.lists(st.integers(0, 11), min_size=1, max_size=60),
    limit=st.none() | st.integers(1, 70),
)
def test_the_attacked_subset_is_fixed_and_starts_with_the_gallery(
    labels: list[int], limit: int | None
) -> None:
    scored = Labelled(torch.zeros(len(labels), 1, 1, 1), torch.tensor(labels))
    rows = attacked_rows(scored, limit).tolist()
    assert rows == attacked_rows(scored, limit).tolist()
    assert len(rows) == len(set(rows)) == min(limit or len(labels), len(labels))
    assert set(rows) <= set(range(len(labels)))
    if limit is None or limit >= len(labels):
        assert rows == list(range(len(labels)))
    else:
        shown = gallery_rows(scored.labels).tolist()[:limit]
        assert rows[: len(shown)] == shown
        assert rows[len(shown) :] == sorted(rows[len(shown) :])


def test_the_rest_of_the_subset_is_spread_evenly() -> None:
    scored = Labelled(torch.zeros(1001, 1, 1, 1), torch.zeros(1001, dtype=torch.long))
    assert attacked_rows(scored, 5).tolist() == [0, 1, 251, 501, 751]


def test_the_subset_does_not_depend_on_seed_noise_or_attack() -> None:
    rows = [
        run_attacks(a_target(noise_std=noise, seed=seed), {"spy": spy})["spy"].rows.tolist()
        for noise, spy, seed in (
            (0.0, Spy(limit=6), 0),
            (0.5, Spy(Access.WHITE_BOX, limit=6), 9),
        )
    ]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 6


class ShapeByBatch(nn.Module):
    """Sends other shapes once a batch holds more than 20 images."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if len(x) <= 20:
            return x
        return {"flat": x.flatten(1), "fewer": x[:-1], "mean": x.mean(), "cut": x[..., :-1]}[
            self.kind
        ]


@pytest.mark.parametrize("kind", ["flat", "fewer", "cut", "mean"])
def test_queries_of_another_shape_than_the_wire_are_refused(kind: str) -> None:
    case = a_target(ShapeByBatch(kind), channel=Channel())  # 12 scored images, 30 aux ones
    with pytest.raises(AuditError, match=r"changed its output shape: .* for 30 images, expected"):
        run_attacks(case, {"linear": Linear()})


@pytest.mark.parametrize("kind", ["fewer", "mean"])
def test_a_client_that_sends_a_wrong_number_of_rows_is_refused(kind: str) -> None:
    case = a_target(ShapeByBatch(kind), channel=Channel(), scored=labelled(25, 1))
    with pytest.raises(AuditError, match=r"changed its output shape: .* for 25 images"):
        run_attacks(case, {"mean": MeanImage()})


def test_sendings_of_different_shapes_are_refused() -> None:
    case = a_target(ShapeByBatch("flat"), channel=Channel(), scored=labelled(1010, 1))
    with pytest.raises(AuditError, match=r"\(10, 1, 8, 8\) for 10 images, expected \(10, 64\)"):
        case.sent  # noqa: B018 - it is drawn when it is first asked for


class NanWhenBright(nn.Module):
    """Sends NaN and infinity for images whose first pixel is above a threshold."""

    def forward(self, x: Tensor) -> Tensor:
        bright = x[:, :1, :1, :1] > 0.5
        z = torch.where(bright, torch.nan, x)
        return torch.cat([z[:, :, :4], torch.where(bright, torch.inf, x[:, :, 4:])], 2)


def some_bright(n: int = 12) -> Labelled:
    images = torch.full((n, 1, 8, 8), 0.25)
    images[[1, 4, 7]] = 0.75
    return Labelled(images, torch.arange(n) % 3)


def test_images_sent_as_nan_are_named_and_still_scored() -> None:
    case = a_target(NanWhenBright(), scored=some_bright())
    assert case.sent.broken == (1, 4, 7)
    assert bool(torch.isfinite(case.sent.z).all())
    assert bool((case.sent.z[[1, 4, 7]] == 0).all())
    attempts = run_attacks(case, {"mean": MeanImage(), "linear": Linear()})
    for attempt in attempts.values():
        assert len(attempt.mse) == 12
        assert bool(torch.isfinite(attempt.mse).all())
    assert a_target().sent.broken == ()


def test_aux_images_whose_sending_is_not_finite_break_no_attack() -> None:
    dark = Labelled(torch.full((12, 1, 8, 8), 0.25), torch.zeros(12, dtype=torch.long))
    case = a_target(NanWhenBright(), scored=dark)
    assert bool((case.aux.images[:, 0, 0, 0] > 0.5).any())
    spy = Spy(Access.REPEATS, repeats=2)
    attempts = run_attacks(case, {"linear": Linear(), "spy": spy})
    assert float(attempts["linear"].mse.max()) <= 1
    sent = spy.boxes[0].send(case.aux.images, Generator().manual_seed(0))
    assert bool(torch.isfinite(sent).all())
