"""What the machine offers a computation: its precision and its threads, asked for or found."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import nn

from splitveil.cuda import Precision, channels_last, mixed, to_device
from splitveil.errors import ConfigError, Range, RunError, unknown
from splitveil.io import put
from splitveil.rng import seeded_globals

AskedPrecision = Literal["auto", "float32", "bf16"]
PRECISION = "SPLITVEIL_PRECISION"  # environment variable: what "auto" means on a CPU
CACHE = "~/.cache/splitveil/precision.json"
KEPT = 16  # probes that the cache holds, the newest
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # x86 and Arm, as Linux spells them
PAYS = 1.2  # how many times faster bf16 must be
LEAST_SIDE = 16  # pixels; the nets of smaller images are too small to gain
REPEATS = 6  # of each step of the probe


def find_precision(asked: str, device: str, image_shape: tuple[int, ...]) -> Precision:
    """The precision of a computation on images (c, h, w).

    "auto" is bf16 on a GPU. On a CPU it is bf16 where the processor has such instructions, a short
    probe found it at least 1.2 times as fast, and the images have at least 16×16 pixels; else
    float32. The probe is made once per processor, version of torch and number of threads. The
    environment variable SPLITVEIL_PRECISION takes its place.

    >>> find_precision("float32", "cpu", (3, 32, 32)), find_precision("auto", "cuda", (1, 8, 8))
    ('float32', 'bf16')
    """
    check_precision(asked, device)
    if asked == "bf16" or (asked == "auto" and device == "cuda"):
        return "bf16"
    if asked == "float32":
        return "float32"
    return machine_precision() if min(image_shape[1:]) >= LEAST_SIDE else "float32"


def check_precision(asked: str, device: str) -> None:
    """Refuse an unknown precision, and bf16 on a processor without instructions for it."""
    if asked not in get_args(AskedPrecision):
        raise ConfigError(unknown("precision", asked, get_args(AskedPrecision)))
    if asked == "bf16" and device == "cpu" and not has_bf16():
        raise ConfigError(
            "precision is 'bf16', but this processor has no instructions for it (avx512_bf16, "
            "amx_bf16, or bf16 on Arm) and would be many times slower; use precision auto or "
            "float32, or a machine that has them"
        )


def machine_precision() -> Precision:
    """What "auto" means on this CPU for images that are not small, see `find_precision`."""
    given = os.environ.get(PRECISION)
    if given == "bf16":
        check_precision("bf16", "cpu")
        return "bf16"
    if given == "float32":
        return "float32"
    if given:
        raise ConfigError(f"${PRECISION} must be float32 or bf16, got '{given}'")
    if not has_bf16():
        return "float32"
    threads = torch.get_num_threads()
    return (
        "bf16"
        if _gain(f"{_cpu()}, torch {torch.__version__}, {threads} threads") >= PAYS
        else "float32"
    )


def has_bf16() -> bool:
    """Whether the processor multiplies bfloat16, as far as Linux tells; elsewhere False."""
    return bool(BF16_FLAGS & set(_cpu_facts().split()))


def _cpu() -> str:
    lines = [
        line.partition(":")[2].strip()
        for line in _cpu_facts().splitlines()
        if line.startswith("model name")
    ]
    return lines[0] if lines else "unknown CPU"


@lru_cache(maxsize=1)
def _cpu_facts() -> str:
    with suppress(OSError):
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    return ""


@lru_cache(maxsize=4)
def _gain(machine: str) -> float:
    """The gain of bf16 on this machine: from the cache of this user, else probed and stored."""
    path = Path(CACHE).expanduser()
    known = _read_cache(path)
    if machine not in known:
        known[machine] = round(bf16_gain(), 3)
        newest = dict(list(known.items())[-KEPT:])
        with suppress(OSError, RunError):  # without a cache the next process probes again
            path.parent.mkdir(parents=True, exist_ok=True)
            put(path, (json.dumps(newest, indent=2) + "\n").encode())
    return known[machine]


def _read_cache(path: Path) -> dict[str, float]:
    """The gains in a cache by machine; what is no such number counts as absent."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {k: v for k, v in found.items() if isinstance(v, float) and math.isfinite(v)}


def bf16_gain() -> float:
    """How many times faster a small training step is in bf16 than in float32, here and now.

    It takes a fraction of a second. The best of interleaved steps counts, so that other work on the
    machine meets both.
    """
    device = torch.device("cpu")
    with seeded_globals(0):
        net = nn.Sequential(
            nn.Conv2d(16, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        )  # fmt: skip
        x = channels_last(torch.rand(32, 16, 16, 16))
    to_device(net, device)

    def step(precision: Precision) -> Callable[[], None]:
        def run() -> None:
            net.zero_grad(set_to_none=True)
            with mixed(device, precision):
                y = net(x)
            y.float().square().mean().backward()

        return run

    steps = {precision: step(precision) for precision in ("float32", "bf16")}
    best = dict.fromkeys(steps, math.inf)
    with torch.enable_grad():
        for index in range(REPEATS):
            for name, run in steps.items():
                began = time.perf_counter()
                run()
                if index:  # the first step prepares kernels
                    best[name] = min(best[name], time.perf_counter() - began)
    return best["float32"] / best["bf16"]


def usable_cores() -> int:
    """Cores that this process may use: those it is bound to, and the limit of its container."""
    bound = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    return max(1, math.ceil(min(len(bound), _container_cores(Path("/sys/fs/cgroup")))))


def _container_cores(root: Path) -> float:
    """The CPU limit of this process's control groups, version 2, then 1; inf without one."""
    own = ""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            if line.startswith("0::"):
                own = line[3:].strip("/")
    here = root / own
    places = [here, *here.parents[: len(here.relative_to(root).parts)]]
    limits = [math.inf]
    for folder in places:
        with suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
            limits.append(float(quota) / float(period))
    with suppress(OSError, ValueError):
        quota, period = (
            (root / "cpu" / f"cpu.cfs_{part}_us").read_text(encoding="utf-8")
            for part in ("quota", "period")
        )
        if float(quota) > 0:
            limits.append(float(quota) / float(period))
    return min(limits)


def check_threads(threads: int | None) -> None:
    """Refuse more threads than cores: they would wait for each other."""
    if threads is None:
        return
    Range(1).check("threads", threads)
    cores = usable_cores()
    if threads > cores:
        raise ConfigError(
            f"threads is {threads}, but this process may use {cores} "
            f"{'core' if cores == 1 else 'cores'}; give at most {cores}, or leave threads out"
        )


@contextmanager
def computing_threads(threads: int | None) -> Iterator[None]:
    """Inside, torch computes with so many threads; None: as before, but no more than cores."""
    check_threads(threads)
    before = torch.get_num_threads()
    torch.set_num_threads(threads or min(before, usable_cores()))
    try:
        yield
    finally:
        torch.set_num_threads(before)
