"""Workers of this machine: answers, errors and deaths are all answers, and nobody stays behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from sweep.workers import odd_jobs

from splitveil.errors import ConfigError
from splitveil.sweep.engines import LocalEngine, RayEngine, need_ray, reach
from splitveil.sweep.proposals import need_optuna
from splitveil.types import Json

TESTS = Path(__file__).parents[1]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return False
    return state != "Z"


def test_answers_errors_and_deaths_come_back_under_their_keys(tmp_path: Path) -> None:
    engine = LocalEngine(odd_jobs, 1, tmp_path / "log", gpus=("7", "5"))
    found: dict[str, Json] = {}
    jobs: dict[str, Json] = {
        "a": {"do": "print", "value": 4},
        "b": {"do": "raise", "value": 5},
        "c": {"do": "", "value": 6},
        "d": {"do": "die"},
        "e": {"do": "", "value": 7},
    }
    try:
        for name, job in jobs.items():
            engine.submit(name, job)
            key, found[key] = engine.wait()
    finally:
        engine.close()
    assert (found["a"]["value"], found["c"]["value"], found["e"]["value"]) == (8, 12, 14)
    assert found["b"] == {"error": "ValueError: 5 is not to my taste"}
    assert found["d"] == {"error": f"its process was killed by SIGKILL; see {tmp_path / 'log'}"}
    assert found["a"]["pid"] == found["c"]["pid"] != found["e"]["pid"]  # imports are paid once
    assert {found[k]["OMP_NUM_THREADS"] for k in "ace"} == {"1"}
    assert {found[k]["CUDA_VISIBLE_DEVICES"] for k in "ace"} == {"7"}
    assert "printed by a trial" in (tmp_path / "log").read_text()
    assert not any(alive(found[k]["pid"]) for k in "ace")
    assert os.environ.get("CUDA_VISIBLE_DEVICES") != "7"


PARENT = """
import sys, time
from pathlib import Path
from splitveil.sweep.engines import LocalEngine
from sweep.workers import sleeper
if __name__ == "__main__":
    engine = LocalEngine(sleeper, 1, Path(sys.argv[1]) / "log")
    engine.submit("a", {"file": sys.argv[1] + "/pid"})
    engine.wait()
"""


def test_a_worker_in_the_middle_of_a_trial_dies_with_its_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)], env=os.environ | {"PYTHONPATH": str(TESTS)}
    )
    file, until = tmp_path / "pid", time.monotonic() + 60
    while not (file.exists() and file.read_text()) and time.monotonic() < until:
        time.sleep(0.05)
    worker = int(file.read_text())
    assert alive(worker)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until = time.monotonic() + 20
    while alive(worker) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(worker)


def test_what_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("ray", "optuna"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"needs Ray.*pip install 'splitveil\[sweep\]'"):
        need_ray()
    with pytest.raises(ConfigError, match=r"needs Ray"):
        RayEngine(odd_jobs, jobs=1)
    with pytest.raises(ConfigError, match=r"needs Optuna.*pip install 'splitveil\[sweep\]'"):
        need_optuna()


class FakeRay(ModuleType):
    """A cluster of one thread with three cores, whose second task loses its worker."""

    class exceptions:  # noqa: N801 - as Ray calls it
        class RayError(Exception):
            pass

    def __init__(self) -> None:
        super().__init__("ray")
        self.told = dict[str, Any]()
        self.asked = dict[str, Any]()
        self.answers = list[str]()
        self.is_down = False

    def init(self, **told: Any) -> None:  # noqa: ANN401
        if told["address"] == "nowhere:1":
            raise ConnectionError("nobody there")
        self.told = told

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 3.0, "GPU": 2.0}

    def remote(self, **asked: Any) -> Any:  # noqa: ANN401
        self.asked = asked

        def decorate(function: Any) -> SimpleNamespace:  # noqa: ANN401
            def call(text: str) -> int:
                self.answers.append(function(text))
                return len(self.answers) - 1

            return SimpleNamespace(remote=call)

        return decorate

    def wait(self, refs: list[int], num_returns: int) -> tuple[list[int], list[int]]:
        assert num_returns == 1
        return refs[-1:], refs[:-1]

    def get(self, ref: int) -> str:
        if ref == 1:
            raise self.exceptions.RayError("the worker died\nand more")
        return self.answers[ref]

    def shutdown(self) -> None:
        self.is_down = True


def test_ray_is_asked_for_one_core_a_trial_and_its_losses_are_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr("splitveil.sweep.engines.reach", lambda _: None)
    engine = RayEngine(odd_jobs, jobs=None, address="head:6379", gpus=1)
    assert engine.slots == 2
    assert ray.told["address"] == "head:6379"
    assert "num_cpus" not in ray.told
    assert ray.asked == {"num_cpus": 1, "num_gpus": 1, "max_retries": 0}
    engine.submit("a", {"do": "", "value": 1})
    engine.submit("b", {"do": "", "value": 2})
    engine.submit("c", {"do": "raise", "value": 3})
    found = dict(engine.wait() for _ in range(3))
    assert found["a"]["value"] == 2
    assert found["b"] == {"error": "RayError: the worker died"}
    assert found["c"] == {"error": "ValueError: 3 is not to my taste"}
    engine.close()
    assert ray.is_down
    assert RayEngine(odd_jobs, jobs=None).slots == 3
    assert RayEngine(odd_jobs, jobs=5).slots == 5
    assert (ray.told["address"], ray.told["num_cpus"]) == ("local", 5)
    with pytest.raises(ConfigError, match="cannot reach Ray at 'nowhere:1': nobody there"):
        RayEngine(odd_jobs, jobs=1, address="nowhere:1")


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nobody_listens_is_told_before_ray_tries_for_minutes(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"{scheme}127.0.0.1:{server.getsockname()[1]}"
        RayEngine(odd_jobs, jobs=1, address=address)
    assert ray.told["address"] == address
    with pytest.raises(ConfigError, match=r"nobody answers at '.*refused; check --address"):
        RayEngine(odd_jobs, jobs=1, address=address)


@pytest.mark.parametrize("address", ["127.0.0.1:99999", f"{'a' * 70}.invalid:1", ":1"])
def test_an_address_that_is_none_is_told(address: str) -> None:
    with pytest.raises(ConfigError, match="nobody answers at"):
        reach(address)


@pytest.mark.parametrize("address", ["auto", "local", "head:port", "other://head/x:1"])
def test_only_ray_understands_other_addresses(address: str) -> None:
    reach(address)
