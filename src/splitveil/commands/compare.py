"""`splitveil compare`: rows of records side by side."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer


def given_path(text: str) -> Path:
    """A path of the command line; an empty one, of a variable that is not set, is no folder."""
    if not text.strip():
        raise typer.BadParameter("got an empty path; name a run folder, a record, or . for here")
    return Path(text)


def refuse_shared(files: Mapping[str, Path | None]) -> None:
    """Refuse a file that two options name: one would replace the other."""
    from splitveil.errors import ConfigError

    options: dict[str, list[str]] = {}
    for option, path in files.items():
        if path is not None:
            options.setdefault(os.path.realpath(path), []).append(option)
    for named in options.values():
        if len(named) > 1:
            raise ConfigError(
                f"{' and '.join(named)} name one file, {files[named[0]]}, and one would replace "
                "the other; give each a file of its own"
            )


def compare(  # noqa: PLR0917 - every option of the command, as typer wants them
    paths: Annotated[
        list[Path],
        typer.Argument(parser=given_path, help="Run folders, records, or folders of them."),
    ],
    published: Annotated[
        Path | None, typer.Option(help="JSON of published rows to stand beside ours.")
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(help="Only rows with KEY OP VALUE; join several by 'and', or give it again."),
    ] = None,
    sort: Annotated[
        str | None, typer.Option(help="Sort by these columns, a minus for descending: -mse.")
    ] = None,
    columns: Annotated[
        str | None, typer.Option(help="Show these columns, with commas between.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(help="Differences of all rows to this one, seed by seed; filters keep it."),
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--md", help="Write the whole tables here as Markdown.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", help="Write every number here without rounding.")
    ] = None,
    latex: Annotated[
        Path | None, typer.Option("--latex", help="Write the tables here for LaTeX (booktabs).")
    ] = None,
    json_: Annotated[
        bool, typer.Option("--json", help="Print JSON: keys and numbers of --csv.")
    ] = False,
) -> None:
    """Compare audited runs: one row per defence, mean ± sd over its seeds, and differences.

    Columns and filters go by these names: row, defence, dataset, net, aux, profile, by, seeds,
    accuracy, mse, ssim, psnr, worst, leakage, rate, macs, params, wire, seconds, flags, remark,
    epochs, lambd, noise, ceiling, rec-accuracy, ssim-zeropad, reported-accuracy, reported-mse.
    Accuracies are shares: `accuracy>=.9` is `accuracy>=90%`. A text may hold a star: `net=thin-*`.
    A remark says what makes an audit less than a standard one of test images.

    Example: `splitveil compare results/cifar10 --published results/published.json`

    Example: `splitveil compare results/digits --where "accuracy>=.99" --sort -mse --against none`
    """
    from splitveil import comparing, unrounded
    from splitveil.console import show_json, show_table, warn
    from splitveil.report import compare as tables
    from splitveil.report.choosing import View, chosen, parse_filters, parse_order
    from splitveil.report.exchange import csv_text
    from splitveil.report.exchange import latex as latex_table
    from splitveil.report.fields import finite
    from splitveil.report.page import put
    from splitveil.report.published import elsewhere
    from splitveil.report.quantities import parse_columns
    from splitveil.report.tracks import dataset_of, tracks

    refuse_shared({"--published": published, "--md": markdown, "--csv": csv, "--latex": latex})
    view = View(
        where=tuple(one for text in where or [] for one in parse_filters(text)),
        sort=() if sort is None else parse_order(sort),
        columns=None if columns is None else parse_columns(columns),
        against=against,
    )
    beside = {} if published is None else tables.read_published(published)
    found = chosen(tables.find_records(paths), view, beside)
    shown = not json_ or markdown is not None or latex is not None
    sheets = comparing.sheets(found, beside, view) if shown else []
    if markdown is not None:
        put(markdown, "\n".join(sheet.markdown() for sheet in sheets).encode())
    if csv is not None:
        put(csv, csv_text(unrounded.plain_rows(found, beside, view)).encode())
    if latex is not None:
        put(latex, "\n".join(latex_table(sheet) for sheet in sheets).encode())
    if json_:
        show_json(finite(unrounded.plain_tables(found, beside, view)))
    else:
        for sheet in sheets:
            show_table(sheet.title, *sheet.brief())
    for track in tracks(found.groups):
        if against is not None and against not in {group.name for group in track.groups}:
            warn(f"{track.title}: no differences, for it has no row {against}")
    datasets = {dataset_of(group) for group in found.groups}
    for line in (*elsewhere(beside, datasets), *tables.warnings(found)):
        warn(line)
