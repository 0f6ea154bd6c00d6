"""The commands that read runs: `compare`, `report`, `explain`, `doctor`."""

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, BadParameter, Option

from splitveil.cli import console
from splitveil.errors import ConfigError


def given_path(text: str) -> Path:
    """A path of the command line; an empty one, of a variable that is not set, is no folder."""
    if not text.strip():
        raise BadParameter("got an empty path; name a run folder, a record, or . for here")
    return Path(text)


def refuse_shared(files: Mapping[str, Path | None]) -> None:
    """Refuse a file that two options name: one would replace the other."""
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


def refuse_former(options: Mapping[str, object], paths: list[Path]) -> None:
    """Say what to use instead of options that are gone."""
    given = [name for name, value in options.items() if value is not None]
    if given:
        named = ", ".join(f'"{path}"' for path in paths)
        raise ConfigError(
            f"{' and '.join(given)} of compare: gone. Filter, sort and choose columns with pandas: "
            f"`import splitveil as sv; sv.records([{named}]).to_frame()`"
        )


def compare(  # noqa: PLR0917 - every option of the command, as typer wants them
    paths: Annotated[
        list[Path],
        Argument(parser=given_path, help="Run folders, records, or folders of them."),
    ],
    published: console.Published = None,
    against: Annotated[str | None, Option(help="Row to compare all with, seed by seed.")] = None,
    markdown: Annotated[Path | None, Option("--md", help="Whole tables as Markdown.")] = None,
    csv: Annotated[Path | None, Option(help="File for every number, not rounded.")] = None,
    latex: Annotated[Path | None, Option(help="Tables for LaTeX (booktabs).")] = None,
    json_: Annotated[bool, Option("--json", help="Print JSON: keys and numbers of --csv.")] = False,
    where: Annotated[list[str] | None, Option(hidden=True)] = None,
    sort: Annotated[str | None, Option(hidden=True)] = None,
    columns: Annotated[str | None, Option(hidden=True)] = None,
) -> None:
    """Compare audited runs: one row per defence, mean ± sd over its seeds, and differences.

    --csv and --json hold these: row, defence, dataset, net, aux, profile, by, seeds, accuracy, mse,
    ssim, psnr, worst, leakage, rate, macs, params, wire, seconds, flags, remark, epochs, lambd,
    noise, ceiling, rec-accuracy, ssim-zeropad, reported-accuracy, reported-mse. Accuracies are
    shares. A remark says what makes an audit less than a standard one of test images. To filter and
    sort in Python, `sv.records(paths).to_frame()` gives a pandas data frame.

    Example: `splitveil compare results/cifar10 --published results/published.json`

    Example: `splitveil compare results/digits --against none --csv digits.csv`
    """
    from splitveil.io import finite, put
    from splitveil.record.groups import dataset_of, find_records
    from splitveil.report.columns import elsewhere, read_published
    from splitveil.report.comparison import compare_records, warnings
    from splitveil.table import csv_text

    refuse_former({"--where": where, "--sort": sort, "--columns": columns}, paths)
    refuse_shared({"--published": published, "--md": markdown, "--csv": csv, "--latex": latex})
    beside = {} if published is None else read_published(published)
    found = find_records(paths)
    made = compare_records(found, beside, against)
    tables = [pair for comparison in made for pair in comparison.tables()]
    if markdown is not None:
        put(markdown, "\n".join(t.render(rows, "markdown") for t, rows in tables).encode())
    if csv is not None:
        put(csv, csv_text([row for comparison in made for row in comparison.exact()]).encode())
    if latex is not None:
        put(latex, "\n".join(t.render(rows, "latex") for t, rows in tables).encode())
    if json_:
        console.show_json(finite([table for comparison in made for table in comparison.to_dicts()]))
    else:
        for table, rows in tables:
            console.show_table(table.title, *table.brief(rows))
    for comparison in made:
        if against is not None and against not in {g.name for g in comparison.track.groups}:
            console.warn(f"{comparison.track.title}: no differences, for it has no row {against}")
    datasets = {dataset_of(group) for group in found.groups}
    for line in (*elsewhere(beside, datasets), *warnings(found)):
        console.warn(line)


def doctor(
    run: console.RunFolder,
    plain: Annotated[Path | None, Option(help="Undefended run (default: one beside it).")] = None,
    json_: console.JsonFlag = False,
) -> None:
    """Read a run's log and say what to turn, and how far.

    Example: `splitveil doctor runs/first`
    """
    from splitveil.insight.diagnosis import RULES, diagnose, read_case

    findings = diagnose(read_case(run, plain))
    told = [asdict(finding) for finding in findings]
    lines = [f"{run}: nothing to mend" if not findings else f"{run}: {len(findings)} to mend"]
    for at, finding in enumerate(findings, start=1):
        lines += [f"{at}. {finding.name}", f"   seen: {finding.seen}", f"   do: {finding.advice}"]
    found = {"run": str(run), "rules": list(RULES), "findings": told}
    console.show_result(found, *lines, json_=json_)


def explain(
    run: console.RunFolder,
    out_dir: console.OutFolder = None,
    json_: console.JsonFlag = False,
) -> None:
    """Draw what a run's defence looks at and what it does: `explain.html` and its pictures.

    They go to the run's folder without `--out`.

    Example: `splitveil explain runs/first --out page`
    """
    console.start()
    from splitveil.insight.explanation import explain_run

    paths, numbers = explain_run(run, out_dir)
    found = {"run": str(run), "files": [str(path) for path in paths], "numbers": numbers}
    console.show_result(found, f"page: {paths[0]}", json_=json_)


def report(  # noqa: PLR0917 - every option of the command, as typer wants them
    runs: Annotated[list[Path], Argument(help="Folders of audited runs.")],
    out_dir: console.OutFolder = None,
    lang: Annotated[str, Option(help="Language of the page: en or zh.")] = "en",
    title: Annotated[str | None, Option(help="Title of the page.")] = None,
    slides: Annotated[
        bool, Option("--slides", help="Also slides.html: arrow keys turn them.")
    ] = False,
    published: console.Published = None,
    json_: console.JsonFlag = False,
) -> None:
    """Build one page with tables and pictures from audited runs.

    The page goes to the first run's folder without `--out`. A folder that is broken or is no run is
    named and left out. Beside the page: every figure as PNG and SVG. `splitveil compare`
    writes tables as Markdown and LaTeX.

    Example: `splitveil report runs/demo/none runs/demo/veil --out page`

    Example: `splitveil report runs/demo/* --out page --lang zh --slides`
    """
    from splitveil.report.deck import write_deck
    from splitveil.report.page import read_runs, write_report

    content = read_runs(runs, lang=lang, title=title, published=published)
    for line in content.notes:
        console.warn(line)
    pages = write_report(content, out_dir or content.runs[0].path)[:1]
    if slides:
        pages.append(write_deck(content, pages[0].parent))
    console.show_runs(content.runs, json_=json_)
    if json_:
        return
    for line in content.reservations:
        console.warn(line)
    console.print_lines(*(f"page: {page}" for page in pages))
