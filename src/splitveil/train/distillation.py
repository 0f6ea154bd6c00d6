"""A teacher: a trained model whose answers to the training images count beside the labels."""

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
    """A loaded model, and what is known of its run: folder, settings, data, how far it came."""

    model: SplitModel
    folder: Path
    config: RunConfig
    data_hash: str
    model_hash: str
    steps: int

    @property
    def noted(self) -> Json:
        """What the run that it teaches keeps of it."""
        return {"run": self.folder.resolve().name, "model": self.model_hash}

    def on(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """What answers images, on a device: in one piece, nothing is sent and nothing disturbed."""
        model = self.model.requires_grad_(requires_grad=False).eval()
        to_device(model, device)
        return nn.Sequential(model.encoder, model.head)


def check_teacher(teacher: Teacher, config: RunConfig, dataset: Dataset, data_hash: str) -> None:
    """Refuse one of other data, one not trained to its end, one that has seen what it must not.

    What a teacher was trained on would reach the run by its answers: images to choose by, or for
    an attacker alone, would be neither.
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
            f"the teacher {name} was not trained to its end: {teacher.steps} of {planned} steps; "
            "continue it with --resume first"
        )
    beyond = int((~torch.isin(seen, own)).sum())
    if beyond:
        raise ConfigError(
            f"the teacher {name} was trained on {beyond} images that this run keeps from its "
            f"training: it has {_splitting(theirs)}, this run {_splitting(config)}; train one "
            "with the same"
        )


def _splitting(config: RunConfig) -> str:
    final = str(config.final).lower()
    return f"final={final}, held_out={config.held_out}, split_seed={config.split_seed}"


def check_same_teacher(teacher: Teacher | None, folder: Path) -> None:
    """Refuse to resume a run under another teacher than the one it began with."""
    noted = read_meta(folder / CHECKPOINT)["passport"].get("teacher")
    was, now = noted and noted["model"], teacher and teacher.model_hash
    if was != now:
        raise CheckpointError(
            f"the teacher is not the one this run began with: the hash of its model is {now}, it "
            f"was {was}; bring that one back, or start again with --overwrite"
        )
