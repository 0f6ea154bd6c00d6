"""What the commands share: writing pages, showing tables."""

from pathlib import Path
from typing import Annotated, Any

import typer

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Dataset = Annotated[str | None, typer.Option(help="See `splitveil datasets`.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the runs.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda.")]
DataDir = Annotated[str | None, typer.Option(help="Where datasets lie.")]
RunsDir = Annotated[str | None, typer.Option(help="Folder that holds the runs (default: runs).")]


def last_epoch(folder: Path) -> dict[str, Any]:
    """The last epoch's line of a run's log; empty before the first."""
    from splitveil.report import read_run

    lines = [m for m in read_run(folder, audited=False).metrics if m.get("kind") == "epoch"]
    return dict(lines[-1]) if lines else {}


def write_page(runs: list[Path], folder: Path) -> Path:
    """Write the report of some runs; returns the page's path."""
    from splitveil.report import ReportContent, read_run, write_report

    return write_report(ReportContent(runs=[read_run(path) for path in runs]), folder)[0]


def show_runs(paths: list[Path], *, json_: bool) -> None:
    """Print one row per audited run, or their records."""
    from splitveil.console import show_json, show_table
    from splitveil.report import read_run
    from splitveil.report.columns import SUMMARY

    runs = [read_run(path) for path in paths]
    if json_:
        show_json({str(run.path): run.record for run in runs})
    else:
        show_table("Accuracy, and what the attacker got", *SUMMARY.brief(runs))


def given_run(run: Path | None) -> Path:
    """The folder named on the command line; a run is needed."""
    from splitveil.errors import ConfigError

    if run is None:
        raise ConfigError("which run? give its folder, for example: splitveil audit runs/first")
    return run


def show_audit(folder: Path, flags: list[dict[str, Any]], page: Path) -> None:
    """Print what the attacks got, the summary, and every flag."""
    from splitveil.console import out, show_table, warn
    from splitveil.report import read_run
    from splitveil.report.columns import ATTACKS, attack_rows

    show_table(f"Attacks on {folder}", *ATTACKS.brief(attack_rows([read_run(folder)])))
    show_runs([folder], json_=False)
    for flag in flags:
        warn(f"flag: {flag['name']}: {flag['seen']}; {flag['advice']}")
    out.print(f"page: {page}", highlight=False, soft_wrap=True)


def replay(run: Path | None, record: Path, *, json_: bool) -> None:
    """Measure a record again; exit code 1 when a number differs."""
    from splitveil import load_run
    from splitveil.console import out, progress_bar, show_json
    from splitveil.replay import read_record
    from splitveil.replay import replay as again

    known = read_record(record)
    loaded = load_run(record.parent if run is None else run)
    with progress_bar("replay") as bar:
        found = again(loaded, known, bar)
    if json_:
        show_json({"record": str(record), "differences": found})
    elif found:
        for line in found:
            out.print(line, highlight=False, markup=False, soft_wrap=True)
        out.print(f"{len(found)} differences", highlight=False)
    else:
        out.print("every number is the same, bit for bit", highlight=False)
    if found:
        raise typer.Exit(1)


def show_catalogue(title: str, entries: dict[str, str], *, json_: bool) -> None:
    """Print names and what they stand for."""
    from splitveil.console import show_json, show_table

    if json_:
        show_json(entries)
    else:
        show_table(title, ["name", "what it is"], [list(item) for item in entries.items()])


def print_lines(*lines: str) -> None:
    """Print on stdout without a box, which would fold long names: a client stays on its line."""
    from splitveil.console import out

    for line in lines:
        out.print(line, highlight=False, markup=False, soft_wrap=True)
