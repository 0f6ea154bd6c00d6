"""Checkpoints: the state of a training, saved and restored bit for bit.

A checkpoint is one safetensors file with JSON in its header; nothing is ever unpickled.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from splitveil.errors import CheckpointError
from splitveil.io import Json, atomic_file, parse_json
from splitveil.rng import load_states, save_states
from splitveil.train.step import TrainState

log = logging.getLogger("splitveil")
CHECKPOINT = "checkpoint.safetensors"
FORMAT = "splitveil-1"
SHOWN = 4  # mismatches named in a message
COUNTERS = ("step", "seconds", "warned", "collapsed", "log_offset")


def snapshot(state: TrainState, passport: Json) -> "Checkpoint":
    """The whole state of a training as a checkpoint.

    Args:
        state: After a step.
        passport: Where the run comes from, any JSON.
    """
    tensors: dict[str, Tensor] = {}
    for name, part in state.parts().items():
        tensors |= prefixed(name, part.state_dict())
    tensors |= prefixed("rng", save_states(state.streams))
    tensors |= prefixed("meter", state.meters.sums)
    tensors |= prefixed("missed", state.meters.missed)
    tensors |= prefixed("guard", vars(state.guard))
    optimisers = []
    for index, optimiser in enumerate(state.optimisers):
        held, meta = optimiser_state(optimiser)
        tensors |= prefixed(f"optimiser{index}", held)
        optimisers.append(meta)
    meta = {name: getattr(state, name) for name in COUNTERS} | {
        "meter_counts": state.meters.counts,
        "optimisers": optimisers,
        "threads": torch.get_num_threads(),
        "peak_bytes": peak_bytes(state.guard.loss.device, state.peak_bytes),
        "passport": passport,
    }
    return Checkpoint(tensors, meta)


def peak_bytes(device: torch.device, before: int | None = None) -> int | None:
    """Most bytes that tensors held at once on a GPU since `forget_peak`, or `before` if more.

    None on a CPU.
    """
    # The peak of a process cannot be reset, so on a CPU it may be that of earlier work.
    if device.type != "cuda":
        return None
    return max(before or 0, torch.cuda.max_memory_allocated(device))


def restore(state: TrainState, checkpoint: "Checkpoint") -> None:
    """Put a snapshot back into a fresh state; sums are the same bits only with as many threads."""
    meta = checkpoint.meta
    if meta.get("threads") != torch.get_num_threads():
        log.warning(
            "the checkpoint was written with %s threads, this process has %d: the run continues, "
            "but rounds differently",
            meta.get("threads"),
            torch.get_num_threads(),
        )
    for name, part in state.parts().items():
        load_module(part, checkpoint.part(name), name)
    try:
        load_states(state.streams, checkpoint.part("rng"))
        for index, optimiser in enumerate(state.optimisers):
            held = checkpoint.part(f"optimiser{index}")
            load_optimiser(optimiser, held, meta["optimisers"][index])
        device = state.guard.loss.device
        for name, counter in vars(state.guard).items():
            counter.copy_(checkpoint.tensors[f"guard.{name}"])
        state.meters.sums = {k: v.to(device) for k, v in checkpoint.part("meter").items()}
        missed = {name: torch.zeros((), dtype=torch.long) for name in state.meters.sums}
        missed |= checkpoint.part("missed")  # which checkpoints of 0.1.0 do not have
        state.meters.missed = {k: v.to(device) for k, v in missed.items()}
        state.meters.counts = Counter(meta["meter_counts"])
        for name in COUNTERS:
            setattr(state, name, type(getattr(state, name))(meta[name]))
        state.peak_bytes = meta.get("peak_bytes")
    except (KeyError, IndexError, ValueError, TypeError) as err:
        raise CheckpointError(
            f"the checkpoint lacks a part of the training state ({err!r}); "
            "train again with --overwrite"
        ) from err


@dataclass(frozen=True)
class Checkpoint:
    """All that is needed to continue a run: tensors by name, and JSON."""

    tensors: dict[str, Tensor]
    meta: Json

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix.`, under the rest of their names."""
        start = f"{prefix}."
        return {k.removeprefix(start): v for k, v in self.tensors.items() if k.startswith(start)}


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under names that begin with `prefix.`."""
    return {f"{prefix}.{k}": v for k, v in tensors.items()}


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint; a crash leaves the previous one as it was."""
    tensors = {k: v.detach().cpu().contiguous() for k, v in checkpoint.tensors.items()}
    meta = {"format": FORMAT, "state": json.dumps(checkpoint.meta, allow_nan=False)}
    with atomic_file(path) as file:
        file.write(save(tensors, metadata=meta))


def read_checkpoint(path: Path) -> Checkpoint:
    """Read what `write_checkpoint` wrote; another or a broken file raises a CheckpointError."""
    with _opened(path) as (file, meta):
        return Checkpoint({key: file.get_tensor(key) for key in file.keys()}, meta)  # noqa: SIM118


def read_meta(path: Path) -> Json:
    """Read the JSON of a checkpoint without its tensors; it has a `step` and a `passport`."""
    with _opened(path) as (_, meta):
        if "step" not in meta:
            raise CheckpointError(f"{path} is broken: it names no step; train with --overwrite")
        return {"passport": {}} | meta


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Json]]:
    """An open checkpoint, and the JSON in its header."""
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}; train the run first")
    try:
        with safe_open(path, framework="pt") as file:
            meta = file.metadata() or {}
            if meta.get("format") != FORMAT:
                raise CheckpointError(
                    f"{path} is not a SplitVeil checkpoint: its format is {meta.get('format')!r}, "
                    f"expected {FORMAT!r}; choose the folder of a run"
                )
            yield file, _checked(parse_json(meta["state"]))
    except (SafetensorError, KeyError, ValueError, OSError) as err:
        raise CheckpointError(
            f"{path} is broken: {err}; restore it from a backup, or train again with --overwrite"
        ) from err


def _checked(state: object) -> Json:
    """The JSON of a checkpoint; raises ValueError if a count in it is impossible."""
    if not isinstance(state, dict):
        raise ValueError(f"its state must be an object, got {type(state).__name__}")
    for name in COUNTERS:
        count = state.get(name, 0)
        if not isinstance(count, int | float) or count < 0:
            raise ValueError(f"`{name}` of its state must be a number ≥ 0, got {count!r:.60}")
    if type(state.get("step", 0)) is not int:
        raise ValueError(f"`step` of its state must be a whole number, got {state['step']}")
    if not isinstance(state.get("passport", {}), dict):
        raise ValueError("`passport` of its state must be an object")
    return state


def load_module(module: nn.Module, tensors: Mapping[str, Tensor], what: str) -> None:
    """Load a state dict; names all missing keys and wrong shapes before anything is changed."""
    own = module.state_dict()
    problems = [f"lacks {k}" for k in own if k not in tensors]
    problems += [f"has an extra {k}" for k in tensors if k not in own]
    problems += [
        f"{k} is {tuple(tensors[k].shape)}, expected {tuple(v.shape)}"
        for k, v in own.items()
        if k in tensors and tensors[k].shape != v.shape
    ]
    if problems:
        shown = "; ".join(problems[:SHOWN])
        if len(problems) > SHOWN:
            shown += f"; and {len(problems) - SHOWN} more"
        raise CheckpointError(
            f"the checkpoint belongs to another architecture ({what}): it {shown}; "
            "use the net, dataset and defence that its config.toml names"
        )
    module.load_state_dict(dict(tensors))


def optimiser_state(optimiser: torch.optim.Optimizer) -> tuple[dict[str, Tensor], Json]:
    """An optimiser's state as flat tensors and JSON."""
    state = optimiser.state_dict()
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    for index, slots in state["state"].items():
        for key, value in slots.items():
            target: dict[str, Any] = tensors if isinstance(value, Tensor) else scalars
            target[f"{index}.{key}"] = value
    groups = [g | {"lr": float(g["lr"])} for g in state["param_groups"]]
    return tensors, {"scalars": scalars, "param_groups": groups}


def load_optimiser(
    optimiser: torch.optim.Optimizer, tensors: Mapping[str, Tensor], meta: Json
) -> None:
    """Put back what `optimiser_state` returned."""
    slots: dict[int, dict[str, Any]] = {}
    for name, value in (*tensors.items(), *meta["scalars"].items()):
        index, key = name.split(".", 1)
        slots.setdefault(int(index), {})[key] = value
    rates = [group["lr"] for group in optimiser.param_groups]
    optimiser.load_state_dict({"state": slots, "param_groups": meta["param_groups"]})
    for param, kept in optimiser.state.items():
        # A file has no strides, but a fused step wants those of the parameter.
        for name, value in kept.items():
            alike = isinstance(value, Tensor) and value.shape == param.shape
            if alike and value.stride() != param.stride():
                kept[name] = torch.empty_like(param, dtype=value.dtype).copy_(value)
    for group, rate in zip(optimiser.param_groups, rates, strict=True):
        if isinstance(rate, Tensor):  # a captured graph reads this very tensor
            group["lr"] = rate.fill_(group["lr"])
