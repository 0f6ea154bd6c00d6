"""`RunConfig`, the settings of a run with their ranges, and the defaults of each dataset."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from splitveil.config.settings import converted, field_types
from splitveil.errors import ConfigError, Range, check_ranges


@dataclass(frozen=True, kw_only=True)
class DatasetDefaults:
    """How a dataset is trained unless the user says otherwise."""

    epochs: int
    batch_size: int
    lr: float
    noise_std: float


DATASET_DEFAULTS: Mapping[str, DatasetDefaults] = {
    "digits": DatasetDefaults(epochs=60, batch_size=128, lr=0.1, noise_std=0.05),
    "cifar10": DatasetDefaults(epochs=80, batch_size=512, lr=0.2, noise_std=0.025),
    "cifar100": DatasetDefaults(epochs=80, batch_size=512, lr=0.2, noise_std=0.025),
    "tiny-imagenet": DatasetDefaults(epochs=40, batch_size=256, lr=0.1, noise_std=0.025),
    "fashion-mnist": DatasetDefaults(epochs=20, batch_size=256, lr=0.1, noise_std=0.025),
}

OTHER_DATASETS = DatasetDefaults(epochs=40, batch_size=128, lr=0.1, noise_std=0.025)
# Files are called after a run, with more around its name; most disks take 255 bytes.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}")
NAME_RULE = "name must be at most 200 letters, digits, '.', '_', '+' and '-'"
NOT_UTF8 = re.compile("[\ud800-\udfff]")  # how Python writes bytes of a path that are none
Finite = Annotated[float, Range(0)]
BelowOne = Annotated[float, Range(0, 1, below=True)]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that defines a run; None is filled in from the dataset's recipe.

    `settings` are the defence's own arguments under their flat names (`lambd`, `form`, …).
    `held_out` reserves a share of the training images for an attacker; `final` trains on
    train+val, once, after everything was chosen. `compile` fuses the kernels of both halves on a
    GPU: slower to start, faster per epoch. `teacher` is the folder of a run whose answers count
    beside the labels, by the share `teacher_share`; `label_smoothing` is the share of a label that
    is spread over all classes.
    """

    dataset: str = "digits"
    defence: str = "veil"
    seed: Annotated[int, Range(0)] = 0
    name: str | None = None
    epochs: Annotated[int, Range(1)] | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    data_dir: str | None = None
    runs_dir: str = "runs"
    net: str = "auto"
    batch_size: Annotated[int, Range(2)] | None = None
    lr: Annotated[float, Range(0, above=True)] | None = None
    schedule: Literal["one-cycle", "cem"] = "one-cycle"
    momentum: BelowOne = 0.9
    weight_decay: Finite = 5e-4
    noise_std: Finite | None = None
    label_smoothing: BelowOne = 0.0
    teacher: str | None = None
    teacher_share: Annotated[float, Range(0, 1, above=True)] = 0.5
    teacher_temperature: Annotated[float, Range(0, 100, above=True)] = 1.0
    held_out: BelowOne = 0.0
    final: bool = False
    split_seed: int = 0
    compile: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own = {key: getattr(self, key) for key in RUN_KEYS}
        for key, value in converted(own, RUN_KEYS, "setting of a run").items():
            object.__setattr__(self, key, value)  # a path as text, a whole lr as a float
        if self.teacher == "none":  # as `config.toml` spells it; --set overrides a file so
            object.__setattr__(self, "teacher", None)
        problems = [
            f"{key} must be UTF-8, as it is written down, got {value!r}; rename the file or folder"
            for key in RUN_KEYS
            if isinstance(value := getattr(self, key), str) and NOT_UTF8.search(value)
        ]
        if self.name is not None and not NAME.fullmatch(self.name):
            problems.append(f"{NAME_RULE}, got '{self.name}'")
        check_ranges(self, *problems)

    @property
    def folder(self) -> Path:
        """Where the run lives."""
        stem = re.sub(r"[^A-Za-z0-9._+-]+", "-", f"{self.dataset}-{self.defence}-s{self.seed}")
        return Path(self.runs_dir) / (self.name or stem)


RUN_KEYS = {k: v for k, v in field_types(RunConfig).items() if k != "settings"}


def defaults_for(config: RunConfig) -> DatasetDefaults:
    """How long, in which batches and with which noise runs on this dataset are trained."""
    return DATASET_DEFAULTS.get(config.dataset.partition(":")[0], OTHER_DATASETS)


def one_noise_name(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with `reg_strength` under the name it has here, `noise_std`."""
    options = dict(options)
    if "reg_strength" in options:
        if "noise_std" in options:
            raise ConfigError("reg_strength and noise_std are one number; give only one of them")
        options["noise_std"] = options.pop("reg_strength")
    return options


PLACES = ("data_dir", "runs_dir")  # where files lay says nothing about a result
