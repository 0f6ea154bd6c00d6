"""Leaks beyond pixels: open clients, silent clients, a shuffled control, and what is refused."""

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from audits.made import a_target, an_attempt
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from splitveil.attacks.attribute import AttributeHead
from splitveil.attacks.baseline import MeanImage
from splitveil.attacks.linear import Linear
from splitveil.attacks.membership import OUTPUTS, WIRE, Membership
from splitveil.attacks.profiles import LEAK_BUDGETS, LeakBudget
from splitveil.attacks.reid import ReId
from splitveil.audits import metrics
from splitveil.audits.beyond_pixels import (
    attribute_leaks,
    identity_leaks,
    leaks_beyond_pixels,
    membership_leaks,
)
from splitveil.audits.suite import run_attacks
from splitveil.audits.target import Attempt, Target, levels
from splitveil.data.attributes import attributes_of
from splitveil.data.dataset import Attributes
from splitveil.errors import AuditError
from splitveil.io import Json
from splitveil.rng import stream
from splitveil.threat import Labelled

PLAN = LeakBudget(
    attribute=AttributeHead(epochs=1, min_steps=100, batch_size=64),
    membership=Membership(draws=2, references=1, min_steps=60, batch_size=64),
    reid=ReId(draws=2, tried=50),
)


def images(n: int, seed: int) -> Labelled:
    """Two halves of different brightness with texture; labels that have nothing to do with it."""
    draws = Generator().manual_seed(seed)
    halves = torch.rand(n, 1, 1, 2, generator=draws).repeat_interleave(4, 3)
    x = 0.7 * halves + 0.3 * torch.rand(n, 1, 8, 8, generator=draws)
    return Labelled(x, torch.randint(3, (n,), generator=draws))


def of(case: Target, **facts: Any) -> Json:  # noqa: ANN401 - fields of a Target
    sides = {"members": images(80, 3), "outsiders": images(60, 4)}
    return leaks_beyond_pixels(replace(case, **(sides | facts)), {}, PLAN)


def in_the_open(noise: float = 0.01) -> Target:
    return a_target(aux=images(400, 0), scored=images(200, 1), noise_std=noise)


@pytest.fixture(scope="module")
def open_leaks() -> Json:
    return of(in_the_open())


@pytest.fixture(scope="module")
def noisy_leaks() -> Json:
    return of(in_the_open(1000.0), seed=3)


def test_an_open_client_gives_attributes_and_identities_away(open_leaks: Json) -> None:
    assert set(open_leaks["attribute"]) == {"brightness", "side", "edges"}
    for name in ("brightness", "side"):
        row = open_leaks["attribute"][name]
        assert row["accuracy"] > 0.85, name
        assert row["beyond_answer_low"] > 0, name
        assert row["balanced_accuracy_low"] > row["chance_balanced"], name
        assert row["accuracy_low"] > max(row["chance"], row["from_answer"]), name
        assert row["n"] == 200
        assert row["access"] == "black-box"
    found = open_leaks["re-id"]["wire"]
    assert found["rank_1"] == found["rank_5"] == 1.0
    assert found["rank_1_low"] == pytest.approx(0.025 ** (1 / 200))
    assert (found["chance_1"], found["chance_5"]) == (1 / 200, 5 / 200)
    assert found["gallery"] == found["n"] == 200
    assert found["sendings"] == PLAN.reid.draws


def test_pure_noise_is_at_every_chance_level(noisy_leaks: Json) -> None:
    for name, row in noisy_leaks["attribute"].items():
        low, high = (row[f"balanced_accuracy_{side}"] for side in ("low", "high"))
        assert low <= row["chance_balanced"] <= high, name
        assert row["beyond_answer_low"] <= 0.0, name
    found = noisy_leaks["re-id"]["wire"]
    assert found["rank_1_low"] <= found["chance_1"] <= found["rank_1_high"]
    assert found["rank_5_low"] <= found["chance_5"] <= found["rank_5_high"]
    assert found["rank_1_high"] < 0.06


def test_a_model_that_was_trained_on_neither_side_has_no_members(open_leaks: Json) -> None:
    found = open_leaks["membership"]
    for source, names in (("outputs", OUTPUTS), ("wire", WIRE)):
        assert set(found[source]) == set(names)
        row = found[source][found["strongest"][source]]
        assert row["known_auc"] == max(other["known_auc"] for other in found[source].values())
        assert row["auc_low"] <= 0.5 <= row["auc_high"]
    assert (found["chance"], found["chance_tpr"]) == (0.5, 0.01)
    assert found["access"] == "repeats"
    assert found["outputs"]["lrt"]["tpr"] is None  # 30 non-members cannot show one in a hundred


def made_of(access: str, rows: Tensor, made: Tensor) -> Attempt:
    """An attempt that made these images of the scored ones at `rows`, of 200."""
    attempt = an_attempt([0.0] * len(rows), access=access, rows=rows.tolist(), scored=200)
    return replace(attempt, images=levels(made))


def by_heart(known: Labelled) -> Target:
    """A split model, with BatchNorm in both halves, that knows random labels by heart."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        client = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())
        server = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
    both = nn.Sequential(client, server)
    optimiser = torch.optim.Adam(both.parameters(), 1e-2)
    for _ in range(80):
        optimiser.zero_grad()
        F.cross_entropy(both(known.images), known.labels).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return a_target(client, head=server, aux=known, scored=images(50, 9), noise_std=0.05)


@pytest.fixture(scope="module")
def memory() -> Target:
    return by_heart(images(500, 5))


def test_members_of_a_model_that_learned_by_heart_are_found(memory: Target) -> None:
    known = replace(memory, members=images(500, 5), outsiders=images(500, 6))
    found = membership_leaks(known, PLAN.membership)
    best = found["outputs"][found["strongest"]["outputs"]]
    assert best["auc_low"] > 0.8
    assert best["balanced_accuracy_low"] > 0.7
    assert all(row["balanced_accuracy_low"] > 0.5 for row in found["outputs"].values())
    assert best["tpr_low"] <= best["tpr"] <= best["tpr_high"]
    assert found["n"] + found["known"] == 2 * (found["n"] // 2 + found["known"] // 2) > 900


@pytest.mark.parametrize("seed", range(3))
def test_sides_exchanged_at_random_are_at_chance(memory: Target, seed: int) -> None:
    parts = (images(500, 5), images(500, 6))
    x, y = (torch.cat([getattr(p, name) for p in parts]) for name in ("images", "labels"))
    order = torch.randperm(1000, generator=stream(seed, "control"))
    one, other = (Labelled(x[rows], y[rows]) for rows in (order[:500], order[500:]))
    mixed = replace(memory, members=one, outsiders=other, seed=seed)
    found = membership_leaks(mixed, PLAN.membership)
    for source in ("outputs", "wire"):
        row = found[source][found["strongest"][source]]
        assert row["auc_low"] <= 0.5 <= row["auc_high"]


class Dead(nn.Module):
    """Sends the same for every image."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.full((len(x), 8), 0.3)


class Rounds(nn.Module):
    """A server whose last digits depend on a row's place in its batch."""

    def forward(self, z: Tensor) -> Tensor:
        place = torch.arange(len(z), dtype=torch.float64) / len(z)
        return z[:, :3] + 1e-9 * place[:, None] * torch.tensor([1.0, 2.0, 3.0])


def test_a_constant_client_reveals_no_members() -> None:
    case = a_target(Dead(), head=Rounds(), aux=images(60, 0), scored=images(40, 1), noise_std=0.0)
    found = of(case, members=images(700, 3), outsiders=images(650, 4))["membership"]
    for name, row in (found["outputs"] | found["wire"]).items():
        assert row["auc"] == pytest.approx(0.5, abs=0.07), name


def test_a_class_that_one_side_lacks_is_not_taken_for_membership() -> None:
    inside, outside = images(300, 3), images(300, 4)
    only = Labelled(inside.images, torch.where(inside.labels == 2, 1, inside.labels))

    case = a_target(aux=images(60, 0), scored=images(40, 1), noise_std=0.1)
    found = of(case, members=only, outsiders=outside)["membership"]
    pairs = sum(min(int((d.labels == k).sum()) for d in (only, outside)) for k in (0, 1))
    assert found["n"] + found["known"] == 2 * pairs


def test_reconstructions_are_found_by_distance_and_by_direction() -> None:
    case = in_the_open()
    rows = torch.arange(0, 200, 2)
    x = case.scored.images[rows]
    middle = case.aux.images.mean(0)
    made = {
        "copy": made_of("white-box", rows, x),
        "grey": made_of("none", rows, torch.full_like(x, 0.5)),
        "shrunk": made_of("black-box", rows, middle + 0.2 * (x - middle)),
    }
    found = identity_leaks(case, made, PLAN.reid)
    assert set(found) == {"wire"} | {f"{n}/{m}" for n in made for m in ("mse", "correlation")}
    for name in ("copy/mse", "copy/correlation", "shrunk/correlation"):
        assert found[name]["rank_1"] == 1.0
    assert found["shrunk/mse"]["rank_1"] < 0.9
    assert found["grey/mse"]["rank_1"] < 0.05
    assert (found["copy/mse"]["n"], found["copy/mse"]["gallery"]) == (100, 200)
    assert found["copy/mse"]["access"] == "white-box"
    alone = identity_leaks(case, {"grey": made["grey"]}, PLAN.reid)
    assert alone["grey/mse"] == found["grey/mse"]  # whatever else is looked for


def test_a_smaller_gallery_holds_fewer_of_the_reconstructions() -> None:
    case = in_the_open()
    made = {"copy": made_of("white-box", torch.arange(200), case.scored.images)}
    found = identity_leaks(case, made, ReId(draws=2, limit=30, tried=50))
    for name in ("wire", "copy/mse", "copy/correlation"):
        assert (found[name]["n"], found[name]["gallery"]) == (30, 30)
        assert (found[name]["rank_1"], found[name]["chance_1"]) == (1.0, 1 / 30)


def test_what_is_looked_up_is_what_the_audit_scored() -> None:
    case = replace(in_the_open(0.3), seed=2)
    attempts = run_attacks(case, {"mean": MeanImage(), "linear": Linear()})
    made = attempts["linear"]
    again = metrics.mse(case.scored.images[made.rows], made.images.float() / 255)
    assert torch.allclose(again, made.mse, atol=1e-4)  # bytes are rounded
    found = leaks_beyond_pixels(case, attempts, PLAN)["re-id"]
    assert set(found) == {"wire", "linear/mse", "linear/correlation"}
    assert found["linear/mse"] == identity_leaks(case, attempts, PLAN.reid)["linear/mse"]


def test_attributes_from_a_table_replace_the_simple_ones() -> None:
    case = in_the_open()
    every = torch.cat([case.aux.images, case.scored.images])
    table = {
        "corner": (every[:, 0, 0, 0] > 0.5).long(),
        "coin": torch.randint(2, (600,), generator=stream(0, "coin")),
    }
    given = attributes_of(Path("table.csv"), table, torch.arange(400), torch.arange(400, 600))
    found = of(case, attributes=given)["attribute"]
    assert set(found) == {"corner", "coin"}
    assert found["corner"]["accuracy"] > 0.85
    assert found["coin"]["accuracy_low"] <= 0.5 <= found["coin"]["accuracy_high"]


def test_what_the_answer_tells_already_is_no_leak_beyond_it() -> None:
    case = in_the_open(0.0)
    told = [case.scores(d.images).argmax(1) for d in (case.aux, case.scored)]
    found = of(case, attributes=Attributes({"answer": told[0]}, {"answer": told[1]}))
    row = found["attribute"]["answer"]
    assert row["from_answer"] == 1.0
    assert row["beyond_answer_high"] <= 0.0
    assert row["accuracy"] > row["chance"]


def test_one_seed_gives_one_result_in_plain_json() -> None:
    first, second, other = (of(in_the_open(0.2), seed=seed) for seed in (1, 1, 2))
    assert json.dumps(first, allow_nan=False) == json.dumps(second, allow_nan=False)
    assert first != other


def test_the_victim_and_the_server_stay_as_they_were(memory: Target) -> None:
    assert memory.head is not None
    head = copy.deepcopy(memory.head).train()  # a server that nobody switched to eval mode
    parts = (memory.victim.encoder, head)
    before = [copy.deepcopy(part.state_dict()) for part in parts]
    assert any("running_mean" in name for name in before[1])
    of(memory, head=head, members=images(80, 5), outsiders=images(80, 6))
    for part, old in zip(parts, before, strict=True):
        assert all(torch.equal(value, old[name]) for name, value in part.state_dict().items())
    assert head.training
    assert not any(part.grad is not None for part in memory.victim.encoder.parameters())


def test_every_profile_has_a_plan() -> None:
    from splitveil.attacks.profiles import PROFILES

    assert set(LEAK_BUDGETS) == set(PROFILES)


def test_what_would_give_a_false_number_is_refused_with_its_reason() -> None:
    case = in_the_open()
    refused = of(case, members=images(19, 3))["refused"]
    assert re.search(r"at least 20 members .* got 1[0-9] such pairs from 19", refused["membership"])
    lone = of(a_target(aux=images(30, 0), scored=images(1, 1)))
    assert lone["refused"]["every"] == "leaks need at least 2 scored images, got 1"
    assert not {"attribute", "membership", "re-id"} & lone.keys()
    few = of(a_target(aux=images(9, 0), scored=images(30, 1)))["refused"]
    assert "at least 10 aux images, got 9" in few["attribute"]
    assert of(case, members="who knows")["refused"] == {"membership": "who knows"}
    one = Attributes({"hat": torch.ones(400).long()}, {"hat": torch.ones(200).long()})
    with pytest.raises(AuditError, match="'hat' has one value only"):
        attribute_leaks(replace(case, attributes=one), PLAN.attribute)
    short = Attributes({"hat": torch.arange(400) % 2}, {"hat": torch.arange(5)})
    with pytest.raises(AuditError, match=r"each of the 200 scored images, got \(5,\)"):
        attribute_leaks(replace(case, attributes=short), PLAN.attribute)
    broken = Labelled(torch.full((60, 1, 8, 8), torch.nan), torch.arange(60) % 3)
    with pytest.raises(AuditError, match=r"must lie in \[0, 1\]"):
        membership_leaks(replace(case, members=images(80, 3), outsiders=broken), PLAN.membership)
