"""Precision and threads: what is asked for, what the machine has, and what a probe finds."""

import json
from pathlib import Path

import pytest
import torch

from splitveil.config import machine
from splitveil.config.machine import (
    KEPT,
    bf16_gain,
    check_threads,
    computing_threads,
    find_precision,
    usable_cores,
)
from splitveil.config.resolve import resolve
from splitveil.config.run_config import RunConfig
from splitveil.errors import ConfigError

CIFAR, DIGITS = (3, 32, 32), (1, 8, 8)
WITH, WITHOUT = "model name : A\nflags : avx avx512_bf16\n", "model name : B\nflags : avx avx2\n"


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    """A processor with bf16, a cache of its own, and a probe that gives the numbers in the list."""
    answers = [1.6]
    monkeypatch.delenv(machine.PRECISION)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(machine, "_cpu_facts", lambda: WITH)
    monkeypatch.setattr(machine, "bf16_gain", lambda: answers.pop(0))
    machine._gain.cache_clear()
    return answers


@pytest.fixture(autouse=True)
def forget() -> None:
    machine._gain.cache_clear()


def cache(home: Path) -> Path:
    return home / ".cache" / "splitveil" / "precision.json"


@pytest.mark.parametrize(("gain", "chosen"), [(1.6, "bf16"), (1.1, "float32")])
def test_auto_takes_bf16_where_the_probe_shows_that_it_pays(
    probed: list[float], gain: float, chosen: str
) -> None:
    probed[:] = [gain]
    assert find_precision("auto", "cpu", CIFAR) == chosen


def test_small_images_stay_in_float32_without_a_probe(probed: list[float]) -> None:
    assert find_precision("auto", "cpu", DIGITS) == "float32"
    assert probed == [1.6]


def test_a_processor_without_bf16_is_never_probed(
    probed: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_cpu_facts", lambda: WITHOUT)
    assert find_precision("auto", "cpu", CIFAR) == "float32"
    assert probed == [1.6]


def test_a_machine_is_probed_once_and_another_number_of_threads_again(
    probed: list[float], tmp_path: Path
) -> None:
    probed[:] = [1.6, 1.1]
    assert find_precision("auto", "cpu", CIFAR) == "bf16"
    machine._gain.cache_clear()  # as in another process
    assert find_precision("auto", "cpu", CIFAR) == "bf16"
    assert len(probed) == 1
    stored = json.loads(cache(tmp_path).read_text())
    assert stored == {f"A, torch {torch.__version__}, 1 threads": 1.6}
    torch.set_num_threads(2)
    try:
        assert find_precision("auto", "cpu", CIFAR) == "float32"
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("content", ["", "[1]", '{"x": "fast"}', "\udcff", '{"x": [1]}'])
def test_a_broken_cache_counts_as_none(probed: list[float], tmp_path: Path, content: str) -> None:
    cache(tmp_path).parent.mkdir(parents=True)
    cache(tmp_path).write_text(content, errors="surrogateescape")
    assert find_precision("auto", "cpu", CIFAR) == "bf16"
    assert list(json.loads(cache(tmp_path).read_text()).values()) == [1.6]


def test_a_cache_that_cannot_be_written_costs_a_probe_and_no_more(
    probed: list[float], tmp_path: Path
) -> None:
    (tmp_path / ".cache").write_text("a file in the way")
    assert find_precision("auto", "cpu", CIFAR) == "bf16"


def test_the_cache_keeps_the_newest_machines(probed: list[float], tmp_path: Path) -> None:
    cache(tmp_path).parent.mkdir(parents=True)
    cache(tmp_path).write_text(json.dumps({f"old {i}": 1.0 for i in range(100)}))
    find_precision("auto", "cpu", CIFAR)
    stored = json.loads(cache(tmp_path).read_text())
    assert len(stored) == KEPT
    assert list(stored)[-1].startswith("A, torch")


def test_a_variable_decides_in_place_of_the_probe(
    probed: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    for chosen in ("float32", "bf16"):
        monkeypatch.setenv(machine.PRECISION, chosen)
        assert find_precision("auto", "cpu", CIFAR) == chosen
    assert probed == [1.6]
    monkeypatch.setenv(machine.PRECISION, "fast")
    with pytest.raises(ConfigError, match="must be float32 or bf16, got 'fast'"):
        find_precision("auto", "cpu", CIFAR)


def test_bf16_is_refused_where_the_processor_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_cpu_facts", lambda: WITHOUT)
    with pytest.raises(
        ConfigError, match=r"no instructions for it .*use precision auto or float32"
    ):
        resolve(RunConfig(precision="bf16", device="cpu"))
    with pytest.raises(ConfigError, match="unknown precision 'fp8'"):
        find_precision("fp8", "cpu", CIFAR)


def test_the_probe_leaves_the_random_streams_alone() -> None:
    before = torch.get_rng_state()
    assert bf16_gain() > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_threads_beyond_the_cores_are_refused() -> None:
    cores = usable_cores()
    check_threads(cores)
    with pytest.raises(ConfigError, match=f"threads is {cores + 1}, but this process may use"):
        resolve(RunConfig(threads=cores + 1))
    with pytest.raises(ConfigError, match="threads must be at least 1, got 0"):
        check_threads(0)


def test_threads_are_set_inside_and_restored_after() -> None:
    assert torch.get_num_threads() == 1
    with computing_threads(usable_cores()):
        assert torch.get_num_threads() == usable_cores()
    with computing_threads(None):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 1


def test_a_container_limits_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "cpu.max"
    own.write_text("150000 100000\n")
    assert machine._container_cores(tmp_path) == 1.5
    own.write_text("max 100000\n")
    assert machine._container_cores(tmp_path) == float("inf")
    old = tmp_path / "cpu"
    old.mkdir()
    (old / "cpu.cfs_quota_us").write_text("50000\n")
    (old / "cpu.cfs_period_us").write_text("100000\n")
    assert machine._container_cores(tmp_path) == 0.5
    monkeypatch.setattr(machine, "_container_cores", lambda root: 0.5)
    assert usable_cores() == 1
