"""The training loop, read top to bottom."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from splitveil.graphs import compile_methods, set_rates
from splitveil.train.checkpoint import read_checkpoint, write_checkpoint
from splitveil.train.distributed import own_rows
from splitveil.train.files import MetricsLog
from splitveil.train.interrupt import catch_interrupt
from splitveil.train.logbook import Clock, in_short, log_line
from splitveil.train.schedule import Schedule, companion_rate
from splitveil.train.state import (
    TrainState,
    companions,
    learners,
    new_state,
    restore,
    snapshot,
)
from splitveil.train.step import Compiles, EvalSet, TrainSet, accuracy, clean_features
from splitveil.train.stepper import Stepper
from splitveil.train.task import LABELS, Task
from splitveil.types import Json, Paced, Progress, Refits


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The numbers of a run that the loop itself needs."""

    schedule: Schedule
    batch_size: int
    seed: int
    momentum: float = 0.9
    weight_decay: float = 5e-4
    log_every: int = 50
    checkpoint_seconds: float = 60.0
    compile: bool = False
    task: Task = LABELS


def train(
    model: nn.Module,
    surrogate: nn.Module | None,
    data: TrainSet,
    val: EvalSet,
    plan: Plan,
    *,
    fabric: Fabric,
    folder: Path,
    passport: Json,
    progress: Progress,
    companion: nn.Module | None = None,
    resume: bool = False,
) -> Json:
    """Train `model` (and the surrogate's own parameters); returns a summary of the run.

    A `companion` learns beside it from the same batches.
    Writes `metrics.jsonl`, TensorBoard events and `checkpoint.safetensors` into `folder`. The
    same arguments give the same bits on a CPU, whether or not the run was interrupted between.
    """
    schedule, target = plan.schedule, folder / "checkpoint.safetensors"
    for part in (model, surrogate, companion):
        _to_device(part, fabric)
    stepped = _stepped(model, companion, fabric, compiled=plan.compile)
    state = new_state(
        model,
        surrogate,
        schedule.penalty,
        plan.seed,
        momentum=plan.momentum,
        weight_decay=plan.weight_decay,
        companion=companion,
    )
    if resume:
        restore(state, read_checkpoint(target))
    remembers = schedule.penalty.lambd > 0
    step = Stepper(stepped, data, state, fabric, task=plan.task, remembers=remembers)
    rates = [] if companion is None else [lr for _, lr in learners(companion)]
    clock = Clock(state.seconds)
    model.train()
    with catch_interrupt() as interrupt, MetricsLog(folder, state.log_offset) as metrics:
        order, order_epoch, last = torch.empty(0), 0, ""
        while state.step < schedule.total_steps:
            epoch, index = schedule.epoch_of(state.step), state.step % schedule.steps_per_epoch
            if order_epoch != epoch:
                order, order_epoch = data.order(epoch), epoch
            rows = own_rows(order[index * plan.batch_size : (index + 1) * plan.batch_size], fabric)
            _set_companion_rates(state, rates, state.step / schedule.total_steps)
            step(rows, schedule.lr_at(state.step), schedule.weights_at(state.step))
            state.step += 1
            if isinstance(companion, Paced):
                companion.pace(state.step / schedule.total_steps)

            if index + 1 == schedule.steps_per_epoch:
                line = log_line("epoch", state, schedule, clock)
                line["val_accuracy"] = accuracy(model, val, plan.seed, fabric)
                state.meters.reset()
                metrics.append(line)
                last = in_short(line)
                _refit(state, data, order, schedule, fabric)
            elif state.step % plan.log_every == 0:
                line = log_line("step", state, schedule, clock)
                metrics.append(line)
                last = in_short(line)
            progress(state.step, schedule.total_steps, f"epoch {epoch}/{schedule.epochs}{last}")
            if interrupt.requested or _save_now(plan, state.step, clock):
                state.seconds, state.log_offset = clock.seconds(), metrics.offset
                with clock.saving():
                    write_checkpoint(target, snapshot(state, passport))
            if interrupt.requested:
                raise KeyboardInterrupt
    return {"steps": state.step, "seconds": state.seconds, "skipped": state.skipped()}


def _stepped(
    model: nn.Module, companion: nn.Module | None, fabric: Fabric, *, compiled: bool
) -> nn.Module:
    """The model as a step calls it: wrapped by Fabric; compiled if asked, and alone.

    What a companion computes of a batch is compiled in place.
    """
    wrapped = fabric.setup_module(model)
    wrapped.mark_forward_method("split_forward")
    if not compiled or fabric.world_size > 1:
        return cast(nn.Module, wrapped)
    for part in [] if companion is None else companions(companion):
        compile_methods(part, "learn", "penalty")
    return cast(Compiles, model).compiled()


def _to_device(part: nn.Module | None, fabric: Fabric) -> None:
    """Onto the run's device, in place; on a GPU with the channels last."""
    if part is not None:
        fabric.to_device(part)
        if fabric.device.type == "cuda":
            part.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _set_companion_rates(state: TrainState, rates: Sequence[float], done: float) -> None:
    """A companion's optimiser is the last one, and has a schedule of its own."""
    if rates:
        set_rates(state.optimisers[-1], [companion_rate(done, rate) for rate in rates])


def _save_now(plan: Plan, step: int, clock: Clock) -> bool:
    """At the end, after a while, and at the ends of about fifty epochs unless that takes long."""
    schedule = plan.schedule
    every = max(1, schedule.epochs // 50) * schedule.steps_per_epoch
    return (
        step == schedule.total_steps
        or (step % every == 0 and clock.affordable())
        or clock.overdue(plan.checkpoint_seconds)
    )


def _refit(
    state: TrainState, data: TrainSet, rows: Tensor, schedule: Schedule, fabric: Fabric
) -> None:
    """Fit a surrogate that asks for it to the epoch's clean features; nothing at λ = 0."""
    if isinstance(state.surrogate, Refits) and schedule.penalty.lambd > 0:
        encoder = cast(nn.Module, state.model.encoder)
        features = partial(clean_features, encoder, data, rows, fabric)
        state.surrogate.refit_stream(features, state.streams["surrogate"])
