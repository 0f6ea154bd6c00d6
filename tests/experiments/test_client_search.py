"""Ranking clients by trial: who competes, the score, and trials that are resumed or fail."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from splitveil.attacks.profiles import PROFILES
from splitveil.config.resolve import make_config
from splitveil.errors import ConfigError, RunError
from splitveil.experiments import runner
from splitveil.experiments.client_search import (
    contenders,
    rank_clients,
    ranked,
    score,
)
from splitveil.experiments.runner import validate_on_val
from splitveil.io import Json
from splitveil.nets.budget import candidates, weigh
from splitveil.nets.clients import FAMILIES, THIN_CLIENTS, parse_client
from splitveil.record.statistics import undominated
from splitveil.runs import load_run

IMAGE = (3, 32, 32)
TINY = {
    f"client:{spec}": weigh(parse_client(spec), (1, 8, 8))
    for spec in ("strided-4s2-4.8-c4", "strided-4s2-4-c1")
}
WIDE = {"client:strided-4-4.4.4.4.4-c1": next(iter(TINY.values()))}  # needs larger images


def test_named_nets_and_others_that_fit_compete() -> None:
    found = contenders(IMAGE, max_macs=21.9e6, wire_floats=512, top=6)
    names = list(found)
    assert names[:5] == ["thin-deep", "thin-mobilenet", "thin-resnet", "thin-strided", "vgg11"]
    vgg11 = found["vgg11"]
    assert (vgg11.macs, vgg11.params, vgg11.wire_floats) == (21_233_664, 85_256, 512)
    assert len(names) == 5 + 6
    specs = [parse_client(name.removeprefix("client:")) for name in names[5:]]
    kinds = [(s.family, s.downsampling) for s in specs]
    assert {family for family, _ in kinds} == set(FAMILIES)
    assert len(set(kinds)) == len(kinds)
    listed = {c.net: c for c in candidates(IMAGE, max_macs=21.9e6, wire_floats=512)}
    assert all(found[name] == listed[name] for name in names[5:])


@pytest.mark.parametrize(
    ("budget", "named"),
    [
        (
            {"max_macs": 20e6, "wire_floats": 512},
            {"thin-deep", "thin-resnet", "thin-strided"},
        ),
        ({"max_macs": 21.9e6, "wire_floats": 511}, set()),
        ({"max_macs": 21.9e6, "wire_floats": 512, "max_params": 100_000}, {"vgg11"}),
        ({"max_macs": 21.9e6, "wire_floats": 9999, "family": "residual"}, {"thin-resnet"}),
    ],
)
def test_named_nets_keep_the_budget_too(budget: dict[str, float], named: set[str]) -> None:
    found = contenders(IMAGE, **budget, top=2)  # type: ignore[arg-type]
    assert found.keys() & {*THIN_CLIENTS, "vgg11", "small"} == named
    assert all(e.macs <= budget["max_macs"] for e in found.values())
    assert all(e.wire_floats <= budget["wire_floats"] for e in found.values())
    assert len(found) == len(named) + 2


def test_small_images_have_the_small_net() -> None:
    state = torch.get_rng_state()
    found = contenders((1, 8, 8), max_macs=1e6, wire_floats=64, top=1)
    assert next(iter(found)) == "small"
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ConfigError, match="top must be at least 1, got 0"):
        contenders((1, 8, 8), max_macs=1e6, wire_floats=64, top=0)


@pytest.mark.parametrize(
    ("accuracy", "mse", "expected"),
    [(1.0, 0.05, 1.0), (1.0, 0.9, 1.0), (0.1, 0.05, 0.0), (0.0, 0.05, 0.0), (0.55, 0.025, 0.25)],
)
def test_the_score_at_ceiling_chance_and_halfway(
    accuracy: float, mse: float, expected: float
) -> None:
    assert score(accuracy, mse, 0.05, 10) == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=8))
def test_a_point_is_marked_exactly_when_nothing_beats_it(points: list[tuple[int, int]]) -> None:
    marks = undominated([(float(a), float(b)) for a, b in points])
    best = max(points)
    assert marks[points.index(best)]
    for (a, b), mark in zip(points, marks, strict=True):
        better = [(c, d) for c, d in points if (c > a and d >= b) or (c >= a and d > b)]
        assert mark == (not better)


def finding(net: str, accuracy: float, mse: float) -> Json:
    return {
        "net": net, "accuracy": accuracy, "mse": mse, "score": score(accuracy, mse, 0.05, 10),
    }  # fmt: skip


def test_the_best_score_stands_first() -> None:
    found = ranked([finding("c", 0.5, 0.01), finding("a", 0.9, 0.02), finding("b", 0.8, 0.04)])
    assert [(f["net"], f["pareto"]) for f in found] == [("b", True), ("a", True), ("c", False)]


def test_a_finished_client_is_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = {name: PROFILES["smoke"][name] for name in ("mean", "class-mean", "linear")}
    monkeypatch.setattr(runner, "ranking_attacks", lambda *_: linear)
    config = make_config({"dataset": "digits", "epochs": 1, "runs_dir": str(tmp_path)})
    first, failed = rank_clients(WIDE | TINY, config, "smoke")
    assert {c["net"] for c in first} == TINY.keys()
    assert failed.keys() == WIDE.keys()
    assert "needs images of at least 16×16" in failed[next(iter(WIDE))]
    assert (scores := [c["score"] for c in first]) == sorted(scores)[::-1]

    run = load_run(first[0]["run"])
    assert run.path.parent == tmp_path / "advisor"
    saved = json.loads((run.path / "trial.json").read_text(encoding="utf-8"))["found"]
    assert saved == validate_on_val(run, linear)
    assert first[0]["leakage"] == 1 - saved["mse"] / saved["ceiling"]

    def forbidden(*_: object, **__: object) -> None:
        raise RuntimeError("a finished trial was trained again")

    monkeypatch.setattr(runner, "fit", forbidden)
    assert rank_clients(TINY, config, "smoke") == (first, {})
    (run.path / "trial.json").write_text("{", encoding="utf-8")
    _, broken = rank_clients(TINY, config, "smoke")
    assert list(broken.values()) == ["a finished trial was trained again"]
    with pytest.raises(RunError, match=r"every trial failed: .*trained again"):
        rank_clients(TINY, replace(config, seed=3), "smoke")
