"""Records to tables, pictures and one self-contained page; pure functions of a run's files."""

from splitveil.report.files import RunFiles, read_run
from splitveil.report.gather import Gathered, read_runs
from splitveil.report.page import render, write_report
from splitveil.report.tables import summary_rows

__all__ = [
    "Gathered",
    "RunFiles",
    "read_run",
    "read_runs",
    "render",
    "summary_rows",
    "write_report",
]
