"""From a resolved configuration to a trained model: builds the parts and runs the loop."""

from dataclasses import dataclass
from functools import partial

from torch import Generator, Tensor, nn

from splitveil import config as configuration
from splitveil.config import RunConfig
from splitveil.data import Dataset, Splits, augment, epoch_order
from splitveil.nets import SplitModel
from splitveil.passport import versions
from splitveil.rng import derive_seed, seeded_globals
from splitveil.teaching import Teacher
from splitveil.train.schedule import Schedule
from splitveil.train.task import Task
from splitveil.types import Json, Progress

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Parts:
    """What a run trains: the model, and what a defence sets beside it."""

    model: SplitModel
    surrogate: nn.Module | None
    companion: nn.Module | None


def build(config: RunConfig, image_shape: Shape, num_classes: int) -> Parts:
    """The parts of a run, each from its own stream: adding one never changes another."""
    with seeded_globals(derive_seed(config.seed, "init/model")):
        model = configuration.build_model(config, image_shape, num_classes)
    defence = configuration.build_defence(config)
    with seeded_globals(derive_seed(config.seed, "init/surrogate")):
        surrogate = defence.surrogate(
            model.wire_floats(image_shape), num_classes, config.noise_std or 0.0
        )
    with seeded_globals(derive_seed(config.seed, "init/companion")):
        companion = defence.companion(model, image_shape, num_classes)
    return Parts(model, surrogate, companion)


def train_run(
    config: RunConfig,
    dataset: Dataset,
    splits: Splits,
    parts: Parts,
    progress: Progress,
    *,
    teacher: Teacher | None = None,
    resume: bool = False,
) -> None:
    """Train the parts in place; the run's folder gets log and checkpoints."""
    from lightning_fabric import Fabric

    from splitveil.train.loop import Plan, train
    from splitveil.train.step import EvalSet, TrainSet

    on_gpu = config.device == "cuda"
    fabric = Fabric(
        accelerator="cuda" if on_gpu else "cpu",
        devices=1,
        precision="bf16-mixed" if on_gpu else "32-true",
    )
    dataset = dataset.to(fabric.device)
    rows = splits.train.to(fabric.device)
    batch = min(config.batch_size or len(rows), len(rows))
    plan = Plan(
        schedule=Schedule(
            kind=config.schedule,
            peak_lr=config.lr or 0.0,
            epochs=config.epochs or 1,
            steps_per_epoch=len(rows) // batch,
            penalty=configuration.build_defence(config).penalty_plan(),
        ),
        batch_size=batch,
        seed=config.seed,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        compile=config.compile,
        task=Task(
            smoothing=config.label_smoothing,
            teacher=None if teacher is None else teacher.on(fabric.device),
            share=config.teacher_share,
            temperature=config.teacher_temperature,
        ),
    )
    train_set = TrainSet(
        images=dataset.images,
        labels=dataset.labels,
        order=lambda epoch: rows[epoch_order(len(rows), epoch, config.seed, rows.device)],
        augment=partial(_augment, crop_pad=dataset.crop_pad, flip=dataset.flip),
    )
    val = dataset.labelled(splits.val)
    passport: Json = {"versions": versions(), "splits": splits.hashes()}
    passport |= {} if teacher is None else {"teacher": teacher.noted}
    with seeded_globals(derive_seed(config.seed, "global"), fabric.device):
        train(
            parts.model,
            parts.surrogate,
            train_set,
            EvalSet(images=val.images, labels=val.labels),
            plan,
            fabric=fabric,
            folder=config.folder,
            passport=passport,
            progress=progress,
            companion=parts.companion,
            resume=resume,
        )


def _augment(x: Tensor, generator: Generator, *, crop_pad: int, flip: bool) -> Tensor:
    return augment(x, crop_pad=crop_pad, flip=flip, generator=generator)
