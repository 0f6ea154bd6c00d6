"""The sweep itself with trials that take no time: budgets, proposals, failures, resuming."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from experiments.made import Instant, found, more_noise_hides_more, no_memory_at, plan

from splitveil.config.run_config import RunConfig
from splitveil.errors import ConfigError, RunError, SplitVeilError
from splitveil.experiments import search
from splitveil.experiments.runner import Trial, run_many
from splitveil.experiments.search import (
    SearchPlan,
    check_plan,
    check_sweep_folder,
    make_plan,
    read_plan,
    run_sweep,
)
from splitveil.io import Json, folder_lock

WIDE = "client:strided-4-4.4.4.4.4-c1"


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> Instant:
    return Instant(monkeypatch)


def told(result: Json) -> list[tuple[str, Json, int]]:
    return sorted((row["trial"], row["settings"], row["seed"]) for row in result["trials"])


def test_every_defence_has_the_same_number_of_trials(instant: Instant, tmp_path: Path) -> None:
    result = run_sweep(plan(seed=4), tmp_path / "s")
    assert told(result) == [
        ("noise/0", {"noise_std": 0.1}, 4),
        ("noise/1", {"noise_std": 0.2}, 4),
        ("noise/2", {"noise_std": 0.1}, 5),
        ("none/0", {}, 4),
        ("none/1", {}, 5),
        ("none/2", {}, 6),
    ]
    assert result["plan"]["attacks"] == ["linear"]
    first = instant.configs[0]
    assert (first.dataset, first.epochs, first.defence, first.seed) == ("digits", 1, "none", 4)
    assert first.runs_dir == str(tmp_path / "s" / "trials")
    assert [c.defence for c in instant.configs] == ["none", "noise"] * 3  # in turns


def test_a_large_grid_is_sampled_without_repeats(instant: Instant, tmp_path: Path) -> None:
    made = plan(defences=("noise",), vary=("noise_std=lin:0.01:0.2:20",), trials=5)

    def chosen(name: str, asked: SearchPlan) -> list[float]:
        return [row["settings"]["noise_std"] for row in run_sweep(asked, tmp_path / name)["trials"]]

    first = chosen("a", made)
    assert first == chosen("b", made)
    assert len(set(first)) == 5
    assert set(first) != set(chosen("c", plan(**vars(made) | {"seed": 1})))
    assert len(instant.configs) == 15


@pytest.mark.parametrize("sampler", ["random", "optuna"])
def test_an_interruption_does_not_change_the_proposals(
    sampler: str, instant: Instant, tmp_path: Path
) -> None:
    made = plan(
        defences=("noise", "veil"),
        vary=("lambd=log:0.01:1", "noise_std=lin:0.01:0.2", "batch_size=64,128"),
        trials=8,
        sampler=sampler,
    )
    whole = told(run_sweep(made, tmp_path / "whole"))
    assert len({json.dumps(t[1]) for t in whole}) == 16
    assert all(t[1].keys() == {"lambd", "noise_std", "batch_size"} for t in whole if "veil" in t[0])
    instant.configs.clear()

    def until_seven(config: RunConfig) -> tuple[float, float]:
        if len(instant.configs) == 8:
            raise KeyboardInterrupt
        return more_noise_hides_more(config)

    instant.work = until_seven
    with pytest.raises(KeyboardInterrupt):
        run_sweep(made, tmp_path / "cut")
    instant.work = more_noise_hides_more
    instant.configs.clear()
    assert told(run_sweep(made, tmp_path / "cut", resume=True)) == whole
    assert len(instant.configs) == 16 - 7
    other = told(run_sweep(plan(**vars(made) | {"seed": 1}), tmp_path / "other"))
    assert [t[1] for t in other] != [t[1] for t in whole]


def test_optuna_learns_where_the_front_is(instant: Instant, tmp_path: Path) -> None:
    def peak(config: RunConfig) -> tuple[float, float]:
        off = abs((config.noise_std or 0.0) - 0.15)
        return 0.9 - off, 0.1 + off

    instant.work = peak
    made = plan(defences=("noise",), vary=("noise_std=lin:0:1",), trials=30, sampler="optuna")
    rows = run_sweep(made, tmp_path / "s")["trials"]
    off = [abs(row["settings"]["noise_std"] - 0.15) for row in rows]
    at_random = (0.15**2 + 0.85**2) / 2  # mean distance of a uniform draw
    assert sum(off[10:]) / 20 < 0.6 * at_random


def test_optuna_knows_of_running_trials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = plan(defences=("noise",), vary=("noise_std=lin:0.01:1",), trials=12, sampler="optuna")
    told_of: list[tuple[int, int]] = []
    real = search._ask_optuna

    def watched(*asked: Any) -> Json:  # noqa: ANN401
        known = asked[-1]
        told_of.append((len(known), sum(trial.found is not None for trial in known)))
        return real(*asked)

    def two_at_a_time(trials: Iterator[Trial], *_: object, **__: object) -> Iterator[Trial]:
        running = [next(trials), next(trials)]
        while running:
            one = running.pop(0)
            numbers = found(*more_noise_hides_more(one.config))
            yield replace(one, found=numbers)
            running += [more for more in [next(trials, None)] if more is not None]

    monkeypatch.setattr(search, "_ask_optuna", watched)
    monkeypatch.setattr(search, "run_many", two_at_a_time)
    result = run_sweep(made, tmp_path / "s")
    assert told_of == [(0, 0), *((n, n - 1) for n in range(1, 12))]
    assert len({json.dumps(row["settings"]) for row in result["trials"]}) == 12
    assert run_many is not two_at_a_time


def test_a_failing_trial_is_recorded(instant: Instant, tmp_path: Path) -> None:
    instant.work = no_memory_at(0.2)
    result = run_sweep(plan(vary=("noise_std=0.1,0.2,0.3",)), tmp_path / "s")
    assert len(instant.configs) == len(result["trials"]) == 6
    failed = [(row["trial"], row["error"]) for row in result["trials"] if "error" in row]
    assert failed == [("noise/1", "RuntimeError: out of memory")]
    assert result["defences"]["noise"]["failed"] == 1


@pytest.mark.parametrize("sampler", ["grid", "random", "optuna"])
def test_a_resumed_sweep_tries_only_failed_trials_again(
    sampler: str, instant: Instant, tmp_path: Path
) -> None:
    folder, made = tmp_path / "s", plan(vary=("noise_std=0.1,0.2,0.3",), sampler=sampler, trials=4)
    instant.work = no_memory_at(0.2)
    first = run_sweep(made, folder)
    failed = [row for row in first["trials"] if "error" in row]
    assert failed
    instant.configs.clear()
    worse = run_sweep(made, folder, resume=True)
    assert [row for row in worse["trials"] if "error" in row] == failed
    assert len(instant.configs) == len(failed)
    instant.configs.clear()
    instant.work = more_noise_hides_more
    better = run_sweep(made, folder, resume=True)
    asked = [(c.noise_std, c.seed) for c in instant.configs]
    assert asked == [(0.2, row["seed"]) for row in failed]
    assert told(better) == told(first)
    assert not any("error" in row for row in better["trials"])
    instant.configs.clear()
    assert run_sweep(made, folder, resume=True) == better
    assert instant.configs == []


def test_when_every_trial_fails_that_is_an_error(instant: Instant, tmp_path: Path) -> None:
    def broken(config: RunConfig) -> tuple[float, float]:
        raise RuntimeError("no")

    instant.work = broken
    said = "every trial failed: none/0: RuntimeError: no.*; fix the cause .* --resume"
    with pytest.raises(RunError, match=said):
        run_sweep(plan(), tmp_path / "s")


def test_the_result_names_the_front_and_the_best(instant: Instant, tmp_path: Path) -> None:
    numbers = {0.0: (0.90, 0.8), 0.1: (0.89, 0.5), 0.2: (0.88, 0.2), 0.3: (0.87, 0.3)}
    made = plan(vary=("noise_std=0.1,0.2,0.3",))
    instant.work = lambda config: numbers[config.noise_std or 0.0]
    result = run_sweep(made, tmp_path / "s")
    assert [(r["accuracy"], r["leakage"]) for r in result["front"]] == [
        (0.90, 0.8), (0.90, 0.8), (0.90, 0.8), (0.89, 0.5), (0.88, 0.2),
    ]  # fmt: skip
    assert result["reference_point"] == {"accuracy": 0.1, "leakage": 1.0}
    area = (0.80 * 0.2 + 0.79 * 0.3 + 0.78 * 0.3) / 0.9
    assert result["hypervolume"] == {"value": pytest.approx(area)}
    assert result["reference_accuracy"]["defence"] == "none"
    assert result["defences"]["noise"]["best"]["settings"] == {"noise_std": 0.1}
    assert result["defences"]["none"]["best"]["leakage"] == 0.8
    assert Path(result["front"][0]["run"]).parent == tmp_path / "s" / "trials"
    written = json.loads((tmp_path / "s" / "result.json").read_text())
    assert json.loads(json.dumps(result)) == written
    bare = run_sweep(plan(**vars(made) | {"defences": ("noise",)}), tmp_path / "t")
    assert bare["defences"]["noise"]["best"]["leakage"] == 0.2


def test_a_defence_without_an_accurate_trial_has_no_best(instant: Instant, tmp_path: Path) -> None:
    instant.work = lambda config: (0.9 if config.defence == "none" else 0.8, 0.5)
    assert run_sweep(plan(), tmp_path / "s")["defences"]["noise"]["best"] is None


def test_a_sweep_continues_only_with_its_own_plan(instant: Instant, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    run_sweep(plan(), folder)
    assert read_plan(folder) == plan()
    with pytest.raises(RunError, match="exists already; continue it with --resume"):
        check_sweep_folder(folder, plan(), resume=False)
    with pytest.raises(ConfigError, match="seed was 0, is 1; leave"):
        check_sweep_folder(folder, plan(seed=1), resume=True)
    with pytest.raises(ConfigError, match=r"trials was 3, is 2; leave .*only --trials may grow"):
        check_sweep_folder(folder, plan(trials=2), resume=True)
    instant.configs.clear()
    assert len(run_sweep(plan(trials=5), folder, resume=True)["trials"]) == 10
    assert len(instant.configs) == 4
    with pytest.raises(RunError, match="nothing to resume"):
        run_sweep(plan(), tmp_path / "t", resume=True)
    (folder / "sweep.json").write_text('{"trials": 3}')
    with pytest.raises(RunError, match="is not the plan of a sweep"):
        read_plan(folder)
    saved = json.dumps(vars(plan()) | {"trials": "many"})
    (folder / "sweep.json").write_text(saved)
    with pytest.raises(RunError, match="trials must be a whole number, got 'many'"):
        read_plan(folder)
    (folder / "sweep.json").write_text("[1]")
    with pytest.raises(RunError, match=r"is not the plan of a sweep.*another --name"):
        read_plan(folder)


def test_a_running_sweep_is_locked_for_other_processes(instant: Instant, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    run_sweep(plan(), folder)
    with folder_lock(folder):
        with pytest.raises(RunError, match="another process is working on the sweep"):
            run_sweep(plan(trials=5), folder, resume=True)
        assert read_plan(folder) == plan()
    run_sweep(plan(trials=5), folder, resume=True)
    assert read_plan(folder).trials == 5
    assert len(instant.configs) == 10


def test_a_result_is_on_disk_before_the_next_trial(instant: Instant, tmp_path: Path) -> None:
    there: list[int] = []

    def counted(config: RunConfig) -> tuple[float, float]:
        there.append(len(list((tmp_path / "s").glob("trials/*/trial.json"))))
        return more_noise_hides_more(config)

    instant.work = counted
    run_sweep(plan(), tmp_path / "s")
    assert there == list(range(6))


def journal(folder: Path, *lines: Json) -> Path:
    """A sweep as version 0.1.0 left it."""
    folder.mkdir()
    (folder / "sweep.json").write_text(json.dumps(vars(plan())))
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "journal.jsonl").write_text(text)
    return folder / "journal.jsonl"


def line(defence: str, number: int, *, error: str | None = None, **settings: float) -> Json:
    return {
        "defence": defence, "number": number, "settings": settings, "seed": 0, "seconds": 1.5,
        "run": None if error else "there", "error": error,
        "found": None if error else found(0.5, 0.25) | {"classes": 10},
        "images": {} if error else {"right": "AAA=", "mse": "AAA="},
    }  # fmt: skip


def test_a_sweep_of_version_0_1_0_continues(instant: Instant, tmp_path: Path) -> None:
    file = journal(
        tmp_path / "s",
        line("none", 0, error="no"),
        line("noise", 0, noise_std=0.1),
        line("none", 0),
        line("noise", 1, error="no", noise_std=0.2),
    )
    with file.open("a") as torn:
        torn.write('{"defence": "noi')  # killed while it was written
    result = run_sweep(plan(), tmp_path / "s", resume=True)
    asked = [(c.defence, c.noise_std, c.seed) for c in instant.configs]
    assert asked == [
        ("noise", 0.2, 0), ("none", None, 1), ("none", None, 2), ("noise", 0.1, 1),
    ]  # fmt: skip
    assert len(result["trials"]) == 6
    first = result["trials"][0]
    assert (first["trial"], first["leakage"], first["seconds"]) == ("none/0", 0.25, 1.5)
    assert first["run"] == str(tmp_path / "s" / "trials" / "there")
    instant.configs.clear()
    assert run_sweep(plan(), tmp_path / "s", resume=True) == result
    assert instant.configs == []


@pytest.mark.parametrize("bad", ["not json", '{"defence": "none"}', "[1]"])
def test_a_broken_line_of_an_old_journal_is_named(bad: str, tmp_path: Path) -> None:
    file = journal(tmp_path / "s", line("none", 0))
    file.write_text(file.read_text() + bad + "\n")
    with pytest.raises(RunError, match="line 2 is not a finished trial"):
        run_sweep(plan(), tmp_path / "s", resume=True)


def test_an_incomplete_plan_has_defaults() -> None:
    def filled(*defences: str, **given: Any) -> SearchPlan:  # noqa: ANN401
        return make_plan({"defences": defences, **given}, {})

    grid = filled("none", "veil", vary=("lambd=1,2", "noise_std=0.1,0.2"))
    assert (grid.sampler, grid.trials) == ("grid", 4)
    some = filled("veil", vary=("lambd=lin:0:1",), trials=7)
    assert (some.sampler, some.trials) == ("optuna", 7)
    with pytest.raises(ConfigError, match="--sampler random needs --trials"):
        filled("veil", vary=("lambd=lin:0:1",), sampler="random")
    with pytest.raises(
        ConfigError, match=r"trials must be in \[1, 10000\], got 0; this is the number for each"
    ):
        filled("veil", trials=0)
    with pytest.raises(ConfigError, match="veil is given twice"):
        filled("veil", "veil", trials=1)
    with pytest.raises(ConfigError, match="--sampler grid must know how many values of noise_std"):
        filled("noise", vary=("noise_std=lin:0:1",), sampler="grid", trials=1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vary": ("lambd=-1,1",), "defences": ("veil",)}, "lambd must be a finite number"),
        (
            {"vary": ("noise_std=lin:-1:1",), "sampler": "random"},
            "noise_std must be a finite number",
        ),
        ({"vary": ("net=small,tiny",)}, "unknown net 'tiny'"),
        ({"options": {"net": "vgg11"}}, "needs images of at least"),
        ({"vary": (f"net=small,{WIDE}",)}, "c1 needs images of at least 16×16, got (1, 8, 8)"),
        ({"attacks": ("rmle",)}, "unknown attack of profile 'smoke' 'rmle'"),
        ({"profile": "hasty"}, "unknown profile 'hasty'"),
        ({"options": {"dataset": "digit"}}, "unknown dataset 'digit'"),
        ({"options": {"lambd": 1.0}}, "unknown setting of none, noise 'lambd'"),
        ({"options": {"noise_std": 0.1}}, "noise_std cannot be both varied and set"),
        (
            {"options": {"final": True}},
            "chooses by validation images, and 'digits' has none with final=true",
        ),
    ],
)
def test_a_plan_that_cannot_work_is_refused(changes: Json, said: str) -> None:
    with pytest.raises(SplitVeilError) as caught:
        check_plan(plan(**changes))
    assert said in str(caught.value)
    assert check_plan(plan()).num_classes == 10
