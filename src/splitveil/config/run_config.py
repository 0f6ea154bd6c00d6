"""`RunConfig`, the settings of a run with their ranges, and the defaults of each dataset."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from splitveil.config.machine import AskedPrecision
from splitveil.config.settings import converted, field_types
from splitveil.errors import ConfigError, Range, check_ranges

CIFAR = {"epochs": 80, "batch_size": 512, "lr": 0.2, "noise_std": 0.025}
DATASET_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "digits": {"epochs": 60, "batch_size": 128, "lr": 0.1, "noise_std": 0.05},
    "fashion-small": {"epochs": 20, "batch_size": 128, "lr": 0.1, "noise_std": 0.05},
    "cifar10": CIFAR,
    "cifar100": CIFAR,
    "cifar100-coarse": CIFAR,
    "tiny-imagenet": {"epochs": 40, "batch_size": 256, "lr": 0.1, "noise_std": 0.025},
    "fashion-mnist": {"epochs": 20, "batch_size": 256, "lr": 0.1, "noise_std": 0.025},
}
OTHER_DATASETS = {"epochs": 40, "batch_size": 128, "lr": 0.1, "noise_std": 0.025}

# A run's name becomes part of file names, of which most disks allow 255 bytes.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}")
NAME_RULE = (
    "name must start with a letter or digit and hold at most 200 letters, digits and . _ + -"
)
NOT_UTF8 = re.compile("[\ud800-\udfff]")  # how Python spells bytes of a path that are not UTF-8
Finite = Annotated[float, Range(0)]
BelowOne = Annotated[float, Range(0, 1, below=True)]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that defines a run. What is None gets the default of the dataset.

    Args:
        dataset: A name from `splitveil datasets`, or `folder:PATH`, `npz:PATH`.
        defence: A name from `splitveil defences`; join several by `+`.
        seed: Seed of the training, 0 or more.
        name: Name of the run's folder; default `dataset-defence-sSEED`.
        epochs: Passes over the training images, 1 or more.
        device: "auto" is the GPU if there is one, else the CPU.
        data_dir: Folder of the datasets' files; default $SPLITVEIL_DATA, else the user's cache.
        runs_dir: Folder of all runs.
        net: A whole backbone with a cut, from `splitveil nets`; "auto" fits the size of the images.
        client: A client by name or SPEC, or your own as MODULE:FUNCTION; None takes `net`.
        server: What follows the client; default resnet-128, for images under 32×32 small.
        batch_size: Images per step, 2 or more.
        lr: Peak learning rate, above 0.
        schedule: Course of the learning rate: "one-cycle", or "cem" as in the CEM code.
        momentum: Of SGD, in [0, 1).
        weight_decay: Of SGD, 0 or more.
        noise_std: Standard deviation of the channel's Gaussian noise, in units of z.
        label_smoothing: Share of each label that is spread over all classes, in [0, 1).
        teacher: Folder of a trained run whose answers are learned beside the labels.
        teacher_share: Weight of the teacher's answers against the labels, in (0, 1].
        teacher_temperature: Softens both answers before they are compared, in (0, 100].
        held_out: Share of the training images kept for the attacker alone, in [0, 1).
        final: Train on train and val together, once all choices are made.
        split_seed: Seed of the split into train and val; the same for all seeds of a comparison.
        compile: Fuse the kernels on a GPU: slower to start, faster per epoch.
        precision: "float32", or "bf16" for convolutions and matrix products; "auto" is bf16 on a
            GPU, and on a CPU where it is found to pay, see `find_precision`.
        threads: CPU threads, 1 or more, at most the cores; default all cores this process may use.
        settings: The defence's own settings by name (`lambd`, `form`, …).

    >>> RunConfig(dataset="cifar10", defence="veil", seed=1).folder.name
    'cifar10-veil-s1'
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
    client: str | None = None
    server: str | None = None
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
    precision: AskedPrecision = "auto"
    threads: Annotated[int, Range(1)] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own = {key: getattr(self, key) for key in RUN_KEYS}
        for key, value in converted(own, RUN_KEYS, "setting of a run").items():
            object.__setattr__(self, key, value)  # a path as text, a whole lr as a float
        if self.teacher == "none":  # how config.toml spells None; --set uses it to drop a teacher
            object.__setattr__(self, "teacher", None)
        problems = [
            f"{key} must be valid UTF-8 for config.toml, got {value!r}; rename the file or folder"
            for key in RUN_KEYS
            if isinstance(value := getattr(self, key), str) and NOT_UTF8.search(value)
        ]
        if self.server is not None and self.client is None:
            problems.append(
                f"server is '{self.server}', but there is no client; name one with client=, or "
                "give a whole backbone with net="
            )
        if self.client is not None and self.net not in ("auto", self.pair):
            problems.append(
                f"client is '{self.client}' and net is '{self.net}', but a run has either a client "
                "and a server, or a whole net with a cut; drop one"
            )
        if self.name is not None and not NAME.fullmatch(self.name):
            problems.append(f"{NAME_RULE}, got '{self.name}'")
        check_ranges(self, *problems)

    @property
    def pair(self) -> str:
        """How a client and its server are called together, in records and tables."""
        return f"{self.client}/{self.server}"

    @property
    def folder(self) -> Path:
        """Folder of the run, below `runs_dir`."""
        stem = re.sub(r"[^A-Za-z0-9._+-]+", "-", f"{self.dataset}-{self.defence}-s{self.seed}")
        return Path(self.runs_dir) / (self.name or stem)


RUN_KEYS = {k: v for k, v in field_types(RunConfig).items() if k != "settings"}


def defaults_for(config: RunConfig) -> Mapping[str, Any]:
    """Default epochs, batch size, learning rate and noise of the run's dataset, by setting."""
    return DATASET_DEFAULTS.get(config.dataset.partition(":")[0], OTHER_DATASETS)


# Other names of settings, all of the same number.
ALIASES = {"reg_strength": "noise_std", "lambda": "lambd", "λ": "lambd"}


def own_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, those with a name of `ALIASES` renamed.

    >>> own_names({"lambda": 0.3, "seed": 1})
    {'lambd': 0.3, 'seed': 1}
    """
    renamed: dict[str, Any] = {}
    for key, value in options.items():
        own = ALIASES.get(key, key)
        if own in renamed:
            others = " and ".join(name for name in options if ALIASES.get(name, name) == own)
            raise ConfigError(f"{others} are the same number; give only one")
        renamed[own] = value
    return renamed


PLACES = ("data_dir", "runs_dir")  # settings that do not change a result
ROUNDING = ("threads",)  # settings that change no more than its last bits
