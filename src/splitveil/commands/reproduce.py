"""The command that runs a published experiment."""

from pathlib import Path
from typing import Annotated, Any

import typer


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
    runs_dir: Annotated[str | None, typer.Option(help="Where its runs go.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Run a published experiment, row by row, and print its table beside what was reported.

    Hours on one GPU. What was finished before is not repeated; an interrupted row continues.

    Example: `splitveil reproduce seed-003 --only cem --only gated-att`
    """
    from splitveil.config import find_profile
    from splitveil.console import out, progress_bar, setup_logging, show_json, show_table
    from splitveil.reproduce import chosen_rows, find_experiment, run_row, table
    from splitveil.runs import prepare_process
    from splitveil.train.files import write_text
    from splitveil.types import Progress

    prepare_process()
    setup_logging()
    found = find_experiment(experiment)
    find_profile(profile)  # a typing error must not cost a training
    folder = runs_dir or f"runs/{experiment}-s{seed}"
    given: dict[str, Any] = {
        "seed": seed, "epochs": epochs, "dataset": dataset, "device": device,
        "data_dir": data_dir, "runs_dir": folder,
    }  # fmt: skip
    options = {k: v for k, v in given.items() if v is not None}
    if dataset is not None:
        options["net"] = "auto"
    records: dict[str, Any] = {}
    for row in chosen_rows(found, only or []):
        with progress_bar(f"{row:<24}") as bar:

            def told(what: str, bar: Progress = bar) -> Progress:
                def told_of(done: int, total: int, note: str = "") -> None:
                    bar(done, total, f"{what.partition(' ')[0]} {note}")

                return told_of

            run = run_row(found, row, options, profile, told)
        assert run.record is not None  # noqa: S101 - run_row audits
        records[row] = run.record.to_dict()
    sheet = table(found, records)
    page = Path(folder) / "table.md"
    write_text(page, sheet.markdown())
    if json_:
        show_json(sheet.to_dict())
        return
    show_table(sheet.title, *sheet.brief())
    out.print(f"table: {page}", highlight=False, soft_wrap=True)
