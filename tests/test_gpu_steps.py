"""benchmarks/gpu.py: named steps, each run once, continued where they were interrupted."""

import importlib.util
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_steps", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_steps"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(gpu: ModuleType, tmp_path: Path) -> Callable[..., str]:
    """Run a step of some Python code, on a device that is called "cuda (a test)"."""

    def called(code: str, *options: str, name: str = "one", left: float = 60.0) -> str:
        step = gpu.Step(name=name, minutes=1, command=("-c", code, *options))
        end = time.monotonic() + left
        return str(gpu.run_step(step, tmp_path / "store", "cuda (a test)", data=None, end=end))

    return called


def stored(tmp_path: Path, name: str = "one") -> dict[str, object]:
    text = (tmp_path / "store" / f"{name}.json").read_text(encoding="utf-8")
    found: dict[str, object] = json.loads(text)
    return found


def test_a_step_stores_the_json_that_its_command_wrote(
    gpu: ModuleType, run: Callable[..., str], tmp_path: Path
) -> None:
    code = "import sys; open(sys.argv[1], 'w').write('{\"value\": 3}')"
    assert run(code, gpu.RESULT).startswith("one: done in ")
    made = stored(tmp_path)
    assert made["found"] == {"value": 3}
    assert (made["step"], made["device"]) == ("one", "cuda (a test)")
    assert str(made["command"]).startswith("python -c ")


def test_without_a_file_of_its_own_the_last_line_is_stored(
    run: Callable[..., str], tmp_path: Path
) -> None:
    run("print('27 passed')")
    assert stored(tmp_path)["found"] == {"said": "27 passed"}


def test_a_failed_or_late_step_stores_nothing(run: Callable[..., str], tmp_path: Path) -> None:
    said = run("raise ValueError('no such kernel')")
    assert said.startswith("one: failed")
    assert "no such kernel" in said
    assert run("pass", left=-1.0) == "one: no time left"
    assert not (tmp_path / "store").exists()


def test_every_step_has_a_name_of_its_own_and_the_same_one_each_time(gpu: ModuleType) -> None:
    names = [step.name for step in gpu.steps()]
    assert len(set(names)) == len(names)
    assert {"tests", "step", "surrogates", "alone-thin-deep-s0", "documents-sparse-s0"} <= set(
        names
    )
    rows = {name for name in names if name.startswith("documents-")}
    assert len(rows) == len(gpu.DOCUMENT_SEEDS) * (len(gpu.DOCUMENT_ROWS) + len(gpu.REPORTED_ROWS))


def test_a_step_is_done_when_its_file_or_its_record_is_there(
    gpu: ModuleType, tmp_path: Path
) -> None:
    record = tmp_path / "record.json"
    step = gpu.Step(name="a", minutes=1, command=(), record=record)
    assert not step.done(tmp_path)
    record.write_text("{}")
    assert step.done(tmp_path)
    (tmp_path / "b.json").write_text("{}")
    assert gpu.Step(name="b", minutes=1, command=()).done(tmp_path)


def test_a_training_is_told_how_long_it_may_take(gpu: ModuleType, tmp_path: Path) -> None:
    step = next(s for s in gpu.steps() if s.name == "documents-sparse+cem-s1")
    words = gpu.filled(step, tmp_path, "DIR", 90.7)
    assert words[words.index("--stop-after") + 1] == "90"
    assert words[words.index("--data-dir") + 1] == "DIR"
    assert "--data-dir" not in gpu.filled(step, tmp_path, None, math.inf)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--list"], 0, "documents-sparse-s0"),
        (["--steps", "nothing"], 2, "no step nothing"),
        (["--jobs", "0"], 2, "at least 1, got 0"),
    ],
)
def test_the_command_line(options: list[str], code: int, said: str) -> None:
    made = subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, check=False
    )
    assert made.returncode == code
    assert said in made.stdout + made.stderr
