"""Checkpoints: one safetensors file, JSON in its header; nothing is ever unpickled."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from splitveil.errors import CheckpointError
from splitveil.train.files import atomic_file
from splitveil.types import Json

FORMAT = "splitveil-1"
SHOWN = 4  # mismatches named in a message


@dataclass(frozen=True)
class Checkpoint:
    """Named tensors and plain JSON; enough to continue a run bit for bit."""

    tensors: dict[str, Tensor]
    meta: Json

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors below `prefix.`, without it."""
        start = f"{prefix}."
        return {k.removeprefix(start): v for k, v in self.tensors.items() if k.startswith(start)}


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors below `prefix.`."""
    return {f"{prefix}.{k}": v for k, v in tensors.items()}


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write atomically: a crash leaves the previous checkpoint whole."""
    tensors = {k: v.detach().cpu().contiguous() for k, v in checkpoint.tensors.items()}
    meta = {"format": FORMAT, "state": json.dumps(checkpoint.meta, allow_nan=False)}
    with atomic_file(path) as file:
        file.write(save(tensors, metadata=meta))


def read_checkpoint(path: Path) -> Checkpoint:
    """Read what `write_checkpoint` wrote; anything else is refused with its reason."""
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}; train the run first")
    try:
        with safe_open(path, framework="pt") as file:
            meta = file.metadata() or {}
            if meta.get("format") != FORMAT:
                raise CheckpointError(
                    f"{path} is not a SplitVeil checkpoint: format is "
                    f"{meta.get('format')!r}, expected {FORMAT!r}"
                )
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        return Checkpoint(tensors, json.loads(meta["state"]))
    except (SafetensorError, KeyError, ValueError, OSError) as err:
        raise CheckpointError(
            f"{path} is broken: {err}; restore it from a copy or train again with --overwrite"
        ) from err


def read_meta(path: Path) -> Json:
    """The JSON of a checkpoint alone, without its tensors."""
    try:
        with safe_open(path, framework="pt") as file:
            return dict(json.loads((file.metadata() or {})["state"]))
    except (SafetensorError, KeyError, ValueError, OSError) as err:
        raise CheckpointError(f"{path} is broken: {err}; restore it from a copy") from err


def load_module(module: nn.Module, tensors: Mapping[str, Tensor], what: str) -> None:
    """Load a state dict, naming every key and shape that does not fit before changing anything."""
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
            "use the net, dataset and defence it was trained with (its config.toml says)"
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
    """Put back what `optimiser_state` saved."""
    slots: dict[int, dict[str, Any]] = {}
    for name, value in (*tensors.items(), *meta["scalars"].items()):
        index, key = name.split(".", 1)
        slots.setdefault(int(index), {})[key] = value
    rates = [group["lr"] for group in optimiser.param_groups]
    optimiser.load_state_dict({"state": slots, "param_groups": meta["param_groups"]})
    for param, kept in optimiser.state.items():
        for name, value in kept.items():  # a file has no strides, and fused steps want them equal
            alike = isinstance(value, Tensor) and value.shape == param.shape
            if alike and value.stride() != param.stride():
                kept[name] = torch.empty_like(param, dtype=value.dtype).copy_(value)
    for group, rate in zip(optimiser.param_groups, rates, strict=True):
        if isinstance(rate, Tensor):  # the tensor a replayed step reads stays the same one
            group["lr"] = rate.fill_(group["lr"])
