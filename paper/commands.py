"""The commands that make a record again, as docs/project/results/commands.md prints them."""

import json
import shlex

from splitveil.config.resolve import EARLIER
from splitveil.config.run_config import DATASET_DEFAULTS, OTHER_DATASETS, RUN_KEYS, RunConfig
from splitveil.defences.catalogue import find_defence
from splitveil.record.schema import Record

# The others need --set.
OPTIONS = ("dataset", "defence", "net", "client", "server", "epochs", "seed", "name")
PLACES = ("device", "data_dir", "runs_dir", "final")  # differ per machine; `final` is a flag
TRAINING = tuple(key for key in RUN_KEYS if key not in OPTIONS + PLACES)


def train_command(record: Record, name: str) -> str:
    """The command that trains what a record measured; it leaves out what is the default.

    The run is called `name`, because rows of two tables may have had runs of the same name.
    """
    config = {**record.config, "name": name}
    recipe = DATASET_DEFAULTS.get(config["dataset"], OTHER_DATASETS)
    preset = find_defence(config["defence"])
    usual = {key: recipe.get(key, getattr(RunConfig, key)) for key in TRAINING}
    if not preset.noisy:
        usual["noise_std"] = 0.0
    usual |= preset.settings()
    words = ["splitveil", "train"]
    for key in OPTIONS:
        if config.get(key) not in (None, "auto"):
            words += [f"--{key}", str(config[key])]
    words += ["--final"] if config.get("final") else []
    for key, value in usual.items():
        if config.get(key, EARLIER.get(key, value)) != value:
            words += ["--set", f"{key}={_plain(config.get(key, EARLIER.get(key)))}"]
    return shlex.join(words)


def _plain(value: object) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


def audit_command(record: Record, name: str) -> str:
    """The audit's command on the run `name`: the one in the record, or one from its settings."""
    audit = record.audit
    start, run = "splitveil audit ", f"runs/{name}"
    if audit.command and audit.command.startswith(f"{start}runs/"):
        return shlex.join([*shlex.split(start), run, *shlex.split(audit.command)[3:]])
    options = f"--profile {audit.profile} --aux {audit.aux} --seed {record.seeds.attack}"
    return f"{start}{run} {options}"
