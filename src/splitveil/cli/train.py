"""`splitveil train`."""

import shlex
from pathlib import Path
from typing import Annotated

from typer import Option

from splitveil.cli import console


def train(  # noqa: PLR0917 - every option of the command, as typer wants them
    dataset: console.Dataset = None,
    defence: Annotated[
        str | None, Option(help="See `splitveil defences`; join several by +.")
    ] = None,
    seed: Annotated[int | None, Option(help="Seed of the run.")] = None,
    name: Annotated[str | None, Option(help="Name of the run's folder.")] = None,
    epochs: Annotated[int | None, Option(help="Passes over the data.")] = None,
    device: console.Device = None,
    net: Annotated[
        str | None,
        Option(
            help="auto, small, vgg11, thin-…; see `splitveil clients`. NAME@N cuts vgg11, resnet20 "
            "or mobilenetv2 after entry N."
        ),
    ] = None,
    data_dir: console.DataDir = None,
    runs_dir: console.RunsDir = None,
    recipe: Annotated[
        str | None,
        Option(help="Settings by name, see `splitveil recipes`; all other options override them."),
    ] = None,
    config: Annotated[Path | None, Option(help="TOML file of settings.")] = None,
    settings: Annotated[
        list[str] | None, Option("--set", help="key=value, for example lambd=0.3.")
    ] = None,
    final: Annotated[bool, Option("--final", help="Train on train+val, once.")] = False,
    resume: Annotated[bool, Option("--resume", help="Continue where it stopped.")] = False,
    overwrite: console.Overwrite = False,
    json_: console.JsonFlag = False,
) -> None:
    """Train a split model with a defence into `runs/NAME`.

    A recipe is overridden by `--config`, that by `--set`, and that by the options; its run is
    called after it unless it has a `--name`.

    Example: `splitveil train --dataset digits --defence veil --seed 0 --name first`

    Example: `splitveil train --recipe digits-veil --seed 1`
    """
    from splitveil.record.files import last_epoch
    from splitveil.runs import fit_given

    console.setup_logging()
    given = {
        "dataset": dataset, "defence": defence, "seed": seed, "name": name, "epochs": epochs,
        "device": device, "net": net, "data_dir": data_dir, "runs_dir": runs_dir,
        "final": final or None,
    }  # fmt: skip
    options = {k: v for k, v in given.items() if v is not None}
    with console.progress_bar("train") as bar:
        run = fit_given(
            recipe, config, settings or [], options, resume=resume, overwrite=overwrite,
            progress=bar,
        )  # fmt: skip
    last = last_epoch(run.path)
    if json_:
        console.show_json({"run": str(run.path), "last_epoch": last})
        return
    val = last.get("val_accuracy")
    shown = "no validation split" if val is None else f"validation accuracy {100 * val:.2f} %"
    console.print_lines(
        f"{run.path}: {shown}; effective weight λ·w_lr·scale {last['weight']:.4g}",
        f"next: splitveil audit {shlex.quote(str(run.path))}",
    )
