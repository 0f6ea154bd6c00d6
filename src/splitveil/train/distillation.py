"""A teacher: a trained model whose answers to the training images count beside the labels."""

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


class Undivided(nn.Module):
    """A split model in one piece: nothing is sent, so nothing happens to what would be."""

    def __init__(self, model: SplitModel) -> None:
        super().__init__()
        self.encoder, self.head = model.encoder, model.head
        self.requires_grad_(requires_grad=False)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Logits (n, k) of images."""
        logits: Tensor = self.head(self.encoder(x))
        return logits


@dataclass(frozen=True, kw_only=True)
class TeacherFacts:
    """What is known of a teacher's run: its folder and settings, its data, how far it came."""

    folder: Path
    config: RunConfig
    data_hash: str
    model_hash: str
    steps: int


@dataclass(frozen=True)
class Teacher:
    """A loaded model, and the facts of the run that it comes from."""

    model: SplitModel
    facts: TeacherFacts

    @property
    def noted(self) -> Json:
        """What the run that it teaches keeps of it."""
        return {"run": self.facts.folder.resolve().name, "model": self.facts.model_hash}

    def on(self, device: torch.device) -> Undivided:
        """What answers, on a device."""
        answers = Undivided(self.model)
        to_device(answers, device)
        return answers


def check_teacher(teacher: Teacher, config: RunConfig, dataset: Dataset, data_hash: str) -> None:
    """Refuse one of other data, one not trained to its end, one that has seen what it must not.

    What a teacher was trained on would reach the run by its answers: images to choose by, or for
    an attacker alone, would be neither.
    """
    facts, theirs, name = teacher.facts, teacher.facts.config, teacher.facts.folder
    if facts.data_hash != data_hash:
        raise ConfigError(
            f"the teacher {name} was trained on other data: '{theirs.dataset}' with hash "
            f"{facts.data_hash}, this run has '{config.dataset}' with {data_hash}; train a teacher "
            "on the same data"
        )
    seen, own = (
        make_splits(dataset, split_seed=c.split_seed, held_out=c.held_out, final=c.final).train
        for c in (theirs, config)
    )
    planned = planned_steps(theirs, len(seen))
    if facts.steps < planned:
        raise ConfigError(
            f"the teacher {name} was not trained to its end: {facts.steps} of {planned} steps; "
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
    was, now = noted and noted["model"], teacher and teacher.facts.model_hash
    if was != now:
        raise CheckpointError(
            f"the teacher is not the one this run began with: the hash of its model is {now}, it "
            f"was {was}; bring that one back, or start again with --overwrite"
        )
