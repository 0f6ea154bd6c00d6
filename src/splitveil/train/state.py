"""Everything that changes while a run trains, and how it is saved and put back."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Generator, Tensor, nn

from splitveil.errors import CheckpointError
from splitveil.graphs import Aside
from splitveil.rng import load_states, save_states, stream
from splitveil.train.checkpoint import (
    Checkpoint,
    load_module,
    load_optimiser,
    optimiser_state,
    prefixed,
)
from splitveil.train.compose import Guard
from splitveil.types import Companion, Json, PenaltyPlan

log = logging.getLogger("splitveil")
STREAMS = ("augment", "channel", "surrogate")


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
    optimisers: list[torch.optim.Optimizer]
    streams: dict[str, Generator]
    guard: Guard
    meters: Meters
    aside: Aside
    companion: nn.Module | None = None
    step: int = 0
    seconds: float = 0.0
    warned: int = 0
    collapsed: bool = False
    log_offset: int = field(default=0)
    peak_bytes: int | None = None

    def skipped(self) -> int:
        """How often a penalty's loss or gradient was not finite and was left out (syncs)."""
        own = getattr(self.surrogate, "skips", None)
        parameters = 0 if own is None else int(own)
        return int(self.guard.loss) + int(self.guard.gradient) + parameters


def new_state(
    model: nn.Module,
    surrogate: nn.Module | None,
    penalty: PenaltyPlan,
    seed: int,
    *,
    momentum: float,
    weight_decay: float,
    companion: nn.Module | None = None,
) -> TrainState:
    """A run before its first step.

    SGD for the model; the surrogate's own parameters join it as a second group with the same
    settings (the seeds), or get Adam at `penalty.attention_lr`. A companion's optimiser is the
    last one.
    """
    device = next(model.parameters()).device
    forget_peak(device)
    groups = [{"params": list(model.parameters())}]
    own = [] if surrogate is None else list(surrogate.parameters())
    if own and penalty.attention_lr is None:
        groups.append({"params": own})
    on_gpu = device.type == "cuda"
    lr = torch.zeros((), device=device) if on_gpu else 0.0  # a replayed step reads a tensor
    optimisers: list[torch.optim.Optimizer] = [
        torch.optim.SGD(
            groups, lr=lr, momentum=momentum, weight_decay=weight_decay, fused=on_gpu or None
        )
    ]
    if own and penalty.attention_lr is not None:
        optimisers.append(_adam([own], penalty.attention_lr, device))
    if companion is not None:
        optimisers.append(_adam([own for own, _ in learners(companion)], 0.0, device))
    streams = {name: stream(seed, name, device) for name in STREAMS}
    counters = (Guard.on(device), Meters(device), Aside(device))
    return TrainState(model, surrogate, optimisers, streams, *counters, companion)


def companions(companion: nn.Module) -> list[nn.Module]:
    """Those that stand in one; itself if it is not several."""
    parts = getattr(companion, "parts", None)
    return list(parts) if isinstance(parts, nn.ModuleList) else [companion]


def learners(companion: nn.Module) -> list[tuple[list[nn.Parameter], float]]:
    """Parameters and rate of each companion in one."""
    groups = getattr(companion, "groups", None)
    if callable(groups):
        return list(groups())
    return [(list(companion.parameters()), float(cast(Companion, companion).lr))]


def _adam(parts: Sequence[list[nn.Parameter]], lr: float, device: torch.device) -> torch.optim.Adam:
    """One for all parts; each has a rate of its own, and a part may have no parameters."""
    on_gpu = device.type == "cuda"
    groups = [
        {"params": own, "lr": torch.full((), lr, device=device) if on_gpu else lr} for own in parts
    ]
    return torch.optim.Adam(groups, capturable=on_gpu, fused=on_gpu or None)


def snapshot(state: TrainState, passport: Json) -> Checkpoint:
    """The whole state as a checkpoint; `passport` is stored beside it."""
    tensors = prefixed("model", state.model.state_dict())
    if state.surrogate is not None:
        tensors |= prefixed("surrogate", state.surrogate.state_dict())
    if state.companion is not None:
        tensors |= prefixed("companion", state.companion.state_dict())
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


def restore(state: TrainState, checkpoint: Checkpoint) -> None:
    """Put a snapshot back, bit for bit (the same number of threads is needed for the bits)."""
    meta = checkpoint.meta
    if meta.get("threads") != torch.get_num_threads():
        log.warning(
            "the checkpoint was written with %s threads, this process has %d: the run continues, "
            "but not bit for bit",
            meta.get("threads"),
            torch.get_num_threads(),
        )
    load_module(state.model, checkpoint.part("model"), "model")
    if state.surrogate is not None:
        load_module(state.surrogate, checkpoint.part("surrogate"), "surrogate")
    if state.companion is not None:
        load_module(state.companion, checkpoint.part("companion"), "companion")
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
