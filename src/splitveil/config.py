"""The only place where strings become objects."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from splitveil.attacks import PROFILES, fused
from splitveil.data import DATASETS, Dataset
from splitveil.defences import DEFENCES, Defence, stack
from splitveil.errors import ConfigError, unknown
from splitveil.nets import NETS, Net, SplitModel, cut
from splitveil.nets.backbones import client_net
from splitveil.nets.catalogue import cut_elsewhere
from splitveil.nets.clients import CLIENT_PREFIX, parse_client
from splitveil.nets.split import with_channel
from splitveil.rng import seeded_globals
from splitveil.settings import checked, field_types, refuse_fields
from splitveil.types import Attack

SMALL_SIDE = 32  # images under this go through the small net


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a dataset is trained unless the user says otherwise."""

    epochs: int
    batch_size: int
    lr: float
    noise_std: float


RECIPES: Mapping[str, Recipe] = {
    "digits": Recipe(epochs=60, batch_size=128, lr=0.1, noise_std=0.05),
    "cifar10": Recipe(epochs=80, batch_size=512, lr=0.2, noise_std=0.025),
    "cifar100": Recipe(epochs=80, batch_size=512, lr=0.2, noise_std=0.025),
    "tiny-imagenet": Recipe(epochs=40, batch_size=256, lr=0.1, noise_std=0.025),
    "fashion-mnist": Recipe(epochs=20, batch_size=256, lr=0.1, noise_std=0.025),
}
ANY_RECIPE = Recipe(epochs=40, batch_size=128, lr=0.1, noise_std=0.025)
ANY_WIRE = 512  # numbers: a penalty's settings are sound for one size or for none

# Files are called after a run, with more around its name; most disks take 255 bytes.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}")
NOT_UTF8 = re.compile("[\ud800-\udfff]")  # how Python writes bytes of a path that are none
NAME_RULE = "name must be at most 200 letters, digits, '.', '_', '+' and '-'"
RULES: Mapping[str, tuple[str, Callable[[float], bool]]] = {  # of what is given
    "epochs": ("at least 1", lambda n: n >= 1),
    "seed": ("at least 0", lambda n: n >= 0),
    "batch_size": ("at least 2", lambda n: n > 1),
    "lr": ("a finite number > 0", lambda v: 0 < v < math.inf),
    "noise_std": ("a finite number ≥ 0", lambda v: 0 <= v < math.inf),
    "weight_decay": ("≥ 0", lambda v: 0 <= v < math.inf),
    "momentum": ("in [0, 1)", lambda v: 0 <= v < 1),
    "held_out": ("in [0, 1)", lambda v: 0 <= v < 1),
    "label_smoothing": ("in [0, 1)", lambda v: 0 <= v < 1),
    "teacher_share": ("above 0 and at most 1", lambda v: 0 < v <= 1),
    "teacher_temperature": ("above 0 and at most 100", lambda v: 0 < v <= 100),  # noqa: PLR2004
}


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
    seed: int = 0
    name: str | None = None
    epochs: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    data_dir: str | None = None
    runs_dir: str = "runs"
    net: str = "auto"
    batch_size: int | None = None
    lr: float | None = None
    schedule: Literal["one-cycle", "cem"] = "one-cycle"
    momentum: float = 0.9
    weight_decay: float = 5e-4
    noise_std: float | None = None
    label_smoothing: float = 0.0
    teacher: str | None = None
    teacher_share: float = 0.5
    teacher_temperature: float = 1.0
    held_out: float = 0.0
    final: bool = False
    split_seed: int = 0
    compile: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own = {key: getattr(self, key) for key in RUN_KEYS}
        for key, value in checked(own, RUN_KEYS, "setting of a run").items():
            object.__setattr__(self, key, value)  # a path as text, a whole lr as a float
        if self.teacher == "none":  # as `config.toml` spells it; --set overrides a file so
            object.__setattr__(self, "teacher", None)
        problems = [
            f"{key} must be {rule}, got {value}"
            for key, (rule, good) in RULES.items()
            if (value := getattr(self, key)) is not None and not good(value)
        ]
        problems += [
            f"{key} must be UTF-8, as it is written down, got {value!r}; rename the file or folder"
            for key in RUN_KEYS
            if isinstance(value := getattr(self, key), str) and NOT_UTF8.search(value)
        ]
        if self.name is not None and not NAME.fullmatch(self.name):
            problems.append(f"{NAME_RULE}, got '{self.name}'")
        if problems:
            raise ConfigError("; ".join(problems))

    @property
    def folder(self) -> Path:
        """Where the run lives."""
        stem = re.sub(r"[^A-Za-z0-9._+-]+", "-", f"{self.dataset}-{self.defence}-s{self.seed}")
        return Path(self.runs_dir) / (self.name or stem)


RUN_KEYS = {k: v for k, v in field_types(RunConfig).items() if k != "settings"}


def make_config(options: Mapping[str, Any]) -> RunConfig:
    """A `RunConfig` from flat keys, the run's and the defence's mixed.

    `reg_strength`, the seeds' name of the channel's noise, is accepted for `noise_std`.
    """
    options = one_noise_name(options)
    name = str(options.get("defence", RunConfig.defence))
    own = find_defence(name).setting_types()
    good = checked(options, {**own, **RUN_KEYS}, f"setting for defence '{name}'")
    run = {k: v for k, v in good.items() if k in RUN_KEYS}
    return RunConfig(**run, settings={k: v for k, v in good.items() if k in own})


def one_noise_name(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with `reg_strength` under the name it has here, `noise_std`."""
    options = dict(options)
    if "reg_strength" in options:
        if "noise_std" in options:
            raise ConfigError("reg_strength and noise_std are one number; give only one of them")
        options["noise_std"] = options.pop("reg_strength")
    return options


def find_defence(name: str) -> Defence:
    """The preset of this name, or the stack of the presets joined by `+`."""
    names = [name] if name in DEFENCES else name.split("+")
    for part in names:
        if part not in DEFENCES:
            raise ConfigError(unknown("defence", part, DEFENCES))
        own, taken = DEFENCES[part], (*RUN_KEYS, "reg_strength")
        refuse_fields(own.settings(), own.setting_types(), taken, f"defence '{part}'")
    parts = [(part, DEFENCES[part]) for part in names]
    return parts[0][1] if len(parts) == 1 else stack(parts)


def find_net(name: str) -> Net:
    """The net of this name; `client:SPEC` is the thin client that SPEC describes.

    A backbone's name and `@N` cut it after entry N, counted as its `cutlayer` is.

    >>> find_net("client:strided-16-16.32.64-c8").summary
    'client strided-16-16.32.64-c8'
    >>> find_net("resnet20@8").cut_at
    8
    """
    if name.startswith(CLIENT_PREFIX):
        spec = parse_client(name.removeprefix(CLIENT_PREFIX))
        return Net(f"client {spec}", partial(client_net, spec), 1)
    base, at, place = name.partition("@")
    if base not in NETS:
        raise ConfigError(unknown("net", base, [*NETS, f"{CLIENT_PREFIX}SPEC", "auto"]))
    if not at:
        return NETS[base]
    if not re.fullmatch(r"[1-9][0-9]*", place):
        raise ConfigError(
            f"a cut is a whole number from 1 on, got '{name}'; for example "
            f"{base}@{NETS[base].cut_at}, where it is cut by itself"
        )
    return cut_elsewhere(base, int(place))


def find_profile(
    name: str, *, only: Sequence[str] = (), compile: bool = False
) -> Mapping[str, Attack]:
    """The attacks of this profile with their budgets.

    `only` some of them, and the floors; `compile`: with compiled decoders.
    """
    if name not in PROFILES:
        raise ConfigError(unknown("profile", name, PROFILES))
    for wanted in only:
        if wanted not in PROFILES[name]:
            raise ConfigError(unknown(f"attack of profile '{name}'", wanted, PROFILES[name]))
    attacks = {k: v for k, v in PROFILES[name].items() if not only or k in (*only, *FLOORS)}
    return {key: fused(attack) for key, attack in attacks.items()} if compile else attacks


def build_defence(config: RunConfig) -> Defence:
    """The run's defence, with its settings applied."""
    preset = find_defence(config.defence)
    what = f"setting for defence '{config.defence}'"
    return preset.with_settings(checked(config.settings, preset.setting_types(), what))


def refuse(config: RunConfig) -> None:
    """Refuse what no data would mend, so that none is fetched for it.

    The penalty is made once, for a wire of any size, to hear what it says of its settings.
    """
    key = config.dataset.partition(":")[0]
    if key not in DATASETS:
        raise ConfigError(unknown("dataset", key, DATASETS))
    defence = build_defence(config)
    if config.noise_std and not defence.noisy:
        noisy = "noise" if config.defence == "none" else f"noise+{config.defence}"
        raise ConfigError(
            f"defence '{config.defence}' adds no noise, but noise_std is {config.noise_std}; "
            f"leave it out, or use the defence '{noisy}'"
        )
    with seeded_globals(0):
        defence.surrogate(ANY_WIRE, 2, noise_of(config, defence))
    if config.net != "auto":
        find_net(config.net)
    if find_device(config.device) == "cpu" and config.compile:
        raise ConfigError("compile=true is for a GPU, and this run is on the CPU; leave it out")


def recipe_of(config: RunConfig) -> Recipe:
    """How long, in which batches and with which noise runs on this dataset are trained."""
    return RECIPES.get(config.dataset.partition(":")[0], ANY_RECIPE)


def noise_of(config: RunConfig, defence: Defence) -> float:
    """The channel's noise: as given, else the dataset's; none where the defence adds none."""
    given = recipe_of(config).noise_std if config.noise_std is None else config.noise_std
    return given if defence.noisy else 0.0


def resolve(config: RunConfig, dataset: Dataset) -> RunConfig:
    """The same run with nothing left to defaults: recipe, net and device are filled in."""
    refuse(config)
    recipe, defence = recipe_of(config), build_defence(config)
    net = config.net
    if net == "auto":
        net = "small" if min(dataset.image_shape[1:]) < SMALL_SIDE else defence.client
    return replace(
        config,
        name=config.folder.name,
        epochs=recipe.epochs if config.epochs is None else config.epochs,
        batch_size=recipe.batch_size if config.batch_size is None else config.batch_size,
        lr=recipe.lr if config.lr is None else config.lr,
        noise_std=noise_of(config, defence),
        net=net,
        device=find_device(config.device),
    )


DEVICES = ("auto", "cpu", "cuda")
FLOORS = ("mean", "class-mean")  # every audit has them: they cost nothing


def find_device(name: str) -> Literal["cpu", "cuda"]:
    """`auto` is the GPU where there is one."""
    if name not in DEVICES:
        raise ConfigError(unknown("device", name, DEVICES))
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' was asked for but torch sees no GPU; use --device cpu")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"


def build_model(
    config: RunConfig, image_shape: tuple[int, int, int], num_classes: int
) -> SplitModel:
    """The split model of a resolved run, freshly initialised from torch's global stream."""
    net, defence = find_net(config.net), build_defence(config)
    model = cut(net.build(image_shape, num_classes), net.cut_at)
    model.encoder = defence.encoder(model.encoder, model.wire_shape(image_shape))
    return with_channel(model, defence.channel(config.noise_std or 0.0), image_shape)
