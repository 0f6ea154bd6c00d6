"""The command line: parse, one library call, print. Heavy imports happen inside the commands."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from splitveil import __version__
from splitveil.cli import audits, console, deploy, experiments, reports
from splitveil.commands import explain, lists, report
from splitveil.errors import SplitVeilError

EXIT_USER_ERROR, EXIT_INTERRUPTED = 2, 130


TOO_LARGE = ("can't allocate memory", "out of memory", "verflow")  # torch's words


def explained(error: Exception) -> str | None:
    """What to say of an error of the system that paths or sizes can cause; None of a fault of ours.

    >>> explained(FileNotFoundError(2, "No such file or directory", "x"))
    'cannot use x: No such file or directory; check the path and its permissions'
    """
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot use {error.filename}: {error.strerror}; check the path and its permissions"
    if isinstance(error, MemoryError) or any(words in str(error) for words in TOO_LARGE):
        first = next(iter(str(error).splitlines()), "MemoryError")
        return (
            f"not enough memory ({first}); choose smaller sizes, as those of batch, images, "
            "classes, hidden_dim or bank"
        )
    return None


class _Group(TyperGroup):
    """Turns errors a user can mend into a message and exit code 2, and Ctrl-C into 130."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - typer keeps a click of its own
        from splitveil.console import show_error

        try:
            return super().invoke(ctx)
        except SplitVeilError as error:
            show_error(str(error))
            ctx.exit(EXIT_USER_ERROR)
        except (OSError, MemoryError, RuntimeError, TypeError) as error:
            said = explained(error)
            if said is None:
                raise
            show_error(said)
            ctx.exit(EXIT_USER_ERROR)
        except KeyboardInterrupt:
            show_error(
                "interrupted; what was complete is saved. A training or a sweep continues with "
                "--resume, an audit by the same command"
            )
            ctx.exit(EXIT_INTERRUPTED)


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Train split networks whose smashed data gives away nothing but the answer, "
    "attack them, and report what the attacker got.",
)


JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


RunsDir = Annotated[str | None, typer.Option(help="Folder that holds the runs (default: runs).")]


def _version(asked: bool) -> bool:
    if asked:
        typer.echo(f"splitveil {__version__}")
        raise typer.Exit
    return asked


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version


def _start() -> None:
    from splitveil.console import setup_logging
    from splitveil.runs import prepare_process

    prepare_process()
    setup_logging()


app.command()(experiments.demo)


@app.command()
def train(  # noqa: PLR0917 - every option of the command, as typer wants them
    dataset: Annotated[str | None, typer.Option(help="See `splitveil datasets`.")] = None,
    defence: Annotated[
        str | None, typer.Option(help="See `splitveil defences`; join several by +.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the run.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run's folder.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    net: Annotated[
        str | None,
        typer.Option(
            help="auto, small, vgg11, thin-…; see `splitveil clients`. NAME@N cuts vgg11, resnet20 "
            "or mobilenetv2 after entry N."
        ),
    ] = None,
    data_dir: Annotated[
        str | None, typer.Option(help="Where datasets lie (default: $SPLITVEIL_DATA or a cache).")
    ] = None,
    runs_dir: RunsDir = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Settings by name, see `splitveil recipes`; all other options override them."
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file of settings.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="key=value, for example lambd=0.3.")
    ] = None,
    final: Annotated[bool, typer.Option("--final", help="Train on train+val, once.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue where it stopped.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run.")] = False,
    json_: JsonFlag = False,
) -> None:
    """Train a split model with a defence into `runs/NAME`.

    A recipe is overridden by `--config`, that by `--set`, and that by the options; its run is
    called after it unless it has a `--name`.

    Example: `splitveil train --dataset digits --defence veil --seed 0 --name first`

    Example: `splitveil train --recipe digits-veil --seed 1`
    """
    _start()
    given = {
        "dataset": dataset, "defence": defence, "seed": seed, "name": name, "epochs": epochs,
        "device": device, "net": net, "data_dir": data_dir, "runs_dir": runs_dir,
        "final": final or None,
    }  # fmt: skip
    options = {k: v for k, v in given.items() if v is not None}
    continued = resume and not overwrite  # both are refused together, by `fit`
    from splitveil.config.recipes import merge
    from splitveil.console import out, progress_bar, show_json
    from splitveil.runs import fit, saved_settings

    run_config = merge(recipe, config, settings or [], options)
    if continued:
        saved = saved_settings(run_config.folder)
        run_config = merge(recipe, config, settings or [], options, saved=saved)

    with progress_bar("train") as bar:
        run = fit(run_config, resume=resume, overwrite=overwrite, progress=bar)
    last = console.last_epoch(run.path)
    if json_:
        show_json({"run": str(run.path), "last_epoch": last})
    else:
        val = last.get("val_accuracy")
        shown = "no validation split" if val is None else f"validation accuracy {100 * val:.2f} %"
        weight = last["weight"]
        out.print(
            f"{run.path}: {shown}; effective weight λ·w_lr·scale {weight:.4g}", highlight=False
        )
        out.print(
            f"next: splitveil audit {shlex.quote(str(run.path))}", highlight=False, soft_wrap=True
        )


# `audit` itself says what to use in place of options that it no longer has.
app.command(context_settings={"ignore_unknown_options": True})(audits.audit)


app.command()(audits.audit_encoder)


app.command()(audits.audit_wire)


app.command()(audits.replay)


app.command()(report.report)


@app.command(hidden=True)
def bench() -> None:
    """Say where the benchmark of 0.1.0 went."""
    from splitveil.errors import ConfigError

    raise ConfigError(
        "`splitveil bench` left the package; run `python benchmarks/surrogate_speed.py OUT.json` "
        "in a clone of the repository"
    )


for command in (
    lists.datasets,
    lists.defences,
    lists.attacks,
    lists.recipes,
    experiments.clients,
    reports.compare,
    experiments.sweep,
    experiments.reproduce,
    explain.doctor,
    explain.explain,
    deploy.export,
    deploy.serve,
    deploy.infer,
):
    app.command()(command)


def main() -> None:
    """Entry point of the console script."""
    app()
