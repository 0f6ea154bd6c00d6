"""Training of an early exit: what it prints, targets out of reach, a penalty's weights."""

import json
import math
from pathlib import Path

import pytest
import torch
from cli.calling import call, text
from short_runs import config

import splitveil as sv
from splitveil.nets.exit import Exit
from splitveil.record.files import last_epoch
from splitveil.train.state import CHECKPOINT, read_checkpoint

ONE = ("train", "--dataset", "digits", "--device", "cpu", "--epochs", "1", "--defence")


def test_training_says_what_the_rule_does_beside_what_the_server_alone_does(
    tmp_path: Path,
) -> None:
    result = call(*ONE, "early-exit", "--runs-dir", tmp_path, "--name", "e", "--set", "send=0.25")
    assert result.exit_code == 0, text(result)
    last = last_epoch(tmp_path / "e")
    assert last["val_sent"] == pytest.approx(0.25, abs=0.01)
    for share, words in (
        ("val_accuracy", "with everything sent"),
        ("val_rule_accuracy", "under the exit rule, which sends"),
        ("val_own_accuracy", "with nothing sent"),
    ):
        assert f"{100 * last[share]:.2f} % {words}" in text(result)


def test_a_target_that_cannot_be_reached_keeps_the_run_and_says_the_best(tmp_path: Path) -> None:
    words = ("--runs-dir", tmp_path, "--name", "e", "--set", "target_accuracy=0.9999")
    result = call(*ONE, "early-exit", *words)
    assert result.exit_code == 2, text(result)
    assert "target accuracy 0.9999 cannot be reached: the best on the validation images" in text(
        result
    )
    assert "is kept, and sends every image" in text(result)
    run = sv.load_run(tmp_path / "e")
    assert run.model.exit is not None
    assert set(run.model.exit.thresholds.tolist()) == {math.inf}


def test_a_target_of_nothing_sends_nothing(tmp_path: Path) -> None:
    run = sv.fit(config(tmp_path, "early-exit", epochs=1, settings={"target_accuracy": 0.01}))
    assert last_epoch(run.path)["val_sent"] == 0


def test_row_weights_have_mean_one_and_grow_with_doubt() -> None:
    draws = torch.Generator().manual_seed(0)
    own = 2 * torch.randn(50, 4, generator=draws)
    for focus in (0.0, 0.5, 1.0):
        rule = Exit(torch.nn.Identity(), 4, focus=focus)
        weights = rule.row_weights(own)
        assert float(weights.mean()) == pytest.approx(1, abs=1e-6)
        least = own.softmax(1).amax(1).argsort()
        assert bool((weights[least].diff() <= 1e-6).all())
    sure = torch.tensor([[1e9, 0.0]]).expand(3, 2)
    assert Exit(torch.nn.Identity(), 2, focus=1.0).row_weights(sure).tolist() == [1.0] * 3


def weights_of(folder: Path, name: str, **settings: float) -> bytes:
    run = sv.fit(
        config(folder, "early-exit+veil", epochs=1, name=name, device="cpu", settings=settings)
    )
    part = read_checkpoint(run.path / CHECKPOINT).part("model")
    assert all(bool(v.isfinite().all()) for k, v in part.items() if "thresholds" not in k)
    return json.dumps({k: v.tolist() for k, v in part.items()}).encode()


@pytest.mark.slow
def test_a_focused_penalty_of_weight_0_leaves_no_trace(tmp_path: Path) -> None:
    plain = weights_of(tmp_path, "a", lambd=0.0)
    assert weights_of(tmp_path, "b", lambd=0.0, penalty_focus=1.0) == plain
    heavy = {"lambd": 3.0, "attention_warmup_epochs": 0}
    assert weights_of(tmp_path, "c", **heavy) != weights_of(
        tmp_path, "d", **heavy, penalty_focus=1.0
    )
