"""The first two minutes: what does a split leak, does a defence help, is the server needed?

Six rows on the small Fashion-MNIST: a tiny client alone, with a server, with two defences, with a
server that is asked only when the client is unsure, and a larger client alone. `undefended` and
`if-unsure` are one training with its own head, and one attack: only their thresholds differ.
"""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from splitveil import __version__
from splitveil.attacks.profiles import find_profile
from splitveil.audits.suite import Store
from splitveil.config.resolve import make_config, plan_of
from splitveil.errors import ConfigError
from splitveil.experiments.runner import LiveTable, Trial, Work, run_many
from splitveil.io import as_run_error, write_text
from splitveil.rng import stream
from splitveil.runs import Run, load_run
from splitveil.threat import CHUNK
from splitveil.train.state import CHECKPOINT, prefixed, read_checkpoint, write_checkpoint

DATASET = "fashion-small"
TINY, LARGER = "strided-2s2-2.2-c8", "strided-8s2-16x2.32x2-c8"
SPLIT: Mapping[str, Any] = {"client": TINY, "server": "resnet-32", "noise_std": 0.05}
ALONE: Mapping[str, Any] = {"defence": "alone", "pooling": "flatten"}
EVERYTHING, UNSURE = 1.0, 0.3  # shares of the images that are sent
ROWS: Mapping[str, Mapping[str, Any]] = {
    "tiny-alone": {**ALONE, "client": TINY},
    "undefended": {
        **SPLIT, "defence": "early-exit", "send": EVERYTHING, "own_pooling": "flatten",
    },
    "gated-att": {**SPLIT, "defence": "gated-att"},
    "veil": {**SPLIT, "defence": "veil"},
    "larger-alone": {**ALONE, "client": LARGER},
}  # fmt: skip
SHOWN = ("tiny-alone", "undefended", "gated-att", "veil", "if-unsure", "larger-alone")
EPOCHS = 12


def run_demo(
    runs_dir: str,
    profile: str = "demo",
    *,
    dataset: str = DATASET,
    epochs: int = EPOCHS,
    progress: LiveTable | None = None,
) -> list[Path]:
    """Train and audit the rows of the demo, anew each time.

    Args:
        runs_dir: Folder that gets a run for each row.
        profile: Budget of the attacks.
        dataset: What they are trained on.
        epochs: Passes over the data.
        progress: The table that shows what happens.

    Returns:
        The runs' folders, in the order in which they are shown.
    """
    find_profile(profile)  # a typing error must not cost a training
    common = {
        "dataset": dataset, "runs_dir": runs_dir, "epochs": epochs, "precision": "float32",
    }  # fmt: skip
    configs = [make_config({**common, "name": name, **row}) for name, row in ROWS.items()]
    trials = [Trial(label=str(config.name), config=config) for config in configs]
    with TemporaryDirectory(prefix="splitveil-") as kept:
        store = Store(Path(kept), __version__)  # of this one process
        work = Work(
            profile=profile, resume=False, keep_going=False, precision="float32", store=store
        )
        for trial in run_many(trials, work, progress=progress):
            if trial.label == "undefended":
                made = with_share(load_run(trial.config.folder), "if-unsure", UNSURE)
        unsure = Trial(label="if-unsure", config=made.config)
        list(run_many([unsure], replace(work, resume=True), progress=progress))
    return [Path(runs_dir) / name for name in SHOWN]


@torch.no_grad()
def with_share(run: Run, name: str, send: float) -> Run:
    """A copy of a finished run with early exit that sends another share of its images.

    Its weights are the same; its thresholds are set on the validation images as after a training.

    Args:
        run: The run.
        name: Name of the copy's folder, beside the run's; what is there is replaced.
        send: Share of the images to send, in [0, 1].
    """
    if run.model.exit is None:
        raise ConfigError(f"{run.path} has no exit rule; train it with --defence early-exit")
    settings = {**run.config.settings, "send": send}
    config = replace(run.config, name=name, settings=settings)
    rule, (dataset, splits) = run.model.exit, run.data()
    rule.policy = replace(rule.policy, send=send)
    val = dataset.labelled(splits.val)
    generator = stream(config.seed, "settle", run.victim.device)
    both = [run.model.both_answers(x, generator) for x in torch.split(val.images, CHUNK)]
    own, server = (torch.cat(answers) for answers in zip(*both, strict=True))
    rule.settle(own, server, val.labels)
    checkpoint = read_checkpoint(run.path / CHECKPOINT)
    checkpoint.tensors.update(prefixed("model", run.model.state_dict()))
    folder = config.folder
    with as_run_error(folder):
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        shutil.copy(run.path / "metrics.jsonl", folder)
    write_text(folder / "config.toml", plan_of(config, run.built).to_toml())
    write_checkpoint(folder / CHECKPOINT, checkpoint)
    return Run(folder, config, run.built, run.model)
