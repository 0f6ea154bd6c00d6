"""`resolve(config)` makes a `Plan`: it validates the settings and looks up every name, once."""

import inspect
import os
import pkgutil
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from splitveil.config.machine import check_precision, check_threads, find_precision
from splitveil.config.recipes import check_recipe, find_recipe, known_settings
from splitveil.config.run_config import (
    NAME,
    NAME_RULE,
    PLACES,
    RUN_KEYS,
    RunConfig,
    check_settable,
    converted,
    defaults_for,
    own_names,
    parse_pairs,
    read_toml,
    write_toml,
)
from splitveil.data.catalogue import DATASETS
from splitveil.data.dataset import Dataset, fingerprint
from splitveil.defences.base import Defence, PenaltyPlan
from splitveil.defences.catalogue import find_defence
from splitveil.errors import ConfigError, RunError, unknown
from splitveil.io import Json
from splitveil.nets.catalogue import (
    NETS,
    NamedClient,
    NamedServer,
    Net,
    find_client,
    find_net,
    paired,
)
from splitveil.nets.clients import CLIENT_PREFIX
from splitveil.nets.servers import find_server
from splitveil.nets.split import SplitModel, check_layout, cut, wire_shape, with_channel
from splitveil.rng import derive_seed, seeded_globals

SMALL_SIDE = 32  # pixels; net "auto" takes the small net for images with a shorter side
SMALL_SERVER, LARGE_SERVER = "small", "resnet-128"  # behind a client without a server of its own
ANY_WIRE = 512  # numbers on the wire; no setting of a penalty is valid for some sizes only
EARLIER = {"ramp": 0.0, "sparse_place": "wire"}  # for older folders, which do not name these
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class DataFacts:
    """What a run folder stores of its data, to rebuild the model without them.

    Args:
        image_shape: Channels, height and width.
        num_classes: Classes of the labels.
        data_hash: Fingerprint of images and labels; an audit refuses other data.
    """

    image_shape: Shape
    num_classes: int
    data_hash: str


@dataclass(frozen=True)
class TrainParts:
    """What a run trains.

    Args:
        model: Encoder, channel and head.
        surrogate: Computes the defence's penalty on z; None for no penalty.
        companion: Trains beside the model, as an adversary does; None for nothing.
        penalty: When and how strongly the surrogate acts.
    """

    model: SplitModel
    surrogate: nn.Module | None = None
    companion: nn.Module | None = None
    penalty: PenaltyPlan = field(default_factory=PenaltyPlan)


@dataclass(frozen=True)
class Plan:
    """A validated run: its settings, its defence, and the sizes of its data.

    Args:
        config: The run's settings.
        defence: The defence with the run's settings applied.
        built: Sizes and fingerprint of the data; None until `on` adds them.
    """

    config: RunConfig
    defence: Defence
    built: DataFacts | None = None

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.config.folder

    def on(self, dataset: Dataset) -> "Plan":
        """The same run on these data, with every default filled in."""
        config, device = self.config, find_device(self.config.device)
        built = DataFacts(dataset.image_shape, dataset.num_classes, fingerprint(dataset))
        small = min(built.image_shape[1:]) < SMALL_SIDE
        net, server = config.net, config.server
        if config.client is not None:
            server = server or (SMALL_SERVER if small else LARGE_SERVER)
            net = replace(config, net="auto", server=server).pair
        elif net == "auto":
            net = "small" if small else self.defence.client
        filled = {
            **{k: v for k, v in defaults_for(config).items() if getattr(config, k) is None},
            "name": self.folder.name,
            "noise_std": noise_of(config, self.defence),
            "net": net,
            "server": server,
            "device": device,
            "precision": find_precision(config.precision, device, built.image_shape),
        }
        return Plan(replace(config, **filled), self.defence, built)

    def build(self) -> TrainParts:
        """Model, surrogate and companion with fresh weights.

        Each is drawn from a random stream of its own, so runs of one seed with different defences
        begin with the same model.
        """
        seed, noise_std, data = self.config.seed, self.config.noise_std or 0.0, self.data
        with seeded_globals(derive_seed(seed, "init/model")):
            model = self.build_model()
            check_layout(model, data.image_shape)
        wire = model.wire_floats(data.image_shape)
        with seeded_globals(derive_seed(seed, "init/surrogate")):
            surrogate = self.defence.surrogate(wire, data.num_classes, noise_std)
        with seeded_globals(derive_seed(seed, "init/companion")):
            companion = self.defence.companion(model, data.image_shape, data.num_classes)
        return TrainParts(model, surrogate, companion, self.defence.penalty_plan())

    def build_model(self) -> SplitModel:
        """The split model alone; its weights are drawn from torch's global stream."""
        net, data = net_of(self.config), self.data
        model = cut(net.build(data.image_shape, data.num_classes), net.cut_at)
        model = self.defence.assemble(model, data.image_shape, data.num_classes)
        channel = self.defence.channel(self.config.noise_std or 0.0)
        return with_channel(model, channel, data.image_shape)

    def settings(self) -> Json:
        """Settings of the run and of its defence in one flat table."""
        run = {k: v for k, v in asdict(self.config).items() if k != "settings" and v is not None}
        return run | self.defence.settings()

    def to_toml(self) -> str:
        """Text of `config.toml`: the settings and the facts of the data."""
        return write_toml(self.settings() | asdict(self.data))

    @property
    def data(self) -> DataFacts:
        """Sizes and fingerprint of the data; raises a ConfigError before they are known."""
        if self.built is None:
            raise ConfigError("this plan has no dataset yet; call resolve(config, dataset)")
        return self.built


def resolve(config: RunConfig, dataset: Dataset | None = None) -> Plan:
    """Validate a configuration and build its defence.

    Args:
        config: The run's settings.
        dataset: Its data. Without them, everything that does not depend on the data is validated,
            before anything is downloaded; `Plan.on` adds them later.

    Returns:
        The plan; with a dataset, every default is filled in.

    Raises:
        ConfigError: An unknown name, or settings that contradict each other.

    >>> resolve(RunConfig(defence="veil", settings={"lambd": 0.5})).settings()["lambd"]
    0.5
    """
    defence = build_defence(config)
    key = config.dataset.partition(":")[0]
    if key not in DATASETS:
        raise ConfigError(unknown("dataset", key, DATASETS))
    if config.noise_std and not defence.noisy:
        noisy = "noise" if config.defence == "none" else f"noise+{config.defence}"
        raise ConfigError(
            f"defence '{config.defence}' adds no noise, but noise_std is {config.noise_std}; "
            f"drop noise_std, or use defence '{noisy}'"
        )
    # A surrogate checks its settings when it is made; the real one needs the size of the wire.
    with seeded_globals(0):
        defence.surrogate(ANY_WIRE, 2, noise_of(config, defence))
    if config.client is not None or config.net != "auto":
        net_of(config)
    if config.final and defence.needs_val:
        raise ConfigError(
            f"defence '{config.defence}' sets its threshold on validation images, but --final "
            "trains on them; leave --final out"
        )
    device = find_device(config.device)
    check_precision(config.precision, device)
    check_threads(config.threads)
    if device == "cpu" and config.compile:
        raise ConfigError("compile=true needs a GPU, but this run is on the CPU; drop compile")
    plan = Plan(config, defence)
    return plan if dataset is None else plan.on(dataset)


def plan_of(config: RunConfig, built: DataFacts) -> Plan:
    """The plan of a run that was resolved before and read back from its folder."""
    return Plan(config, build_defence(config), built)


def merge(
    recipe: str | None,
    file: Path | None,
    pairs: Sequence[str],
    options: Mapping[str, Any],
    *,
    saved: Mapping[str, Any] | None = None,
) -> RunConfig:
    """One configuration from several sources; each overrides those before it.

    Args:
        recipe: Name of a recipe. The run is named after it, unless it is given a name.
        file: A TOML file of settings.
        pairs: `key=value`, as `--set` takes them.
        options: Options that were given on the command line.
        saved: Flat settings of a resumed run; all other sources override them.

    Returns:
        The configuration, not yet resolved.
    """
    given = {} if file is None else own_names(read_toml(file))
    given |= own_names(parse_pairs(pairs)) | dict(options)
    merged = dict(given)
    if recipe is not None:
        check_recipe(recipe, given)
        merged = own_names(find_recipe(recipe).options) | given
        if merged.get("name") is None:
            merged["name"] = f"{recipe}-s{make_config(merged).seed}"
    if saved is not None:
        merged = {"defence": saved["defence"]} | merged
        # With another defence, the saved one's settings would be reported as unknown. `fit` has
        # the better message: a run cannot be resumed with another defence.
        known = known_settings(str(merged["defence"]))
        merged = {key: value for key, value in saved.items() if key in known} | merged
    return make_config(merged)


def make_config(options: Mapping[str, Any]) -> RunConfig:
    """A `RunConfig` from one flat table.

    Args:
        options: Settings of the run and of its defence by name. other names (`lambda`, or the
            documents' `reg_strength`) are those of `ALIASES`.

    >>> make_config({"defence": "veil", "seed": 1, "lambd": 0.5}).settings
    {'lambd': 0.5}
    """
    options = own_names(options)
    name = str(options.get("defence", RunConfig.defence))
    own = preset(name).setting_types()
    check_exit_settings(name, [k for k in options if k not in own and k not in RUN_KEYS])
    good = converted(options, {**own, **RUN_KEYS}, f"setting for defence '{name}'")
    run = {k: v for k, v in good.items() if k in RUN_KEYS}
    return RunConfig(**run, settings={k: v for k, v in good.items() if k in own})


def check_exit_settings(name: str, left: Iterable[str]) -> None:
    """Refuse settings of an exit rule for a defence whose net has no own head, and say which has.

    Args:
        name: The defence.
        left: Settings that it does not have.
    """
    settings = find_defence("early-exit").settings()
    if rule := next((key for key in left if key in settings), None):
        one = "early-exit" if name in ("none", "noise", "alone") else f"early-exit+{name}"
        raise ConfigError(
            f"defence '{name}' sends every image or none: its client has no own head and no exit "
            f"rule, and '{rule}' is a setting of early-exit; train with --defence {one}"
        )


def read_folder(folder: Path) -> tuple[RunConfig, DataFacts]:
    """The settings of a run folder, and what is known of its data."""
    path = folder / "config.toml"
    try:
        there = path.is_file()
    except OSError as err:  # without permission to search a folder above
        raise RunError(f"cannot look into {folder}: {err.strerror}; check the path") from err
    if not there:
        raise RunError(
            f"{folder} is not a run: it has no config.toml; `splitveil train` makes runs, "
            "by default below ./runs"
        )
    flat = read_toml(path)
    try:
        c, h, w = (int(side) for side in flat.pop("image_shape"))
        built = DataFacts((c, h, w), int(flat.pop("num_classes")), flat.pop("data_hash"))
    except (KeyError, ValueError, TypeError) as err:
        raise RunError(
            f"{path} has a missing or wrong value ({err}), so it is not from a training run; give "
            "another folder, or train again"
        ) from err
    own = preset(str(flat.get("defence", RunConfig.defence))).settings()
    flat = {key: value for key, value in EARLIER.items() if key in own} | flat
    # Before there was a choice, a GPU computed in bf16 and a CPU in float32.
    flat = {"precision": "bf16" if flat.get("device") == "cuda" else "float32"} | flat
    place = folder.resolve() if folder.name in ("", "..") else folder  # Path(".") has no name
    flat["runs_dir"], flat["name"] = str(place.parent), place.name
    if not NAME.fullmatch(place.name):
        raise RunError(
            f"cannot read the run {folder}: its {NAME_RULE}, got '{place.name}'; rename the folder"
        )
    return make_config(flat), built


def preset(name: str) -> Defence:
    """The defence of this name, before the run's settings; `config.toml` can store its settings."""
    found = find_defence(name)
    taken = (*RUN_KEYS, "reg_strength")
    check_settable(found.settings(), found.setting_types(), taken, f"defence '{name}'")
    return found


def build_defence(config: RunConfig) -> Defence:
    """The run's defence with the run's settings applied."""
    found = preset(config.defence)
    what = f"setting for defence '{config.defence}'"
    return found.with_settings(converted(config.settings, found.setting_types(), what))


def noise_of(config: RunConfig, defence: Defence) -> float:
    """Standard deviation of the channel's noise: as given, else the dataset's default."""
    given = defaults_for(config)["noise_std"] if config.noise_std is None else config.noise_std
    return float(given) if defence.noisy else 0.0


def flat_config(config: RunConfig) -> Json:
    """Settings of the run and of its defence in one flat table, defaults not filled in."""
    return Plan(config, build_defence(config)).settings()


def train_command(flat: Mapping[str, Any], name: str) -> str:
    """The command that trains a run with these settings again, where they are not the default.

    Args:
        flat: Settings of a run and of its defence, as a record has them; unknown ones are left out.
        name: Name of the new run.

    Raises:
        ConfigError: The defence is unknown, or a value has the wrong type.

    >>> train_command({"defence": "veil", "seed": 1, "epochs": 60, "lambd": 0.5}, "again")
    'splitveil train --dataset digits --defence veil --seed 1 --name again --set lambd=0.5'
    """
    known = {**preset(str(flat.get("defence", RunConfig.defence))).setting_types(), **RUN_KEYS}
    config = make_config({k: v for k, v in own_names(flat).items() if k in known})
    usual = RunConfig(dataset=config.dataset, defence=config.defence)
    default = {**flat_config(usual), **defaults_for(usual)}
    default["noise_std"] = noise_of(usual, build_defence(usual))
    own = {key: config.__dict__[key] for key in ("dataset", "defence", "seed")} | {"name": name}
    rest = {k: v for k, v in flat_config(config).items() if v != default.get(k)}
    options = {key: rest[key] for key in ("net", "epochs") if key in rest}
    words = [word for key, value in (own | options).items() for word in (f"--{key}", str(value))]
    words += ["--final"] if config.final else []
    # Where it runs, and on what, is the reader's choice.
    told = {*own, *options, *PLACES, "final", "device", "compile"}
    for key, value in rest.items():
        if key not in told:
            shown = write_toml({key: value}).strip().replace(" = ", "=", 1)
            words += ["--set", shown.replace('"', "")]
    return shlex.join(["splitveil", "train", *words])


def planned_steps(config: RunConfig, images: int) -> int:
    """Steps of a finished run on this many training images.

    >>> planned_steps(RunConfig(epochs=3, batch_size=128), 1000)
    21
    """
    return (config.epochs or 1) * (images // min(config.batch_size or images, images))


def find_device(name: str) -> Literal["cpu", "cuda"]:
    """The device of a run: "auto" is the GPU if torch sees one, else the CPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch sees no GPU; use --device cpu or auto")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"


@contextmanager
def current_folder_first() -> Iterator[None]:
    """Inside, modules of the current folder can be imported, as with `python -m`."""
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = before


@contextmanager
def unchanged() -> Iterator[None]:
    """Afterwards torch's default type and gradient mode and the current folder are as before."""
    dtype, gradients, folder = torch.get_default_dtype(), torch.is_grad_enabled(), os.getcwd()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(gradients)
        os.chdir(folder)


def import_user_code(name: str, what: str, example: str = "mycode:send") -> Any:  # noqa: ANN401 - the user's own
    """Import what MODULE:FUNCTION names; the import can neither end this process nor change torch.

    Args:
        name: A module and a name in it, joined by a colon.
        what: Which option or argument asks for it, for messages.
        example: What one could have written.

    >>> import_user_code("math:sqrt", "--server")(4.0)
    2.0
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(f"{what} must be MODULE:FUNCTION, for example {example}; got '{name}'")
    try:
        with unchanged():
            return pkgutil.resolve_name(name)
    except SystemExit as err:
        raise ConfigError(
            f"'{module}' ends the process when it is imported (exit {err.code}); "
            "move the script's own work below `if __name__ == '__main__':`"
        ) from err
    except Exception as err:  # the user's module may raise anything
        raise ConfigError(
            f"cannot import '{attribute}' from '{module}': {type(err).__name__}: {err}; "
            "run this in the module's folder, or install the module"
        ) from err


def net_of(config: RunConfig) -> Net:
    """The net of a run: its client in front of its server, or a whole backbone."""
    if config.client is None:
        return find_net(config.net)
    client, server = config.client, config.server or SMALL_SERVER
    if ":" in client and not client.startswith(CLIENT_PREFIX):
        front = NamedClient(f"client {client}", partial(_own_client, client))
    else:
        front = find_client(client)
    if ":" in server:
        return paired(front, NamedServer(f"server {server}", partial(_own_server, server)))
    return paired(front, find_server(server))


def _own_client(name: str, image_shape: Shape) -> nn.Module:
    return own_network(name, "client", (image_shape,))


def _own_server(
    name: str, wire: tuple[int, ...], image_shape: Shape, num_classes: int
) -> nn.Module:
    server = own_network(name, "server", (wire, num_classes))
    answers = wire_shape(server, wire, f"server '{name}'")
    if answers != (num_classes,):
        raise ConfigError(
            f"server '{name}' gives answers of shape {answers} for a wire of shape {wire}, "
            f"expected ({num_classes},), one logit per class"
        )
    return server


def own_network(name: str, option: str, given: tuple[Any, ...]) -> nn.Module:
    """The module that the user's MODULE:FUNCTION makes, called with `given` or with nothing."""
    if name.partition(":")[0].partition(".")[0] in sys.stdlib_module_names:
        raise ConfigError(f"{option} '{name}' is in Python's own library; name a module of yours")
    with current_folder_first():
        make = import_user_code(name, option, "mynets:net")
        if not callable(make) or isinstance(make, nn.Module):
            raise ConfigError(f"'{name}' must be a function, got a {type(make).__name__}")
        made = _called(
            make, name, given, ("(image_shape)", "(wire_shape, num_classes)")[len(given) - 1]
        )
    if not isinstance(made, nn.Module):
        raise ConfigError(f"'{name}' must return an nn.Module, got a {type(made).__name__}")
    return made


def load_backbone(name: str, shape: Shape, num_classes: int) -> nn.Sequential:
    """The network that the user's MODULE:FUNCTION makes.

    Args:
        name: A function of (image_shape, num_classes), or of nothing; its module may lie in the
            current folder.
        shape: Channels, height and width of the images.
        num_classes: Outputs of the network.
    """
    if ":" not in name:
        raise ConfigError(
            f"{unknown('backbone', name, NETS)}; or give your own as MODULE:FUNCTION, for example "
            "mynets:resnet"
        )
    with current_folder_first():
        make = import_user_code(name, "--backbone", "mynets:resnet")
        if not callable(make) or isinstance(make, nn.Module):
            raise ConfigError(f"'{name}' must be a function, got a {type(make).__name__}")
        net = _called(make, name, (shape, num_classes), "(image_shape, num_classes)")
    if not isinstance(net, nn.Sequential):
        raise ConfigError(
            f"'{name}' must return an nn.Sequential, got a {type(net).__name__}; wrap the stages: "
            "nn.Sequential(stem, stage1, …, nn.Flatten(), classifier)"
        )
    return net


def _called(make: Callable[..., Any], name: str, given: tuple[Any, ...], said: str) -> Any:  # noqa: ANN401 - the user's own
    """What the user's function returns, called with `given` (in words: `said`) or with nothing."""
    signature = inspect.signature(make)
    for arguments in (given, ()):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        try:
            return make(*arguments)
        except (Exception, SystemExit) as err:
            raise ConfigError(f"'{name}' failed: {type(err).__name__}: {err}") from err
    raise ConfigError(f"'{name}' must take {said} or nothing, not {signature}")
