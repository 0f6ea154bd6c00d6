"""A run's names become objects here, once: `resolve(config, dataset)` gives its `Plan`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from splitveil.attacks.decoder import fused
from splitveil.attacks.profiles import PROFILES
from splitveil.config.run_config import RUN_KEYS, RunConfig, one_noise_name, recipe_of
from splitveil.config.settings import checked, refuse_fields
from splitveil.data.catalogue import DATASETS
from splitveil.data.dataset import Dataset
from splitveil.defences.base import Defence
from splitveil.defences.catalogue import find_defence
from splitveil.errors import ConfigError, unknown
from splitveil.nets.backbones import client_net
from splitveil.nets.catalogue import NETS, Net, cut_elsewhere
from splitveil.nets.clients import CLIENT_PREFIX, parse_client
from splitveil.nets.split import SplitModel, cut, with_channel
from splitveil.rng import derive_seed, seeded_globals
from splitveil.threat import Attack, Json

SMALL_SIDE = 32  # images under this go through the small net


ANY_WIRE = 512  # numbers: a penalty's settings are sound for one size or for none


DEVICES = ("auto", "cpu", "cuda")


FLOORS = ("mean", "class-mean")  # every audit has them: they cost nothing


Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Built:
    """What a run folder must remember of its data to rebuild the model without them."""

    image_shape: Shape
    num_classes: int
    data_hash: str


@dataclass(frozen=True)
class Parts:
    """What a run trains: the model, and what a defence sets beside it."""

    model: SplitModel
    surrogate: nn.Module | None
    companion: nn.Module | None


@dataclass(frozen=True)
class Plan:
    """A run that can be built: its settings, its defence, and the sizes of its data.

    Args:
        config: The run's settings.
        defence: The defence with the run's settings applied.
        image_shape: Channels, height and width of the images; None until the data are known.
        num_classes: How many classes they have.
    """

    config: RunConfig
    defence: Defence
    image_shape: Shape | None = None
    num_classes: int = 0

    def on(self, dataset: Dataset) -> "Plan":
        """The same run on these data, with nothing left to defaults."""
        config, recipe, net = self.config, recipe_of(self.config), self.config.net
        if net == "auto":
            small = min(dataset.image_shape[1:]) < SMALL_SIDE
            net = "small" if small else self.defence.client
        filled = replace(
            config,
            name=config.folder.name,
            epochs=recipe.epochs if config.epochs is None else config.epochs,
            batch_size=recipe.batch_size if config.batch_size is None else config.batch_size,
            lr=recipe.lr if config.lr is None else config.lr,
            noise_std=noise_of(config, self.defence),
            net=net,
            device=find_device(config.device),
        )
        return Plan(filled, self.defence, dataset.image_shape, dataset.num_classes)

    def build(self) -> Parts:
        """Model, surrogate and companion, each from its own stream: one never changes another."""
        seed, noise_std = self.config.seed, self.config.noise_std or 0.0
        with seeded_globals(derive_seed(seed, "init/model")):
            model = self.build_model()
        wire = model.wire_floats(self._shape)
        with seeded_globals(derive_seed(seed, "init/surrogate")):
            surrogate = self.defence.surrogate(wire, self.num_classes, noise_std)
        with seeded_globals(derive_seed(seed, "init/companion")):
            companion = self.defence.companion(model, self._shape, self.num_classes)
        return Parts(model, surrogate, companion)

    def build_model(self) -> SplitModel:
        """The split model alone, freshly initialised from torch's global stream."""
        net = find_net(self.config.net)
        model = cut(net.build(self._shape, self.num_classes), net.cut_at)
        model.encoder = self.defence.encoder(model.encoder, model.wire_shape(self._shape))
        channel = self.defence.channel(self.config.noise_std or 0.0)
        return with_channel(model, channel, self._shape)

    def settings(self) -> Json:
        """The run's and the defence's settings in one flat table."""
        run = {k: v for k, v in asdict(self.config).items() if k != "settings" and v is not None}
        return run | self.defence.settings()

    @property
    def _shape(self) -> Shape:
        if self.image_shape is None:
            raise ConfigError("this run knows no data yet; resolve it with its dataset")
        return self.image_shape


def resolve(config: RunConfig, dataset: Dataset | None = None) -> Plan:
    """The plan of a run: validated, its defence built, the only one there is.

    Without a dataset, what does not depend on one is validated, so that none is fetched for a run
    that cannot be; `Plan.on` adds it.
    """
    plan = Plan(config, build_defence(config))
    validate(plan)
    return plan if dataset is None else plan.on(dataset)


def plan_of(config: RunConfig, image_shape: Shape, num_classes: int) -> Plan:
    """The plan of a run that was resolved before, say one read from its folder."""
    return Plan(config, build_defence(config), image_shape, num_classes)


def validate(plan: Plan) -> None:
    """Refuse what does not depend on the data.

    The penalty is made once, for a wire of any size, to hear what it says of its settings.
    """
    config, defence = plan.config, plan.defence
    key = config.dataset.partition(":")[0]
    if key not in DATASETS:
        raise ConfigError(unknown("dataset", key, DATASETS))
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


def make_config(options: Mapping[str, Any]) -> RunConfig:
    """A `RunConfig` from flat keys, the run's and the defence's mixed.

    `reg_strength`, the reference documents' name of the channel's noise, is accepted for
    `noise_std`.
    """
    options = one_noise_name(options)
    name = str(options.get("defence", RunConfig.defence))
    own = preset(name).setting_types()
    good = checked(options, {**own, **RUN_KEYS}, f"setting for defence '{name}'")
    run = {k: v for k, v in good.items() if k in RUN_KEYS}
    return RunConfig(**run, settings={k: v for k, v in good.items() if k in own})


def preset(name: str) -> Defence:
    """The defence of this name; refuses one whose settings a flat file would not give back."""
    found = find_defence(name)
    taken = (*RUN_KEYS, "reg_strength")
    refuse_fields(found.settings(), found.setting_types(), taken, f"defence '{name}'")
    return found


def build_defence(config: RunConfig) -> Defence:
    """The run's defence, with its settings applied."""
    found = preset(config.defence)
    what = f"setting for defence '{config.defence}'"
    return found.with_settings(checked(config.settings, found.setting_types(), what))


def noise_of(config: RunConfig, defence: Defence) -> float:
    """The channel's noise: as given, else the dataset's; none where the defence adds none."""
    given = recipe_of(config).noise_std if config.noise_std is None else config.noise_std
    return given if defence.noisy else 0.0


def flat_config(config: RunConfig) -> Json:
    """The run's and the defence's settings in one flat table."""
    return Plan(config, build_defence(config)).settings()


def planned_steps(config: RunConfig, images: int) -> int:
    """Steps of a resolved run that is trained on so many images to its end.

    >>> planned_steps(RunConfig(epochs=3, batch_size=128), 1000)
    21
    """
    return (config.epochs or 1) * (images // min(config.batch_size or images, images))


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


def find_device(name: str) -> Literal["cpu", "cuda"]:
    """`auto` is the GPU where there is one."""
    if name not in DEVICES:
        raise ConfigError(unknown("device", name, DEVICES))
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' was asked for but torch sees no GPU; use --device cpu")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"
