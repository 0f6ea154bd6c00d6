"""The command `train`."""

import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from splitveil.cli import console
from splitveil.cli.audits import show_audit
from splitveil.cli.console import OptInt, OptPath, OptText
from splitveil.errors import ConfigError, RunError
from splitveil.io import Json


def train(  # noqa: PLR0917 - every option of the command, as typer wants them
    dataset: console.DatasetOption = None,
    defence: Annotated[
        OptText, Option(help="A name that `splitveil defences` lists; a+b joins two.")
    ] = None,
    seed: console.TrainingSeed = None,
    seeds: Annotated[OptText, Option(help="Several runs, one for each seed: 0,1,2.")] = None,
    name: Annotated[OptText, Option(help="Name of the run's folder.")] = None,
    epochs: Annotated[OptInt, Option(help="Passes over the data.")] = None,
    device: console.Device = None,
    precision: console.Precision = None,
    threads: console.Threads = None,
    net: console.NetOption = None,
    client: Annotated[OptText, Option(help="A client by name; in place of --net.")] = None,
    server: Annotated[OptText, Option(help="What follows the client; default resnet-128.")] = None,
    data_dir: console.DataDir = None,
    runs_dir: console.RunsDir = None,
    recipe: Annotated[OptText, Option(help="A name that `splitveil recipes` lists.")] = None,
    config: Annotated[OptPath, Option(help="TOML file of settings.")] = None,
    settings: console.SettingsOption = None,
    final: Annotated[bool, Option("--final", help="Train on the validation images, too.")] = False,
    audit: Annotated[
        OptText, Option(help="Then audit it: smoke, demo, quick, laptop, standard or paper.")
    ] = None,
    resume: Annotated[bool, Option("--resume", help="Continue the run of this name.")] = False,
    overwrite: console.Overwrite = False,
    json_: console.JsonFlag = False,
) -> None:
    """Train a split model with a defence, into the folder `runs/NAME`.

    Settings may come from several places: `--config` overrides `--recipe`, `--set` overrides both,
    and the other options override all. Without `--name` a run is called after its recipe, or its
    dataset, defence and seed. `--final` also trains on the validation images, by which settings
    are chosen: use it once, when everything is chosen. `--audit PROFILE` then does what
    `splitveil audit` does, on the test images. With `--seeds` the runs are called NAME-s0, NAME-s1,
    and so on, and `--resume` continues those that were begun.

    Example: `splitveil train --dataset digits --defence veil --seed 0 --name first`

    Example: `splitveil train --recipe digits-veil --seeds 0,1,2 --audit quick`
    """
    from splitveil.attacks.profiles import find_profile

    console.setup_logging()
    if audit is not None:
        find_profile(audit)  # an unknown one costs no training
    if seeds is not None and seed is not None:
        raise ConfigError("--seed and --seeds say the same; give one of them")
    given = {
        "dataset": dataset, "defence": defence, "seed": seed, "name": name, "epochs": epochs,
        "device": device, "precision": precision, "threads": threads, "net": net,
        "client": client, "server": server,
        "data_dir": data_dir, "runs_dir": runs_dir, "final": final or None,
    }  # fmt: skip
    options = {k: v for k, v in given.items() if v is not None}
    sources = (recipe, config, settings or [])
    if seeds is None:
        ended = _train_one(sources, options, audit, resume=resume, overwrite=overwrite, json_=json_)
        if json_:
            console.show_json(ended)
        return
    runs = []
    for each in console.seeds_of(seeds):
        named = {} if name is None else {"name": f"{name}-s{each}"}
        runs.append(
            _train_one(sources, options | {"seed": each} | named, audit, resume=resume,
                       overwrite=overwrite, json_=json_, several=True)
        )  # fmt: skip
    folders = shlex.join(run["run"] for run in runs)
    after = f"next: splitveil compare {folders}"
    console.show_result(runs, after if audit else f"{after}, after `audit`", json_=json_)


def _train_one(
    sources: tuple[str | None, Path | None, list[str]],
    options: Mapping[str, Any],
    audit: str | None,
    *,
    resume: bool,
    overwrite: bool,
    json_: bool,
    several: bool = False,
) -> Json:
    """Train a run, audit it if asked to, print what came of it; returns the same as JSON.

    Of `several` runs that are resumed, those that were not begun are trained anew.
    """
    from splitveil.config.resolve import merge
    from splitveil.insight.diagnosis import Diagnosis, diagnose, read_case
    from splitveil.record.files import last_epoch
    from splitveil.runs import fit_given

    if several and resume and not overwrite:
        resume = merge(*sources, options).folder.exists()
    with console.progress_bar("train") as bar:
        run = fit_given(*sources, options, resume=resume, overwrite=overwrite, progress=bar)
    last = last_epoch(run.path)
    findings: list[Diagnosis] = []
    with suppress(RunError):  # a broken record of an earlier audit is the audit's to replace
        findings = diagnose(read_case(run.path))
    made = {"run": str(run.path), "last_epoch": last, "doctor": [one.name for one in findings]}
    if not json_:
        doctor = f"{findings[0].seen}: {findings[0].advice}" if findings else "nothing to change"
        weight = f"effective weight λ·w_lr·scale {last['weight']:.4g}"
        console.print_lines(f"{run.path}: {_answered(last)}; {weight}", f"doctor: {doctor}")
    if audit is not None:
        with console.progress_bar("audit") as bar:
            record = run.audit(
                audit, progress=bar, precision=run.config.precision, threads=run.config.threads
            )
        if json_:
            from splitveil.report.page import write_page

            write_page([run.path], run.path)
            return made | {"record": record.to_dict()}
        show_audit(run.path, record, json_=False)
    elif not (json_ or several):
        console.print_lines(f"next: splitveil audit {shlex.quote(str(run.path))}")
    return made


def _answered(last: Json) -> str:
    """How a trained run answers on the validation images, in words."""
    if last.get("val_accuracy") is None:
        return "no validation split"
    shown = f"validation accuracy {100 * last['val_accuracy']:.2f} %"
    if "val_sent" not in last:
        return shown
    return (
        f"{shown} with everything sent, {100 * last['val_rule_accuracy']:.2f} % under the exit "
        f"rule, which sends {100 * last['val_sent']:.1f} %, {100 * last['val_own_accuracy']:.2f} % "
        "with nothing sent"
    )
