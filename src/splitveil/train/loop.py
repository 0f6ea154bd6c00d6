"""The training loop: schedule, order of the images, steps, log, checkpoints, and Ctrl-C."""

import json
import logging
import math
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, cast

import torch
from jaxtyping import Bool, Int64
from lightning_fabric import Fabric
from torch import Generator, Tensor, nn

from splitveil.config.resolve import Plan, TrainParts
from splitveil.cuda import channels_last, compile_methods, set_rates
from splitveil.data.dataset import Dataset
from splitveil.data.splits import Splits
from splitveil.defences.base import ActsBetweenSteps, Companion, PenaltyPlan
from splitveil.errors import ConfigError, RunError
from splitveil.io import Json, Progress, as_run_error, parse_json, read_bytes
from splitveil.nets.split import SplitModel
from splitveil.rng import derive_seed, seeded_globals, stream
from splitveil.surrogates.base import RefitsEachEpoch, Reports
from splitveil.train.distillation import Teacher
from splitveil.train.state import CHECKPOINT, read_checkpoint, restore, snapshot, write_checkpoint
from splitveil.train.step import (
    StepLoss,
    Stepper,
    TaskLoss,
    TrainSet,
    TrainState,
    Weights,
    companions,
    mirrored_in,
    new_state,
    own_rows,
)

log = logging.getLogger("splitveil")
LOG = "train.log"
CHUNK = 1000  # images per pass where no gradient is needed
LOG_EVERY = 50  # steps
CHECKPOINT_SECONDS = 60.0  # at least one checkpoint in this time
SAVING_SHARE = 50  # checkpoints at ends of epochs take at most a fiftieth of the time
COLLAPSE_STEPS = 100  # steps with a low rate before the warning


ScheduleKind = Literal["one-cycle", "cem"]


def one_cycle(progress: float, peak: float) -> float:
    """Learning rate that rises linearly over a fifth of the run, then falls by a cosine to 0.

    Args:
        progress: Share of the run that is done, in [0, 1].
        peak: The highest learning rate.

    >>> one_cycle(0.2, 0.5), round(one_cycle(0.6, 0.5), 6), round(one_cycle(1.0, 0.5), 6)
    (0.5, 0.25, 0.0)
    """
    rise = 0.2
    if progress < rise:
        return peak * (0.04 + 0.96 * progress / rise)
    return peak * 0.5 * (1.0 + math.cos(math.pi * (progress - rise) / (1.0 - rise)))


def multi_step(progress: float, peak: float) -> float:
    """Learning rate of the published CEM code: ×0.2 at 25, 50, 75 and 87.5 % of the epochs.

    >>> round(multi_step(0.5, 0.05), 6)
    0.002
    """
    drops = sum(progress >= milestone for milestone in (0.25, 0.5, 0.75, 0.875))
    return peak * 0.2**drops


def lr_weight(lr: float, kind: Literal["constant", "cem"]) -> float:
    """Weight w_lr of the penalty: 1, or as in the CEM code 0.001/lr while lr ≥ 4.1e-4.

    >>> lr_weight(0.05, "cem"), lr_weight(8e-5, "cem"), lr_weight(0.05, "constant")
    (0.02, 1.0, 1.0)
    """
    return 0.001 / lr if kind == "cem" and lr >= 4.1e-4 else 1.0  # noqa: PLR2004


def ramp_up(progress: float, ramp: float) -> float:
    """Linear growth from 0 to 1 over the share `ramp` of the run.

    >>> ramp_up(0.1, 0.2), ramp_up(0.5, 0.2), ramp_up(0.0, 0.0)
    (0.5, 1.0, 1.0)
    """
    return min(1.0, progress / ramp) if ramp > 0 else 1.0


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate and penalty weights of every step of a run.

    Args:
        kind: Course of the learning rate, see `one_cycle` and `multi_step`.
        peak_lr: Its highest value.
        epochs: Epochs of the run; they count from 1.
        steps_per_epoch: Steps of an epoch; they count from 0 over the whole run.
        penalty: When and how strongly the penalty acts.
    """

    kind: ScheduleKind
    peak_lr: float
    epochs: int
    steps_per_epoch: int
    penalty: PenaltyPlan

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.epochs * self.steps_per_epoch

    def epoch_of(self, step: int) -> int:
        """Epoch of a step, 1 or more."""
        return step // self.steps_per_epoch + 1

    def lr_at(self, step: int) -> float:
        """Learning rate of a step."""
        if self.kind == "cem":
            return multi_step(self.epoch_of(step) / self.epochs, self.peak_lr)
        return one_cycle(step / self.total_steps, self.peak_lr)

    def weights_at(self, step: int) -> Weights | None:
        """Weights of the penalty at a step; None while it is not active.

        It is active if λ > 0 and the epoch is neither part of the warm-up nor a skipped first one.
        """
        plan, epoch = self.penalty, self.epoch_of(step)
        first = plan.skip_first_epoch and epoch == 1
        if plan.lambd == 0 or epoch <= plan.warmup_epochs or first:
            return None
        w_lr = lr_weight(self.lr_at(step), plan.w_lr) * ramp_up(step / self.total_steps, plan.ramp)
        if plan.attention_gets_lambda:
            return Weights(w_lr, plan.lambd * plan.scale)
        return Weights(plan.lambd * w_lr, plan.scale)

    def companion_rates(self, step: int, companions: Sequence[nn.Module]) -> list[float]:
        """Learning rates of companions at a step: ×0.2 at 25 and 62.5 % of the run, as in ResSFL.

        >>> beside = nn.Module()
        >>> beside.lr = 1e-3
        >>> plan = Schedule(
        ...     kind="cem", peak_lr=0.1, epochs=10, steps_per_epoch=1, penalty=PenaltyPlan()
        ... )
        >>> [round(plan.companion_rates(step, [beside])[0], 9) for step in (0, 3, 7)]
        [0.001, 0.0002, 4e-05]
        """
        done = step / self.total_steps
        fall = 0.2 ** sum(done >= milestone for milestone in (0.25, 0.625))
        return [float(cast(Companion, part).lr) * fall for part in companions]


def epoch_order(n: int, epoch: int, seed: int) -> Int64[Tensor, " n"]:
    """A permutation (n,) that depends on seed and epoch alone, so that a resumed run repeats it.

    >>> epoch_order(5, epoch=0, seed=0).sort().values.tolist()
    [0, 1, 2, 3, 4]
    """
    # Drawn on the CPU: the order is the same on any device.
    return torch.randperm(n, generator=stream(seed, f"order/{epoch}"))


def first_flips(n: int, seed: int) -> Bool[Tensor, " n"]:
    """Which of n images (n,) are mirrored in the first epoch of alternating flips: about half."""
    return torch.randint(2, (n,), generator=stream(seed, "flips")).bool()


def epoch_batches(
    rows: Tensor, size: int, schedule: Schedule, seed: int, first: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For every step from `first` on: its epoch, that epoch's order, and the rows of the batch.

    Args:
        rows: Row numbers of the training images.
        size: Rows of a batch; what does not fill one at the end of an epoch is left out.
        schedule: Number of steps and epochs.
        seed: The run's seed.
        first: Steps done before.
    """
    order = torch.empty(0)
    for step in range(first, schedule.total_steps):
        epoch, index = schedule.epoch_of(step), step % schedule.steps_per_epoch
        if index == 0 or step == first:
            order = rows[epoch_order(len(rows), epoch, seed).to(rows.device)]
        yield epoch, order, order[index * size : (index + 1) * size]


def train_run(
    plan: Plan,
    parts: TrainParts,
    dataset: Dataset,
    splits: Splits,
    progress: Progress,
    *,
    passport: Json,
    teacher: Teacher | None = None,
    resume: bool = False,
) -> None:
    """Train the parts in place; the run's folder gets `metrics.jsonl` and checkpoints.

    On a CPU the same arguments give the same bits, whether or not the run was interrupted.

    Args:
        plan: The resolved run.
        parts: What it built.
        dataset: Images and labels.
        splits: Rows to train on, and rows to validate on.
        progress: Called after every step.
        passport: Where the run comes from; checkpoints store it.
        teacher: A trained run whose answers are learned beside the labels.
        resume: Continue from the folder's checkpoint.

    Raises:
        RunError: The training diverged, or a file cannot be written.
        KeyboardInterrupt: After Ctrl-C, or SIGTERM, which schedulers send, once the step is
            finished and saved. Its argument is the signal.
    """
    config, folder, on_gpu = plan.config, plan.folder, plan.config.device == "cuda"
    fabric = Fabric(
        accelerator="cuda" if on_gpu else "cpu",
        devices=1,
        precision="bf16-mixed" if config.precision == "bf16" else "32-true",
    )
    device = fabric.device
    rows, val = splits.train.to(device), splits.val.to(device)
    first = first_flips(len(dataset.labels), config.seed).to(device)
    data = TrainSet(
        images=dataset.images.to(device),
        labels=dataset.labels.to(device),
        crop_pad=dataset.crop_pad,
        flip=dataset.flip,
        mirrored=first.clone() if config.flips == "alternating" else None,
    )
    batch = min(config.batch_size or len(rows), len(rows))
    schedule = Schedule(
        kind=config.schedule,
        peak_lr=config.lr or 0.0,
        epochs=config.epochs or 1,
        steps_per_epoch=len(rows) // batch,
        penalty=parts.penalty,
    )
    warn_first(schedule, config.batch_size or 0, len(rows))
    with seeded_globals(derive_seed(config.seed, "global"), device):
        state = new_state(parts, config, device)
        if resume:
            restore(state, read_checkpoint(folder / CHECKPOINT))
        task = TaskLoss(
            smoothing=config.label_smoothing,
            teacher=None if teacher is None else teacher.on(device),
            share=config.teacher_share,
            temperature=config.teacher_temperature,
        )
        beside = companions(parts.companion)
        model = _compiled(parts.model, beside) if config.compile else parts.model
        loss = StepLoss(model, state, fabric, task=task, remembers=parts.penalty.lambd > 0)
        step = Stepper(loss, data)
        parts.model.train()
        clock, last = Clock(state.seconds), ""
        with (
            readable_log(folder, state.step) as story,
            catch_interrupt() as interruption,
            MetricsLog(folder, state.log_offset) as metrics,
        ):
            batches = epoch_batches(rows, batch, schedule, config.seed, state.step)
            for epoch, order, chosen in batches:
                _mirror(data, first, epoch)
                if beside:  # the last optimiser is theirs
                    set_rates(state.optimisers[-1], schedule.companion_rates(state.step, beside))
                lr, weights = schedule.lr_at(state.step), schedule.weights_at(state.step)
                step(own_rows(chosen, fabric), lr, weights)
                state.step += 1
                if isinstance(state.companion, ActsBetweenSteps):
                    state.companion.after_step(state.step / schedule.total_steps)

                epoch_ends = state.step % schedule.steps_per_epoch == 0
                if epoch_ends or state.step % LOG_EVERY == 0:
                    line = log_line("epoch" if epoch_ends else "step", state, schedule, clock)
                    if epoch_ends:
                        line["val_accuracy"] = validation_accuracy(
                            parts.model, data, val, config.seed, fabric
                        )
                        line |= _settle(parts.model, data, val, config.seed, fabric)
                        state.meters.reset()
                        story.info("epoch %d of %d:%s", epoch, schedule.epochs, in_short(line))
                    metrics.append(line)
                    last = in_short(line)
                if epoch_ends:
                    _refit(state, data, order, schedule, fabric)
                progress(state.step, schedule.total_steps, f"epoch {epoch}/{schedule.epochs}{last}")
                if interruption.came or clock.save_now(schedule, state.step):
                    state.seconds, state.log_offset = clock.seconds(), metrics.offset
                    with clock.saving():
                        write_checkpoint(folder / CHECKPOINT, snapshot(state, passport))
                if interruption.came:
                    raise KeyboardInterrupt(interruption.came)


def warn_first(schedule: Schedule, batch: int, images: int) -> None:
    """Warn, before the first step, of settings that cannot mean what they say."""
    if batch > images:
        log.warning(
            "batch_size %d is more than the %d training images, so every epoch is one step on all "
            "of them; choose a smaller batch_size",
            batch, images,
        )  # fmt: skip
    if schedule.penalty.lambd > 0 and schedule.weights_at(schedule.total_steps - 1) is None:
        log.warning(
            "the penalty never acts: it waits for %d epochs of warm-up and the run has %d; train "
            "longer (epochs) or set attention_warmup_epochs lower",
            max(schedule.penalty.warmup_epochs, int(schedule.penalty.skip_first_epoch)),
            schedule.epochs,
        )  # fmt: skip


def _mirror(data: TrainSet, first: Tensor, epoch: int) -> None:
    """Set which images this epoch mirrors, in place: a captured step reads this very tensor."""
    if data.mirrored is not None:
        data.mirrored.copy_(mirrored_in(first, epoch))


def _compiled(model: SplitModel, beside: Sequence[nn.Module]) -> SplitModel:
    """The model with both halves compiled; what companions compute is compiled in place."""
    for part in beside:
        compile_methods(part, "own_loss", "penalty")
    return model.compiled()


def _refit(
    state: TrainState, data: TrainSet, rows: Tensor, schedule: Schedule, fabric: Fabric
) -> None:
    """Fit a surrogate that asks for it to the epoch's clean features; nothing at λ = 0."""
    if not isinstance(state.surrogate, RefitsEachEpoch) or schedule.penalty.lambd == 0:
        return

    def features() -> Iterator[tuple[Tensor, Tensor]]:
        encoder = cast(nn.Module, state.model.encoder)
        for z, y in _outputs(encoder, data, rows, fabric):
            yield z.float().flatten(1), y

    state.surrogate.refit_stream(features, state.streams["surrogate"])


class _EveryAnswer(nn.Module):
    """The own head's logits and the server's as one tensor (n, 2, classes)."""

    def __init__(self, model: SplitModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, generator: Generator) -> Tensor:
        return torch.stack([logits.float() for logits in self.model.both_answers(x, generator)], 1)


def _settle(model: SplitModel, data: TrainSet, val: Tensor, seed: int, fabric: Fabric) -> Json:
    """Set temperature and thresholds of a model that exits early, by its validation images.

    The last epoch's are those that count; the training does not read them.

    Returns:
        What the rule does with them, for the log; where it cannot be set, `exit.unsettled` says
        why.
    """
    if model.exit is None:
        return {}
    generator = stream(seed, "settle", val.device)
    outputs = list(_outputs(_EveryAnswer(model), data, val, fabric, generator))
    both = torch.cat([answers for answers, _ in outputs]) if outputs else torch.zeros(0, 2, 1)
    labels = torch.cat([y for _, y in outputs]) if outputs else torch.zeros(0).long()
    try:
        found = model.exit.settle(both[:, 0], both[:, 1], labels)
    except ConfigError as err:
        model.exit.unsettled = str(err)
        return {}
    return {f"val_{name}": share for name, share in asdict(found).items()}


def validation_accuracy(
    model: nn.Module, data: TrainSet, rows: Tensor, seed: int, fabric: Fabric
) -> float | None:
    """Share of correct answers through the channel, in [0, 1]; None without rows."""
    if len(rows) == 0:
        return None
    generator = stream(seed, "evaluate", rows.device)
    answered = _outputs(model, data, rows, fabric, generator)
    return int(sum((logits.argmax(1) == y).sum() for logits, y in answered)) / len(rows)


@torch.no_grad()
def _outputs(
    net: nn.Module, data: TrainSet, rows: Tensor, fabric: Fabric, *given: Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Outputs in eval mode for training images, not augmented, and their labels, in chunks."""
    was_training = net.training
    net.eval()
    for part in torch.split(rows, CHUNK):
        with fabric.autocast():
            outputs = net(channels_last(data.images[part].float() / 255), *given)
        yield outputs, data.labels[part]
    net.train(was_training)


class Clock:
    """Seconds of training over all sittings, and when to write the next checkpoint."""

    def __init__(self, before: float) -> None:
        self._start = self._saved = time.perf_counter()
        self._before, self._cost = before, 0.0

    def seconds(self) -> float:
        """Seconds of training so far."""
        return round(self._before + time.perf_counter() - self._start, 3)

    def save_now(self, schedule: Schedule, step: int) -> bool:
        """Whether a checkpoint is due after `step` steps.

        It is at the end, a minute after the last one, and at the ends of about fifty epochs, unless
        checkpoints would take more than a fiftieth of the time.
        """
        waited = time.perf_counter() - self._saved
        every = max(1, schedule.epochs // 50) * schedule.steps_per_epoch
        return (
            step == schedule.total_steps
            or (step % every == 0 and waited >= SAVING_SHARE * self._cost)
            or waited > CHECKPOINT_SECONDS
        )

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measures what writing a checkpoint takes."""
        begun = time.perf_counter()
        yield
        self._saved = time.perf_counter()
        self._cost = self._saved - begun


def log_line(kind: str, state: TrainState, schedule: Schedule, clock: Clock) -> Json:
    """The log line of a step; warns where the penalty is broken.

    Args:
        kind: "step", or "epoch" after the last step of one.
        state: After the step. Its counters are read from the device, which makes the host wait.
        schedule: Learning rate and weights of the step.
        clock: Seconds of training.

    Raises:
        RunError: The task loss is not finite.
    """
    step = state.step - 1
    epoch, weights = schedule.epoch_of(step), schedule.weights_at(step)
    line: Json = {"kind": kind, "step": state.step, "epoch": epoch, "lr": schedule.lr_at(step)}
    line["weight"] = weights.effective if weights else 0.0
    line |= state.meters.means() | {"skipped": warn_skipped(state), "seconds": clock.seconds()}
    warn_collapsed(state)
    if isinstance(state.surrogate, Reports):
        line |= state.surrogate.report()
    if line["task_loss"] is None:
        raise RunError(
            f"training diverged in epoch {epoch}: the task loss is not finite; "
            "lower lr or lambd, then train again"
        )
    return line


def warn_skipped(state: TrainState) -> int:
    """Warn at the first skipped penalty and after every hundred; returns their number."""
    skipped = state.skipped()
    if skipped and (state.warned == 0 or skipped // 100 > state.warned // 100):
        knobs = ["lambd"] if state.surrogate is not None else []
        if state.companion is not None:
            knobs.append("the companion's strength and learning rate")
        log.warning(
            "the penalty or its gradient was not finite %d times and was left out of the step; if "
            "this goes on, lower %s or lr",
            skipped,
            ", ".join(knobs),
        )
        state.warned = skipped
    return skipped


def warn_collapsed(state: TrainState) -> None:
    """Warn once when the surrogate has reported under half of the true rate for 100 steps."""
    low = int(state.guard.low)
    if low >= COLLAPSE_STEPS and not state.collapsed:
        log.warning(
            "estimator collapsed: for %d steps the surrogate has reported less than half of the "
            "true rate, so most of what z tells is not penalised; set attention=maximise or "
            "uniform and statistic=raw, or fewer clusters with cem",
            low,
        )
    state.collapsed = low >= COLLAPSE_STEPS


def in_short(line: Json) -> str:
    """The numbers of a log line that fit behind a progress bar."""
    parts = [f"loss {line['task_loss']:.3f}"]
    shown = {"rob_loss": "rob", "val_accuracy": "val", "val_rule_accuracy": "rule"}
    for key, name in shown.items():
        if line.get(key) is not None:
            parts.append(f"{name} {line[key]:.3f}")
    return " " + " ".join(parts)


@dataclass
class Interruption:
    """The signal that asks to stop once the step is saved; None: there was none."""

    came: signal.Signals | None = None


@contextmanager
def catch_interrupt() -> Iterator[Interruption]:
    """Turn the first Ctrl-C or SIGTERM into a request to finish the step and save.

    A second one acts at once. Outside the main thread Python cannot catch signals, and nothing
    changes.
    """
    asked = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore_handlers() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def ask(number: int, frame: FrameType | None) -> None:
        asked.came = signal.Signals(number)
        restore_handlers()

    for number in before:
        signal.signal(number, ask)
    try:
        yield asked
    finally:
        restore_handlers()


@contextmanager
def readable_log(folder: Path, step: int) -> Iterator[logging.Logger]:
    """Keep the package's messages in `train.log`, with the lines of the logger it yields.

    These are warnings and `[CEM-GATE]` lines; the epochs stand in the file alone.
    """
    with as_run_error(folder / LOG):
        handler = logging.FileHandler(folder / LOG, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    before = log.level
    log.addHandler(handler)
    log.setLevel(min(logging.INFO, log.getEffectiveLevel()))
    story = logging.Logger("splitveil", logging.INFO)
    story.addHandler(handler)
    try:
        story.info("training %s at step %d", "continues" if step else "starts", step)
        yield story
    finally:
        log.setLevel(before)
        log.removeHandler(handler)
        handler.close()


class MetricsLog:
    """`metrics.jsonl`, one JSON object per line, and TensorBoard events made from it.

    Events need the extra `loggers`. They are written anew when a run is resumed, so that they never
    show steps that the log no longer has.
    """

    def __init__(self, folder: Path, offset: int = 0) -> None:
        """Open the log of a run for appending.

        Args:
            folder: The run's folder.
            offset: Bytes to keep; lines after them, or from the first broken line on, are dropped.
        """
        self._path = folder / "metrics.jsonl"
        with as_run_error(self._path):
            for stale in folder.glob("events.out.tfevents.*"):
                stale.unlink()
            self._file = self._path.open("ab")
            lines = _whole_lines(read_bytes(self._path)[:offset] if offset else b"")
            kept = sum(len(raw) for raw, _ in lines)
            if kept < offset:
                log.warning(
                    "%s has lost lines that were written before the checkpoint; the run continues "
                    "without them",
                    self._path,
                )
            self._file.truncate(kept)
            self._file.seek(kept)
            self._events = _events(folder)
        for _, line in lines:
            self._show(line)

    @property
    def offset(self) -> int:
        """Bytes written so far."""
        return self._file.tell()

    def append(self, line: Json) -> None:
        """Add one line and flush it to the disk."""
        with as_run_error(self._path):
            self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            self._file.flush()
        self._show(line)

    def _show(self, line: Json) -> None:
        if self._events is None:
            return
        for key, value in line.items():
            if isinstance(value, int | float) and key not in ("step", "epoch"):
                self._events.add_scalar(f"{line['kind']}/{key}", value, line["step"])

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        with as_run_error(self._path):
            self._file.close()
            if self._events is not None:
                self._events.close()


def _events(folder: Path) -> Any:  # noqa: ANN401 - a class of an extra
    """TensorBoard's writer; None where tensorboard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder))


def _whole_lines(content: bytes) -> list[tuple[bytes, Json]]:
    """The lines of a log, raw and parsed, up to the first broken one."""
    lines = []
    for raw in content.splitlines(keepends=True):
        try:
            line = parse_json(raw)
        except ValueError:
            break
        if not raw.endswith(b"\n") or not isinstance(line, dict) or not {"kind", "step"} <= {*line}:
            break
        lines.append((raw, line))
    return lines
