"""The sweep itself with trials that take no time: budgets, proposals, failures, resuming."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from sweep.made import Instant, answer, more_noise_hides_more, plan

from splitveil.errors import ConfigError, RunError, SplitVeilError
from splitveil.sweep.driver import check, make_plan, open_sweep, read_plan, run_sweep
from splitveil.sweep.journal import Entry
from splitveil.sweep.outcome import summarise
from splitveil.sweep.trial import Plan
from splitveil.types import Json

WIDE = "client:strided-4-4.4.4.4.4-c1"


def run(
    folder: Path,
    made: Plan,
    work: Callable[[Json], Json] = more_noise_hides_more,
    *,
    resume: bool = False,
    slots: int = 2,
) -> tuple[list[Entry], Instant]:
    engine = Instant(work, slots)
    with open_sweep(folder, made, resume=resume) as journal:
        return list(run_sweep(made, folder, journal, engine)), engine


def told(entries: list[Entry]) -> list[tuple[str, int, Json, int]]:
    return sorted((e.defence, e.number, dict(e.settings), e.seed) for e in entries)


def test_every_defence_has_the_same_budget_and_repeats_its_settings_with_other_seeds(
    tmp_path: Path,
) -> None:
    entries, engine = run(tmp_path / "s", plan(seed=4))
    assert told(entries) == [
        ("noise", 0, {"noise_std": 0.1}, 4),
        ("noise", 1, {"noise_std": 0.2}, 4),
        ("noise", 2, {"noise_std": 0.1}, 5),
        ("none", 0, {}, 4),
        ("none", 1, {}, 5),
        ("none", 2, {}, 6),
    ]
    first = engine.jobs[0]
    assert (first["profile"], first["attacks"]) == ("smoke", ["linear"])
    assert first["options"] == {
        "dataset": "digits", "epochs": 1, "defence": "none", "seed": 4,
        "runs_dir": str(tmp_path / "s" / "trials"),
    }  # fmt: skip
    assert [j["options"]["defence"] for j in engine.jobs] == ["none", "noise"] * 3  # in turns


def test_a_grid_larger_than_the_budget_is_sampled_by_seed_without_repeats(tmp_path: Path) -> None:
    made = plan(defences=("noise",), vary=("noise_std=lin:0.01:0.2:20",), trials=5)
    chosen = [e.settings["noise_std"] for e in run(tmp_path / "a", made)[0]]
    again = [e.settings["noise_std"] for e in run(tmp_path / "b", made)[0]]
    other = [
        e.settings["noise_std"] for e in run(tmp_path / "c", plan(**vars(made) | {"seed": 1}))[0]
    ]
    assert chosen == again
    assert len(set(chosen)) == 5
    assert set(other) != set(chosen)


@pytest.mark.parametrize("sampler", ["random", "optuna"])
def test_proposals_follow_the_seed_and_do_not_notice_an_interruption(
    sampler: str, tmp_path: Path
) -> None:
    made = plan(
        defences=("noise", "veil"),
        vary=("lambd=log:0.01:1", "noise_std=lin:0.01:0.2", "batch_size=64,128"),
        trials=8,
        sampler=sampler,
    )
    whole = told(run(tmp_path / "whole", made, slots=1)[0])
    assert len({json.dumps(t[2]) for t in whole}) == 16
    assert all({"lambd", "noise_std", "batch_size"} == t[2].keys() for t in whole if t[0] == "veil")

    def until_seven(job: Json) -> Json:
        calls.append(job)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return more_noise_hides_more(job)

    calls: list[Json] = []
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", made, until_seven, slots=1)
    entries, engine = run(tmp_path / "cut", made, resume=True, slots=1)
    assert len(engine.jobs) == 16 - 7
    assert told(entries) == whole
    other = told(run(tmp_path / "other", plan(**vars(made) | {"seed": 1}), slots=1)[0])
    assert [t[2] for t in other] != [t[2] for t in whole]


def test_optuna_learns_where_the_front_is(tmp_path: Path) -> None:
    def peak(job: Json) -> Json:
        off = abs(job["options"]["noise_std"] - 0.15)
        return answer(accuracy=0.9 - off, leakage=0.1 + off)

    made = plan(defences=("noise",), vary=("noise_std=lin:0:1",), trials=30, sampler="optuna")
    entries = sorted(run(tmp_path / "s", made, peak, slots=1)[0], key=lambda e: e.number)
    off = [abs(e.settings["noise_std"] - 0.15) for e in entries]
    at_random = (0.15**2 + 0.85**2) / 2  # mean distance of a uniform draw
    assert sum(off[10:]) / 20 < 0.6 * at_random


def no_memory_at(noise: float) -> Callable[[Json], Json]:
    """Work that fails at this noise."""

    def picky(job: Json) -> Json:
        if job["options"].get("noise_std") == noise:
            raise RuntimeError("out of memory")
        return more_noise_hides_more(job)

    return picky


def test_a_failing_trial_is_recorded_and_the_sweep_goes_on(tmp_path: Path) -> None:
    made = plan(vary=("noise_std=0.1,0.2,0.3",))
    entries, engine = run(tmp_path / "s", made, no_memory_at(0.2))
    assert len(engine.jobs) == 6
    failed = [e for e in entries if e.error is not None]
    assert [(e.task.key, e.error) for e in failed] == [("noise/1", "RuntimeError: out of memory")]
    assert len(entries) == 6
    result = summarise(made, entries, tmp_path / "s")
    assert result["defences"]["noise"]["failed"] == 1
    assert [t["error"] for t in result["trials"] if "error" in t] == ["RuntimeError: out of memory"]


@pytest.mark.parametrize("sampler", ["grid", "random", "optuna"])
def test_each_resume_tries_a_failed_trial_once_more_and_leaves_the_others(
    sampler: str, tmp_path: Path
) -> None:
    folder, made = tmp_path / "s", plan(vary=("noise_std=0.1,0.2,0.3",), sampler=sampler, trials=4)
    first, _ = run(folder, made, no_memory_at(0.2), slots=1)
    failed = [e for e in first if e.error is not None]
    assert failed
    kept = (folder / "journal.jsonl").read_bytes()
    worse, engine = run(folder, made, no_memory_at(0.2), resume=True, slots=1)
    assert [e.task for e in failed] == [e.task for e in worse if e.error is not None]
    assert len(engine.jobs) == len(failed)
    better, engine = run(folder, made, resume=True, slots=1)
    asked = [(j["options"]["noise_std"], j["options"]["seed"]) for j in engine.jobs]
    assert asked == [(0.2, e.seed) for e in failed]
    assert told(better) == told(first)
    assert all(e.error is None for e in better)
    assert (folder / "journal.jsonl").read_bytes().startswith(kept)
    _, engine = run(folder, made, resume=True)
    assert engine.jobs == []


def test_when_every_trial_fails_that_is_an_error(tmp_path: Path) -> None:
    def broken(job: Json) -> Json:
        raise RuntimeError("no")

    entries, _ = run(tmp_path / "s", plan(), broken)
    said = "no trial came to an end: none/0: RuntimeError: no.*; mend that, and .* --resume"
    with pytest.raises(RunError, match=said):
        summarise(plan(), entries, tmp_path)


def test_the_result_names_front_volume_and_the_best_within_one_point(tmp_path: Path) -> None:
    numbers = {0.0: (0.90, 0.8), 0.1: (0.89, 0.5), 0.2: (0.88, 0.2), 0.3: (0.87, 0.3)}
    made = plan(vary=("noise_std=0.1,0.2,0.3",))

    def work(job: Json) -> Json:
        return answer(*numbers[job["options"].get("noise_std", 0.0)])

    entries, _ = run(tmp_path / "s", made, work)
    result = summarise(made, entries, tmp_path / "s")
    assert [(r["accuracy"], r["leakage"]) for r in result["front"]] == [
        (0.90, 0.8), (0.90, 0.8), (0.90, 0.8), (0.89, 0.5), (0.88, 0.2),
    ]  # fmt: skip
    assert result["reference_point"] == {"accuracy": 0.1, "leakage": 1.0}
    area = (0.80 * 0.2 + 0.79 * 0.3 + 0.78 * 0.3) / 0.9
    assert result["hypervolume"]["value"] == pytest.approx(area)
    assert result["hypervolume"]["low"] < area < result["hypervolume"]["high"]
    assert result["reference_accuracy"]["defence"] == "none"
    assert result["defences"]["noise"]["best"]["settings"] == {"noise_std": 0.1}
    assert result["defences"]["none"]["best"]["leakage"] == 0.8
    assert result["front"][0]["run"] == str(tmp_path / "s" / "trials" / "somewhere")
    bare = plan(**vars(made) | {"defences": ("noise",)})
    mine = [e for e in entries if e.defence == "noise"]
    assert summarise(bare, mine, tmp_path)["defences"]["noise"]["best"]["leakage"] == 0.2


def test_a_defence_without_an_accurate_trial_has_no_best(tmp_path: Path) -> None:
    def work(job: Json) -> Json:
        return answer(0.9 if job["options"]["defence"] == "none" else 0.8, 0.5)

    entries, _ = run(tmp_path / "s", plan(), work)
    assert summarise(plan(), entries, tmp_path)["defences"]["noise"]["best"] is None


def test_a_sweep_goes_on_only_with_its_own_plan_or_more_trials(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    run(folder, plan())
    assert read_plan(folder) == plan()
    with pytest.raises(RunError, match="exists already; go on with --resume"):
        open_sweep(folder, plan(), resume=False)
    with pytest.raises(ConfigError, match="seed was 0, is 1; leave"):
        open_sweep(folder, plan(seed=1), resume=True)
    with pytest.raises(ConfigError, match="the sweep has 3 trials for each defence"):
        open_sweep(folder, plan(trials=2), resume=True)
    entries, engine = run(folder, plan(trials=5), resume=True)
    assert len(engine.jobs) == 4
    assert len({e.task.key for e in entries}) == 10
    with pytest.raises(RunError, match="nothing to resume"):
        open_sweep(tmp_path / "t", plan(), resume=True)
    with pytest.raises(RunError, match="nothing to resume"):
        read_plan(tmp_path / "t")
    (folder / "sweep.json").write_text('{"trials": 3}')
    with pytest.raises(RunError, match="is not the plan of a sweep"):
        read_plan(folder)
    saved = json.dumps(vars(plan()) | {"trials": "many"})
    (folder / "sweep.json").write_text(saved)
    with pytest.raises(RunError, match="trials must be a whole number, got 'many'"):
        read_plan(folder)
    (folder / "sweep.json").write_text("[1]")
    with pytest.raises(RunError, match=r"cannot be read.*another --name"):
        read_plan(folder)


def test_the_plan_of_a_sweep_at_work_is_not_changed_by_another_process(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    with open_sweep(folder, plan(), resume=False):
        with pytest.raises(RunError, match="another process is working on the sweep"):
            open_sweep(folder, plan(trials=5), resume=True)
        assert read_plan(folder) == plan()
    with open_sweep(folder, plan(trials=5), resume=True):
        assert read_plan(folder).trials == 5


def test_what_is_left_open_is_filled_in() -> None:
    grid = make_plan(
        ("none", "veil"), ("lambd=1,2", "noise_std=0.1,0.2"), trials=None, sampler=None
    )
    assert (grid.sampler, grid.trials) == ("grid", 4)
    some = make_plan(("veil",), ("lambd=lin:0:1",), trials=7, sampler=None)
    assert (some.sampler, some.trials) == ("optuna", 7)
    with pytest.raises(ConfigError, match="--sampler random needs --trials"):
        make_plan(("veil",), ("lambd=lin:0:1",), trials=None, sampler="random")
    with pytest.raises(ConfigError, match="trials must be from 1 to 10000 for each defence, got 0"):
        make_plan(("veil",), (), trials=0, sampler=None)
    with pytest.raises(ConfigError, match="veil is given twice"):
        make_plan(("veil", "veil"), (), trials=1, sampler=None)


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
        ({"vary": ("noise_std=lin:0:1",)}, "a grid needs listed values"),
        ({"options": {"dataset": "digit"}}, "unknown dataset 'digit'"),
        ({"options": {"lambd": 1.0}}, "unknown field of none, noise 'lambd'"),
        ({"options": {"noise_std": 0.1}}, "noise_std cannot be both varied and set"),
        ({"options": {"final": True}}, "no validation images to choose by"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(changes: Json, said: str) -> None:
    with pytest.raises(SplitVeilError) as caught:
        check(plan(**changes))
    assert said in str(caught.value)
    assert check(plan()).keys() == {"none", "noise"}
