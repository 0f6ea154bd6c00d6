"""`resolve(config)` gives a `Plan`: settings checked, every name looked up, once per run."""

import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from splitveil.config.recipes import check_recipe, find_recipe, known_settings
from splitveil.config.run_config import RUN_KEYS, RunConfig, defaults_for, one_noise_name
from splitveil.config.settings import (
    check_settable,
    converted,
    parse_pairs,
    read_toml,
    write_toml,
)
from splitveil.data.catalogue import DATASETS
from splitveil.data.dataset import Dataset, fingerprint
from splitveil.defences.base import Defence, PenaltyPlan
from splitveil.defences.catalogue import find_defence
from splitveil.errors import ConfigError, unknown
from splitveil.io import Json
from splitveil.nets.catalogue import NETS, find_net
from splitveil.nets.split import SplitModel, cut, with_channel
from splitveil.rng import derive_seed, seeded_globals

SMALL_SIDE = 32  # images under this go through the small net
ANY_WIRE = 512  # numbers: a penalty's settings are sound for one size or for none
DEVICES = ("auto", "cpu", "cuda")
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class DataFacts:
    """What a run folder must remember of its data to rebuild the model without them."""

    image_shape: Shape
    num_classes: int
    data_hash: str


@dataclass(frozen=True)
class TrainParts:
    """What a run trains: the model, what a defence sets beside it, and how its penalty acts."""

    model: SplitModel
    surrogate: nn.Module | None = None
    companion: nn.Module | None = None
    penalty: PenaltyPlan = field(default_factory=PenaltyPlan)


@dataclass(frozen=True)
class Plan:
    """A run that can be built: its settings, its defence, and the sizes of its data.

    Args:
        config: The run's settings.
        defence: The defence with the run's settings applied.
        built: What is known of its data; None until they are known.
    """

    config: RunConfig
    defence: Defence
    built: DataFacts | None = None

    @property
    def folder(self) -> Path:
        """Where the run lives."""
        return self.config.folder

    def on(self, dataset: Dataset) -> "Plan":
        """The same run on these data, with nothing left to defaults."""
        config, recipe, net = self.config, defaults_for(self.config), self.config.net
        built = DataFacts(dataset.image_shape, dataset.num_classes, fingerprint(dataset))
        if net == "auto":
            small = min(built.image_shape[1:]) < SMALL_SIDE
            net = "small" if small else self.defence.client
        filled = replace(
            config,
            name=self.folder.name,
            epochs=recipe.epochs if config.epochs is None else config.epochs,
            batch_size=recipe.batch_size if config.batch_size is None else config.batch_size,
            lr=recipe.lr if config.lr is None else config.lr,
            noise_std=noise_of(config, self.defence),
            net=net,
            device=find_device(config.device),
        )
        return Plan(filled, self.defence, built)

    def build(self) -> TrainParts:
        """Model, surrogate and companion, each from its own stream: one never changes another."""
        seed, noise_std, data = self.config.seed, self.config.noise_std or 0.0, self.data
        with seeded_globals(derive_seed(seed, "init/model")):
            model = self.build_model()
        wire = model.wire_floats(data.image_shape)
        with seeded_globals(derive_seed(seed, "init/surrogate")):
            surrogate = self.defence.surrogate(wire, data.num_classes, noise_std)
        with seeded_globals(derive_seed(seed, "init/companion")):
            companion = self.defence.companion(model, data.image_shape, data.num_classes)
        return TrainParts(model, surrogate, companion, self.defence.penalty_plan())

    def build_model(self) -> SplitModel:
        """The split model alone, freshly initialised from torch's global stream."""
        net, data = find_net(self.config.net), self.data
        model = cut(net.build(data.image_shape, data.num_classes), net.cut_at)
        model.encoder = self.defence.encoder(model.encoder, model.wire_shape(data.image_shape))
        channel = self.defence.channel(self.config.noise_std or 0.0)
        return with_channel(model, channel, data.image_shape)

    def settings(self) -> Json:
        """The run's and the defence's settings in one flat table."""
        run = {k: v for k, v in asdict(self.config).items() if k != "settings" and v is not None}
        return run | self.defence.settings()

    def to_toml(self) -> str:
        """Text of `config.toml`: the settings, and what is known of the data."""
        return write_toml(self.settings() | asdict(self.data))

    @property
    def data(self) -> DataFacts:
        """What is known of its data, which must be known by now."""
        if self.built is None:
            raise ConfigError("this run knows no data yet; resolve it with its dataset")
        return self.built


def resolve(config: RunConfig, dataset: Dataset | None = None) -> Plan:
    """The plan of a run: validated, its defence built, the only one there is.

    Without a dataset, what does not depend on one is validated, so that none is fetched for a run
    that cannot be; `Plan.on` adds it.
    """
    plan = Plan(config, build_defence(config))
    validate(plan)
    return plan if dataset is None else plan.on(dataset)


def plan_of(config: RunConfig, built: DataFacts) -> Plan:
    """The plan of a run that was resolved before, say one read from its folder."""
    return Plan(config, build_defence(config), built)


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


def merge(
    recipe: str | None,
    file: Path | None,
    pairs: Sequence[str],
    options: Mapping[str, Any],
    *,
    saved: Mapping[str, Any] | None = None,
) -> RunConfig:
    """One configuration of several sources; each overrides those before it.

    Args:
        recipe: A recipe's name. Its run is called after it, unless it is given a name.
        file: A TOML file of settings.
        pairs: `key=value`, as `--set` takes them.
        options: Options of the command line that were given.
        saved: The flat settings of a run that is resumed; they come before all others.

    Returns:
        The configuration, not resolved.
    """
    given = {} if file is None else one_noise_name(read_toml(file))
    given |= one_noise_name(parse_pairs(pairs)) | dict(options)
    merged = dict(given)
    if recipe is not None:
        check_recipe(recipe, given)
        merged = one_noise_name(find_recipe(recipe).options) | given
        if merged.get("name") is None:
            merged["name"] = f"{recipe}-s{make_config(merged).seed}"
    if saved is not None:
        merged = {"defence": saved["defence"]} | merged
        # Settings of the saved defence alone would be unknown to another; `fit` refuses that one.
        known = known_settings(str(merged["defence"]))
        merged = {key: value for key, value in saved.items() if key in known} | merged
    return make_config(merged)


def make_config(options: Mapping[str, Any]) -> RunConfig:
    """A `RunConfig` from flat keys, the run's and the defence's mixed.

    `reg_strength`, the reference documents' name of the channel's noise, is accepted for
    `noise_std`.
    """
    options = one_noise_name(options)
    name = str(options.get("defence", RunConfig.defence))
    own = preset(name).setting_types()
    good = converted(options, {**own, **RUN_KEYS}, f"setting for defence '{name}'")
    run = {k: v for k, v in good.items() if k in RUN_KEYS}
    return RunConfig(**run, settings={k: v for k, v in good.items() if k in own})


def preset(name: str) -> Defence:
    """The defence of this name; refuses one whose settings a flat file would not give back."""
    found = find_defence(name)
    taken = (*RUN_KEYS, "reg_strength")
    check_settable(found.settings(), found.setting_types(), taken, f"defence '{name}'")
    return found


def build_defence(config: RunConfig) -> Defence:
    """The run's defence, with its settings applied."""
    found = preset(config.defence)
    what = f"setting for defence '{config.defence}'"
    return found.with_settings(converted(config.settings, found.setting_types(), what))


def noise_of(config: RunConfig, defence: Defence) -> float:
    """The channel's noise: as given, else the dataset's; none where the defence adds none."""
    given = defaults_for(config).noise_std if config.noise_std is None else config.noise_std
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


def find_device(name: str) -> Literal["cpu", "cuda"]:
    """`auto` is the GPU where there is one."""
    if name not in DEVICES:
        raise ConfigError(unknown("device", name, DEVICES))
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' was asked for but torch sees no GPU; use --device cpu")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"


def import_object(name: str, what: str, example: str = "mycode:send") -> Any:  # noqa: ANN401 - the user's own
    """What MODULE:NAME stands for; `what` asked for it.

    >>> import_object("math:sqrt", "--server")(4.0)
    2.0
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(f"{what} must be MODULE:FUNCTION, as {example}; got '{name}'")
    try:
        return pkgutil.resolve_name(name)
    except Exception as err:  # the user's module may raise anything
        raise ConfigError(
            f"cannot import '{attribute}' from '{module}': {type(err).__name__}: {err}; run "
            "this where the module lies, or install it"
        ) from err


@contextmanager
def current_folder_first() -> Iterator[None]:
    """Modules of the current folder can be imported, as under `python -m`."""
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = before


@contextmanager
def unchanged() -> Iterator[None]:
    """What changes of torch's default type, its gradients and the current folder lasts inside."""
    dtype, gradients, folder = torch.get_default_dtype(), torch.is_grad_enabled(), os.getcwd()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(gradients)
        os.chdir(folder)


def import_user_code(name: str, what: str) -> object:
    """What MODULE:FUNCTION stands for; its import may neither end this process nor change torch."""
    try:
        with unchanged():
            found: object = import_object(name, what)
    except SystemExit as err:
        raise ConfigError(
            f"'{name.partition(':')[0]}' ends the process when it is imported (exit {err.code}); "
            "put what it does as a script below: if __name__ == '__main__':"
        ) from err
    return found


def load_backbone(name: str, shape: Shape, num_classes: int) -> nn.Sequential:
    """What the user's MODULE:FUNCTION returns, which may lie in this folder."""
    if ":" not in name:
        raise ConfigError(
            f"{unknown('backbone', name, NETS)}; or give your own as MODULE:FUNCTION, as "
            "mynets:resnet"
        )
    with current_folder_first():
        make = import_object(name, "--backbone", "mynets:resnet")
        if not callable(make) or isinstance(make, nn.Module):
            raise ConfigError(f"'{name}' must be a function, got a {type(make).__name__}")
        try:
            net = make(*arguments(make, name, shape, num_classes))
        except ConfigError:
            raise
        except (Exception, SystemExit) as err:
            raise ConfigError(f"'{name}' failed: {type(err).__name__}: {err}") from err
    if not isinstance(net, nn.Sequential):
        raise ConfigError(
            f"'{name}' must return an nn.Sequential, got a {type(net).__name__}; wrap the stages: "
            "nn.Sequential(stem, stage1, …, nn.Flatten(), classifier)"
        )
    return net


def arguments(make: Callable[..., Any], name: str, shape: Shape, classes: int) -> tuple[Any, ...]:
    """(image_shape, num_classes) or nothing, whichever the function takes."""
    signature = inspect.signature(make)
    for given in ((shape, classes), ()):
        try:
            signature.bind(*given)
        except TypeError:
            continue
        return given
    raise ConfigError(f"'{name}' must take (image_shape, num_classes) or nothing, not {signature}")
