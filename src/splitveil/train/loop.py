"""The training loop, read top to bottom."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

import torch
from lightning_fabric import Fabric
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from splitveil.errors import RunError
from splitveil.rng import stream
from splitveil.train.checkpoint import read_checkpoint, write_checkpoint
from splitveil.train.compose import compose_losses
from splitveil.train.files import MetricsLog
from splitveil.train.interrupt import catch_interrupt
from splitveil.train.schedule import Schedule, Weights
from splitveil.train.state import TrainState, new_state, restore, snapshot
from splitveil.types import Json, Progress

log = logging.getLogger("splitveil")


@dataclass(frozen=True, kw_only=True)
class TrainSet:
    """uint8 images (n, c, h, w) and labels (n,) on the device, how to order and augment them."""

    images: Tensor
    labels: Tensor
    order: Callable[[int], Tensor]
    augment: Callable[[Tensor, Generator], Tensor]


@dataclass(frozen=True, kw_only=True)
class EvalSet:
    """Float images in [0, 1] and labels; may be empty."""

    images: Tensor
    labels: Tensor


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


@runtime_checkable
class Split(Protocol):
    """What the loop asks of a model beyond being a module."""

    def split_forward(self, x: Tensor, generator: Generator | None = None) -> "Pass":
        """One pass through both halves."""
        ...


@runtime_checkable
class Pass(Protocol):
    """Clean smashed data and logits of one pass."""

    @property
    def z(self) -> Tensor:
        """Smashed data before the channel."""
        ...

    @property
    def logits(self) -> Tensor:
        """The server's answer."""
        ...


@torch.no_grad()
def accuracy(model: nn.Module, data: EvalSet, seed: int, draws: int = 1) -> float | None:
    """Share of correct answers through the channel in eval mode, mean over noise draws."""
    if len(data.labels) == 0:
        return None
    was_training = model.training
    model.eval()
    generator = stream(seed, "evaluate", data.images.device)
    correct = torch.zeros((), dtype=torch.long, device=data.labels.device)
    for _ in range(draws):
        for x, y in zip(
            torch.split(data.images, 1000), torch.split(data.labels, 1000), strict=True
        ):
            correct += (model(x, generator).argmax(1) == y).sum()
    model.train(was_training)
    return int(correct) / (draws * len(data.labels))


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
    resume: bool = False,
) -> Json:
    """Train `model` (and the surrogate's own parameters); returns a summary of the run.

    Writes `metrics.jsonl`, TensorBoard events and `checkpoint.safetensors` into `folder`. The
    same arguments give the same bits on a CPU, whether or not the run was interrupted between.
    """
    schedule, target = plan.schedule, folder / "checkpoint.safetensors"
    wrapped = fabric.setup_module(model)
    wrapped.mark_forward_method("split_forward")
    if surrogate is not None:
        surrogate = fabric.to_device(surrogate)
    state = new_state(
        model,
        surrogate,
        schedule.penalty,
        plan.seed,
        momentum=plan.momentum,
        weight_decay=plan.weight_decay,
    )
    if resume:
        restore(state, read_checkpoint(target))
    optimisers = [_wrap(fabric, o) for o in state.optimisers]
    clock = _Clock(state.seconds)
    model.train()
    with catch_interrupt() as interrupt, MetricsLog(folder, state.log_offset) as metrics:
        order, order_epoch, last = torch.empty(0), 0, ""
        while state.step < schedule.total_steps:
            epoch, index = schedule.epoch_of(state.step), state.step % schedule.steps_per_epoch
            if order_epoch != epoch:
                order, order_epoch = data.order(epoch), epoch
            rows = order[index * plan.batch_size : (index + 1) * plan.batch_size]
            x = data.augment(data.images[rows].float().div_(255), state.streams["augment"])
            y = data.labels[rows]

            for group in state.optimisers[0].param_groups:
                group["lr"] = schedule.lr_at(state.step)
            loss, values = forward_loss(
                cast(Split, wrapped), x, y, schedule.weights_at(state.step), state
            )
            _update(fabric, loss, optimisers)
            state.meters.add(values)
            state.step += 1

            if index + 1 == schedule.steps_per_epoch:
                line = _line("epoch", state, schedule, clock)
                line["val_accuracy"] = accuracy(wrapped, val, plan.seed)
                state.meters.reset()
                metrics.append(line)
                last = _short(line)
            elif state.step % plan.log_every == 0:
                line = _line("step", state, schedule, clock)
                metrics.append(line)
                last = _short(line)
            progress(state.step, schedule.total_steps, f"epoch {epoch}/{schedule.epochs}{last}")
            if interrupt.requested or clock.due(plan, state.step):
                state.seconds, state.log_offset = clock.seconds(), metrics.offset
                write_checkpoint(target, snapshot(state, passport))
                clock.saved()
            if interrupt.requested:
                raise KeyboardInterrupt
    return {"steps": state.step, "seconds": state.seconds, "skipped": state.skipped()}


def forward_loss(
    model: Split, x: Tensor, y: Tensor, weights: Weights | None, state: TrainState
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one batch, penalty included while it is active, and what to log of it."""
    out = model.split_forward(x, state.streams["channel"])
    loss = F.cross_entropy(out.logits, y)
    values = {
        "task_loss": loss,
        "train_accuracy": (out.logits.detach().argmax(1) == y).float().mean(),
    }
    if state.surrogate is not None and weights is not None:
        loss, rob = compose_losses(
            loss, out.z, y, state.surrogate, weights=weights, guard=state.guard
        )
        values |= {"rob_loss": rob.loss, "intra_mse": rob.intra_mse} | rob.diagnostics
    return loss, values


class _Clock:
    """Seconds of training, over all sittings, and when the next checkpoint is due."""

    def __init__(self, before: float) -> None:
        self._start = self._last = time.perf_counter()
        self._before = before

    def seconds(self) -> float:
        return round(self._before + time.perf_counter() - self._start, 3)

    def saved(self) -> None:
        self._last = time.perf_counter()

    def due(self, plan: Plan, step: int) -> bool:
        """At the end, after a while, and at the ends of about fifty epochs."""
        schedule = plan.schedule
        if step == schedule.total_steps:
            return True
        if time.perf_counter() - self._last > plan.checkpoint_seconds:
            return True
        every = max(1, schedule.epochs // 50) * schedule.steps_per_epoch
        return step % every == 0


def _warn_skipped(state: TrainState) -> int:
    """Warn at the first skipped penalty and at every hundredth; returns the count."""
    skipped = state.skipped()
    if skipped and (state.warned == 0 or skipped // 100 > state.warned // 100):
        log.warning(
            "the penalty's loss or gradient was not finite %d times and was left out; the task's "
            "own gradient was kept. Lower lambd or the learning rate if this goes on",
            skipped,
        )
        state.warned = skipped
    return skipped


def _line(kind: str, state: TrainState, schedule: Schedule, clock: _Clock) -> Json:
    """What is logged after a step; refuses to go on once the task loss is not finite."""
    step = state.step - 1
    epoch, weights = schedule.epoch_of(step), schedule.weights_at(step)
    line: Json = {"kind": kind, "step": state.step, "epoch": epoch, "lr": schedule.lr_at(step)}
    line["weight"] = weights.effective if weights else 0.0
    line |= state.meters.means() | {"skipped": _warn_skipped(state), "seconds": clock.seconds()}
    if line["task_loss"] is None:
        raise RunError(
            f"training diverged in epoch {epoch}: the task loss is not finite; "
            "lower lr or lambd, and start again with --overwrite"
        )
    return line


def _update(fabric: Fabric, loss: Tensor, optimisers: list[torch.optim.Optimizer]) -> None:
    for optimiser in optimisers:
        optimiser.zero_grad()
    fabric.backward(loss)
    for optimiser in optimisers:
        optimiser.step()


def _wrap(fabric: Fabric, optimiser: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return cast(torch.optim.Optimizer, fabric.setup_optimizers(optimiser))


def _short(line: Json) -> str:
    parts = [f"loss {line['task_loss']:.3f}"]
    for key, name in (("rob_loss", "rob"), ("val_accuracy", "val")):
        if line.get(key) is not None:
            parts.append(f"{name} {line[key]:.3f}")
    return " " + " ".join(parts)
