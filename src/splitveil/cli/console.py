"""What the commands share: writing pages, showing tables."""

from pathlib import Path
from typing import Any


def last_epoch(folder: Path) -> dict[str, Any]:
    """The last epoch's line of a run's log; empty before the first."""
    from splitveil.report.files import read_run

    lines = [m for m in read_run(folder, audited=False).metrics if m.get("kind") == "epoch"]
    return dict(lines[-1]) if lines else {}


def write_page(runs: list[Path], folder: Path) -> Path:
    """Write the report of some runs; returns the page's path."""
    from splitveil.report.files import read_run
    from splitveil.report.page import ReportContent, write_report

    return write_report(ReportContent(runs=[read_run(path) for path in runs]), folder)[0]


def show_runs(paths: list[Path], *, json_: bool) -> None:
    """Print one row per audited run, or their records."""
    from splitveil.console import show_json, show_table
    from splitveil.report.columns import SUMMARY
    from splitveil.report.files import read_run

    runs = [read_run(path) for path in paths]
    if json_:
        show_json({str(run.path): run.record for run in runs})
    else:
        show_table("Accuracy, and what the attacker got", *SUMMARY.brief(runs))


def show_audit(folder: Path, flags: list[dict[str, Any]], page: Path) -> None:
    """Print what the attacks got, the summary, and every flag."""
    from splitveil.console import out, show_table, warn
    from splitveil.report.columns import ATTACKS, attack_rows
    from splitveil.report.files import read_run

    show_table(f"Attacks on {folder}", *ATTACKS.brief(attack_rows([read_run(folder)])))
    show_runs([folder], json_=False)
    for flag in flags:
        warn(f"flag: {flag['name']}: {flag['seen']}; {flag['advice']}")
    out.print(f"page: {page}", highlight=False, soft_wrap=True)


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
