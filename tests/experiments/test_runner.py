"""Many runs: trained or continued, attacked or read; here, or handed to Ray."""

import ast
import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from experiments.made import Instant, no_memory_at

from splitveil.attacks.profiles import PROFILES
from splitveil.config.resolve import make_config
from splitveil.errors import ConfigError, DataError
from splitveil.experiments import runner
from splitveil.experiments.runner import (
    RAY_BEYOND_LOOPBACK,
    LiveTable,
    Trial,
    Work,
    brief_epochs,
    check_ray,
    ranking_attacks,
    run_many,
    validate_on_val,
    with_own_folder,
)
from splitveil.io import Json, Progress
from splitveil.runs import load_run

NET = "client:strided-4s2-4.8-c4"


def trial(folder: Path, label: str = "one", **options: Any) -> Trial:  # noqa: ANN401
    given = {"dataset": "digits", "defence": "noise", "epochs": 1, "net": NET}
    return Trial(label=label, config=make_config({**given, "runs_dir": str(folder), **options}))


def on_val(*trials: Trial, keep_going: bool = True, **more: Any) -> list[Trial]:  # noqa: ANN401
    work = Work(profile="smoke", aux="val", only=("linear",), keep_going=keep_going)
    return list(run_many(trials, work, **more))


class Told(LiveTable):
    """A table that notes what it is told, and can stop a run."""

    def __init__(self, stop_at: str = "never") -> None:
        super().__init__()
        self.notes, self.stop_at = list[str](), stop_at

    def expect(self, counts: Mapping[str, int]) -> None:
        self.notes.append(f"expected {dict(counts)}")

    def begin(self, trial: Trial) -> Progress:
        self.notes.append(f"started {trial.label}")

        def told(done: int, total: int, note: str = "") -> None:
            if self.stop_at in note:
                raise KeyboardInterrupt

        return told

    def finish(self, trial: Trial) -> None:
        self.notes.append(f"finished {trial.label}")


def test_a_trial_is_measured_on_validation_images(tmp_path: Path) -> None:
    asked = replace(trial(tmp_path, "noise/3", noise_std=0.1, seed=3), settings={"noise_std": 0.1})
    (result,) = on_val(asked)
    assert result.error is None
    found = result.found
    assert found is not None
    assert found["leakage"] == pytest.approx(1 - found["mse"] / found["ceiling"])
    assert result.point == (found["accuracy"], max(found["leakage"], 0.0))
    run = load_run(result.config.folder)
    assert (run.path.parent, run.config.seed, run.config.noise_std) == (tmp_path, 3, 0.1)
    saved = json.loads((run.path / "trial.json").read_text())
    assert saved["found"] == found == validate_on_val(run, ranking_attacks("smoke", ["linear"]))
    told = saved["label"], saved["settings"], saved["seed"], saved["error"]
    assert told == ("noise/3", {"noise_std": 0.1}, 3, None)
    assert saved["seconds"] == result.seconds > 0

    _, splits = run.data()
    seen: list[int] = []
    run.model.head.register_forward_hook(lambda _, args, __: seen.append(len(args[0])))
    validate_on_val(run, {"mean": PROFILES["smoke"]["mean"]})
    assert len(splits.val) in seen
    assert len(splits.test) not in seen


def test_trials_that_do_not_send_every_image_rank_by_their_exposure(tmp_path: Path) -> None:
    work = Work(profile="smoke", aux="val", only=("class-mean", "linear"), keep_going=False)
    asked = [trial(tmp_path, name, defence=name) for name in ("alone", "early-exit")]
    silent, part = sorted(run_many(asked, work), key=lambda one: one.label)
    assert silent.found is not None
    assert part.found is not None
    assert (silent.found["exposure"], silent.point[1]) == (0, 0)
    assert 0 < part.found["sent"] < 1
    assert part.point == (part.found["accuracy"], part.found["exposure"])
    assert 0 <= part.point[1] < 1


def test_a_stopped_trial_continues_and_a_finished_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (whole,) = on_val(trial(tmp_path / "whole", epochs=2))
    with pytest.raises(KeyboardInterrupt):
        on_val(trial(tmp_path / "cut", epochs=2), progress=Told(stop_at="epoch 2"))
    (result,) = on_val(trial(tmp_path / "cut", epochs=2))
    assert result.found == whole.found

    def forbidden(*_: object, **__: object) -> None:
        raise RuntimeError("trained again")

    monkeypatch.setattr(runner, "fit", forbidden)
    assert on_val(trial(tmp_path / "cut", epochs=2)) == [result]
    (result.config.folder / "trial.json").write_text("{")
    assert on_val(trial(tmp_path / "cut", epochs=2))[0].error == "RuntimeError: trained again"


def test_a_trial_with_a_broken_checkpoint_is_trained_anew(tmp_path: Path) -> None:
    (first,) = on_val(trial(tmp_path))
    (first.config.folder / "trial.json").unlink()
    (first.config.folder / "checkpoint.safetensors").write_bytes(b"broken")
    assert on_val(trial(tmp_path))[0].found == first.found


def test_the_others_continue_when_a_trial_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instant = Instant(monkeypatch, no_memory_at(0.2))
    trials = [trial(tmp_path, f"noise/{i}", noise_std=n) for i, n in enumerate((0.1, 0.2, 0.3))]
    told = Told()
    results = on_val(*trials, progress=told)
    assert [r.error for r in results] == [None, "RuntimeError: out of memory", None]
    saved = json.loads((results[1].config.folder / "trial.json").read_text())
    assert (saved["found"], saved["error"]) == (None, "RuntimeError: out of memory")
    assert told.notes[:3] == ["expected {'noise': 3}", "started noise/0", "finished noise/0"]
    assert len(told.notes) == 7
    with pytest.raises(RuntimeError, match="out of memory"):
        on_val(*trials, keep_going=False)
    assert len(instant.configs) == 4  # the failed one again, the others are read


def test_a_diverged_trial_has_failed(tmp_path: Path) -> None:
    (result,) = on_val(trial(tmp_path, lr=1e30))
    assert result.error is not None
    assert "training diverged" in result.error


def test_a_leakage_that_is_not_finite_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Instant(monkeypatch, lambda _: (0.5, math.nan))
    (result,) = on_val(trial(tmp_path))
    assert "leakage of the trial: not finite numbers" in str(result.error)


def test_a_trial_needs_validation_images(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing may be chosen by them"):
        on_val(trial(tmp_path, final=True), keep_going=False)


def test_trials_are_taken_only_when_they_can_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instant, seen = Instant(monkeypatch), list[int]()

    def proposed() -> Iterator[Trial]:
        for seed in range(3):
            seen.append(len(instant.configs))
            yield trial(tmp_path, seed=seed)

    for count, _ in enumerate(run_many(proposed(), Work(profile="smoke", aux="val")), start=1):
        assert len(seen) == count
    assert seen == [0, 1, 2]


def test_a_named_run_is_audited_in_full(tmp_path: Path) -> None:
    named = trial(tmp_path, name="named")
    work = Work(profile="smoke", only=("linear",))
    (first,) = run_many([named], work)
    record = load_run(tmp_path / "named").record
    assert record is not None
    assert first.found == {"accuracy": record.accuracy, "leakage": record.leakage}
    assert (record.audit.aux, record.audit.only) == ("train", ("linear",))
    before = (tmp_path / "named" / "record.json").stat().st_mtime_ns
    list(run_many([named], work))
    assert (tmp_path / "named" / "record.json").stat().st_mtime_ns == before
    list(run_many([named], replace(work, resume=False)))
    assert (tmp_path / "named" / "record.json").stat().st_mtime_ns > before


def test_trials_use_attacks_that_see_every_image_once() -> None:
    assert (brief_epochs("cifar10"), brief_epochs("npz:/x")) == (20, 10)
    kept = ranking_attacks("quick")
    assert {"linear", "decoder", "nearest"} <= kept.keys()
    assert {"rmle", "prior", "k-query"} == PROFILES["quick"].keys() - kept.keys()
    assert list(ranking_attacks("smoke", ["nearest", "linear"])) == ["nearest", "linear"]
    with pytest.raises(ConfigError, match="unknown attack of profile 'smoke' 'k-query'"):
        ranking_attacks("smoke", ["k-query"])


def test_the_settings_decide_the_folder_of_a_trial() -> None:
    options: Json = {"dataset": "digits", "defence": "veil", "net": "small", "epochs": 1}

    def name(**other: object) -> str | None:
        return with_own_folder(make_config(options | other)).name

    assert name() == name(runs_dir="elsewhere")
    others: list[Json] = [
        {"lambd": 0.7}, {"epochs": 2}, {"seed": 1}, {"net": NET}, {"defence": "cem"},
    ]  # fmt: skip
    assert len({name(), *(name(**other) for other in others)}) == len(others) + 1


class FakeRay(ModuleType):
    """A cluster of one thread with three cores, whose second task loses its worker."""

    class exceptions:  # noqa: N801 - as Ray calls it
        class RayError(Exception):
            pass

    def __init__(self) -> None:
        super().__init__("ray")
        self.told = dict[str, Any]()
        self.asked = dict[str, Any]()
        self.answers = list[Trial]()
        self.most = 0
        self.is_down = False

    def init(self, **told: Any) -> None:  # noqa: ANN401
        if told["address"] == "nowhere":
            raise ConnectionError("nobody there")
        self.told = told

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 3.0, "GPU": 2.0}

    def remote(self, **asked: Any) -> Any:  # noqa: ANN401
        self.asked = asked

        def decorate(function: Any) -> SimpleNamespace:  # noqa: ANN401
            def call(trial: Trial) -> int:
                self.answers.append(function(trial))
                return len(self.answers) - 1

            return SimpleNamespace(remote=call)

        return decorate

    def wait(self, refs: list[int], num_returns: int) -> tuple[list[int], list[int]]:
        assert num_returns == 1
        self.most = max(self.most, len(refs))
        return refs[-1:], refs[:-1]

    def get(self, ref: int) -> Trial:
        if ref == 1:
            raise self.exceptions.RayError("the worker died\nand more")
        return self.answers[ref]

    def shutdown(self) -> None:
        self.is_down = True


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


def test_a_trial_on_ray_has_one_core_and_may_lose_its_worker(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Instant(monkeypatch, no_memory_at(0.3))
    monkeypatch.setattr(runner, "find_device", lambda _: "cuda")
    noises = (0.1, 0.2, 0.3, 0.4, 0.5)
    trials = [trial(tmp_path, f"noise/{i}", noise_std=n) for i, n in enumerate(noises)]
    results = on_val(*trials, jobs=None, address="auto")
    assert {r.label: r.error for r in results} == {
        "noise/0": None, "noise/1": "RayError: the worker died",
        "noise/2": "RuntimeError: out of memory", "noise/3": None, "noise/4": None,
    }  # fmt: skip
    assert ray.most == 2  # as many as the cluster has GPUs
    assert ray.told["address"] == "auto"
    assert "num_cpus" not in ray.told
    assert ray.asked == {"num_cpus": 1, "num_gpus": 1, "max_retries": 0}
    assert ray.is_down


def test_several_jobs_start_ray_on_this_machine(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Instant(monkeypatch)
    trials = [trial(tmp_path, seed=seed) for seed in range(7)]
    on_val(*trials, jobs=5)
    assert (ray.told["address"], ray.told["num_cpus"], ray.most) == ("local", 5, 5)
    on_val(*trials, jobs=None, address="local")
    assert ray.asked["num_gpus"] == 0
    with pytest.raises(ConfigError, match="cannot reach Ray at 'nowhere': nobody there"):
        on_val(*trials, address="nowhere")
    ray.told = {}
    assert on_val(jobs=2) == []  # nothing to do: no cluster is started
    assert ray.told == {}


def test_a_cluster_started_here_listens_on_loopback_unless_told_otherwise(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RAY_BEYOND_LOOPBACK, raising=False)
    assert check_ray(None, "auto") is ray  # somebody else's cluster: it listens where it listens
    assert RAY_BEYOND_LOOPBACK not in os.environ
    assert check_ray(2, None) is ray
    assert os.environ[RAY_BEYOND_LOOPBACK] == "0"
    monkeypatch.setenv(RAY_BEYOND_LOOPBACK, "1")
    check_ray(2, "local")
    assert os.environ[RAY_BEYOND_LOOPBACK] == "1"


LISTENERS = """
import os, sys
from pathlib import Path
from splitveil.experiments.runner import check_ray, start_ray
start_ray(check_ray(1, "local"), 1, "local")
import psutil  # Ray brings it
own = set()
for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
    for fd in Path(f"/proc/{process.pid}/fd").iterdir():
        try:
            own.add(os.readlink(fd))
        except OSError:
            pass  # closed meanwhile
rows = [r.split() for n in ("tcp", "tcp6") for r in Path(f"/proc/net/{n}").open() if ":" in r]
print({r[1].split(":")[0] for r in rows if r[3] == "0A" and f"socket:[{r[9]}]" in own})
"""
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1, the second for IPv6


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_port_of_a_real_cluster_is_open_to_others() -> None:
    pytest.importorskip("ray")
    environment = {k: v for k, v in os.environ.items() if k != RAY_BEYOND_LOOPBACK}
    done = subprocess.run(
        [sys.executable, "-c", LISTENERS], capture_output=True, text=True, check=True, timeout=120,
        env=environment,
    )  # fmt: skip
    found = ast.literal_eval(done.stdout.strip().splitlines()[-1])
    assert found
    assert found <= LOOPBACK


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nobody_listens_is_refused(scheme: str, ray: FakeRay) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"{scheme}127.0.0.1:{server.getsockname()[1]}"
        assert check_ray(1, address) is ray
    with pytest.raises(ConfigError, match=r"nobody answers at '.*refused; check --address"):
        check_ray(1, address)


@pytest.mark.parametrize("address", ["127.0.0.1:99999", f"{'a' * 70}.invalid:1", ":1"])
def test_a_malformed_address_is_refused(address: str, ray: FakeRay) -> None:
    with pytest.raises(ConfigError, match="nobody answers at"):
        check_ray(1, address)
    assert ray.told == {}


@pytest.mark.parametrize("address", ["auto", "local", "head:port", "other://head/x:1"])
def test_other_addresses_are_left_to_ray(address: str, ray: FakeRay) -> None:
    assert check_ray(1, address) is ray


def test_a_missing_ray_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for jobs, address in ((2, None), (None, "local"), (1, "head:1")):
        with pytest.raises(
            ConfigError, match=r"needs the library ray.*pip install 'splitveil\[sweep\]'"
        ):
            check_ray(jobs, address)
    assert check_ray(1, None) is None
