"""Pictures of why a defence works: arrays that agree with the surrogate, words for what is not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

import splitveil as sv
from splitveil.cli.app import app
from splitveil.config.resolve import DataFacts, plan_of
from splitveil.defences.catalogue import DEFENCES
from splitveil.insight import explanation
from splitveil.insight.explanation import (
    Gates,
    Groups,
    SampleWeights,
    Story,
    panels,
    summary,
)
from splitveil.insight.pictures import (
    attention_heatmap,
    class_maps,
    class_variance,
    gate_histogram,
    group_images,
    group_mass,
    sample_size_over_time,
    share_above,
    sorted_profile,
    variance_against_noise,
    weighted_samples,
)
from splitveil.nets.split import cut
from splitveil.record.files import RunFiles, read_run
from splitveil.report.flow_chart import FlowStep, draw_flow_chart, run_flow
from splitveil.report.words import Sentence, sentence
from splitveil.train.state import load_module, read_checkpoint

Train = Callable[..., sv.Run]
AT_ONCE = {"attention_warmup_epochs": 0, "skip_first_epoch": False}
MODEL = cut(nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Linear(32, 10)), at=2)
DATA = DataFacts(image_shape=(1, 8, 8), num_classes=10, data_hash="")


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Tiny runs, each trained once."""
    kept: dict[str, sv.Run] = {}
    folder = tmp_path_factory.mktemp("runs")

    def made(defence: str, epochs: int = 1, **settings: Any) -> sv.Run:  # noqa: ANN401
        name = f"{defence}-{len(settings)}"
        if name not in kept:
            config = sv.RunConfig(defence=defence, epochs=epochs, device="cpu", name=name,
                                  runs_dir=str(folder), settings=settings)  # fmt: skip
            kept[name] = sv.fit(config)
        return kept[name]

    return made


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few images: the maps are the slow part."""
    monkeypatch.setattr(explanation, "LIMIT", 120)
    monkeypatch.setattr(explanation, "MAPPED", 40)


def story_of(run: sv.Run) -> Story:
    return explanation.tell(run, *run.data())


def judged(run: sv.Run, story: Story) -> dict[str, torch.Tensor]:
    """What the run's own surrogate says of the same samples, in eval mode."""
    surrogate = plan_of(run.config, run.built).build().surrogate
    assert surrogate is not None
    saved = read_checkpoint(run.path / "checkpoint.safetensors").part("surrogate")
    load_module(surrogate, saved, "surrogate")
    said: dict[str, torch.Tensor] = surrogate.eval()(
        torch.from_numpy(story.z), torch.from_numpy(story.labels)
    ).diagnostics
    return said


@pytest.mark.usefixtures("small")
def test_weights_and_gates_are_those_of_the_trained_attention(train: Train) -> None:
    run = train("gated-att", **AT_ONCE)
    story = story_of(run)
    said = judged(run, story)
    assert isinstance(story.attention, SampleWeights)
    assert isinstance(story.gates, Gates)
    count = np.bincount(story.labels, minlength=10)[story.labels]
    weights = said["attention_weights"].numpy()
    np.testing.assert_allclose(story.attention.relative, weights * count, rtol=1e-5)
    assert story.gates.soft.mean() == pytest.approx(float(said["soft_gate"]), rel=1e-4)
    assert story.gates.hard.mean() == pytest.approx(float(said["hard_gate"]), rel=1e-4)
    assert story.groups == sentence("explain.one-pool")
    assert len(story.labels) == 120


@pytest.mark.usefixtures("small")
def test_slots_on_the_page_are_those_of_the_trained_surrogate(train: Train, tmp_path: Path) -> None:
    run = train("slot-cross", early_shut_steps=0, **AT_ONCE)
    story = story_of(run)
    said = judged(run, story)
    assert isinstance(story.groups, Groups)
    assert isinstance(story.gates, Gates)
    np.testing.assert_allclose(story.groups.resp, said["attention_weights"].numpy(), rtol=1e-5)
    mass = group_mass(story.groups.resp, story.labels, 10)
    assert mass.min(1).mean() == pytest.approx(float(said["slot_mass_min"]), rel=1e-4)
    assert mass.max(1).mean() == pytest.approx(float(said["slot_mass_max"]), rel=1e-4)
    assert story.gates.soft.mean() == pytest.approx(float(said["soft_gate"]), rel=1e-4)
    assert story.gates.hard.mean() == pytest.approx(float(said["hard_gate"]), rel=1e-4)
    assert story.gates.limits == (0.6, 0.5)

    result = CliRunner().invoke(app, ["explain", str(run.path), "--out", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    said_json = json.loads(result.stdout)
    files = {Path(f).name for f in said_json["files"]}
    assert files == {
        "explain.html", "flow.png", "attention-classes.png", "attention-samples.png",
        "curves.png", "sample-size.png", "gates.png", "slot-images.png", "variance.png", "map.png",
    }  # fmt: skip
    assert {p.name for p in tmp_path.iterdir()} == files
    page = (tmp_path / "explain.html").read_text(encoding="utf-8")
    assert page.count('<img alt="') == 9
    assert page.count("<script") == 1  # the page's own, allowed by its hash
    assert not any(word in page for word in ("http:", "https:", "url("))
    assert said_json["why"].startswith("Nobody knows what it leaks")
    assert said_json["numbers"]["not_drawn"] == []


@pytest.mark.usefixtures("small")
def test_an_undefended_run_says_what_it_lacks_in_the_same_bytes(
    train: Train, tmp_path: Path
) -> None:
    run = train("none")
    first, numbers = explanation.explain_run(run.path, tmp_path / "a")
    again, _ = explanation.explain_run(run.path, tmp_path / "b")
    assert [p.name for p in first] == [
        "explain.html", "variance.png", "flow.png", "curves.png", "map.png",
    ]  # fmt: skip
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in again]
    page = first[0].read_text(encoding="utf-8")
    assert page.count('class="note"') == 4  # weights, sample size, gates, slots
    assert page.count("<details") == 8  # these, what to change, the flow, the curves and the map
    assert page.count("has no surrogate") == 3
    assert "share_above_noise" not in numbers


@pytest.mark.usefixtures("small")
def test_clusters_are_shown_as_slots_and_a_zero_penalty_is_named(train: Train) -> None:
    story = story_of(train("cem", epochs=2))
    assert isinstance(story.groups, Groups)
    assert story.groups.kind == "cluster"
    assert (story.groups.resp.sum(1) == 1).all()
    assert isinstance(story.attention, Sentence)
    off = story_of(train("veil", lambd=0.0))
    assert (off.attention, off.gates) == (sentence("explain.off"),) * 2
    assert off.flow.penalty == ()


def test_a_foreign_folder_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["explain", str(tmp_path)])
    assert result.exit_code == 2
    assert "it has no config.toml" in " ".join(result.output.split())


@pytest.mark.parametrize("defence", sorted(DEFENCES))
def test_the_flow_of_every_defence_can_be_drawn(defence: str) -> None:
    preset = DEFENCES[defence]
    config = {"net": "small", "noise_std": 0.05, "defence": defence} | preset.settings()
    flow = run_flow(config, MODEL, DATA, (FlowStep("noise", ("std=0.05",)),), statistic="raw")
    assert [box.title for box in flow.wire] == [
        "image", "client", "noise", "wire", "server", "answer",
    ]  # fmt: skip
    assert bool(flow.penalty) == ("lambd" in preset.settings())
    if flow.penalty:
        assert f"λ = {config['lambd']:g}" in flow.penalty[-1].lines
    assert draw_flow_chart(flow).startswith(b"\x89PNG")


def test_the_flow_says_what_is_set() -> None:
    config = {"net": "vgg11", "noise_std": 0.1, **DEFENCES["slot-cross"].settings()}
    changed = config | {"lambd": 3.0, "ramp": 0.25, "num_slots": 5}
    flow = run_flow(changed, MODEL, DATA, (), statistic="layernorm")
    assert [box.lines for box in flow.wire if box.title != "channel"] == [
        ("1×8×8",),
        ("net vgg11", "2,080 parameters", "2,048 MACs"),
        ("32 numbers", "128 bytes"),
        ("330 parameters",),
        ("10 classes", "cross-entropy"),
    ]
    said = {box.title: box.lines for box in flow.penalty}
    assert list(said) == ["statistic", "slots", "gates", "shut off while", "weight"]
    assert "5 per class, 3 rounds" in said["slots"]
    assert "τ = 0.0013" in said["gates"]  # .125 · .1² = .00125
    assert said["weight"] == (
        "λ = 3", "scale = 0.25", "w = 0.001/lr", "ramp over 25 %", "from epoch 4",
    )  # fmt: skip
    assert flow.wire[2] == FlowStep("channel", ("sends z as it is",))
    assert flow.back.startswith("gradient × 0.75 · w to the client")
    rate = run_flow(config | {"penalty": "rate"}, MODEL, DATA, (), statistic="raw")
    assert [box.title for box in rate.penalty] == ["statistic", "slots", "rate", "weight"]


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(-5, 5)), min_size=1, max_size=12))
def test_variance_within_classes_is_that_of_a_loop(rows: list[tuple[int, float]]) -> None:
    y, z = np.array([r[0] for r in rows]), np.array([[r[1]] for r in rows])
    slow = 0.0
    for label, value in rows:
        own = [v for other, v in rows if other == label]
        slow += (value - sum(own) / len(own)) ** 2 / len(rows)
    assert class_variance(z, y)[0] == pytest.approx(slow, abs=1e-9)


def test_share_above_counts_dimensions_louder_than_the_noise() -> None:
    assert share_above(np.array([0.1, 0.01, 0.001, 0.0]), 0.05) == 0.5  # σ² = .0025


def test_a_profile_falls_from_the_heaviest_to_the_lightest() -> None:
    assert sorted_profile(np.array([0.5, 2.0, 0.5]), 6).tolist() == [2.0, 2.0, 0.5, 0.5, 0.5, 0.5]


def logged(folder: Path, *entries: dict[str, float]) -> RunFiles:
    """A run of which there is a log alone."""
    lines = [{"kind": "epoch", "epoch": at} | entry for at, entry in enumerate(entries, start=1)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return read_run(folder, audited=False)


def test_strange_arrays_are_drawn_too(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 30, 90)
    names = [f"a class $called$ {i} 数" for i in range(30)]
    images = rng.integers(0, 255, (90, 3, 5, 5)).astype(np.uint8)
    resp = rng.dirichlet([0.2] * 12, 90)
    one = np.ones(1)
    made = (
        attention_heatmap(rng.lognormal(0, 2, 90), y, names),
        weighted_samples(rng.lognormal(0, 2, 90), y, images, names),
        weighted_samples(one, np.zeros(1, dtype=int), images[:1], names),
        group_images(resp, y, images, names),
        gate_histogram(np.zeros((2, 3)), np.ones((2, 3))),
        variance_against_noise(np.zeros(1), one, 0.0),
        class_maps([("only", rng.normal(size=(90, 2)))], y, names),
        sample_size_over_time(logged(tmp_path, {"effective_sample_size": 0.5, "shut": 1.0}), 0.1),
    )
    assert all(png.startswith(b"\x89PNG") for png in made)


def test_the_numbers_of_a_story_are_plain_json(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(20) % 2
    story = Story(
        flow=run_flow({"net": "small"}, MODEL, DATA, ()),
        images=np.zeros((20, 1, 4, 4), dtype=np.uint8), labels=y, classes=("a", "b"),
        z=rng.normal(size=(20, 3)), noise_std=0.5, maps=(("before", rng.normal(size=(8, 2))),),
        files=logged(tmp_path), per_class=10.0,
        attention=sentence("explain.off"), gates=sentence("explain.off"),
        groups=Groups(resp=np.eye(2)[y], kind="slot"),
    )  # fmt: skip
    found = summary(story)
    assert json.loads(json.dumps(found)) == found
    assert found["slot_mass"] == {"min": 0.0, "max": 1.0}
    assert found["share_above_noise"] == share_above(class_variance(story.z, y), 0.5)
    assert [p.file for p in panels(story) if p.png] == [
        "flow.png", "slot-images.png", "variance.png", "map.png",
    ]  # fmt: skip
