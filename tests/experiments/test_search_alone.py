"""The search for the best client alone: who competes, rounds, continuation, refusals."""

import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from cli.calling import call, text
from experiments.made import Instant
from torch import nn

from splitveil.config.run_config import RunConfig
from splitveil.errors import ConfigError
from splitveil.experiments.advise import effort, taps_of
from splitveil.experiments.client_search import flattened, rungs
from splitveil.nets.budget import answering_clients, weigh_alone
from splitveil.nets.clients import FAMILIES, build_client, parse_client
from splitveil.nets.exit import body_and_projection, own_head
from splitveil.nets.split import TRACKS, count_network

SEARCH = ("clients", "--alone", "--track", "B1", "--dataset", "digits", "--epochs", "8")


SLOW = pytest.mark.slow


@SLOW
@pytest.mark.parametrize("track", ["B1", "B5", "B21"])
def test_at_least_twelve_different_clients_compete_within_the_caps_of_a_track(track: str) -> None:
    caps = TRACKS[track]
    found = answering_clients((3, 32, 32), 10, max_macs=caps.macs, max_stored=caps.stored)
    assert len({one.spec for one in found}) == len(found) == 16
    assert all(one.macs <= caps.macs and one.stored <= caps.stored for one in found)
    assert {one.spec.family for one in found} == set(FAMILIES)
    assert len({(one.spec.family, one.spec.stem_stride, one.spec.halvings) for one in found}) >= 9
    every = answering_clients(
        (3, 32, 32), 10, max_macs=caps.macs, max_stored=caps.stored, most=10**6
    )
    spend = [o for o in every if o.macs >= 0.7 * caps.macs or o.stored >= 0.7 * caps.stored]
    for family in FAMILIES:  # the deepest that spend the budget are among them
        deepest = max(one.depth for one in spend if one.spec.family == family)
        assert deepest in [one.depth for one in found if one.spec.family == family]


@SLOW
def test_a_client_alone_costs_what_its_built_body_and_head_cost() -> None:
    for one in answering_clients((1, 12, 12), 7, max_macs=4e5, max_stored=9000, most=12):
        body, _ = body_and_projection(build_client(one.spec, (1, 12, 12)))
        whole = nn.Sequential(*body, own_head(body, (1, 12, 12), 7))
        found = count_network(whole, (1, 12, 12))
        assert (found.macs, found.stored) == (one.macs, one.stored), one.spec
        flat = nn.Sequential(*body, own_head(body, (1, 12, 12), 7, "flatten"))
        found, stated = count_network(flat, (1, 12, 12)), flattened(one, (1, 12, 12), 7)
        assert (found.macs, found.stored) == (stated.macs, stated.stored), one.spec


@pytest.mark.parametrize("clients", range(1, 40))
def test_rounds_halve_the_clients_and_end_with_all_epochs(clients: int) -> None:
    plan = rungs(20, clients)
    assert plan[0][1] == clients
    assert plan[-1][0] == 20
    for (few, many), (more, less) in itertools.pairwise(plan):
        assert (more, less) == (2 * few, many // 2)


def depth_pays(config: RunConfig) -> tuple[float, float]:
    """Deeper clients answer better, flattening helps, and so do epochs."""
    depth = weigh_alone(parse_client(str(config.client)), (1, 8, 8), 10).depth
    flat = config.settings["pooling"] == "flatten"
    return 0.3 + depth / 200 + (config.epochs or 0) / 100 + 0.001 * flat, 0.0


@SLOW
def test_the_better_half_goes_on_and_the_best_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = Instant(monkeypatch, depth_pays)
    result = call(*SEARCH, "--runs-dir", str(tmp_path), "--json")
    assert result.exit_code == 0, text(result)
    found = json.loads(result.stdout)
    rows = found["clients"]
    assert found["architectures"] == 16
    assert found["caps"] == {"macs": 1_000_000, "stored": 16_000}
    rounds = {e: [r for r in rows if r["epochs"] == e] for e in (2, 4, 8)}
    assert [len(rounds[e]) for e in (2, 4)] == [16, 8]
    assert len(rounds[8]) in (4, 5)  # flattened too, if that fits
    for few, more in ((2, 4), (4, 8)):
        kept = {r["client"] for r in rounds[more]}
        assert kept == {r["client"] for r in rounds[few][: len(kept)]}
    assert found["best"] == rows[0] == max(rows, key=lambda r: r["accuracy"])
    assert all(config.defence == "alone" for config in tried.configs)
    assert found["failed"] == []


@SLOW
def test_the_same_command_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stops(config: RunConfig) -> tuple[float, float]:
        if len(tried.configs) == 20:
            raise KeyboardInterrupt
        return depth_pays(config)

    tried = Instant(monkeypatch, stops)
    assert call(*SEARCH, "--runs-dir", str(tmp_path)).exit_code == 130
    again = Instant(monkeypatch, depth_pays)
    assert call(*SEARCH, "--runs-dir", str(tmp_path)).exit_code == 0
    done = {c.folder for c in tried.configs[:19]}
    assert len(done) == 19
    assert not done & {c.folder for c in again.configs}
    third = Instant(monkeypatch, depth_pays)
    assert call(*SEARCH, "--runs-dir", str(tmp_path)).exit_code == 0
    assert third.configs == []


@SLOW
def test_a_client_that_fails_does_not_end_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def picky(config: RunConfig) -> tuple[float, float]:
        if str(config.client).startswith("strided"):
            raise RuntimeError("out of memory")
        return depth_pays(config)

    Instant(monkeypatch, picky)
    result = call(*SEARCH, "--runs-dir", str(tmp_path))
    assert result.exit_code == 3, text(result)
    assert re.search(r"2 epochs/strided-\S+ mean failed: out of memory", text(result))
    assert result.stdout.splitlines()[-1].startswith(
        "next: splitveil train --dataset digits --defence alone --client "
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--track", "B2"), "unknown track 'B2'; did you mean 'B21'? choose from: B1, B21, B5"),
        (("--track", "B1", "--macs", "5"), "--macs: not together with --track"),
        (("--macs", "100"), "no client answers 10 classes of (1, 8, 8) images alone within 100"),
        (("--macs", "1e6", "--params", "9"), "1,000,000 multiply-adds and 9 stored numbers; the"),
        (("--macs", "100"), "raise the budget, or use smaller images"),
        ((), "give --macs and --wire, for example --macs 5e6 --wire 512, or --track B1, B5 or B21"),
        (("--track", "B1", "--rank"), "--rank: not together with --alone"),
        (("--track", "B1", "--top", "0"), "top must be at least 1, got 0"),
        (("--track", "B1", "--set", "lambd=1"), "unknown setting for defence 'alone' 'lambd'"),
    ],
)
def test_a_search_that_cannot_succeed_is_refused(
    words: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    result = call("clients", "--alone", "--dataset", "digits", *words, "--runs-dir", str(tmp_path))
    assert result.exit_code == 2, text(result)
    assert said in text(result)
    assert list(tmp_path.iterdir()) == []


@SLOW
def test_a_track_nobody_can_meet_says_what_it_would_take() -> None:
    with pytest.raises(ConfigError, match=r"within 1,000,000 multiply-adds and 16,000 stored") as e:
        answering_clients((3, 224, 224), 100_000, max_macs=10**6, max_stored=16_000)
    assert re.search(r"the smallest, \S+, stores [\d,]+ numbers; raise the budget", str(e.value))


def test_trainings_get_shorter_with_the_work_and_longer_with_the_minutes() -> None:
    usual = {"epochs": 20, "batch_size": 256}
    brief, long = (effort(minutes, 1e8, 54_000, usual) for minutes in (1.0, 10.0))
    assert brief.epochs == long.epochs == 3
    assert 0 < long.held_out < brief.held_out < 1
    assert effort(10_000.0, 1e8, 54_000, usual).epochs == 20
    assert effort(10_000.0, 1e8, 54_000, usual).held_out == 0


def test_taps_lie_after_the_stem_and_the_stages() -> None:
    spec = parse_client("residual-8-8x2.16x3.16-c4")
    body, _ = body_and_projection(build_client(spec, (1, 16, 16)))
    assert taps_of(spec) == [3, 5, 8]
    sides = [body[:at](torch.zeros(1, 1, 16, 16)).shape[-1] for at in taps_of(spec)]
    assert sides == [16, 16, 8]
