"""The channel in numpy: what the client does to smashed data before sending it.

Stages are the plain JSON of a manifest: ``{"kind": "gaussian", "std": 0.1}``. Each is the twin of a
module of `splitveil.nets` and gives the same values, except for the random draw. The numbers of a
learned stage, one for each value of the wire, are in a file of the export that the stage names.
"""

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitveil.errors import ExportError, Range
from splitveil.grid import nearest, step_of
from splitveil.serve.noise import Entropy, noise_steps, uniforms

Rows = NDArray[np.float32]
Stage = Mapping[str, Any]
_VARIANCE = {"gaussian": 1.0, "laplace": 2.0}  # of noise of scale 1
_SHARE = Range(0, 1, below=True)
_LARGEST, _SMALLEST = 1e30, 1e-30  # beyond them a sixteenth of σ is no plain float32
_RANGES = {
    "std": Range(0, _LARGEST), "p": _SHARE, "prune": _SHARE, "bits": Range(1, 16),
    "low": Range(-_LARGEST, _LARGEST), "high": Range(-_LARGEST, _LARGEST),
}  # fmt: skip
_NOISE_FILE = re.compile(r"noise-[0-9]{1,3}\.f32")


def with_noise_on_grid(z: NDArray[Any], scale: float | Rows, kind: str, entropy: Entropy) -> Rows:
    """h·(q + K): z rounded to the grid of noise of this scale, and fresh rounded noise.

    >>> middle = (1 << 63).to_bytes(8, "little")  # K = 0
    >>> with_noise_on_grid(np.array([0.27]), 1.6, "gaussian", lambda n: middle).tolist()
    [0.30000001192092896]
    """
    if not np.isfinite(z).all():
        raise ExportError(
            "the client's network gives numbers that are not finite; nothing is sent. Export again"
        )
    step = step_of(scale)
    steps = nearest(z, step) + noise_steps(z.size, kind, entropy).reshape(z.shape)
    return steps.astype(np.float32) * step


def gaussian(z: Rows, stage: Stage, entropy: Entropy) -> Rows:
    """Z with fresh noise on the grid of σ."""
    if stage["std"] == 0:
        return z
    return with_noise_on_grid(z, float(stage["std"]), "gaussian", entropy)


def dropout(z: Rows, stage: Stage, entropy: Entropy) -> Rows:
    """Z with each value zeroed with probability p; the rest is not rescaled."""
    dropped = uniforms(z.size, entropy).reshape(z.shape) < stage["p"]
    return np.where(dropped, np.float32(0), z)


def topk(z: Rows, stage: Stage, entropy: Entropy) -> Rows:
    """Z with the share `prune` of each row's values zeroed, those of smallest magnitude."""
    flat = z.reshape(len(z), -1).copy()  # (n, d)
    order = np.argsort(np.abs(flat), axis=1, kind="stable")
    np.put_along_axis(flat, order[:, : round(stage["prune"] * flat.shape[1])], 0, axis=1)
    return flat.reshape(z.shape)


def quantise(z: Rows, stage: Stage, entropy: Entropy) -> Rows:
    """The nearest of 2^bits levels from 0 to 1."""
    steps = np.float32((1 << stage["bits"]) - 1)
    level: Rows = np.rint(np.clip(z, 0, 1) * steps) / steps
    return level


def clip(z: Rows, stage: Stage, entropy: Entropy) -> Rows:
    """Z clipped to [low, high]."""
    return np.clip(z, np.float32(stage["low"]), np.float32(stage["high"]))


def learned(z: Rows, stage: Stage, entropy: Entropy) -> Rows:
    """Z with fresh noise of learned mean and scale, each number on the grid of its own scale."""
    if "scale" not in stage:
        raise ExportError(f"the numbers of {stage['file']} are missing; load with `read_stages`")
    moved = z.astype(np.float64) + stage["location"].astype(np.float64)
    return with_noise_on_grid(moved, stage["scale"], stage["noise"], entropy)


STAGES: Mapping[str, tuple[Callable[[Rows, Stage, Entropy], Rows], tuple[str, ...]]] = {
    "gaussian": (gaussian, ("std",)),
    "dropout": (dropout, ("p",)),
    "topk": (topk, ("prune",)),
    "quantise": (quantise, ("bits",)),
    "clip": (clip, ("low", "high")),
    "learned": (learned, ("std",)),
}


def check_stages(stages: Sequence[Any]) -> None:
    """Reject unknown stages: a client without them would send more than was audited."""
    for stage in stages:
        kind = str(stage.get("kind")) if isinstance(stage, dict) else ""
        if kind not in STAGES:
            raise ExportError(
                f"unknown channel stage {stage!r}; this client knows {', '.join(STAGES)}. "
                "Install the version of splitveil that exported the model"
            )
        known = {"kind", *STAGES[kind][1], *(("noise", "file") if kind == "learned" else ())}
        if unknown := sorted(stage.keys() - known):
            raise ExportError(
                f"channel stage {stage!r:.200} has {', '.join(unknown)!r:.80}, which this client "
                "does not know. Install the version of splitveil that exported the model"
            )
        numbers = [stage.get(key) for key in STAGES[kind][1]]
        if not all(type(v) in (int, float) and math.isfinite(v) for v in numbers):
            needed = ", ".join(STAGES[kind][1])
            raise ExportError(f"channel stage {stage!r} needs finite numbers for {needed}")
        problems = [r.problem(k, stage[k]) for k, r in _RANGES.items() if k in STAGES[kind][1]]
        if 0 < stage.get("std", 0) < _SMALLEST:
            problems.append(f"std must be 0 or at least {_SMALLEST:g}, got {stage['std']}")
        if kind == "quantise" and type(stage["bits"]) is not int:
            problems.append("bits must be a whole number")
        if kind == "clip" and not stage["low"] < stage["high"]:
            problems.append("low must be less than high")
        if found := "; ".join(filter(None, problems)):
            raise ExportError(f"channel stage {stage!r:.200}: {found}; export the run again")
        if kind == "learned" and not (
            stage.get("noise") in _VARIANCE and _NOISE_FILE.fullmatch(str(stage.get("file")))
        ):
            raise ExportError(
                f"channel stage {stage!r} needs a noise, one of {', '.join(_VARIANCE)}, and a file "
                "noise-N.f32; export the run again"
            )


def total_noise(stages: Sequence[Stage]) -> float:
    """Standard deviation of all noise that the stages add; 0 if they add none.

    For learned noise, the root of its mean variance over the wire.

    >>> total_noise([{"kind": "gaussian", "std": 3.0}, {"kind": "gaussian", "std": 4.0}])
    5.0
    """
    return math.hypot(*(float(s["std"]) for s in stages if s["kind"] in ("gaussian", "learned")))


def wire_step(stages: Sequence[Stage]) -> float | None:
    """Step h of the grid that everything sent lies on; None if one step does not say it.

    That is the grid of the last Gaussian noise; dropout and pruning leave numbers on it. After
    learned noise each number has a grid of its own, and floats are sent.

    >>> wire_step([{"kind": "gaussian", "std": 0.5}, {"kind": "topk", "prune": 0.5}])
    0.03125
    """
    left = [s for s in stages if s["kind"] not in ("dropout", "topk")]
    if not left or left[-1]["kind"] != "gaussian" or not left[-1]["std"] > 0:
        return None
    return float(step_of(float(left[-1]["std"])))


def describe_noise(stages: Sequence[Stage]) -> str:
    """What is random about the stages, in words.

    >>> describe_noise([{"kind": "gaussian", "std": 0.1}, {"kind": "dropout", "p": 0.2}])
    'Gaussian noise of std 0.1 and dropout of 0.2 of the values'
    """
    words = {
        "gaussian": "Gaussian noise of std {std:g}",
        "learned": "learned {noise} noise of mean std {std:g}",
        "dropout": "dropout of {p:g} of the values",
    }
    found = [words[s["kind"]].format_map(s) for s in stages if s["kind"] in words]
    return " and ".join(found) or "no noise"


def mean_std(scale: NDArray[Any], noise: str) -> float:
    """Root of the mean variance of learned noise.

    >>> mean_std(np.array([1.0, 7.0]), "gaussian"), mean_std(np.array([2.0]), "laplace") ** 2
    (5.0, 8.000000000000002)
    """
    return math.sqrt(_VARIANCE[noise] * float(np.square(scale, dtype=np.float64).mean()))


def pack_noise(scale: NDArray[Any], location: NDArray[Any]) -> bytes:
    """The content of a `noise-N.f32`: scales, then locations, as little-endian float32."""
    return np.stack([scale, location]).astype("<f4").tobytes()


def with_noise(stage: Stage, content: bytes, shape: tuple[int, ...]) -> Stage:
    """A learned stage with the numbers of its file, for a wire of this shape."""
    file, size = stage["file"], 2 * math.prod(shape)
    if len(content) != 4 * size:
        raise ExportError(
            f"{file} has {len(content)} bytes, expected {4 * size} for a wire of shape {shape}; "
            "export the run again"
        )
    scale, location = np.frombuffer(content, "<f4").astype(np.float32).reshape(2, *shape)
    if not (np.isfinite(scale).all() and np.isfinite(location).all() and (scale > 0).all()):
        raise ExportError(f"{file} holds a number that is not finite, or a scale ≤ 0; export again")
    # A manipulated std would promise noise that the file does not add.
    if not math.isclose(found := mean_std(scale, stage["noise"]), stage["std"], rel_tol=1e-5):
        raise ExportError(
            f"{file} adds noise of std {found:g}, the manifest says {stage['std']}; export again"
        )
    return {**stage, "scale": scale, "location": location}


def apply_stages(z: Rows, stages: Sequence[Stage], entropy: Entropy = os.urandom) -> Rows:
    """What is sent for smashed data z (n, …); every row and every call gets a fresh draw.

    >>> z = np.array([[0.25, -0.5]], np.float32)
    >>> apply_stages(z, [{"kind": "topk", "prune": 0.5}]).tolist()
    [[0.0, -0.5]]
    """
    for stage in stages:
        z = STAGES[stage["kind"]][0](z, stage, entropy).astype(np.float32, copy=False)
    return z
