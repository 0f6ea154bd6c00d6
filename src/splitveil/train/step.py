"""One step's loss, and what else is asked of a model while it trains."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from lightning_fabric import Fabric
from torch import Generator, Tensor, nn

from splitveil.rng import stream
from splitveil.train.schedule import Weights
from splitveil.train.state import TrainState
from splitveil.train.task import LABELS, Task
from splitveil.train.watch import Tap, Watch

CHUNK = 1000  # images per pass where no gradient is needed


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


@runtime_checkable
class Split(Protocol):
    """What training asks of a model beyond being a module."""

    def split_forward(
        self, x: Tensor, generator: Generator | None = None, tap: Tap | None = None
    ) -> Pass:
        """One pass through both halves; `tap` is shown z before the channel and the head run."""
        ...


@runtime_checkable
class Compiles(Protocol):
    """A model that can be asked for its compiled twin."""

    def compiled(self) -> nn.Module:
        """The same model on the same parameters, its halves compiled."""
        ...


def unit_floats(images: Tensor) -> Tensor:
    """uint8 images as floats in [0, 1]."""
    return images.float().div_(255)


def forward_loss(
    model: Split,
    batch: tuple[Tensor, Tensor],
    weights: Weights | None,
    state: TrainState,
    fabric: Fabric,
    *,
    task: Task = LABELS,
    remembers: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one batch, penalty included while it is active, and what to log of it.

    With several processes the task's loss is that of this rank's images, the penalty that of the
    whole batch. `remembers`: until the penalty starts, a surrogate with a memory keeps the batch.
    """
    x, y = batch
    watch = Watch(batch, weights, state, fabric, remembers=remembers)
    with fabric.autocast():  # the wrapper enters it only where it wraps, under DDP
        out = model.split_forward(x, state.streams["channel"], watch.tap)
        taught = task.taught(x)
    loss = task.loss(out.logits, y, taught)
    values = {
        "task_loss": loss,
        "train_accuracy": (out.logits.detach().argmax(1) == y).float().mean(),
    }
    beside, said = watch.losses()
    return sum(beside, loss), values | said


@torch.no_grad()
def accuracy(model: nn.Module, data: EvalSet, seed: int, fabric: Fabric) -> float | None:
    """Share of correct answers through the channel in eval mode; None without images."""
    if len(data.labels) == 0:
        return None
    was_training = model.training
    model.eval()
    generator = stream(seed, "evaluate", data.images.device)
    correct = torch.zeros((), dtype=torch.long, device=data.labels.device)
    for x, y in zip(torch.split(data.images, CHUNK), torch.split(data.labels, CHUNK), strict=True):
        with fabric.autocast():
            correct += (model(x, generator).argmax(1) == y).sum()
    model.train(was_training)
    return int(correct) / len(data.labels)


@torch.no_grad()
def clean_features(
    encoder: nn.Module, data: TrainSet, rows: Tensor, fabric: Fabric
) -> Iterator[tuple[Tensor, Tensor]]:
    """Features (n, d) and labels of training images: eval mode, no augmentation, no noise."""
    was_training = encoder.training
    encoder.eval()
    for part in torch.split(rows, CHUNK):
        with fabric.autocast():
            z = encoder(unit_floats(data.images[part]))
        yield z.float().flatten(1), data.labels[part]
    encoder.train(was_training)
