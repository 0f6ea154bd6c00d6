"""The command that runs a published experiment."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from splitveil.reproduce import Experiment

INTERRUPTED = 130  # exit code


def reproduce(  # noqa: PLR0917 - every option of the command, as typer wants them
    experiment: Annotated[str, typer.Argument(help="Which experiment: seed-003.")],
    only: Annotated[
        list[str] | None, typer.Option("--only", help="A row of it; give it again for others.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the runs.")] = 0,
    epochs: Annotated[int | None, typer.Option(help="Fewer epochs for a rehearsal.")] = None,
    profile: Annotated[str, typer.Option(help="Attack budget.")] = "standard",
    dataset: Annotated[str | None, typer.Option(help="Another dataset, for a rehearsal.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Where datasets lie.")] = None,
    runs_dir: Annotated[
        str | None, typer.Option(help="Where its runs go (default: runs/EXPERIMENT-sSEED).")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Run a published experiment, row by row, and print its table beside what was reported.

    Hours on one GPU. The same command again repeats nothing that was finished and continues an
    interrupted row. The table is of all rows finished in that folder with the same options.

    Example: `splitveil reproduce seed-003 --only cem --only gated-att`
    """
    from splitveil.config import find_profile
    from splitveil.console import out, setup_logging, show_error, show_json, show_table
    from splitveil.errors import CheckpointError, RunError
    from splitveil.reproduce import (
        advice,
        find_experiment,
        finished,
        folder_name,
        shown_json,
        table,
    )
    from splitveil.runs import prepare_process
    from splitveil.train.files import write_text

    prepare_process()
    setup_logging()
    found = find_experiment(experiment)
    find_profile(profile)  # a typing error must not cost a training
    folder = runs_dir or f"runs/{folder_name(experiment, seed, dataset, epochs)}"
    given: dict[str, Any] = {
        "seed": seed, "epochs": epochs, "dataset": dataset, "device": device,
        "data_dir": data_dir, "runs_dir": folder,
    }  # fmt: skip
    options = {k: v for k, v in given.items() if v is not None}
    if dataset not in (None, found.common["dataset"]):
        options["net"] = "auto"
    try:
        last = _run_rows(found, only or [], options, profile)
    except (RunError, CheckpointError) as error:
        raise type(error)(advice(error)) from error
    except KeyboardInterrupt:
        show_error("interrupted; what was complete is saved. The same command again continues")
        raise typer.Exit(INTERRUPTED) from None
    made, rows = table(found, finished(found, last, profile))
    page = Path(folder) / "table.md"
    write_text(page, made.render(rows, "markdown"))
    if json_:
        show_json(shown_json(made, rows))
        return
    show_table(made.title, *made.brief(rows))
    out.print(f"table: {page}", highlight=False, soft_wrap=True)


def _run_rows(
    experiment: "Experiment", only: list[str], options: dict[str, Any], profile: str
) -> Path:
    """Run the rows asked for with a bar each; returns the folder of the last."""
    from splitveil.console import progress_bar
    from splitveil.reproduce import chosen_rows, run_row
    from splitveil.types import Progress

    folder = Path()
    for row in chosen_rows(experiment, only):
        with progress_bar(f"{row:<24}") as bar:

            def told(what: str, bar: Progress = bar) -> Progress:
                def told_of(done: int, total: int, note: str = "") -> None:
                    bar(done, total, f"{what.partition(' ')[0]} {note}")

                return told_of

            folder = run_row(experiment, row, options, profile, told)
    return folder
