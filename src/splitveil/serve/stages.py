"""The channel in numpy: what the client does to smashed data before it leaves the device.

Stages are the plain JSON of a manifest: ``{"kind": "gaussian", "std": 0.1}``. Each is the twin of a
module of `splitveil.nets` and gives the same values, up to the random draw.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitveil.serve.faults import ExportError
from splitveil.serve.noise import Entropy, normals, uniforms

Rows = NDArray[np.float32]
Stage = Mapping[str, Any]


def gaussian(z: Rows, stage: Stage, entropy: Entropy) -> Rows:
    """Z with fresh noise: z + σ·n."""
    drawn = normals(z.size, entropy).astype(np.float32).reshape(z.shape)
    return z + np.float32(stage["std"]) * drawn


def dropout(z: Rows, stage: Stage, entropy: Entropy) -> Rows:
    """Z with each value zeroed with probability p; the rest is not rescaled."""
    dropped = uniforms(z.size, entropy).reshape(z.shape) < stage["p"]
    return np.where(dropped, np.float32(0), z)


def topk(z: Rows, stage: Stage, entropy: Entropy) -> Rows:
    """Z without the share `prune` of each row's values, those of smallest magnitude."""
    del entropy
    flat = z.reshape(len(z), -1).copy()  # (n, d)
    order = np.argsort(np.abs(flat), axis=1, kind="stable")
    np.put_along_axis(flat, order[:, : round(stage["prune"] * flat.shape[1])], 0, axis=1)
    return flat.reshape(z.shape)


def quantise(z: Rows, stage: Stage, entropy: Entropy) -> Rows:
    """The nearest of 2^bits levels from 0 to 1."""
    del entropy
    steps = np.float32((1 << stage["bits"]) - 1)
    level: Rows = np.rint(np.clip(z, 0, 1) * steps) / steps
    return level


def clip(z: Rows, stage: Stage, entropy: Entropy) -> Rows:
    """Z moved into [low, high]."""
    del entropy
    return np.clip(z, np.float32(stage["low"]), np.float32(stage["high"]))


STAGES: Mapping[str, tuple[Callable[[Rows, Stage, Entropy], Rows], tuple[str, ...]]] = {
    "gaussian": (gaussian, ("std",)),
    "dropout": (dropout, ("p",)),
    "topk": (topk, ("prune",)),
    "quantise": (quantise, ("bits",)),
    "clip": (clip, ("low", "high")),
}


def check_stages(stages: Sequence[Any]) -> None:
    """Refuse a stage this client does not know: without it more would be sent than was audited."""
    for stage in stages:
        kind = str(stage.get("kind")) if isinstance(stage, dict) else ""
        if kind not in STAGES:
            raise ExportError(
                f"unknown channel stage {stage!r}; this client knows {', '.join(STAGES)}: "
                "install the version of splitveil that exported it"
            )
        numbers = [stage.get(key) for key in STAGES[kind][1]]
        if not all(type(v) in (int, float) and math.isfinite(v) for v in numbers):
            raise ExportError(f"channel stage {stage!r} needs numbers for {STAGES[kind][1]}")


def total_noise(stages: Sequence[Stage]) -> float:
    """Standard deviation of the Gaussian noise that the stages add in all.

    >>> total_noise([{"kind": "gaussian", "std": 3.0}, {"kind": "gaussian", "std": 4.0}])
    5.0
    """
    return math.hypot(*(float(s["std"]) for s in stages if s["kind"] == "gaussian"))


def apply_stages(z: Rows, stages: Sequence[Stage], entropy: Entropy = os.urandom) -> Rows:
    """What is sent for smashed data z (n, …); draws anew for every row and every call.

    >>> z = np.array([[0.25, -0.5]], np.float32)
    >>> apply_stages(z, [{"kind": "topk", "prune": 0.5}]).tolist()
    [[0.0, -0.5]]
    """
    for stage in stages:
        z = STAGES[stage["kind"]][0](z, stage, entropy).astype(np.float32, copy=False)
    return z
