"""A teacher: a trained model whose answers are learned beside the labels."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from splitveil.config.resolve import planned_steps
from splitveil.config.run_config import RunConfig
from splitveil.cuda import to_device
from splitveil.data.dataset import Dataset
from splitveil.data.splits import make_splits
from splitveil.errors import CheckpointError, ConfigError
from splitveil.io import Json
from splitveil.nets.split import SplitModel
from splitveil.train.state import CHECKPOINT, read_meta


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """A trained run as a teacher.

    Args:
        model: The loaded model.
        folder: Its run's folder.
        config: Its run's settings.
        data_hash: Fingerprint of the data it was trained on.
        model_hash: Hash of its weights.
        steps: Steps it was trained for.
    """

    model: SplitModel
    folder: Path
    config: RunConfig
    data_hash: str
    model_hash: str
    steps: int

    @property
    def noted(self) -> Json:
        """What the taught run stores about it."""
        return {"run": self.folder.resolve().name, "model": self.model_hash}

    def on(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """The model on a device as one network of images, without the channel."""
        model = self.model.requires_grad_(requires_grad=False).eval()
        to_device(model, device)
        return nn.Sequential(model.encoder, model.head)


def check_teacher(teacher: Teacher, config: RunConfig, dataset: Dataset, data_hash: str) -> None:
    """Validate a teacher: same data, fully trained, and no image that this run must not train on.

    A teacher passes on what it has seen: images that this run keeps for validation, or for the
    attacker, would no longer be unseen.
    """
    theirs, name = teacher.config, teacher.folder
    if teacher.data_hash != data_hash:
        raise ConfigError(
            f"the teacher {name} was trained on other data: '{theirs.dataset}' with hash "
            f"{teacher.data_hash}, this run has '{config.dataset}' with {data_hash}; train a "
            "teacher on the same data"
        )
    seen, own = (
        make_splits(dataset, split_seed=c.split_seed, held_out=c.held_out, final=c.final).train
        for c in (theirs, config)
    )
    planned = planned_steps(theirs, len(seen))
    if teacher.steps < planned:
        raise ConfigError(
            f"the teacher {name} is not fully trained: {teacher.steps} of {planned} steps; "
            "finish it with --resume first"
        )
    beyond = int((~torch.isin(seen, own)).sum())
    if beyond:
        raise ConfigError(
            f"the teacher {name} was trained on {beyond} images that this run does not train on: "
            f"it has {_splitting(theirs)}, this run has {_splitting(config)}; train a teacher with "
            "the settings of this run"
        )


def _splitting(config: RunConfig) -> str:
    final = str(config.final).lower()
    return f"final={final}, held_out={config.held_out}, split_seed={config.split_seed}"


def check_same_teacher(teacher: Teacher | None, folder: Path) -> None:
    """Validate that a resumed run still has the teacher it began with."""
    noted = read_meta(folder / CHECKPOINT)["passport"].get("teacher")
    was, now = noted and noted["model"], teacher and teacher.model_hash
    if was != now:
        raise CheckpointError(
            f"the teacher is not the one this run began with: its model's hash was {was}, "
            f"now it is {now}; restore that teacher, or start again with --overwrite"
        )
