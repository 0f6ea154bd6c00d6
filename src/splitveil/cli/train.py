"""The command `train`."""

import shlex
from typing import Annotated

from typer import Option

from splitveil.cli import console
from splitveil.cli.console import OptInt, OptPath, OptText


def train(  # noqa: PLR0917 - every option of the command, as typer wants them
    dataset: console.DatasetOption = None,
    defence: Annotated[
        OptText, Option(help="A name that `splitveil defences` lists; a+b joins two.")
    ] = None,
    seed: console.TrainingSeed = None,
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
    resume: Annotated[bool, Option("--resume", help="Continue the run of this name.")] = False,
    overwrite: console.Overwrite = False,
    json_: console.JsonFlag = False,
) -> None:
    """Train a split model with a defence, into the folder `runs/NAME`.

    Settings may come from several places: `--config` overrides `--recipe`, `--set` overrides both,
    and the other options override all. Without `--name` a run is called after its recipe, or its
    dataset, defence and seed. `--final` also trains on the validation images, by which settings
    are chosen: use it once, when everything is chosen.

    Example: `splitveil train --dataset digits --defence veil --seed 0 --name first`

    Example: `splitveil train --recipe digits-veil --seed 1`
    """
    from splitveil.insight.diagnosis import diagnose, read_case
    from splitveil.record.files import last_epoch
    from splitveil.runs import fit_given

    console.setup_logging()
    given = {
        "dataset": dataset, "defence": defence, "seed": seed, "name": name, "epochs": epochs,
        "device": device, "precision": precision, "threads": threads, "net": net,
        "client": client, "server": server,
        "data_dir": data_dir, "runs_dir": runs_dir, "final": final or None,
    }  # fmt: skip
    options = {k: v for k, v in given.items() if v is not None}
    with console.progress_bar("train") as bar:
        run = fit_given(
            recipe, config, settings or [], options, resume=resume, overwrite=overwrite,
            progress=bar,
        )  # fmt: skip
    last = last_epoch(run.path)
    val = last.get("val_accuracy")
    shown = "no validation split" if val is None else f"validation accuracy {100 * val:.2f} %"
    findings = diagnose(read_case(run.path))
    doctor = f"{findings[0].seen}: {findings[0].advice}" if findings else "nothing to change"
    if "val_sent" in last:
        shown += (
            f" with everything sent, {100 * last['val_rule_accuracy']:.2f} % under the exit rule, "
            f"which sends {100 * last['val_sent']:.1f} %, {100 * last['val_own_accuracy']:.2f} % "
            "with nothing sent"
        )
    console.show_result(
        {"run": str(run.path), "last_epoch": last, "doctor": [found.name for found in findings]},
        f"{run.path}: {shown}; effective weight λ·w_lr·scale {last['weight']:.4g}",
        f"doctor: {doctor}",
        f"next: splitveil audit {shlex.quote(str(run.path))}",
        json_=json_,
    )
