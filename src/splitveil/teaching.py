"""A run that teaches another: its answers to the training images count beside the labels."""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from splitveil.config import RunConfig
from splitveil.data import Dataset, make_splits
from splitveil.errors import CheckpointError, ConfigError, SplitVeilError
from splitveil.nets import GaussianNoise, SplitModel
from splitveil.passport import model_hash
from splitveil.runs import Run, fingerprint, load_run, planned_steps
from splitveil.train.checkpoint import read_meta
from splitveil.types import Json

CHECKPOINT = "checkpoint.safetensors"


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


@dataclass(frozen=True)
class Teacher:
    """A teacher's run, and what is noted of it: its folder's name and its model's hash."""

    run: Run
    noted: Json

    def on(self, device: torch.device) -> Undivided:
        """What answers, on a device."""
        answers = Undivided(self.run.model).to(device)
        if device.type == "cuda":
            answers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return answers


def open_teacher(config: RunConfig) -> Teacher | None:
    """The run that a configuration names as its teacher; None where it names none."""
    if config.teacher is None:
        for key in ("teacher_share", "teacher_temperature"):
            if getattr(config, key) != getattr(RunConfig, key):
                raise ConfigError(
                    f"{key} is {getattr(config, key)}, but there is no teacher; "
                    "add --set teacher=RUN, the folder of a trained run, or leave it out"
                )
        return None
    folder = place_of(config.teacher)
    if folder.resolve() == config.folder.resolve():
        raise ConfigError(
            f"{folder} cannot be its own teacher; name another run, or give this one a --name"
        )
    return load_teacher(folder)


def load_teacher(folder: Path) -> Teacher:
    """A run as a teacher.

    It may add noise to what it sends, and answers without it; whatever else its channel does, its
    server has learnt to expect.
    """
    try:
        run = load_run(folder)
    except SplitVeilError as err:
        raise ConfigError(
            f"the teacher {folder} cannot be used: {err} (this is said of the teacher's folder)"
        ) from err
    stages = cast(nn.ModuleList, run.model.channel.stages)
    more = [type(stage).__name__ for stage in stages if not isinstance(stage, GaussianNoise)]
    if more:
        raise ConfigError(
            f"the teacher {folder} does more to what it sends than add noise ({', '.join(more)}), "
            "so it cannot answer in one piece; train one with --defence none"
        )
    return Teacher(run, {"run": folder.resolve().name, "model": model_hash(run.model)})


def place_of(text: str) -> Path:
    """The folder that `teacher` names."""
    if not text.strip():
        raise ConfigError(f"teacher must be the folder of a trained run, or none, got '{text}'")
    return Path(text).expanduser()


def ready_teacher(config: RunConfig, dataset: Dataset) -> Teacher | None:
    """The teacher of a run on these data, checked; None where it has none."""
    teacher = open_teacher(config)
    if teacher is not None:
        check_teacher(teacher, config, dataset)
    return teacher


def check_teacher(teacher: Teacher, config: RunConfig, dataset: Dataset) -> None:
    """Refuse one of other data, one not trained to its end, one that has seen what it must not.

    What a teacher was trained on would reach the run by its answers: images to choose by, or for
    an attacker alone, would be neither.
    """
    theirs, name = teacher.run.config, teacher.run.path
    if teacher.run.built.data_hash != fingerprint(dataset):
        raise ConfigError(
            f"the teacher {name} was trained on other data: '{theirs.dataset}' with hash "
            f"{teacher.run.built.data_hash}, this run has '{config.dataset}' with "
            f"{fingerprint(dataset)}; train a teacher on the same data"
        )
    seen, own = (
        make_splits(dataset, split_seed=c.split_seed, held_out=c.held_out, final=c.final).train
        for c in (theirs, config)
    )
    done = int(read_meta(name / CHECKPOINT)["step"])
    planned = planned_steps(theirs, len(seen))
    if done < planned:
        raise ConfigError(
            f"the teacher {name} was not trained to its end: {done} of {planned} steps; continue "
            "it with --resume first"
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
    was, now = noted and noted["model"], teacher and teacher.noted["model"]
    if was != now:
        raise CheckpointError(
            f"the teacher is not the one this run began with: the hash of its model is {now}, it "
            f"was {was}; bring that one back, or start again with --overwrite"
        )
