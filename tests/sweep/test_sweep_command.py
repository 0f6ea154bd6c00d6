"""`splitveil sweep` as a user meets it; the trials themselves take no time here."""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sweep.made import Instant, more_noise_hides_more, plan
from typer.testing import CliRunner

from splitveil.cli import app
from splitveil.commands import sweep as commands_sweep
from splitveil.errors import ConfigError
from splitveil.sweep.board import Board
from splitveil.sweep.journal import Entry
from splitveil.sweep.trial import Task
from splitveil.types import Json

WORDS = ("--defence", "none", "--defence", "noise", "--vary", "noise_std=0.1,0.2", "--profile",
         "smoke", "--attack", "linear")  # fmt: skip


def call(*words: str) -> Any:  # noqa: ANN401 - typer's result type is not public
    return CliRunner().invoke(app, ["sweep", *words])


def text(result: Any) -> str:  # noqa: ANN401
    """Everything printed, wrapped lines joined."""
    return re.sub(r"\s+", " ", result.output + result.stderr)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Instant]:
    """Every sweep runs at once, here; the engines it used."""
    engines: list[Instant] = []

    def picky(job: Json) -> Json:
        if job["options"].get("noise_std") == 0.3:
            raise RuntimeError("out of memory")
        return more_noise_hides_more(job)

    def start() -> Instant:
        engines.append(Instant(picky))
        return engines[-1]

    monkeypatch.setattr(commands_sweep, "engine_of", lambda *_: start)
    monkeypatch.chdir(tmp_path)
    return engines


def test_the_result_is_told_in_lines(quick: list[Instant]) -> None:
    result = call(*WORDS, "--trials", "3")
    assert result.exit_code == 0, text(result)
    lines = result.stdout.splitlines()
    assert lines[0] == (
        "6 trials on digits: 3 of each defence, sampler grid, seed 0, profile smoke; "
        "all numbers on validation images"
    )
    assert lines[3].split() == ["90.00", "0.800", "0.0100", "linear", "none", "seed=0"]
    assert "share covered from accuracy 0.1, leakage 1; 95 %, 1000 resamples" in text(result)
    assert "best privacy at ≤ 1 point below 90.00 %, the most accurate trial of none" in lines
    assert "  noise: no trial" in lines
    assert lines[-1] == "next: splitveil audit runs/sweep/trials/somewhere"
    assert re.search(r"noise\s+3/3\s+0\s+3\s+80.00\s+0.600", result.stderr)
    assert len(quick[0].jobs) == 6
    assert quick[0].jobs[0]["options"]["epochs"] == 15


def test_a_sweep_is_resumed_by_its_name_and_a_failure_is_named(quick: list[Instant]) -> None:
    words = (*WORDS[:4], "--vary", "noise_std=0.1,0.3", *WORDS[6:], "--set", "batch_size=64")
    first = call(*words, "--name", "mine", "--json")
    assert first.exit_code == 0, text(first)
    assert "noise/1 failed: RuntimeError: out of memory" in text(first)
    assert "what failed is tried again with --resume" in text(first)
    found = json.loads(first.stdout)
    assert found["defences"]["noise"]["failed"] == 1
    assert {j["options"]["batch_size"] for j in quick[0].jobs} == {64}
    again = call("--name", "mine", "--resume", "--json")
    assert again.exit_code == 0, text(again)
    assert json.loads(again.stdout) == found
    assert "tried again, because they failed: noise/1" in text(again)
    assert re.search(r"noise\s+2/2\s+1\s", again.stderr)
    assert len(quick[1].jobs) == 1
    more = call("--name", "mine", "--resume", "--trials", "3", "--json")
    assert len(json.loads(more.stdout)["trials"]) == 6
    assert len(quick[2].jobs) == 3
    # Neither fetches the data of another sweep first.
    assert "exists already" in text(call("--name", "mine", "--dataset", "npz:nowhere"))
    assert "cannot resume" in text(call("--name", "mine", "--resume", "--dataset", "npz:nowhere"))
    changed = call("--name", "mine", "--resume", "--trials", "3", "--seed", "7")
    assert changed.exit_code == 2
    assert "seed was 0, is 7" in text(changed)


def test_ctrl_c_says_how_the_sweep_goes_on(
    quick: list[Instant], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(engine: Instant) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Instant, "wait", interrupted)
        stopped = call(*WORDS)
    assert stopped.exit_code == 130
    assert "a sweep continues with --resume" in text(stopped)
    assert call("--resume").exit_code == 0
    assert len(quick[1].jobs) == 4


def test_a_sweep_that_is_finished_starts_no_worker(quick: list[Instant]) -> None:
    first = call(*WORDS, "--json")
    again = call("--resume", "--json")
    assert json.loads(again.stdout) == json.loads(first.stdout)
    assert "again" not in text(again)
    assert len(quick) == 1


def test_a_sweep_without_a_baseline_is_told_so(quick: list[Instant]) -> None:
    result = call("--defence", "veil", "--profile", "smoke", "--attack", "linear")
    assert result.exit_code == 0
    assert "no naive baseline takes part; add --defence none" in text(result)
    default = call("--profile", "smoke", "--name", "other", "--json")
    assert list(json.loads(default.stdout)["defences"]) == ["none", "noise", "veil"]
    assert "baseline" not in text(default)
    assert len(quick) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--vary", "lambda=1,2"), "unknown field of none, noise, veil 'lambda'"),
        (("--vary", "lambd=big"), "lambd must be a number, got 'big'"),
        (("--vary", "lambd=lin:1:1", "--trials", "2"), "is empty"),
        (("--vary", "lambd=log:0:1", "--trials", "2"), "a log range must start above 0"),
        (("--vary", "lambd=lin:0:1"), "--sampler optuna needs --trials"),
        (("--vary", "lambd=lin:0:1", "--sampler", "grid"), "a grid needs listed values"),
        (("--vary", "lambd=lin:0:1:100000000"), "from 2 to 10000 points of a range"),
        (
            ("--vary", "lambd=lin:0:1:9999", "--vary", "noise_std=lin:0.1:1:9999", "--trials", "2"),
            "has 99980001 points, and a defence has at most 10000 trials; take fewer values",
        ),
        (("--trials", "1000000000"), "trials must be from 1 to 10000 for each defence"),
        (("--sampler", "anneal"), "sampler must be one of grid, random, optuna, got 'anneal'"),
        (("--defence", "vell"), "unknown defence 'vell'; did you mean 'veil'?"),
        (("--engine", "slurm"), "unknown engine 'slurm'"),
        (("--address", "auto"), "add --engine ray"),
        (("--jobs", "0"), "jobs must be at least 1, got 0"),
        (("--trials", "0"), "trials must be from 1 to 10000 for each defence, got 0"),
        (("--epochs", "0"), "epochs must be at least 1, got 0"),
        (("--attack", "rmle"), "unknown attack of profile 'quick' 'rmle'"),
        (("--net", "client:strided-4-4.4.4.4.4-c1"), "needs images of at least 16×16"),
        (("--dataset", "digit"), "unknown dataset 'digit'"),
        (("--name", "a/b"), "name must be at most 200 letters"),
        (("--set", "seed=3"), "--set seed would change nothing in a sweep; use --seed"),
        (("--set", "runs_dir=here"), "use --runs-dir"),
        (("--resume",), "nothing to resume"),
    ],
)
def test_what_cannot_work_exits_with_2_before_anything_starts(
    words: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    result = call(*words, "--runs-dir", str(tmp_path))
    assert result.exit_code == 2, text(result)
    assert said in text(result)
    assert list(tmp_path.iterdir()) == []


def test_the_board_shows_what_runs_and_what_is_done() -> None:
    board = Board(plan(trials=2), [])
    board.started(Task(defence="noise", number=0, settings={"noise_std": 0.1}, seed=3))
    screen = Console(file=io.StringIO(), width=100)
    screen.print(board)
    assert isinstance(screen.file, io.StringIO)
    assert "noise/0 noise_std=0.1 seed=3" in re.sub(r"\s+", " ", screen.file.getvalue())
    board.finished(
        Entry(defence="noise", number=0, settings={"noise_std": 0.1}, seed=3, seconds=1.0,
              found={"accuracy": 0.5, "leakage": 0.25})
    )  # fmt: skip
    assert list(board.rows()) == [
        ("none", "0/2", "0", "0", "–", "–"),
        ("noise", "1/2", "0", "1", "50.00", "0.250"),
    ]
    screen.print(board)
    assert screen.file.getvalue().count("running") == 1
    for number, leakage in enumerate((-0.5, -0.1)):  # both count as 0, as in the result
        board.finished(
            Entry(defence="none", number=number, settings={}, seed=number, seconds=1.0,
                  found={"accuracy": 0.5, "leakage": leakage})
        )  # fmt: skip
    assert next(board.rows()) == ("none", "2/2", "0", "2", "50.00", "0.000")


def test_what_is_said_after_the_board_begins_a_line_of_its_own() -> None:
    screen = Console(file=io.StringIO(), width=100)
    with pytest.raises(KeyboardInterrupt), Board(plan(trials=2), []).live(screen):
        raise KeyboardInterrupt
    assert isinstance(screen.file, io.StringIO)
    assert screen.file.getvalue().endswith("\n")


def test_each_gpu_that_may_be_used_is_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert commands_sweep.visible_gpus() == ("3", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert commands_sweep.visible_gpus() == ("0", "1")


def test_ray_is_asked_for_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'splitveil\[sweep\]'"):
        commands_sweep.engine_of("ray", None, 1, plan(), tmp_path)
