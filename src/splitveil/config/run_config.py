"""Settings of a run: `RunConfig` with ranges and defaults, and what text and TOML make of them."""

import json
import os
import re
import types
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from splitveil.config.machine import AskedPrecision
from splitveil.errors import ConfigError, Range, check_ranges, unknown
from splitveil.io import MAX_SETTINGS, parse_toml, read_text

Value = bool | int | float | str | None | list[Any]
# Python writes .5 and 5. where TOML wants 0.5 and 5.0; --set accepts both.
_SHORT = re.compile(r"[+-]?(\d+\.|\d*\.\d+)([eE][+-]?\d+)?")


def parse_pair(text: str) -> tuple[str, Value]:
    """Split `key=value`. The value is in TOML syntax, but a string needs no quotes and .5 is fine.

    Args:
        text: What follows `--set` on the command line.

    Returns:
        The key, and the value as a bool, int, float, str or list.

    >>> parse_pair("lambd=16"), parse_pair("form=hinge"), parse_pair("lambd=.5")
    (('lambd', 16), ('form', 'hinge'), ('lambd', 0.5))
    """
    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set takes key=value, got '{text}'; write for example --set lambd=0.3")
    try:
        value: Value = parse_toml(f"v = {raw.strip()}")["v"]
    except ValueError:
        value = float(raw) if _SHORT.fullmatch(raw.strip()) else raw.strip()
    return key.strip(), value


def parse_pairs(texts: Sequence[str]) -> dict[str, Value]:
    """Several `key=value` as one table; a repeated key raises a ConfigError."""
    settings: dict[str, Value] = {}
    for text in texts:
        key, value = parse_pair(text)
        if key in settings:
            raise ConfigError(f"--set {key} is given twice; keep one of them")
        settings[key] = value
    return settings


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file into a table."""
    try:
        return parse_toml(read_text(path, MAX_SETTINGS))
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"cannot read the settings file {path}: {err}; check the path") from err
    except ValueError as err:
        raise ConfigError(
            f"{path} is not valid TOML: {err}; put strings in quotes, and write a digit on each "
            "side of a decimal point (0.5, not .5)"
        ) from err


def write_toml(settings: Mapping[str, Any]) -> str:
    """Flat settings as TOML text. TOML has no null, so None is written as `"none"`.

    >>> print(write_toml({"seed": 0, "name": "a", "lr": None}), end="")
    seed = 0
    name = "a"
    lr = "none"
    """
    return "".join(f"{k} = {_toml(v)}\n" for k, v in settings.items())


def _toml(value: object) -> str:
    if value is None:
        return '"none"'
    # JSON spells strings, booleans, integers and lists as TOML does, but not inf and nan.
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def field_types(cls: type) -> dict[str, Any]:
    """Name and type of each field of a dataclass."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls)}


# Names that the reference documents use for what has another name here.
DOCUMENT_NAMES = {
    "use_attention_cem": "choose a defence by its name: gated-att, slot-cross, or none",
    "random_ini_centers": "set skip_first_epoch",
    "num_epochs": "set epochs",
    "tau": "set var_threshold, which is tau divided by the squared noise_std",
    "τ": "set var_threshold, which is τ divided by the squared noise_std",
    "warmup": "set attention_warmup_epochs",
    "tau_snr": "set snr_thresh",
    "alpha_snr": "set snr_sharp",
    "beta_sp": "set softplus_beta",
    "alpha_xattn": "it is learned from 0.1 on and cannot be set",
    "alpha_ffn": "it is learned from 0.1 on and cannot be set",
    "assign.temp": "set assign_temp",
}


def converted(settings: Mapping[str, Any], allowed: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Convert each setting to the type of its field.

    Args:
        settings: Values by name, as TOML or a caller gives them.
        allowed: Types by name, see `field_types`.
        what: What a setting is called in messages.

    Raises:
        ConfigError: One message with every unknown name and every value of a wrong type.
    """
    problems, good = [], {}
    for key, value in settings.items():
        if key not in allowed:
            known = DOCUMENT_NAMES.get(key)
            problems.append(
                f"'{key}' has another name here; {known}" if known else unknown(what, key, allowed)
            )
            continue
        try:
            good[key] = _convert(value, allowed[key])
        except ValueError as err:
            problems.append(f"{key} must be {err}, got {value!r}")
    if problems:
        raise ConfigError("; ".join(problems))
    return good


def check_settable(
    settings: Mapping[str, Any], kinds: Mapping[str, Any], taken: Collection[str], owner: str
) -> None:
    """Validate that `config.toml` can store the fields of a defence and give them back."""
    problems = [
        f"{owner} has a field '{key}', but that is a setting of every run; rename the field"
        for key in settings
        if key in taken
    ]
    problems += [
        f"{owner} has a field '{key}' of type {getattr(kind, '__name__', kind)}, which config.toml "
        "cannot store; use bool, int, float, str or Literal, or one of these or None"
        for key, kind in kinds.items()
        if not _settable(kind)
    ]
    if problems:
        raise ConfigError("; ".join(problems))
    try:
        converted(settings, kinds, "field")
    except ConfigError as err:
        raise ConfigError(f"{owner} has a default of the wrong type: {err}") from err


def _members(kind: Any) -> tuple[Any, ...]:  # noqa: ANN401 - any declared type
    """The types of a union; a type that is no union alone."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _settable(kind: Any) -> bool:  # noqa: ANN401 - any declared type
    options = [o for o in _members(kind) if o is not types.NoneType]
    simple = [o for o in options if get_origin(o) is Literal or o in (bool, int, float, str)]
    return len(options) == len(simple) == 1


def _convert(value: Any, kind: Any) -> Any:  # noqa: ANN401 - a value of any declared type
    options = _members(kind)
    # The word none means None, except where it is a legal string (a run may be called none).
    if types.NoneType in options and (value is None or (value == "none" and str not in options)):
        return None
    kind = next(o for o in options if o is not types.NoneType)
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
        raise ValueError(f"one of {', '.join(map(str, get_args(kind)))}")
    if kind is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    # Python counts bool as int; `seed=true` is a mistake all the same.
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
    raise ValueError(names.get(kind, str(kind)))


CIFAR = {"epochs": 80, "batch_size": 512, "lr": 0.2, "noise_std": 0.025}
DATASET_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "digits": {"epochs": 60, "batch_size": 128, "lr": 0.1, "noise_std": 0.05},
    "fashion-small": {"epochs": 12, "batch_size": 64, "lr": 0.1, "noise_std": 0.05},
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
        nesterov: Whether SGD looks ahead along its momentum, which must then be above 0.
        weight_decay: Of SGD, 0 or more.
        noise_std: Standard deviation of the channel's Gaussian noise, in units of z.
        label_smoothing: Share of each label that is spread over all classes, in [0, 1).
        flips: Which images an epoch mirrors, where images may be mirrored at all: "random" ones, or
            "alternating", each in every other epoch.
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
    nesterov: bool = False
    weight_decay: Finite = 5e-4
    noise_std: Finite | None = None
    label_smoothing: BelowOne = 0.0
    flips: Literal["random", "alternating"] = "random"
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
        if self.nesterov and self.momentum == 0:
            problems.append("nesterov needs a momentum above 0, got 0; set momentum=0.9")
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
