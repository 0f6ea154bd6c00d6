"""`splitveil sweep` as a user meets it; the trials themselves take no time here."""

import csv
import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from experiments.made import Instant, no_memory_at
from rich.console import Console
from typer.testing import CliRunner

from splitveil.cli.app import app
from splitveil.config.run_config import RunConfig
from splitveil.experiments.runner import LiveTable, Trial

WORDS = ("--defence", "none", "--defence", "noise", "--vary", "noise_std=0.1,0.2", "--profile",
         "smoke", "--attack", "linear")  # fmt: skip


def call(*words: str) -> Any:  # noqa: ANN401 - typer's result type is not public
    return CliRunner().invoke(app, ["sweep", *words])


def text(result: Any) -> str:  # noqa: ANN401
    """Everything printed, wrapped lines joined."""
    return re.sub(r"\s+", " ", result.output + result.stderr)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Instant:
    """Every trial is over at once."""
    monkeypatch.chdir(tmp_path)
    return Instant(monkeypatch, no_memory_at(0.3))


def shown(path: str) -> str:
    """A page, with plain spaces where its lines must not break."""
    return Path(path).read_text(encoding="utf-8").replace("\u00a0", " ")


def test_the_result_is_told_in_lines(quick: Instant) -> None:
    result = call(*WORDS, "--trials", "3")
    assert result.exit_code == 0, text(result)
    lines = result.stdout.splitlines()
    assert lines[0] == (
        "6 trials on digits: 3 of each defence, sampler grid, seed 0, profile smoke; "
        "all numbers on validation images"
    )
    assert lines[2].split() == ["acc", "%", "leakage", "MSE", "attack", "defence", "trial"]
    assert lines[3].split() == ["90.00", "0.800", "0.0100", "linear", "none", "seed=0"]
    assert "share covered from accuracy 0.1, leakage 1" in text(result)
    assert "best privacy at ≤ 1 point below 90.00 %, the most accurate trial of none" in lines
    none, noise = (line.split() for line in lines[-6:-4])
    assert lines[-4:-1] == [
        "page: runs/sweep/sweep.html", "plot: runs/sweep/sweep.png",
        "every trial: runs/sweep/trials.csv",
    ]  # fmt: skip
    assert Path("runs/sweep/sweep.svg").is_file()
    page = shown("runs/sweep/sweep.html")
    assert "At most 1 point below the 90.0 % of “none”, “none” exposes the least: 80 %" in page
    assert "No trial of these keeps the accuracy: noise." in page
    assert "smoke audit: not for claims" in page
    assert len(page) < 1_000_000
    with Path("runs/sweep/trials.csv").open(encoding="utf-8", newline="") as file:
        trials = list(csv.DictReader(file))
    assert [row["trial"] for row in trials] == [
        f"{d}/{n}" for n in range(3) for d in ("none", "noise")
    ]
    assert [float(row["set.noise_std"]) for row in trials if row["defence"] == "noise"] == [
        0.1,
        0.2,
        0.1,
    ]
    assert all(
        float(row["leakage"]) == pytest.approx(float(row["accuracy"]) - 0.1) for row in trials
    )
    assert none[:5] == ["none", "0/3", "0.178", "90.00", "0.800"]
    assert noise[:2] + noise[3:] == ["noise", "0/3", "–", "–", "–", "–", "no", "trial"]
    assert lines[-1].startswith("next: splitveil audit runs/sweep/trials/digits-none-")
    board = re.search(
        r"noise .* 3/3 .* 0 failed, best acc 80.00 %, least leakage 0.600", text(result)
    )
    assert board, result.stderr
    assert [c.epochs for c in quick.configs] == [15] * 6


def test_a_sweep_is_resumed_by_its_name(quick: Instant) -> None:
    words = (*WORDS[:4], "--vary", "noise_std=0.1,0.3", *WORDS[6:], "--set", "batch_size=64")
    first = call(*words, "--name", "mine", "--json")
    assert first.exit_code == 3, text(first)  # a trial failed
    assert "noise/1 failed: RuntimeError: out of memory" in text(first)
    assert "--resume tries again what failed" in text(first)
    found = json.loads(first.stdout)
    assert found["defences"]["noise"]["failed"] == 1
    assert {c.batch_size for c in quick.configs} == {64}
    quick.configs.clear()
    again = call("--name", "mine", "--resume", "--json")
    assert again.exit_code == 3, text(again)
    assert json.loads(again.stdout) == found
    assert "trying again what failed: noise/1" in text(again)
    assert re.search(r"noise .* 2/2 .* 1 failed", text(again))
    assert len(quick.configs) == 1
    more = call("--name", "mine", "--resume", "--trials", "3", "--json")
    assert len(json.loads(more.stdout)["trials"]) == 6
    assert len(quick.configs) == 1 + 3
    # Neither fetches the data of another sweep first.
    assert "exists already" in text(call("--name", "mine", "--dataset", "npz:nowhere"))
    assert "cannot resume" in text(call("--name", "mine", "--resume", "--dataset", "npz:nowhere"))
    changed = call("--name", "mine", "--resume", "--trials", "3", "--seed", "7")
    assert changed.exit_code == 2
    assert "seed was 0, is 7" in text(changed)


def test_ctrl_c_says_how_the_sweep_goes_on(quick: Instant, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(config: RunConfig) -> tuple[float, float]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(quick, "work", interrupted)
        stopped = call(*WORDS)
    assert stopped.exit_code == 130
    assert "To continue, add --resume" in text(stopped)
    assert call("--resume").exit_code == 0
    assert len(quick.configs) == 1 + 4


def test_a_sweep_that_is_finished_trains_nothing(quick: Instant) -> None:
    first = call(*WORDS, "--json")
    again = call(*WORDS[:-2], "--attacks", "linear", "--resume", "--json")  # as 0.2.0 names them
    assert json.loads(again.stdout) == json.loads(first.stdout)
    assert "again" not in text(again)
    assert len(quick.configs) == 4


def test_a_sweep_that_learned_nothing_praises_no_trial(
    quick: Instant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick, "work", lambda _: (0.11, -0.4))
    said = call(*WORDS, "--lang", "zh")
    assert said.exit_code == 0, text(said)
    page = shown("runs/sweep/sweep.html")
    assert "没有一次试验学得足够好，无法比较：最好的准确率是 11.0 %，乱猜是 10.0 %。" in page
    assert "暴露最少" not in page


def test_a_trial_at_chance_is_on_no_front(quick: Instant, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = {None: (0.9, 0.8), 0.1: (0.88, 0.3), 0.2: (0.12, -0.2)}
    monkeypatch.setattr(quick, "work", lambda config: dead[config.noise_std])
    said = call(*WORDS, "--json")
    found = json.loads(said.stdout)
    assert {row["leakage"] for row in found["front"]} == {0.8, 0.3}
    assert found["at_chance"] == ["noise/1"]
    assert "the front leaves them out: noise/1" in shown("runs/sweep/sweep.html")
    told = text(call(*WORDS, "--resume"))
    assert "not on the front, because hardly better than guessing: noise/1" in told


def test_a_sweep_without_a_baseline_warns(quick: Instant) -> None:
    result = call("--defence", "veil", "--profile", "smoke", "--attack", "linear")
    assert result.exit_code == 0
    assert "no baseline to compare with; add --defence none" in text(result)
    default = call("--profile", "smoke", "--name", "other", "--json")
    assert list(json.loads(default.stdout)["defences"]) == ["none", "noise", "veil"]
    assert "baseline" not in text(default)
    assert len(quick.configs) == 1 + 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--vary", "lamda=1,2"), "unknown setting of none, noise, veil 'lamda'"),
        (("--vary", "lambd=big"), "lambd must be a number, got 'big'"),
        (("--vary", "lambd=lin:1:1", "--trials", "2"), "the low end must be below"),
        (("--vary", "lambd=log:0:1", "--trials", "2"), "a log range must start above 0"),
        (("--vary", "lambd=lin:0:1"), "--sampler optuna needs --trials"),
        (("--vary", "lambd=lin:0:1", "--sampler", "grid"), "must know how many values of lambd"),
        (("--vary", "lambd=lin:0:1:100000000"), "the count must be from 2 to 10000"),
        (
            ("--vary", "lambd=lin:0:1:9999", "--vary", "noise_std=lin:0.1:1:9999", "--trials", "2"),
            "has 99980001 points, but a defence has at most 10000 trials; list fewer values",
        ),
        (("--trials", "1000000000"), "trials must be in [1, 10000]"),
        (("--sampler", "anneal"), "sampler must be one of grid, random, optuna, got 'anneal'"),
        (("--defence", "vell"), "unknown defence 'vell'; did you mean 'veil'?"),
        (("--engine", "slurm"), "'slurm' is not one of"),
        (("--address", "auto"), "add --engine ray"),
        (("--engine", "ray", "--address", "127.0.0.1:1"), "nobody answers at '127.0.0.1:1'"),
        (("--jobs", "0"), "jobs must be at least 1, got 0"),
        (("--trials", "0"), "trials must be in [1, 10000], got 0"),
        (("--epochs", "0"), "epochs must be at least 1, got 0"),
        (("--attack", "rmle"), "unknown attack of profile 'quick' 'rmle'"),
        (("--net", "client:strided-4-4.4.4.4.4-c1"), "needs images of at least 16×16"),
        (("--dataset", "digit"), "unknown dataset 'digit'"),
        (("--name", "a/b"), "name must start with a letter or digit"),
        (("--set", "seed=3"), "--set seed does not work in a sweep; use --seed"),
        (("--set", "runs_dir=here"), "use --runs-dir"),
        (("--resume",), "nothing to resume"),
    ],
)
def test_a_bad_sweep_exits_with_2_before_it_starts(
    words: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    result = call(*words, "--runs-dir", str(tmp_path))
    assert result.exit_code == 2, text(result)
    assert said in text(result)
    assert list(tmp_path.iterdir()) == []


def made(label: str, **settings: float) -> Trial:
    return Trial(label=label, config=RunConfig(seed=3), settings=settings)


def test_the_table_shows_what_runs_and_what_is_done() -> None:
    screen = Console(file=io.StringIO(), width=100)
    table = LiveTable(screen)

    def seen() -> str:
        assert isinstance(screen.file, io.StringIO)
        screen.file.truncate(screen.file.seek(0))
        screen.print(table)
        return re.sub(r"[\s━╸╺]+", " ", screen.file.getvalue())

    table.expect({"none": 2, "noise": 2})
    told = table.begin(made("noise/0", noise_std=0.1))
    assert "noise/0 noise_std=0.1 seed=3" in seen()
    told(1, 4, "epoch 1/4")
    assert re.search(r"noise/0 \S+ \S+ 1/4 \S+ s epoch 1/4", seen())

    def end(label: str, **found: float) -> None:
        error = None if found else "no"
        table.finish(replace(made(label), found=found or None, error=error))

    end("noise/0", accuracy=0.5, leakage=0.25)
    shown = seen()
    assert "noise/0" not in shown
    assert re.search(r"none 0/2 \S+ s noise", shown)
    assert re.search(r"noise 1/2 \S+ s 0 failed, best acc 50.00 %, least leakage 0.250", shown)
    end("none/0", accuracy=0.4, leakage=-0.5)  # counts as 0, as in the result
    end("none/1", accuracy=0.5, leakage=-0.1)
    end("noise/1")
    shown = seen()
    assert re.search(r"none 2/2 \S+ s 0 failed, best acc 50.00 %, least leakage 0.000", shown)
    assert re.search(r"noise 2/2 \S+ s 1 failed, best acc 50.00 %, least leakage 0.250", shown)


def test_without_a_terminal_a_line_tells_that_a_trial_has_ended() -> None:
    screen = Console(file=io.StringIO(), width=40)
    with LiveTable(screen) as table:
        table.expect({"none": 1, "noise": 1})
        table.begin(made("none/0"))
        table.finish(replace(made("none/0"), found={"accuracy": 0.5, "leakage": 0.25}))
        table.expect({"veil": 1})
        table.begin(made("noise/0"))
        table.finish(replace(made("noise/0"), error="no"))
        assert isinstance(screen.file, io.StringIO)
        told = screen.file.getvalue()
    lines = [re.sub("after [0-9.]+ s ", "", line) for line in told.splitlines()]
    assert lines == ["1 of 2  none/0: acc 50.00 %, leakage 0.250", "2 of 3  noise/0: failed"]


def test_a_message_after_the_table_has_its_own_line() -> None:
    screen = Console(file=io.StringIO(), width=100)
    with pytest.raises(KeyboardInterrupt), LiveTable(screen):
        raise KeyboardInterrupt
    assert isinstance(screen.file, io.StringIO)
    assert screen.file.getvalue().endswith("\n")


@pytest.mark.parametrize("words", [("--engine", "ray"), ("--jobs", "2")])
def test_ray_is_asked_for_before_anything_starts(
    words: tuple[str, ...], quick: Instant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    result = call(*WORDS, *words)
    assert result.exit_code == 2
    assert "pip install 'splitveil[sweep]'" in text(result)
    assert list(tmp_path.iterdir()) == []
    assert quick.configs == []
