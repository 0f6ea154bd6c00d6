"""Membership: scores by hand, a model that learned its images by heart, and a shuffled control."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

from splitveil.attacks.membership import (
    OUTPUTS,
    WIRE,
    Membership,
    Trace,
    Verdict,
    auc,
    best_threshold,
    class_llr,
    class_residuals,
    crossed_llr,
    margin,
)
from splitveil.errors import AuditError, ConfigError
from splitveil.nets.channel import Channel, GaussianNoise
from splitveil.threat import Access, Labelled, Victim

ATTACK = Membership(draws=2, references=2, min_steps=150, batch_size=64)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(n: int, seed: int) -> Labelled:
    stream = generator(seed)
    x = torch.rand(n, 1, 5, 5, generator=stream)
    return Labelled(x, torch.randint(3, (n,), generator=stream))


def a_trace(n: int, seed: int, shift: float = 0.0) -> Trace:
    stream = generator(seed)
    lean = torch.randn(n, generator=stream, dtype=torch.float64) + shift
    z = torch.randn(n, 6, generator=stream)
    return Trace(z, lean, -lean, lean, torch.randint(3, (n,), generator=stream))


def by_heart(known: Labelled) -> tuple[nn.Module, nn.Module]:
    """A client and a server trained until they know random labels by heart."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        client = nn.Sequential(nn.Flatten(), nn.Linear(25, 48), nn.ReLU(), nn.Linear(48, 24))
        server = nn.Sequential(nn.ReLU(), nn.Linear(24, 3))
    both = nn.Sequential(client, server)
    optimiser = torch.optim.Adam(both.parameters(), 1e-2)
    for _ in range(150):
        optimiser.zero_grad()
        F.cross_entropy(both(known.images), known.labels).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    assert float((both(known.images).argmax(1) == known.labels).double().mean()) > 0.99
    return client, server


def judged(
    victim: Victim, server: nn.Module, inside: Labelled, outside: Labelled
) -> dict[str, float]:
    """AUC on the second halves of an attacker who knows the first halves."""
    stream, half = generator(1), len(inside) // 2
    traces = [ATTACK.observe(victim.black_box(), server, d, stream) for d in (inside, outside)]
    every = [torch.cat(pair) for pair in zip(*(vars(t).values() for t in traces), strict=True)]
    place = torch.arange(2 * len(inside))
    known, member = place % len(inside) < half, place < len(inside)
    whole = Trace(*every)
    rows, asked = known.nonzero().flatten(), (~known).nonzero().flatten()
    found = ATTACK.judge(whole.at(asked), whole.at(rows), member[rows], stream)
    yes = member[asked]
    return {name: auc(v.scores[yes], v.scores[~yes]) for name, v in found.items()}


@pytest.fixture(scope="module")
def memory() -> tuple[Victim, nn.Module]:
    client, server = by_heart(images(300, 0))
    return Victim(client, Channel([GaussianNoise(0.05)])), server


def test_a_model_that_knows_its_images_by_heart_is_seen_through(
    memory: tuple[Victim, nn.Module],
) -> None:
    victim, server = memory
    found = judged(victim, server, images(300, 0), images(300, 1))
    assert set(found) == {*OUTPUTS, *WIRE}
    assert all(found[name] > 0.65 for name in found), found
    assert max(found[name] for name in OUTPUTS) > 0.9
    assert max(found[name] for name in WIRE) > 0.7


def test_two_sets_the_model_never_saw_cannot_be_told_apart(
    memory: tuple[Victim, nn.Module],
) -> None:
    victim, server = memory
    found = judged(victim, server, images(300, 2), images(300, 1))
    assert all(abs(value - 0.5) < 0.1 for value in found.values()), found  # 3 sd


class Remembers(nn.Module):
    """Sends a mark with every image it knows."""

    known: Tensor

    def __init__(self, known: Tensor) -> None:
        super().__init__()
        self.register_buffer("known", known.flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        apart = (x.flatten(1)[:, None] - self.known).abs().sum(2)
        return torch.cat([torch.zeros(len(x), 3), (apart.amin(1, keepdim=True) == 0).float()], 1)


def test_the_classifier_finds_a_mark_that_answers_do_not_show() -> None:
    inside, outside = images(120, 0), images(120, 1)
    victim = Victim(Remembers(inside.images), Channel([GaussianNoise(0.1)]))

    def silent_server(z: Tensor) -> Tensor:
        return torch.zeros(len(z), 3)

    found = judged(victim, nn.Flatten(), inside, outside)
    assert found["classifier"] > 0.99
    blind = Membership(draws=1).observe(victim.black_box(), silent_server, inside, generator())
    assert blind.confidence.tolist() == pytest.approx([1 / 3] * 120)
    assert blind.margin.tolist() == pytest.approx([-math.log(2)] * 120)


def test_shuffled_sides_are_at_chance_within_the_interval() -> None:
    attack = Membership(draws=1, references=1, min_steps=5)
    worst: dict[str, list[float]] = {}
    for seed in range(30):
        known, asked = a_trace(120, 2 * seed), a_trace(120, 2 * seed + 1)
        member = torch.arange(120) % 2 == 0
        for name, v in attack.judge(asked, known, member, generator(seed)).items():
            worst.setdefault(name, []).append(auc(v.scores[member], v.scores[~member]))
    spread = math.sqrt(121 / (12 * 60 * 60))  # of an AUC without information
    for name, found in worst.items():
        assert abs(sum(found) / 30 - 0.5) < 3.5 * spread / math.sqrt(30), name
        assert sum(abs(value - 0.5) > 1.96 * spread for value in found) <= 5, name


def test_reference_heads_correct_for_difficult_images() -> None:
    draws = generator(5)
    labels = torch.randint(3, (800,), generator=draws)
    easy = torch.randn(800, generator=draws)
    z = 3 * F.one_hot(labels, 3) * (easy[:, None] + 1) + 0.3 * torch.randn(800, 3, generator=draws)
    member = torch.arange(800) % 2 == 0
    lean = 2 * easy.double() + 0.7 * member + 0.3 * torch.randn(800, generator=draws).double()
    whole = Trace(z, lean, -lean, lean, labels)
    known, asked = torch.arange(400), torch.arange(400, 800)
    found = ATTACK.judge(whole.at(asked), whole.at(known), member[known], generator())
    yes = member[asked]
    areas = {name: auc(v.scores[yes], v.scores[~yes]) for name, v in found.items()}
    assert areas["loss"] < 0.65
    assert areas["reference"] > areas["loss"] + 0.1


def test_observing_averages_over_sendings() -> None:
    data = images(400, 0)
    victim = Victim(nn.Identity(), Channel([GaussianNoise(0.5)]))
    box, server = victim.black_box(), nn.Flatten()
    errors = []
    for draws in (1, 16):
        trace = Membership(draws=draws).observe(box, server, data, generator(3))
        errors.append(float((trace.z - data.images.flatten(1)).std()))
    assert errors == pytest.approx([0.5, 0.125], rel=0.05)
    assert Membership(draws=1).access is Access.BLACK_BOX
    assert Membership(draws=2).access is Access.REPEATS


@given(logits=st.lists(st.floats(-20, 20), min_size=2, max_size=6), data=st.data())
def test_the_margin_is_the_logit_of_the_probability(
    logits: list[float], data: st.DataObject
) -> None:
    label = data.draw(st.integers(0, len(logits) - 1))
    row = torch.tensor([logits], dtype=torch.float64)
    p = row.softmax(1)[0]
    rest = float(p.sum() - p[label])
    if rest > 1e-12:
        expected = math.log(float(p[label])) - math.log(rest)
        assert float(margin(row, torch.tensor([label]))) == pytest.approx(expected, abs=1e-3)


@settings(deadline=None)
@given(
    a=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    b=st.lists(st.integers(0, 5), min_size=1, max_size=12),
)
def test_auc_is_mann_whitney_and_the_threshold_is_the_best(a: list[int], b: list[int]) -> None:
    members, others = torch.tensor(a).double(), torch.tensor(b).double()
    area = stats.mannwhitneyu(a, b).statistic / (len(a) * len(b))
    assert auc(members, others) == pytest.approx(area)
    assert auc(others, members) == pytest.approx(1 - area)

    def gain(cut: float) -> float:
        return float((members >= cut).double().mean() - (others >= cut).double().mean())

    # Cuts below all scores say "member" of everything: gain 0.
    best = max(0.0, *(gain(cut) for cut in [i / 2 for i in range(12)]))
    assert max(0.0, gain(best_threshold(members, others))) == pytest.approx(best)


def test_the_likelihood_ratio_of_a_class_by_hand() -> None:
    known = torch.cat([torch.full((500,), 1.0), torch.full((500,), 3.0)]).double()
    known[::2] += 1.0  # sides at 1.5 and 3.5 with standard deviation a half
    zero, member = torch.zeros(1000, dtype=torch.long), torch.arange(1000) >= 500
    values = torch.tensor([1.5, 2.5, 4.0], dtype=torch.float64)
    found = class_llr(values, torch.zeros(3, dtype=torch.long), known, zero, member)
    sides = [stats.norm(m, 0.5).logpdf(values.numpy()) for m in (3.5, 1.5)]
    assert found.tolist() == pytest.approx((sides[0] - sides[1]).tolist(), rel=1e-6)


def test_a_known_image_is_judged_by_others_alone() -> None:
    areas = []
    for seed in range(20):
        known = torch.randn(400, generator=generator(seed), dtype=torch.float64)
        kind, member = torch.arange(400) % 20, torch.arange(400) // 20 % 2 == 0
        pair = (crossed_llr(known, kind, member), class_llr(known, kind, known, kind, member))
        areas.append([auc(ratio[member], ratio[~member]) for ratio in pair])
    fair, flattering = torch.tensor(areas).mean(0).tolist()
    assert fair == pytest.approx(0.5, abs=0.02)  # 3 sd
    assert flattering > 0.54


def test_a_class_the_attacker_never_saw_is_judged_by_all_others() -> None:
    known = torch.tensor([0.0, 1.0, 5.0, 6.0], dtype=torch.float64)
    zero, member = torch.zeros(4, dtype=torch.long), torch.tensor([False, False, True, True])
    low, high = class_llr(
        torch.tensor([0.5, 5.5]).double(), torch.tensor([7, 7]), known, zero, member
    )
    assert float(low) < 0 < float(high)
    assert float(high) == pytest.approx(50.0)  # (5/0.5)²/2


def test_a_known_member_does_not_count_in_the_mean_of_its_class() -> None:
    z = torch.tensor([[0.0], [3.0], [9.0]])
    known = Trace(z, z[:, 0], z[:, 0], z[:, 0], torch.zeros(3, dtype=torch.long))
    member = torch.tensor([True, True, False])
    scale = 1 / float(z.std(0, correction=0))
    asked, ours = class_residuals(known, known, member)
    middle = 1.5  # of the two members, which counts as one more image
    expected = [0 - (3 + middle) / 2, 3 - (0 + middle) / 2, 9 - (3 + middle) / 3]
    assert ours[:, 0].tolist() == pytest.approx([scale * e for e in expected], rel=1e-5)
    assert asked[:, 0].tolist() == pytest.approx(
        [scale * (v - (3 + middle) / 3) for v in (0, 3, 9)], rel=1e-5
    )


def test_the_sign_of_a_score_is_fitted_on_the_known_half() -> None:
    known, asked = a_trace(80, 0), a_trace(80, 1)
    member = torch.arange(80) < 40
    lean = torch.where(member, -5.0, 5.0).double()
    asked, known = (Trace(t.z, t.margin, t.loss, lean, t.labels) for t in (asked, known))
    verdict = ATTACK.judge(asked, known, member, generator())["confidence"]
    assert verdict == Verdict(verdict.scores, verdict.threshold, 1.0)
    assert bool(((verdict.scores >= verdict.threshold) == member).all())


def test_one_seed_gives_one_verdict() -> None:
    known, asked, member = a_trace(60, 0), a_trace(60, 1), torch.arange(60) % 2 == 0
    first, second, third = (ATTACK.judge(asked, known, member, generator(s)) for s in (3, 3, 4))
    for name in first:
        assert torch.equal(first[name].scores, second[name].scores)
    assert not torch.equal(first["classifier"].scores, third["classifier"].scores)


def test_infinite_outputs_and_settings_below_one_are_refused() -> None:
    victim = Victim(nn.Identity(), Channel())
    with pytest.raises(AuditError, match="outputs are NaN or infinite"):
        ATTACK.observe(
            victim.black_box(), lambda z: z.flatten(1) * math.nan, images(20, 0), generator()
        )
    for bad in ({"draws": 0}, {"references": 0}):
        with pytest.raises(ConfigError, match="must be at least 1"):
            Membership(**bad)
