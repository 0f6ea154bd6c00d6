"""A run that teaches another: its answers to the training images count beside the labels."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from splitveil.config import RunConfig
from splitveil.data import Dataset, Splits, make_splits
from splitveil.errors import CheckpointError, ConfigError
from splitveil.nets import SplitModel
from splitveil.passport import model_hash
from splitveil.runs import Built, Run, load_run
from splitveil.types import Json


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
    folder = Path(config.teacher)
    if folder.resolve() == config.folder.resolve():
        raise ConfigError(
            f"{folder} cannot be its own teacher; name another run, or give this one a --name"
        )
    run = load_run(folder)
    return Teacher(run, {"run": folder.resolve().name, "model": model_hash(run.model)})


def check_teacher(
    teacher: Teacher, config: RunConfig, built: Built, dataset: Dataset, splits: Splits
) -> None:
    """Refuse a teacher of other data, or one that has seen images which the run must not see.

    What it was trained on would reach the run by its answers: images to choose by or for an
    attacker alone would be neither.
    """
    theirs, name = teacher.run.config, teacher.run.path
    if teacher.run.built != built:
        raise ConfigError(
            f"the teacher {name} was trained on other data: '{theirs.dataset}' with hash "
            f"{teacher.run.built.data_hash}, this run has '{config.dataset}' with "
            f"{built.data_hash}; train a teacher on the same data"
        )
    seen = make_splits(
        dataset, split_seed=theirs.split_seed, held_out=theirs.held_out, final=theirs.final
    ).train
    beyond = int((~torch.isin(seen, splits.train)).sum())
    if beyond:
        raise ConfigError(
            f"the teacher {name} was trained on {beyond} images that this run keeps from its "
            f"training: it has final={_word(theirs.final)}, held_out={theirs.held_out}, "
            f"split_seed={theirs.split_seed}, this run final={_word(config.final)}, "
            f"held_out={config.held_out}, split_seed={config.split_seed}; train one with the same"
        )


def check_same_teacher(teacher: Teacher | None, checkpoint: Path) -> None:
    """Refuse to resume a run under another teacher than the one it began with."""
    try:
        with safe_open(checkpoint, framework="pt") as file:
            state = json.loads((file.metadata() or {})["state"])
            noted = state["passport"].get("teacher")
    except (SafetensorError, KeyError, ValueError, OSError, AttributeError):
        return  # broken, or not ours: whoever reads the whole of it says so
    now = None if teacher is None else teacher.noted
    if (noted and noted["model"]) != (now and now["model"]):
        raise CheckpointError(
            f"the teacher is not the one this run began with: its model's hash is "
            f"{now and now['model']}, it was {noted and noted['model']}; bring that one back, or "
            "start again with --overwrite"
        )


def _word(flag: bool) -> str:
    return str(flag).lower()
