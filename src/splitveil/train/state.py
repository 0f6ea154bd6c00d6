"""Everything that changes while a run trains, and the checkpoints that keep it.

A checkpoint is one safetensors file with JSON in its header; nothing is ever unpickled.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Generator, Tensor, nn

from splitveil.config.resolve import Parts
from splitveil.config.run_config import RunConfig
from splitveil.cuda import Aside, to_device
from splitveil.defences.base import Companion, PenaltyPlan
from splitveil.errors import CheckpointError
from splitveil.io import Json, atomic_file
from splitveil.rng import load_states, save_states, stream

log = logging.getLogger("splitveil")
CHECKPOINT = "checkpoint.safetensors"
FORMAT = "splitveil-1"
SHOWN = 4  # mismatches named in a message
STREAMS = ("augment", "channel", "surrogate")
TRAINED = ("model", "surrogate", "companion")
LOW_RATIO = 0.5


@dataclass(frozen=True)
class Guard:
    """Counters on the device, read at the logging cadence: a broken penalty is never silent.

    `loss` counts steps whose rob was not finite, `gradient` those whose gradient at z was not,
    `low` the steps in a row in which the surrogate reported less than half of the true rate.
    """

    loss: Tensor
    gradient: Tensor
    low: Tensor

    @classmethod
    def on(cls, device: torch.device | str) -> "Guard":
        """All at zero."""
        zero = torch.zeros((), dtype=torch.long, device=device)
        return cls(zero, zero.clone(), zero.clone())

    def watch(self, ratio: Tensor) -> None:
        """Count another step with a low surrogate-to-true ratio, or start anew."""
        self.low.copy_(torch.where(ratio < LOW_RATIO, self.low + 1, 0))


class Meters:
    """Running sums on the device; reading one costs a sync, so it is done at the log cadence."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add one observation of each value to its sum, on the device."""
        for name, value in values.items():
            if name not in self.sums:
                self.sums[name] = torch.zeros((), dtype=torch.float64, device=self._device)
            self.sums[name].add_(value.detach())

    def tick(self, names: Iterable[str]) -> None:
        """Count the observation of these values: apart from `add`, which a graph may replay."""
        for name in names:
            self.counts[name] = self.counts.get(name, 0) + 1

    def means(self) -> dict[str, float | None]:
        """Mean of each value since the last reset; null where it is not finite."""
        read = {name: float(self.sums[name]) / count for name, count in self.counts.items()}
        return {k: v if abs(v) < float("inf") else None for k, v in read.items()}

    def reset(self) -> None:
        """Start anew; the sums stay where they are."""
        for total in self.sums.values():
            total.zero_()
        self.counts.clear()


@dataclass
class TrainState:
    """The moving parts of a run."""

    model: nn.Module
    surrogate: nn.Module | None
    companion: nn.Module | None
    optimisers: list[torch.optim.Optimizer]
    streams: dict[str, Generator]
    guard: Guard
    meters: Meters
    aside: Aside
    step: int = 0
    seconds: float = 0.0
    warned: int = 0
    collapsed: bool = False
    log_offset: int = 0
    peak_bytes: int | None = None

    def parts(self) -> dict[str, nn.Module]:
        """Model, surrogate and companion, those that there are."""
        found = {name: getattr(self, name) for name in TRAINED}
        return {name: part for name, part in found.items() if part is not None}

    def skipped(self) -> int:
        """How often a penalty's loss or gradient was not finite and was left out (syncs)."""
        own = getattr(self.surrogate, "skips", None)
        parameters = 0 if own is None else int(own)
        return int(self.guard.loss) + int(self.guard.gradient) + parameters


def new_state(
    parts: Parts, penalty: PenaltyPlan, config: RunConfig, device: torch.device
) -> TrainState:
    """A run before its first step, its parts moved to the device.

    SGD for the model; the surrogate's own parameters join it as a second group with the same
    settings (the reference documents), or get Adam at `penalty.attention_lr`. A companion's
    optimiser is the last one.
    """
    model, surrogate, companion = parts.model, parts.surrogate, parts.companion
    for part in (model, surrogate, companion):
        if part is not None:
            to_device(part, device)
    on_gpu = device.type == "cuda"
    forget_peak(device)
    groups = [{"params": list(model.parameters())}]
    own = [] if surrogate is None else list(surrogate.parameters())
    if own and penalty.attention_lr is None:
        groups.append({"params": own})
    lr = torch.zeros((), device=device) if on_gpu else 0.0  # a replayed step reads a tensor
    optimisers: list[torch.optim.Optimizer] = [
        torch.optim.SGD(
            groups,
            lr=lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            fused=on_gpu or None,
        )
    ]
    if own and penalty.attention_lr is not None:
        optimisers.append(_adam([own], penalty.attention_lr, device))
    if companion is not None:
        learning = [list(part.parameters()) for part in companions(companion)]
        optimisers.append(_adam(learning, 0.0, device))
    return TrainState(
        model,
        surrogate,
        companion,
        optimisers,
        streams={name: stream(config.seed, name, device) for name in STREAMS},
        guard=Guard.on(device),
        meters=Meters(device),
        aside=Aside(device),
    )


def companions(companion: nn.Module | None) -> list[nn.Module]:
    """Those that stand in one: its `parts`, itself if it has none, nothing of None."""
    if companion is None:
        return []
    parts = getattr(companion, "parts", None)
    return list(parts) if isinstance(parts, nn.ModuleList) else [companion]


def companion_rates(companion: nn.Module | None) -> list[float]:
    """The learning rate that each of them starts with."""
    return [float(cast(Companion, part).lr) for part in companions(companion)]


def _adam(parts: Sequence[list[nn.Parameter]], lr: float, device: torch.device) -> torch.optim.Adam:
    """One for all parts; each has a rate of its own, and a part may have no parameters."""
    on_gpu = device.type == "cuda"
    groups = [
        {"params": own, "lr": torch.full((), lr, device=device) if on_gpu else lr} for own in parts
    ]
    return torch.optim.Adam(groups, capturable=on_gpu, fused=on_gpu or None)


def snapshot(state: TrainState, passport: Json) -> "Checkpoint":
    """The whole state as a checkpoint; `passport` is stored beside it."""
    tensors: dict[str, Tensor] = {}
    for name, part in state.parts().items():
        tensors |= prefixed(name, part.state_dict())
    tensors |= prefixed("rng", save_states(state.streams))
    tensors |= prefixed("meter", state.meters.sums)
    tensors |= prefixed("guard", vars(state.guard))
    optimisers = []
    for index, optimiser in enumerate(state.optimisers):
        held, meta = optimiser_state(optimiser)
        tensors |= prefixed(f"optimiser{index}", held)
        optimisers.append(meta)
    meta = {
        "step": state.step,
        "seconds": state.seconds,
        "warned": state.warned,
        "collapsed": state.collapsed,
        "log_offset": state.log_offset,
        "meter_counts": state.meters.counts,
        "optimisers": optimisers,
        "threads": torch.get_num_threads(),
        "peak_bytes": peak_bytes(state.guard.loss.device, state.peak_bytes),
        "passport": passport,
    }
    return Checkpoint(tensors, meta)


def forget_peak(device: torch.device) -> None:
    """Let the peak of a GPU's memory start from what is held now: what ran before is no part."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device, before: int | None = None) -> int | None:
    """Most memory that tensors held at once on a GPU since `forget_peak`, or `before` if more.

    None elsewhere: the peak of a process cannot be taken back, so it may be of what ran before.
    """
    if device.type != "cuda":
        return None
    return max(before or 0, torch.cuda.max_memory_allocated(device))


def restore(state: TrainState, checkpoint: "Checkpoint") -> None:
    """Put a snapshot back, bit for bit (the same number of threads is needed for the bits)."""
    meta = checkpoint.meta
    if meta.get("threads") != torch.get_num_threads():
        log.warning(
            "the checkpoint was written with %s threads, this process has %d: the run continues, "
            "but not bit for bit",
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
        state.meters.counts = dict(meta["meter_counts"])
        state.step, state.seconds = int(meta["step"]), float(meta["seconds"])
        state.warned, state.log_offset = int(meta["warned"]), int(meta["log_offset"])
        state.collapsed = bool(meta["collapsed"])
        state.peak_bytes = meta.get("peak_bytes")
    except (KeyError, IndexError, ValueError, TypeError) as err:
        raise CheckpointError(
            f"the checkpoint lacks part of the training state ({err!r}); "
            "train again with --overwrite"
        ) from err


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
    with _opened(path) as (file, meta):
        return Checkpoint({key: file.get_tensor(key) for key in file.keys()}, meta)  # noqa: SIM118


def read_meta(path: Path) -> Json:
    """The JSON of a checkpoint alone, without its tensors."""
    with _opened(path) as (_, meta):
        return meta


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Json]]:
    """A checkpoint's file, and the JSON in its header."""
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
            yield file, dict(json.loads(meta["state"]))
    except (SafetensorError, KeyError, ValueError, OSError) as err:
        raise CheckpointError(
            f"{path} is broken: {err}; restore it from a copy or train again with --overwrite"
        ) from err


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
